# SPDX-License-Identifier: Apache-2.0
"""Attention by functions of (batch, head, query, key): FlexAttention, or the same in plain torch.

`attend_compiled` calls torch's fused kernel. `attend_plain` evaluates the same functions on tiles
of queries, on any device and in any precision, with gradients; torch's has none on a CPU. Queries
and keys are indices of the tensors here: `flex/mods.py` and `flex/block_mask.py` map positions.

Shapes: B batch, H query heads, K key/value heads, L queries, S keys, D and Dv head dims.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_cp.attn.accumulators import NEVER, with_sinks
from lightning_cp.attn.call import split_query_heads
from lightning_cp.private.compiler import exact_backend
from lightning_cp.private.functions import copy_function
from lightning_cp.private.modes import without_modes
from lightning_cp.step.precision import accumulation_dtype

_logger = logging.getLogger(__name__)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) to whether the query sees the key."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query, key) to another score."""

# A copy: inside a step, calls of torch's own function are routed to us.
flex_attention_of_torch = copy_function(torch_flex.flex_attention)

# Scores that are materialized at once, over all samples and heads: 16 MB in float32, in about five
# tensors.
TILE_SCORES = 2**22

MIN_QUERIES = 128
"""For fewer, torch uses its decoding kernel, which did not compile on an H200."""

MIN_HEAD_DIM = 16
"""torch does not compile smaller ones."""

# Where FlexAttention has no backward.
FORWARD_ONLY = ("cpu", "mps")

BACKEND = "inductor"
"""What torch.compile makes of FlexAttention."""


@dataclass(frozen=True, eq=False)
class FlexFunctions:
    """mask_mod and score_mod, and how to build their block mask.

    Args:
        mask_mod: which keys a query sees; None for all.
        score_mod: changes a score; None to leave it.
        build_block_mask: builds the block mask of ``mask_mod``, which only fused kernels need.
        kind: identifies the code of the functions; each kind is compiled separately.
    """

    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    build_block_mask: Callable[[], BlockMask] | None = None
    kind: object = None


class FlexOutput(NamedTuple):
    """The result: out [B, H, L, Dv] and, per query, lse and largest score [B, H, L].

    A query that sees nothing has out 0 and lse -inf.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


_LOW_MEMORY: Final = {"num_stages": 1}
_options: dict[object, dict[str, int]] = {}
"""Options of kernels whose default tiles did not fit into the chip's shared memory."""


def attend_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    functions: FlexFunctions,
    *,
    scale: float | None,
    aux: AuxRequest,
    sinks: Tensor | None = None,
    kernel_options: Any = None,
) -> FlexOutput:
    """Call torch's FlexAttention, compiled.

    Args:
        q: [B, H, L, D].
        k: [B, K, S, D].
        v: [B, K, S, Dv].
        functions: mask_mod and score_mod.
        scale: factor on q.k; torch's default when None.
        aux: what is returned in addition to out; nothing with sinks.
        sinks: [H] or None, a logit per head that takes its share of each softmax.
        kernel_options: of torch's kernel.
    """
    tensors = [q, k, v]
    if sinks is not None:
        tensors, aux = [*tensors, sinks], AuxRequest(lse=True)
    attend = compiled_flex_attention(functions.kind, *tensors)

    def call(kernel_options: Any) -> FlexOutput:
        output = attend(
            *tensors,
            score_mod=functions.score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=True,
            kernel_options=kernel_options,
            return_aux=aux,
        )
        if sinks is not None:
            return FlexOutput(output, None, None)
        out, numbers = output
        return FlexOutput(out, numbers.lse, numbers.max_scores)

    with without_modes():
        build = functions.build_block_mask
        block_mask = None if build is None else build()
        if kernel_options is not None:
            return call(kernel_options)
        key = (functions.kind, q.dtype, q.shape[-1], v.shape[-1])
        try:
            return call(_options.get(key))
        except RuntimeError as error:
            if "out of resource" not in str(error) or key in _options:
                raise
        # Captured tensors need shared memory in addition to the tiles that torch has chosen.
        _options[key] = _LOW_MEMORY
        return call(_LOW_MEMORY)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Any:
    # In one graph: the gradient of sinks is computed in a pass that the kernel needs anyway. lse
    # stays inside, because a returned tensor would get a gradient, even if of zeros.
    out, aux = flex_attention_of_torch(q, k, v, **options)
    return with_sinks(out, aux.lse, sinks)


def build_block_mask(
    mask_mod: MaskMod,
    *,
    batch: int,
    heads: int,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    device: torch.device,
    kind: object = None,
) -> BlockMask:
    """Evaluate a mask_mod for every pair, and return which blocks are empty, partial and full.

    Compiled, because otherwise all pairs are materialized.
    """
    # Not as inference tensors: masks are cached, and training may follow evaluation.
    with without_modes(), torch.inference_mode(False), torch.no_grad():
        compiled = _compiled(torch_flex.create_block_mask, (kind, lengths), BACKEND)
        block_mask: BlockMask = compiled(
            mask_mod, batch, heads, *lengths, device=device, BLOCK_SIZE=block_size
        )
    return block_mask


def compiled_flex_attention(kind: object, *tensors: Tensor) -> Callable[..., Any]:
    """Return torch's FlexAttention, compiled for functions of a kind and for such tensors.

    Args:
        kind: identifies the code of the functions.
        tensors: q, k, v, and optionally sinks: then it returns out only.
    """
    fn = flex_attention_of_torch if len(tensors) == 3 else _with_sinks
    # Separate copies for everything that torch recompiles for: it gives up after 8 compilations.
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = ((x.shape, x.dtype, x.requires_grad, type(x)) for x in tensors)
    return _compiled(fn, (kind, *modes, *kinds), BACKEND)


# More than the lengths, modes and masks of a training.
@lru_cache(maxsize=1024)
def _compiled(fn: Callable[..., Any], kind: object, backend: Any) -> Callable[..., Any]:
    # fullgraph: uncompiled, all scores would be materialized without a warning. Static shapes: with
    # dynamic lengths torch 2.11 failed to trace. Callers round lengths up to a few instead.
    return torch.compile(
        copy_function(fn), backend=exact_backend(backend), fullgraph=True, dynamic=False
    )


def needs_plain_torch(
    device: torch.device, dtype: torch.dtype, kernel: str, num_queries: int
) -> bool:
    """Return whether functions are evaluated in plain torch inside a step; logged once.

    Args:
        device: of the tensors.
        dtype: of the tensors.
        kernel: the option of the step.
        num_queries: queries per sample.
    """
    if device.type in FORWARD_ONLY:
        log_plain_torch(device.type)
        return True
    return kernel == "reference" or dtype == torch.float64 or num_queries < MIN_QUERIES


@lru_cache(maxsize=4)
def log_plain_torch(device: str) -> None:
    """Log once that functions are evaluated in plain torch."""
    _logger.info(
        "FlexAttention has no backward on device=%s: mask_mod and score_mod are evaluated in plain "
        "torch (exact, but slow)",
        device,
    )


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    functions: FlexFunctions,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> FlexOutput:
    """Compute FlexAttention in plain torch, some queries at a time.

    Scores are computed in float32, in float64 for float64, and recomputed in backward. Captured
    tensors of the functions get gradients.
    """
    dtype = accumulation_dtype(q.dtype)
    # Once, before the tiles: their gradients are then summed in this precision.
    keys, values = k.to(dtype), v.to(dtype)
    length = q.shape[2]
    size = max(1, TILE_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    parts = [
        _recomputed(_tile, q[:, :, start : start + size], keys, values, start, functions, scale)
        for start in range(0, length, size)
    ]
    out, lse, largest = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return FlexOutput(out.to(q.dtype), lse, largest.detach())


def _recomputed(fn: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args)
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, start: int, functions: FlexFunctions, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and largest score of the queries from ``start`` on, with all keys."""
    with without_modes(), torch.autocast(q.device.type, enabled=False), _TensorIndices():
        q = split_query_heads(q.to(k.dtype), k)
        scores = (q @ k.unsqueeze(2).mT).flatten(1, 2) * scale
        batch, heads, length, num_keys = scores.shape
        sizes = (0, batch), (0, heads), (start, start + length), (0, num_keys)
        indices = [torch.arange(*size, device=q.device) for size in sizes]
        visible = None
        if functions.mask_mod is not None:
            visible = _broadcast(functions.mask_mod)(*indices)
            # A score_mod may turn a hidden score into infinity, and 0 times that is NaN.
            scores = torch.where(visible, scores, 0.0)
        if functions.score_mod is not None:
            scores = _broadcast(functions.score_mod, 0)(scores, *indices).to(k.dtype)
        if visible is not None:
            scores = torch.where(visible, scores, NEVER)
        blind = (scores == NEVER).all(-1, keepdim=True)
        scores = scores.masked_fill(blind, 0.0)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(blind, 0.0)
        out = (split_query_heads(weights, k) @ v.unsqueeze(2)).flatten(1, 2)
        blind = blind.squeeze(-1)
        largest = scores.detach().amax(-1).masked_fill(blind, NEVER)
        return out, lse.masked_fill(blind, NEVER), largest


def _broadcast(fn: Callable[..., Tensor], *score_dim: int) -> Callable[..., Tensor]:
    """Return a function of four indices as one of all samples, heads, queries and keys."""
    for dim in (3, 2, 1, 0):
        fn = torch.vmap(fn, (*score_dim, *(0 if n == dim else None for n in range(4))))
    return fn


class _TensorIndices(TorchFunctionMode):
    """Makes ``table[h, q]`` work under vmap, where torch would convert the indices to numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            plain = all(type(i) is int or isinstance(i, Tensor) for i in index)
            if plain and any(isinstance(i, Tensor) for i in index):
                tensors = [
                    i if isinstance(i, Tensor) else torch.tensor(i, device=x.device) for i in index
                ]
                return torch.ops.aten.index.Tensor(x, tensors)
        return func(*args, **(kwargs or {}))
