# SPDX-License-Identifier: Apache-2.0
"""Attention with ALiBi that a model writes out, computed by our attention over the full sequence.

It can be longer than what a dense mask allows, so that the forward method of a layer is replaced.

Shapes: B batch, H heads, L local length, S sequence length, D head dim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from hf_patches.attention import attend_in_step
from hf_patches.forward import Removable
from hf_patches.input_checks import name_arguments
from hf_patches.mixers.common import (
    Replacement,
    StockConfig,
    kind_of,
    once,
    real_tokens,
    step_of,
    stock_implementation,
)
from hf_patches.names import find_in_modules
from hf_patches.positions import count_real
from lightning_cp.attn.api import attention
from lightning_cp.step import Step


def install(model: PreTrainedModel) -> Iterator[Removable]:
    """Replace the attention of a model that writes it out; yield the replacements."""
    stock_implementation(model)
    for module in model.modules():
        kind = kind_of(module, _FORWARDS)
        if kind is None:
            continue
        method = _Forward(module, kind)
        method.install()
        yield method
        if kind == "FalconAttention":
            config = StockConfig(module, module.config)  # type: ignore[arg-type]
            config.install()
            yield config


def _dropout(module: nn.Module) -> float:
    """Return the probability with which attention drops weights."""
    names = ("attn_dropout", "attention_dropout")
    layers = (getattr(module, name, None) for name in names)
    return max((x.p for x in layers if isinstance(x, nn.Dropout) and x.training), default=0.0)


@dataclass(eq=False)
class _Forward(Replacement):
    """The forward method of an attention layer that adds ALiBi to its scores."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Attend to the full sequence; return hidden states and no weights."""
        module = self.module
        arguments = name_arguments(module, args, kwargs)
        step = step_of(arguments.get("attention_mask"))
        if step is None:
            return self.stock(*args, **kwargs)
        return _FORWARDS[self.kind](module, arguments, step), None


def _bloom(module: Any, arguments: Mapping[str, Any], step: Step) -> Tensor:
    hidden = arguments["hidden_states"]
    query, key, value = module._reshape(module.query_key_value(hidden))
    bias = _alibi(module, hidden.dtype, step)
    attend = partial(attention, scale=module.inv_norm_factor, dropout=_dropout(module))
    mask = arguments["attention_mask"]
    out = attend_in_step(step, attend, module, query, key, value, mask, {}, bias)
    out = module.dense(out.flatten(2))
    dropped = functional.dropout(out, module.hidden_dropout, module.training)
    result: Tensor = arguments["residual"] + dropped
    return result


def _falcon(module: Any, arguments: Mapping[str, Any], step: Step) -> Tensor:
    hidden, mask = arguments["hidden_states"], arguments["attention_mask"]
    parts = module._split_heads(module.query_key_value(hidden))
    query, key, value = (x.transpose(1, 2) for x in parts)
    bias = None
    if arguments["alibi"] is None:
        rotate = find_in_modules(type(module), "apply_rotary_pos_emb")
        query, key = rotate(query, key, *arguments["position_embeddings"])
    else:
        bias = _alibi(module, hidden.dtype, step)
        # The eager code of this model adds it twice: to the scores and to the mask.
        is_eager = module.config._attn_implementation == "eager"
        bias = bias * module.inv_norm_factor * (2 if is_eager else 1)
    dropout = 0.0 if bias is None else _dropout(module)
    attend = partial(attention, scale=module.inv_norm_factor, dropout=dropout)
    out = attend_in_step(step, attend, module, query, key, value, mask, {}, bias)
    projected: Tensor = module.dense(out.flatten(2))
    return projected


def _alibi(module: Any, dtype: torch.dtype, step: Step) -> Tensor:
    """Return the bias that a model adds by the position of a key, [B or 1, H, 1, S].

    Positions count the tokens of a document that are not padding, as the model's own code does.
    Computed once per step.
    """
    build = find_in_modules(type(module), "build_alibi_tensor")
    key = ("alibi", build, module.num_heads, dtype)
    return once(step, key, lambda: _build_alibi(module, build, dtype, step))


def _build_alibi(
    module: Any, build: Callable[..., Tensor], dtype: torch.dtype, step: Step
) -> Tensor:
    device = step.position_ids.device
    real = real_tokens(step, device)
    mask = torch.ones(1, step.layout.seq_len, dtype=torch.long, device=device)
    table = build(mask, num_heads=module.num_heads, dtype=dtype)  # [H, 1, S]
    positions = torch.where(real, count_real(real, step) - 1, 0)
    return table.squeeze(1)[:, positions].transpose(0, 1).unsqueeze(2)


def _mpt(module: Any, arguments: Mapping[str, Any], step: Step) -> Tensor:
    hidden = arguments["hidden_states"]
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    shape = (*hidden.shape[:2], module.n_heads, module.head_dim)
    query, key, value = (x.reshape(shape).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    # The bias of the last key is 0, and that of the one before it minus the slope.
    slopes = -arguments["position_bias"][:, 0, -2].float()
    dropout = module.attn_dropout_p if module.training else 0.0
    attend = partial(attention, scale=module.softmax_scale, alibi=slopes, dropout=dropout)
    mask = arguments["attention_mask"]
    out = attend_in_step(step, attend, module, query, key, value, mask, {})
    projected: Tensor = module.out_proj(out.flatten(2))
    return projected


_FORWARDS: Final[Mapping[str, Callable[[Any, Mapping[str, Any], Step], Tensor]]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}
