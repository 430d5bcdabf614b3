# SPDX-License-Identifier: Apache-2.0
"""Attention layers that run their own code, with the keys of the full sequence.

A layer gets a cache whose `update` returns the keys and values of all ranks in sequence order, and
a dense mask of this rank's queries and all keys. What the layer computes from them is its own
business: scores that are written out, keys that an indexer chooses, masks from values. It holds
L x S scores, 1 / cp_size of what the stock layer holds.

Shapes: B batch, L local length, S sequence length.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_patches.forward import Removable
from hf_patches.input_checks import name_arguments
from hf_patches.mixers.common import (
    GatheredKeys,
    Replacement,
    StockConfig,
    additive_mask,
    full_tokens,
    kind_of,
    step_of,
    stock_implementation,
    visible_keys,
)
from hf_patches.names import active
from lightning_cp.data.sharding import shard
from lightning_cp.routing import Unsharded
from lightning_cp.step import Step, StepMask, StepReference
from lightning_cp.torch_private import outside_graphs


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
        kind = kind_of(module, _LAYERS)
        if kind is None or getattr(module, _LAYERS[kind].needs or "forward") is None:
            continue
        if _LAYERS[kind].uses_interface:
            config = StockConfig(module, module.config)  # type: ignore[arg-type]
            config.install()
            yield config
        has_bool_mask = kind in _BOOL or (_LAYERS[kind].uses_interface and stock == "sdpa")
        layer = _Attention(module, kind, has_bool_mask=has_bool_mask)
        layer.install()
        yield layer
    for module in model.modules():
        if kind_of(module, ("XLMModel",)):
            yield module.register_forward_pre_hook(_find_padding, with_kwargs=True)
        if kind_of(module, ("BigBirdModel",)):
            _check_full(module)
            yield module.register_forward_pre_hook(_check_full_in_step)
        if kind_of(module, ("TrOCRSinusoidalPositionalEmbedding",)):
            raise ValueError(
                f"{type(model).__name__} computes positions from the padding of this rank's tokens "
                "(use_learned_position_embeddings=False), which is not supported."
            )


@dataclass(frozen=True)
class _Layer:
    """What an attention layer calls its arguments, and how it differs from others.

    Args:
        hidden: the name of its hidden states.
        mask: the name of its mask.
        cache: the name of its cache.
        uses_interface: whether it calls transformers' AttentionInterface by the name in its config.
        needs: an attribute; a layer that has None there does nothing else than calling it.
        visible: reads its mask.
        prepare: changes its arguments after the mask and the cache are set.
    """

    hidden: str = "hidden_states"
    mask: str = "attention_mask"
    cache: str = "past_key_values"
    uses_interface: bool = False
    needs: str = ""
    visible: "Callable[[nn.Module, Any, Step, torch.device], Tensor] | None" = None
    prepare: Callable[[dict[str, Any]], None] | None = None


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
        step = step_of(arguments.get(_LAYERS[self.kind].mask))
        if step is None:
            return self.stock(*args, **kwargs)
        return self._run(arguments, step)

    @outside_graphs
    def _run(self, arguments: dict[str, Any], step: Step) -> Any:
        layer = _LAYERS[self.kind]
        hidden, mask = arguments[layer.hidden], arguments.get(layer.mask)
        visible = (layer.visible or _visible)(self.module, mask, step, hidden.device)
        arguments[layer.mask] = (
            visible if self.has_bool_mask else additive_mask(visible, hidden.dtype)
        )
        arguments[layer.cache] = GatheredKeys(step)
        if layer.prepare is not None:
            layer.prepare(arguments)
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


def _visible_in_xlm(_: nn.Module, mask: Tensor, step: Step, device: torch.device) -> Tensor:
    """Return which keys a query sees in XLM, bool [B, 1, L, S].

    Its causal masks do not hide padding, whose hidden states it sets to 0.

    Args:
        mask: [B, L, L] if causal, else [B, L] of this rank's tokens.
        step: the step.
        device: of the result.
    """
    causal = mask.dim() == 3
    visible = visible_keys(StepMask(causal=causal, padding=False), step, device)
    if causal:
        return visible
    real = full_tokens(mask.long(), step) != 0
    return visible & real[:, None, None]


def _turn_by_row(arguments: dict[str, Any]) -> None:
    """Give RoFormer one table of positions per row: it has wrapped ours, [B, L, D], in two dims."""
    table = arguments["sinusoidal_pos"]
    arguments["sinusoidal_pos"] = table[0, 0].unsqueeze(1)


def _drop_head_dim(arguments: dict[str, Any]) -> None:
    """Give XLM a mask [B, L, S]."""
    arguments["mask"] = arguments["mask"][:, 0]


def _check_full(module: Any) -> None:
    """Raise for a BigBird with sparse attention, whose blocks it counts in this rank's tokens."""
    if module.attention_type != "original_full":
        raise ValueError(
            f"The attention_type of {type(module).__name__} is '{module.attention_type}', which is "
            "not supported: it looks at blocks of this rank's tokens. Load the model with "
            "attention_type='original_full'."
        )


def _check_full_in_step(module: Any, _: tuple[Any, ...]) -> None:
    if active() is not None:
        _check_full(module)


def _find_padding(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give XLM a mask of padding: it would count the padding tokens of this rank's ids."""
    step = active()
    if step is None:
        return None
    arguments = name_arguments(module, args, kwargs)
    ids, lengths = arguments.get("input_ids"), arguments.pop("lengths", None)
    if arguments.get("attention_mask") is None and (ids is not None or lengths is not None):
        layout = step.layout
        if lengths is None:
            lengths = full_tokens((ids != module.pad_index).long(), step).sum(1)
        mask = torch.arange(layout.seq_len, device=lengths.device) < lengths[:, None]
        arguments["attention_mask"] = shard(mask.long(), 1, layout=layout, rank=step.cp_rank)
    return (), arguments


_LAYERS: Final[Mapping[str, _Layer]] = {
    "BigBirdSelfAttention": _Layer(),
    "MegatronBertSelfAttention": _Layer(),
    "MvpAttention": _Layer(),
    "RemBertSelfAttention": _Layer(),
    "RoFormerSelfAttention": _Layer(prepare=_turn_by_row),
    "TrOCRAttention": _Layer(),
    "XGLMAttention": _Layer(),
    # XLM
    "MultiHeadAttention": _Layer(
        hidden="input",
        mask="mask",
        cache="cache",
        visible=_visible_in_xlm,
        prepare=_drop_head_dim,
    ),
    # They choose keys, by an indexer or by values, and then call the interface.
    "AXK2Attention": _Layer(uses_interface=True),
    "DeepseekV32Attention": _Layer(uses_interface=True),
    "DogeAttention": _Layer(uses_interface=True),
    "GlmMoeDsaAttention": _Layer(uses_interface=True),
    "HYV4Attention": _Layer(uses_interface=True),
    "MiniMaxM3VLAttention": _Layer(uses_interface=True, needs="indexer"),
}

_BOOL: Final = {"MultiHeadAttention"}
