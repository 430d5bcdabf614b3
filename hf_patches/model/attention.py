# SPDX-License-Identifier: Apache-2.0
"""The attention function that we register with transformers: attends over the full sequence.

Shapes: B batch, H query heads, K key/value heads, L local length, S sequence length, D head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_patches.interface.input_checks import check_dense_mask, check_no_weights, not_enabled
from hf_patches.interface.names import ENABLED, NAMES, find_in_modules, step_of, stock_name
from hf_patches.interface.positions import scales_queries, temperature
from hf_patches.model.mask_reader import mask_of_step
from lightning_cp.attn import api
from lightning_cp.attn.accumulators import NEVER
from lightning_cp.attn.operator import attend_in_graph, can_trace
from lightning_cp.geometry.mask import Mask
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.private.modes import plain_functions
from lightning_cp.step.precision import as_autocast
from lightning_cp.step.step import Step, StepMask, StepReference

# Arguments of layers that do not change which keys a query sees, or repeat what the mask holds.
_HARMLESS: Final = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "document_ids",
    "encoder_hidden_states",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "token_type_ids",
    "use_cache",
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the full sequence with this rank's queries; outside of a step, as the stock model.

    Args:
        module: the attention layer.
        query: [B, H, L, D].
        key: [B, K, L, D].
        value: [B, K, L, Dv].
        attention_mask: what our mask function returned, a dense mask [B, H or 1, L, S], or None.
        scaling: factor on the scores.
        dropout: must be 0; any other value raises.
        softcap: softcap of the scores.
        s_aux: [H], the logits of attention sinks.
        others: other arguments of the layer; those that could change the result raise.

    Returns:
        [B, L, H, Dv], and None for the attention weights, which no rank holds.
    """
    if torch.compiler.is_dynamo_compiling() and _can_trace(
        attention_mask, module, query, value, scaling, softcap, dropout
    ):
        _check(module, query, key, others)
        out = attend_in_graph(
            query, key, value, attention_mask, scale=scaling, softcap=softcap, sinks=s_aux
        )
        return out, None
    step = step_of(attention_mask)
    if step is None:
        extra = {"softcap": softcap, "s_aux": s_aux}
        return _stock(module)(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            **{name: value for name, value in extra.items() if value is not None},
            **others,
        )
    with_options = partial(api.attend, scale=scaling, softcap=softcap, sinks=s_aux, dropout=dropout)
    return _attend_in_step(
        step, with_options, module, query, key, value, attention_mask, others
    ), None


@outside_graphs  # the compiler breaks the graph around attention() anyway
def _attend_in_step(
    step: Step,
    with_options: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    others: dict[str, Any],
) -> Tensor:
    """Attend to the full sequence inside a step, with `attention` and its options; see `attend`."""
    _check(module, query, key, others)
    _check_length(module, query, key, step)
    query = temperature(module, query, step)
    with plain_functions():  # nothing below is routed
        mask, bias = _mask(module, attention_mask, step)
        query, key, value = as_autocast(query, key, value)
        out = with_options(query, key, value, mask=mask, bias=bias)
        return out.transpose(1, 2).contiguous()


def _stock(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    eager = find_in_modules(type(module), "eager_attention_forward")
    name = stock_name(module.config)  # type: ignore[arg-type]
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def _can_trace(
    mask: object,
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    dropout: float,
) -> TypeGuard[StepMask]:
    """Return whether attention becomes an operator of the graph that the compiler traces."""
    return (
        not dropout
        and not scales_queries(module)
        and can_trace(mask, query, value, scaling, softcap)
    )


def _check(module: nn.Module, query: Tensor, key: Tensor, others: dict[str, Any]) -> None:
    if ENABLED not in module.__dict__:  # its config is that of another model, which is
        config: Any = module.config
        raise not_enabled(config.model_type)
    unknown = [
        name
        for name, x in others.items()
        if x is not None and name not in _HARMLESS and (isinstance(x, Tensor) or name in _SPARSE)
    ]
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(
            f"{type(module).__name__} got {names}, which may change what a token sees "
            "and are not supported: ignoring them could train another model. If the model ignores "
            "them, do not pass them; else run it on full sequences: `with cp.paused():`."
        )
    check_no_weights(others)


def _check_length(module: nn.Module, query: Tensor, key: Tensor, step: Step) -> None:
    if query.shape[2] != key.shape[2] or query.shape[2] != step.tensor_len:
        raise ValueError(
            f"{type(module).__name__} attends with {query.shape[2]} queries to {key.shape[2]} keys "
            f"inside a step whose ranks hold {step.tensor_len} tokens per sequence each. Pass what "
            "cp.step(...) yields, without past_key_values; run generate(), images and "
            "cross-attention under `with cp.paused():`."
        )


# Refused whatever their type: sparse attention, which a function may silently ignore.
_SPARSE: Final = {"indices", "block_indices", "position_bias"}


def _mask(module: nn.Module, mask: object, step: Step) -> tuple[Mask, Tensor | None]:
    """Return the mask over the full sequence, and the bias that is added to the scores."""
    if isinstance(mask, StepMask):
        return mask, None
    if mask is None:
        # A layer without a mask sees all tokens, or all up to its own.
        causal = bool(getattr(module, "is_causal", True))
        return StepMask(causal=causal, reference=StepReference(step)), None
    mask = check_dense_mask(module, mask, step)
    if not mask.is_floating_point() and stock_name(module.config) == "eager":  # type: ignore[arg-type]
        raise ValueError(
            f"{type(module).__name__} got an attention mask of {mask.dtype}, but its attention is "
            "'eager', which adds masks to the scores: it would hide no key. Give a mask of 0 for "
            "visible keys and torch.finfo(dtype).min for others, or load the model with "
            "attn_implementation='sdpa'."
        )
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        bias = bias.masked_fill(~mask, NEVER)
    else:
        bias = mask
    return StepMask(documents=False, padding=False, reference=StepReference(step)), bias.detach()


for _ours in NAMES.values():
    AttentionInterface.register(_ours, attend)
    AttentionMaskInterface.register(_ours, mask_of_step)
