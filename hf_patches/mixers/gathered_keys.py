# SPDX-License-Identifier: Apache-2.0
"""Keys of the full sequence for layers that run their own code, and masks as tables."""

import numpy as np
import torch
from torch import Tensor

from lightning_cp.comm.transport import to_device
from lightning_cp.data.shard import full_tokens
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import IntArray, Range
from lightning_cp.step.step import PerStep, Step, per_step


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
