# SPDX-License-Identifier: Apache-2.0
"""What the modules of this package share.

Methods that are replaced in an instance of a module, tokens and keys of all ranks, and masks as
tables.
"""

import copy
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_patches.interface.names import STOCK, implementations, stock_name, text_key
from hf_patches.private import set_attention_name
from lightning_cp.comm.transport import to_device
from lightning_cp.data.sharding import full_tokens
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import IntArray, Range
from lightning_cp.patch import Patch, replace_method
from lightning_cp.step.step import PerStep, Step, per_step


@dataclass(eq=False)
class Replacement:
    """A method of a module that is replaced, in the instance.

    Args:
        module: the module.
        kind: the class of the module that is known; FSDP2 and users subclass it.
        name: of the method.
    """

    module: nn.Module
    kind: str = ""
    name: str = "forward"

    def install(self) -> Patch:
        """Replace the method; return what puts it back."""
        self.patch = replace_method(self.module, self.name, self._call)
        return self.patch

    @property
    def stock(self) -> Callable[..., Any]:
        """Return the method that was there before."""
        return self.patch.stock

    def _call(self, _: nn.Module, __: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method."""
        return self.stock(*args, **kwargs)


def name_stock(module: nn.Module) -> Patch:
    """Give a module a config that names the stock implementation, for code that looks for it."""
    config: Any = copy.copy(module.config)
    set_attention_name(config, stock_name(module.config))  # type: ignore[arg-type]
    return Patch(module, "config", config)


def kind_of(module: nn.Module, kinds: Container[str]) -> str | None:
    """Return the first class of a module, or base of it, that is in ``kinds``; None for none."""
    names = (owner.__name__ for owner in type(module).__mro__)
    return next((name for name in names if name in kinds), None)


def stock_implementation(model: PreTrainedModel) -> str:
    """Return the implementation that an enabled model had before, "eager" or "sdpa"; raise else."""
    name = implementations(model)[text_key(model)]
    stock = STOCK.get(name, name)
    if stock not in ("eager", "sdpa"):
        raise ValueError(
            f"The attention of {type(model).__name__} is '{stock}', but under context parallelism "
            "its layers compute masks of their own, which needs 'eager' or 'sdpa'. Load the model "
            "with attn_implementation='eager'."
        )
    return stock


def real_tokens(step: Step, device: torch.device) -> Tensor:
    """Return which tokens of the full sequences are not padding, bool [B or 1, S]."""
    if step.padding is None:
        return torch.ones(1, step.layout.seq_len, dtype=torch.bool, device=device)
    return ~to_device(torch.from_numpy(step.padding), device)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores: 0 for visible keys, the least number for others.

    A finite one in float32 too, where models of float64 take the softmax: tokens that see nothing
    would get NaN.
    """
    hidden = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, hidden)


class GatheredKeys:
    """A cache that returns the keys of the full sequence, and keeps nothing.

    Args:
        step: the step.
    """

    def __init__(self, step: Step) -> None:
        self.step = step

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Return keys and values of all ranks, in sequence order.

        Args:
            keys: [..., L, D] of this rank.
            values: [..., L, Dv].

        Returns:
            [..., S, D] and [..., S, Dv]; gradients of all ranks are summed.
        """
        if keys.shape[:-1] == values.shape[:-1] and keys.dtype == values.dtype:
            both = self._gather(torch.cat([keys, values], -1))
            return both[..., : keys.shape[-1]], both[..., keys.shape[-1] :]
        return self._gather(keys), self._gather(values)

    def get_seq_length(self, *_: object) -> int:
        """Return the number of tokens before this rank's: none are kept."""
        return 0

    def update_indexer(self, keys: Tensor, *_: object) -> Tensor:
        """Return an indexer's keys of all ranks, [..., S, D]."""
        return self._gather(keys)

    def _gather(self, x: Tensor) -> Tensor:
        return full_tokens(x, self.step, -2)


_tables = PerStep[Tensor]()


def visible_keys(mask: Mask, step: Step, device: torch.device) -> Tensor:
    """Return a mask as a table of this rank's queries and all keys, bool [B, 1, L, S].

    It is computed once per step.
    """
    return _tables.find(step, (mask.key(), device), lambda: _table(mask, step, device))


@per_step
def local_positions(step: Step, device: torch.device) -> Tensor:
    """Return the global positions of this rank's tokens, [L]; those of our padding are beyond S."""
    return to_device(torch.from_numpy(_local_positions(step)), device)


def _local_positions(step: Step) -> IntArray:
    layout = step.layout
    owned, sequence = layout.ranges(step.cp_rank), Range(0, layout.seq_len)
    ranges = owned if layout.shows_padding else [x.meet(sequence) for x in owned]
    return np.concatenate([np.arange(x.start, x.stop) for x in ranges])


def _table(mask: Mask, step: Step, device: torch.device) -> Tensor:
    bounds, layout, queries = step.bounds(mask), step.layout, _local_positions(step)
    is_real = np.diff(bounds.real_before[:, : layout.seq_len + 1]) > 0
    first, last, real = (
        to_device(torch.from_numpy(x), device)
        for x in (bounds.first[:, queries], bounds.last[:, queries], is_real)
    )
    keys = torch.arange(layout.seq_len, device=device)
    visible = (keys >= first[..., None]) & (keys < last[..., None]) & real[:, None]
    return visible.unsqueeze(1).expand(step.batch_size, -1, -1, -1)
