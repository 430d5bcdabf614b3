# SPDX-License-Identifier: Apache-2.0
"""Keys and values of other ranks as differentiable tensors: of whole rows, or what is needed.

Both travel in forward; their gradients travel back in backward, summed in at least float32 unless
the `Way` says otherwise. Who attends to them is the caller's business: `flex.py`, `row.py`.

Shapes: B batch, K key/value heads, L local tokens, S tokens of the row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import Sum, accumulation_dtype, wire_dtype
from lightning_cp.attn.kv_exchange import (
    Found,
    KeyValues,
    Shard,
    fetch,
    gather_row,
    give_back,
    scatter_row,
)
from lightning_cp.attn.plan import Stage
from lightning_cp.comm.transport import Transport
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import Range
from lightning_cp.guards import check_mark, enter_backward_of, refuse_second_derivative
from lightning_cp.options import GradientWire
from lightning_cp.torch_private import plain_functions


@dataclass(frozen=True, eq=False)
class Way:
    """Between whom keys travel, and for which step.

    Args:
        layout: who owns what.
        transport: the ranks that share the row.
        uid: the step; 0 for none.
        gradient_wire: how precise gradients are that collectives add up.
    """

    layout: Layout
    transport: Transport
    uid: int
    gradient_wire: GradientWire = "float32"


def whole_row(k: Tensor, v: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """Return keys and values of the whole row, [B, K, S, ...], in their order."""
    if way.layout.owned == ((Range(0, way.layout.seq_len),),):
        return k, v
    whole: tuple[Tensor, Tensor] = _WholeRow.apply(k, v, way)  # type: ignore[no-untyped-call]
    return whole


class _WholeRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        ctx.way = way
        # Checkpointing replaces saved tensors by recomputed ones: this one tells in which step.
        ctx.save_for_backward(torch.tensor(way.uid))
        with plain_functions():
            whole = gather_row(KeyValues(k, v), way.layout, way.transport)
        return whole.keys, whole.values

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        way = ctx.way
        wire = wire_dtype(dk.dtype, way.gradient_wire)
        with plain_functions():
            check_mark(ctx.saved_tensors[0], way.uid)
            enter_backward_of(way.uid)
            local = scatter_row(KeyValues(dk, dv), way.layout, way.transport, wire)
            return local.keys.to(dk.dtype), local.values.to(dv.dtype), None


Arriving = Callable[[], tuple[Tensor, Tensor]]
"""Waits for keys and values, and returns them."""


def bring(k: Tensor, v: Tensor, stage: Stage, way: Way, *, buffer_len: int) -> Arriving:
    """Start bringing the keys and values of a stage here.

    Args:
        k: [B, K, L, D], the heads of the stage.
        v: [B, K, L, Dv].
        stage: what travels.
        way: between whom.
        buffer_len: tokens to return; zeros follow what is needed.

    Returns:
        A function that waits and returns the key buffer, differentiable in ``k`` and ``v``.
    """
    if way.layout.cp_size == 1 and buffer_len == k.shape[2]:
        return lambda: (k, v)
    # Also if nothing travels this time: kernels are compiled for the strides of what comes.
    with plain_functions(), torch.no_grad():
        wait = fetch(stage, Shard(k, v), way.transport, buffer_len=buffer_len)

    def finish() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _Needed.apply(  # type: ignore[no-untyped-call]
            k, v, wait, stage, way
        )
        return found

    return finish


class _Needed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        wait: Callable[[], KeyValues],
        stage: Stage,
        way: Way,
    ) -> tuple[Tensor, Tensor]:
        ctx.stage, ctx.way = stage, way
        ctx.num_tokens = way.layout.local_len if stage.is_local else stage.buffer_len
        ctx.save_for_backward(torch.tensor(way.uid))
        with plain_functions():
            keys, values = wait()
            return keys, values

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        way, dtype = ctx.way, accumulation_dtype(dk.dtype)
        with plain_functions():
            check_mark(ctx.saved_tensors[0], way.uid)
            enter_backward_of(way.uid)
            given = KeyValues(dk, dv).tokens(0, ctx.num_tokens)
            found = Found(ctx.stage, given, dtype)
            found.add(slice(None), slice(0, ctx.num_tokens), given)
            keys, values = (Sum(x) for x in given.empty(way.layout.local_len, dk.dtype))
            give_back(ctx.stage, found, (keys, values), way.transport, way.gradient_wire)()
            return keys.result(), values.result(), None, None, None
