# SPDX-License-Identifier: Apache-2.0
"""Halos: the tokens before each range that a rank holds, from the ranks that hold them.

Tokens are sent peer to peer, and only those that some sample sees; gradients return the same way
and are added where the tokens came from. The autograd function keeps its plan and its transport, so
backward needs no open step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_cp.comm.transport import Transport, to_device
from lightning_cp.geometry.ranges import Range
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.private.modes import plain_functions
from lightning_cp.sequence.token_map import HeldRange, TokenMap, active_map, token_map
from lightning_cp.step.guards import backward_of_step
from lightning_cp.step.step import Step, per_step


class Move(NamedTuple):
    """Consecutive tokens of one rank that are in the halo of another, or of its own.

    Args:
        source: the rank that holds them.
        start: local position of the first one.
        target: the rank whose halo they are in.
        slot: where in the halos of that rank, one after the other, the first one goes.
        size: their number.
    """

    source: int
    start: int
    target: int
    slot: int
    size: int


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """The halos of one rank.

    Args:
        left: tokens of each halo.
        lengths: tokens of each range of this rank.
        moves: those that this rank takes part in, in the same order on all ranks.
        hidden: bool [R, ranges * left], tokens that arrive but are not visible; None for none.
        transport: the context ranks.
        uid: the step.
    """

    left: int
    lengths: tuple[int, ...]
    moves: tuple[Move, ...]
    hidden: Tensor | None
    transport: Transport
    uid: int

    @cached_property
    def mark(self) -> Tensor:
        """Return the uid as a tensor that autograd can save."""
        return torch.tensor(self.uid)

    @property
    def num_slots(self) -> int:
        """Return the tokens of all halos of this rank."""
        return self.left * len(self.lengths)

    @cached_property
    def inside(self) -> tuple[Move, ...]:
        """Return the moves from this rank to itself."""
        return tuple(move for move in self.moves if move.source == move.target)

    @cached_property
    def sends(self) -> list[tuple[int, list[Move]]]:
        """Return the moves to each other rank."""
        return _by_peer(
            (move.target, move)
            for move in self.moves
            if move.source == self.transport.rank != move.target
        )

    @cached_property
    def receives(self) -> list[tuple[int, list[Move]]]:
        """Return the moves from each other rank."""
        return _by_peer(
            (move.source, move)
            for move in self.moves
            if move.target == self.transport.rank != move.source
        )


def _by_peer(moves: Iterable[tuple[int, Move]]) -> list[tuple[int, list[Move]]]:
    ordered = sorted(moves, key=lambda pair: pair[0])  # stable: both sides have the same order
    groups = groupby(ordered, key=lambda pair: pair[0])
    return [(peer, [move for _, move in group]) for peer, group in groups]


def visible_halo(tokens: TokenMap, held: HeldRange, left: int) -> Range:
    """Return the tokens among the ``left`` before a range that its first token sees in any sample.

    A later token of the range sees none that the first one does not: documents are consecutive.
    """
    start = held.tokens.start
    if held.tokens.size == 0:
        return Range(start, start)
    return Range(max(start - left, int(tokens.first[:, start].min())), start)


def find_moves(tokens: TokenMap, left: int) -> tuple[Move, ...]:
    """Return the moves that this rank takes part in, ordered by target range and position."""
    ordered = tokens.in_order
    moves = []
    for number, held in enumerate(ordered):
        needed, before = visible_halo(tokens, held, left), number
        while needed.start < ordered[before].tokens.start:
            before -= 1
            owner = ordered[before]
            part = owner.tokens.meet(needed)
            start = owner.offset + part.start - owner.tokens.start
            slot = held.number * left + left - (held.tokens.start - part.start)
            moves.append(Move(owner.rank, start, held.rank, slot, part.size))
    return tuple(move for move in moves if tokens.rank in (move.source, move.target))


def find_hidden(tokens: TokenMap, left: int) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return which tokens of this rank's halos arrive but are not visible, [R, ranges * left]."""
    hidden = np.zeros((tokens.num_samples, left * len(tokens.held)), np.bool_)
    for held in tokens.held:
        needed = visible_halo(tokens, held, left)
        if needed.size:
            stop = (held.number + 1) * left
            other = np.arange(*needed) < tokens.first[:, held.tokens.start][:, None]
            other |= ~tokens.is_real[:, slice(*needed)]
            hidden[:, stop - needed.size : stop] = other
    return hidden if hidden.any() else None


@per_step
def build_halo_plan(step: Step, left: int, device: torch.device) -> HaloPlan:
    """Return the plan of a step; layers with the same ``left`` share it."""
    tokens = token_map(step)
    hidden = find_hidden(tokens, left)
    return HaloPlan(
        left=left,
        lengths=tuple(tokens.lengths),
        moves=find_moves(tokens, left),
        hidden=None if hidden is None else to_device(torch.from_numpy(hidden), device),
        transport=step.groups.context,
        uid=step.uid,
    )


@outside_graphs
def halo(x: Tensor, left: int, *, dim: int = 1) -> tuple[Tensor, ...]:
    """Return the ``left`` tokens before each range of consecutive tokens that this rank holds.

    They are zero before the start of the sequence, where they belong to another document than the
    first token of the range, and where they are padding. Documents that start inside a range are
    not marked: see `document_starts`. Differentiable: gradients are sent back to the ranks that
    hold the tokens. Every rank must call it, and use the result, in the same order. A ``conv1d`` of
    your own over a range and its halo is called inside ``with cp.exempt():``, since a step
    refuses others.

    Args:
        x: [B, ...], with this rank's tokens in ``dim``.
        left: the number of tokens, 0 or more; a halo may come from several ranks.
        dim: the sequence dim.

    Returns:
        For each range, in the order of `split_ranges`, a tensor with ``left`` tokens in ``dim``.
        Outside a step, the halo of the full sequence: zeros.

    Example:
        >>> from lightning_cp.sequence import split_ranges
        >>> x = torch.arange(1.0, 5).view(1, 4)
        >>> parts = zip(halo(x, 2), split_ranges(x), strict=True)
        >>> [torch.cat(part, 1) for part in parts]
        [tensor([[0., 0., 1., 2., 3., 4.]])]
    """
    if left < 0:
        raise ValueError(f"halo(left={left}): give the number of tokens before a range, 0 or more.")
    active = active_map("halo", x, dim)
    dim %= x.dim()
    if active is None:
        return (_zeros(x, dim, left),)
    plan = build_halo_plan(active[0], left, x.device)
    halos: Tensor = _Halo.apply(x, dim, plan)  # type: ignore[no-untyped-call]
    return torch.split(halos, left, dim) if left else (halos,) * len(plan.lengths)


def extend(x: Tensor, dim: int, plan: HaloPlan) -> Tensor:
    """Return this rank's ranges, each after its halo, as one tensor; differentiable.

    A copy of ``x``. Faster than `halo` and a concatenation, whose gradients are of full size twice.
    """
    extended: Tensor = _Extend.apply(x, dim, plan)  # type: ignore[no-untyped-call]
    return extended


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, plan: HaloPlan) -> Tensor:
        ctx.dim, ctx.plan, ctx.shape = dim, plan, x.shape
        ctx.save_for_backward(plan.mark)
        with plain_functions():
            return _fetch(x, dim, plan)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with backward_of_step(ctx, ctx.plan.uid):
            dx = grad.new_zeros(ctx.shape)
            _return_grads(grad, dx, ctx.dim, ctx.plan)()
        return dx, None, None


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, plan: HaloPlan) -> Tensor:
        ctx.dim, ctx.plan = dim, plan
        ctx.save_for_backward(plan.mark)
        with plain_functions():
            halos = torch.split(_fetch(x, dim, plan)(), [plan.left] * len(plan.lengths), dim)
            ranges = torch.split(x, list(plan.lengths), dim)
            pairs = zip(halos, ranges, strict=True)
            return torch.cat([part for pair in pairs for part in pair], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, plan = ctx.dim, ctx.plan
        with backward_of_step(ctx, plan.uid):
            sizes = [size for length in plan.lengths for size in (plan.left, length)]
            parts = torch.split(grad, sizes, dim)
            dx = torch.cat(parts[1::2], dim)
            _return_grads(torch.cat(parts[::2], dim), dx, dim, plan)()
        return dx, None, None


def _fetch(x: Tensor, dim: int, plan: HaloPlan) -> Callable[[], Tensor]:
    """Start fetching halos; return a function that waits for them."""
    sends = [
        (peer, _join([x.narrow(dim, move.start, move.size) for move in moves], dim))
        for peer, moves in plan.sends
    ]
    arriving = [(peer, _empty(x, dim, moves)) for peer, moves in plan.receives]
    wait = plan.transport.exchange(sends, arriving)
    halos = _zeros(x, dim, plan.num_slots)
    for move in plan.inside:
        halos.narrow(dim, move.slot, move.size).copy_(x.narrow(dim, move.start, move.size))

    def finish() -> Tensor:
        wait()
        for (_, message), (_, moves) in zip(arriving, plan.receives, strict=True):
            for move, part in _parts(message, moves, dim):
                halos.narrow(dim, move.slot, move.size).copy_(part)
        return _hide(halos, dim, plan)

    return finish


def _return_grads(grad: Tensor, dx: Tensor, dim: int, plan: HaloPlan) -> Callable[[], None]:
    """Start returning the gradients of halos; return a function that adds what arrives to dx."""
    grad = _hide(grad, dim, plan)
    sends = [
        (peer, _join([grad.narrow(dim, move.slot, move.size) for move in moves], dim))
        for peer, moves in plan.receives
    ]
    arriving = [(peer, _empty(dx, dim, moves)) for peer, moves in plan.sends]
    wait = plan.transport.exchange(sends, arriving)

    def finish() -> None:
        for move in plan.inside:
            dx.narrow(dim, move.start, move.size).add_(grad.narrow(dim, move.slot, move.size))
        wait()
        for (_, message), (_, moves) in zip(arriving, plan.sends, strict=True):
            for move, part in _parts(message, moves, dim):
                dx.narrow(dim, move.start, move.size).add_(part)

    return finish


def _hide(halos: Tensor, dim: int, plan: HaloPlan) -> Tensor:
    """Return halos with zeros where a token is not visible."""
    if plan.hidden is None:
        return halos
    return halos.masked_fill(per_token(plan.hidden, halos, dim), 0)


def per_token(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return values [R, n] in a shape that fits x, whose first dim is the batch."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = values.shape
    return values.view(shape)


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim).contiguous()  # cat keeps a channels-last order


def _empty(x: Tensor, dim: int, moves: Sequence[Move]) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(move.size for move in moves)
    return x.new_empty(shape)


def _zeros(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_zeros(shape)


def _parts(message: Tensor, moves: Sequence[Move], dim: int) -> Iterable[tuple[Move, Tensor]]:
    sizes = [move.size for move in moves]
    return zip(moves, torch.split(message, sizes, dim), strict=True)
