# SPDX-License-Identifier: Apache-2.0
"""A `ParallelStyle` for attention modules, which plans of torch's `parallelize_module` can name.

Each call of the module opens a step of its own, from the shapes that it is called with. Attention,
routing and backward are those of any step. For users: docs/tensor-parallel.md.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_cp import active_step
from lightning_cp.comm.transport import gather
from lightning_cp.data.sharding import shard
from lightning_cp.geometry.layout import build_layout
from lightning_cp.options import check_choice
from lightning_cp.parallel import ContextParallel, run_step
from lightning_cp.step import Step
from lightning_cp.torch_private import in_backward, outside_graphs
from lightning_cp.torch_prototype import parallel_of

_NAME = "ContextParallelAttention"

# Equal calls are the same step, so that activation checkpointing may repeat one in backward.
_uids: dict[tuple[object, ...], int] = {}


class ContextParallelAttention(ParallelStyle):
    """Let the attention calls of a module see full sequences, of which each rank holds a part.

    For plans of ``parallelize_module``, and models whose tokens the caller has sharded. All ranks
    must make each call, and compare shapes in it. Inside ``cp.step(batch)``, which knows documents
    and padding and routes the attention of all modules, it changes nothing.

    Args:
        cp: the ranks that share sequences: a `ContextParallel`, or the mesh of one. The mesh of the
            plan is not used: its ranks may share heads.
        seq_dim: the sequence dim of the first tensor that the module is called with.
        layout: how the tokens were sharded, S of them over n ranks. ``contiguous``: rank r holds
            the r-th of n chunks of ceil(S / n). ``zigzag``: the r-th and the r-th from the end, of
            2 n chunks of ceil(S / 2n). The last chunks may be shorter, or empty.

    Example:
        >>> style = ContextParallelAttention(None, seq_dim=1, layout="zigzag")
        >>> module = style.apply(nn.MultiheadAttention(8, 2, batch_first=True))
        >>> module(*[torch.randn(1, 6, 8)] * 3, need_weights=False)[0].shape
        torch.Size([1, 6, 8])
    """

    def __init__(
        self,
        cp: ContextParallel | DeviceMesh | dist.ProcessGroup | None,
        *,
        seq_dim: int,
        layout: Literal["contiguous", "zigzag"],
    ) -> None:
        check_choice(f"{_NAME}(layout=...)", layout, ("contiguous", "zigzag"))
        self._cp = cp if isinstance(cp, ContextParallel) else parallel_of(cp)
        self._seq_dim, self._layout = seq_dim, layout

    def apply(self, module: nn.Module) -> nn.Module:
        """Change a module and return it, as a plan does with the modules that it names."""
        packages = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
        if packages & {"transformers", "transformers_modules"}:
            raise ValueError(
                f"{_NAME}: {type(module).__name__} is a part of a Hugging Face model, which leaves "
                "windows and documents to masks of this rank's tokens. Use hf_patches.enable(model)"
                " and cp.step(batch)."
            )
        module.forward = partial(_call, _Styled(self, module.forward))
        return module

    def __deepcopy__(self, memo: object) -> "ContextParallelAttention":
        """Return this style: copies of a module have the same ranks."""
        return self

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module)

    def build_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """Build the step of a call; what is wrong on one rank is raised on all of them."""
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.empty(()))
        sizes, dim = list(x.shape), self._seq_dim
        is_known = -x.dim() <= dim < x.dim() and not isinstance(x, DTensor)
        length = sizes.pop(dim) if is_known else -1
        given = kwargs.get("position_ids")
        has_positions = isinstance(given, Tensor)
        found = self._gather(length, zlib.crc32(repr((sizes, x.dtype, has_positions)).encode()))
        lengths = [length for length, _ in found]
        if len({other for _, other in found}) > 1 or min(lengths) < 0:
            raise ValueError(
                f"{_NAME}(seq_dim={dim}): the first tensor of a call must be this rank's part of "
                f"sequences along dim {dim}, with the same other sizes and dtype on all ranks, "
                f"all with position_ids or none; here it is a {type(x).__name__} of shape "
                f"{tuple(x.shape)}. Name a module that takes q, k, v or hidden states; for a "
                "DTensor, use_local_output=True before it."
            )
        total, size = sum(lengths), len(lengths)
        layout = build_layout(
            self._layout, seq_len=max(total, 1), cp_size=size, shows_padding=False
        )
        if lengths != (expected := [layout.tensor_len(rank) for rank in range(size)]):
            raise ValueError(
                f"{_NAME}(layout={self._layout!r}): the ranks hold {lengths} tokens, but that "
                f"layout of {total} tokens gives them {expected}. Shard sequences as the layout "
                "does, and give their dim: seq_dim."
            )
        batch_size, rank = x.shape[0] if dim % x.dim() else 1, self._cp.cp_rank
        positions = torch.arange(total, device=x.device).expand(batch_size, -1)
        positions = shard(positions, 1, layout=layout, rank=rank)
        if has_positions and [0] in self._gather(int(_are_positions(given, positions[0]))):
            raise ValueError(
                f"{_NAME}(layout={self._layout!r}): the position_ids of this call are not the "
                "positions of the tokens in this layout. Shard them like the tokens; for packed "
                "documents and padding use cp.step(batch)."
            )
        step = Step(
            layout=layout,
            groups=self._cp.groups,
            options=self._cp.options,
            batch_size=batch_size,
            documents=None,
            padding=None,
            position_ids=positions,
            training=torch.is_grad_enabled(),
        )
        key = id(self._cp), self._layout, *lengths, batch_size
        return replace(step, uid=_uids.setdefault(key, step.uid))

    def _gather(self, *numbers: int) -> list[list[int]]:
        context = self._cp.groups.context
        found: list[list[int]] = gather(
            torch.tensor(numbers, device=context.device), context
        ).tolist()
        return found


def _are_positions(given: Any, positions: Tensor) -> bool:
    is_row = given.dim() > 0 and given.shape[-1] == len(positions)
    return is_row and bool((given.to(positions.device) == positions).all())


@dataclass
class _Styled:
    """A module's forward, and whether its last call belonged to a step of others."""

    style: ContextParallelAttention
    forward: Callable[..., Any]
    was_in_step: bool = False


@outside_graphs
def _call(module: _Styled, *args: Any, **kwargs: Any) -> Any:
    """Call a module in a step, unless one is open or attention is declared unsharded."""
    if active_step.is_paused() or active_step.num_unsharded() > 0:
        return module.forward(*args, **kwargs)
    is_in_step = active_step.opened() is not None
    if not in_backward():
        module.was_in_step = is_in_step
    elif module.was_in_step != is_in_step:  # activation checkpointing
        raise RuntimeError(
            f"{_NAME}: the module ran {'inside' if module.was_in_step else 'outside'} of a cp.step "
            f"and runs again, in backward, {'inside' if is_in_step else 'outside'} of one. Call "
            "backward where forward was, or use checkpoint(..., use_reentrant=False)."
        )
    if is_in_step:
        return module.forward(*args, **kwargs)
    step = module.style.build_step(args, kwargs)
    with run_step(step):
        output = module.forward(*args, **kwargs)
    if not step.cache.has_attended:
        raise RuntimeError(
            f"{_NAME}: the module has not called F.scaled_dot_product_attention, flex_attention or "
            "lightning_cp.attention. Attention that it computes otherwise sees this rank's tokens "
            "only: call one of them, or name the module that does."
        )
    return output
