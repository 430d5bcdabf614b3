# SPDX-License-Identifier: Apache-2.0
"""Frozen weights: FSDP2 must gather what they were before they were sharded.

Packed weights of quantised layers are bits under some dtype, often a floating one, and mixed
precision of FSDP2 would cast them as if they were numbers. Every later run, also one on full
sequences, would compute with the same wrong weights: only a comparison of bytes shows it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import log2, sqrt
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.data.outputs import checksum
from lightning_cp.fsdp.gathering import find_units, own_modules
from lightning_cp.private.fsdp2 import keep_dtypes
from lightning_cp.private.modules import is_made_of_tensors

_SAMPLED: Final = 1 << 20
"""Number of elements of a tensor that are compared, at least."""

_FEWEST: Final = 32
"""Number of elements of which it is asked whether they are numbers."""


class FrozenWeights:
    """The bytes of frozen weights, before they are sharded.

    Args:
        compute_dtype: to which FSDP2 casts weights that are numbers; None if it casts nothing.
    """

    def __init__(self, compute_dtype: torch.dtype | None = None) -> None:
        self._compute_dtype = compute_dtype
        self._expected: dict[tuple[nn.Module, str], Tensor] = {}

    def note(self, unit: nn.Module) -> list[tuple[nn.Module, str]]:
        """Take the checksums of a unit before it is sharded; return which weights are packed."""
        packed = []
        for part, name, x in _frozen(unit):
            dtype = x.dtype
            if is_packed(x):
                packed.append((part, name))
            elif dtype.is_floating_point and self._compute_dtype is not None:
                dtype = self._compute_dtype
            self._expected[part, name] = checksum(_sample(x).to(dtype), x.device)
        return packed

    @torch.no_grad()
    def check(self, owner: nn.Module, device: torch.device) -> None:
        """Gather each unit once; raise on all ranks if its frozen weights are others. Collective.

        Args:
            owner: with all units sharded, by us or by its user.
            device: of this rank.
        """
        names = {part: path for path, part in owner.named_modules()}
        weights, flags = [], []
        for unit in find_units(owner):
            shards = list(_frozen(unit))
            if not shards:
                continue
            unit.unshard()  # type: ignore[operator]
            for (part, name, shard), (*_, full) in zip(shards, _frozen(unit), strict=True):
                is_other = has_bits = torch.zeros((), dtype=torch.bool, device=device)
                if (part, name) in self._expected:
                    expected = self._expected[part, name].to(device)
                    is_other = checksum(_sample(full), device) != expected
                if full.dtype != shard.dtype:
                    has_bits = _is_spread_like_bits(_sample(shard)).to(device)
                path = f"{names[part]}.{name}".lstrip(".")
                weight = f"`{path}` ({shard.dtype}, gathered as {full.dtype})"
                weights.append(weight.replace("torch.", ""))
                flags.append(torch.stack([is_other, has_bits]))
            unit.reshard()  # type: ignore[operator]
        if not flags:
            return
        changes = torch.stack(flags).float()
        dist.all_reduce(changes, dist.ReduceOp.MAX)
        for weight, (other, bits) in zip(weights, changes.tolist(), strict=True):
            if other:
                raise RuntimeError(
                    f"FSDP2 gathers other bytes of the frozen {weight} than "
                    f"it had before it was sharded. {_CURE}"
                )
            if bits:
                raise ValueError(
                    f"The frozen {weight} holds packed bits, it seems: its "
                    "elements differ in magnitude as random bits do. Mixed precision of FSDP2 "
                    f"would cast them as if they were numbers. {_CURE}"
                )


_CURE: Final = (
    "Store packed weights as integers (bitsandbytes: bnb_4bit_quant_storage=torch.uint8) or in a "
    "subclass of nn.Parameter, or use Parameters(mixed_precision='autocast'). With a "
    "fully_shard() of your own, leave param_dtype out of the policy of the modules that hold them."
)


def is_packed(parameter: Tensor) -> bool:
    """Return whether a frozen floating parameter says that its elements are no numbers.

    Its class does (bitsandbytes' Params4bit), or a dtype of one byte, whose numbers need a scale.
    Classes of tensors that are made of other tensors (torchao) cast themselves.
    """
    if parameter.requires_grad or not parameter.is_floating_point():
        return False
    has_class = type(parameter) is not nn.Parameter and not is_made_of_tensors(parameter)
    return has_class or parameter.dtype.itemsize == 1


@contextmanager
def packed_stay(model: nn.Module, cause: str) -> Iterator[None]:
    """Raise if what runs inside has cast packed weights of a model that is not sharded yet.

    Args:
        model: the model.
        cause: what runs inside, for the message.
    """
    dtypes = {name: p.dtype for name, p in model.named_parameters() if is_packed(p)}
    yield
    for name, dtype in dtypes.items():
        if (present := model.get_parameter(name).dtype) != dtype:
            raise ValueError(
                f"{cause} has cast the packed weights `{name}` from {dtype} to {present} as if "
                "they were numbers. Store them as integers (bitsandbytes: "
                "bnb_4bit_quant_storage=torch.uint8), or use Trainer(precision='bf16-mixed')."
            )


def keep_packed(unit: nn.Module, packed: Iterable[tuple[nn.Module, str]]) -> None:
    """Let FSDP2 gather packed weights of a unit that it has just sharded in their own dtype."""
    keep_dtypes(unit, [part.get_parameter(name) for part, name in packed])


def _frozen(unit: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the frozen parameters of a unit, each with the module that holds it and its name."""
    for part in own_modules(unit):
        for name, x in part.named_parameters(recurse=False):
            if not x.requires_grad:
                yield part, name, x


def _sample(x: Tensor) -> Tensor:
    local = x.to_local() if isinstance(x, DTensor) else x
    flat = local.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)]


def _is_spread_like_bits(x: Tensor) -> Tensor:
    """Return whether the magnitudes of floats are spread as if their bits were random.

    Exponents of float16 that are random have a standard deviation of 9, those of float32 of 73; of
    weights, whatever their scale, of 1 to 3. The limit is half of the former.
    """
    sizes = x.double().abs()
    sizes = sizes[sizes != 0]
    if sizes.numel() < _FEWEST:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    info = torch.finfo(x.dtype)
    exponents = sizes.log2().nan_to_num(nan=log2(info.max), posinf=log2(info.max))
    return exponents.std() > (log2(info.max) - log2(info.tiny)) / sqrt(12) / 2
