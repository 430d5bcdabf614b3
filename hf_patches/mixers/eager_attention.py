# SPDX-License-Identifier: Apache-2.0
"""Attention layers that run their own code, with the keys of the full sequence.

A layer gets a cache whose `update` returns the keys and values of all ranks in sequence order, and
a dense mask of this rank's queries and all keys. What the layer computes from them is its own
business: scores that are written out, keys that an indexer chooses, masks from values. It holds
L x S scores, 1 / cp_size of what the stock layer holds.

Shapes: B batch, L local length, S sequence length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_patches.interface.input_checks import check_dense_mask, name_arguments, parameters_of
from hf_patches.interface.names import find_in_modules, step_of
from hf_patches.interface.positions import count_real
from hf_patches.mixers.gathered_keys import (
    GatheredKeys,
    additive_mask,
    real_tokens,
    visible_keys,
)
from hf_patches.mixers.replacement import Replacement, kind_of, name_stock, stock_implementation
from lightning_cp.patch import Patch
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.routing import Exempt
from lightning_cp.step.step import Step, StepMask, StepReference, per_step

_WRITTEN: Final = {
    "BloomAttention",
    "CodeGenAttention",
    "FalconAttention",
    "GPTJAttention",
    "GPTNeoXJapaneseAttention",
    "MegatronBertSelfAttention",
    "MptAttention",
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


def install(model: PreTrainedModel) -> Iterator[Patch]:
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
        if kind in _INTERFACE or kind == "FalconAttention":
            yield name_stock(module)
        yield _Attention(
            module, kind, has_bool_mask=kind in _INTERFACE and stock == "sdpa"
        ).install()


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
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor):  # the caller's, which the layer's own code reads
            check_dense_mask(self.module, mask, step)
        else:
            arguments["attention_mask"] = self._mask(mask, step, arguments["hidden_states"])
        if arguments.get("alibi") is not None:
            _add_alibi(self.module, arguments, step)
        names = parameters_of(type(self.module).forward)
        cache = "layer_past" if "layer_past" in names else "past_key_values"
        arguments[cache] = GatheredKeys(step)
        with Exempt():  # its keys are complete
            return self.stock(**arguments)

    def _mask(self, mask: object, step: Step, hidden: Tensor) -> Tensor:
        """Return which keys each of this rank's queries sees, as the layer's code expects it."""
        if not isinstance(mask, StepMask):
            mask = StepMask(reference=StepReference(step))
        visible = visible_keys(mask, step, hidden.device)
        if self.kind == "MptAttention":
            return ~visible  # true where a key is hidden
        return visible if self.has_bool_mask else additive_mask(visible, hidden.dtype)


def _add_alibi(module: Any, arguments: dict[str, Any], step: Step) -> None:
    """Give a layer the bias by the position of a key, [B * H, 1, S]."""
    mask = arguments["attention_mask"]
    build = find_in_modules(type(module), "build_alibi_tensor")
    bias = _build_alibi(step, build, module.num_heads, mask.dtype)
    arguments["alibi"] = bias.flatten(0, 1)
    if kind_of(module, ("FalconAttention",)):  # whose own code adds it to the mask too
        arguments["attention_mask"] = mask + bias * module.inv_norm_factor


@per_step
def _build_alibi(
    step: Step, build: Callable[..., Tensor], num_heads: int, dtype: torch.dtype
) -> Tensor:
    """Return the bias [B, H, 1, S]. Positions count the tokens of a document, without padding."""
    device = step.position_ids.device
    real = real_tokens(step, device)
    every = torch.ones(1, step.layout.seq_len, dtype=torch.long, device=device)
    table = build(every, num_heads=num_heads, dtype=dtype)  # [H, 1, S]
    positions = torch.where(real, count_real(real, step) - 1, 0).expand(step.batch_size, -1)
    return table.squeeze(1)[:, positions].transpose(0, 1).unsqueeze(2)
