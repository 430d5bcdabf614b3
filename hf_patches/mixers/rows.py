# SPDX-License-Identifier: Apache-2.0
"""This rank's tokens as rows for a chunked recurrence: one row for each range and sample.

Chunked kernels start from one state per row and know no documents. Here each document starts at
the border of a chunk, and the last place of the chunk before it is a reset: a token without a value
whose decay leaves nothing of the state. All ranges of all samples are computed in one call.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_patches.interface.names import active
from lightning_cp.comm.transport import to_device
from lightning_cp.geometry.ranges import IntArray
from lightning_cp.sequence.token_map import HeldRange, TokenMap, token_map
from lightning_cp.step.step import Step, per_step

RESET = -1e4
"""Logarithm of the decay of a reset: its exponential is 0 in every dtype."""


@dataclass(frozen=True, eq=False)
class RangeRows:
    """How the tokens of a step are arranged; N rows (ranges times samples) of T places.

    Args:
        lengths: tokens of each range.
        row_len: T.
        enters: whether a state of another range reaches one of these ranges.
        hidden: bool [B or 1, L], tokens that no other token sees; None for none.
        source: int64 [N * T], the token of each place in the flattened [B * L]; B * L for places
            without one. None if no document starts inside a range.
        place: int64 [B * L], the place of each token in the flattened [N * T].
        resets: bool [N, T].
    """

    lengths: list[int]
    row_len: int
    enters: bool
    hidden: Tensor | None
    source: Tensor | None = None
    place: Tensor | None = None
    resets: Tensor | None = None

    def arrange(self, x: Tensor, *, reset: Tensor | float = 0.0) -> Tensor:
        """Return tokens [B, L, ...] as rows [N, T, ...]; places without a token are 0.

        Args:
            x: of this rank's tokens.
            reset: value at resets, a number or a tensor that broadcasts with [...].
        """
        if self.source is None or self.resets is None:
            if self.lengths == [self.row_len]:
                return x
            longer = [0] * (2 * x.dim() - 3)
            parts = torch.split(x, self.lengths, 1)
            return torch.cat([pad(y, (*longer, self.row_len - y.shape[1])) for y in parts])
        flat = x.flatten(0, 1)
        flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        rows = flat.index_select(0, self.source).view(*self.resets.shape, *x.shape[2:])
        if isinstance(reset, float) and reset == 0.0:
            return rows
        at = self.resets.view(*self.resets.shape, *[1] * (x.dim() - 2))
        return torch.where(at, torch.as_tensor(reset, dtype=x.dtype, device=x.device), rows)

    def restore(self, rows: Tensor) -> Tensor:
        """Return rows [N, T, ...] as tokens [B, L, ...]."""
        batch_size = rows.shape[0] // len(self.lengths)
        if self.place is not None:
            tokens = rows.flatten(0, 1).index_select(0, self.place)
            return tokens.view(batch_size, sum(self.lengths), *rows.shape[2:])
        parts = torch.split(rows, batch_size)
        pairs = zip(parts, self.lengths, strict=True)
        return torch.cat([part[:, :length] for part, length in pairs], 1)

    def by_range(self, state: Tensor) -> Tensor:
        """Return what rows have [N, ...] as [ranges, B, ...]."""
        return state.reshape(len(self.lengths), -1, *state.shape[1:])

    def hide(self, x: Tensor) -> Tensor:
        """Return tokens [B, L, ...] with 0 for those that no other token sees."""
        if self.hidden is None:
            return x
        return x.masked_fill(self.hidden.view(*self.hidden.shape, *[1] * (x.dim() - 2)), 0)


def build_rows(x: Tensor, chunk_size: int) -> RangeRows:
    """Return the arrangement of the active step; layers share it.

    Args:
        x: [B, L, ...], this rank's tokens.
        chunk_size: of the kernel, from the start of a row.
    """
    step = active()
    assert step is not None  # noqa: S101
    return _arrange(step, chunk_size, x.shape[0], x.device)


@per_step
def _arrange(step: Step, chunk_size: int, batch_size: int, device: torch.device) -> RangeRows:
    tokens, hidden = token_map(step), None
    if tokens.hidden is not None:
        hidden = to_device(torch.from_numpy(tokens.hidden), device)
    samples = range(tokens.num_samples)
    enters = any(_enters(tokens, held, sample) for held in tokens.held for sample in samples)
    cuts = [[find_cuts(tokens, held, sample) for sample in samples] for held in tokens.held]
    if not any(len(cut) for by_sample in cuts for cut in by_sample):
        return RangeRows(tokens.lengths, max(*tokens.lengths, 1), enters, hidden)
    places = [
        [_place(held, cuts[held.number][sample], chunk_size) for sample in samples]
        for held in tokens.held
    ]
    row_len = max(int(place[-1]) + 1 for by_sample in places for place in by_sample if len(place))
    return RangeRows(
        tokens.lengths,
        row_len,
        enters,
        hidden,
        **_index(tokens, places, cuts, row_len, batch_size, device),
    )


def _enters(tokens: TokenMap, held: HeldRange, sample: int) -> bool:
    start = held.tokens.start
    return held.tokens.size > 0 and bool(tokens.first[sample, start] < start)


def find_cuts(tokens: TokenMap, held: HeldRange, sample: int) -> list[int]:
    """Return where in a range, counted from its start, the state has to be reset.

    Where documents start, unless the state is zero anyway: the tokens before are all hidden.
    """
    start, stop = held.tokens
    starts = np.flatnonzero(tokens.first[sample, start:stop] == np.arange(start, stop))
    seen = np.concatenate([[0], np.cumsum(tokens.is_real[sample, start:stop])])
    cuts: list[int] = []
    last, has_state = 0, _enters(tokens, held, sample)
    for at in starts.tolist():
        if at > 0 and (has_state or seen[at] > seen[last]):
            cuts.append(at)
            last, has_state = at, False
    return cuts


def _place(held: HeldRange, cuts: list[int], chunk_size: int) -> IntArray:
    """Return the place in a row of each token of a range."""
    places = np.arange(held.tokens.size)
    for at in cuts:
        # At least one place before the border is free, for the reset.
        border = -(-(int(places[at - 1]) + 2) // chunk_size) * chunk_size
        places[at:] += border - places[at]
    return places


def _index(
    tokens: TokenMap,
    places: list[list[IntArray]],
    cuts: list[list[list[int]]],
    row_len: int,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    num_tokens, num_rows = sum(tokens.lengths), len(tokens.held) * batch_size
    source = np.full((num_rows, row_len), batch_size * num_tokens)
    place = np.zeros((batch_size, num_tokens), np.int64)
    resets = np.zeros((num_rows, row_len), np.bool_)
    for held in tokens.held:
        own = np.arange(held.offset, held.offset + held.tokens.size)
        for sample in range(batch_size):
            row, of = held.number * batch_size + sample, min(sample, tokens.num_samples - 1)
            at = places[held.number][of]
            source[row, at] = sample * num_tokens + own
            place[sample, own] = row * row_len + at
            resets[row, at[cuts[held.number][of]] - 1] = True
    arrays = {"source": source.reshape(-1), "place": place.reshape(-1), "resets": resets}
    return {name: to_device(torch.from_numpy(x), device) for name, x in arrays.items()}
