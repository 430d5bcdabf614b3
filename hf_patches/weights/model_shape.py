# SPDX-License-Identifier: Apache-2.0
"""The shape of a Hugging Face model, for the planner: its config, and a model on the meta device.

Parameters are counted, not computed from the config. Widths are those that config classes name
alike; a layer that does something else is counted by its parameters.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from hf_patches.support import ARCHITECTURES
from hf_patches.weights.auto import auto_class
from hf_patches.weights.export import read_config
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.planner.shapes import GPT_OSS_SAVED, LayerShape, ModelShape

_NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_ACTIVE: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
_EXPERT_WIDTHS: Final = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_WINDOWS: Final = {"chunked_attention": "attention_chunk_size"}
_WIDE_NORM = re.compile("^(Gemma|Qwen3Next|Qwen3_5)")
_NO_ATTENTION = re.compile("linear|conv|mamba|recurrent|ssm")


def model_shape(model: PreTrainedConfig | str | Path, *, name: str | None = None) -> ModelShape:
    """Return the shape of a language model, with the parameters of its towers for media.

    Args:
        model: a config, or a folder with a config.json, or that file; nothing is downloaded.
        name: for reports; by default the folder, or the model type.

    Example:
        >>> from transformers import LlamaConfig
        >>> shape = model_shape(LlamaConfig(num_hidden_layers=2, vocab_size=1000))
        >>> shape.num_params, shape.layers[0].key_width
        (412962816, 8192)
    """
    config = model if isinstance(model, PreTrainedConfig) else _read(Path(model))
    label = name or (config.model_type if isinstance(model, PreTrainedConfig) else str(model))
    auto = auto_class(config)
    if auto is None:
        raise ValueError(
            f"The config of type '{config.model_type}' has no causal language model "
            "in transformers, nor one with media. Give that of another model."
        )
    text: Any = config.get_text_config()
    known = ARCHITECTURES.get(text.model_type)
    if known is not None and known.is_replicated:
        raise ValueError(
            f"The memory and time of a model of type '{text.model_type}' are unknown: "
            f"{known.caveat}, and a plan knows sharded layers only. Measure a step instead; what "
            "such layers cost: docs/limits.md."
        )
    with torch.device("meta"):
        built: Any = auto.from_config(config)
    found = find_blocks(built)
    reached = {id(module) for module in _text_model(built).modules()}
    blocks = [block for block in found if id(block) in reached]
    inside = {id(p): p.numel() for block in found for p in block.parameters()}
    root = sum(p.numel() for p in built.parameters() if id(p) not in inside)
    in_text = {id(p) for block in blocks for p in block.parameters()}
    other = sum(size for key, size in inside.items() if key not in in_text)
    head = built.get_output_embeddings()
    embeddings = built.get_input_embeddings()
    head_params = 0 if head is None else sum(p.numel() for p in head.parameters())
    is_tied = head is not None and getattr(head, "weight", None) is embeddings.weight
    layers = tuple(_layer(block, index, text) for index, block in enumerate(blocks))
    if not layers:
        raise ValueError(
            f"No layers were found in a {type(built).__name__}, so its memory cannot be computed."
        )
    return ModelShape(
        label, text.hidden_size, text.vocab_size, layers, root, head_params, is_tied, other
    )


def _text_model(model: Any) -> nn.Module:
    """Return the part that text passes; of models without images or sound, the model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else model


def _read(path: Path) -> PreTrainedConfig:
    try:
        return read_config(path)
    except (ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"{path} could not be read by transformers ({first}). Give a folder that "
            "save_pretrained() wrote, or install the version of transformers that knows this model."
        ) from error


def _first(config: Any, names: Sequence[str], default: int = 0) -> int:
    """Return the first value that a config has, of several names."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), default)


def _layer(block: nn.Module, index: int, config: Any) -> LayerShape:
    named = dict(block.named_parameters())
    num_params = sum(p.numel() for p in named.values())
    routed = sum(
        p.numel() for name, p in named.items() if "experts" in name and "shared_expert" not in name
    )
    num_experts, num_active = _first(config, _NUM_EXPERTS), _first(config, _NUM_ACTIVE)
    has_experts = bool(routed and num_experts and num_active)
    inactive = routed * (num_experts - num_active) // num_experts if has_experts else 0
    width = config.hidden_size
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    value_dim, latent = head_dim, 0
    if getattr(config, "kv_lora_rank", None):
        rope = config.qk_rope_head_dim
        head_dim, value_dim = config.qk_nope_head_dim + rope, config.v_head_dim
        kv_heads = heads  # attention gets expanded keys
        latent = config.kv_lora_rank + (getattr(config, "q_lora_rank", None) or 0)
    linear = [m for m in block.modules() if isinstance(m, nn.Linear | Conv1D)]
    kind = _kind(config, index)
    if _NO_ATTENTION.search(kind):
        heads = kv_heads = latent = 0
    norms = [
        m for m in block.modules() if "Norm" in type(m).__name__ and _numel(m) in (width, 2 * width)
    ]
    shared = any("shared_expert" in name for name in named) if has_experts else False
    return LayerShape(
        heads,
        kv_heads,
        head_dim,
        value_dim,
        _inner(config, index, has_experts=has_experts),
        num_params,
        num_params - inactive,
        sum(sum(m.weight.shape) for m in linear),
        sum(m.weight.shape[0 if isinstance(m, Conv1D) else 1] for m in linear),
        window=_window(config, kind),
        num_active=num_active if has_experts else 0,
        shared_inner=_shared_inner(config) if shared else 0,
        num_norms=len(norms) or 2,
        has_wide_norms=any(_WIDE_NORM.search(type(m).__name__) for m in norms),
        qk_norm=any(re.search(r"(^|\.)q_?(layer)?norm\.weight$", name) for name in named),
        latent=latent,
        mlp_saved=GPT_OSS_SAVED if config.model_type == "gpt_oss" else (8, 8),
    )


def _numel(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return 0 if weight is None else int(weight.numel())


def _kind(config: Any, index: int) -> str:
    """Return what a config calls the kind of a layer."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return str(kinds[index]) if kinds and index < len(kinds) else ""


def _window(config: Any, kind: str) -> int | None:
    """Return the keys that a query of a layer sees, None for all."""
    if kind in _WINDOWS:
        return getattr(config, _WINDOWS[kind], None)
    is_windowed = "sliding" in kind or (not kind and getattr(config, "use_sliding_window", True))
    return getattr(config, "sliding_window", None) if is_windowed else None


def _inner(config: Any, index: int, *, has_experts: bool) -> int:
    """Return the width of a layer's MLP, or of one of its experts."""
    names = _EXPERT_WIDTHS if has_experts else ("intermediate_size", "ffn_dim", "n_inner")
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple):
            return int(value[index])
        if isinstance(value, int):
            return value
    return 4 * int(config.hidden_size)


def _shared_inner(config: Any) -> int:
    own = _first(config, ("shared_expert_intermediate_size", "shared_intermediate_size"))
    number = _first(config, ("n_shared_experts", "num_shared_experts"), 1)
    return own or number * _first(config, _EXPERT_WIDTHS)
