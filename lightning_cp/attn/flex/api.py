# SPDX-License-Identifier: Apache-2.0
"""FlexAttention over the whole row: mask_mod and score_mod see global positions, for any layout.

Nobody can plan with a function, so the keys of whole rows are gathered, in their order
(`gathered.py`). Which queries meet which function is `mods.py`'s business, how they are evaluated
that of `kernels/flex.py`. `attention()` by FlexAttention, with bounds to plan with, is `row.py`.

Shapes: B batch, H query heads, K key/value heads, L local tokens, S tokens of the row.
"""

import logging
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from lightning_cp.active_step import current, num_unsharded
from lightning_cp.attn.accumulators import accumulation_dtype
from lightning_cp.attn.flex.kernel import (
    MIN_QUERIES,
    Attended,
    Mods,
    ScoreMod,
    attend_compiled,
    attend_plain,
    compiled_flex_attention,
    flex_attention_of_torch,
)
from lightning_cp.attn.flex.mods import (
    Place,
    RowMask,
    build_mods,
    check_reach,
    kind_of,
    row_mask_of,
)
from lightning_cp.attn.flex.remote_kv import Way, whole_row
from lightning_cp.attn.ulysses import Swap, build_swap, to_heads, to_tokens
from lightning_cp.comm.transport import Transport
from lightning_cp.data.sharding import pad_end
from lightning_cp.geometry.layout import build_layout
from lightning_cp.guards import check_lengths, check_recomputable, check_recompute
from lightning_cp.options import GradientWire
from lightning_cp.precision import as_autocast
from lightning_cp.step import Step
from lightning_cp.torch_private import outside_graphs, without_modes

_logger = logging.getLogger(__name__)

# Where FlexAttention has no backward.
_FORWARD_ONLY = ("cpu", "mps")
_LSE = AuxRequest(lse=True)


def flex_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mods: Mods,
    place: Place,
    transport: Transport,
    *,
    scale: float | None = None,
    plain: bool = True,
    wants: AuxRequest = _LSE,
    kernel_options: Any = None,
    uid: int = 0,
    gradient_wire: GradientWire = "float32",
) -> Attended:
    """Attend with this rank's queries to the keys of the whole row.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D].
        v: [B, K, L, Dv].
        mods: what becomes of the scores of this rank's queries.
        place: which queries and heads they are.
        transport: the ranks that share the row; each makes the same call.
        scale: factor on q.k; 1 / sqrt(D) when None.
        plain: in plain torch instead of a fused kernel.
        wants: what is returned beside out.
        kernel_options: of the fused kernel.
        uid: the step that the call belongs to; 0 for none.
        gradient_wire: how precise gradients of keys are while they are added up.
    """
    k, v = whole_row(k, v, Way(place.layout, transport, uid, gradient_wire))
    if plain:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attend_plain(q, k, v, mods, scale=scale)
    return attend_compiled(q, k, v, mods, scale=scale, wants=wants, kernel_options=kernel_options)


@outside_graphs
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | RowMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Do what torch's ``flex_attention`` does, over the whole row with this rank's part of it.

    Inside a step, calls of torch's own arrive here, too. ``mask_mod`` and ``score_mod`` see
    positions of the whole row, for any layout, and heads and rows as they are; what they capture
    (document ids) is of whole rows. Outside a step it is torch's, compiled on a GPU. On a CPU,
    where torch's has no backward, the same functions are evaluated in plain torch.

    Args:
        query: [B, H, L, D], L being the tokens of this rank.
        key: [B, K, L, D].
        value: [B, K, L, Dv].
        score_mod: (score, batch, head, query, key) to another score. What it captured gets its
            gradient from this rank's queries: averaged over ranks, as all gradients are, it is
            exact.
        block_mask: of the whole row, or from ``cp.block_mask(mask_mod)``.
        scale: factor on q.k; 1 / sqrt(D) when None.
        enable_gqa: whether K may be less than H.
        return_lse: whether the log of the softmax's sum is returned, too.
        kernel_options: for torch's fused kernels.
        return_aux: what is returned beside out.

    Returns:
        out [B, H, L, Dv]; with ``return_lse`` out and lse, with ``return_aux`` out and AuxOutput.

    Example:
        >>> q = torch.randn(1, 2, 10, 8, requires_grad=True)
        >>> flex_attention(q, q, q, lambda score, b, h, i, j: score - (i - j).abs()).shape
        torch.Size([1, 2, 10, 8])
    """
    if return_lse and return_aux is not None:
        raise ValueError("flex_attention(): give return_lse or return_aux, not both.")
    wants = return_aux or AuxRequest(lse=return_lse)
    asked = _Asked(score_mod, block_mask, scale, wants, kernel_options)
    q, k, v = (as_autocast(x) for x in (query, key, value))
    _check_tensors(q, k, v, enable_gqa=enable_gqa)
    step = None
    if num_unsharded() == 0:
        step = current()
        check_recompute(step)
    with without_modes():
        if step is None:
            found = _attend_alone(q, k, v, asked)
        else:
            check_recomputable("flex_attention", step)
            check_lengths("flex_attention", query, key, step)
            found = _attend_in(step, q, k, v, asked)
    if return_aux is not None:
        lse, largest = found.lse, found.max_scores
        aux = AuxOutput(lse if wants.lse else None, largest if wants.max_scores else None)
        return found.out, aux
    return (found.out, found.lse) if return_lse else found.out


class _Asked(NamedTuple):
    """What a call asks for beside its tensors; names as in `flex_attention`."""

    score_mod: ScoreMod | None
    block_mask: BlockMask | RowMask | None
    scale: float | None
    wants: AuxRequest
    kernel_options: Any


def _attend_in(step: Step, q: Tensor, k: Tensor, v: Tensor, asked: _Asked) -> Attended:
    score_mod, block_mask, scale, wants, kernel_options = asked
    tensor_len, short = q.shape[2], step.layout.local_len - q.shape[2]
    mask, swap, inside = _row_mask(block_mask, q, step), swap_of(step, q, k), step.groups.inside
    batch, heads = q.shape[:2]
    mask_mod = None if mask is None else mask.mask_mod
    if step.cp_size > 1:
        whole = Place(step.layout, step.cp_rank)
        check_reach(mask_mod, score_mod, whole, batch=batch, heads=heads)
    q, k, v = (pad_end(x, 2, short) for x in (q, k, v))
    if swap is not None:
        q, k, v = to_heads(q, k, v, swap, inside)
    place, heads, plain = place_of(step, swap), q.shape[1], is_plain(q, step.kernel)
    if heads == 0:  # more ranks than heads: nothing to do, but a part in what all do in backward
        nothing = v[..., 0].to(accumulation_dtype(v.dtype))
        return _to_tokens(Attended(v, nothing, nothing.detach()), step, swap, tensor_len, wants)
    mods = build_mods(
        mask, score_mod, place, batch=batch, heads=heads, device=q.device, fused=not plain
    )
    found = flex_attend(
        q,
        k,
        v,
        mods,
        place,
        step.groups.attend,
        scale=scale,
        plain=plain,
        wants=wants,
        kernel_options=kernel_options,
        uid=step.uid,
        gradient_wire=step.gradient_wire,
    )
    return _to_tokens(found, step, swap, tensor_len, wants)


def swap_of(step: Step, q: Tensor, k: Tensor) -> Swap | None:
    """Return how this rank's neighbours swap tokens for heads; None if they do not."""
    size = step.groups.inside.size
    if size == 1:
        return None
    return build_swap(
        step.layout,
        rank=step.cp_rank,
        size=size,
        num_heads=q.shape[1],
        num_key_heads=k.shape[1],
    )


def place_of(step: Step, swap: Swap | None) -> Place:
    """Return where the queries and heads stand that this rank computes."""
    if swap is None:
        return Place(step.layout, step.cp_rank)
    first = swap.query_heads[step.groups.inside.rank].start
    return Place(swap.layout, swap.rank, first)


def _to_tokens(
    found: Attended, step: Step, swap: Swap | None, tensor_len: int, wants: AuxRequest
) -> Attended:
    """Return all heads of this rank's tokens, without padding that its tensors do not show."""

    def numbers(x: Tensor | None, wanted: bool) -> Tensor | None:
        if x is None or not wanted:  # all ranks alike: what is not wanted does not travel
            return None
        if swap is not None:
            x = to_tokens(x.unsqueeze(-1), swap, step.groups.inside).squeeze(-1)
        return x.narrow(2, 0, tensor_len)

    out = found.out if swap is None else to_tokens(found.out, swap, step.groups.inside)
    return Attended(
        out.narrow(2, 0, tensor_len),
        numbers(found.lse, wants.lse),
        numbers(found.max_scores, wants.max_scores),
    )


def _row_mask(block_mask: Any, q: Tensor, step: Step) -> RowMask | None:
    """Return a mask of the whole row; that of a block mask is kept, for other layers."""
    if block_mask is None or isinstance(block_mask, RowMask):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"flex_attention(block_mask=...) got a {type(block_mask).__name__}. Give a BlockMask "
            "of the whole row, or cp.block_mask(mask_mod)."
        )
    key = ("block mask", id(block_mask))
    if key not in step.cache:
        seq_len, batch = step.layout.seq_len, block_mask.kv_num_blocks.shape[0]
        if tuple(block_mask.seq_lengths) != (seq_len, seq_len):
            height, width = block_mask.seq_lengths
            raise ValueError(
                f"flex_attention() got a block mask of {height} x {width} tokens inside a step "
                f"whose rows have {seq_len}, of which this rank holds {step.layout.local_len}. "
                "Its function must see positions of the whole row: make it for whole rows, "
                "before cp.step(...) cuts the batch, or take cp.block_mask(mask_mod)."
            )
        if batch not in (1, q.shape[0]):
            raise ValueError(
                f"flex_attention(): the block mask has {batch} rows, but the tensors have a batch "
                f"of {q.shape[0]}."
            )
        # It holds the block mask: the key is its id, which must not be reused.
        step.cache[key] = row_mask_of(block_mask)
    found: RowMask = step.cache[key]
    return found


def _attend_alone(q: Tensor, k: Tensor, v: Tensor, asked: _Asked) -> Attended:
    """Attend to the keys that are given: by torch's, or in plain torch where that has no way."""
    score_mod, block_mask, scale, wants, kernel_options = asked
    needs_grad = torch.is_grad_enabled() or any(x.requires_grad for x in (q, k, v))
    on_cpu = q.device.type in _FORWARD_ONLY
    if on_cpu and (needs_grad or isinstance(block_mask, RowMask)):
        _say_plain(q.device.type)
        mask = row_mask_of(block_mask) if isinstance(block_mask, BlockMask) else block_mask
        mask_mod = None if mask is None else mask.visible(q.device)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attend_plain(q, k, v, Mods(mask_mod, score_mod), scale=scale)
    if isinstance(block_mask, RowMask):
        layout = build_layout("contiguous", seq_len=q.shape[2], cp_size=1)
        batch, heads = q.shape[:2]
        block_mask = block_mask.table(Place(layout, 0), batch=batch, heads=heads, device=q.device)
    kind = kind_of(None if block_mask is None else block_mask.mask_mod, score_mod)
    attend = flex_attention_of_torch if on_cpu else compiled_flex_attention(kind, q, k, v)
    out, aux = attend(
        q,
        k,
        v,
        score_mod,
        block_mask,
        scale,
        True,
        kernel_options=kernel_options,
        return_aux=wants,
    )
    return Attended(out, aux.lse, aux.max_scores)


def is_plain(q: Tensor, kernel: str, num_queries: int | None = None) -> bool:
    """Say whether functions are evaluated in plain torch inside a step, and log it once.

    Args:
        q: the queries.
        kernel: the step's.
        num_queries: how many there are per row, if not those of ``q``.
    """
    if q.device.type in _FORWARD_ONLY:
        _say_plain(q.device.type)
        return True
    num_queries = q.shape[2] if num_queries is None else num_queries
    return kernel == "reference" or q.dtype == torch.float64 or num_queries < MIN_QUERIES


@lru_cache(maxsize=4)
def _say_plain(device: str) -> None:
    _logger.info(
        "FlexAttention has no backward on %s: its functions are evaluated in plain torch, exactly "
        "and slowly",
        device,
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> None:
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"flex_attention() needs [batch, heads, tokens, head_dim]; it got {shapes}."
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"flex_attention(): the tensors do not fit together: {shapes}. Batch must agree, key "
            "and value must have the same heads and tokens, query and key the same head dim."
        )
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"flex_attention() got {q.shape[1]} query heads and {k.shape[1]} key heads: set "
            "enable_gqa=True to share them, evenly."
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(
            f"flex_attention(): query, key and value must have one floating dtype, but are "
            f"{q.dtype}, {k.dtype}, {v.dtype}."
        )
