# SPDX-License-Identifier: Apache-2.0
"""The chooser: kernel, algorithm, head groups and memory budget of one attention call.

Every decision follows from values that are equal on all ranks (layout, mask, shapes, config), so
that ranks agree without a message. The result is a call that is ready to run: `BlockwiseCall` or
`FlexCall`, inside a `UlyssesCall` where neighbouring ranks exchange tokens for heads.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lightning_cp.attn import triton_ops
from lightning_cp.attn.accumulators import wire_dtype
from lightning_cp.attn.blockwise.function import BlockwiseCall
from lightning_cp.attn.blockwise.kernels.base import Kernel, Request, Scores
from lightning_cp.attn.blockwise.kernels.select import select_kernel
from lightning_cp.attn.call import AttentionCall, PaddedCall
from lightning_cp.attn.cost import (
    CallSize,
    ExchangeChoice,
    ExchangeName,
    choose_exchange,
    default_memory_budget,
)
from lightning_cp.attn.flex.from_mask import FlexCall, build_flex_call, longest_key_buffer
from lightning_cp.attn.flex.kernel import MIN_HEAD_DIM, MIN_QUERIES, needs_plain_torch
from lightning_cp.attn.plan import QueryShard, build_plan, resolve_algorithm
from lightning_cp.attn.ulysses import Place, UlyssesCall, place_of
from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import LoneTransport, Transport
from lightning_cp.config import Config
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.mask import Mask
from lightning_cp.private.compiler import can_compile
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import Step

_logger = logging.getLogger(__name__)

_ALONE = LoneTransport()

# FlexAttention's kernels are slow in float32, too: for shorter sequences the reference kernel has
# finished before they are compiled.
_LONG_FLOAT32_SEQUENCE = 4096


@dataclass(frozen=True, eq=False)
class CallSpec:
    """One attention call as the choice sees it; equal on all ranks except for ``query_shard``.

    Args:
        bounds: the mask.
        query_shard: the queries and heads that this rank computes.
        num_kv_heads: key heads that this rank computes.
        request: device, dtype and scores.
        problem: sizes of the call over all ranks.
        has_bias: whether a bias or ALiBi slopes are added to the scores.
        config: of the run.
        compiles: whether kernels can be compiled on the GPUs of all ranks, as far as is known.
        transport: the ranks that exchange keys.
        uid: the step; 0 outside of steps.
        may_keep: whether activation checkpointing may keep the result.
    """

    bounds: Bounds
    query_shard: QueryShard
    num_kv_heads: int
    request: Request
    problem: CallSize
    has_bias: bool
    config: Config
    compiles: bool = True
    transport: Transport = _ALONE
    uid: int = 0
    may_keep: bool = True

    @property
    def algorithms(self) -> tuple[ExchangeName, ...]:
        """Return the algorithms to choose among."""
        name = self.config.algorithm
        return ("gather", "ring") if name == "auto" else (resolve_algorithm(name),)

    @property
    def memory_budget(self) -> float:
        """Return the bytes that the call may allocate beyond its inputs and its output."""
        if self.config.attention.memory is not None:
            return float(int(self.config.attention.memory * 2**30))
        return default_memory_budget(self.problem, algorithms=self.algorithms)


def build_call(
    mask: Mask, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor, *, has_bias: bool
) -> AttentionCall:
    """Choose and plan a call.

    Args:
        mask: in global positions.
        step: layout, documents, padding and config; outside of steps that of `full_step`.
        scores: scale and softcap.
        q: queries, for shape, dtype and device.
        k: keys, likewise.
        v: values, likewise.
        has_bias: whether a bias or ALiBi slopes are added to the scores.
    """
    place, inside = place_of(step, q, k), step.groups.inside
    spec = _describe(mask, step, place, scores, q, k, v, has_bias=has_bias)
    kernel = choose_kernel(spec)
    built = _flex_call(spec) if kernel is None else _blockwise_call(spec, kernel)
    if step.uid and step.cp_rank == 0:
        _log_choice(step, built)
    call: AttentionCall = built
    if place.swap is not None:
        call = UlyssesCall(place.swap, inside, call)
    local_len, is_swapped = step.layout.local_len, inside.size > 1
    if step.layout.shows_padding or (step.tensor_len == local_len and not is_swapped):
        return call
    return PaddedCall(call, local_len, spreads_bias=is_swapped)


def _describe(
    mask: Mask,
    step: Step,
    place: Place,
    scores: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    has_bias: bool,
) -> CallSpec:
    """Return what the choice depends on; raise for a mask of another batch."""
    bounds, config, seq_len = step.bounds(mask), step.config, step.layout.seq_len
    if bounds.num_samples not in (1, q.shape[0]):
        raise ValueError(
            f"attention(): the mask has {bounds.num_samples} samples (documents, spans or "
            f"padding), but the tensors have a batch of {q.shape[0]}. Build the mask from the same "
            "batch."
        )
    # Attention in a window is quick to compute again, and its result is as large as any other.
    is_cheap = config.memory.keep_attention == "auto" and mask.is_windowed(seq_len)
    problem = CallSize(
        seq_len=seq_len,
        cp_size=step.cp_size,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        itemsize=q.dtype.itemsize,
        batch_size=q.shape[0],
        kind="full" if (bounds.last[:, 0] >= seq_len).all() else "causal",
        ulysses_size=step.groups.inside.size,
        wire_itemsize=wire_dtype(q.dtype, config.attention.gradient_wire).itemsize,
    )
    return CallSpec(
        bounds,
        place.query_shard,
        place.num_kv_heads,
        Request(q.device, q.dtype, scores, max(q.shape[-1], v.shape[-1])),
        problem,
        has_bias,
        config,
        step.groups.compiles,
        step.groups.attend,
        step.uid,
        may_keep=not is_cheap,
    )


# --- kernel ---


def choose_kernel(spec: CallSpec) -> Kernel | None:
    """Return the blockwise kernel of a call; None for FlexAttention."""
    name = spec.config.attention.kernel
    if name == "flex":
        return None
    kernel = select_kernel(name, spec.request)
    may_compile = name == "auto" and spec.request.device.type == "cuda" and spec.compiles
    if not may_compile or not prefers_flex(spec, kernel):
        return kernel
    if spec.config.algorithm != "ring":
        return None
    if spec.query_shard.is_first:
        _log_once(
            logging.WARNING,
            "attention: algorithm=ring computes the edges of documents, windows and padding, and "
            "scores with softcap or bias, by the slow reference kernel. algorithm=gather would use "
            "FlexAttention for them.",
        )
    return kernel


def prefers_flex(spec: CallSpec, kernel: Kernel) -> bool:
    """Return whether ``auto`` takes FlexAttention instead of a blockwise kernel.

    Blockwise kernels are faster where the mask is dense. Everything else they split into tiles, and
    leave tiles at the edges to the reference kernel, which materializes the scores: ten times
    slower on a GPU. FlexAttention's kernels are deterministic as we call them (nothing is summed by
    atomics), so ``torch.use_deterministic_algorithms`` does not matter.

    Args:
        spec: the call.
        kernel: what `select_kernel` returns for it.
    """
    request, layout, problem = spec.request, spec.query_shard.layout, spec.problem
    is_half = request.dtype in (torch.bfloat16, torch.float16)
    is_long = request.dtype == torch.float32 and layout.seq_len >= _LONG_FLOAT32_SEQUENCE
    is_able = (
        request.device.type == "cuda"  # it has no backward elsewhere
        and (is_half or is_long)  # float64 is chosen to be exact
        and layout.local_len >= MIN_QUERIES
        and min(problem.head_dim, problem.value_dim) >= MIN_HEAD_DIM
    )
    # Softcap, other scales, large head dims, float32, old GPUs: no fused kernel supports them.
    is_better = (
        kernel.name == "reference" or spec.has_bias or not is_dense(spec.bounds, layout.seq_len)
    )
    return is_able and is_better and _compiles(request.device, request.dtype)


def is_dense(bounds: Bounds, seq_len: int) -> bool:
    """Return whether a mask is only causal, or hides nothing; padding of ours does not count.

    Example:
        >>> is_dense(Mask(causal=True, window=4).bounds(4), 4)  # it reaches everything
        True
        >>> is_dense(Mask(causal=True, window=3).bounds(4), 4)
        False
    """
    first, last = bounds.first[:, :seq_len], bounds.last[:, :seq_len]
    if first.any() or not (bounds.real_before[:, seq_len] == seq_len).all():
        return False
    return bool((last == seq_len).all() or (last == np.arange(1, seq_len + 1)).all())


def _compiles(device: torch.device, dtype: torch.dtype) -> bool:
    return can_compile(device, dtype) and triton_ops.can_start(device)


# --- algorithm and head groups ---


def choose_head_groups(spec: CallSpec) -> ExchangeChoice:
    """Choose algorithm and head groups of a blockwise call."""
    if spec.request.device.type != "cuda":
        # Two groups: the second one is sent while the first is computed.
        is_ring = spec.config.algorithm == "ring"
        return ExchangeChoice("ring", 1, 1) if is_ring else ExchangeChoice("gather", 2, 2)
    choice = choose_exchange(
        spec.problem, memory_budget=spec.memory_budget, algorithms=spec.algorithms
    )
    if not choice.fits and spec.query_shard.is_first:
        _log_once(
            logging.WARNING,
            "attention: algorithm=%s exceeds its GPU memory budget. Use algorithm='auto', or raise "
            "attention=Attention(memory=...).",
            choice.algorithm,
        )
    return choice


def count_flex_groups(num_kv_heads: int, head_bytes: int, budget: float) -> int:
    """Return the fewest head groups within the budget, of one size, so that one kernel serves all.

    Args:
        num_kv_heads: key heads that are fetched.
        head_bytes: bytes of the key buffer of one head, with its gradients.
        budget: bytes of a group.
    """
    counts = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
    fitting = [n for n in counts if num_kv_heads // n * head_bytes <= budget]
    return fitting[0] if fitting else counts[-1]


def name_algorithm(algorithm: str, groups: Groups) -> str:
    """Return the name of an algorithm, with Ulysses if there are Ulysses groups."""
    exchange = resolve_algorithm(algorithm)
    if groups.inside.size == 1:
        return exchange
    return "ulysses" if groups.attend.size == 1 else f"ulysses x {exchange}"


# --- plans ---


def _blockwise_call(spec: CallSpec, kernel: Kernel) -> BlockwiseCall:
    choice, shard = choose_head_groups(spec), spec.query_shard
    # Once for bounds that later batches share.
    build = _shared_plan if spec.bounds.is_shared else build_plan
    plan = build(
        choice.algorithm,
        layout=shard.layout,
        bounds=spec.bounds,
        rank=shard.rank,
        num_kv_heads=spec.num_kv_heads,
        num_groups=choice.num_groups_forward,
        num_backward_groups=choice.num_groups_backward,
    )
    wire, scores = spec.config.attention.gradient_wire, spec.request.scores
    kernel = kernel.for_step()
    return BlockwiseCall(plan, spec.transport, kernel, scores, spec.uid, wire, spec.may_keep)


_shared_plan = lru_cache(maxsize=16)(build_plan)


def _flex_call(spec: CallSpec) -> FlexCall:
    request, problem, attention = spec.request, spec.problem, spec.config.attention
    layout = spec.query_shard.layout
    plain = needs_plain_torch(request.device, request.dtype, attention.kernel, layout.local_len)
    # Equal on all ranks: messages of head groups must pair up.
    buffer_len = longest_key_buffer(layout, spec.bounds, plain=plain)
    # Of keys and values, and of their gradients.
    itemsize = problem.itemsize + accumulation_dtype(request.dtype).itemsize
    token_bytes = problem.batch_size * (problem.head_dim + problem.value_dim) * itemsize
    return build_flex_call(
        spec.bounds,
        request.scores,
        spec.query_shard,
        spec.transport,
        batch=problem.batch_size,
        device=request.device,
        num_kv_heads=spec.num_kv_heads,
        num_groups=count_flex_groups(
            spec.num_kv_heads, token_bytes * buffer_len, spec.memory_budget
        ),
        # In plain torch, entries that are not needed would be computed with.
        buffer_len=None if plain else buffer_len,
        plain=plain,
        uid=spec.uid,
        gradient_wire=attention.gradient_wire,
        may_keep=spec.may_keep,
    )


def _log_choice(step: Step, call: BlockwiseCall | FlexCall) -> None:
    algorithm, kernel = "gather", "flex"
    if isinstance(call, BlockwiseCall):
        algorithm, kernel = call.plan.algorithm, call.kernel.name
    values = step.cp_size, name_algorithm(algorithm, step.groups), step.layout.name, kernel
    _log_once(logging.INFO, "attention: cp_size=%d algorithm=%s layout=%s kernel=%s", *values)


@lru_cache(maxsize=64)
def _log_once(level: int, text: str, *values: object) -> None:
    _logger.log(level, text, *values)
