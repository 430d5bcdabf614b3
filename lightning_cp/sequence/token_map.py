# SPDX-License-Identifier: Apache-2.0
"""Ranges of consecutive tokens that each rank holds, and where documents start in them.

Knows the layout, the documents and the padding of a step; no tensors of a model, no communication.
Every rank computes the same integers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_cp.comm.transport import to_device
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.geometry.ranges import BoolArray, IntArray, Range
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.step.guards import step_of_call
from lightning_cp.step.step import Step, per_step


class HeldRange(NamedTuple):
    """Consecutive tokens that one rank holds.

    Args:
        rank: the rank.
        number: which one of the ranges of its rank, from 0.
        offset: local position of its first token.
        tokens: global positions; may be empty.
    """

    rank: int
    number: int
    offset: int
    tokens: Range


def held_ranges(layout: Layout, rank: int) -> tuple[HeldRange, ...]:
    """Return the ranges of a rank, in the order in which its tensors hold them.

    Ranges of the layout that follow one another are one range. If tensors leave the padding out, so
    do the ranges: some may be empty.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> layout = build_layout("zigzag", seq_len=8, cp_size=2)
        >>> [tuple(held.tokens) for rank in range(2) for held in held_ranges(layout, rank)]
        [(0, 2), (6, 8), (2, 6)]
    """
    sequence = Range(0, layout.padded_len if layout.shows_padding else layout.seq_len)
    merged: list[Range] = []
    for part in layout.ranges(rank):
        if merged and merged[-1].stop == part.start:
            merged[-1] = Range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    held, offset = [], 0
    for number, part in enumerate(merged):
        tokens = part.meet(sequence)
        held.append(HeldRange(rank, number, offset, tokens))
        offset += tokens.size
    return tuple(held)


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Who holds which tokens, and which of them see each other.

    A token sees an earlier one of its document, unless that is padding. Padding that we append, and
    tokens of no document, see nothing.

    Args:
        rank: this rank.
        by_rank: the ranges of each rank, in the order in which it holds them.
        first: int64 [R, S], the first token of the document of each token; a token of no document
            is its own. R is 1 where all samples are equal, else the batch size. S includes the
            padding that we append.
        is_real: bool [R, S], false for padding and for tokens of no document.
    """

    rank: int
    by_rank: tuple[tuple[HeldRange, ...], ...]
    first: IntArray
    is_real: BoolArray

    @property
    def held(self) -> tuple[HeldRange, ...]:
        """Return this rank's ranges."""
        return self.by_rank[self.rank]

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each of this rank's ranges."""
        return [held.tokens.size for held in self.held]

    @property
    def num_samples(self) -> int:
        """Return the number of different samples R: 1, or the batch size."""
        return int(self.first.shape[0])

    @cached_property
    def in_order(self) -> tuple[HeldRange, ...]:
        """Return the ranges of all ranks, by their positions; empty ones last."""
        every = (held for parts in self.by_rank for held in parts)
        return tuple(sorted(every, key=lambda held: (held.tokens.size == 0, held.tokens)))

    @cached_property
    def positions(self) -> IntArray:
        """Return the global positions of this rank's tokens, [L]."""
        return np.concatenate([np.arange(*held.tokens) for held in self.held])

    @cached_property
    def hidden(self) -> BoolArray | None:
        """Return which of this rank's tokens no other token sees, [R, L]; None for none of them."""
        hidden = ~self.is_real[:, self.positions]
        return hidden if hidden.any() else None

    @cached_property
    def starts(self) -> BoolArray:
        """Return at which of this rank's tokens a document starts, [R, L]."""
        starts: BoolArray = self.first[:, self.positions] == self.positions
        return starts


@per_step
def token_map(step: Step) -> TokenMap:
    """Return the token map of a step; computed once."""
    if step.branches is not None:
        raise ValueError(
            "A convolution, a recurrence or a halo was called inside a step whose batch has "
            "`branch_ids`: the token before a branch is not the one that it follows. Put each "
            "branch into a document of its own, behind a copy of what it shares."
        )
    return build_token_map(
        step.layout, step.cp_rank, documents=step.documents, padding=step.padding
    )


def build_token_map(
    layout: Layout, rank: int, *, documents: IntArray | None, padding: BoolArray | None
) -> TokenMap:
    """Build the map of a rank.

    Args:
        layout: which rank owns which positions.
        rank: this rank.
        documents: [R, S] ids, or None where each sequence is one document.
        padding: [B, S], or None for nowhere.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> layout = build_layout("contiguous", seq_len=5, cp_size=2)
        >>> ids = np.array([[0, 0, 1, 1, 1]])
        >>> ranges = build_token_map(layout, 1, documents=ids, padding=None)
        >>> ranges.first.tolist(), ranges.starts.tolist()
        ([[0, 0, 2, 2, 2, 5]], [[False, False, True]])
    """
    by_rank = tuple(held_ranges(layout, r) for r in range(layout.cp_size))
    batch_sizes = [x.shape[0] for x in (documents, padding) if x is not None]
    ids = np.full((max(batch_sizes, default=1), layout.padded_len), NO_DOCUMENT)
    ids[:, : layout.seq_len] = 0 if documents is None else documents
    is_real = ids != NO_DOCUMENT
    if padding is not None:
        is_real[:, : layout.seq_len] &= ~padding
    starts = ids == NO_DOCUMENT
    starts[:, 0] = True
    starts[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    first = np.maximum.accumulate(np.where(starts, np.arange(layout.padded_len), 0), 1)
    return TokenMap(rank, by_rank, first, is_real)


def active_map(name: str, x: Tensor, dim: int) -> tuple[Step, TokenMap] | None:
    """Return the active step and its token map; None without one. Checks a tensor of tokens.

    Args:
        name: the called function, for errors.
        x: [B, ...].
        dim: the sequence dim.
    """
    step = step_of_call()
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == 0:
        raise ValueError(
            f"{name}() got a tensor of shape {tuple(x.shape)} and the sequence dim {dim}. The "
            "first dim is the batch, and the sequence is one of the others: use x.unsqueeze(0) for "
            "a single sequence."
        )
    if step is None:
        return None
    if x.shape[dim] != step.tensor_len:
        raise ValueError(
            f"{name}() got {x.shape[dim]} tokens in dim {dim} of shape {tuple(x.shape)}, inside a "
            f"step whose ranks hold {step.tensor_len} each ({step.layout.seq_len} in all). Give "
            "the dim of the tokens that cp.step(...) yields; for full sequences use "
            "`with cp.paused():`."
        )
    token_ranges = token_map(step)
    check_batch(name, x.shape[0], token_ranges)
    return step, token_ranges


def check_batch(name: str, batch_size: int, tokens: TokenMap) -> None:
    """Raise if documents or padding are those of another number of samples."""
    if tokens.num_samples not in (1, batch_size):
        raise ValueError(
            f"{name}() got {batch_size} samples, but the batch of the step describes documents or "
            f"padding of {tokens.num_samples}. Keep the batch dim as cp.step(...) yields it."
        )


@outside_graphs
def split_ranges(x: Tensor, *, dim: int = 1) -> tuple[Tensor, ...]:
    """Split this rank's tokens into the ranges of consecutive tokens that it holds.

    A rank has one range or several, in the order of its tensors: zigzag gives each rank but the
    last two. Outside a step, the sequence is one range.

    Args:
        x: [B, ...], with this rank's tokens in ``dim``.
        dim: the sequence dim.

    Returns:
        A view of ``x`` for each range; ``torch.cat`` along ``dim`` restores ``x``. A range is empty
        where the batch has tensors that cannot be padded, and the rank would hold padding only.

    Example:
        >>> [part.shape for part in split_ranges(torch.zeros(2, 6, 4))]
        [torch.Size([2, 6, 4])]
    """
    active = active_map("split_ranges", x, dim)
    return (x,) if active is None else torch.split(x, active[1].lengths, dim)


@outside_graphs
def document_starts(x: Tensor, *, dim: int = 1) -> Tensor:
    """Return at which of this rank's tokens the state of a recurrence is zero before the token.

    These are the first tokens of documents, of sequences without documents, and all tokens of no
    document. The first token of a range is among them only if its document starts there.

    Args:
        x: [B, ...], with this rank's tokens in ``dim``; only its shape and device are used.
        dim: the sequence dim.

    Returns:
        bool [B, L].

    Example:
        >>> document_starts(torch.zeros(1, 4, 8))
        tensor([[ True, False, False, False]])
    """
    active = active_map("document_starts", x, dim)
    if active is None:
        starts = torch.arange(x.shape[dim], device=x.device)[None] == 0
    else:
        starts = to_device(torch.from_numpy(active[1].starts), x.device)
    return starts.expand(x.shape[0], -1)
