# SPDX-License-Identifier: Apache-2.0
"""Ulysses: ranks of a group exchange tokens for heads by all-to-all.

Each rank gets the tokens of its group for some heads, computes attention as if the group were one
rank, and exchanges heads for tokens again. One all-to-all sends queries, keys and values, one
returns the output. Between groups, keys are exchanged by the plan of the inner call.

Shapes: B batch, L tokens of this rank, T tokens of the group, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.attn.call import AlibiSlopes, AttentionCall, Bias, ScoreBias
from lightning_cp.attn.plan import QueryShard
from lightning_cp.comm.transport import Transport
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range, union
from lightning_cp.private.modes import plain_functions
from lightning_cp.step.guards import refuse_second_derivative
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import PerStep, Step


class _Move(NamedTuple):
    """Consecutive tokens of one rank: offsets in its shard and among the tokens of the group."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, eq=False)
class Swap:
    """The exchange of tokens for heads in one Ulysses group.

    Args:
        layout: which group owns which positions, in increasing order inside each group.
        rank: index of this group in the layout.
        moves: for each rank of the group, where its tokens go.
        query_heads: for each rank of the group, the query heads that it computes.
        key_heads: for each rank of the group, the key heads that those share.
        gqa_ratio: query heads per key head.
    """

    layout: Layout
    rank: int
    moves: tuple[tuple[_Move, ...], ...]
    query_heads: tuple[Range, ...]
    key_heads: tuple[Range, ...]
    gqa_ratio: int

    @cached_property
    def local_len(self) -> int:
        """Return the tokens of each rank."""
        return sum(move.size for move in self.moves[0])

    def shared_keys(self, rank: int) -> list[int] | None:
        """Return the index of the key head of each query head of a rank.

        None if they are shared evenly, as kernels assume.

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
        shared = [head // self.gqa_ratio - first for head in range(*self.query_heads[rank])]
        evenly = max(1, len(shared) // max(1, self.key_heads[rank].size))
        return None if shared == [i // evenly for i in range(len(shared))] else shared

    def num_local_keys(self, rank: int) -> int:
        """Return the number of key heads with which a rank computes."""
        shared = self.shared_keys(rank)
        return self.key_heads[rank].size if shared is None else len(shared)


def build_swap(layout: Layout, *, rank: int, size: int, num_heads: int, num_key_heads: int) -> Swap:
    """Plan the exchange in Ulysses groups of ``size`` neighbouring ranks.

    Query heads are split as evenly as possible; a key head is sent to each rank that needs it.

    Args:
        layout: which rank owns which positions.
        rank: this rank.
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
        offsets = accumulate((part.size for part in ranges), initial=0)
        moves.append(
            tuple(
                _Move(source, start + part.start - target.start, part.size)
                for part, source in zip(ranges, offsets, strict=False)
                for target, start in zip(owned[rank // size], starts, strict=False)
                if target.meet(part).size
            )
        )
    edges = [num_heads * r // size for r in range(size + 1)]
    queries = tuple(Range(a, b) for a, b in pairwise(edges))
    ratio = num_heads // num_key_heads
    keys = tuple(
        Range(part.start // ratio, -(-part.stop // ratio) if part.size else part.start // ratio)
        for part in queries
    )
    return Swap(merged, rank // size, tuple(moves), queries, keys, ratio)


class Place(NamedTuple):
    """What a rank computes of the attention calls of a step.

    Args:
        swap: the exchange of its Ulysses group; None without Ulysses.
        query_shard: its queries and heads.
        num_kv_heads: its key heads.
    """

    swap: Swap | None
    query_shard: QueryShard
    num_kv_heads: int


_places = PerStep[Place]()


def place_of(step: Step, q: Tensor, k: Tensor) -> Place:
    """Return what this rank computes of calls with as many heads; decided once per step."""
    heads = q.shape[1], k.shape[1]
    return _places.find(step, heads, lambda: _build_place(step, *heads))


def has_attended(step: Step) -> bool:
    """Return whether attention was computed in a step."""
    return bool(_places.all(step))


def _build_place(step: Step, num_heads: int, num_key_heads: int) -> Place:
    layout, inside = step.layout, step.groups.inside
    if inside.size == 1:
        return Place(None, QueryShard(layout, step.cp_rank), num_key_heads)
    swap = build_swap(
        layout,
        rank=step.cp_rank,
        size=inside.size,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
    )
    query_shard = QueryShard(swap.layout, swap.rank, swap.query_heads[inside.rank].start)
    return Place(swap, query_shard, max(1, swap.num_local_keys(inside.rank)))


@dataclass(frozen=True, eq=False)
class UlyssesCall:
    """A call between two exchanges of tokens and heads.

    Args:
        swap: which rank gets which heads.
        inside: the Ulysses group.
        call: the call for this rank's heads of the group's tokens, in the layout of the swap.
    """

    swap: Swap
    inside: Transport
    call: AttentionCall

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: ScoreBias | None
    ) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks; see `AttentionCall`."""
        swap, inside = self.swap, self.inside
        heads = slice(*swap.query_heads[inside.rank])
        q, k, v = to_heads(q, k, v, swap, inside)
        sinks = None if sinks is None else sinks[heads]
        bias = None if bias is None else bias_to_heads(bias, swap, inside)
        if q.shape[1]:
            out = self.call.run(q, k, v, sinks, bias)
        else:  # more ranks than heads: nothing to compute, but collectives in backward
            out = v if sinks is None else v + sinks.sum().to(v.dtype)
        return to_tokens(out, swap, inside)


def to_heads(q: Tensor, k: Tensor, v: Tensor, swap: Swap, transport: Transport) -> list[Tensor]:
    """Return the queries, keys and values of the group's tokens, for this rank's heads.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D].
        v: [B, K, L, Dv].
        swap: which rank gets what.
        transport: the group.

    Returns:
        [B, h, T, D], [B, k, T, D], [B, k, T, Dv]; k divides h. Keys that are shared unevenly are
        repeated for each query head.
    """
    tensors: tuple[Tensor, ...] = _ToHeads.apply(q, k, v, swap, transport)  # type: ignore[no-untyped-call]
    return list(tensors)


def to_tokens(out: Tensor, swap: Swap, transport: Transport) -> Tensor:
    """Return all heads of this rank's tokens, [B, H, L, Dv], from some heads of the group's tokens.

    Args:
        out: [B, h, T, Dv].
        swap: which rank has what.
        transport: the group.
    """
    tokens: Tensor = _ToTokens.apply(out, swap, transport)  # type: ignore[no-untyped-call]
    return tokens


def bias_to_heads(bias: ScoreBias, swap: Swap, transport: Transport) -> ScoreBias:
    """Return a bias for this rank's heads and the group's tokens.

    Args:
        bias: of all heads and this rank's tokens.
        swap: which rank gets what.
        transport: the group.
    """
    query_heads, values = swap.query_heads, bias.values
    # Size 1 is one query per rank, not one value for all queries, if each rank has one token.
    is_shared = isinstance(bias, AlibiSlopes) or (
        values.shape[2] == 1 and swap.layout.local_len > len(query_heads)
    )
    if is_shared:
        return bias.select(slice(*query_heads[transport.rank]))
    one_head = tuple(Range(0, 1) for _ in query_heads)
    heads = query_heads if values.shape[1] > 1 else one_head
    return Bias(_collect([values.contiguous()], [heads], swap, transport)[0])


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
                dk, dv = (_sum_shared(x, shared, num_keys) for x in (dk, dv))
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
        refuse_second_derivative()
        with plain_functions():
            tensors = _collect([dout], [ctx.swap.query_heads], ctx.swap, ctx.transport)
        return tensors[0], None, None


def _sum_shared(x: Tensor, shared: list[int], num_keys: int) -> Tensor:
    """Add up the gradients of key heads that several query heads share."""
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
        swap: which tokens go where.
        transport: the group.
    """
    size, rank = transport.size, transport.rank
    parts = [
        [x[:, slice(*assigned[r])] for x, assigned in zip(tensors, heads, strict=True)]
        for r in range(size)
    ]
    sizes = [sum(x.numel() for x in part) for part in parts]
    wire = torch.cat([x.reshape(-1) for part in parts for x in part])
    arrived = wire.new_empty(size * sizes[rank])
    wait = transport.all_to_all(arrived, wire, [sizes[rank]] * size, sizes)
    shapes = [x.shape for x in parts[rank]]
    outputs = [wire.new_empty(b, h, size * tokens, dim) for b, h, tokens, dim in shapes]
    wait()
    for moves, part in zip(swap.moves, torch.split(arrived, [sizes[rank]] * size), strict=True):
        for x, output in zip(_split(part, shapes), outputs, strict=True):
            for source, target, num_tokens in moves:
                output[:, :, target : target + num_tokens] = x[:, :, source : source + num_tokens]
    return outputs


def _spread(
    tensors: Sequence[Tensor], heads: Sequence[tuple[Range, ...]], swap: Swap, transport: Transport
) -> list[Tensor]:
    """Send each rank its tokens of these heads; return all heads of this rank's tokens.

    Heads that several ranks have are summed.

    Args:
        tensors: [B, some heads, T, any D], of one dtype.
        heads: for each tensor, which heads each rank has.
        swap: which tokens come from where.
        transport: the group.
    """
    size, rank, local_len = transport.size, transport.rank, swap.local_len
    shapes = [
        [
            torch.Size((x.shape[0], assigned[r].size, local_len, x.shape[3]))
            for x, assigned in zip(tensors, heads, strict=True)
        ]
        for r in range(size)
    ]
    sizes = [sum(shape.numel() for shape in every) for every in shapes]
    wire = tensors[0].new_empty(size * sizes[rank])
    for moves, part in zip(swap.moves, torch.split(wire, [sizes[rank]] * size), strict=True):
        for x, tensor in zip(_split(part, shapes[rank]), tensors, strict=True):
            for source, target, num_tokens in moves:
                x[:, :, source : source + num_tokens] = tensor[:, :, target : target + num_tokens]
    arrived = wire.new_empty(sum(sizes))
    transport.all_to_all(arrived, wire, sizes, [sizes[rank]] * size)()
    every = [
        _split(part, shape) for part, shape in zip(torch.split(arrived, sizes), shapes, strict=True)
    ]
    return [
        _join_heads(parts, assigned)
        for parts, assigned in zip(zip(*every, strict=True), heads, strict=True)
    ]


def _split(wire: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of a flat tensor as the tensors concatenated in it."""
    parts = torch.split(wire, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _join_heads(parts: Sequence[Tensor], heads: Sequence[Range]) -> Tensor:
    """Concatenate parts with some heads each; heads that several parts have are summed."""
    if all(a.stop == b.start for a, b in pairwise(heads)):
        return torch.cat(list(parts), 1)
    first, dtype = parts[0], parts[0].dtype
    total = first.new_zeros(
        first.shape[0], heads[-1].stop, *first.shape[2:], dtype=accumulation_dtype(dtype)
    )
    for part, assigned in zip(parts, heads, strict=True):
        total[:, slice(*assigned)] += part
    return total.to(dtype)
