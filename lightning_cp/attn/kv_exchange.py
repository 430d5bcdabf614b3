# SPDX-License-Identifier: Apache-2.0
"""Exchange of keys and values of one stage, and of their gradients.

A *KV record* is one token's key and value, for every sample and the heads being sent; records are
sent so that what arrives can serve as a key buffer. `fetch` and `scatter_grads` start the traffic
and return a function that waits for it, so that the caller can compute in between.

| case | keys are sent by | the key buffer is | gradients return by |
|---|---|---|---|
| `has_no_peers` | - | the local shard | - |
| `is_local` | messages, to others only | the local shard | messages |
| `is_one_parcel` | one message | the parcel as it arrives | messages |
| other parcels | messages | filled by messages, or copies of several runs | messages |
| `slots` | an all-gather per slot | the gathered tensor | a reduce-scatter per slot |
| `collective` | one all-gather | filled by copies of the needed runs | one reduce-scatter |

`gather_sequence` and `scatter_sequence_grads` exchange full sequences, for masks that are functions
and cannot be planned with.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import GradAccumulator, TensorRegion, sum_into, wire_dtype
from lightning_cp.attn.plan import Stage, TokenRun, Transfer, split_run
from lightning_cp.comm.transport import Transport, nothing
from lightning_cp.config import GradientWire
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range, union


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
        """Return empty keys and values of ``num_tokens`` tokens; each token is contiguous."""
        batch, heads = self.keys.shape[:2]
        keys, values = (
            x.new_empty(num_tokens, batch, heads, x.shape[3], dtype=dtype).permute(1, 2, 0, 3)
            for x in self
        )
        return KeyValues(keys, values)

    def empty_records(self, num_tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return empty KV records, [n, B, K, D + Dv]."""
        batch, heads, _, dim = self.keys.shape
        width = dim + self.values.shape[3]
        return self.keys.new_empty(num_tokens, batch, heads, width, dtype=dtype)

    def view_records(self, records: Tensor) -> "KeyValues":
        """Return a view of KV records as keys and values with the same head dims."""
        return _view_records(records, self.keys.shape[3])


def _view_records(records: Tensor, key_dim: int) -> KeyValues:
    records = records.permute(1, 2, 0, 3)
    return KeyValues(records[..., :key_dim], records[..., key_dim:])


class KVShard:
    """This rank's keys and values, and the same as KV records, built when they are sent.

    Args:
        keys: [B, K, L, D].
        values: [B, K, L, Dv].
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._all_heads = KeyValues(keys, values)
        self._records: tuple[Range, Tensor] | None = None

    def heads(self, heads: Range) -> KeyValues:
        """Return some heads, as a view."""
        keys, values = self._all_heads
        if heads.size == keys.shape[1]:
            return self._all_heads
        return KeyValues(keys[:, slice(*heads)], values[:, slice(*heads)])

    def records(self, heads: Range) -> Tensor:
        """Return some heads as KV records; stages of the same heads share them."""
        if self._records is None or self._records[0] != heads:
            self._records = heads, as_records(self.heads(heads))
        return self._records[1]


def as_records(part: KeyValues, dtype: torch.dtype | None = None) -> Tensor:
    """Return keys and values as KV records."""
    records = part.empty_records(part.num_tokens, dtype)
    for to, from_ in zip(part.view_records(records), part, strict=True):
        to.copy_(from_)
    return records


def _select_runs(records: Tensor, runs: Iterable[tuple[int, int]]) -> Tensor:
    """Return some runs of records, (start, size) each, as one tensor."""
    return _concatenate([records[start : start + size] for start, size in runs])


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _parcel_offsets(runs: Sequence[TokenRun]) -> Iterable[int]:
    """Return the offset of each run in a parcel."""
    return accumulate((run.size for run in runs[:-1]), initial=0)


def fetch(
    stage: Stage, shard: KVShard, transport: Transport, *, buffer_len: int | None = None
) -> Callable[[], KeyValues]:
    """Start fetching the keys and values of a stage.

    Args:
        stage: what is sent.
        shard: this rank's keys and values, all heads.
        transport: the ranks.
        buffer_len: tokens of the key buffer, if more than those of the stage: zeros follow. Not
            for stages with slots.

    Returns:
        A function that waits and returns the key buffer.
    """
    own = shard.heads(stage.heads)
    if stage.collective:
        records = shard.records(stage.heads)
        if stage.slots:
            return _fetch_slots(stage, own, records, transport)
        return _fetch_shards(stage, own, records, transport, buffer_len or stage.buffer_len)
    if buffer_len is not None:
        return _fetch_into(stage, own, transport, buffer_len)
    if stage.has_no_peers:
        return lambda: own
    if not stage.is_local and not stage.is_one_parcel:
        return _fetch_into(stage, own, transport, stage.buffer_len)
    records = shard.records(stage.heads)
    sends = [
        (p.peer, _select_runs(records, ((r.shard, r.size) for r in p.runs))) for p in stage.sends
    ]
    arriving = [(p.peer, own.empty_records(p.num_tokens)) for p in stage.receives]
    wait = transport.exchange(sends, arriving)

    def finish() -> KeyValues:
        wait()
        return own if stage.is_local else own.view_records(arriving[0][1])

    return finish


def _fetch_into(
    stage: Stage, own: KeyValues, transport: Transport, buffer_len: int
) -> Callable[[], KeyValues]:
    """Fetch parcels into a buffer: local tokens are sent from it, others arrive in it."""
    buffer = _empty_buffer(stage, own, buffer_len)
    key_values = own.view_records(buffer)
    local_runs = _local_runs(stage, own)
    for run in local_runs:
        targets = key_values.tokens(run.buffer, run.buffer + run.size)
        for to, from_ in zip(targets, own.tokens(run.shard, run.shard + run.size), strict=True):
            sum_into(to, from_)

    def records_of(run: TokenRun) -> Tensor:
        for local in local_runs:
            if local.shard <= run.shard and run.shard + run.size <= local.shard + local.size:
                start = local.buffer + run.shard - local.shard
                return buffer[start : start + run.size]
        return as_records(own.tokens(run.shard, run.shard + run.size))

    sends = [
        (parcel.peer, _concatenate([records_of(run) for run in parcel.runs]))
        for parcel in stage.sends
    ]
    arriving = [(parcel.peer, _receive_buffer(parcel, buffer, own)) for parcel in stage.receives]
    wait = transport.exchange(sends, arriving)

    def finish() -> KeyValues:
        wait()
        for parcel, (_, records) in zip(stage.receives, arriving, strict=True):
            if len(parcel.runs) > 1:
                for offset, run in zip(_parcel_offsets(parcel.runs), parcel.runs, strict=True):
                    _copy(records, offset, buffer, run.buffer, run.size)
        return key_values

    return finish


def _local_runs(stage: Stage, local: KeyValues) -> tuple[TokenRun, ...]:
    """Return the runs of this rank's tokens in the key buffer: the shard may be all of it."""
    return (TokenRun(0, 0, local.num_tokens),) if stage.is_local else stage.own_runs


def _receive_buffer(parcel: Transfer, buffer: Tensor, own: KeyValues) -> Tensor:
    """Return where a parcel arrives: in the key buffer if it is one run."""
    if len(parcel.runs) > 1:
        return own.empty_records(parcel.num_tokens)
    (run,) = parcel.runs
    return buffer[run.buffer : run.buffer + run.size]


def _empty_buffer(stage: Stage, own: KeyValues, buffer_len: int) -> Tensor:
    """Return an empty key buffer, with zeros where no key arrives."""
    buffer = own.empty_records(buffer_len)
    used = own.num_tokens if stage.is_local else stage.buffer_len
    for start, stop in (*stage.gaps, Range(used, buffer_len)):
        if start < stop:
            buffer[start:stop].zero_()
    return buffer


def _copy(source: Tensor, start: int, target: Tensor, offset: int, size: int) -> None:
    target[offset : offset + size].copy_(source[start : start + size])


def _fetch_slots(
    stage: Stage, own: KeyValues, records: Tensor, transport: Transport
) -> Callable[[], KeyValues]:
    """Gather shards slot by slot: the gathered tensor is the key buffer."""
    gathered = own.empty_records(stage.buffer_len)
    waits = [
        transport.all_gather(target, _select_runs(records, [(slot.start, slot.size)]))
        for slot, target in zip(stage.slots, _by_slot(gathered, stage, transport.size), strict=True)
    ]

    def finish() -> KeyValues:
        for wait in waits:
            wait()
        return own.view_records(gathered)

    return finish


def _by_slot(records: Tensor, stage: Stage, num_ranks: int) -> list[Tensor]:
    """Return [ranks, tokens of a slot, ...] for each slot of a key buffer."""
    parts = torch.split(records, [num_ranks * slot.size for slot in stage.slots])
    return [
        part.view(num_ranks, slot.size, *records.shape[1:])
        for part, slot in zip(parts, stage.slots, strict=True)
    ]


def _fetch_shards(
    stage: Stage, own: KeyValues, records: Tensor, transport: Transport, buffer_len: int
) -> Callable[[], KeyValues]:
    gathered = records.new_empty(transport.size, *records.shape)
    wait = transport.all_gather(gathered, records)

    def finish() -> KeyValues:
        wait()
        buffer = _empty_buffer(stage, own, buffer_len)
        for run in stage.own_runs:
            _copy(records, run.shard, buffer, run.buffer, run.size)
        for parcel in stage.receives:
            for run in parcel.runs:
                _copy(gathered[parcel.peer], run.shard, buffer, run.buffer, run.size)
        return own.view_records(buffer)

    return finish


class KVGradBuffer:
    """Accumulates dK, dV of one stage's key buffer, in the memory that they are sent from.

    The first part waits for the second: their sum is written in one pass, and until then kernels
    can use the memory of the accumulator. What no part covers is cleared at the end. (Unlike
    `PartialSums`, parts that overlap only partly are added in one pass, too, without clearing.)

    Args:
        stage: the stage that fetched the keys.
        buffer: the keys.
        dtype: of the accumulator.
    """

    def __init__(self, stage: Stage, buffer: KeyValues, dtype: torch.dtype) -> None:
        self._has_slots = bool(stage.slots)
        self._like = buffer
        self._dtype = dtype
        self._all = Range(0, buffer.num_tokens)
        self._written: tuple[Range, ...] = ()
        self._first: tuple[Range, KeyValues] | None = None
        self._memory: tuple[Tensor | None, KeyValues] | None = None

    def add(self, batch: slice, k_slice: slice, part: KeyValues) -> None:
        """Add the gradients of a tile: some samples, and some tokens of the buffer."""
        covered = Range(k_slice.start, k_slice.stop)
        if batch != slice(None):
            self._allocate()
            _add(self.total(), batch, covered, part)
        elif self._memory is not None:
            self._add(covered, part)
        elif self._first is None:
            self._first = covered, part
        else:
            first, second, self._first = self._first, (covered, part), None
            _, total = self._allocate()
            both = covered.meet(first[0])
            for one in (first, second):
                for tokens in _difference(one[0], both):
                    _write(total, tokens, one)
            _write(total, both, first, second)
            self._written = union((first[0], covered))

    def _add(self, covered: Range, part: KeyValues) -> None:
        """Add a part where something was written, and write it elsewhere."""
        _, total = self._allocate()
        rest = covered
        for written in self._written:
            both = rest.meet(written)
            if both.size:
                _write(total, Range(rest.start, both.start), (covered, part))
                _add(total, slice(None), both, _narrow(part, both, covered))
                rest = Range(both.stop, rest.stop)
        _write(total, rest, (covered, part))
        self._written = union((*self._written, covered))

    def total(self) -> KeyValues:
        """Return the sum."""
        if self._memory is None and self._first is not None and not self._has_slots:
            covered, first = self._first
            if covered == self._all:
                return first
        _, total = self._allocate()
        end = 0
        for start, stop in (*self._written, Range(self._all.stop, self._all.stop)):
            if end < start:
                for x in total:
                    x[:, :, end:start].zero_()
            end = stop
        self._written = (self._all,)
        return total

    @property
    def key_dtype(self) -> torch.dtype:
        """Return the precision of the keys."""
        return self._like.keys.dtype

    def records(self) -> Tensor:
        """Return the sum as KV records; for stages with slots."""
        self.total()
        records, _ = self._allocate()
        assert records is not None  # noqa: S101
        return records

    def _allocate(self) -> tuple[Tensor | None, KeyValues]:
        """Allocate the accumulator if there is none, and write the part that waits."""
        if self._memory is None:
            if self._has_slots:
                records = self._like.empty_records(self._all.stop, self._dtype)
                self._memory = records, self._like.view_records(records)
            else:
                self._memory = None, self._like.empty(self._all.stop, self._dtype)
            if self._first is not None:
                first, self._first = self._first, None
                _write(self._memory[1], first[0], first)
                self._written = (first[0],)
        return self._memory


def _difference(part: Range, inner: Range) -> tuple[Range, ...]:
    """Return the ranges of a part before and after ``inner``, which lies inside it."""
    if not inner.size:
        return (part,)
    return Range(part.start, inner.start), Range(inner.stop, part.stop)


def _narrow(part: KeyValues, tokens: Range, covered: Range) -> KeyValues:
    """Return some tokens of a part that covers ``covered``."""
    return part.tokens(tokens.start - covered.start, tokens.stop - covered.start)


def _write(total: KeyValues, tokens: Range, *parts: tuple[Range, KeyValues]) -> None:
    """Write some tokens of a part, or of the sum of two; each comes with what it covers."""
    if tokens.size > 0:
        narrowed = (_narrow(part, tokens, covered) for covered, part in parts)
        for target, *sources in zip(total.tokens(*tokens), *narrowed, strict=True):
            sum_into(target, *sources)


def _add(total: KeyValues, batch: slice, tokens: Range, part: KeyValues) -> None:
    for to, from_ in zip(total.tokens(*tokens), part, strict=True):
        to[batch] += from_


Add = Callable[[KeyValues, int], None]
"""Adds gradients to those of this rank's keys, starting at a token."""


def scatter_grads(
    stage: Stage,
    kv_grads: KVGradBuffer,
    sums: tuple[GradAccumulator, GradAccumulator],
    transport: Transport,
    gradient_wire: GradientWire,
) -> Callable[[], None]:
    """Start sending the gradients of a stage's key buffer to the owners of the keys.

    Args:
        stage: the stage that fetched the keys.
        kv_grads: the gradients of the key buffer.
        sums: the gradients of this rank's keys and values, for the stage's heads; the local share
            is added at once.
        transport: the ranks.
        gradient_wire: precision of gradients in reduce-scatters.

    Returns:
        A function that waits and adds the gradients from other ranks for this rank's keys.
    """
    total = kv_grads.total()
    # A message may have the precision of the kernels: the owner adds it up in a higher one. A
    # reduce-scatter adds up in the precision that it sends.
    dtype = kv_grads.key_dtype
    if stage.collective:
        dtype = wire_dtype(dtype, gradient_wire)

    def add(part: KeyValues, start: int) -> None:
        region = TensorRegion(Range(0, part.keys.shape[0]), Range(start, start + part.num_tokens))
        for summed, x in zip(sums, part, strict=True):
            summed.add(region, x)

    if not stage.collective and stage.block is not None:
        for run in _local_runs(stage, total):
            for part in split_run(run, stage.sent_edges):
                add(total.tokens(part.buffer, part.buffer + part.size), part.shard)
    if stage.has_no_peers:
        return nothing
    if stage.slots:
        key_dim = total.keys.shape[3]
        return _scatter_slots(stage, key_dim, kv_grads.records().to(dtype), transport, add)
    if stage.collective:
        local_len = sums[0].region.tokens.size
        return _scatter_shards(stage, total, local_len, transport, dtype, add)
    # Kernels may return different precisions on different ranks; messages have one. Keys and values
    # are sent separately: kernels return them contiguous.
    sends = [
        (parcel.peer, _sendable(x, parcel.runs, dtype)) for parcel in stage.receives for x in total
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
        tensors = iter(arriving)
        for parcel in stage.sends:
            keys, values = (next(tensors)[1].permute(1, 2, 0, 3) for _ in range(2))
            part = KeyValues(keys, values)
            for offset, run in zip(_parcel_offsets(parcel.runs), parcel.runs, strict=True):
                add(part.tokens(offset, offset + run.size), run.shard)

    return finish


def _sendable(x: Tensor, runs: Sequence[TokenRun], dtype: torch.dtype) -> Tensor:
    """Return some runs of [B, K, n, D] as one contiguous [m, B, K, D]."""
    selected = _select_runs(x.permute(2, 0, 1, 3), ((run.buffer, run.size) for run in runs))
    return selected.to(dtype).contiguous()


def _scatter_slots(
    stage: Stage, key_dim: int, records: Tensor, transport: Transport, add: Add
) -> Callable[[], None]:
    """Start a reduce-scatter per slot; only the records of the gradients are kept."""
    summed = [records.new_empty(slot.size, *records.shape[1:]) for slot in stage.slots]
    sources = _by_slot(records, stage, transport.size)
    waits = [
        transport.reduce_scatter(out, source) for out, source in zip(summed, sources, strict=True)
    ]

    def finish() -> None:
        for wait, slot, out in zip(waits, stage.slots, summed, strict=True):
            wait()
            add(_view_records(out, key_dim), slot.start)

    return finish


def _scatter_shards(
    stage: Stage,
    total: KeyValues,
    local_len: int,
    transport: Transport,
    dtype: torch.dtype,
    add: Add,
) -> Callable[[], None]:
    owners = ((transport.rank, stage.own_runs), *stage.receives)
    wait = _reduce_to_owners(as_records(total, dtype), owners, local_len, transport)
    return lambda: add(total.view_records(wait()), 0)


def _reduce_to_owners(
    records: Tensor,
    owners: Iterable[tuple[int, Iterable[TokenRun]]],
    local_len: int,
    transport: Transport,
) -> Callable[[], Tensor]:
    """Start sending runs of records to their owners; return a function that waits for the sum."""
    shards = records.new_zeros(transport.size, local_len, *records.shape[1:])
    for peer, runs in owners:
        for run in runs:
            _copy(records, run.buffer, shards[peer], run.shard, run.size)
    summed = torch.empty_like(shards[0])
    wait = transport.reduce_scatter(summed, shards)

    def finish() -> Tensor:
        wait()
        return summed

    return finish


def gather_sequence(shard: KeyValues, layout: Layout, transport: Transport) -> KeyValues:
    """Return the keys and values of full sequences, in their order, without padding."""
    records = as_records(shard)
    gathered = records.new_empty(transport.size, *records.shape)
    transport.all_gather(gathered, records)()
    sequence = records.new_empty(layout.seq_len, *records.shape[1:])
    for rank, part in enumerate(gathered):
        for run in _sequence_runs(layout, rank):
            _copy(part, run.shard, sequence, run.buffer, run.size)
    return shard.view_records(sequence)


def scatter_sequence_grads(
    grads: KeyValues, layout: Layout, transport: Transport, dtype: torch.dtype
) -> KeyValues:
    """Return the gradients of this rank's keys, summed over all ranks in ``dtype``."""
    owners = ((rank, _sequence_runs(layout, rank)) for rank in range(layout.cp_size))
    wait = _reduce_to_owners(as_records(grads, dtype), owners, layout.local_len, transport)
    return grads.view_records(wait())


def _sequence_runs(layout: Layout, rank: int) -> Iterable[TokenRun]:
    """Return where in the sequence each piece of a shard goes; padding is left out."""
    ranges = layout.ranges(rank)
    offsets = accumulate((part.size for part in ranges), initial=0)
    for part, offset in zip(ranges, offsets, strict=False):
        real = part.meet(Range(0, layout.seq_len))
        if real.size:
            yield TokenRun(offset, real.start, real.size)
