# SPDX-License-Identifier: Apache-2.0
"""Bring the keys and values of one stage here, and give their gradients back.

Keys and values travel together, as one flat tensor per peer. `fetch` and `give_back` start the
traffic and return a function that waits for it, so that the caller can compute in between.
`gather_row` and `scatter_row` move whole rows, for attention whose mask nobody can plan with.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.collectives import Transport, nothing
from lightning_cp.engine.merge import Sum, Where
from lightning_cp.engine.plan import Parcel, Run, Stage
from lightning_cp.layout import Layout
from lightning_cp.mask import Range, union


class KeyValues(NamedTuple):
    """Keys [B, K, n, D] and values [B, K, n, Dv] of the same tokens, or their gradients."""

    keys: Tensor
    values: Tensor

    @property
    def num_tokens(self) -> int:
        """Return n."""
        return self.keys.shape[2]

    def heads(self, heads: Range) -> "KeyValues":
        """Return some of the heads, as a view."""
        if heads.size == self.keys.shape[1]:
            return self
        return KeyValues(*(x[:, heads.start : heads.stop] for x in self))

    def zeros(self, num_tokens: int, dtype: torch.dtype | None = None) -> "KeyValues":
        """Return zeros of the same kind for so many tokens."""
        return KeyValues(
            *(x.new_zeros(*x.shape[:2], num_tokens, x.shape[3], dtype=dtype) for x in self)
        )

    def empty(self, num_tokens: int, dtype: torch.dtype) -> "KeyValues":
        """Return memory of the same kind for so many tokens."""
        return KeyValues(
            *(x.new_empty(*x.shape[:2], num_tokens, x.shape[3], dtype=dtype) for x in self)
        )

    def tokens(self, start: int, stop: int) -> "KeyValues":
        """Return some of the tokens, as a view."""
        return KeyValues(*(x[:, :, start:stop] for x in self))

    def empty_rows(self, num_tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for so many tokens, [n, B, K, D + Dv]: each lies in one piece."""
        batch, heads, _, dim = self.keys.shape
        width = dim + self.values.shape[3]
        return self.keys.new_empty(num_tokens, batch, heads, width, dtype=dtype)

    def open_rows(self, rows: Tensor) -> "KeyValues":
        """Return such memory seen as keys and values of the same kind."""
        return KeyValues(*torch.split(rows.permute(1, 2, 0, 3), [x.shape[3] for x in self], -1))

    def wire_len(self, num_tokens: int) -> int:
        """Return how many numbers so many tokens are."""
        return num_tokens * sum(x.shape[0] * x.shape[1] * x.shape[3] for x in self)

    def open(self, wire: Tensor, num_tokens: int) -> "KeyValues":
        """Return a flat tensor seen as keys and values of the same kind."""
        shapes = [(*x.shape[:2], num_tokens, x.shape[3]) for x in self]
        parts = torch.split(wire, [torch.Size(shape).numel() for shape in shapes])
        return KeyValues(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


class _Move(NamedTuple):
    """Consecutive tokens and their way from one tensor to another."""

    source: int
    target: int
    size: int


def _copy(source: KeyValues, target: KeyValues, moves: Iterable[_Move]) -> None:
    for move in moves:
        part = source.tokens(move.source, move.source + move.size)
        place = target.tokens(move.target, move.target + move.size)
        for from_, to in zip(part, place, strict=True):
            to.copy_(from_)


def _end_to_end(runs: Sequence[Run]) -> Iterable[int]:
    """Return where each run lies in a parcel."""
    return accumulate((run.size for run in runs[:-1]), initial=0)


def _empty_wire(kind: KeyValues, parcel: Parcel) -> Tensor:
    return kind.keys.new_empty(kind.wire_len(parcel.num_tokens))


def _wrap(source: KeyValues, parcel: Parcel, starts: Iterable[int]) -> Tensor:
    """Return a parcel's runs, which start there in ``source``, as one flat tensor."""
    wire = _empty_wire(source, parcel)
    places = zip(starts, _end_to_end(parcel.runs), parcel.runs, strict=True)
    moves = (_Move(start, place, run.size) for start, place, run in places)
    _copy(source, source.open(wire, parcel.num_tokens), moves)
    return wire


def fetch(stage: Stage, shard: KeyValues, transport: Transport) -> Callable[[], KeyValues]:
    """Start bringing a stage's keys here.

    Args:
        stage: what travels.
        shard: this rank's keys and values, all heads.
        transport: how it travels.

    Returns:
        A function that waits and returns the key buffer.
    """
    shard = shard.heads(stage.heads)
    if stage.is_alone:
        return lambda: shard
    if stage.slots:
        return _fetch_slots(stage, shard, transport)
    if stage.collective:
        return _fetch_whole_shards(stage, shard, transport)
    sends = [(p.peer, _wrap(shard, p, (r.shard for r in p.runs))) for p in stage.sends]
    wires = [(parcel.peer, _empty_wire(shard, parcel)) for parcel in stage.receives]
    wait = transport.exchange(sends, wires)

    def finish() -> KeyValues:
        wait()
        if stage.is_local:
            return shard
        parcels = zip(stage.receives, wires, strict=True)
        opened = [(p, shard.open(wire, p.num_tokens)) for p, (_, wire) in parcels]
        if stage.is_one_parcel:
            return opened[0][1]
        buffer = shard.zeros(stage.buffer_len)
        _copy(shard, buffer, (_Move(*run) for run in stage.own))
        for parcel, part in opened:
            places = zip(_end_to_end(parcel.runs), parcel.runs, strict=True)
            _copy(part, buffer, (_Move(at, run.buffer, run.size) for at, run in places))
        return buffer

    return finish


def _fetch_whole_shards(
    stage: Stage, shard: KeyValues, transport: Transport
) -> Callable[[], KeyValues]:
    wire = torch.cat([x.flatten() for x in shard])
    gathered = wire.new_empty(transport.size, wire.numel())
    wait = transport.all_gather(gathered, wire)

    def finish() -> KeyValues:
        wait()
        buffer = shard.zeros(stage.buffer_len)
        _copy(shard, buffer, (_Move(*run) for run in stage.own))
        for parcel in stage.receives:
            part = shard.open(gathered[parcel.peer], shard.num_tokens)
            _copy(part, buffer, (_Move(*run) for run in parcel.runs))
        return buffer

    return finish


def _fetch_slots(stage: Stage, shard: KeyValues, transport: Transport) -> Callable[[], KeyValues]:
    """Gather shards token by token, so that what arrives is the key buffer."""
    wire = shard.empty_rows(shard.num_tokens)
    for part, mine in zip(shard.open_rows(wire), shard, strict=True):
        part.copy_(mine)
    gathered = shard.empty_rows(stage.buffer_len)
    waits = [
        transport.all_gather(place, wire[slice(*slot)])
        for slot, place in zip(stage.slots, _by_slot(gathered, stage, transport.size), strict=True)
    ]

    def finish() -> KeyValues:
        for wait in waits:
            wait()
        return shard.open_rows(gathered)

    return finish


def _by_slot(rows: Tensor, stage: Stage, num_ranks: int) -> list[Tensor]:
    """Return [ranks, tokens of a slot, ...] for each slot of a key buffer."""
    parts = torch.split(rows, [num_ranks * slot.size for slot in stage.slots])
    return [
        part.view(num_ranks, slot.size, *rows.shape[1:])
        for part, slot in zip(parts, stage.slots, strict=True)
    ]


class Found:
    """The gradients of a stage's key buffer, added up tile by tile, where they travel from.

    Memory is taken with the first part; what nobody writes is cleared at the end.

    Args:
        stage: what the keys came by.
        buffer: the keys.
        dtype: in which they are added up.
    """

    def __init__(self, stage: Stage, buffer: KeyValues, dtype: torch.dtype) -> None:
        self._has_slots = bool(stage.slots)
        self._like = buffer
        self._dtype = dtype
        self._all = Range(0, buffer.num_tokens)
        self._written: tuple[Range, ...] = ()
        self._sole: KeyValues | None = None
        self._opened: tuple[Tensor | None, KeyValues] | None = None

    def add(self, batch: slice, columns: slice, part: KeyValues) -> None:
        """Add what a tile found for some rows of the batch and some tokens of the buffer."""
        here = Range(columns.start, columns.stop)
        if batch != slice(None):
            _add(self.total(), batch, here, part)
            return
        is_first = self._opened is None and self._sole is None
        if is_first and here == self._all and not self._has_slots:
            self._sole = part
            return
        _, total = self._open()
        rest = here
        for written in self._written:
            both = rest.meet(written)
            if both.size:
                _write(total, part, here, Range(rest.start, both.start))
                shared = part.tokens(both.start - here.start, both.stop - here.start)
                _add(total, batch, both, shared)
                rest = Range(both.stop, rest.stop)
        _write(total, part, here, rest)
        self._written = union((*self._written, here))

    def total(self) -> KeyValues:
        """Return the sum."""
        if self._sole is not None:
            return self._sole
        _, total = self._open()
        at = 0
        for start, stop in (*self._written, Range(self._all.stop, self._all.stop)):
            if at < start:
                for x in total:
                    x[:, :, at:start].zero_()
            at = stop
        self._written = (self._all,)
        return total

    def rows(self) -> Tensor:
        """Return the sum token by token; for stages with slots."""
        self.total()
        rows, _ = self._open()
        assert rows is not None  # noqa: S101
        return rows

    def _open(self) -> tuple[Tensor | None, KeyValues]:
        if self._opened is None:
            if self._has_slots:
                rows = self._like.empty_rows(self._all.stop, self._dtype)
                self._opened = rows, self._like.open_rows(rows)
            else:
                self._opened = None, self._like.empty(self._all.stop, self._dtype)
            sole, self._sole = self._sole, None
            if sole is not None:
                _write(self._opened[1], sole, self._all, self._all)
                self._written = (self._all,)
        return self._opened


def _write(total: KeyValues, part: KeyValues, columns: Range, where: Range) -> None:
    """Write the tokens ``where`` of a part that covers ``columns``."""
    if where.size > 0:
        kept = part.tokens(where.start - columns.start, where.stop - columns.start)
        for to, from_ in zip(total.tokens(*where), kept, strict=True):
            to.copy_(from_)


def _add(total: KeyValues, batch: slice, columns: Range, part: KeyValues) -> None:
    for to, from_ in zip(total.tokens(*columns), part, strict=True):
        to[batch] += from_


def give_back(
    stage: Stage, found: Found, sums: tuple[Sum, Sum], transport: Transport, dtype: torch.dtype
) -> Callable[[], None]:
    """Start sending the gradients of a stage's key buffer to the owners of the keys.

    Args:
        stage: what travelled.
        found: the gradients of the key buffer.
        sums: those of this rank's keys and values, for the stage's heads; its own share is added
            at once.
        transport: how it travels.
        dtype: in which it travels. Owners add up in their own precision what comes from one rank
            at a time; a reduce-scatter adds up in this one.

    Returns:
        A function that waits and adds what the other ranks found for this rank's keys.
    """
    total = found.total()

    def add(part: KeyValues, start: int) -> None:
        where = Where(Range(0, part.keys.shape[0]), Range(start, start + part.num_tokens))
        for summed, x in zip(sums, part, strict=True):
            summed.add(where, x)

    if stage.is_local:
        add(total, 0)
    elif not stage.collective:
        for run in stage.own:
            add(total.tokens(run.buffer, run.buffer + run.size), run.shard)
    if stage.is_alone:
        return nothing
    if stage.slots:
        return _scatter_slots(stage, total, found.rows().to(dtype), transport, add)
    # A kernel may return any precision, another one on each rank; the wire has one.
    total = KeyValues(*(x.to(dtype) for x in total))
    if stage.collective:
        return _scatter_whole_shards(stage, total, sums, transport, add)
    sends = [(p.peer, _wrap(total, p, (r.buffer for r in p.runs))) for p in stage.receives]
    receives = [(parcel.peer, _empty_wire(total, parcel)) for parcel in stage.sends]
    wait = transport.exchange(sends, receives)

    def finish() -> None:
        wait()
        for parcel, (_, wire) in zip(stage.sends, receives, strict=True):
            part = total.open(wire, parcel.num_tokens)
            for at, run in zip(_end_to_end(parcel.runs), parcel.runs, strict=True):
                add(part.tokens(at, at + run.size), run.shard)

    return finish


def _scatter_slots(
    stage: Stage,
    like: KeyValues,
    rows: Tensor,
    transport: Transport,
    add: Callable[[KeyValues, int], None],
) -> Callable[[], None]:
    summed = [rows.new_empty(slot.size, *rows.shape[1:]) for slot in stage.slots]
    places = _by_slot(rows, stage, transport.size)
    waits = [
        transport.reduce_scatter(out, place) for out, place in zip(summed, places, strict=True)
    ]

    def finish() -> None:
        for wait, slot, out in zip(waits, stage.slots, summed, strict=True):
            wait()
            add(like.open_rows(out), slot.start)

    return finish


def _scatter_whole_shards(
    stage: Stage,
    found: KeyValues,
    sums: tuple[Sum, Sum],
    transport: Transport,
    add: Callable[[KeyValues, int], None],
) -> Callable[[], None]:
    num_tokens = sums[0].whole.tokens.size
    wires = found.keys.new_zeros(transport.size, found.wire_len(num_tokens))
    mine = Parcel(transport.rank, stage.own)
    for parcel in (mine, *stage.receives):
        shard = found.open(wires[parcel.peer], num_tokens)
        _copy(found, shard, (_Move(run.buffer, run.shard, run.size) for run in parcel.runs))
    summed = torch.empty_like(wires[0])
    wait = transport.reduce_scatter(summed, wires)

    def finish() -> None:
        wait()
        add(found.open(summed, num_tokens), 0)

    return finish


def gather_row(shard: KeyValues, layout: Layout, transport: Transport) -> KeyValues:
    """Return the keys and values of whole rows, in their order, without padding."""
    wire = torch.cat([x.flatten() for x in shard])
    gathered = wire.new_empty(transport.size, wire.numel())
    transport.all_gather(gathered, wire)()
    whole = shard.zeros(layout.seq_len)
    for rank, part in enumerate(gathered):
        _copy(shard.open(part, shard.num_tokens), whole, _row_moves(layout, rank))
    return whole


def scatter_row(found: KeyValues, layout: Layout, transport: Transport) -> KeyValues:
    """Return, for this rank's keys, the sum of the gradients that all ranks found."""
    wires = found.keys.new_zeros(transport.size, found.wire_len(layout.local_len))
    for rank, wire in enumerate(wires):
        moves = (_Move(to, from_, size) for from_, to, size in _row_moves(layout, rank))
        _copy(found, found.open(wire, layout.local_len), moves)
    summed = torch.empty_like(wires[0])
    transport.reduce_scatter(summed, wires)()
    return found.open(summed, layout.local_len)


def _row_moves(layout: Layout, rank: int) -> Iterable[_Move]:
    """Say where in the row each piece of a rank's shard goes; padding goes nowhere."""
    ranges = layout.ranges(rank)
    offsets = accumulate((part.size for part in ranges), initial=0)
    for held, offset in zip(ranges, offsets, strict=False):
        kept = held.meet(Range(0, layout.seq_len))
        if kept.size:
            yield _Move(offset, kept.start, kept.size)
