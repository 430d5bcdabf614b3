# SPDX-License-Identifier: Apache-2.0
"""Carry a plan out: the one autograd function behind every algorithm.

Stage after stage, keys of the next one travel while this one is computed; gradients of keys travel
back the same way. The function keeps its plan and its group, so backward needs nothing around it.

Shapes: B batch, H query heads, K key/value heads, L local tokens, D and Dv head dims.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import (
    NEVER,
    Patches,
    Softmax,
    Sum,
    T,
    Where,
    accumulation_dtype,
    add_sinks_,
    empty_softmaxed,
    laid_out_like,
    sink_gradient,
)
from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Kernel, Scores
from lightning_cp.attn.kv_exchange import Found, KeyValues, Shard, fetch, give_back
from lightning_cp.attn.plan import Block, Plan, Stage
from lightning_cp.comm.transport import Transport, nothing
from lightning_cp.geometry.ranges import Range
from lightning_cp.guards import check_mark, enter_backward_of, refuse_second_derivative
from lightning_cp.options import GradientWire
from lightning_cp.torch_private import plain_functions


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about one attention call that is no tensor.

    Args:
        plan: what meets where.
        transport: how keys travel.
        kernel: what computes a block.
        scores: how a score is made.
        uid: the step that the call belongs to; 0 for none.
        gradient_wire: how precise gradients are that collectives add up.
    """

    plan: Plan
    transport: Transport
    kernel: Kernel
    scores: Scores
    uid: int = 0
    gradient_wire: GradientWire = "float32"

    @cached_property
    def mark(self) -> Tensor:
        """Return the uid as a tensor that autograd can save."""
        return torch.tensor(self.uid)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, call: Call
) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D].
        v: [B, K, L, Dv].
        sinks: [H] or None.
        bias: [B or 1, H or 1, L or 1, S] or None: added to the scores of this rank's queries with
            the keys of the whole row; or slopes [H], by which a score falls with the distance of
            query and key. It gets no gradient.
        call: what to do; every rank of the group makes the same call.

    Returns:
        [B, H, L, Dv] in the dtype of ``q``.
    """
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        # Kernels walk along the head dim: the CPU's op takes its stride for 1 without looking.
        q, k, v = (x.contiguous() for x in (q, k, v))
    out: Tensor = _Attend.apply(q, k, v, sinks, bias, call)  # type: ignore[no-untyped-call]
    return out


def _own_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off, which would lower the sums; cheap where it is off already."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


# As many as are in one node, whose links are fast.
_FEW_RANKS = 8


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        call: Call,
    ) -> Tensor:
        with plain_functions(), _own_precision(q.device):
            out, lse = _forward(q, k, v, sinks, bias, call)
        ctx.call = call
        # Activation checkpointing replaces saved tensors by recomputed ones. If the recompute ran
        # under another step, this mark tells.
        ctx.save_for_backward(q, k, v, sinks, bias, out, lse, call.mark)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        saved, call = ctx.saved_tensors, ctx.call
        with plain_functions(), _own_precision(dout.device):
            check_mark(saved[-1], call.uid)
            enter_backward_of(call.uid)
            gradients = _gradients(dout, saved, call, ctx.needs_input_grad)
        return (*gradients, None, None)


def _gradients(
    dout: Tensor, saved: tuple[Any, ...], call: Call, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dv, dsinks, as far as they are needed."""
    q, k, v, sinks, bias, out, lse, _ = saved
    needs_q, needs_k, needs_v, needs_sinks, *_ = needed
    dq = dk = dv = dsinks = None
    dout = laid_out_like(q, dout)
    if bias is not None or call.plan.has_blind_queries:
        # A query that saw nothing: exp(score - inf) makes all of its weights 0.
        lse = torch.where(lse == NEVER, float("inf"), lse)
    if needs_q or needs_k or needs_v:
        keys = needs_k or needs_v
        given = BackwardInputs(dout, q, k, v, out, lse)
        dq, dk, dv = _backward(given, bias, call, return_keys=keys)
    if needs_sinks and sinks is not None:
        dsinks = sink_gradient(dout, out, lse, sinks)
    return dq, dk, dv, dsinks


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    found = _Heads(call.plan.stages, k, lambda: empty_softmaxed(q, v.shape[-1]))
    for turn in _visit(Shard(k, v), call.plan.stages, call.transport):
        heads = _query_heads(turn.stage, q, k)
        if turn.is_first:
            softmax = Softmax(_of(q, heads), v.shape[-1], expects_more=call.plan.has_many_stages)
        block = turn.stage.block
        if block is not None:
            bias_part = None if bias is None else _bias_of(bias, heads, block.rows)
            queries = _of(q, heads, block.rows)
            parts = call.kernel.forward(queries, *turn.buffer, bias_part, block, call.scores)
            for part in parts:
                where = _where(part.batch, part.rows, block, q)
                softmax.add(where, (part.out, part.lse))
        if turn.is_last:
            found.settle(heads, softmax)
    out, lse = found.result
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    return out.to(q.dtype), lse


def _backward(
    given: BackwardInputs, bias: Tensor | None, call: Call, *, return_keys: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = given
    stages = call.plan.backward_stages
    dq, dk, dv = (_Heads(stages, k, partial(torch.empty_like, x)) for x in (q, k, v))
    dtype = accumulation_dtype(q.dtype)
    finish = nothing
    for turn in _visit(Shard(k, v), stages, call.transport):
        stage, block = turn.stage, turn.stage.block
        heads, own = _query_heads(stage, q, k), slice(*stage.heads)
        if turn.is_first:
            dq_sum = Sum(_of(q, heads), expects_more=call.plan.has_many_stages)
            sums = Sum(_of(k, own)), Sum(_of(v, own))
        found = Found(stage, turn.buffer, dtype)
        if stage.slots and call.transport.size <= _FEW_RANKS:
            # What the former group sent had the time of the own tokens: its memory goes before
            # kernels take theirs.
            finish()
            finish = nothing
        if block is not None:
            rows = block.rows
            inputs = BackwardInputs(
                _of(dout, heads, rows),
                _of(q, heads, rows),
                *turn.buffer,
                _of(out, heads, rows),
                _of(lse, heads, rows),
            )
            bias_part = None if bias is None else _bias_of(bias, heads, rows)
            for part in call.kernel.backward(inputs, bias_part, block, call.scores):
                dq_sum.add(_where(part.batch, part.rows, block, q), part.dq)
                if return_keys:
                    if stage.travels:
                        # Only now, with a kernel on its way: what the last stage sent has had the
                        # time to arrive, and its memory serves the next.
                        finish()
                        finish = nothing
                    found.add(part.batch, part.columns, KeyValues(part.dk, part.dv))
        if turn.is_last:
            dq.settle(heads, dq_sum)
        if return_keys:
            if stage.travels:
                finish()
            sent = give_back(stage, found, sums, call.transport, call.gradient_wire)
            if stage.travels:
                finish = sent
            if turn.is_last:
                finish = partial(_settle_keys, finish, own, (dk, dv), sums)
    finish()
    if not return_keys:
        return dq.result, torch.zeros_like(k), torch.zeros_like(v)
    return dq.result, dk.result, dv.result


def _settle_keys(
    finish: Callable[[], None],
    heads: slice,
    gradients: tuple["_Heads[Tensor]", ...],
    sums: tuple[Sum, ...],
) -> None:
    """Wait for the last gradients of some key heads, and keep the sum."""
    finish()
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.settle(heads, total)


class _Heads(Generic[T]):
    """A result that comes in groups of heads; that of all heads at once is taken as it is.

    Args:
        stages: what it comes of.
        k: the keys, for their number of heads.
        empty: takes memory for it.
    """

    def __init__(self, stages: tuple[Stage, ...], k: Tensor, empty: Callable[[], T]) -> None:
        self._is_whole = stages[0].heads.size == k.shape[1]
        self._empty: Callable[[], T] = empty
        self._result: T | None = None

    def settle(self, heads: slice, part: Patches[T]) -> None:
        """Keep the heads that are ready."""
        if self._is_whole:
            self._result = part.result()
            return
        if self._result is None:
            self._result = self._empty()
        part.write(_heads_of(self._result, heads))

    @property
    def result(self) -> T:
        """Return all heads."""
        assert self._result is not None  # noqa: S101  there is at least one stage
        return self._result


def _heads_of(x: T, heads: slice) -> T:
    if isinstance(x, tuple):
        return x[0][:, heads], x[1][:, heads]
    return x[:, heads]


def _where(batch: slice, rows: slice, block: Block, q: Tensor) -> Where:
    """Return the place of a tile's queries among those of the rank."""
    start = block.rows.start
    tokens = Range(start + rows.start, start + rows.stop)
    return Where(Range(*batch.indices(q.shape[0])[:2]), tokens)


def _of(x: Tensor, heads: slice, rows: slice | None = None) -> Tensor:
    """Return some heads and rows; slicing costs microseconds, so not where that is all."""
    num_heads = heads.stop - heads.start
    if num_heads != x.shape[1]:
        x = x.narrow(1, heads.start, num_heads)
    if rows is None or rows.stop - rows.start == x.shape[2]:
        return x
    return x.narrow(2, rows.start, rows.stop - rows.start)


def _bias_of(bias: Tensor, heads: slice, rows: slice) -> Tensor:
    """Return the bias of some heads and rows; dims of size 1 stand for all."""
    if bias.dim() == 1:
        return bias[heads]
    heads = heads if bias.shape[1] > 1 else slice(None)
    rows = rows if bias.shape[2] > 1 else slice(None)
    return bias[:, heads, rows]


def _query_heads(stage: Stage, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that share the stage's key heads."""
    group = q.shape[1] // k.shape[1]
    return slice(stage.heads.start * group, stage.heads.stop * group)


class _Turn(NamedTuple):
    """A stage, its keys, and whether it is the first or the last one of its heads."""

    stage: Stage
    buffer: KeyValues
    is_first: bool
    is_last: bool


def _visit(shard: Shard, stages: tuple[Stage, ...], transport: Transport) -> Iterator[_Turn]:
    """Yield each stage with its key buffer; what travels next is already on its way."""
    # Taken out before it is called: it holds what came over the wire, which would otherwise stay
    # in memory beside the kernel.
    pending: deque[Callable[[], KeyValues]] = deque()
    begun, heads = 0, None
    for number, stage in enumerate(stages):
        # Past stages that are each rank's own: all ranks begin the same exchange at the same time.
        while begun < len(stages) and not any(s.travels for s in stages[number + 1 : begun]):
            pending.append(fetch(stages[begun], shard, transport))
            begun += 1
        following = stages[number + 1] if number + 1 < len(stages) else None
        is_last = following is None or following.heads != stage.heads
        yield _Turn(stage, pending.popleft()(), heads != stage.heads, is_last)
        heads = stage.heads
