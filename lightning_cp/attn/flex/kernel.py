# SPDX-License-Identifier: Apache-2.0
"""Attention by functions of (batch, head, query, key): FlexAttention, or the same in plain torch.

`attend_compiled` is torch's own, fused. `attend_plain` calls the same functions on tiles of
queries, wherever torch runs and in any precision, with gradients; torch's has none on a CPU.
Queries and keys are counted as they lie here: global positions are `engine/flex.py`'s business.

Shapes: B batch, H query heads, K key/value heads, L queries, S keys, D and Dv head dims.
"""

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

from lightning_cp.attn.accumulators import NEVER, accumulation_dtype, with_sinks
from lightning_cp.torch_private import copy_function, exact_backend, without_modes

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) to whether the query sees the key."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query, key) to another score."""

# A copy: inside a step, whoever calls torch's is sent to us.
flex_attention_of_torch = copy_function(torch_flex.flex_attention)

# Scores that are written out at once, over all rows and heads: 16 MB in float32, some five times.
TILE_SCORES = 2**22

MIN_QUERIES = 128
"""For fewer, torch takes its kernel for decoding, which did not compile on an H200."""

MIN_HEAD_DIM = 16
"""torch refuses to compile smaller ones."""

_backend = "inductor"


@dataclass(frozen=True, eq=False)
class Mods:
    """What becomes of a score.

    Args:
        mask_mod: which keys a query sees; None for all.
        score_mod: what is made of a score; None to leave it.
        build_table: makes the block mask of ``mask_mod``, which only fused kernels need.
        kind: what tells these functions from others; each kind is compiled by itself.
    """

    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    build_table: Callable[[], BlockMask] | None = None
    kind: object = None


class Attended(NamedTuple):
    """What attention gives: out [B, H, L, Dv] and, per query, lse and largest score [B, H, L].

    A query that sees nothing has out 0 and lse -inf.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


_MODEST: Final = {"num_stages": 1}
_options: dict[object, dict[str, int]] = {}
"""How kernels are compiled whose own choice did not fit into the chip's memory."""


def attend_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mods: Mods,
    *,
    scale: float | None,
    wants: AuxRequest,
    sinks: Tensor | None = None,
    kernel_options: Any = None,
) -> Attended:
    """Call torch's FlexAttention, compiled.

    Args:
        q: [B, H, L, D].
        k: [B, K, S, D].
        v: [B, K, S, Dv].
        mods: what becomes of a score.
        scale: factor on q.k; torch's default when None.
        wants: what is returned beside out; nothing where there are sinks.
        sinks: [H] or None, a logit per head that takes its share of each softmax.
        kernel_options: torch's.
    """
    given = [q, k, v]
    if sinks is not None:
        given, wants = [*given, sinks], AuxRequest(lse=True)
    attend = compiled_flex_attention(mods.kind, *given)

    def call(kernel_options: Any) -> Attended:
        found = attend(
            *given,
            score_mod=mods.score_mod,
            block_mask=table,
            scale=scale,
            enable_gqa=True,
            kernel_options=kernel_options,
            return_aux=wants,
        )
        if sinks is not None:
            return Attended(found, None, None)
        out, aux = found
        return Attended(out, aux.lse, aux.max_scores)

    with without_modes():
        table = None if mods.build_table is None else mods.build_table()
        if kernel_options is not None:
            return call(kernel_options)
        key = (mods.kind, q.dtype, q.shape[-1], v.shape[-1])
        try:
            return call(_options.get(key))
        except RuntimeError as error:
            if "out of resource" not in str(error) or key in _options:
                raise
        # What functions capture takes memory of the chip beside the tiles that torch has chosen.
        _options[key] = _MODEST
        return call(_MODEST)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Any:
    # In one graph: what sinks do to gradients is done by the pass that the kernel needs anyway. lse
    # stays inside, for what is returned gets a gradient, if of zeros.
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
    """Ask a mask_mod about every pair, and keep which blocks are empty and which are full.

    Compiled, for otherwise all pairs are written out.
    """
    # Not as inference tensors: masks are kept, and training may follow evaluation.
    with without_modes(), torch.inference_mode(False), torch.no_grad():
        compiled = _compiled(torch_flex.create_block_mask, (kind, lengths), _backend)
        found: BlockMask = compiled(
            mask_mod, batch, heads, *lengths, device=device, BLOCK_SIZE=block_size
        )
    return found


def compiled_flex_attention(kind: object, *tensors: Tensor) -> Callable[..., Any]:
    """Return torch's FlexAttention, compiled for functions of a kind and for such tensors.

    Args:
        kind: what tells the functions from others.
        tensors: q, k, v, and sinks if there are some: then out is all that it returns.
    """
    fn = flex_attention_of_torch if len(tensors) == 3 else _with_sinks
    # By all that torch tells calls apart by: it gives up on code that it has compiled 8 times.
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = ((x.shape, x.dtype, x.requires_grad, type(x)) for x in tensors)
    return _compiled(fn, (kind, *modes, *kinds), _backend)


@lru_cache(maxsize=128)
def _compiled(fn: Callable[..., Any], kind: object, backend: Any) -> Callable[..., Any]:
    # Whole or not at all: uncompiled, all scores would be written out, and nothing said. For these
    # shapes alone: with lengths left open torch 2.11 failed to trace.
    return torch.compile(
        copy_function(fn), backend=exact_backend(backend), fullgraph=True, dynamic=False
    )


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, mods: Mods, *, scale: float, sinks: Tensor | None = None
) -> Attended:
    """Do what FlexAttention does in plain torch, some queries at a time.

    Scores are made in float32, in float64 for float64, and made again in backward. Gradients reach
    whatever the functions captured.
    """
    dtype = accumulation_dtype(q.dtype)
    # Once, before the tiles: so the sum of their gradients is kept in this precision.
    keys, values = k.to(dtype), v.to(dtype)
    length = q.shape[2]
    size = max(1, TILE_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    parts = [
        _recomputed(_tile, q[:, :, start : start + size], keys, values, start, mods, scale)
        for start in range(0, length, size)
    ]
    out, lse, largest = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return Attended(out.to(q.dtype), lse, largest.detach())


def _recomputed(fn: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args)
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, start: int, mods: Mods, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and largest score of the queries from ``start`` on, with all keys."""
    with without_modes(), torch.autocast(q.device.type, enabled=False), _TensorIndices():
        q = _grouped(q.to(k.dtype), k)
        scores = (q @ k.unsqueeze(2).mT).flatten(1, 2) * scale
        batch, heads, length, num_keys = scores.shape
        sizes = (0, batch), (0, heads), (start, start + length), (0, num_keys)
        where = [torch.arange(*size, device=q.device) for size in sizes]
        visible = None
        if mods.mask_mod is not None:
            visible = _over_all(mods.mask_mod)(*where)
            # What a score_mod makes of a hidden score may be infinite, and 0 times that is NaN.
            scores = torch.where(visible, scores, 0.0)
        if mods.score_mod is not None:
            scores = _over_all(mods.score_mod, 0)(scores, *where).to(k.dtype)
        if visible is not None:
            scores = torch.where(visible, scores, NEVER)
        blind = (scores == NEVER).all(-1, keepdim=True)
        scores = scores.masked_fill(blind, 0.0)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(blind, 0.0)
        out = (_grouped(weights, k) @ v.unsqueeze(2)).flatten(1, 2)
        blind = blind.squeeze(-1)
        largest = scores.detach().amax(-1).masked_fill(blind, NEVER)
        return out, lse.masked_fill(blind, NEVER), largest


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return [B, K, H / K, L, ...]: the query heads beside the key head that they share."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _over_all(fn: Callable[..., Tensor], *score_dim: int) -> Callable[..., Tensor]:
    """Let a function of four numbers take all rows, heads, queries and keys at once."""
    for dim in (3, 2, 1, 0):
        fn = torch.vmap(fn, (*score_dim, *(0 if n == dim else None for n in range(4))))
    return fn


class _TensorIndices(TorchFunctionMode):
    """Lets functions under vmap write ``table[h, q]``: torch would ask the indices for numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            x, at = args
            at = at if isinstance(at, tuple) else (at,)
            plain = all(type(i) is int or isinstance(i, Tensor) for i in at)
            if plain and any(isinstance(i, Tensor) for i in at):
                where = [
                    i if isinstance(i, Tensor) else torch.tensor(i, device=x.device) for i in at
                ]
                return torch.ops.aten.index.Tensor(x, where)
        return func(*args, **(kwargs or {}))
