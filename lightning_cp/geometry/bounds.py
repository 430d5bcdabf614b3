# SPDX-License-Identifier: Apache-2.0
"""Bounds: the visible keys of every query as one interval, never a table of S x S.

Pure integers; knows no mask, layout, process group or kernel. Read next: `mask.py`, `attn/plan.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_cp.geometry.ranges import BoolArray, IntArray, Range, union


class Tile(NamedTuple):
    """A rectangle of queries x keys, and how much of it is visible.

    ``full``: all of it. ``causal``: a square on the diagonal, ``k <= q``. ``masked``: see bounds.
    """

    query: Range
    keys: Range
    kind: Literal["full", "causal", "masked"]


@dataclass(frozen=True, eq=False)
class Bounds:
    """The visible keys of every query: ``first[b, q] <= k < last[b, q]``, if ``k`` is not padding.

    Both bounds never decrease along a sequence, so that every question about a block is answered at
    its corners. If all samples have the same bounds, they are stored once.

    Args:
        first: int64 [R, S], the first visible key.
        last: int64 [R, S], one past the last visible key; equal to ``first`` where there is none.
        real_before: int64 [R, S + 1], the number of keys before a position that are not padding.
        is_shared: whether later batches receive the same object, so that what is computed from it
            is worth caching.
    """

    first: IntArray
    last: IntArray
    real_before: IntArray
    is_shared: bool = False

    @property
    def num_samples(self) -> int:
        """Return the number of different samples R: 1, or the batch size."""
        return int(self.first.shape[0])

    @property
    def length(self) -> int:
        """Return the sequence length, our padding included."""
        return int(self.first.shape[1])

    def sample(self, index: int) -> "Bounds":
        """Return the bounds of one sample."""
        part = slice(index, index + 1)
        return Bounds(self.first[part], self.last[part], self.real_before[part])

    def hull(self, query: Range) -> tuple[Range, ...]:
        """Return the keys that any query of the range sees in any sample, as disjoint ranges."""
        if query.size == 0:
            return ()
        starts, stops = self.first[:, query.start], self.last[:, query.stop - 1]
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        return union(Range(start, stop) for start, stop in pairs)

    def work(self, query: Range, keys: Range) -> int:
        """Return the number of visible (query, key) pairs in a block, summed over the samples."""
        if query.size == 0 or keys.size == 0:
            return 0
        part = slice(query.start, query.stop)
        start = np.clip(self.first[:, part], keys.start, keys.stop)
        stop = np.clip(self.last[:, part], keys.start, keys.stop)
        seen = np.take_along_axis(self.real_before, stop, 1)
        seen -= np.take_along_axis(self.real_before, start, 1)
        return int(np.maximum(seen, 0).sum())

    def work_before(self) -> IntArray:
        """Return the visible pairs of all queries before each position, over the samples, [S + 1].

        Example:
            >>> from lightning_cp.geometry.mask import Mask
            >>> Mask(causal=True, window=2).bounds(4).work_before().tolist()
            [0, 1, 3, 5, 7]
        """
        seen = np.take_along_axis(self.real_before, self.last, 1)
        seen -= np.take_along_axis(self.real_before, self.first, 1)
        before = np.zeros(self.length + 1, np.int64)
        np.cumsum(seen.sum(0), out=before[1:])
        return before

    def visible(self, query: Range, keys: Range) -> Tensor:
        """Return a block as a bool tensor [R, queries, keys]. For small blocks."""
        positions = torch.arange(keys.start, keys.stop)
        part = slice(query.start, query.stop)
        first = torch.from_numpy(self.first[:, part]).unsqueeze(-1)
        last = torch.from_numpy(self.last[:, part]).unsqueeze(-1)
        real = torch.from_numpy(np.diff(self.real_before[:, keys.start : keys.stop + 1]) > 0)
        return (positions >= first) & (positions < last) & real.unsqueeze(1)

    def trim(self, query: Range, keys: Range) -> tuple[Range, Range] | None:
        """Remove queries that see none of the keys, and keys that none of the queries see.

        Example:
            >>> from lightning_cp.geometry.mask import Mask
            >>> Mask(causal=True, window=3).bounds(10).trim(Range(0, 10), Range(4, 5))
            (Range(start=4, stop=7), Range(start=4, stop=5))
        """
        if query.size == 0 or keys.size == 0:
            return None
        part = slice(query.start, query.stop)
        begin = min(int(last.searchsorted(keys.start, "right")) for last in self.last[:, part])
        end = max(int(first.searchsorted(keys.stop, "left")) for first in self.first[:, part])
        if begin >= end:
            return None
        query = Range(query.start + begin, query.start + end)
        starts, stops = self.first[:, query.start], self.last[:, query.stop - 1]
        keys = keys.meet(Range(int(starts.min()), int(stops.max())))
        return (query, keys) if keys.size > 0 else None

    def tiles(self, query: Range, keys: Range, *, size: int) -> Iterator[Tile]:
        """Split a block into few tiles that follow its structure; empty ones are left out.

        Full and causal parts become one tile each, however large. The rest is split until a tile
        holds no more than ``size`` squared pairs.

        Example:
            >>> from lightning_cp.geometry.mask import Mask
            >>> bounds = Mask(causal=True).bounds(512)
            >>> for tile in bounds.tiles(Range(256, 512), Range(0, 512), size=64):
            ...     print(*tile.query, *tile.keys, tile.kind)
            256 512 256 512 causal
            256 512 0 256 full
        """
        pending = [(query, keys)]
        while pending:
            trimmed = self.trim(*pending.pop())
            if trimmed is None:
                continue
            query, keys = trimmed
            if not self._has_real(keys):
                continue
            common = self._common(query, keys)
            if common == keys:
                yield Tile(query, keys, "full")
            elif keys.stop == query.stop > query.start >= keys.start and self._is_causal(query):
                yield Tile(query, query, "causal")
                pending.append((query, Range(keys.start, query.start)))
            elif common.size >= size:
                yield Tile(query, common, "full")
                pending.append((query, Range(keys.start, common.start)))
                pending.append((query, Range(common.stop, keys.stop)))
            elif query.size * keys.size <= size * size:
                if self.work(query, keys) > 0:
                    yield Tile(query, keys, "masked")
            else:
                pending.extend(self._halves(query, keys, size))

    def _common(self, query: Range, keys: Range) -> Range:
        """Return keys that every query of the range sees in every sample, none of them padding."""
        start = int(self.first[:, query.stop - 1].max())
        stop = int(self.last[:, query.start].min())
        common = keys.meet(Range(start, max(start, stop)))
        return common if self._is_unpadded(common) else Range(keys.start, keys.start)

    def _is_unpadded(self, keys: Range) -> bool:
        real = self.real_before[:, keys.stop] - self.real_before[:, keys.start]
        return bool((real == keys.size).all())

    def _has_real(self, keys: Range) -> bool:
        real = self.real_before[:, keys.stop] - self.real_before[:, keys.start]
        return bool(real.any())

    def _hole(self, keys: Range, size: int) -> int | None:
        """Return where a long run of keys that are padding in all samples starts or stops.

        None if there is none inside of ``keys``; what it separates is then split in few tiles.
        """
        if self._is_unpadded(keys):
            return None
        real = (np.diff(self.real_before[:, keys.start : keys.stop + 1]) > 0).any(0)
        edges = np.flatnonzero(np.diff(np.concatenate([[True], real, [True]]).astype(np.int8)))
        starts, stops = edges[::2], edges[1::2]
        long = stops - starts >= size
        inside = np.concatenate([starts[long], stops[long]])
        inside = inside[(inside > 0) & (inside < keys.size)]
        return keys.start + int(inside[0]) if inside.size else None

    def _is_causal(self, square: Range) -> bool:
        """Return whether the square on the diagonal holds exactly the pairs ``k <= q``."""
        steps = np.arange(square.start + 1, square.stop + 1)
        part = slice(square.start, square.stop)
        return (
            bool((self.first[:, square.stop - 1] <= square.start).all())
            and bool((self.last[:, part] == steps).all())
            and self._is_unpadded(square)
        )

    def _halves(self, query: Range, keys: Range, size: int) -> Iterator[tuple[Range, Range]]:
        """Split keys at padding or queries where a document starts, else the longer side."""
        hole = self._hole(keys, size)
        if hole is not None:
            yield query, Range(keys.start, hole)
            yield query, Range(hole, keys.stop)
            return
        jumps = np.diff(self.first[:, query.start : query.stop].max(0))
        starts = np.flatnonzero(jumps >= max(size // 2, 1)) + query.start + 1
        if starts.size:
            # The one nearest to the middle, so that many documents are halved repeatedly.
            middle = int(starts[np.abs(2 * starts - query.start - query.stop).argmin()])
        elif keys.size > query.size:
            middle = (keys.start + keys.stop) // 2
            yield query, Range(keys.start, middle)
            yield query, Range(middle, keys.stop)
            return
        else:
            middle = (query.start + query.stop) // 2
        yield Range(query.start, middle), keys
        yield Range(middle, query.stop), keys


def build_bounds(first: IntArray, last: IntArray, real: BoolArray, padded_len: int) -> Bounds:
    """Shrink bounds to keys that are not padding, add our padding, store equal samples once.

    Args:
        first: [R, S], the first visible key of each query.
        last: [R, S], one past its last visible key.
        real: [R, S], which keys are not padding.
        padded_len: the length with our padding.
    """
    num_samples, seq_len = real.shape
    extra = padded_len - seq_len
    tail = np.broadcast_to(np.arange(seq_len, padded_len), (num_samples, extra))
    first = np.concatenate([first, tail], 1)
    last = np.concatenate([last, tail], 1)
    real = np.concatenate([real, np.zeros((num_samples, extra), np.bool_)], 1)

    position = np.arange(padded_len)
    after_real = np.maximum.accumulate(np.where(real, position + 1, 0), 1)
    # Nothing reaches past the last real key, not even bounds of queries that see nothing.
    edge = after_real[:, -1:]
    next_real = minimum_from_end(np.where(real, position, padded_len))
    next_real = np.concatenate([np.minimum(next_real, edge), edge], 1)
    after_real = np.concatenate([np.zeros((num_samples, 1), np.int64), after_real], 1)
    first = np.take_along_axis(next_real, first, 1)
    last = np.maximum(first, np.take_along_axis(after_real, last, 1))
    real_before = np.zeros((num_samples, padded_len + 1), np.int64)
    np.cumsum(real, 1, out=real_before[:, 1:])
    if num_samples > 1 and all((x == x[:1]).all() for x in (first, last, real_before)):
        first, last, real_before = first[:1], last[:1], real_before[:1]
    return Bounds(first, last, real_before)


def minimum_from_end(values: IntArray) -> IntArray:
    """Return the minimum of each value and all that follow it along dim 1."""
    return np.minimum.accumulate(values[:, ::-1], 1)[:, ::-1]
