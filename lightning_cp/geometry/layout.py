# SPDX-License-Identifier: Apache-2.0
"""Layouts: which rank owns which global positions.

A layout is data: for each rank, the ranges of global positions that it owns, in the order in which
it holds them. Everything else is derived from those ranges; no code may depend on which builder
made them. Pure integers, no process group: every rank knows the layout of all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from lightning_cp.config import LayoutName, check_choice
from lightning_cp.geometry.balance import TOLERABLE, imbalance, split_evenly
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import IntArray, Range


@dataclass(frozen=True)
class Layout:
    """The positions of every rank.

    All ranks own the same number of tokens. A sequence of ``seq_len`` tokens is padded at its end
    to ``padded_len``; the padding is owned like any token.

    Args:
        name: the name of the layout.
        seq_len: tokens of a sequence, without padding.
        owned: for each rank, the ranges that it owns.
        work_imbalance: visible pairs of the busiest rank over the mean, under the mask for which
            the layout was balanced; None for a layout that does not depend on a mask.
        shows_padding: whether shards contain the padding. If not, the tensors of some ranks are
            shorter, and attention adds the padding internally.

    Example:
        >>> layout = build_layout("zigzag", seq_len=7, cp_size=2)
        >>> layout.padded_len, layout.positions(0).tolist(), layout.positions(1).tolist()
        (8, [0, 1, 6, 7], [2, 3, 4, 5])
    """

    name: str
    seq_len: int
    owned: tuple[tuple[Range, ...], ...]
    work_imbalance: float | None = None
    shows_padding: bool = True

    @property
    def cp_size(self) -> int:
        """Return the number of context ranks."""
        return len(self.owned)

    @cached_property
    def local_len(self) -> int:
        """Return the number of tokens that each rank owns, padding included."""
        return sum(part.size for part in self.owned[0])

    @property
    def padded_len(self) -> int:
        """Return the length of a sequence with its padding."""
        return self.local_len * self.cp_size

    def tensor_len(self, rank: int) -> int:
        """Return the number of tokens per sequence in the tensors of ``rank``.

        Example:
            >>> layout = build_layout("zigzag", seq_len=7, cp_size=2, shows_padding=False)
            >>> layout.local_len, layout.tensor_len(0), layout.tensor_len(1)
            (4, 3, 4)
        """
        if self.shows_padding:
            return self.local_len
        sequence = Range(0, self.seq_len)
        return sum(part.meet(sequence).size for part in self.owned[rank])

    @property
    def is_whole(self) -> bool:
        """Return whether one rank owns the sequence, in its order and without padding."""
        return self.owned == ((Range(0, self.seq_len),),)

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Return the ranges of ``rank``, in the order in which it holds them."""
        return self.owned[rank]

    def positions(self, rank: int) -> Tensor:
        """Return the global position of every token that ``rank`` owns, int64 [L]."""
        return torch.cat([torch.arange(part.start, part.stop) for part in self.owned[rank]])

    def is_real(self, rank: int) -> Tensor:
        """Return which tokens in tensors of ``rank`` are not our padding, bool [L]."""
        return self.positions(rank)[: self.tensor_len(rank)] < self.seq_len

    @cached_property
    def order(self) -> Tensor:
        """Return the index of each global position in the concatenated shards, int64 [S].

        Indexing the shards, rank after rank, with it gives the sequence without its padding.
        """
        order = torch.empty(self.padded_len, dtype=torch.int64)
        start = 0
        for part in (part for parts in self.owned for part in parts):
            order[part.start : part.stop] = torch.arange(start, start + part.size)
            start += part.size
        return order[: self.seq_len]

    def work(self, bounds: Bounds) -> list[int]:
        """Return the number of visible (query, key) pairs of each rank's queries."""
        keys = Range(0, self.padded_len)
        return [sum(bounds.work(part, keys) for part in parts) for parts in self.owned]


@lru_cache(maxsize=8)
def _contiguous(seq_len: int, cp_size: int) -> Layout:
    """Give rank r the r-th of cp_size equal ranges."""
    size = -(-seq_len // cp_size)
    owned = tuple((Range(r * size, (r + 1) * size),) for r in range(cp_size))
    return Layout("contiguous", seq_len, owned)


@lru_cache(maxsize=8)
def _zigzag(seq_len: int, cp_size: int) -> Layout:
    """Give rank r chunk r and its mirror.

    Under a causal mask an early chunk has few visible pairs and a late one many; each rank's two
    chunks together have the same number.
    """
    if cp_size == 1:  # one owner, and no padding
        return Layout("zigzag", seq_len, ((Range(0, seq_len),),))
    size = -(-seq_len // (2 * cp_size))
    chunks = [Range(c * size, (c + 1) * size) for c in range(2 * cp_size)]
    owned = tuple((chunks[r], chunks[-1 - r]) for r in range(cp_size))
    return Layout("zigzag", seq_len, owned)


def _balanced(seq_len: int, cp_size: int, work_before: IntArray) -> Layout:
    """Give every rank the same number of tokens and of visible pairs, for any mask."""
    padding = np.repeat(work_before[-1:], -seq_len % cp_size)
    owned = split_evenly(np.append(work_before, padding), cp_size)
    return Layout("balanced", seq_len, owned, imbalance(owned, work_before))


def build_layout(
    name: str,
    *,
    seq_len: int,
    cp_size: int,
    bounds: Callable[[], Bounds] | None = None,
    shows_padding: bool = True,
) -> Layout:
    """Distribute a sequence of ``seq_len`` tokens over ``cp_size`` ranks.

    ``auto`` is ``contiguous`` or ``zigzag`` where that is balanced well enough, else ``balanced``.

    Args:
        name: the name of the layout, or ``auto``.
        seq_len: tokens of a sequence.
        cp_size: the number of context ranks.
        bounds: computes the bounds under which ranks have equal work; only called by layouts that
            depend on them. None stands for a plain causal mask.
        shows_padding: whether shards contain the padding.

    Example:
        >>> documents = torch.tensor([0] * 6 + [1, 2])
        >>> bounds = Mask(causal=True, documents=documents).bounds(8)
        >>> layout = build_layout("auto", seq_len=8, cp_size=2, bounds=lambda: bounds)
        >>> layout.name, layout.work(bounds)
        ('balanced', [11, 12])
    """
    check_choice("layout", name, get_args(LayoutName))
    if cp_size < 1:
        raise ValueError(f"cp_size={cp_size}: a sequence needs at least 1 rank.")
    if seq_len < 1:
        raise ValueError(
            "The batch holds sequences of length 0: there is nothing to attend to. "
            "Leave such batches out, in the data set or in the collate function."
        )
    layout = _choose(name, seq_len, cp_size, bounds)
    if shows_padding:
        return layout
    # Attention adds the padding at the end of a shard: positions must increase along it.
    increasing = [list(parts) == sorted(parts) for parts in layout.owned]
    assert all(increasing)  # noqa: S101  true for every layout of this module
    return replace(layout, shows_padding=False)


def layout_of_shards(name: str, lengths: Sequence[int]) -> Layout:
    """Return a layout by the number of tokens that each rank holds, without padding; or raise.

    Example:
        >>> layout_of_shards("zigzag", [3, 4]).order.tolist()
        [0, 1, 4, 5, 6, 7, 2]
    """
    layout = build_layout(name, seq_len=sum(lengths), cp_size=len(lengths), shows_padding=False)
    expected = [layout.tensor_len(rank) for rank in range(layout.cp_size)]
    if expected != list(lengths):
        raise ValueError(
            f"The ranks hold {list(lengths)} tokens, but layout={name!r} of {layout.seq_len} "
            f"tokens gives them {expected}. Give shards of the same sequences on all ranks, in "
            "that layout, and the dim along which they were sharded."
        )
    return layout


def _choose(name: str, seq_len: int, cp_size: int, bounds: Callable[[], Bounds] | None) -> Layout:
    if name == "contiguous":
        return _contiguous(seq_len, cp_size)
    zigzag = _zigzag(seq_len, cp_size)
    if name == "zigzag" or (name == "auto" and (bounds is None or cp_size == 1)):
        return zigzag
    work_before = (bounds() if bounds else Mask(causal=True).bounds(seq_len)).work_before()
    if name == "balanced":
        return _balanced(seq_len, cp_size, work_before)
    # One range per rank where that is balanced: windows and short documents then cross one border.
    contiguous = _contiguous(seq_len, cp_size)
    has_tokens = contiguous.owned[-1][0].start < seq_len  # the last rank: not only padding
    for layout in (contiguous, zigzag) if has_tokens else (zigzag,):
        if imbalance(layout.owned, work_before) <= TOLERABLE:
            return layout
    balanced = _balanced(seq_len, cp_size, work_before)
    return min(zigzag, balanced, key=lambda layout: imbalance(layout.owned, work_before))
