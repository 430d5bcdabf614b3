# SPDX-License-Identifier: Apache-2.0
"""What one rank does in one attention call, decided beforehand: layout x mask x rank -> stages.

Pure and the same on every rank, so each knows what the others send and nothing is negotiated.
Algorithms differ here and nowhere else: `gather` brings all keys of a group of heads at once,
`ring` brings all heads of one other rank at a time. Read next: `attend.py`, which carries a plan
out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

from lightning_cp.choices import check_choice
from lightning_cp.layout import Layout
from lightning_cp.mask import Bounds, Range, Tile, union

AlgorithmName = Literal["auto", "gather", "ring", "ulysses"]

# Two groups let the second one travel while the first is computed. More would only make kernels
# smaller: at 32k tokens over 8 GPUs eight groups cost a third of the speed.
GATHER_GROUPS = 2


class Piece(NamedTuple):
    """Consecutive global positions, and where the first of them lies in some tensor."""

    where: Range
    offset: int


class Run(NamedTuple):
    """Consecutive tokens that travel together: from the owner's shard to the key buffer."""

    shard: int
    buffer: int
    size: int


class Parcel(NamedTuple):
    """What goes to or comes from one peer, in the order in which its owner holds it."""

    peer: int
    runs: tuple[Run, ...]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens travel."""
        return sum(run.size for run in self.runs)


class PlacedTile(NamedTuple):
    """A tile with its place: rows of the batch, of the query slice, columns of the key buffer."""

    query: Range
    keys: Range
    kind: Literal["full", "causal", "masked"]
    batch: slice
    rows: slice
    columns: slice


@dataclass(frozen=True, eq=False)
class Block:
    """Queries and keys that meet in one kernel call, under the mask.

    Args:
        queries: this rank's tokens that take part, placed in the query slice.
        keys: the tokens in the key buffer.
        bounds: what sees what.
        rows: which of the rank's tokens the query slice covers.
    """

    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    bounds: Bounds
    rows: slice
    _tiles: dict[int, tuple[PlacedTile, ...]] = field(default_factory=dict, repr=False)

    def tiles(self, size: int) -> tuple[PlacedTile, ...]:
        """Return the block cut into tiles (see `Bounds.tiles`); worked out once per size."""
        if size not in self._tiles:
            self._tiles[size] = tuple(self._build_tiles(size))
        return self._tiles[size]

    def _build_tiles(self, size: int) -> Iterator[PlacedTile]:
        for query in self.queries:
            for keys in self.keys:
                parts = [(slice(None), self.bounds)]
                # Rows that differ have little in common in a large block: each is cut by itself.
                if self.bounds.num_rows > 1 and query.where.size * keys.where.size > size * size:
                    each = range(self.bounds.num_rows)
                    parts = [(slice(row, row + 1), self.bounds.row(row)) for row in each]
                for batch, bounds in parts:
                    for tile in bounds.tiles(query.where, keys.where, size=size):
                        yield _place(tile, batch, query, keys)

    @property
    def work(self) -> int:
        """Return the number of visible pairs."""
        return sum(self.bounds.work(q.where, k.where) for q in self.queries for k in self.keys)


def _place(tile: Tile, batch: slice, query: Piece, keys: Piece) -> PlacedTile:
    row = query.offset + tile.query.start - query.where.start
    column = keys.offset + tile.keys.start - keys.where.start
    rows, columns = slice(row, row + tile.query.size), slice(column, column + tile.keys.size)
    return PlacedTile(*tile, batch, rows, columns)


@dataclass(frozen=True, eq=False)
class Stage:
    """One exchange of keys and values, and the attention that it feeds.

    All ranks have the same number of stages, so that their messages pair up in order; a rank for
    which a stage holds nothing does nothing in it.

    Args:
        heads: which key/value heads.
        collective: every rank gathers every shard whole, instead of parcels from peer to peer.
        sends: what other ranks need of this rank's shard.
        receives: what this rank needs of theirs.
        own: what it needs of its own shard.
        buffer_len: tokens in the key buffer.
        block: the attention to compute; None where the mask leaves nothing.
    """

    heads: Range
    collective: bool
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    own: tuple[Run, ...]
    buffer_len: int
    block: Block | None

    @cached_property
    def is_local(self) -> bool:
        """Say whether the local shard itself serves as the key buffer."""
        return not self.receives and not self.collective

    @cached_property
    def is_alone(self) -> bool:
        """Say whether nothing travels at all."""
        return self.is_local and not self.sends

    @cached_property
    def is_one_parcel(self) -> bool:
        """Say whether what one peer sent serves as the key buffer, as it came."""
        if len(self.receives) != 1 or self.collective or self.own:
            return False
        runs = self.receives[0].runs
        ends = accumulate((run.size for run in runs), initial=0)
        return all(run.buffer == end for run, end in zip(runs, ends, strict=False))

    @property
    def num_tokens_sent(self) -> int:
        """Return how many tokens of its shard this rank sends, counted once per receiver."""
        return sum(parcel.num_tokens for parcel in self.sends)


@dataclass(frozen=True, eq=False)
class Plan:
    """All stages of one attention call on one rank.

    Args:
        algorithm: by whose rules it was made.
        rank: whose it is.
        layout: who owns what.
        stages: what to do, in order.
        has_blind_queries: whether some query of this rank sees no key at all.
    """

    algorithm: str
    rank: int
    layout: Layout
    stages: tuple[Stage, ...]
    has_blind_queries: bool

    @cached_property
    def sole_block(self) -> Block | None:
        """Return the block that is all there is to do, where nothing travels and all take part."""
        first, *others = self.stages
        block = first.block
        if others or not first.is_alone or block is None:
            return None
        return block if block.rows == slice(0, self.layout.local_len) else None


def check_algorithm(name: str) -> None:
    """Refuse an algorithm that does not exist."""
    check_choice("algorithm", name, get_args(AlgorithmName))


def resolve_algorithm(name: str) -> str:
    """Say how keys travel: ``gather`` where it is left open, for the fewest and largest kernels.

    With ``ulysses`` nothing is left to travel once tokens are swapped for heads.
    """
    check_algorithm(name)
    return "gather" if name in ("auto", "ulysses") else name


def build_plan(
    algorithm: str,
    *,
    layout: Layout,
    bounds: Bounds,
    rank: int,
    num_kv_heads: int,
    num_groups: int = GATHER_GROUPS,
) -> Plan:
    """Plan one attention call.

    Args:
        algorithm: ``gather`` or ``ring``.
        layout: who owns what.
        bounds: who sees whom.
        rank: whose plan.
        num_kv_heads: key/value heads.
        num_groups: in how many groups of heads keys are gathered, as far as there are heads.

    Example:
        >>> from lightning_cp.layout import build_layout
        >>> from lightning_cp.mask import Mask
        >>> layout = build_layout("contiguous", seq_len=8, cp_size=2)
        >>> bounds = Mask(causal=True, window=2).bounds(8)
        >>> plan = build_plan("ring", layout=layout, bounds=bounds, rank=0, num_kv_heads=1)
        >>> [stage.num_tokens_sent for stage in plan.stages]  # one key reaches over the border
        [0, 1]
    """
    needs = [_needs(layout, bounds, r) for r in range(layout.cp_size)]
    if algorithm == "gather":
        stages = _gather_stages(layout, bounds, rank, num_kv_heads, needs, num_groups)
    else:
        stages = _ring_stages(layout, bounds, rank, num_kv_heads, needs)
    mine = layout.ranges(rank)
    blind = any((bounds.first[:, a:b] == bounds.last[:, a:b]).any() for a, b in mine)
    return Plan(algorithm, rank, layout, stages, blind)


def _needs(layout: Layout, bounds: Bounds, rank: int) -> tuple[Range, ...]:
    """Return the keys that the queries of ``rank`` see."""
    return union(keys for query in layout.ranges(rank) for keys in bounds.hull(query))


def _wanted(shard: tuple[Piece, ...], needed: tuple[Range, ...]) -> tuple[Piece, ...]:
    """Return what is needed of a shard, placed in it, in its order."""
    wanted = []
    for (first, last), offset in shard:
        for start, stop in needed:
            if start < last and first < stop:
                part = Range(max(first, start), min(last, stop))
                wanted.append(Piece(part, offset + part.start - first))
    return tuple(wanted)


def _shard(layout: Layout, rank: int) -> tuple[Piece, ...]:
    """Return what a rank holds, placed in its shard; neighbours in both are one piece."""
    return _joined(_packed(layout.ranges(rank)))


def _packed(ranges: Iterable[Range]) -> tuple[Piece, ...]:
    """Lay ranges end to end in a tensor."""
    ranges = tuple(ranges)
    offsets = accumulate((part.size for part in ranges), initial=0)
    return tuple(Piece(part, offset) for part, offset in zip(ranges, offsets, strict=False))


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join pieces that follow each other both in the row and in the tensor."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.where.stop, last.offset + last.where.size) == (
            piece.where.start,
            piece.offset,
        ):
            joined[-1] = Piece(Range(last.where.start, piece.where.stop), last.offset)
        else:
            joined.append(piece)
    return tuple(joined)


def _runs(wanted: Iterable[Piece], buffer: Iterable[Piece]) -> tuple[Run, ...]:
    """Say where in the key buffer each wanted piece of a shard goes; it lies inside one piece."""
    buffer = tuple(buffer)
    return tuple(
        Run(piece.offset, place.offset + piece.where.start - place.where.start, piece.where.size)
        for piece in wanted
        for place in buffer
        if place.where.meet(piece.where).size
    )


def _build_block(
    layout: Layout, bounds: Bounds, rank: int, keys: tuple[Piece, ...]
) -> Block | None:
    """Keep the queries of ``rank`` that see some of the keys."""
    queries = []
    for piece in _shard(layout, rank):
        met = [bounds.trim(piece.where, part.where) for part in keys]
        seen = union(pair[0] for pair in met if pair is not None)
        if seen:
            hull = Range(seen[0].start, seen[-1].stop)
            queries.append(Piece(hull, piece.offset + hull.start - piece.where.start))
    if not queries:
        return None
    rows = slice(queries[0].offset, queries[-1].offset + queries[-1].where.size)
    placed = tuple(Piece(piece.where, piece.offset - rows.start) for piece in queries)
    return Block(placed, _joined(keys), bounds, rows)


def _gather_stages(
    layout: Layout,
    bounds: Bounds,
    rank: int,
    num_kv_heads: int,
    needs: list[tuple[Range, ...]],
    num_groups: int,
) -> tuple[Stage, ...]:
    """Bring all keys that the rank needs at once, a group of heads after the other."""
    # Sorted by position, so that what a run of queries sees is one slice of the buffer.
    buffers = [_packed(needed) for needed in needs]
    shards = [_shard(layout, r) for r in range(layout.cp_size)]
    moved = sum(
        _num_tokens(needed) - _num_tokens(piece.where for piece in _wanted(shard, needed))
        for shard, needed in zip(shards, needs, strict=True)
    )
    # One all-gather is faster than many messages, but moves every shard to everyone.
    collective = 0 < layout.padded_len * (layout.cp_size - 1) <= 2 * moved
    others = [r for r in range(layout.cp_size) if r != rank]
    sends = [Parcel(r, _runs(_wanted(shards[rank], needs[r]), buffers[r])) for r in others]
    receives = [Parcel(r, _runs(_wanted(shards[r], needs[rank]), buffers[rank])) for r in others]
    own = _wanted(shards[rank], needs[rank])
    alone = not collective and not any(parcel.runs for parcel in receives)
    block = _build_block(layout, bounds, rank, own if alone else buffers[rank])
    num_groups = min(num_groups, num_kv_heads) if moved else 1
    edges = [num_kv_heads * g // num_groups for g in range(num_groups + 1)]
    return tuple(
        Stage(
            heads=Range(start, stop),
            collective=collective,
            sends=tuple(parcel for parcel in sends if parcel.runs),
            receives=tuple(parcel for parcel in receives if parcel.runs),
            own=_runs(own, buffers[rank]),
            buffer_len=_num_tokens(needs[rank]),
            block=block,
        )
        for start, stop in pairwise(edges)
    )


def _ring_stages(
    layout: Layout, bounds: Bounds, rank: int, num_kv_heads: int, needs: list[tuple[Range, ...]]
) -> tuple[Stage, ...]:
    """Bring the keys of one other rank at a time: in stage s those of the rank s places before."""
    cp_size = layout.cp_size
    shards = [_shard(layout, r) for r in range(cp_size)]
    stages = []
    for shift in range(cp_size):
        moves = [_wanted(shards[r], needs[(r + shift) % cp_size]) for r in range(cp_size)]
        if shift and not any(moves):
            continue
        source, target = (rank - shift) % cp_size, (rank + shift) % cp_size
        arriving, leaving = moves[source], moves[rank]
        buffer = _packed(piece.where for piece in arriving) if shift else arriving
        out_buffer = _packed(piece.where for piece in leaving)
        stages.append(
            Stage(
                heads=Range(0, num_kv_heads),
                collective=False,
                sends=(Parcel(target, _runs(leaving, out_buffer)),) if shift and leaving else (),
                receives=(Parcel(source, _runs(arriving, buffer)),) if shift and arriving else (),
                own=(),
                buffer_len=_num_tokens(piece.where for piece in arriving),
                block=_build_block(layout, bounds, rank, buffer),
            )
        )
    return tuple(stages)


def _num_tokens(ranges: Iterable[Range]) -> int:
    return sum(part.size for part in ranges)
