# SPDX-License-Identifier: Apache-2.0
"""Keys and values of other ranks as differentiable tensors: full sequences, or what is needed.

Backward sends their gradients to the owners, summed in at least float32 unless the `KVRoute` says
otherwise. Used by `flex_attention.py` (full sequences) and `from_mask.py` (planned stages).

Shapes: B batch, K key/value heads, L local tokens, S tokens of the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import GradAccumulator, wire_dtype
from lightning_cp.attn.kv_exchange import (
    KeyValues,
    KVGradBuffer,
    KVShard,
    fetch,
    gather_sequence,
    scatter_grads,
    scatter_sequence_grads,
)
from lightning_cp.attn.plan import Stage
from lightning_cp.comm.transport import Transport
from lightning_cp.config import GradientWire
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range
from lightning_cp.private.modes import plain_functions
from lightning_cp.step.guards import backward_of_step
from lightning_cp.step.precision import accumulation_dtype


@dataclass(frozen=True, eq=False)
class KVRoute:
    """The ranks that exchange keys, and the step.

    Args:
        layout: which rank owns which positions.
        transport: the ranks that share the sequence.
        uid: the step; 0 outside a step.
        gradient_wire: precision of gradients in reduce-scatters.
    """

    layout: Layout
    transport: Transport
    uid: int
    gradient_wire: GradientWire = "float32"


def gather_kv(k: Tensor, v: Tensor, route: KVRoute) -> tuple[Tensor, Tensor]:
    """Return keys and values of full sequences, [B, K, S, ...], in their order."""
    if route.layout.owned == ((Range(0, route.layout.seq_len),),):
        return k, v
    key_values: tuple[Tensor, Tensor] = _GatherSequence.apply(k, v, route)  # type: ignore[no-untyped-call]
    return key_values


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, route: KVRoute) -> tuple[Tensor, Tensor]:
        ctx.route = route
        ctx.save_for_backward(torch.tensor(route.uid))
        with plain_functions():
            sequence = gather_sequence(KeyValues(k, v), route.layout, route.transport)
        return sequence.keys, sequence.values

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.route
        wire = wire_dtype(dk.dtype, route.gradient_wire)
        with backward_of_step(ctx, route.uid):
            grads = KeyValues(dk, dv)
            local = scatter_sequence_grads(grads, route.layout, route.transport, wire)
            return local.keys.to(dk.dtype), local.values.to(dv.dtype), None


PendingKV = Callable[[], tuple[Tensor, Tensor]]
"""Waits for keys and values, and returns them."""


def fetch_kv(k: Tensor, v: Tensor, stage: Stage, route: KVRoute, *, buffer_len: int) -> PendingKV:
    """Start fetching the keys and values of a stage.

    Args:
        k: [B, K, L, D], the heads of the stage.
        v: [B, K, L, Dv].
        stage: what is sent.
        route: the ranks.
        buffer_len: tokens to return; zeros follow the needed ones.

    Returns:
        A function that waits and returns the key buffer, differentiable in ``k`` and ``v``.
    """
    if route.layout.cp_size == 1 and buffer_len == k.shape[2]:
        return lambda: (k, v)
    # Also if nothing is sent this time: kernels are compiled for the strides of the buffer.
    with plain_functions(), torch.no_grad():
        wait = fetch(stage, KVShard(k, v), route.transport, buffer_len=buffer_len)

    def finish() -> tuple[Tensor, Tensor]:
        buffer: tuple[Tensor, Tensor] = _FetchStage.apply(  # type: ignore[no-untyped-call]
            k, v, wait, stage, route
        )
        return buffer

    return finish


class _FetchStage(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        wait: Callable[[], KeyValues],
        stage: Stage,
        route: KVRoute,
    ) -> tuple[Tensor, Tensor]:
        ctx.stage, ctx.route = stage, route
        ctx.num_tokens = route.layout.local_len if stage.is_local else stage.buffer_len
        ctx.save_for_backward(torch.tensor(route.uid))
        with plain_functions():
            keys, values = wait()
            return keys, values

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        route, dtype = ctx.route, accumulation_dtype(dk.dtype)
        with backward_of_step(ctx, route.uid):
            grads = KeyValues(dk, dv).tokens(0, ctx.num_tokens)
            buffer = KVGradBuffer(ctx.stage, grads, dtype)
            buffer.add(slice(None), slice(0, ctx.num_tokens), grads)
            keys, values = (
                GradAccumulator(x) for x in grads.empty(route.layout.local_len, dk.dtype)
            )
            sums = keys, values
            scatter_grads(ctx.stage, buffer, sums, route.transport, route.gradient_wire)()
            return keys.result(), values.result(), None, None, None
