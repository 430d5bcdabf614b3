# SPDX-License-Identifier: Apache-2.0
"""The plan of one attention call on one rank: layout x mask x rank -> stages.

Pure and computed alike on every rank, so each knows what the others send and nothing is negotiated.
Algorithms differ only here: `gather` fetches all keys of a head group at once, `ring` fetches all
heads of one other rank at a time. Read next: `mask_blocks.py`, and `blockwise/function.py`, which
runs a plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_cp.attn.mask_blocks import Block, Piece
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range, union

# With more runs, adding them up one by one costs more than an accumulator.
_FEW_RUNS = 4


class TokenRun(NamedTuple):
    """Consecutive tokens sent together: offsets in the owner's shard and in the key buffer."""

    shard: int
    buffer: int
    size: int


def split_run(run: TokenRun, edges: Iterable[int]) -> Iterator[TokenRun]:
    """Split a run at those edges that lie in its part of the shard.

    Example:
        >>> list(split_run(TokenRun(4, 10, 6), (2, 7)))
        [TokenRun(shard=4, buffer=10, size=3), TokenRun(shard=7, buffer=13, size=3)]
    """
    stop = run.shard + run.size
    for start, end in pairwise((run.shard, *(e for e in edges if run.shard < e < stop), stop)):
        yield TokenRun(start, run.buffer + start - run.shard, end - start)


class Transfer(NamedTuple):
    """Runs sent to or received from one peer, in the order of the owner's shard."""

    peer: int
    runs: tuple[TokenRun, ...]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens sent."""
        return sum(run.size for run in self.runs)


@dataclass(frozen=True, eq=False)
class Stage:
    """One exchange of keys and values, and the attention computed with them.

    All ranks have the same number of stages, so that their messages pair up in order; a rank may
    have nothing to send or compute in a stage.

    Args:
        heads: the key/value heads.
        collective: every rank gathers all shards, instead of parcels between peers.
        sends: tokens of this rank's shard that other ranks need.
        receives: tokens of other shards that this rank needs.
        own_runs: tokens of its own shard that this rank needs.
        buffer_len: tokens in the key buffer.
        block: the attention to compute; None if the mask leaves nothing.
        has_traffic: whether any ranks exchange something, even if this one does not.
        slots: if not empty, the parts of a shard that are gathered one after the other, in the
            order of the key buffer, which holds for each slot the parts of all ranks.
    """

    heads: Range
    collective: bool
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    own_runs: tuple[TokenRun, ...]
    buffer_len: int
    block: Block | None
    has_traffic: bool
    slots: tuple[Range, ...] = ()

    @cached_property
    def is_local(self) -> bool:
        """Return whether the local shard serves as the key buffer."""
        return not self.receives and not self.collective

    @cached_property
    def has_no_peers(self) -> bool:
        """Return whether this rank neither sends nor receives."""
        return self.is_local and not self.sends

    @cached_property
    def is_one_parcel(self) -> bool:
        """Return whether the parcel of one peer serves as the key buffer, as it arrives."""
        if len(self.receives) != 1 or self.collective or self.own_runs:
            return False
        runs = self.receives[0].runs
        ends = accumulate((run.size for run in runs), initial=0)
        return all(run.buffer == end for run, end in zip(runs, ends, strict=False))

    @cached_property
    def gaps(self) -> tuple[Range, ...]:
        """Return the ranges of the key buffer that receive no key."""
        if self.is_local:
            return ()
        runs = [*self.own_runs, *(run for parcel in self.receives for run in parcel.runs)]
        filled = union(Range(run.buffer, run.buffer + run.size) for run in runs)
        edges = [0, *(edge for part in filled for edge in part), self.buffer_len]
        gaps = (Range(*gap) for gap in zip(edges[::2], edges[1::2], strict=True))
        return tuple(gap for gap in gaps if gap.size)

    @cached_property
    def sent_edges(self) -> tuple[int, ...]:
        """Return where in the shard parcels begin and end; () if many, or if tokens are sent twice.

        Split there, local gradients and returning ones cover the same tokens, at most two parts
        each, and add up without an accumulator of the full shard.
        """
        sent = sorted((run.shard, run.shard + run.size) for p in self.sends for run in p.runs)
        if len(sent) > _FEW_RUNS or any(a[1] > b[0] for a, b in pairwise(sent)):
            return ()
        return tuple(sorted({edge for run in sent for edge in run}))

    @property
    def num_tokens_sent(self) -> int:
        """Return the number of tokens that this rank sends, counted once per receiver."""
        return sum(parcel.num_tokens for parcel in self.sends)


@dataclass(frozen=True, eq=False)
class Plan:
    """All stages of one attention call on one rank.

    Args:
        algorithm: ``gather`` or ``ring``.
        rank: the rank that it is for.
        layout: which rank owns which positions.
        stages: of forward, in order.
        backward_stages: of backward; possibly in more head groups.
        has_blind_queries: whether some query of this rank sees no key.
    """

    algorithm: str
    rank: int
    layout: Layout
    stages: tuple[Stage, ...]
    backward_stages: tuple[Stage, ...]
    has_blind_queries: bool

    @cached_property
    def has_many_stages(self) -> bool:
        """Return whether more than two stages contribute to a query."""
        return sum(stage.heads == self.stages[0].heads for stage in self.stages) > 2

    @cached_property
    def local_block(self) -> Block | None:
        """Return the block that is all of both passes: of all tokens, without traffic."""
        if len(self.stages) != 1 or len(self.backward_stages) != 1:
            return None
        stage, all_tokens = self.stages[0], slice(0, self.layout.local_len)
        block = stage.block if stage.has_no_peers else None
        return None if block is None or block.q_slice != all_tokens else block


@dataclass(frozen=True)
class QueryShard:
    """The queries and heads that one rank computes.

    Args:
        layout: which rank owns which positions.
        rank: the rank in the layout.
        head_offset: index of its first query head in the model.
    """

    layout: Layout
    rank: int
    head_offset: int = 0

    @property
    def is_first(self) -> bool:
        """Return whether this rank logs for all."""
        return self.rank == self.head_offset == 0

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the number of queries here and of keys of the sequence."""
        return self.layout.local_len, self.layout.seq_len

    def positions(self, device: torch.device, *, fused: bool) -> tuple[Tensor, Tensor | None]:
        """Return global positions of the queries, [L], and which are real; None if all are.

        Padding gets the last position of the sequence, so that lookups stay in range.
        """
        return _positions(self.layout, self.rank, device, torch.int32 if fused else torch.int64)


@lru_cache(maxsize=32)
def _positions(
    layout: Layout, rank: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    with torch.inference_mode(False):
        positions = layout.positions(rank)
        is_real = positions < layout.seq_len
        positions = positions.clamp(max=layout.seq_len - 1).to(device, dtype)
        return positions, None if bool(is_real.all()) else is_real.to(device)


def resolve_algorithm(name: str) -> Literal["gather", "ring"]:
    """Return how keys are exchanged: ``gather`` unless named, for the fewest and largest kernels.

    With ``ulysses`` there is one rank left after tokens are exchanged for heads: no keys are sent.
    """
    return "ring" if name == "ring" else "gather"


def build_plan(
    algorithm: str,
    *,
    layout: Layout,
    bounds: Bounds,
    rank: int,
    num_kv_heads: int,
    num_groups: int = 1,
    num_backward_groups: int | None = None,
    sorted_keys: bool = False,
    block_size: int = 1,
) -> Plan:
    """Plan one attention call.

    Args:
        algorithm: ``gather`` or ``ring``.
        layout: which rank owns which positions.
        bounds: the mask.
        rank: the rank to plan for.
        num_kv_heads: key/value heads.
        num_groups: head groups, at most one per key/value head.
        num_backward_groups: head groups in backward, if different.
        sorted_keys: put gathered keys in the order of the sequence. Otherwise they stay in the
            order of arrival, where that saves a copy.
        block_size: sorted keys keep their offset in blocks of this size: where keys are left out,
            the buffer may have gaps.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> from lightning_cp.geometry.mask import Mask
        >>> layout = build_layout("contiguous", seq_len=8, cp_size=2)
        >>> bounds = Mask(causal=True, window=2).bounds(8)
        >>> plan = build_plan("ring", layout=layout, bounds=bounds, rank=0, num_kv_heads=1)
        >>> [stage.num_tokens_sent for stage in plan.stages]  # one key crosses the border
        [0, 1]
    """
    needs = [_needs(layout, bounds, r) for r in range(layout.cp_size)]
    shards = [_shard(layout, r) for r in range(layout.cp_size)]
    moved = sum(
        _num_tokens(needed) - _num_tokens(piece.positions for piece in _wanted(shard, needed))
        for shard, needed in zip(shards, needs, strict=True)
    )
    if algorithm == "gather":
        # One all-gather is faster than many messages, but sends every shard to every rank.
        collective = 0 < layout.padded_len * (layout.cp_size - 1) <= 2 * moved
        slots = _slots(layout) if collective and not sorted_keys else ()
        buffers = [_in_blocks(needed, block_size) for needed in needs]
        if slots:
            buffers = [_in_slots(layout, slots)] * layout.cp_size
        bare = _gather_stages(
            layout,
            bounds,
            rank,
            needs,
            buffers,
            moved=moved > 0,
            collective=collective,
            slots=slots,
        )
    else:
        bare = _ring_stages(layout, bounds, rank, needs)
    num_backward_groups = num_backward_groups or num_groups
    forward = _by_heads(bare, num_kv_heads, num_groups if moved else 1)
    # Local keys are computed while others arrive, and in backward while gradients are sent. With
    # several head groups, the local stage of a ring does both: in the first group and in the last.
    last_first = (*bare[1:], bare[0])
    backward = _by_heads(
        last_first if algorithm == "gather" else bare,
        num_kv_heads,
        num_backward_groups if moved else 1,
        last=last_first,
    )
    ranges = layout.ranges(rank)
    blind = any((bounds.first[:, a:b] == bounds.last[:, a:b]).any() for a, b in ranges)
    return Plan(algorithm, rank, layout, forward, backward, blind)


def _by_heads(
    bare: tuple[Stage, ...],
    num_kv_heads: int,
    num_groups: int,
    *,
    last: tuple[Stage, ...] | None = None,
) -> tuple[Stage, ...]:
    """Repeat the stages for each head group; the last of several may have another order."""
    num_groups = max(1, min(num_groups, num_kv_heads))
    edges = [num_kv_heads * g // num_groups for g in range(num_groups + 1)]
    orders = [bare] * num_groups
    if num_groups > 1 and last is not None:
        orders[-1] = last
    return tuple(
        replace(stage, heads=Range(*heads))
        for heads, order in zip(pairwise(edges), orders, strict=True)
        for stage in order
    )


def _needs(layout: Layout, bounds: Bounds, rank: int) -> tuple[Range, ...]:
    """Return the keys that the queries of ``rank`` see."""
    return union(keys for query in layout.ranges(rank) for keys in bounds.hull(query))


def _wanted(shard: tuple[Piece, ...], needed: tuple[Range, ...]) -> tuple[Piece, ...]:
    """Return the needed pieces of a shard, in its order."""
    wanted = []
    for (first, last), offset in shard:
        for start, stop in needed:
            if start < last and first < stop:
                part = Range(max(first, start), min(last, stop))
                wanted.append(Piece(part, offset + part.start - first))
    return tuple(wanted)


def _shard(layout: Layout, rank: int) -> tuple[Piece, ...]:
    """Return the pieces of a shard; adjacent ones are joined."""
    return _joined(_packed(layout.ranges(rank)))


def _packed(ranges: Iterable[Range]) -> tuple[Piece, ...]:
    """Concatenate ranges in a tensor."""
    ranges = tuple(ranges)
    offsets = accumulate((part.size for part in ranges), initial=0)
    return tuple(Piece(part, offset) for part, offset in zip(ranges, offsets, strict=False))


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join pieces that are adjacent both in the sequence and in the tensor."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.positions.stop, last.offset + last.positions.size) == (
            piece.positions.start,
            piece.offset,
        ):
            joined[-1] = Piece(Range(last.positions.start, piece.positions.stop), last.offset)
        else:
            joined.append(piece)
    return tuple(joined)


def _runs(wanted: Iterable[Piece], buffer: Iterable[Piece]) -> tuple[TokenRun, ...]:
    """Return where in the key buffer each wanted piece of a shard goes."""
    buffer = tuple(buffer)
    return tuple(
        TokenRun(
            piece.offset,
            place.offset + piece.positions.start - place.positions.start,
            piece.positions.size,
        )
        for piece in wanted
        for place in buffer
        if place.positions.meet(piece.positions).size
    )


def _build_block(
    layout: Layout, bounds: Bounds, rank: int, keys: tuple[Piece, ...]
) -> Block | None:
    """Return the block of those queries of ``rank`` that see some of the keys."""
    return _block_of(_shard(layout, rank), _joined(keys), bounds)


def _block_of(
    shard: tuple[Piece, ...],
    keys: tuple[Piece, ...],
    bounds: Bounds,
    pairs: Literal["all", "same", "others"] = "all",
) -> Block | None:
    queries = []
    for piece in shard:
        trimmed = [bounds.trim(piece.positions, part.positions) for part in keys]
        seeing = union(pair[0] for pair in trimmed if pair is not None)
        if seeing:
            hull = Range(seeing[0].start, seeing[-1].stop)
            queries.append(Piece(hull, piece.offset + hull.start - piece.positions.start))
    if not queries:
        return None
    q_slice = slice(queries[0].offset, queries[-1].offset + queries[-1].positions.size)
    placed = tuple(Piece(piece.positions, piece.offset - q_slice.start) for piece in queries)
    return Block(placed, keys, bounds, q_slice, pairs)


def _gather_stages(
    layout: Layout,
    bounds: Bounds,
    rank: int,
    needs: list[tuple[Range, ...]],
    buffers: list[tuple[Piece, ...]],
    *,
    moved: bool,
    collective: bool,
    slots: tuple[Range, ...],
) -> tuple[Stage, ...]:
    """Fetch all keys that the rank needs at once."""
    shards = [_shard(layout, r) for r in range(layout.cp_size)]
    others = [r for r in range(layout.cp_size) if r != rank]
    sends = [Transfer(r, _runs(_wanted(shards[rank], needs[r]), buffers[r])) for r in others]
    receives = [Transfer(r, _runs(_wanted(shards[r], needs[rank]), buffers[rank])) for r in others]
    own = _wanted(shards[rank], needs[rank])
    is_local = not collective and not any(parcel.runs for parcel in receives)
    stage = Stage(
        heads=Range(0, 0),
        collective=collective,
        sends=tuple(parcel for parcel in sends if parcel.runs),
        receives=tuple(parcel for parcel in receives if parcel.runs),
        own_runs=_runs(own, buffers[rank]),
        buffer_len=_end(buffers[rank]),
        block=_build_block(layout, bounds, rank, own if is_local else buffers[rank]),
        has_traffic=moved,
    )
    if not slots:
        return (stage,)
    shard = _packed(layout.ranges(rank))
    gathered = replace(
        stage,
        buffer_len=layout.padded_len,
        block=_block_of(shard, buffers[rank], bounds, "others"),
        slots=slots,
    )
    return _local_stage(layout.local_len, _block_of(shard, shard, bounds, "same")), gathered


def _in_blocks(needed: Iterable[Range], block_size: int) -> tuple[Piece, ...]:
    """Place keys in the order of the sequence: a run of queries sees one slice of the buffer.

    Each piece keeps its offset in a block: then a block of queries sees no more blocks of keys than
    it does in the sequence.
    """
    placed, end = [], 0
    for part in needed:
        offset = end + (part.start - end) % block_size
        placed.append(Piece(part, offset))
        end = offset + part.size
    return tuple(placed)


def _end(pieces: tuple[Piece, ...]) -> int:
    """Return the end of the last piece in a tensor."""
    return pieces[-1].offset + pieces[-1].positions.size if pieces else 0


def key_buffer_len(layout: Layout, bounds: Bounds, rank: int, block_size: int) -> int:
    """Return the length of the sorted key buffer of a rank; see `build_plan`."""
    return _end(_in_blocks(_needs(layout, bounds, rank), block_size))


def _local_stage(local_len: int, block: Block | None) -> Stage:
    return Stage(Range(0, 0), False, (), (), (), local_len, block, has_traffic=False)


def _slots(layout: Layout) -> tuple[Range, ...]:
    """Return the parts in which shards are gathered: equal on all ranks, the last one first.

    For zigzag these are all second chunks, from the end of the sequence backwards, and then all
    first chunks, forwards. What a chunk sees before itself is one slice of this.
    """
    sizes = {tuple(part.size for part in parts) for parts in layout.owned}
    if len(sizes) > 1:
        return (Range(0, layout.local_len),)
    ends = accumulate(sizes.pop(), initial=0)
    return tuple(Range(*part) for part in pairwise(ends))[::-1]


def _in_slots(layout: Layout, slots: tuple[Range, ...]) -> tuple[Piece, ...]:
    """Return the pieces of a gathered buffer: slot by slot, in each the shards of all ranks."""
    placed: list[Piece] = []
    start = 0
    for slot in slots:
        for parts in layout.owned:
            inside = (p for p in _packed(parts) if slot.start <= p.offset < slot.stop)
            placed += (Piece(part, start + offset - slot.start) for part, offset in inside)
            start += slot.size
    return tuple(placed)


def _ring_stages(
    layout: Layout, bounds: Bounds, rank: int, needs: list[tuple[Range, ...]]
) -> tuple[Stage, ...]:
    """Fetch the keys of one other rank at a time: in stage s those of rank - s."""
    cp_size = layout.cp_size
    shards = [_shard(layout, r) for r in range(cp_size)]
    stages = []
    for shift in range(cp_size):
        moves = [_wanted(shards[r], needs[(r + shift) % cp_size]) for r in range(cp_size)]
        if shift and not any(moves):
            continue
        source, target = (rank - shift) % cp_size, (rank + shift) % cp_size
        arriving, leaving = moves[source], moves[rank]
        buffer = _packed(piece.positions for piece in arriving) if shift else arriving
        out_buffer = _packed(piece.positions for piece in leaving)
        stages.append(
            Stage(
                heads=Range(0, 0),
                collective=False,
                sends=(Transfer(target, _runs(leaving, out_buffer)),) if shift and leaving else (),
                receives=(Transfer(source, _runs(arriving, buffer)),) if shift and arriving else (),
                own_runs=(),
                buffer_len=_num_tokens(piece.positions for piece in arriving),
                block=_build_block(layout, bounds, rank, buffer),
                has_traffic=shift > 0,
            )
        )
    return tuple(stages)


def _num_tokens(ranges: Iterable[Range]) -> int:
    return sum(part.size for part in ranges)
