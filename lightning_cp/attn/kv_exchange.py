# SPDX-License-Identifier: Apache-2.0
"""Bring the keys and values of one stage here, and give their gradients back.

They travel token by token: a *row* holds the key and the value of one token, of all rows of the
batch and some heads, so that what arrives is a key buffer as it is. `fetch` and `give_back` start
the traffic and return a function that waits for it, so that the caller can compute in between.
`gather_row` and `scatter_row` move whole rows of the batch, for attention whose mask nobody can
plan with.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import Sum, Where, sum_into, wire_dtype
from lightning_cp.attn.plan import Parcel, Run, Stage, cut
from lightning_cp.comm.transport import Transport, nothing
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range, union
from lightning_cp.options import GradientWire


class KeyValues(NamedTuple):
    """Keys [B, K, n, D] and values [B, K, n, Dv] of the same tokens, or their gradients."""

    keys: Tensor
    values: Tensor

    @property
    def num_tokens(self) -> int:
        """Return n."""
        return self.keys.shape[2]

    def tokens(self, start: int, stop: int) -> "KeyValues":
        """Return some of the tokens, as a view."""
        size = stop - start
        if size == self.num_tokens:
            return self
        return KeyValues(self.keys.narrow(2, start, size), self.values.narrow(2, start, size))

    def empty(self, num_tokens: int, dtype: torch.dtype) -> "KeyValues":
        """Return memory for so many tokens, each of which lies in one piece."""
        batch, heads = self.keys.shape[:2]
        keys, values = (
            x.new_empty(num_tokens, batch, heads, x.shape[3], dtype=dtype).permute(1, 2, 0, 3)
            for x in self
        )
        return KeyValues(keys, values)

    def empty_rows(self, num_tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for so many rows, [n, B, K, D + Dv]."""
        batch, heads, _, dim = self.keys.shape
        width = dim + self.values.shape[3]
        return self.keys.new_empty(num_tokens, batch, heads, width, dtype=dtype)

    def open_rows(self, rows: Tensor) -> "KeyValues":
        """Return rows seen as keys and values of the same kind."""
        return _open(rows, self.keys.shape[3])


def _open(rows: Tensor, key_dim: int) -> KeyValues:
    rows = rows.permute(1, 2, 0, 3)
    return KeyValues(rows[..., :key_dim], rows[..., key_dim:])


class Shard:
    """This rank's keys and values, and the same as rows, made when something travels.

    Args:
        keys: [B, K, L, D].
        values: [B, K, L, Dv].
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._whole = KeyValues(keys, values)
        self._rows: tuple[Range, Tensor] | None = None

    def heads(self, heads: Range) -> KeyValues:
        """Return some heads, as a view."""
        whole = self._whole
        if heads.size == whole.keys.shape[1]:
            return whole
        part = slice(*heads)
        return KeyValues(whole.keys[:, part], whole.values[:, part])

    def rows(self, heads: Range) -> Tensor:
        """Return some heads as rows; stages of the same heads share them."""
        if self._rows is None or self._rows[0] != heads:
            self._rows = heads, as_rows(self.heads(heads))
        return self._rows[1]


def as_rows(part: KeyValues, dtype: torch.dtype | None = None) -> Tensor:
    """Return keys and values as rows."""
    rows = part.empty_rows(part.num_tokens, dtype)
    for to, from_ in zip(part.open_rows(rows), part, strict=True):
        to.copy_(from_)
    return rows


def _picked(rows: Tensor, runs: Iterable[tuple[int, int]]) -> Tensor:
    """Return some runs of rows, (start, size) each, as one tensor."""
    return _joined([rows[start : start + size] for start, size in runs])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _end_to_end(runs: Sequence[Run]) -> Iterable[int]:
    """Return where each run lies in a parcel."""
    return accumulate((run.size for run in runs[:-1]), initial=0)


def fetch(
    stage: Stage, shard: Shard, transport: Transport, *, buffer_len: int | None = None
) -> Callable[[], KeyValues]:
    """Start bringing a stage's keys here.

    Args:
        stage: what travels.
        shard: this rank's keys and values, all heads.
        transport: how it travels.
        buffer_len: tokens of the key buffer, if more than those of the stage: zeros follow. Not
            for stages with slots.

    Returns:
        A function that waits and returns the key buffer.
    """
    own = shard.heads(stage.heads)
    if stage.collective:
        rows = shard.rows(stage.heads)
        if stage.slots:
            return _fetch_slots(stage, own, rows, transport)
        return _fetch_whole_shards(stage, own, rows, transport, buffer_len or stage.buffer_len)
    if buffer_len is not None:
        return _fetch_into(stage, own, transport, buffer_len)
    if stage.is_alone:
        return lambda: own
    if not stage.is_local and not stage.is_one_parcel:
        return _fetch_into(stage, own, transport, stage.buffer_len)
    rows = shard.rows(stage.heads)
    sends = [(p.peer, _picked(rows, ((r.shard, r.size) for r in p.runs))) for p in stage.sends]
    arriving = [(p.peer, own.empty_rows(p.num_tokens)) for p in stage.receives]
    wait = transport.exchange(sends, arriving)

    def finish() -> KeyValues:
        wait()
        return own if stage.is_local else own.open_rows(arriving[0][1])

    return finish


def _fetch_into(
    stage: Stage, own: KeyValues, transport: Transport, buffer_len: int
) -> Callable[[], KeyValues]:
    """Fetch parcels into a buffer: own tokens leave from it, others arrive in it, if they can."""
    buffer = _empty_buffer(stage, own, buffer_len)
    places = own.open_rows(buffer)
    held = _held(stage, own)
    for run in held:
        there = places.tokens(run.buffer, run.buffer + run.size)
        for to, from_ in zip(there, own.tokens(run.shard, run.shard + run.size), strict=True):
            sum_into(to, from_)

    def rows_of(run: Run) -> Tensor:
        for mine in held:
            if mine.shard <= run.shard and run.shard + run.size <= mine.shard + mine.size:
                start = mine.buffer + run.shard - mine.shard
                return buffer[start : start + run.size]
        return as_rows(own.tokens(run.shard, run.shard + run.size))

    sends = [
        (parcel.peer, _joined([rows_of(run) for run in parcel.runs])) for parcel in stage.sends
    ]
    arriving = [(parcel.peer, _place(parcel, buffer, own)) for parcel in stage.receives]
    wait = transport.exchange(sends, arriving)

    def finish() -> KeyValues:
        wait()
        for parcel, (_, came) in zip(stage.receives, arriving, strict=True):
            if len(parcel.runs) > 1:
                for at, run in zip(_end_to_end(parcel.runs), parcel.runs, strict=True):
                    _copy(came, at, buffer, run.buffer, run.size)
        return places

    return finish


def _held(stage: Stage, local: KeyValues) -> tuple[Run, ...]:
    """Return where in the key buffer this rank's own tokens lie: the shard may be all of it."""
    return (Run(0, 0, local.num_tokens),) if stage.is_local else stage.own


def _place(parcel: Parcel, buffer: Tensor, own: KeyValues) -> Tensor:
    """Return where a parcel arrives: its place in the buffer, if it has one."""
    if len(parcel.runs) > 1:
        return own.empty_rows(parcel.num_tokens)
    (run,) = parcel.runs
    return buffer[run.buffer : run.buffer + run.size]


def _empty_buffer(stage: Stage, own: KeyValues, buffer_len: int) -> Tensor:
    """Return memory for the key buffer; places that no key comes to are cleared."""
    buffer = own.empty_rows(buffer_len)
    used = own.num_tokens if stage.is_local else stage.buffer_len
    for start, stop in (*stage.gaps, Range(used, buffer_len)):
        if start < stop:
            buffer[start:stop].zero_()
    return buffer


def _copy(source: Tensor, start: int, target: Tensor, at: int, size: int) -> None:
    target[at : at + size].copy_(source[start : start + size])


def _fetch_slots(
    stage: Stage, own: KeyValues, rows: Tensor, transport: Transport
) -> Callable[[], KeyValues]:
    """Gather shards slot by slot: what arrives is the key buffer."""
    gathered = own.empty_rows(stage.buffer_len)
    waits = [
        transport.all_gather(place, _picked(rows, [(slot.start, slot.size)]))
        for slot, place in zip(stage.slots, _by_slot(gathered, stage, transport.size), strict=True)
    ]

    def finish() -> KeyValues:
        for wait in waits:
            wait()
        return own.open_rows(gathered)

    return finish


def _by_slot(rows: Tensor, stage: Stage, num_ranks: int) -> list[Tensor]:
    """Return [ranks, tokens of a slot, ...] for each slot of a key buffer."""
    parts = torch.split(rows, [num_ranks * slot.size for slot in stage.slots])
    return [
        part.view(num_ranks, slot.size, *rows.shape[1:])
        for part, slot in zip(parts, stage.slots, strict=True)
    ]


def _fetch_whole_shards(
    stage: Stage, own: KeyValues, rows: Tensor, transport: Transport, buffer_len: int
) -> Callable[[], KeyValues]:
    gathered = rows.new_empty(transport.size, *rows.shape)
    wait = transport.all_gather(gathered, rows)

    def finish() -> KeyValues:
        wait()
        buffer = _empty_buffer(stage, own, buffer_len)
        for run in stage.own:
            _copy(rows, run.shard, buffer, run.buffer, run.size)
        for parcel in stage.receives:
            for run in parcel.runs:
                _copy(gathered[parcel.peer], run.shard, buffer, run.buffer, run.size)
        return own.open_rows(buffer)

    return finish


class Found:
    """The gradients of a stage's key buffer, added up tile by tile, where they travel from.

    The first part waits for the second: both are added up in one go, and until then a kernel has
    the memory of the sum. What nobody writes is cleared at the end.

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
        self._first: tuple[Range, KeyValues] | None = None
        self._opened: tuple[Tensor | None, KeyValues] | None = None

    def add(self, batch: slice, columns: slice, part: KeyValues) -> None:
        """Add what a tile found for some rows of the batch and some tokens of the buffer."""
        here = Range(columns.start, columns.stop)
        if batch != slice(None):
            self._open()
            _add(self.total(), batch, here, part)
        elif self._opened is not None:
            self._add(here, part)
        elif self._first is None:
            self._first = here, part
        else:
            first, second, self._first = self._first, (here, part), None
            _, total = self._open()
            both = here.meet(first[0])
            for one in (first, second):
                for where in _outside(one[0], both):
                    _write(total, where, one)
            _write(total, both, first, second)
            self._written = union((first[0], here))

    def _add(self, here: Range, part: KeyValues) -> None:
        """Add a part to what was written, and write it elsewhere."""
        _, total = self._open()
        rest = here
        for written in self._written:
            both = rest.meet(written)
            if both.size:
                _write(total, Range(rest.start, both.start), (here, part))
                _add(total, slice(None), both, _cut(part, both, here))
                rest = Range(both.stop, rest.stop)
        _write(total, rest, (here, part))
        self._written = union((*self._written, here))

    def total(self) -> KeyValues:
        """Return the sum."""
        if self._opened is None and self._first is not None and not self._has_slots:
            there, first = self._first
            if there == self._all:
                return first
        _, total = self._open()
        at = 0
        for start, stop in (*self._written, Range(self._all.stop, self._all.stop)):
            if at < start:
                for x in total:
                    x[:, :, at:start].zero_()
            at = stop
        self._written = (self._all,)
        return total

    @property
    def key_dtype(self) -> torch.dtype:
        """Return the precision of the keys."""
        return self._like.keys.dtype

    def rows(self) -> Tensor:
        """Return the sum as rows; for stages with slots."""
        self.total()
        rows, _ = self._open()
        assert rows is not None  # noqa: S101
        return rows

    def _open(self) -> tuple[Tensor | None, KeyValues]:
        """Take the memory of the sum, and write down what waits."""
        if self._opened is None:
            if self._has_slots:
                rows = self._like.empty_rows(self._all.stop, self._dtype)
                self._opened = rows, self._like.open_rows(rows)
            else:
                self._opened = None, self._like.empty(self._all.stop, self._dtype)
            if self._first is not None:
                first, self._first = self._first, None
                _write(self._opened[1], first[0], first)
                self._written = (first[0],)
        return self._opened


def _outside(part: Range, both: Range) -> tuple[Range, ...]:
    """Return what lies before and behind ``both``, of a part that contains it."""
    if not both.size:
        return (part,)
    return Range(part.start, both.start), Range(both.stop, part.stop)


def _cut(part: KeyValues, where: Range, columns: Range) -> KeyValues:
    """Return the tokens ``where`` of a part that covers ``columns``."""
    return part.tokens(where.start - columns.start, where.stop - columns.start)


def _write(total: KeyValues, where: Range, *parts: tuple[Range, KeyValues]) -> None:
    """Write the tokens ``where`` of a part, or the sum of two; each comes with what it covers."""
    if where.size > 0:
        cut = (_cut(part, where, columns) for columns, part in parts)
        for place, *found in zip(total.tokens(*where), *cut, strict=True):
            sum_into(place, *found)


def _add(total: KeyValues, batch: slice, columns: Range, part: KeyValues) -> None:
    for to, from_ in zip(total.tokens(*columns), part, strict=True):
        to[batch] += from_


Add = Callable[[KeyValues, int], None]
"""Adds gradients to those of this rank's keys from some token on."""


def give_back(
    stage: Stage,
    found: Found,
    sums: tuple[Sum, Sum],
    transport: Transport,
    gradient_wire: GradientWire,
) -> Callable[[], None]:
    """Start sending the gradients of a stage's key buffer to the owners of the keys.

    Args:
        stage: what travelled.
        found: the gradients of the key buffer.
        sums: those of this rank's keys and values, for the stage's heads; its own share is added
            at once.
        transport: how it travels.
        gradient_wire: how precise gradients are that a reduce-scatter adds up.

    Returns:
        A function that waits and adds what the other ranks found for this rank's keys.
    """
    total = found.total()
    # Of what one rank sends straight to another nothing is lost by the kernels' own precision: the
    # owner adds it up in a higher one. A reduce-scatter has no such owner.
    dtype = found.key_dtype
    if stage.collective:
        dtype = wire_dtype(dtype, gradient_wire)

    def add(part: KeyValues, start: int) -> None:
        where = Where(Range(0, part.keys.shape[0]), Range(start, start + part.num_tokens))
        for summed, x in zip(sums, part, strict=True):
            summed.add(where, x)

    if not stage.collective and stage.block is not None:
        for run in _held(stage, total):
            for part in cut(run, stage.sent_edges):
                add(total.tokens(part.buffer, part.buffer + part.size), part.shard)
    if stage.is_alone:
        return nothing
    if stage.slots:
        key_dim = total.keys.shape[3]
        return _scatter_slots(stage, key_dim, found.rows().to(dtype), transport, add)
    if stage.collective:
        local_len = sums[0].whole.tokens.size
        return _scatter_whole_shards(stage, total, local_len, transport, dtype, add)
    # A kernel may return any precision, another one on each rank; the wire has one. Keys and
    # values apart: as kernels return them, they are ready to be sent.
    sends = [
        (parcel.peer, _ready(x, parcel.runs, dtype)) for parcel in stage.receives for x in total
    ]
    batch, heads = total.keys.shape[:2]
    arriving = [
        (parcel.peer, x.new_empty(parcel.num_tokens, batch, heads, x.shape[3], dtype=dtype))
        for parcel in stage.sends
        for x in total
    ]
    wait = transport.exchange(sends, arriving)

    def finish() -> None:
        wait()
        came = iter(arriving)
        for parcel in stage.sends:
            keys, values = (next(came)[1].permute(1, 2, 0, 3) for _ in range(2))
            part = KeyValues(keys, values)
            for at, run in zip(_end_to_end(parcel.runs), parcel.runs, strict=True):
                add(part.tokens(at, at + run.size), run.shard)

    return finish


def _ready(x: Tensor, runs: Sequence[Run], dtype: torch.dtype) -> Tensor:
    """Return some runs of [B, K, n, D] as one contiguous [m, B, K, D]."""
    picked = _picked(x.permute(2, 0, 1, 3), ((run.buffer, run.size) for run in runs))
    return picked.to(dtype).contiguous()


def _scatter_slots(
    stage: Stage, key_dim: int, rows: Tensor, transport: Transport, add: Add
) -> Callable[[], None]:
    """Start the sums slot by slot; the rows are all that is kept of the gradients."""
    summed = [rows.new_empty(slot.size, *rows.shape[1:]) for slot in stage.slots]
    places = _by_slot(rows, stage, transport.size)
    waits = [
        transport.reduce_scatter(out, place) for out, place in zip(summed, places, strict=True)
    ]

    def finish() -> None:
        for wait, slot, out in zip(waits, stage.slots, summed, strict=True):
            wait()
            add(_open(out, key_dim), slot.start)

    return finish


def _scatter_whole_shards(
    stage: Stage,
    found: KeyValues,
    local_len: int,
    transport: Transport,
    dtype: torch.dtype,
    add: Add,
) -> Callable[[], None]:
    owners = ((transport.rank, stage.own), *stage.receives)
    arriving = _send_home(as_rows(found, dtype), owners, local_len, transport)
    return lambda: add(found.open_rows(arriving()), 0)


def _send_home(
    rows: Tensor,
    owners: Iterable[tuple[int, Iterable[Run]]],
    local_len: int,
    transport: Transport,
) -> Callable[[], Tensor]:
    """Start sending runs of rows to their owners; return what waits for the sum of all ranks'."""
    wires = rows.new_zeros(transport.size, local_len, *rows.shape[1:])
    for peer, runs in owners:
        for run in runs:
            _copy(rows, run.buffer, wires[peer], run.shard, run.size)
    summed = torch.empty_like(wires[0])
    wait = transport.reduce_scatter(summed, wires)

    def finish() -> Tensor:
        wait()
        return summed

    return finish


def gather_row(shard: KeyValues, layout: Layout, transport: Transport) -> KeyValues:
    """Return the keys and values of whole rows, in their order, without padding."""
    rows = as_rows(shard)
    gathered = rows.new_empty(transport.size, *rows.shape)
    transport.all_gather(gathered, rows)()
    whole = rows.new_empty(layout.seq_len, *rows.shape[1:])
    for rank, part in enumerate(gathered):
        for run in _row_runs(layout, rank):
            _copy(part, run.shard, whole, run.buffer, run.size)
    return shard.open_rows(whole)


def scatter_row(
    found: KeyValues, layout: Layout, transport: Transport, dtype: torch.dtype
) -> KeyValues:
    """Return, for this rank's keys, the sum in ``dtype`` of the gradients that all ranks found."""
    owners = ((rank, _row_runs(layout, rank)) for rank in range(layout.cp_size))
    arriving = _send_home(as_rows(found, dtype), owners, layout.local_len, transport)
    return found.open_rows(arriving())


def _row_runs(layout: Layout, rank: int) -> Iterable[Run]:
    """Say where in the row each piece of a rank's shard goes; padding goes nowhere."""
    ranges = layout.ranges(rank)
    offsets = accumulate((part.size for part in ranges), initial=0)
    for held, offset in zip(ranges, offsets, strict=False):
        kept = held.meet(Range(0, layout.seq_len))
        if kept.size:
            yield Run(offset, kept.start, kept.size)
