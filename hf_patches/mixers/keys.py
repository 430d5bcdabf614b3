# SPDX-License-Identifier: Apache-2.0
"""Attention layers that run their own code, with the keys of the full sequence.

A layer gets a cache whose `update` returns the keys and values of all ranks in sequence order, and
a dense mask of this rank's queries and all keys. What the layer computes from them is its own
business: scores that are written out, keys that an indexer chooses, masks from values. It holds
L x S scores, 1 / cp_size of what the stock layer holds.

Shapes: B batch, L local length, S sequence length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_patches.forward import Removable
from hf_patches.input_checks import name_arguments, parameters_of
from hf_patches.mixers.common import (
    GatheredKeys,
    Replacement,
    StockConfig,
    additive_mask,
    kind_of,
    step_of,
    stock_implementation,
    visible_keys,
)
from lightning_cp.routing import Unsharded
from lightning_cp.step import Step, StepMask, StepReference
from lightning_cp.torch_private import outside_graphs

_WRITTEN: Final = {
    "CodeGenAttention",
    "GPTJAttention",
    "GPTNeoXJapaneseAttention",
    "MegatronBertSelfAttention",
    "MvpAttention",
    "RemBertSelfAttention",
    "TrOCRAttention",
    "XGLMAttention",
}
"""Layers that write their scores out."""

_INTERFACE: Final = {
    "AXK2Attention",
    "DeepseekV32Attention",
    "DogeAttention",
    "GlmMoeDsaAttention",
    "HYV4Attention",
    "MiniMaxM3VLAttention",
}
"""Layers that choose keys, by an indexer or by values, and then call the interface."""


def _check_experts(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    if config.model_type == "doge" and config.is_moe:
        raise ValueError(
            "config.is_moe = True: the experts of Doge are chosen by the logits of other tokens of "
            "the batch (transformers 5.22), so its sequences cannot be sharded. Use a dense model."
        )


def install(model: PreTrainedModel) -> Iterator[Removable]:
    """Replace the forward of the attention layers of a model; yield the replacements."""
    _check_experts(model)
    stock = stock_implementation(model)
    for module in model.modules():
        kind = kind_of(module, _WRITTEN | _INTERFACE)
        if kind_of(module, ("TrOCRSinusoidalPositionalEmbedding",)):
            raise ValueError(
                f"{type(model).__name__} computes positions from the padding of this rank's tokens "
                "(use_learned_position_embeddings=False), which is not supported."
            )
        if kind is None or (kind == "MiniMaxM3VLAttention" and module.indexer is None):
            continue
        if kind in _INTERFACE:
            config = StockConfig(module, module.config)  # type: ignore[arg-type]
            config.install()
            yield config
        layer = _Attention(module, kind, has_bool_mask=kind in _INTERFACE and stock == "sdpa")
        layer.install()
        yield layer


@dataclass(eq=False)
class _Attention(Replacement):
    """The forward of an attention layer.

    Args:
        has_bool_mask: whether its masks are bool, true where a key is visible; else they are added
            to the scores.
    """

    has_bool_mask: bool = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the keys of the full sequence; outside of steps, as it was."""
        arguments = name_arguments(self.module, args, kwargs)
        step = step_of(arguments.get("attention_mask"))
        if step is None:
            return self.stock(*args, **kwargs)
        return self._run(arguments, step)

    @outside_graphs
    def _run(self, arguments: dict[str, Any], step: Step) -> Any:
        hidden = arguments["hidden_states"]
        visible = _visible(self.module, arguments.get("attention_mask"), step, hidden.device)
        arguments["attention_mask"] = (
            visible if self.has_bool_mask else additive_mask(visible, hidden.dtype)
        )
        names = parameters_of(type(self.module).forward)
        cache = "layer_past" if "layer_past" in names else "past_key_values"
        arguments[cache] = GatheredKeys(step)
        with Unsharded():  # its keys are complete
            return self.stock(**arguments)


def _visible(module: nn.Module, mask: object, step: Step, device: torch.device) -> Tensor:
    """Return which keys each of this rank's queries sees, bool [B, H or 1, L, S]."""
    if isinstance(mask, Tensor):
        shape = (step.tensor_len, step.layout.seq_len)
        if mask.shape[-2:] != shape:
            raise ValueError(
                f"{type(module).__name__} got an attention mask of shape {tuple(mask.shape)} in "
                f"a step whose ranks hold {shape[0]} of {shape[1]} tokens. Put the full mask into "
                "the batch, as `attention_mask`, and cp.step(...) shards it."
            )
        return mask if mask.dtype == torch.bool else mask >= 0
    if not isinstance(mask, StepMask):
        mask = StepMask(reference=StepReference(step))
    return visible_keys(mask, step, device)
