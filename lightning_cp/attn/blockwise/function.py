# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention: runs a plan stage by stage, as one autograd function for every algorithm.

While one stage is computed, keys of the next one are sent; gradients of keys are sent back in the
same order. The function holds its plan and its transport, so backward needs no active step.

Shapes: B batch, H query heads, K key/value heads, L local tokens, D and Dv head dims.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import (
    NEVER,
    GradAccumulator,
    OutputAccumulator,
    PartialSums,
    T,
    TensorRegion,
    add_sinks_,
    empty_output,
    has_strides,
    sink_gradient,
    with_layout_of,
)
from lightning_cp.attn.blockwise.kernels.base import (
    BackwardInputs,
    Kernel,
    Scores,
    TiledKernel,
    TileMask,
)
from lightning_cp.attn.call import (
    AlibiSlopes,
    Bias,
    ScoreBias,
    with_unit_stride,
)
from lightning_cp.attn.keep_attention import Slot
from lightning_cp.attn.kv_exchange import KeyValues, KVGradBuffer, KVShard, fetch, scatter_grads
from lightning_cp.attn.mask_blocks import Block
from lightning_cp.attn.plan import Plan, Stage
from lightning_cp.comm.transport import Transport, nothing
from lightning_cp.config import GradientWire
from lightning_cp.geometry.ranges import Range
from lightning_cp.memory.offload import Saved
from lightning_cp.private.autograd import saves_through_hooks
from lightning_cp.private.modes import plain_functions
from lightning_cp.step.guards import backward_of_step, enter_backward_of, refuse_second_derivative
from lightning_cp.step.precision import accumulation_dtype, autocast_off


class _OnlyTile(NamedTuple):
    """A tile that is all of a call, and the kernel that computes it."""

    kernel: TiledKernel
    mask: TileMask


@dataclass(frozen=True, eq=False)
class BlockwiseCall:
    """An attention call computed tile by tile.

    Args:
        plan: tiles and transfers.
        transport: the ranks that exchange keys; each makes the same call.
        kernel: computes a block.
        scores: scale and softcap.
        uid: the step of the call; 0 outside a step.
        gradient_wire: precision of gradients in reduce-scatters.
        may_keep: whether activation checkpointing may keep the result.
    """

    plan: Plan
    transport: Transport
    kernel: Kernel
    scores: Scores
    uid: int = 0
    gradient_wire: GradientWire = "float32"
    may_keep: bool = True

    @cached_property
    def mark(self) -> Tensor:
        """Return the uid as a tensor that autograd can save."""
        return torch.tensor(self.uid)

    @cached_property
    def _only_tiles(self) -> dict[tuple[int, int], _OnlyTile | None]:
        return {}

    def only_tile(self, q: Tensor, k: Tensor) -> _OnlyTile | None:
        """Return the tile that is all of both passes without a bias, or None if there are more.

        A result of the kernel is then the result of the call: nothing is sent or accumulated.
        """
        num_heads = q.shape[1], k.shape[1]
        if num_heads not in self._only_tiles:
            self._only_tiles[num_heads] = self._find_only_tile(num_heads, q.device)
        return self._only_tiles[num_heads]

    def _find_only_tile(self, num_heads: tuple[int, int], device: torch.device) -> _OnlyTile | None:
        block, kernel = self.plan.local_block, self.kernel
        if block is None or not isinstance(kernel, TiledKernel):
            return None
        tiles = kernel.tiles(block, None)
        if len(tiles) != 1 or kernel.backward_tiles(block, None, num_heads) != tiles:
            return None
        tile, all_tokens = tiles[0], slice(0, self.plan.layout.local_len)
        if tile.batch != slice(None) or not tile.q_slice == tile.k_slice == all_tokens:
            return None
        return _OnlyTile(kernel, TileMask(tile, block.bounds, None, device))

    def _begin_backward(self, strides: tuple[int, ...] | None, dout: Tensor) -> Tensor | None:
        """Do what our own backward does first; return the gradient if the op needs another layout.

        The op loads 16 bytes at once. Nothing was recomputed: see `saves_through_hooks`.
        """
        refuse_second_derivative()
        enter_backward_of(self.uid)
        if strides is None or (has_strides(dout, strides) and dout.data_ptr() % 16 == 0):
            return None
        return dout.new_empty_strided(dout.shape, strides).copy_(dout)

    def _run_by_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Attend with a backward by torch, or return None where that needs help."""
        only = self.only_tile(q, k)
        if only is None:
            return None
        native = only.kernel.differentiable(q, k, v, only.mask, self.scores)
        if native is None:
            return None
        if native.out.requires_grad:
            begin = partial(self._begin_backward, native.strides)
            native.out.register_hook(begin)  # type: ignore[no-untyped-call]
        return native.out

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: ScoreBias | None
    ) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks; see `AttentionCall`."""
        q, k, v = with_unit_stride(q, k, v)
        if sinks is None and bias is None and not saves_through_hooks():
            with plain_functions():
                out = self._run_by_torch(q, k, v)
            if out is not None:
                return out
        values = None if bias is None else bias.values
        result: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
            q, k, v, sinks, values, self, type(bias)
        )
        return result


# As many ranks as one node has: its links are fast.
_FEW_RANKS = 8


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias_values: Tensor | None,
        call: BlockwiseCall,
        bias_type: type[Bias] | type[AlibiSlopes],
    ) -> Tensor:
        bias = None if bias_values is None else bias_type(bias_values)
        with plain_functions(), autocast_off(q.device.type):
            keeps = any(ctx.needs_input_grad)
            out, lse = compute_or_take(q, k, v, sinks, bias, call, keeps=keeps)
        ctx.call, ctx.bias_type = call, bias_type
        # Activation checkpointing replaces saved tensors by recomputed ones: the mark says in which
        # step they were recomputed.
        ctx.save_for_backward(q, k, v, sinks, bias_values, out, lse, call.mark)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with backward_of_step(ctx, ctx.call.uid) as saved, autocast_off(dout.device.type):
            q, k, v, sinks, bias_values, out, lse = saved
            bias = None if bias_values is None else ctx.bias_type(bias_values)
            inputs = BackwardInputs(dout, q, k, v, out, lse)
            gradients = compute_gradients(inputs, sinks, bias, ctx.call, ctx.needs_input_grad)
        return (*gradients, None, None, None)


def compute_gradients(
    inputs: BackwardInputs,
    sinks: Tensor | None,
    bias: ScoreBias | None,
    call: BlockwiseCall,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dv, dsinks, or None for those that are not needed."""
    needs_q, needs_k, needs_v, needs_sinks, *_ = needs_grad
    dq = dk = dv = dsinks = None
    dout, lse = with_layout_of(inputs.q, inputs.dout), inputs.lse
    if bias is not None or call.plan.has_blind_queries:
        # A query that saw nothing: exp(score - inf) makes all of its weights 0.
        lse = torch.where(lse == NEVER, float("inf"), lse)
    inputs = inputs._replace(dout=dout, lse=lse)
    if needs_q or needs_k or needs_v:
        dq, dk, dv = _backward(inputs, bias, call, return_keys=needs_k or needs_v)
    if needs_sinks and sinks is not None:
        dsinks = sink_gradient(dout, inputs.out, lse, sinks)
    return dq, dk, dv, dsinks


def compute_or_take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: ScoreBias | None,
    call: BlockwiseCall,
    *,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a call: what activation checkpointing has kept, or may keep now.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D].
        v: [B, K, L, Dv].
        sinks: [H] or None.
        bias: added to the scores, or None.
        call: the call.
        keeps: whether a result may be kept: a gradient will be needed.
    """
    slot: Slot[Saved] = Slot(call)
    kept = slot.result
    if kept is not None and kept.out.is_unchanged:
        # Another tensor object: autograd attaches its node to it.
        return kept.out.get().detach(), kept.rest.get()
    out, lse = compute_forward(q, k, v, sinks, bias, call)
    if keeps and call.may_keep and slot.reserve(out.nbytes + lse.nbytes):
        slot.store(slot.save(out), slot.save(lse))
    return out, lse


def compute_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: ScoreBias | None,
    call: BlockwiseCall,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a call, by one tile or by its stages."""
    only = call.only_tile(q, k) if bias is None else None
    if only is None:
        out, lse = _forward_by_stages(q, k, v, bias, call)
    else:
        out, lse = only.kernel.tile_forward(q, k, v, only.mask, call.scores)
    out = out.to(q.dtype)
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    return out, lse


def _forward_by_stages(
    q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None, call: BlockwiseCall
) -> tuple[Tensor, Tensor]:
    results = _HeadGroups(call.plan.stages, k, lambda: empty_output(q, v.shape[-1]))
    for turn in _visit(KVShard(k, v), call.plan.stages, call.transport):
        heads = _query_heads(turn.stage, q, k)
        if turn.is_first:
            output = OutputAccumulator(
                _select(q, heads), v.shape[-1], expects_more=call.plan.has_many_stages
            )
        block = turn.stage.block
        if block is not None:
            bias_part = None if bias is None else bias.select(heads, block.q_slice)
            queries = _select(q, heads, block.q_slice)
            parts = call.kernel.forward(queries, *turn.buffer, bias_part, block, call.scores)
            for part in parts:
                output.add(_region(part.batch, part.q_slice, block, q), (part.out, part.lse))
        if turn.is_last:
            results.write(heads, output)
    return results.result


def _backward(
    inputs: BackwardInputs, bias: ScoreBias | None, call: BlockwiseCall, *, return_keys: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs.q, inputs.k, inputs.v
    only = call.only_tile(q, k) if bias is None else None
    if only is None:
        return _backward_by_stages(inputs, bias, call, return_keys=return_keys)
    dq, dk, dv = only.kernel.tile_backward(inputs, only.mask, call.scores)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _backward_by_stages(
    inputs: BackwardInputs, bias: ScoreBias | None, call: BlockwiseCall, *, return_keys: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = inputs
    stages = call.plan.backward_stages
    dq, dk, dv = (_HeadGroups(stages, k, partial(torch.empty_like, x)) for x in (q, k, v))
    dtype = accumulation_dtype(q.dtype)
    finish = nothing
    for turn in _visit(KVShard(k, v), stages, call.transport):
        stage, block = turn.stage, turn.stage.block
        heads, kv_heads = _query_heads(stage, q, k), slice(*stage.heads)
        if turn.is_first:
            dq_sum = GradAccumulator(_select(q, heads), expects_more=call.plan.has_many_stages)
            kv_sums = GradAccumulator(_select(k, kv_heads)), GradAccumulator(_select(v, kv_heads))
        kv_grads = KVGradBuffer(stage, turn.buffer, dtype)
        if stage.slots and call.transport.size <= _FEW_RANKS:
            # Gradients of the previous head group were sent while local tokens were computed: free
            # their memory before kernels allocate theirs.
            finish()
            finish = nothing
        if block is not None:
            q_slice = block.q_slice
            block_inputs = BackwardInputs(
                _select(dout, heads, q_slice),
                _select(q, heads, q_slice),
                *turn.buffer,
                _select(out, heads, q_slice),
                _select(lse, heads, q_slice),
            )
            bias_part = None if bias is None else bias.select(heads, q_slice)
            for part in call.kernel.backward(block_inputs, bias_part, block, call.scores):
                dq_sum.add(_region(part.batch, part.q_slice, block, q), part.dq)
                if return_keys:
                    if stage.has_traffic:
                        # Only now, with a kernel launched: gradients of the last stage have had the
                        # time to arrive, and their memory serves the next.
                        finish()
                        finish = nothing
                    kv_grads.add(part.batch, part.k_slice, KeyValues(part.dk, part.dv))
        if turn.is_last:
            dq.write(heads, dq_sum)
        if return_keys:
            if stage.has_traffic:
                finish()
            pending = scatter_grads(stage, kv_grads, kv_sums, call.transport, call.gradient_wire)
            if stage.has_traffic:
                finish = pending
            if turn.is_last:
                finish = partial(_write_kv_grads, finish, kv_heads, (dk, dv), kv_sums)
    finish()
    if not return_keys:
        return dq.result, torch.zeros_like(k), torch.zeros_like(v)
    return dq.result, dk.result, dv.result


def _write_kv_grads(
    finish: Callable[[], None],
    heads: slice,
    gradients: tuple["_HeadGroups[Tensor]", ...],
    sums: tuple[GradAccumulator, ...],
) -> None:
    """Wait for the last gradients of some key heads, and write their sum."""
    finish()
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.write(heads, total)


class _HeadGroups(Generic[T]):
    """A result computed by head groups; a single group of all heads is returned without a copy.

    Args:
        stages: the stages that compute it.
        k: the keys, for their number of heads.
        empty: allocates the result.
    """

    def __init__(self, stages: tuple[Stage, ...], k: Tensor, empty: Callable[[], T]) -> None:
        self._has_one_group = stages[0].heads.size == k.shape[1]
        self._empty: Callable[[], T] = empty
        self._result: T | None = None

    def write(self, heads: slice, part: PartialSums[T]) -> None:
        """Write heads that are complete."""
        if self._has_one_group:
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


def _region(batch: slice, q_slice: slice, block: Block, q: Tensor) -> TensorRegion:
    """Return the region of a tile's queries among those of the rank."""
    start = block.q_slice.start
    tokens = Range(start + q_slice.start, start + q_slice.stop)
    return TensorRegion(Range(*batch.indices(q.shape[0])[:2]), tokens)


def _select(x: Tensor, heads: slice, tokens: slice | None = None) -> Tensor:
    """Return some heads and tokens; a view costs microseconds, so not where it would be all."""
    num_heads = heads.stop - heads.start
    if num_heads != x.shape[1]:
        x = x.narrow(1, heads.start, num_heads)
    if tokens is None or tokens.stop - tokens.start == x.shape[2]:
        return x
    return x.narrow(2, tokens.start, tokens.stop - tokens.start)


def _query_heads(stage: Stage, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that share the stage's key heads."""
    gqa_ratio = q.shape[1] // k.shape[1]
    return slice(stage.heads.start * gqa_ratio, stage.heads.stop * gqa_ratio)


class _Turn(NamedTuple):
    """A stage, its key buffer, and whether it is the first or the last one of its heads."""

    stage: Stage
    buffer: KeyValues
    is_first: bool
    is_last: bool


def _visit(shard: KVShard, stages: tuple[Stage, ...], transport: Transport) -> Iterator[_Turn]:
    """Yield each stage with its key buffer, while the next exchange is already running."""
    # Removed before it is called: it holds what was received, which would otherwise stay in memory
    # while the kernel runs.
    pending: deque[Callable[[], KeyValues]] = deque()
    num_started, heads = 0, None
    for number, stage in enumerate(stages):
        # Past stages without traffic: all ranks start the same exchange at the same time.
        while num_started < len(stages) and not any(
            s.has_traffic for s in stages[number + 1 : num_started]
        ):
            pending.append(fetch(stages[num_started], shard, transport))
            num_started += 1
        following = stages[number + 1] if number + 1 < len(stages) else None
        is_last = following is None or following.heads != stage.heads
        yield _Turn(stage, pending.popleft()(), heads != stage.heads, is_last)
        heads = stage.heads
