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

from lightning_cp.collectives import Transport
from lightning_cp.engine.plan import Parcel, Run, Stage
from lightning_cp.layout import Layout
from lightning_cp.mask import Range


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


def _copy(
    source: KeyValues, target: KeyValues, moves: Iterable[_Move], *, add: bool = False
) -> None:
    for move in moves:
        for from_, to in zip(source, target, strict=True):
            part = from_[:, :, move.source : move.source + move.size]
            place = to[:, :, move.target : move.target + move.size]
            if add:
                place += part
            else:
                place.copy_(part)


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


def give_back(
    stage: Stage, found: KeyValues, gradients: KeyValues, transport: Transport
) -> Callable[[], None]:
    """Start sending the gradients of a stage's key buffer to the owners of the keys.

    Args:
        stage: what travelled.
        found: the gradients of the key buffer.
        gradients: this rank's accumulated gradients, all heads; its own share is added at once.
        transport: how it travels.

    Returns:
        A function that waits and adds what the other ranks found for this rank's keys.
    """
    gradients = gradients.heads(stage.heads)
    whole = _Move(0, 0, gradients.num_tokens)
    own = [whole] if stage.is_local else [_backwards(run) for run in stage.own]
    _copy(found, gradients, own, add=True)
    if stage.collective:
        wires = found.keys.new_zeros(transport.size, found.wire_len(gradients.num_tokens))
        for parcel in stage.receives:
            shard = found.open(wires[parcel.peer], gradients.num_tokens)
            _copy(found, shard, (_backwards(run) for run in parcel.runs))
        summed = torch.empty_like(wires[0])
        wait = transport.reduce_scatter(summed, wires)
        arrivals = [([whole], summed)]
    else:
        sends = [(p.peer, _wrap(found, p, (r.buffer for r in p.runs))) for p in stage.receives]
        receives = [(parcel.peer, _empty_wire(found, parcel)) for parcel in stage.sends]
        wait = transport.exchange(sends, receives)
        arrivals = []
        for parcel, (_, wire) in zip(stage.sends, receives, strict=True):
            places = zip(_end_to_end(parcel.runs), parcel.runs, strict=True)
            arrivals.append(([_Move(at, run.shard, run.size) for at, run in places], wire))

    def finish() -> None:
        wait()
        for moves, wire in arrivals:
            num_tokens = sum(move.size for move in moves)
            _copy(found.open(wire, num_tokens), gradients, moves, add=True)

    return finish


def _backwards(run: Run) -> _Move:
    return _Move(run.buffer, run.shard, run.size)


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
