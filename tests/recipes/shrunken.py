"""Models of the architectures that the configs train, small enough for a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from recipes.tokens import byte_tokenizer

_SMALL: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 131_072,
    "initializer_range": 0.3,
}
_WINDOWS = ["sliding_attention", "full_attention"]
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def _llama() -> PreTrainedConfig:
    return transformers.LlamaConfig(
        **_SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def _gemma3() -> PreTrainedConfig:
    text = {**_SMALL, "sliding_window": 16, "layer_types": _WINDOWS}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        boi_token_index=259,
        eoi_token_index=260,
        image_token_index=261,
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen3": lambda: transformers.Qwen3Config(**_SMALL),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SMALL, **_EXPERTS, num_experts=4, moe_intermediate_size=24
    ),
    "gemma3": _gemma3,
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SMALL, **_EXPERTS, num_local_experts=4, sliding_window=16, layer_types=_WINDOWS
    ),
}
"""By the model type of the config."""


def write_config(name: str, folder: Path, *, weights: bool = False) -> Path:
    """Write config and tokenizer as `save_pretrained` does, and random weights if asked."""
    config = ARCHITECTURES[name]()
    if weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def pack_experts(folder: Path) -> None:
    """Turn the experts of a gpt-oss folder into MXFP4, as on the hub: other, random values."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, width_in, width_out = weights.pop(name).shape
        shape = (experts, width_out, width_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
