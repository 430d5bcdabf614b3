# SPDX-License-Identifier: Apache-2.0
"""What one rank does in one attention call, decided beforehand: layout x mask x rank -> stages.

Pure and the same on every rank, so each knows what the others send and nothing is negotiated.
Algorithms differ here and nowhere else: `gather` brings all keys of a group of heads at once,
`ring` brings all heads of one other rank at a time. Read next: `attend.py`, which carries a plan
out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

from lightning_cp.geometry.bounds import Bounds, Tile
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range, union
from lightning_cp.options import AlgorithmName, check_choice

# More pieces cost more than an accumulator.
_FEW_RUNS = 4


class Piece(NamedTuple):
    """Consecutive global positions, and where the first of them lies in some tensor."""

    where: Range
    offset: int


class Run(NamedTuple):
    """Consecutive tokens that travel together: from the owner's shard to the key buffer."""

    shard: int
    buffer: int
    size: int


def cut(run: Run, edges: Iterable[int]) -> Iterator[Run]:
    """Cut a run where edges lie in its part of the shard.

    Example:
        >>> list(cut(Run(4, 10, 6), (2, 7)))
        [Run(shard=4, buffer=10, size=3), Run(shard=7, buffer=13, size=3)]
    """
    stop = run.shard + run.size
    for start, end in pairwise((run.shard, *(e for e in edges if run.shard < e < stop), stop)):
        yield Run(start, run.buffer + start - run.shard, end - start)


class Parcel(NamedTuple):
    """What goes to or comes from one peer, in the order in which its owner holds it."""

    peer: int
    runs: tuple[Run, ...]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens travel."""
        return sum(run.size for run in self.runs)


class PlacedTile(NamedTuple):
    """A tile with its place: rows of the batch, of the query slice, columns of the key buffer.

    Tiles that were fused are whole or causal in their rows and columns, and no longer consecutive
    in the row: their ``query`` and ``keys`` are only as long as they are.
    """

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
        pairs: which pieces meet: all, only those that are the same tokens, or only others.
    """

    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    bounds: Bounds
    rows: slice
    pairs: Literal["all", "same", "others"] = "all"
    _tiles: dict[tuple[int, bool], tuple[PlacedTile, ...]] = field(default_factory=dict, repr=False)

    def tiles(self, size: int, *, fused: bool = False) -> tuple[PlacedTile, ...]:
        """Return the block cut into tiles (see `Bounds.tiles`); worked out once.

        Args:
            size: masked tiles are cut down to so many squared pairs.
            fused: join whole and causal tiles that are neighbours in the tensors.
        """
        key = (size, fused)
        if key not in self._tiles:
            found = tuple(self._build_tiles(size))
            self._tiles[key] = fuse(found) if fused else found
        return self._tiles[key]

    def _build_tiles(self, size: int) -> Iterator[PlacedTile]:
        for query, keys in self._meeting():
            parts = [(slice(None), self.bounds)]
            # Rows that differ have little in common in a large block: each is cut by itself.
            if self.bounds.num_samples > 1 and query.where.size * keys.where.size > size * size:
                each = range(self.bounds.num_samples)
                parts = [(slice(row, row + 1), self.bounds.sample(row)) for row in each]
            for batch, bounds in parts:
                for tile in bounds.tiles(query.where, keys.where, size=size):
                    yield _place(tile, batch, query, keys)

    def _meeting(self) -> Iterator[tuple[Piece, Piece]]:
        for query in self.queries:
            for keys in self.keys:
                # Queries that see nothing are cut off their piece: what remains lies in it.
                same = keys.where.start <= query.where.start < keys.where.stop
                if self.pairs == "all" or same == (self.pairs == "same"):
                    yield query, keys

    @property
    def work(self) -> int:
        """Return the number of visible pairs."""
        return sum(self.bounds.work(query.where, keys.where) for query, keys in self._meeting())


def _place(tile: Tile, batch: slice, query: Piece, keys: Piece) -> PlacedTile:
    row = query.offset + tile.query.start - query.where.start
    column = keys.offset + tile.keys.start - keys.where.start
    rows, columns = slice(row, row + tile.query.size), slice(column, column + tile.keys.size)
    return PlacedTile(*tile, batch, rows, columns)


def fuse(tiles: Iterable[PlacedTile]) -> tuple[PlacedTile, ...]:
    """Join tiles that are neighbours in the tensors: fewer and larger kernels, the same pairs.

    Where all is visible, the order of keys does not matter, nor where in the row they are. The
    largest come first.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> from lightning_cp.geometry.mask import Mask
        >>> layout = build_layout("zigzag", seq_len=8, cp_size=2)
        >>> bounds = Mask(causal=True).bounds(8)
        >>> ring = build_plan("ring", layout=layout, bounds=bounds, rank=0, num_kv_heads=1)
        >>> block = ring.stages[0].block
        >>> len(block.tiles(1)), [tile.kind for tile in block.tiles(1, fused=True)]
        (3, ['causal'])
    """
    alone = [tile for tile in tiles if tile.kind == "masked" or tile.batch != slice(None)]
    whole = {_span(tile) for tile in tiles if tile.kind == "full" and tile.batch == slice(None)}
    causal = {_span(tile) for tile in tiles if tile.kind == "causal" and tile.batch == slice(None)}
    whole = _joined_spans(whole, dim=1)
    squares = [(rows, columns) for rows, columns in sorted(causal)]
    joined: list[tuple[Range, Range]] = []
    for rows, columns in squares:
        if joined:
            above, left = joined[-1]
            corner = (rows, left)
            if above.stop == rows.start and left.stop == columns.start and corner in whole:
                whole.remove(corner)
                joined[-1] = (Range(above.start, rows.stop), Range(left.start, columns.stop))
                continue
        joined.append((rows, columns))
    whole = _joined_spans(whole, dim=0)
    fused = [_fused_tile("full", *span) for span in sorted(whole)]
    fused += [_fused_tile("causal", *span) for span in joined]
    found = [*fused, *alone]
    return tuple(sorted(found, key=lambda tile: -tile.query.size * tile.keys.size))


def _span(tile: PlacedTile) -> tuple[Range, Range]:
    rows, columns = tile.rows, tile.columns
    return Range(rows.start, rows.stop), Range(columns.start, columns.stop)


def _joined_spans(spans: set[tuple[Range, Range]], *, dim: int) -> set[tuple[Range, Range]]:
    """Join rectangles that are neighbours along ``dim`` and alike along the other."""
    joined: list[list[Range]] = []
    for span in sorted(spans, key=lambda span: (span[1 - dim], span[dim])):
        last = joined[-1] if joined else None
        if last and last[1 - dim] == span[1 - dim] and last[dim].stop == span[dim].start:
            last[dim] = Range(last[dim].start, span[dim].stop)
        else:
            joined.append(list(span))
    return {(rows, columns) for rows, columns in joined}


def _fused_tile(kind: Literal["full", "causal"], rows: Range, columns: Range) -> PlacedTile:
    return PlacedTile(rows, columns, kind, slice(None), slice(*rows), slice(*columns))


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
        travels: whether something travels between some ranks, if not to or from this one.
        slots: if not empty, the parts of a shard that are gathered one by one, as they lie in the
            key buffer: there, each holds those of all ranks.
    """

    heads: Range
    collective: bool
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    own: tuple[Run, ...]
    buffer_len: int
    block: Block | None
    travels: bool
    slots: tuple[Range, ...] = ()

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

    @cached_property
    def gaps(self) -> tuple[Range, ...]:
        """Return the places of the key buffer that no key comes to."""
        if self.is_local:
            return ()
        runs = [*self.own, *(run for parcel in self.receives for run in parcel.runs)]
        filled = union(Range(run.buffer, run.buffer + run.size) for run in runs)
        edges = [0, *(edge for part in filled for edge in part), self.buffer_len]
        gaps = (Range(*gap) for gap in zip(edges[::2], edges[1::2], strict=True))
        return tuple(gap for gap in gaps if gap.size)

    @cached_property
    def sent_edges(self) -> tuple[int, ...]:
        """Return where in the shard a few parcels begin and end; none if some tokens leave twice.

        Cut there, own gradients and those that come back are parts of the same tokens, two of each
        at most, and add up without an accumulator of the whole shard.
        """
        sent = sorted((run.shard, run.shard + run.size) for p in self.sends for run in p.runs)
        if len(sent) > _FEW_RUNS or any(a[1] > b[0] for a, b in pairwise(sent)):
            return ()
        return tuple(sorted({edge for run in sent for edge in run}))

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
        backward_stages: the same for gradients; the plan may have them in more groups of heads.
        has_blind_queries: whether some query of this rank sees no key at all.
    """

    algorithm: str
    rank: int
    layout: Layout
    stages: tuple[Stage, ...]
    backward_stages: tuple[Stage, ...]
    has_blind_queries: bool

    @cached_property
    def has_many_stages(self) -> bool:
        """Say whether a query meets keys in more than two stages."""
        return sum(stage.heads == self.stages[0].heads for stage in self.stages) > 2


def check_algorithm(name: str) -> None:
    """Refuse an algorithm that does not exist."""
    check_choice("algorithm", name, get_args(AlgorithmName))


def resolve_algorithm(name: str) -> Literal["gather", "ring"]:
    """Say how keys travel: ``gather`` where it is left open, for the fewest and largest kernels.

    With ``ulysses`` nothing is left to travel once tokens are swapped for heads.
    """
    check_algorithm(name)
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
        layout: who owns what.
        bounds: who sees whom.
        rank: whose plan.
        num_kv_heads: key/value heads.
        num_groups: in how many groups of heads keys travel, as far as there are heads.
        num_backward_groups: the same in backward, if it differs.
        sorted_keys: lay gathered keys in the order of the row. Otherwise they lie as they came,
            where that saves a copy.
        block_size: keys that are sorted lie in blocks of so many, as they do in the row: where some
            are left out, places may stay empty.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> from lightning_cp.geometry.mask import Mask
        >>> layout = build_layout("contiguous", seq_len=8, cp_size=2)
        >>> bounds = Mask(causal=True, window=2).bounds(8)
        >>> plan = build_plan("ring", layout=layout, bounds=bounds, rank=0, num_kv_heads=1)
        >>> [stage.num_tokens_sent for stage in plan.stages]  # one key reaches over the border
        [0, 1]
    """
    needs = [_needs(layout, bounds, r) for r in range(layout.cp_size)]
    shards = [_shard(layout, r) for r in range(layout.cp_size)]
    moved = sum(
        _num_tokens(needed) - _num_tokens(piece.where for piece in _wanted(shard, needed))
        for shard, needed in zip(shards, needs, strict=True)
    )
    if algorithm == "gather":
        # One all-gather is faster than many messages, but moves every shard to everyone.
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
    # What a rank has itself is computed while keys arrive, in backward while gradients leave. A
    # ring's own tokens do both where there are groups: of the first one, and of the last.
    last_first = (*bare[1:], bare[0])
    backward = _by_heads(
        last_first if algorithm == "gather" else bare,
        num_kv_heads,
        num_backward_groups if moved else 1,
        last=last_first,
    )
    mine = layout.ranges(rank)
    blind = any((bounds.first[:, a:b] == bounds.last[:, a:b]).any() for a, b in mine)
    return Plan(algorithm, rank, layout, forward, backward, blind)


def _by_heads(
    bare: tuple[Stage, ...],
    num_kv_heads: int,
    num_groups: int,
    *,
    last: tuple[Stage, ...] | None = None,
) -> tuple[Stage, ...]:
    """Repeat the stages for each group of heads; in the last of several in an order of its own."""
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
    return _block_of(_shard(layout, rank), _joined(keys), bounds)


def _block_of(
    shard: tuple[Piece, ...],
    keys: tuple[Piece, ...],
    bounds: Bounds,
    pairs: Literal["all", "same", "others"] = "all",
) -> Block | None:
    queries = []
    for piece in shard:
        met = [bounds.trim(piece.where, part.where) for part in keys]
        seen = union(pair[0] for pair in met if pair is not None)
        if seen:
            hull = Range(seen[0].start, seen[-1].stop)
            queries.append(Piece(hull, piece.offset + hull.start - piece.where.start))
    if not queries:
        return None
    rows = slice(queries[0].offset, queries[-1].offset + queries[-1].where.size)
    placed = tuple(Piece(piece.where, piece.offset - rows.start) for piece in queries)
    return Block(placed, keys, bounds, rows, pairs)


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
    """Bring all keys that the rank needs at once."""
    shards = [_shard(layout, r) for r in range(layout.cp_size)]
    others = [r for r in range(layout.cp_size) if r != rank]
    sends = [Parcel(r, _runs(_wanted(shards[rank], needs[r]), buffers[r])) for r in others]
    receives = [Parcel(r, _runs(_wanted(shards[r], needs[rank]), buffers[rank])) for r in others]
    own = _wanted(shards[rank], needs[rank])
    alone = not collective and not any(parcel.runs for parcel in receives)
    stage = Stage(
        heads=Range(0, 0),
        collective=collective,
        sends=tuple(parcel for parcel in sends if parcel.runs),
        receives=tuple(parcel for parcel in receives if parcel.runs),
        own=_runs(own, buffers[rank]),
        buffer_len=_end(buffers[rank]),
        block=_build_block(layout, bounds, rank, own if alone else buffers[rank]),
        travels=moved,
    )
    if not slots:
        return (stage,)
    mine = _packed(layout.ranges(rank))
    gathered = replace(
        stage,
        buffer_len=layout.padded_len,
        block=_block_of(mine, buffers[rank], bounds, "others"),
        slots=slots,
    )
    return _local_stage(layout.local_len, _block_of(mine, mine, bounds, "same")), gathered


def _in_blocks(needed: Iterable[Range], block_size: int) -> tuple[Piece, ...]:
    """Lay keys in their order, so that what a run of queries sees is one slice of the buffer.

    Each piece starts as far into a block as it does in the row: then a block of queries meets no
    more blocks of keys than it would there.
    """
    placed, end = [], 0
    for part in needed:
        offset = end + (part.start - end) % block_size
        placed.append(Piece(part, offset))
        end = offset + part.size
    return tuple(placed)


def _end(pieces: tuple[Piece, ...]) -> int:
    """Return where the last piece of a tensor ends."""
    return pieces[-1].offset + pieces[-1].where.size if pieces else 0


def num_places(layout: Layout, bounds: Bounds, rank: int, block_size: int) -> int:
    """Return how long the key buffer of a rank is that needs not all keys; see `build_plan`."""
    return _end(_in_blocks(_needs(layout, bounds, rank), block_size))


def _local_stage(local_len: int, block: Block | None) -> Stage:
    return Stage(Range(0, 0), False, (), (), (), local_len, block, travels=False)


def _slots(layout: Layout) -> tuple[Range, ...]:
    """Say in which parts shards are gathered: those that all ranks have alike, the last one first.

    Of a zigzag that makes all second chunks, from the row's end backwards, and then all first ones,
    forwards. What a chunk sees before itself is one slice of this.
    """
    sizes = {tuple(part.size for part in parts) for parts in layout.owned}
    if len(sizes) > 1:
        return (Range(0, layout.local_len),)
    ends = accumulate(sizes.pop(), initial=0)
    return tuple(Range(*part) for part in pairwise(ends))[::-1]


def _in_slots(layout: Layout, slots: tuple[Range, ...]) -> tuple[Piece, ...]:
    """Place what was gathered: slot by slot, in each the shards of all ranks."""
    placed: list[Piece] = []
    start = 0
    for slot in slots:
        for parts in layout.owned:
            inside = (p for p in _packed(parts) if slot.start <= p.offset < slot.stop)
            placed += (Piece(where, start + offset - slot.start) for where, offset in inside)
            start += slot.size
    return tuple(placed)


def _ring_stages(
    layout: Layout, bounds: Bounds, rank: int, needs: list[tuple[Range, ...]]
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
                heads=Range(0, 0),
                collective=False,
                sends=(Parcel(target, _runs(leaving, out_buffer)),) if shift and leaving else (),
                receives=(Parcel(source, _runs(arriving, buffer)),) if shift and arriving else (),
                own=(),
                buffer_len=_num_tokens(piece.where for piece in arriving),
                block=_build_block(layout, bounds, rank, buffer),
                travels=shift > 0,
            )
        )
    return tuple(stages)


def _num_tokens(ranges: Iterable[Range]) -> int:
    return sum(part.size for part in ranges)
