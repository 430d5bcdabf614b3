# SPDX-License-Identifier: Apache-2.0
"""Splitting a sequence into parts of equal length and equal work, with no more cuts than zigzag.

This is necklace splitting for two measures, tokens and work (visible pairs). Of all windows of a
sequence that are as long as one of n parts, some hold more than an n-th of the work and some less,
so one in between holds exactly that. It is removed, the rest is joined, and so on: two cuts for
each part but the last. Pure integers; `layout.py` makes a layout of it.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np

from lightning_cp.geometry.ranges import IntArray, Range, union

MIN_RANGE: Final = 128
"""Shorter ranges make small kernels."""

NUM_BLOCKS: Final = 8
"""The number of blocks that a part may consist of; each is a range, which may then be short."""

GOOD: Final = 1.02
"""Work of the most expensive part over the mean up to which nothing more is tried."""

TOLERABLE: Final = 1.05
"""The same, up to which no part is split into blocks."""

_NUM_WINDOWS = 1024
_NUM_CROSSINGS = 8
_NUM_STEPS = 17
_NUM_STRIPS = 24

Ranges = tuple[Range, ...]


def imbalance(parts: Iterable[Ranges], work_before: IntArray) -> float:
    """Return the work of the most expensive part over the mean; 1.0 is ideal, also without work.

    Args:
        parts: ranges of positions; beyond the end of the sequence there is no work.
        work_before: int64 [S + 1], the work of all positions before each.
    """
    work = [_work(part, work_before) for part in parts]
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def _work(part: Ranges, work_before: IntArray) -> int:
    last = len(work_before) - 1
    return sum(int(work_before[min(r.stop, last)] - work_before[min(r.start, last)]) for r in part)


def split_evenly(work_before: IntArray, num_parts: int) -> tuple[Ranges, ...]:
    """Split a sequence into parts of the same length, and of work as equal as possible.

    There are less than ``2 * num_parts`` ranges, unless balance needs more. Each holds at least
    `MIN_RANGE` tokens, or an eighth of a part if that is less. The most expensive part has at most
    `TOLERABLE` times the mean work, or the mean plus the most expensive eighth of a part, whichever
    is larger.

    Args:
        work_before: int64 [S + 1], the work of all positions before each; ``num_parts`` divides S.
        num_parts: the number of parts.

    Example:
        >>> work = np.arange(8)  # each token costs more than the last
        >>> [[tuple(r) for r in part] for part in split_evenly(np.append(0, work.cumsum()), 2)]
        [[(0, 2), (6, 8)], [(2, 6)]]
    """
    length = (len(work_before) - 1) // num_parts
    if length % MIN_RANGE == 0:  # round numbers suit kernels, and are fewer candidates
        blocks = _take_windows(work_before[::MIN_RANGE], num_parts, 1)
        parts = [tuple(Range(a * MIN_RANGE, b * MIN_RANGE) for a, b in part) for part in blocks]
        if imbalance(parts, work_before) <= GOOD:
            return tuple(sorted(parts))
    min_size = max(1, min(MIN_RANGE, length // NUM_BLOCKS))
    parts = _exchange(_take_windows(work_before, num_parts, min_size), work_before, min_size)
    if imbalance(parts, work_before) > TOLERABLE:
        dealt = _exchange(_deal_blocks(work_before, num_parts), work_before, min_size)
        parts = min(parts, dealt, key=lambda split: imbalance(split, work_before))
    return tuple(sorted(parts))  # neighbours share documents


def _take_windows(work_before: IntArray, num_parts: int, min_size: int) -> list[Ranges]:
    """Remove one part after the other from the sequence, each a window of what remains."""
    length = (len(work_before) - 1) // num_parts
    rest: Ranges = (Range(0, num_parts * length),)
    parts = []
    for _ in range(num_parts - 1):
        chain = _Chain(rest, work_before)
        start = _find_window(chain, length, min_size)
        if start is None:
            return _deal_blocks(work_before, num_parts)
        stop = start + length
        parts.append(_between(rest, start, stop))
        rest = _between(rest, 0, start) + _between(rest, stop, chain.size)
    return [*parts, rest]


def _between(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the part between two indices into concatenated ranges."""
    selected, offset = [], 0
    for first, last in ranges:
        low, high = max(start - offset, 0), min(stop - offset, last - first)
        if low < high:
            selected.append(Range(first + low, first + high))
        offset += last - first
    return tuple(selected)


class _Chain:
    """Concatenated ranges, and the work before each index into them."""

    def __init__(self, ranges: Ranges, work_before: IntArray) -> None:
        starts, stops = np.array(ranges).T
        work = np.concatenate([[0], np.cumsum(work_before[stops] - work_before[starts])])
        self.edges = np.concatenate([[0], np.cumsum(stops - starts)])
        self.size, self.work = int(self.edges[-1]), int(work[-1])
        # Add this to an index into the chain to get its global position; the same for work.
        self._shift = starts - self.edges[:-1]
        self._before = work[:-1] - work_before[starts]
        self._work_before = work_before

    def windows(self, start: IntArray, length: int) -> IntArray:
        """Return [2, n]: the work of windows, and the shortest range that they leave."""
        cuts = np.stack([start, start + length])
        index = np.searchsorted(self.edges[1:-1], cuts, "right")
        before = self._before[index] + self._work_before[cuts + self._shift[index]]
        rest = np.minimum(cuts - self.edges[index], self.edges[index + 1] - cuts)
        shortest = np.where(rest == 0, self.size, rest).min(0)
        return np.stack([before[1] - before[0], shortest])


def _find_window(chain: _Chain, length: int, min_size: int) -> int | None:
    """Return the start of the window whose work is closest to the mean of its length.

    None if all of them would leave ranges that are shorter than ``min_size``.
    """
    mean, last = chain.work * (length / chain.size), chain.size - length
    grid = np.linspace(0, last, min(last + 1, _NUM_WINDOWS), dtype=np.int64)
    edges = np.concatenate([chain.edges, chain.edges - length])
    start = np.unique(np.append(grid, edges[(edges >= 0) & (edges <= last)]))
    windows = chain.windows(start, length)
    # Between a window with too much work and one with too little there is one with the mean.
    above = windows[0] > mean
    crossings = np.flatnonzero(np.diff(above))[:_NUM_CROSSINGS]
    low, high = start[crossings], start[crossings + 1]
    while (high - low > 1).any():
        steps = np.linspace(low, high, _NUM_STEPS, dtype=np.int64)
        work = chain.windows(steps.ravel(), length)[0].reshape(steps.shape)
        other = ((work > mean) != above[crossings]).argmax(0)[None]  # the first on the other side
        low, high = (np.take_along_axis(steps, other - i, 0)[0] for i in (1, 0))
    ends = np.append(low, high)
    work, shortest = np.concatenate([windows, chain.windows(ends, length)], 1)
    miss = np.where(shortest >= min_size, np.abs(work - mean), np.inf)
    best = int(miss.argmin())
    return int(np.append(start, ends)[best]) if np.isfinite(miss[best]) else None


def _deal_blocks(work_before: IntArray, num_parts: int) -> list[Ranges]:
    """Deal blocks in rounds, the most expensive one to the part with the least work so far.

    Parts then differ by no more than the most expensive block: a part that is behind by d before a
    round gets at most a block more than another and at least as much, so that it ends between d
    behind and a block ahead.
    """
    length = (len(work_before) - 1) // num_parts
    num_rounds = min(NUM_BLOCKS, length)
    # The blocks of a round have one size, so that parts stay equally long.
    sizes = np.diff(np.arange(num_rounds + 1) * length // num_rounds)
    sizes = np.sort(sizes).repeat(num_parts)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    work = np.diff(work_before[edges])
    total, owners = np.zeros(num_parts, np.int64), np.empty(len(sizes), np.int64)
    for blocks in np.lexsort((-work, sizes)).reshape(num_rounds, num_parts):
        owners[blocks] = np.argsort(total, kind="stable")
        total[owners[blocks]] += work[blocks]
    ranges = [Range(*pair) for pair in pairwise(edges.tolist())]
    dealt = (np.flatnonzero(owners == part).tolist() for part in range(num_parts))
    return [union(ranges[block] for block in blocks) for blocks in dealt]


def _exchange(parts: list[Ranges], work_before: IntArray, min_size: int) -> list[Ranges]:
    """Swap strips of the most expensive part for strips of the same length of cheaper parts."""
    parts = list(parts)
    for _ in range(4 * len(parts)):
        work = [_work(part, work_before) for part in parts]
        if max(work) * len(parts) <= GOOD * sum(work):
            break
        most = int(np.argmax(work))
        for cheap in np.argsort(work, kind="stable").tolist():
            changed = _swap_strips(parts[most], parts[cheap], work_before, min_size)
            if changed is not None:
                parts[most], parts[cheap] = changed
                break
        else:
            break
    return parts


def _swap_strips(
    expensive: Ranges, cheap: Ranges, work_before: IntArray, min_size: int
) -> tuple[Ranges, Ranges] | None:
    """Swap two strips of the same length so that the work of two parts gets closer.

    Returns:
        The two parts; None if the gap between them does not shrink by a quarter at least.
    """
    half_gap = (_work(expensive, work_before) - _work(cheap, work_before)) / 2
    miss, strips = 0.75 * half_gap, None
    size = min_size
    while 2 * size <= sum(part.size for part in expensive):
        strips_a, strips_b = (_strip_starts(part, size, min_size) for part in (expensive, cheap))
        if strips_a.size and strips_b.size:
            gain = np.subtract.outer(
                *(
                    work_before[starts + size] - work_before[starts]
                    for starts in (strips_a, strips_b)
                )
            )
            misses = np.abs(gain - half_gap)
            i, j = np.unravel_index(misses.argmin(), misses.shape)
            if misses[i, j] < miss:
                miss = float(misses[i, j])
                strips = tuple(Range(int(x), int(x) + size) for x in (strips_a[i], strips_b[j]))
        size += max(size // 2, 1)
    if strips is None:
        return None
    return _replaced(expensive, *strips), _replaced(cheap, *strips[::-1])


def _strip_starts(part: Ranges, size: int, min_size: int) -> IntArray:
    """Return where strips may start such that no range of less than ``min_size`` remains."""
    starts: list[int] = []
    for block in part:
        room = block.size - size
        if room == 0 or room >= min_size:
            starts += [block.start, block.start + room]
        if room >= 2 * min_size:
            inner = np.linspace(min_size, room - min_size, _NUM_STRIPS).astype(np.int64)
            starts += (block.start + inner).tolist()
    return np.array(starts, np.int64)


def _replaced(part: Ranges, old: Range, new: Range) -> Ranges:
    """Return a part with one strip replaced by another."""
    ranges = [new]
    for block in part:
        removed = block.meet(old)
        if removed.size:
            ranges += [Range(block.start, removed.start), Range(removed.stop, block.stop)]
        else:
            ranges.append(block)
    return union(ranges)
