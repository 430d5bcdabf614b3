# SPDX-License-Identifier: Apache-2.0
"""Carry a plan out: the one autograd function behind every algorithm.

Stage after stage, keys of the next one travel while this one is computed; gradients of keys travel
back the same way. The function keeps its plan and its group, so backward needs nothing around it.

Shapes: B batch, H query heads, K key/value heads, L local tokens, D and Dv head dims.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_cp.collectives import Transport, nothing
from lightning_cp.compat import plain_functions
from lightning_cp.context import check_mark, enter_backward_of
from lightning_cp.engine.exchange import KeyValues, fetch, give_back
from lightning_cp.engine.kernels.base import BackwardInputs, Kernel, Scores
from lightning_cp.engine.merge import (
    NEVER,
    Softmax,
    Sum,
    accumulation_dtype,
    add_sinks_,
    sink_gradient,
)
from lightning_cp.engine.plan import Plan, Stage


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about one attention call that is no tensor.

    Args:
        plan: what meets where.
        transport: how keys travel.
        kernel: what computes a block.
        scores: how a score is made.
        uid: the step that the call belongs to; 0 for none.
    """

    plan: Plan
    transport: Transport
    kernel: Kernel
    scores: Scores
    uid: int = 0

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
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Context-parallel attention has no second derivative: call backward() or "
                "autograd.grad() without create_graph=True."
            )
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
    dout = dout.contiguous()
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
    sole = call.plan.sole_block
    if sole is not None and sinks is None:  # the common case of one rank, without bookkeeping
        out, lse = call.kernel.forward(q, k, v, bias, sole, call.scores)
        return out.to(q.dtype), lse
    softmax = Softmax(q, v.shape[-1])
    for stage, buffer in _visit(KeyValues(k, v), call):
        if stage.block is None:
            continue
        heads, rows = _query_heads(stage, q, k), stage.block.rows
        bias_part = None if bias is None else _bias_of(bias, heads, rows)
        part = call.kernel.forward(
            _of(q, heads, rows), *buffer, bias_part, stage.block, call.scores
        )
        softmax.add(heads, rows, *part)
    out, lse = softmax.result()
    if sinks is not None:
        out = out.to(accumulation_dtype(q.dtype))
        add_sinks_(out, lse, sinks)
    return out.to(q.dtype), lse


def _backward(
    given: BackwardInputs, bias: Tensor | None, call: Call, *, return_keys: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = given
    sole = call.plan.sole_block
    if sole is not None:
        parts = call.kernel.backward(given, bias, sole, call.scores)
        return parts[0].to(q.dtype), parts[1].to(k.dtype), parts[2].to(v.dtype)
    dtype = accumulation_dtype(q.dtype)
    dq, dkv = Sum(q), (Sum(k), Sum(v))
    finish = nothing
    for stage, buffer in _visit(KeyValues(k, v), call):
        if stage.block is None:
            found = buffer.zeros(buffer.num_tokens, dtype)
        else:
            heads, rows = _query_heads(stage, q, k), stage.block.rows
            part = BackwardInputs(
                _of(dout, heads, rows),
                _of(q, heads, rows),
                *buffer,
                _of(out, heads, rows),
                _of(lse, heads, rows),
            )
            dq_part, *dkv_part = call.kernel.backward(
                part,
                None if bias is None else _bias_of(bias, heads, rows),
                stage.block,
                call.scores,
            )
            dq.add((slice(None), heads, rows), dq_part)
            found = KeyValues(*dkv_part)
        if not return_keys:
            continue
        if stage.is_alone:
            own = (slice(None), slice(*stage.heads))
            dkv[0].add(own, found.keys)
            dkv[1].add(own, found.values)
        else:
            # A kernel may return any precision, another one on each rank; the wire has one.
            found = KeyValues(*(x.to(dtype) for x in found))
            gradients = KeyValues(*(total.running() for total in dkv))
            previous, finish = finish, give_back(stage, found, gradients, call.transport)
            previous()
    finish()
    dk, dv = (total.result() for total in dkv)
    return dq.result(), dk, dv


def _of(x: Tensor, heads: slice, rows: slice) -> Tensor:
    """Return some heads and rows; slicing costs microseconds, so not where that is all."""
    size = heads.stop - heads.start, rows.stop - rows.start
    return x if x.shape[1:3] == size else x[:, heads, rows]


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


def _visit(shard: KeyValues, call: Call) -> Iterator[tuple[Stage, KeyValues]]:
    """Yield each stage with its key buffer; that of the next one is already on its way."""
    stages = call.plan.stages
    # Taken out before it is called: it holds what came over the wire, which would otherwise stay
    # in memory beside the kernel.
    pending = deque([fetch(stages[0], shard, call.transport)])
    for stage, following in zip_longest(stages, stages[1:]):
        if following is not None:
            pending.append(fetch(following, shard, call.transport))
        yield stage, pending.popleft()()
