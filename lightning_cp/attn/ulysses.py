# SPDX-License-Identifier: Apache-2.0
"""Swap tokens for heads: each rank of a group gets the tokens of all of them, for some heads.

Attention of those heads then runs as if the group were one rank; afterwards heads are swapped for
tokens again. One all-to-all carries queries, keys and values, one brings the output back. Ranks
beyond the group, if there are any, are met by the plan that comes between.

Shapes: B batch, L tokens of this rank, T tokens of the group, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import accumulation_dtype
from lightning_cp.comm.transport import Transport
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range, union
from lightning_cp.torch_private import plain_functions


class _Move(NamedTuple):
    """Consecutive tokens of one rank, and where they lie among those of the group."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, eq=False)
class Swap:
    """Who gets which heads, and in which order the group's tokens lie.

    Args:
        layout: who owns what once groups count as ranks; positions rise inside each of them.
        rank: this group's place in it.
        moves: for each rank of the group, where its tokens go.
        query_heads: for each rank of the group, the query heads that it computes.
        key_heads: for each rank of the group, the key heads that those share.
        group: query heads that share a key head.
    """

    layout: Layout
    rank: int
    moves: tuple[tuple[_Move, ...], ...]
    query_heads: tuple[Range, ...]
    key_heads: tuple[Range, ...]
    group: int

    @cached_property
    def local_len(self) -> int:
        """Return how many tokens each rank brings."""
        return sum(move.size for move in self.moves[0])

    def shared_keys(self, rank: int) -> list[int] | None:
        """Return for each query head of a rank which of its key heads it shares.

        None where they are shared evenly, so that nobody need be told.

        Example:
            >>> from lightning_cp.geometry.layout import build_layout
            >>> layout = build_layout("contiguous", seq_len=2, cp_size=2)
            >>> swap = build_swap(layout, rank=0, size=2, num_heads=6, num_key_heads=2)
            >>> swap.query_heads, swap.shared_keys(0)
            ((Range(start=0, stop=3), Range(start=3, stop=6)), None)
            >>> swap = build_swap(layout, rank=0, size=2, num_heads=6, num_key_heads=3)
            >>> swap.key_heads, swap.shared_keys(0)
            ((Range(start=0, stop=2), Range(start=1, stop=3)), [0, 0, 1])
        """
        first = self.key_heads[rank].start
        shared = [head // self.group - first for head in range(*self.query_heads[rank])]
        evenly = max(1, len(shared) // max(1, self.key_heads[rank].size))
        return None if shared == [i // evenly for i in range(len(shared))] else shared

    def num_local_keys(self, rank: int) -> int:
        """Return how many key heads a rank computes with."""
        shared = self.shared_keys(rank)
        return self.key_heads[rank].size if shared is None else len(shared)


def build_swap(layout: Layout, *, rank: int, size: int, num_heads: int, num_key_heads: int) -> Swap:
    """Plan a swap among groups of ``size`` neighbouring ranks.

    Query heads are dealt as evenly as they go, in runs; keys travel to each rank that needs them.

    Args:
        layout: who owns what.
        rank: this rank's place in it.
        size: ranks of a group; divides those of the layout.
        num_heads: query heads.
        num_key_heads: key heads; divides the query heads.
    """
    groups = [range(start, start + size) for start in range(0, layout.cp_size, size)]
    owned = tuple(union(part for r in group for part in layout.ranges(r)) for group in groups)
    merged = Layout(layout.name, layout.seq_len, owned)
    starts = [*accumulate((part.size for part in owned[rank // size]), initial=0)]
    moves = []
    for member in groups[rank // size]:
        ranges = layout.ranges(member)
        at = accumulate((part.size for part in ranges), initial=0)
        moves.append(
            tuple(
                _Move(source, start + part.start - home.start, part.size)
                for part, source in zip(ranges, at, strict=False)
                for home, start in zip(owned[rank // size], starts, strict=False)
                if home.meet(part).size
            )
        )
    edges = [num_heads * r // size for r in range(size + 1)]
    queries = tuple(Range(a, b) for a, b in pairwise(edges))
    group = num_heads // num_key_heads
    keys = tuple(
        Range(part.start // group, -(-part.stop // group) if part.size else part.start // group)
        for part in queries
    )
    return Swap(merged, rank // size, tuple(moves), queries, keys, group)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Attention of q, k, v, sinks and bias."""


@dataclass(frozen=True, eq=False)
class SwappedCall:
    """A call of neighbours that swap tokens for heads, before and after.

    Args:
        swap: who gets which heads.
        inside: the neighbours.
        call: what is then to be done, by the layout of the swap; who runs it knows its kind.
    """

    swap: Swap
    inside: Transport
    call: Any

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        attend: Attend,
    ) -> Tensor:
        """Attend with all heads of this rank's tokens, [B, H, L, Dv].

        Args:
            q: [B, H, L, D].
            k: [B, K, L, D].
            v: [B, K, L, Dv].
            sinks: [H] or None.
            bias: as in `attend.attend`.
            attend: carries the call out, for this rank's heads of the neighbours' tokens.
        """
        swap, inside = self.swap, self.inside
        heads = slice(*swap.query_heads[inside.rank])
        q, k, v = to_heads(q, k, v, swap, inside)
        sinks = None if sinks is None else sinks[heads]
        bias = None if bias is None else bias_to_heads(bias, swap, inside)
        if q.shape[1]:
            out = attend(q, k, v, sinks, bias)
        else:  # more ranks than heads: nothing to do, but a part in what all do in backward
            out = v if sinks is None else v + sinks.sum().to(v.dtype)
        return to_tokens(out, swap, inside)


def to_heads(q: Tensor, k: Tensor, v: Tensor, swap: Swap, transport: Transport) -> list[Tensor]:
    """Return the queries, keys and values of the group's tokens, for this rank's heads.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D].
        v: [B, K, L, Dv].
        swap: who gets what.
        transport: the group.

    Returns:
        [B, h, T, D], [B, k, T, D], [B, k, T, Dv]; k divides h. Keys that are shared unevenly are
        there once per query head.
    """
    found: tuple[Tensor, ...] = _ToHeads.apply(q, k, v, swap, transport)  # type: ignore[no-untyped-call]
    return list(found)


def to_tokens(out: Tensor, swap: Swap, transport: Transport) -> Tensor:
    """Return all heads of this rank's tokens, [B, H, L, Dv], of some heads of the group's tokens.

    Args:
        out: [B, h, T, Dv].
        swap: who got what.
        transport: the group.
    """
    found: Tensor = _ToTokens.apply(out, swap, transport)  # type: ignore[no-untyped-call]
    return found


def bias_to_heads(bias: Tensor, swap: Swap, transport: Transport) -> Tensor:
    """Return a bias for this rank's heads and the group's tokens.

    Args:
        bias: [B or 1, H or 1, L or 1, S], or slopes [H].
        swap: who gets what.
        transport: the group.
    """
    rank = transport.rank
    if bias.dim() == 1:
        return bias[slice(*swap.query_heads[rank])]
    every = tuple(Range(0, 1) for _ in swap.query_heads)
    heads = swap.query_heads if bias.shape[1] > 1 else every
    # One query per rank is not one row for all queries: neighbours have other ones.
    if bias.shape[2] == 1 and swap.layout.local_len > len(swap.query_heads):
        return bias[:, slice(*heads[rank])]
    return _collect([bias.contiguous()], [heads], swap, transport)[0]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, swap: Swap, transport: Transport
    ) -> tuple[Tensor, ...]:
        ctx.swap, ctx.transport = swap, transport
        heads = [swap.query_heads, swap.key_heads, swap.key_heads]
        with plain_functions():
            q, k, v = _collect([q, k, v], heads, swap, transport)
            shared = swap.shared_keys(transport.rank)
            return (q, k, v) if shared is None else (q, k[:, shared], v[:, shared])

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        swap, transport = ctx.swap, ctx.transport
        with plain_functions():
            shared = swap.shared_keys(transport.rank)
            if shared is not None:
                num_keys = swap.key_heads[transport.rank].size
                dk, dv = (_summed(x, shared, num_keys) for x in (dk, dv))
            heads = [swap.query_heads, swap.key_heads, swap.key_heads]
            return (*_spread([dq, dk, dv], heads, swap, transport), None, None)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, swap: Swap, transport: Transport) -> Tensor:
        ctx.swap, ctx.transport = swap, transport
        with plain_functions():
            return _spread([out], [swap.query_heads], swap, transport)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with plain_functions():
            found = _collect([dout], [ctx.swap.query_heads], ctx.swap, ctx.transport)
        return found[0], None, None


def _summed(x: Tensor, shared: list[int], num_keys: int) -> Tensor:
    """Add up the gradients of key heads that several query heads have used."""
    total = x.new_zeros(x.shape[0], num_keys, *x.shape[2:], dtype=accumulation_dtype(x.dtype))
    index = torch.tensor(shared, device=x.device)
    return total.index_add_(1, index, x.to(total.dtype)).to(x.dtype)


def _collect(
    tensors: Sequence[Tensor], heads: Sequence[tuple[Range, ...]], swap: Swap, transport: Transport
) -> list[Tensor]:
    """Send each rank its heads of these tokens; return this rank's heads of all tokens.

    Args:
        tensors: [B, any heads, L, any D], of one dtype.
        heads: for each tensor, which of its heads each rank gets.
        swap: where tokens go.
        transport: the group.
    """
    size, rank = transport.size, transport.rank
    parts = [
        [x[:, slice(*dealt[r])] for x, dealt in zip(tensors, heads, strict=True)]
        for r in range(size)
    ]
    sizes = [sum(x.numel() for x in part) for part in parts]
    wire = torch.cat([x.reshape(-1) for part in parts for x in part])
    arrived = wire.new_empty(size * sizes[rank])
    wait = transport.all_to_all(arrived, wire, [sizes[rank]] * size, sizes)
    shapes = [x.shape for x in parts[rank]]
    found = [wire.new_empty(b, h, size * tokens, dim) for b, h, tokens, dim in shapes]
    wait()
    for moves, part in zip(swap.moves, torch.split(arrived, [sizes[rank]] * size), strict=True):
        for x, whole in zip(_opened(part, shapes), found, strict=True):
            for source, target, num_tokens in moves:
                whole[:, :, target : target + num_tokens] = x[:, :, source : source + num_tokens]
    return found


def _spread(
    tensors: Sequence[Tensor], heads: Sequence[tuple[Range, ...]], swap: Swap, transport: Transport
) -> list[Tensor]:
    """Send each rank its tokens of these heads; return all heads of this rank's tokens.

    Heads that several ranks have are summed.

    Args:
        tensors: [B, some heads, T, any D], of one dtype.
        heads: for each tensor, which heads each rank has.
        swap: where tokens come from.
        transport: the group.
    """
    size, rank, local_len = transport.size, transport.rank, swap.local_len
    shapes = [
        [
            torch.Size((x.shape[0], dealt[r].size, local_len, x.shape[3]))
            for x, dealt in zip(tensors, heads, strict=True)
        ]
        for r in range(size)
    ]
    sizes = [sum(shape.numel() for shape in every) for every in shapes]
    wire = tensors[0].new_empty(size * sizes[rank])
    for moves, part in zip(swap.moves, torch.split(wire, [sizes[rank]] * size), strict=True):
        for x, whole in zip(_opened(part, shapes[rank]), tensors, strict=True):
            for source, target, num_tokens in moves:
                x[:, :, source : source + num_tokens] = whole[:, :, target : target + num_tokens]
    arrived = wire.new_empty(sum(sizes))
    transport.all_to_all(arrived, wire, sizes, [sizes[rank]] * size)()
    every = [
        _opened(part, shape)
        for part, shape in zip(torch.split(arrived, sizes), shapes, strict=True)
    ]
    return [
        _put_together(parts, dealt)
        for parts, dealt in zip(zip(*every, strict=True), heads, strict=True)
    ]


def _opened(wire: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return a flat tensor seen as tensors that lie in it end to end."""
    parts = torch.split(wire, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _put_together(parts: Sequence[Tensor], heads: Sequence[Range]) -> Tensor:
    """Return all heads of which each part has some; those that several have are summed."""
    if all(a.stop == b.start for a, b in pairwise(heads)):
        return torch.cat(list(parts), 1)
    first, dtype = parts[0], parts[0].dtype
    total = first.new_zeros(
        first.shape[0], heads[-1].stop, *first.shape[2:], dtype=accumulation_dtype(dtype)
    )
    for part, dealt in zip(parts, heads, strict=True):
        total[:, slice(*dealt)] += part
    return total.to(dtype)
