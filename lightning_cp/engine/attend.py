# SPDX-License-Identifier: Apache-2.0
"""Carry a plan out: the one autograd function behind every algorithm.

Stage after stage, keys of the next one travel while this one is computed; gradients of keys travel
back the same way. The function keeps its plan and its group, so backward needs nothing around it.

Shapes: B batch, H query heads, K key/value heads, L local tokens, D and Dv head dims.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_cp.collectives import Transport
from lightning_cp.context import check_mark, enter_backward_of
from lightning_cp.engine.exchange import KeyValues, fetch, give_back
from lightning_cp.engine.kernels.base import Kernel, Scores
from lightning_cp.engine.merge import (
    NEVER,
    accumulation_dtype,
    add_sinks_,
    merge_,
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


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D].
        v: [B, K, L, Dv].
        sinks: [H] or None.
        call: what to do; every rank of the group makes the same call.

    Returns:
        [B, H, L, Dv] in the dtype of ``q``.
    """
    # Kernels walk along the head dim: the CPU's op takes its stride for 1 without looking.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out: Tensor = _Attend.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward(q, k, v, sinks, call)
        ctx.call = call
        # Activation checkpointing replaces saved tensors by recomputed ones. If the recompute ran
        # under another step, this mark tells.
        mark = torch.tensor(call.uid)
        ctx.save_for_backward(q, k, v, sinks, out, lse, mark)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Context-parallel attention has no second derivative: call backward() or "
                "autograd.grad() without create_graph=True."
            )
        q, k, v, sinks, out, lse, mark = ctx.saved_tensors
        check_mark(mark, ctx.call.uid)
        enter_backward_of(ctx.call.uid)
        needs_q, needs_k, needs_v, needs_sinks, _ = ctx.needs_input_grad
        dq = dk = dv = dsinks = None
        # A query that saw nothing: exp(score - inf) makes all of its weights 0.
        lse = torch.where(lse == NEVER, float("inf"), lse)
        with torch.autocast(q.device.type, enabled=False):
            dout = dout.contiguous()
            if needs_q or needs_k or needs_v:
                dq, dk, dv = _backward(
                    dout, q, k, v, out, lse, ctx.call, return_keys=needs_k or needs_v
                )
            if needs_sinks:
                dsinks = sink_gradient(dout, out, lse, sinks)
        return dq, dk, dv, dsinks, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = q.new_full(q.shape[:-1], NEVER, dtype=dtype)
    touched = set()
    for stage, buffer in _visit(KeyValues(k, v), call):
        if stage.block is None:
            continue
        heads, rows = _query_heads(stage, q, k), stage.block.rows
        part = call.kernel.forward(q[:, heads, rows], *buffer, stage.block, call.scores)
        if stage.heads in touched:
            merge_(out[:, heads, rows], lse[:, heads, rows], *part)
        else:
            out[:, heads, rows], lse[:, heads, rows] = part
            touched.add(stage.heads)
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    *,
    return_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    finish = _nothing
    for stage, buffer in _visit(KeyValues(k, v), call):
        if stage.block is None:
            found = buffer.zeros(buffer.num_tokens, dtype)
        else:
            heads, rows = _query_heads(stage, q, k), stage.block.rows
            dq_part, *dkv_part = call.kernel.backward(
                dout[:, heads, rows],
                q[:, heads, rows],
                *buffer,
                out[:, heads, rows],
                lse[:, heads, rows],
                stage.block,
                call.scores,
            )
            dq[:, heads, rows] += dq_part
            found = KeyValues(*dkv_part)
        if return_keys:
            previous = finish
            finish = give_back(stage, found, KeyValues(dk, dv), call.transport)
            previous()
    finish()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _nothing() -> None:
    """Wait for nothing."""


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
