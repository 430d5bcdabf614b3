# SPDX-License-Identifier: Apache-2.0
"""States of a linear recurrence at the start of each range that a rank holds.

With S the state, a range of tokens maps S to ``A S + U``: A is the product of its decays, U the
state after it from a zero state. Ranks compute their pairs (A, U) in parallel; one all-gather
brings all of them to every rank, which runs through them in the order of the sequence:

    forward    S_i = T_(i-1),    T_i = A_i S_i + U_i
    backward   dS_i = g_i + A_i' dT_i,    dT_i = dS_(i+1),    dU_i = dT_i,    dA_i = dT_i S_i'

where g_i is the gradient that the owner of range i has for its initial state: one all-gather of the
pairs (A, g), and the same run from the end. Where a document starts, the chain is cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.comm.transport import Transport, to_device
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.private.modes import plain_functions
from lightning_cp.sequence.token_map import HeldRange, TokenMap, check_batch, token_map
from lightning_cp.step.guards import backward_of_step, step_of_call
from lightning_cp.step.precision import autocast_off
from lightning_cp.step.step import PerStep, Step, per_step

Apply = Callable[[Tensor, Tensor], Tensor]
"""(decay of a range, state before it) to what remains of that state after it."""


class Link(NamedTuple):
    """One range in the chain of all ranges.

    Args:
        rank: the rank that holds it.
        number: which one of the ranges of that rank, from 0.
        enters: whether the state before it reaches it: for all samples, for none, or bool [B].
        passes: whether that state reaches its end: no document starts in it.
    """

    rank: int
    number: int
    enters: bool | Tensor
    passes: bool | Tensor


@dataclass(frozen=True, eq=False)
class Chain:
    """All ranges of a step, in the order of the sequence.

    Args:
        links: the ranges.
        num_slots: the largest number of ranges of a rank.
        transport: the context ranks.
        uid: the step.
    """

    links: tuple[Link, ...]
    num_slots: int
    transport: Transport
    uid: int

    @cached_property
    def mark(self) -> Tensor:
        """Return the uid as a tensor that autograd can save."""
        return torch.tensor(self.uid)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """Return where in the chain this rank's ranges are."""
        rank = self.transport.rank
        return tuple(place for place, link in enumerate(self.links) if link.rank == rank)

    @cached_property
    def is_cut(self) -> bool:
        """Return whether no state reaches any range: nothing has to be sent."""
        return all(link.enters is False for link in self.links)


@per_step
def build_chain(step: Step, device: torch.device) -> Chain:
    """Return the chain of a step; layers share it."""
    tokens = token_map(step)
    return Chain(
        links=tuple(_build_link(tokens, held, device) for held in tokens.in_order),
        num_slots=max(map(len, tokens.by_rank)),
        transport=step.groups.context,
        uid=step.uid,
    )


def _build_link(tokens: TokenMap, held: HeldRange, device: torch.device) -> Link:
    start, stop = held.tokens
    if held.tokens.size == 0:
        return Link(held.rank, held.number, False, False)
    enters = torch.from_numpy(tokens.first[:, start] < start)
    passes = torch.from_numpy(tokens.first[:, stop - 1] <= start)
    return Link(held.rank, held.number, _compact(enters, device), _compact(passes, device))


def _compact(mask: Tensor, device: torch.device) -> bool | Tensor:
    if bool(mask.all()):
        return True
    return to_device(mask, device) if bool(mask.any()) else False


@outside_graphs
def initial_states(decay: Tensor, state: Tensor, *, apply: Apply = torch.mul) -> Tensor:
    """Return the state of a linear recurrence before each range that this rank holds.

    For ``S_t = a_t S_(t-1) + u_t``. Compute each range (see `split_ranges`) from a zero state, give
    its decay and its final state, and compute it again from the returned state, or add what that
    state changes. States do not pass the start of a document. Differentiable in ``decay`` and
    ``state``: gradients reach the earlier ranges on other ranks. Every rank must call it, and use
    the result, in the same order. Bytes sent depend on the size of the pairs and the number of
    ranks, not on the length of the sequence.

    Args:
        decay: [R, B, ...] for R ranges, the product of ``a_t`` over each range. If documents start
            inside a range, its value does not matter, but it must be finite.
        state: [R, B, ...], the state after each range, from a zero state before it. If documents
            start inside the range (see `document_starts`), the state of the last one.
        apply: computes ``a S`` from ``decay[i]`` and a state of shape ``state[i]``; linear in both.
            By default element-wise, with broadcasting: ``decay`` of a scalar per head is
            [R, B, H, 1, 1]. ``torch.matmul`` where decays are matrices, as in gated delta nets.

    Returns:
        Like ``state``. Outside a step, zeros: the sequence is one range.

    Example:
        >>> from lightning_cp.sequence import split_ranges
        >>> def scan(a, u, state):  # [B, n, D] twice, and the state before them
        ...     states = []
        ...     for t in range(a.shape[1]):
        ...         state = a[:, t] * state + u[:, t]
        ...         states.append(state)
        ...     return torch.stack(states, 1)
        >>> a, u = torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1)
        >>> parts = list(zip(split_ranges(a), split_ranges(u), strict=True))
        >>> decay = torch.stack([part.prod(1) for part, _ in parts])
        >>> state = torch.stack([scan(*part, torch.zeros(1, 1))[:, -1] for part in parts])
        >>> initial = initial_states(decay, state)
        >>> torch.cat([scan(*part, s) for part, s in zip(parts, initial, strict=True)], 1).flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    step = step_of_call()
    _check_pairs(decay, state, step)
    if step is None:
        return torch.zeros_like(state)
    _check_apply(decay, state, apply, step)
    chain = build_chain(step, state.device)
    states: Tensor = _InitialStates.apply(decay, state, chain, apply)  # type: ignore[no-untyped-call]
    return states


def _check_pairs(decay: Tensor, state: Tensor, step: Step | None) -> None:
    tokens = None if step is None else token_map(step)
    num_ranges = 1 if tokens is None else len(tokens.held)
    shapes = f"decay {tuple(decay.shape)} and state {tuple(state.shape)}"
    fits = min(decay.dim(), state.dim()) >= 2 and decay.shape[0] == state.shape[0] == num_ranges
    if not fits:
        raise ValueError(
            "initial_states() needs decay and state of shape [ranges, batch, ...] for the "
            f"{num_ranges} ranges that this rank holds; it got {shapes}. Compute both for each "
            "range of split_ranges(x), and stack them."
        )
    if decay.dtype != state.dtype or decay.device != state.device:
        raise ValueError(
            f"initial_states() sends decay and state together, but they are {decay.dtype} on "
            f"{decay.device} and {state.dtype} on {state.device}. Convert one of them."
        )
    if tokens is not None:
        check_batch("initial_states", state.shape[1], tokens)


_applied = PerStep[bool]()


def _check_apply(decay: Tensor, state: Tensor, apply: Apply, step: Step) -> None:
    """Raise if a state would change its shape: on all ranks, also on those that have no state."""
    key = apply, decay.shape, state.shape
    if _applied.get(step, key):
        return
    with torch.no_grad():
        shape = apply(decay[0], state[0]).shape
    if shape != state.shape[1:]:
        raise ValueError(
            f"initial_states(apply=...) made a state of shape {tuple(shape)} from a decay of shape "
            f"{tuple(decay.shape[1:])} and a state of shape {tuple(state.shape[1:])}. Give decays "
            "that keep the shape of a state: decay[..., None, None] for a scalar per head."
        )
    _applied.put(step, True, key)


class _InitialStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, state: Tensor, chain: Chain, apply: Apply) -> Tensor:
        ctx.chain, ctx.product = chain, apply
        with plain_functions(), autocast_off(state.device.type):
            initial = _forward(decay, state, chain, apply)
        ctx.save_for_backward(decay, initial, chain.mark)
        return initial

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        guard = backward_of_step(ctx, ctx.chain.uid)
        with guard as (decay, initial), autocast_off(grad.device.type):
            d_decay, d_state = _backward(grad, decay, initial, ctx.chain, ctx.product)
        return d_decay, d_state, None, None


def _forward(decay: Tensor, state: Tensor, chain: Chain, apply: Apply) -> Tensor:
    initial = torch.zeros_like(state)
    if chain.is_cut:
        return initial
    decays, states = _gather(decay, state, chain)
    after: Tensor | None = None  # a zero state
    for place, link in enumerate(chain.links[: chain.own[-1] + 1]):
        before = _keep(after, link.enters)
        if place in chain.own and before is not None:
            initial[link.number] = before
        after = states[link.rank, link.number]
        if before is not None and link.passes is not False and place < chain.own[-1]:
            remains = apply(decays[link.rank, link.number], before)
            after = _add(_keep(remains, link.passes), after)
    return initial


def _backward(
    grad: Tensor, decay: Tensor, initial: Tensor, chain: Chain, apply: Apply
) -> tuple[Tensor, Tensor]:
    d_decay, d_state = torch.zeros_like(decay), torch.zeros_like(initial)
    if chain.is_cut:
        return d_decay, d_state
    decays, grads = _gather(decay, grad, chain)
    d_after: Tensor | None = None
    for place in reversed(range(chain.own[0], len(chain.links))):
        link, is_own = chain.links[place], place in chain.own
        remains = None
        if is_own and d_after is not None:
            d_state[link.number] = d_after
        through = _keep(d_after, link.passes)
        if through is not None and link.enters is not False:
            before = initial[link.number] if is_own else torch.zeros_like(through)
            pair = decays[link.rank, link.number], before
            remains, *rest = _apply_backward(apply, *pair, through, wants_decay=is_own)
            if is_own:
                (d_decay[link.number],) = rest
        d_after = _keep(_add(remains, grads[link.rank, link.number]), link.enters)
    return d_decay, d_state


def _apply_backward(
    apply: Apply, decay: Tensor, before: Tensor, grad: Tensor, *, wants_decay: bool
) -> tuple[Tensor, ...]:
    """Return the gradient of the state before a range, and of its decay if that is wanted."""
    with torch.enable_grad():
        decay, before = decay.detach().requires_grad_(wants_decay), before.detach().requires_grad_()
        remains = apply(decay, before)
    return torch.autograd.grad(remains, [before, decay] if wants_decay else [before], grad)


def _gather(first: Tensor, second: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
    """Return two tensors [R, ...] of all ranks as [ranks, slots, ...], sent as one."""
    wire = torch.cat([first.flatten(1), second.flatten(1)], 1)
    if wire.shape[0] < chain.num_slots:
        padding = wire.new_zeros(chain.num_slots - wire.shape[0], wire.shape[1])
        wire = torch.cat([wire, padding])
    gathered = wire.new_empty(chain.transport.size, *wire.shape)
    chain.transport.all_gather(gathered, wire)()
    sizes = [first[0].numel(), second[0].numel()]
    one, two = torch.split(gathered, sizes, 2)
    ranges = gathered.shape[:2]
    return one.view(*ranges, *first.shape[1:]), two.view(*ranges, *second.shape[1:])


def _keep(x: Tensor | None, mask: bool | Tensor) -> Tensor | None:
    """Return x [B, ...] for the samples of a mask, and zero for others; None is zero."""
    if x is None or mask is False:
        return None
    if isinstance(mask, Tensor):
        return x.masked_fill(~mask.view(-1, *[1] * (x.dim() - 1)), 0)
    return x


def _add(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y
