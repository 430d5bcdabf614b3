# SPDX-License-Identifier: Apache-2.0
"""FlexAttention over full sequences: mask_mod and score_mod see global positions, in any layout.

A function cannot be planned with, so the keys of full sequences are gathered, in their order
(`remote_kv.py`). `mods.py` maps the functions to this rank's queries, `kernel.py` evaluates them.
`attention()` by FlexAttention, whose mask can be planned with, is `from_mask.py`.

Shapes: B batch, H query heads, K key/value heads, L local tokens, S tokens of the sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from lightning_cp.attn.call import check_qkv
from lightning_cp.attn.flex.block_mask import kind_of
from lightning_cp.attn.flex.kernel import (
    FORWARD_ONLY,
    FlexFunctions,
    FlexOutput,
    ScoreMod,
    attend_compiled,
    attend_plain,
    compiled_flex_attention,
    flex_attention_of_torch,
    log_plain_torch,
    needs_plain_torch,
)
from lightning_cp.attn.flex.mods import (
    SequenceMask,
    build_functions,
    check_reach,
    sequence_mask_of,
)
from lightning_cp.attn.flex.remote_kv import KVRoute, gather_kv
from lightning_cp.attn.plan import QueryShard
from lightning_cp.attn.ulysses import (
    Swap,
    place_of,
    to_heads,
    to_tokens,
)
from lightning_cp.data.shard import pad_end
from lightning_cp.geometry.layout import build_layout
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.private.modes import without_modes
from lightning_cp.step.active_step import num_exempt
from lightning_cp.step.guards import check_lengths, check_recomputable, step_of_call
from lightning_cp.step.precision import accumulation_dtype, as_autocast
from lightning_cp.step.step import Step, per_step

_LSE = AuxRequest(lse=True)


def flex_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    functions: FlexFunctions,
    route: KVRoute,
    *,
    scale: float | None = None,
    plain: bool = True,
    aux: AuxRequest = _LSE,
    kernel_options: Any = None,
) -> FlexOutput:
    """Attend with this rank's queries to the keys of full sequences.

    Args:
        q: [B, H, L, D].
        k: [B, K, L, D].
        v: [B, K, L, Dv].
        functions: mask_mod and score_mod of this rank's queries.
        route: the ranks that share the sequence; each makes the same call.
        scale: factor on q.k; 1 / sqrt(D) when None.
        plain: in plain torch instead of a fused kernel.
        aux: what is returned in addition to out.
        kernel_options: of the fused kernel.
    """
    k, v = gather_kv(k, v, route)
    if plain:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attend_plain(q, k, v, functions, scale=scale)
    return attend_compiled(q, k, v, functions, scale=scale, aux=aux, kernel_options=kernel_options)


@outside_graphs
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | SequenceMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Compute torch's ``flex_attention`` over full sequences with this rank's shard of them.

    Inside a step, calls of torch's function are routed here, too. ``mask_mod`` and ``score_mod``
    see global positions, in any layout, and indices of heads and samples unchanged; tensors that
    they capture (document ids) are those of full sequences. Outside a step it is torch's function,
    compiled on a GPU. On a CPU, where torch's has no backward, the same functions are evaluated in
    plain torch.

    Args:
        query: [B, H, L, D], where L is the number of tokens on this rank.
        key: [B, K, L, D].
        value: [B, K, L, Dv].
        score_mod: (score, batch, head, query, key) to another score. Captured tensors get their
            gradient from this rank's queries: averaged over ranks, as all gradients are, it is
            exact.
        block_mask: of full sequences, or from ``cp.block_mask(mask_mod)``.
        scale: factor on q.k; 1 / sqrt(D) when None.
        enable_gqa: whether K may be less than H.
        return_lse: whether lse, the log of the softmax's sum, is returned, too.
        kernel_options: for torch's fused kernels.
        return_aux: what is returned in addition to out.

    Returns:
        out [B, H, L, Dv]; with ``return_lse`` out and lse, with ``return_aux`` out and AuxOutput.

    Example:
        >>> q = torch.randn(1, 2, 10, 8, requires_grad=True)
        >>> flex_attention(q, q, q, lambda score, b, h, i, j: score - (i - j).abs()).shape
        torch.Size([1, 2, 10, 8])
    """
    if return_lse and return_aux is not None:
        raise ValueError("flex_attention() got return_lse and return_aux. Pass one of them.")
    aux = return_aux or AuxRequest(lse=return_lse)
    arguments = FlexArguments(score_mod, block_mask, scale, aux, kernel_options)
    q, k, v = as_autocast(query, key, value)
    check_qkv("flex_attention", q, k, v)
    _check_heads(q, k, enable_gqa=enable_gqa)
    step = step_of_call() if num_exempt() == 0 else None
    with without_modes():
        if step is None:
            output = _attend_unsharded(q, k, v, arguments)
        else:
            check_recomputable("flex_attention", step)
            check_lengths("flex_attention", query, key, step)
            output = attend_in_step(step, q, k, v, arguments)
    if return_aux is not None:
        lse = output.lse if aux.lse else None
        return output.out, AuxOutput(lse, output.max_scores if aux.max_scores else None)
    return (output.out, output.lse) if return_lse else output.out


class FlexArguments(NamedTuple):
    """Arguments of a call that are not tensors; names as in `flex_attention`."""

    score_mod: ScoreMod | None
    block_mask: BlockMask | SequenceMask | None
    scale: float | None
    aux: AuxRequest
    kernel_options: Any


def attend_in_step(
    step: Step, q: Tensor, k: Tensor, v: Tensor, arguments: FlexArguments
) -> FlexOutput:
    """Attend as `flex_attention` does inside a step, whatever step is active."""
    score_mod, block_mask, scale, aux, kernel_options = arguments
    attention, inside, tensor_len = step.config.attention, step.groups.inside, q.shape[2]
    mask, (swap, query_shard, _) = _sequence_mask(block_mask, q, step), place_of(step, q, k)
    batch, heads = q.shape[:2]
    if step.cp_size > 1:
        mask_mod = None if mask is None else mask.mask_mod
        local = QueryShard(step.layout, step.cp_rank)
        check_reach(mask_mod, score_mod, local, batch=batch, heads=heads)
    q, k, v = (pad_end(x, 2, step.layout.local_len - tensor_len) for x in (q, k, v))
    if swap is not None:
        q, k, v = to_heads(q, k, v, swap, inside)
    heads = q.shape[1]
    plain = needs_plain_torch(q.device, q.dtype, attention.kernel, q.shape[2])
    if heads == 0:  # more ranks than heads: nothing to compute, but collectives in backward
        empty = v[..., 0].to(accumulation_dtype(v.dtype))
        return _to_tokens(FlexOutput(v, empty, empty.detach()), step, swap, tensor_len, aux)
    functions = build_functions(
        mask, score_mod, query_shard, batch=batch, heads=heads, device=q.device, fused=not plain
    )
    transport, wire = step.groups.attend, attention.gradient_wire
    output = flex_attend(
        q,
        k,
        v,
        functions,
        KVRoute(query_shard.layout, transport, step.uid, wire),
        scale=scale,
        plain=plain,
        aux=aux,
        kernel_options=kernel_options,
    )
    return _to_tokens(output, step, swap, tensor_len, aux)


def _to_tokens(
    output: FlexOutput, step: Step, swap: Swap | None, tensor_len: int, aux: AuxRequest
) -> FlexOutput:
    """Return all heads of this rank's tokens, without padding that its tensors leave out."""

    def numbers(x: Tensor | None, is_requested: bool) -> Tensor | None:
        if x is None or not is_requested:  # equal on all ranks: what is not needed is not sent
            return None
        if swap is not None:
            x = to_tokens(x.unsqueeze(-1), swap, step.groups.inside).squeeze(-1)
        return x.narrow(2, 0, tensor_len)

    out = output.out if swap is None else to_tokens(output.out, swap, step.groups.inside)
    return FlexOutput(
        out.narrow(2, 0, tensor_len),
        numbers(output.lse, aux.lse),
        numbers(output.max_scores, aux.max_scores),
    )


def _sequence_mask(block_mask: Any, q: Tensor, step: Step) -> SequenceMask | None:
    """Return the mask of full sequences; that of a block mask is cached, for other layers."""
    if block_mask is None or isinstance(block_mask, SequenceMask):
        return block_mask
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"flex_attention(block_mask=...) got a {type(block_mask).__name__}. Pass a BlockMask "
            "of full sequences, or cp.block_mask(mask_mod)."
        )
    return _read_block_mask(step, block_mask, q.shape[0])


@per_step
def _read_block_mask(step: Step, block_mask: BlockMask, batch_size: int) -> SequenceMask:
    """Return the mask of full sequences that a block mask holds."""
    seq_len, batch = step.layout.seq_len, block_mask.kv_num_blocks.shape[0]
    if tuple(block_mask.seq_lengths) != (seq_len, seq_len):
        height, width = block_mask.seq_lengths
        raise ValueError(
            f"flex_attention() got a block mask of {height} x {width} tokens inside a step whose "
            f"sequences have {seq_len}, of which this rank holds {step.layout.local_len}. Its "
            "function must see global positions: build it for full sequences, before cp.step(...) "
            "shards the batch, or use cp.block_mask(mask_mod)."
        )
    if batch not in (1, batch_size):
        raise ValueError(
            f"flex_attention(): the block mask has {batch} samples, but the tensors have a batch "
            f"of {batch_size}. Build it for the same batch size, or for 1."
        )
    return sequence_mask_of(block_mask)


def _attend_unsharded(q: Tensor, k: Tensor, v: Tensor, arguments: FlexArguments) -> FlexOutput:
    """Attend outside a step: by torch's function, or in plain torch where it has no backward."""
    score_mod, block_mask, scale, aux, kernel_options = arguments
    needs_grad = torch.is_grad_enabled() or any(x.requires_grad for x in (q, k, v))
    on_cpu = q.device.type in FORWARD_ONLY
    if on_cpu and (needs_grad or isinstance(block_mask, SequenceMask)):
        log_plain_torch(q.device.type)
        mask = sequence_mask_of(block_mask) if isinstance(block_mask, BlockMask) else block_mask
        mask_mod = None if mask is None else mask.visible(q.device)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return attend_plain(q, k, v, FlexFunctions(mask_mod, score_mod), scale=scale)
    if isinstance(block_mask, SequenceMask):
        layout = build_layout("contiguous", seq_len=q.shape[2], cp_size=1)
        batch, heads = q.shape[:2]
        query_shard = QueryShard(layout, 0)
        block_mask = block_mask.block_mask(query_shard, batch=batch, heads=heads, device=q.device)
    kind = kind_of(None if block_mask is None else block_mask.mask_mod, score_mod)
    attend = flex_attention_of_torch if on_cpu else compiled_flex_attention(kind, q, k, v)
    out, numbers = attend(
        q,
        k,
        v,
        score_mod,
        block_mask,
        scale,
        True,
        kernel_options=kernel_options,
        return_aux=aux,
    )
    return FlexOutput(out, numbers.lse, numbers.max_scores)


def _check_heads(q: Tensor, k: Tensor, *, enable_gqa: bool) -> None:
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"flex_attention() got {q.shape[1]} query heads and {k.shape[1]} key heads: set "
            "enable_gqa=True to share them, evenly."
        )
