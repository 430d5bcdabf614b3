# SPDX-License-Identifier: Apache-2.0
"""The config and the weights of a language model: from a folder, from the hub, or new."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.utilities import rank_zero_info
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.quantization_config import Mxfp4Config

from hf_patches.multimodal.table import find_decoder, is_multimodal
from hf_patches.support import architecture_of
from hf_patches.weights.auto import auto_class
from lightning_cp.checkpoint import load_weights
from lightning_cp.comm.collective_errors import together
from recipes.files import check_model
from recipes.processors import IMAGE_SIDE, PATCH_SIDE, TINY_IMAGE, tiny_processor
from recipes.tokens import (
    OFFLINE,
    byte_tokenizer,
    first_line,
    from_folder_or_hub,
)

WeightDtype = Literal["auto", "float32", "bfloat16"]

_FETCHED: Final = ["*.safetensors", "*.json"]
_NOT_FETCHED: Final = ["original/*", "metal/*", "consolidated*"]
"""Patterns of files on the hub; the second are copies in another format."""


@dataclass(frozen=True)
class LoraOptions:
    """Train low-rank adapters and freeze the model (LoRA, with PEFT).

    Args:
        rank: of the adapter matrices.
        alpha: their scale is alpha / rank.
        dropout: on their inputs.
        target_modules: names of the linear layers to adapt; ``all-linear`` is all but the head. Of
            a model with media only layers of the text decoder are adapted.
        adapt_towers: also adapt layers of towers and projectors that have such names.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    adapt_towers: bool = False


# ---------------------------------------------------------------- config


def tiny_config() -> PreTrainedConfig:
    """Return the config of a small Llama for the byte tokenizer."""
    return LlamaConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        architectures=["LlamaForCausalLM"],
    )


def tiny_image_config() -> PreTrainedConfig:
    """Return the config of a small LLaVA for `tiny_processor`."""
    processor = tiny_processor()
    return LlavaConfig(
        text_config={**tiny_config().to_dict(), "vocab_size": len(processor.tokenizer)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIDE,
            "patch_size": PATCH_SIDE,
            "projection_dim": 64,
        },
        image_token_index=processor.image_token_id,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        architectures=["LlavaForConditionalGeneration"],
    )


def load_config(model: str | None) -> PreTrainedConfig:
    """Load the config of a model: a folder, a name on the hub, or of an embedded model.

    These are `tiny_config` for None, and `tiny_image_config` for ``tiny-image``.
    """
    if model is None:
        return tiny_config()
    if model == TINY_IMAGE:
        return tiny_image_config()
    check_model(model)
    config = from_folder_or_hub(
        AutoConfig,
        "model",
        model,
        cure="Check the name, the connection and your access.",
        errors=(OSError, ValueError, KeyError, StrictDataclassError),
    )
    if auto_class(config) is None:
        raise ValueError(
            f"model={model!r} has type '{config.model_type}', of which transformers has no causal "
            "language model, and none with media. Choose another."
        )
    return config  # type: ignore[no-any-return]


def change_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> None:
    """Set values of a config, or of its text config. A dict changes the entries that it names.

    Example:
        >>> config = tiny_config()
        >>> change_config(config, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
        >>> config.rope_parameters["rope_theta"]
        500000.0
    """
    for name, value in changes.items():
        owner = next((c for c in (config, config.get_text_config()) if hasattr(c, name)), None)
        if owner is None:
            known = [n for n in config.get_text_config().to_dict() if not n.startswith("_")]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(sorted(known))}."
            raise ValueError(
                f"model.config.{name}: the config of a '{config.model_type}' has no such value. "
                f"{hint}"
            )
        former = getattr(owner, name)
        merges = isinstance(value, Mapping) and isinstance(former, Mapping)
        setattr(owner, name, {**former, **value} if merges else value)


def pop_quantization(config: PreTrainedConfig, model: str) -> bool:
    """Remove the quantization config; return whether weights must be dequantized on loading."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return False
    options = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = str(options.get("quant_method"))
    if method != "mxfp4":
        raise ValueError(
            f"model={model!r} has quantized weights ({method}), which cannot be trained here. Give "
            "the model that it was made from."
        )
    del config.quantization_config
    return True


# ---------------------------------------------------------------- parameters


def add_lora(model: PreTrainedModel, options: LoraOptions) -> Any:
    """Add adapters to a model on the meta device; the adapters are initialized at once."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise ImportError("model.lora needs PEFT: pip install peft.") from error
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
        exclude_modules=None if options.adapt_towers else _towers(model),
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"model.lora: {first_line(error)}.") from error
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            for part in (layer.lora_A, layer.lora_B):
                part.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return adapted


def _towers(model: PreTrainedModel) -> str | None:
    """Return a pattern of the modules outside of the text decoder; None for a model of text."""
    known = architecture_of(model)
    if known is None or known.media is None:
        return None
    return rf"(?!{re.escape(find_decoder(model, known.media))}\.).*"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training, by name patterns."""
    for pattern in patterns:
        matches = [p for name, p in model.named_parameters() if fnmatch(name, pattern)]
        if not matches:
            names = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise ValueError(
                f"model.freeze: no parameter name matches {pattern!r}. Names are {names}, ..."
            )
        for parameter in matches:
            parameter.requires_grad_(False)


def cast(model: nn.Module, dtype: WeightDtype, precision: str) -> None:
    """Cast parameters to ``dtype``, or to the dtype for the trainer's precision; keep buffers."""
    for parameter in model.parameters():
        if dtype != "auto":
            parameter.data = parameter.data.to(getattr(torch, dtype))
        elif precision == "bf16-mixed" and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


# ---------------------------------------------------------------- pretrained weights


def find_weights(model: str, *, fetch: bool) -> Path:
    """Return the folder of a model's weights.

    Args:
        model: a folder, or a name on the hub.
        fetch: download from the hub; else use what was downloaded before.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        fetched = snapshot_download(
            model,
            allow_patterns=_FETCHED,
            ignore_patterns=_NOT_FETCHED,
            local_files_only=not fetch,
        )
    except OSError as error:
        raise ValueError(
            f"model={model!r}: the weights could not be downloaded ({first_line(error)}). "
            f"{OFFLINE} Check the connection and your access, or give a folder."
        ) from error
    return Path(fetched)


def load_pretrained(model: Any, folder: Path, *, dequantize: bool = False) -> None:
    """Load the weights of a Hugging Face folder into a sharded model. Collective.

    If the folder has the names of the model, each rank reads its shards. If transformers converts
    names or shapes (experts, the text part of image models, packed weights), rank 0 loads the full
    model into main memory and sends each rank its shards.

    Args:
        model: from transformers, or a PEFT model around one.
        folder: written by ``save_pretrained``.
        dequantize: the weights are packed as MXFP4.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    plain = _plain_names(base)
    if not dequantize and _has_names(folder, base):
        load_weights(plain, folder, strict=False)
        rank_zero_info(f"weights: source={folder}, read_by=each rank")
        return

    def load() -> dict[str, Any]:
        if dist.get_rank():
            return {}
        full = load_full(folder, dequantize=dequantize, media=is_multimodal(base))
        return dict(full.state_dict())

    state = together(load, f"{folder} was not loaded.", (OSError, ValueError, ImportError))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(plain, state, options=options)
    rank_zero_info(f"weights: source={folder}, read_by=rank 0")


def load_full(folder: Path, *, dequantize: bool = False, media: bool = False) -> PreTrainedModel:
    """Load a full model into main memory; raise if the folder lacks weights.

    Args:
        folder: written by ``save_pretrained``.
        dequantize: the weights are packed as MXFP4; the config of the folder describes how.
        media: load the model with its towers, if the folder's config has one without.
    """
    auto = auto_class(AutoConfig.from_pretrained(folder), media=media)
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if dequantize else {}
    loaded: Any = auto.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    full, info = loaded
    if info["missing_keys"]:
        raise ValueError(
            f"{folder} lacks weights of a {type(full).__name__}: "
            f"{', '.join(sorted(info['missing_keys'])[:3])}, ... Give a complete folder."
        )
    built: PreTrainedModel = full
    return built


def _plain_names(base: nn.Module) -> nn.Module:
    """Return a module that holds a model's weights under their names without PEFT."""
    plain = nn.Module()
    for name, value in base.state_dict().items():
        if ".lora_" in name:
            continue
        *path, leaf = name.replace(".base_layer.", ".").split(".")
        owner = plain
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, value)
    return plain


def _has_names(folder: Path, base: PreTrainedModel) -> bool:
    """Return whether a folder holds all weights of a model under the model's names."""
    if get_model_conversion_mapping(base, add_legacy=False):
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        saved = set(json.loads(index.read_text())["weight_map"])
    else:
        file = folder / "model.safetensors"
        if not file.is_file():
            return False
        with safe_open(file, framework="pt") as opened:
            saved = set(opened.keys())
    tied: dict[int, set[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            tied.setdefault(id(parameter), set()).add(name.replace(".base_layer.", "."))
    return all(names & saved for names in tied.values())
