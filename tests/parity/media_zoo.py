# SPDX-License-Identifier: Apache-2.0
"""Tiny random models that take images, video or audio, and batches for them.

Images have several tokens each and different sizes where a model can take them; samples hold
several or none. A batch is described by its documents, so that the reference of packed ones is
built from the same documents, and not by code that could have the same fault.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.parity import zoo

FIRST_TEXT = 20
IMAGE, VIDEO, AUDIO = 1, 2, 3

# Ids of special tokens, all different: models look for them.
_IDS: dict[str, int] = {
    "image_token_id": 3,
    "image_token_index": 3,
    "video_token_id": 4,
    "video_token_index": 4,
    "audio_token_id": 5,
    "audio_token_index": 5,
    "boi_token_id": 6,
    "boi_token_index": 6,
    "eoi_token_id": 7,
    "eoi_token_index": 7,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
    "image_start_token_id": 8,
    "image_end_token_id": 9,
    "video_start_token_id": 14,
    "video_end_token_id": 15,
    "audio_start_token_id": 10,
    "audio_end_token_id": 11,
    "boa_token_id": 12,
    "eoa_token_id": 13,
    "eoa_token_index": 13,
}
_SIZES: dict[str, Any] = {
    **_IDS,
    "out_hidden_size": 64,
    "in_channels": 3,
    "in_chans": 3,
    "num_position_embeddings": 64,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "projection_dim": 64,
    "pad_token_id": 0,
}


@dataclass
class Item:
    """One image, video or audio clip: its tokens, their kinds, and tensors for the model."""

    tokens: list[int]
    kinds: list[int]
    media: dict[str, Tensor]


Style = Callable[[PreTrainedModel, int, int, torch.Generator], Item]
"""(model, kind, size, generator) to an item."""


@dataclass(frozen=True)
class Entry:
    """How a model type is built and fed.

    Args:
        changes: to its tiny config.
        style: makes an item.
        kinds: of media that it takes.
        by_row: names of media that have one entry per sample.
        packs: whether packed documents are compared.
        types: the values of token types: by ``kind``, or the ``prefix`` of PaliGemma.
        masks: whether a mask is given where nothing is padding: the stock model needs one.
        extra: adds tensors to a batch.
    """

    style: Style
    changes: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[int, ...] = (IMAGE,)
    by_row: tuple[str, ...] = ()
    packs: bool = True
    types: str = "kind"
    masks: bool = False
    extra: Callable[[PreTrainedModel, dict[str, Tensor]], dict[str, Tensor]] | None = None


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


_METHODS = {
    IMAGE: "get_image_features",
    VIDEO: "get_video_features",
    AUDIO: "get_audio_features",
}
_TOKENS = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}


def _placeholder(config: PreTrainedConfig, kind: int) -> int:
    name = _TOKENS[kind]
    for key in (f"{name}_token_id", f"{name}_token_index"):
        if getattr(config, key, None) is not None:
            return int(getattr(config, key))
    raise KeyError(f"{config.model_type} has no {name} token")


def _count(model: PreTrainedModel, kind: int, media: dict[str, Tensor]) -> int:
    """Return the number of features of an item: as many as the tower computes."""
    owner = next(x for x in (model.base_model, model) if hasattr(x, _METHODS[kind]))
    method = getattr(owner, _METHODS[kind])
    names = inspect.signature(method).parameters
    dtype = next(model.parameters()).dtype
    given = {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in media.items()
        if k in names
    }
    with torch.no_grad():
        out = method(**given)
    deep = getattr(out, "deepstack_features", None)
    if getattr(out, "pooler_output", None) is not None:
        out = out.pooler_output
    elif deep is not None:
        out = deep[0][1]
    elif hasattr(out, "last_hidden_state"):
        out = out.last_hidden_state
    parts = out if isinstance(out, list | tuple) else [out]
    return sum(x.numel() // x.shape[-1] for x in parts)


def _item(model: PreTrainedModel, kind: int, media: dict[str, Tensor], count: int = 0) -> Item:
    count = count or _count(model, kind, media)
    token = _placeholder(model.config, kind)
    return Item([token] * count, [kind] * count, media)


# ---------------------------------------------------------------- styles


def _vision(model: PreTrainedModel) -> Any:
    return model.config.vision_config


def pixels(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image of the size that the tower is built for."""
    config = model.config
    if config.model_type == "chameleon":
        side = config.vq_config.resolution
    else:
        side = _vision(model).image_size
        side = side if isinstance(side, int) else side[0]
    media = {"pixel_values": _noise(generator, 1, 3, side, side)}
    if config.model_type == "deepseek_vl_hybrid":
        side = config.high_res_vision_config.image_size
        media["high_res_pixel_values"] = _noise(generator, 1, 3, side, side)
    if config.model_type == "chameleon":
        count = _count(model, kind, media)
        return Item([3] * count, [kind] * count, media)
    return _item(model, kind, media)


def grids(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """Patches of an image or video, and the grid that they come from."""
    vision, name = _vision(model), model.config.model_type
    merge = getattr(vision, "spatial_merge_size", getattr(vision, "merge_kernel_size", 2))
    merge = merge if isinstance(merge, int) else 2
    grid = (2 if kind == VIDEO else 1, 2 * merge, merge * (2 + size))
    frames = {"hunyuan_vl": 1, "muse_glimmer": 2}.get(
        name, getattr(vision, "temporal_patch_size", 1)
    )
    shape: tuple[int, ...] = (3 * vision.patch_size**2 * frames,)
    if name in ("kimi_k25", "paddleocr_vl"):
        shape = (3, vision.patch_size, vision.patch_size)
    values = _noise(generator, grid[0] * grid[1] * grid[2], *shape)
    prefix, key = ("video", "pixel_values_videos") if kind == VIDEO else ("image", "pixel_values")
    media = {key: values, f"{prefix}_grid_thw": torch.tensor([grid])}
    if name == "video_llama_3":
        media[f"{prefix}_merge_sizes"] = torch.tensor([merge])
        if kind == VIDEO:
            media["video_compression_mask"] = torch.ones(len(values) // merge**2, dtype=torch.bool)
    item = _item(model, kind, media)
    if name.endswith("thinker"):
        if kind == VIDEO:
            media["video_second_per_grid"] = torch.tensor([1.0])
        item.tokens, item.kinds = [8, *item.tokens, 9], [0, *item.kinds, 0]
    if kind == VIDEO and name in _TIMESTAMPS:
        half = len(item.tokens) // 2  # text between the frames
        item.tokens[half:half], item.kinds[half:half] = [21, 22], [0, 0]
    return item


def instructed(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image or clip, and a question to it for the q-former."""
    side = _vision(model).image_size
    ids = torch.randint(5, 90, (1, 4 + size), generator=generator)
    frames = () if kind == IMAGE else (2,)
    ids = torch.cat([ids, ids.new_ones(1, 1 - size)], 1)
    media = {
        "pixel_values": _noise(generator, 1, *frames, 3, side, side),
        "qformer_input_ids": ids,
        "qformer_attention_mask": (ids != 1).long(),
    }
    count = model.config.num_query_tokens * (1 if kind == IMAGE else 2)
    token = model.config.image_token_index if kind == IMAGE else model.config.video_token_index
    return Item([token] * count, [kind] * count, media)


def tiled(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image in tiles, of a size of its own; or frames of a video."""
    side = _vision(model).image_size
    if kind == VIDEO:
        media = {"pixel_values_videos": _noise(generator, 1, 2, 3, side, side)}
        if model.config.model_type == "llava_next_video":
            return _item(model, kind, media)
        count = _count(model, kind, media)
        return _item(model, kind, media, count)
    sizes = torch.tensor([[side, 2 * side - 8 * size]])
    media = {"pixel_values": _noise(generator, 1, 3, 3, side, side), "image_sizes": sizes}
    return _item(model, kind, media)


_PINPOINTS = [[32, 64]]


def sized(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image of its own size, padded to that of the largest."""
    if model.config.model_type == "emu3":
        unit = 2 * model.base_model.vqmodel.vision_spatial_factor
    else:
        unit = _vision(model).patch_size * getattr(model.config, "spatial_merge_size", 1)
    height, width = 2 * unit, unit * (1 + size)
    values = torch.zeros(1, 3, 2 * unit, 2 * unit)
    values[..., :height, :width] = _noise(generator, 1, 3, height, width)
    media = {"pixel_values": values, "image_sizes": torch.tensor([[height, width]])}
    return _item(model, kind, media)


def rows(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image of a sample, whose images are in one tensor."""
    side = _vision(model).image_size
    values = _noise(generator, 1, 3, side, side)
    count = _count(model, kind, {"pixel_values": values[None]})
    return _item(model, kind, {"pixel_values": values}, count)


def crops(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image, and parts of it in detail."""
    vision = _vision(model)
    side = local = getattr(vision, "sam_config", vision).image_size
    media = {
        "pixel_values": _noise(generator, 1, 3, side, side),
        "num_local_patches": torch.tensor([2 * size]),
    }
    if size:
        media["pixel_values_local"] = _noise(generator, 2, 3, local, local)
    if model.config.model_type == "unlimited_ocr":
        media["patches_grid"] = torch.tensor([[1 + size, 1]])
    return _item(model, kind, media)


def sound(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An audio clip as a spectrogram, of which a part is padding."""
    config = model.config
    audio = getattr(config, "audio_config", None) or config.encoder_config
    bins = getattr(audio, "num_mel_bins", getattr(audio, "input_dim", 8))
    length = 2 * getattr(audio, "max_source_positions", 16)
    real = length - 8 * (1 - size)
    parameters = inspect.signature(type(model).forward).parameters
    values = _noise(generator, 1, bins, length)
    mask = (torch.arange(length) < real).long()[None]
    if config.model_type in ("granite_speech", "granite_speech_plus", "fun_asr_nano"):
        values = values.transpose(1, 2)
    media = {"input_features": values}
    for name in ("input_features_mask", "feature_attention_mask"):
        if name in parameters:
            media[name] = mask
    if "granite" in config.model_type:  # of features, not of input
        count = _count(model, kind, media)
        kept = count - 2 * (1 - size)
        media["input_features_mask"] = (torch.arange(count) < kept)[None]
        return _item(model, kind, media, kept)
    if config.model_type == "qwen2_audio":
        return _item(model, kind, media, ((real - 1) // 2 + 1 - 2) // 2 + 1)
    if config.model_type == "moss_transcribe_diarize":
        media["padding_mask"] = torch.ones(1, 1, dtype=torch.int64)
    if config.model_type == "musicflamingo":
        return _item(model, kind, media, ((real - 1) // 2 + 1 - 2) // 2 + 1)
    return _item(model, kind, media)


def patches(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """Patches of an image, without a tower."""
    config = model.config
    shape = (1, 4, config.num_channels * config.patch_size**2)
    return _item(model, kind, {"pixel_values": _noise(generator, *shape)}, 4)


def placed(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """Patches of an image with their places; some are padding."""
    vision = _vision(model)
    side = getattr(vision, "pooling_kernel_size", 2)
    height, width = 2 * side, side * (1 + size)
    spots = [(x, y) for y in range(height) for x in range(width)]
    spots += [(-1, -1)] * (4 * side * side - len(spots))
    per_patch = 3 * vision.patch_size**2
    media = {
        "pixel_values": _noise(generator, 1, len(spots), per_patch).sigmoid(),
        "image_position_ids": torch.tensor([spots]),
    }
    return _item(model, kind, media, height * width // side**2)


def tiles(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image in tiles, which text sees by cross-attention."""
    side, most = _vision(model).image_size, _vision(model).max_num_tiles
    media = {
        "pixel_values": _noise(generator, 1, most, 3, side, side),
        "aspect_ratio_ids": torch.tensor([1 + size]),
        "aspect_ratio_mask": torch.tensor([[1, size]]),
    }
    return Item([3], [IMAGE], media)


def cross_mask(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return which tiles each token sees: those of the last image before it."""
    if "aspect_ratio_mask" not in batch:
        return {}
    number = (batch["input_ids"] == 3).cumsum(1)
    images = torch.arange(1, batch["aspect_ratio_mask"].shape[1] + 1)
    seen = (number[..., None] == images).long()
    return {"cross_attention_mask": seen[..., None] * batch["aspect_ratio_mask"][:, None]}


def naflex(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """Patches of an image of its own shape, padded to those of the largest."""
    vision = _vision(model)
    height, width = 4, 2 * (1 + size)
    media = {
        "pixel_values": _noise(generator, 1, 16, 3 * vision.patch_size**2),
        "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": (torch.arange(16) < height * width).long()[None],
    }
    return _item(model, kind, media)


def clips(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image, or some frames of one size."""
    side = _vision(model).image_size
    if kind == IMAGE:
        return _item(model, kind, {"pixel_values": _noise(generator, 1, 3, side, side)})
    return _item(model, kind, {"pixel_values_videos": _noise(generator, 1, 8, 3, side, side)})


def listed(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Any]:
    """Return numbers of crops as a list."""
    counts = batch.get("num_local_patches")
    return {"num_local_patches": counts.tolist()} if isinstance(counts, Tensor) else {}


def cropped(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """An image and its crops, with a mask of their patches (Phi-4)."""
    vision = _vision(model)
    side, patches = vision.crop_size, vision.crop_size // vision.patch_size
    media = {
        "image_pixel_values": _noise(generator, 1, 2, 3, side, side),
        "image_sizes": torch.tensor([[side, side]]),
        "image_attention_mask": torch.ones(1, 2, patches, patches, dtype=torch.int64),
    }
    half = patches // 2
    count = 2 * half * (half + 1) + 1
    return Item([vision.image_token_id] * count, [kind] * count, media)


def nothing(model: PreTrainedModel, kind: int, size: int, generator: torch.Generator) -> Item:
    """No media: a text model among the others."""
    return Item([], [], {})


# The tokens of a frame follow its time, as text.
_TIMESTAMPS = zoo.words(
    "cohere_compass cosmos3_edge cosmos3_omni glm46v glm4v glm4v_moe glm_ocr glmga qwen3_5 "
    "qwen3_5_moe qwen3_vl qwen3_vl_moe qwen4_exp"
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_DEEP = {"deepstack_visual_indexes": [0, 1]}
_TEXT_ROPE = {"text_config": {"rope_parameters": _ROPE}}
_FILM = (IMAGE, VIDEO)
_WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1]}
_EARS = {"num_mel_bins": 8, "max_source_positions": 16}


def _grids(changes: dict[str, Any] | None = None, kinds: tuple[int, ...] = _FILM) -> Entry:
    return Entry(grids, changes or {}, kinds)


_GRANITE_SPEECH = Entry(
    sound,
    {
        "has_lora_adapter": False,
        "window_size": 4,
        "downsample_rate": 2,
        "encoder_config": {
            "input_dim": 8,
            "hidden_dim": 64,
            "context_size": 16,
            "max_pos_emb": 32,
            "conv_kernel_size": 3,
            "output_dim": 12,
            "num_heads": 4,
            "dim_head": 16,
            "num_layers": 2,
        },
        "projector_config": {"encoder_hidden_size": 64},
    },
    (AUDIO,),
)

_TYPES: dict[str, Entry] = {
    "audioflamingo3": Entry(sound, {"audio_config": _EARS}, (AUDIO,)),
    "fun_asr_nano": Entry(
        sound,
        {
            "audio_config": {
                "num_mel_bins": 8,
                "num_timestamp_prediction_layers": 1,
                "num_stacked_frames": 1,
            },
            "adaptor_config": {"intermediate_size": 16, "projector_hidden_size": 64},
        },
        (AUDIO,),
    ),
    "glmasr": Entry(sound, {"audio_config": {**_EARS, "intermediate_size": 256}}, (AUDIO,)),
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": _GRANITE_SPEECH,
    "moss_transcribe_diarize": Entry(
        sound, {"audio_config": _EARS, "audio_merge_size": 2}, (AUDIO,)
    ),
    "musicflamingo": Entry(sound, {"audio_config": _EARS}, (AUDIO,)),
    "qwen2_audio": Entry(sound, {"audio_config": _EARS}, (AUDIO,)),
    "qwen3_asr": Entry(
        sound,
        {
            "audio_config": {
                "num_mel_bins": 8,
                "max_source_positions": 50,
                "downsample_hidden_size": 16,
                "output_dim": 64,
            }
        },
        (AUDIO,),
    ),
    "voxtral": Entry(sound, {"audio_config": {**_EARS, "intermediate_size": 256}}, (AUDIO,)),
    "chameleon": Entry(
        pixels,
        {
            "vocabulary_map": {
                "<image>": 3,
                **{f"IMGIMG{chr(65 + i)}Z": 10 + i for i in range(10)},
            },
            "vq_config": {
                "num_embeddings": 10,
                "embed_dim": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1],
                "num_res_blocks": 1,
                "resolution": 16,
            },
        },
    ),
    "deepseek_ocr2": Entry(
        crops,
        {
            "text_config": {"mlp_layer_types": ["dense", "sparse"]},
            "vision_config": {
                "sam_config": {
                    "image_size": 64,
                    "patch_size": 8,
                    "output_channels": 16,
                    "window_size": 2,
                    "global_attn_indexes": [1],
                    "downsample_channels": [32, 64],
                    "mlp_dim": 96,
                }
            },
        },
    ),
    "deepseek_vl_hybrid": Entry(
        pixels,
        {
            "high_res_vision_config": {
                "image_size": 64,
                "patch_size": 8,
                "output_channels": 16,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 96,
            }
        },
    ),
    "emu3": Entry(
        sized,
        {
            **zoo.TWEAKS["emu3"],
            "vocabulary_map": {
                "<image>": 3,
                "<|extra_200|>": 5,
                **{f"<|visual token {i:06d}|>": 30 + i for i in range(16)},
            },
            "vq_config": {
                "codebook_size": 16,
                "embed_dim": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "attn_resolutions": [],
                "hidden_size": 32,
            },
        },
    ),
    "fuyu": Entry(patches, {"image_token_id": 3}),
    "gemma4": Entry(
        placed,
        {
            **zoo.TWEAKS["gemma4"],
            "vision_config": {"pooling_kernel_size": 2},
            "audio_config": None,
        },
    ),
    "gemma4_unified": Entry(
        placed, {**zoo.TWEAKS["gemma4_unified"], "vision_config": {"pooling_kernel_size": 1}}
    ),
    "granite4_vision": Entry(
        tiled,
        {
            "image_grid_pinpoints": _PINPOINTS,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0], [-2, 1]],
            "spatial_target_layers": [2, 3, 4, 5],
            "projector_dropout": 0.0,
            "qformer_config": {"encoder_hidden_size": 64},
            "text_config": {"num_hidden_layers": 6},
        },
    ),
    "idefics2": Entry(
        rows,
        {
            "perceiver_config": {
                "resampler_n_latents": 5,
                "resampler_n_heads": 4,
                "resampler_head_dim": 16,
                "num_key_value_heads": 2,
            }
        },
        by_row=("pixel_values",),
    ),
    "idefics3": Entry(rows, {"scale_factor": 2}, by_row=("pixel_values",)),
    "instructblipvideo": Entry(instructed, {"num_query_tokens": 3}, (VIDEO,)),
    "lfm2_vl": Entry(
        naflex,
        {
            "text_config": zoo.TWEAKS["lfm2"],
            "vision_config": {"num_patches": 16},
            "projector_hidden_size": 64,
        },
    ),
    "lighton_ocr": Entry(sized),
    "llama4": Entry(
        pixels,
        {
            **zoo.TWEAKS["llama4"],
            "vision_config": {
                "intermediate_size": 256,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            },
        },
    ),
    "llava_next": Entry(tiled, {"image_grid_pinpoints": _PINPOINTS}),
    "llava_next_video": Entry(tiled, {"image_grid_pinpoints": _PINPOINTS}, _FILM),
    "llava_onevision": Entry(tiled, {"image_grid_pinpoints": _PINPOINTS}, _FILM),
    "mistral3": Entry(sized),
    "mistral4": Entry(nothing),
    "mllama": Entry(
        tiles,
        {
            **zoo.TWEAKS["mllama"],
            "vision_config": {
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
                "num_global_layers": 1,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 128,
                "image_size": 16,
            },
        },
        by_row=("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
        packs=False,
        extra=cross_mask,
    ),
    "qwen2_5_omni_thinker": Entry(
        grids,
        {
            "vision_config": {"window_size": 32, "fullatt_block_indexes": [1]},
            "audio_config": {
                **_EARS,
                "output_dim": 64,
                "n_window": 4,
                "n_window_infer": 8,
                "downsample_hidden_size": 16,
            },
            "vision_start_token_id": 8,
            "vision_end_token_id": 9,
            "position_id_per_seconds": 2,
            **_TEXT_ROPE,
        },
        _FILM,
        masks=True,
    ),
    "qwen3_omni_moe_thinker": Entry(
        grids,
        {
            "vision_config": {"deepstack_visual_indexes": [0, 1]},
            "audio_config": {
                **_EARS,
                "output_dim": 64,
                "n_window": 4,
                "n_window_infer": 8,
                "downsample_hidden_size": 16,
            },
            "vision_start_token_id": 8,
            "vision_end_token_id": 9,
            "position_id_per_seconds": 2,
            **_TEXT_ROPE,
        },
        _FILM,
        masks=True,
    ),
    "smolvlm": Entry(rows, {"scale_factor": 2}, by_row=("pixel_values",)),
    "step3p7": Entry(
        crops,
        {
            "text_config": {"layer_types": zoo.BOTH, "sliding_window": 13},
            "vision_config": {"image_size": 64},
        },
    ),
    "unlimited_ocr": Entry(
        crops,
        {
            "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
            "vision_config": {
                "sam_config": {
                    "image_size": 64,
                    "patch_size": 8,
                    "output_channels": 16,
                    "window_size": 2,
                    "global_attn_indexes": [1],
                    "downsample_channels": [32, 64],
                    "mlp_dim": 96,
                }
            },
        },
        extra=listed,
    ),
    "video_llava": Entry(clips, {}, _FILM),
    "aria": Entry(pixels, {"projector_patch_to_query_dict": {16: 6}}),
    "aya_vision": Entry(pixels),
    "blip-2": Entry(pixels, {"num_query_tokens": 5}),
    "cohere2_vision": Entry(pixels, {"alignment_intermediate_size": 96}),
    "cohere_compass": _grids(
        {"vision_config": _DEEP, "text_config": zoo.TWEAKS["cohere_compass_text"]}
    ),
    "cosmos3_edge": _grids(_TEXT_ROPE),
    "cosmos3_omni": _grids({"vision_config": _DEEP, **_TEXT_ROPE}),
    "deepseek_vl": Entry(pixels),
    "ernie4_5_vl_moe": _grids(
        {"text_config": {"moe_intermediate_size": [32, 32], "rope_parameters": _ROPE}}
    ),
    "exaone4_5": _grids({"vision_config": _WINDOWS}),
    "gemma3": Entry(pixels, zoo.TWEAKS["gemma3"]),
    # Images are longer than the window.
    "gemma3:wide": Entry(pixels, {**zoo.TWEAKS["gemma3"], "mm_tokens_per_image": 16}),
    "glm46v": _grids(_TEXT_ROPE, (IMAGE,)),
    "glm4v": _grids(_TEXT_ROPE, (IMAGE,)),
    "glm4v_moe": _grids(
        {
            "text_config": {
                "rope_parameters": {
                    **_ROPE,
                    "mrope_section": [2, 1, 1],
                    "partial_rotary_factor": 0.5,
                }
            }
        },
        (IMAGE,),
    ),
    "glm_ocr": _grids(_TEXT_ROPE, (IMAGE,)),
    "glmga": _grids(_TEXT_ROPE, (IMAGE,)),
    "got_ocr2": Entry(
        pixels, {"vision_config": {**zoo.TWEAKS["got_ocr2"]["vision_config"], "image_size": 64}}
    ),
    "hunyuan_vl": _grids(
        {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}}}, (IMAGE,)
    ),
    "hyperclovax_vision_v2": _grids({"vision_config": _WINDOWS}),
    "instructblip": Entry(instructed, {"num_query_tokens": 5}),
    "internvl": Entry(pixels),
    "janus": Entry(
        pixels,
        {
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_embeddings": 16,
                "embed_dim": 8,
                "latent_channels": 32,
                "num_res_blocks": 1,
            }
        },
    ),
    "kimi_k25": _grids(
        {"projection_hidden_size": 64, "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8}},
        (IMAGE,),
    ),
    "llava": Entry(pixels),
    "minimax_m3_vl": _grids({"text_config": zoo.TWEAKS["minimax_m3_vl_text"]}),
    "muse_glimmer": _grids(
        {
            "out_hidden_size": 256,
            "projector_hidden_size": 96,
            "vision_config": {
                "pos_emb_height": 8,
                "pos_emb_width": 8,
                "max_position_embeddings": 64,
                "window_size": 32,
            },
        }
    ),
    "ovis2": Entry(pixels),
    "paddleocr_vl": _grids(_TEXT_ROPE, (IMAGE,)),
    "paligemma": Entry(pixels, types="prefix"),
    "phi4_multimodal": Entry(cropped, zoo.TWEAKS["phi4_multimodal"]),
    "pp_chart2table": Entry(
        pixels, {"vision_config": {**zoo.TWEAKS["got_ocr2"]["vision_config"], "image_size": 64}}
    ),
    "qianfan_ocr": Entry(pixels),
    "qwen2_5_vl": _grids({"vision_config": _WINDOWS, **_TEXT_ROPE}),
    "qwen2_vl": _grids({"vision_config": {"embed_dim": 64, "mlp_ratio": 1}, **_TEXT_ROPE}),
    "qwen3_5": _grids({"text_config": zoo.QWEN3_5}),
    "qwen3_5_moe": _grids({"text_config": zoo.QWEN3_5}),
    "qwen3_vl": _grids({"vision_config": _DEEP, **_TEXT_ROPE}),
    "qwen3_vl_moe": _grids({"vision_config": _DEEP, **_TEXT_ROPE}),
    "shieldgemma2": Entry(pixels, zoo.TWEAKS["gemma3"]),
    "video_llama_3": _grids(),
    "vipllava": Entry(pixels, {"vision_feature_layers": [-2, -1]}),
}

_WITH_AUX = zoo.words(
    "ernie4_5_vl_moe glm4v_moe minimax_m3_vl qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl_moe"
)


def _aux(entry: Entry) -> Entry:
    text = {**entry.changes.get("text_config", {}), **zoo.AUX}
    return dataclasses.replace(entry, changes={**entry.changes, "text_config": text})


ENTRIES: Mapping[str, Entry] = {
    **_TYPES,
    # With the loss that balances experts.
    **{f"{name}:aux": _aux(_TYPES[name]) for name in _WITH_AUX},
}


# ---------------------------------------------------------------- models


def names() -> dict[str, str]:
    """Return every multimodal model type of transformers and its class."""
    found = dict(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    for name in ("audioflamingo3", "musicflamingo"):
        found[name] = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(
            name, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(name)
        )
    return found


def _sized(cls: type[PreTrainedConfig], changes: Mapping[str, Any]) -> dict[str, Any]:
    fields = {x.name: x.default for x in dataclasses.fields(cls)}
    values = {k: v for k, v in _SIZES.items() if k in fields}
    values.update(changes)
    with zoo.quiet():
        for name, part in cls.sub_configs.items():
            given = dict(values.get(name) or {})
            if "model_type" in given:
                continue
            default = getattr(cls(), name) if part is AutoConfig else None
            kind = type(default) if part is AutoConfig else part
            if kind is not type(None):
                values[name] = _sized(kind, given)
    return values


def build_config(name: str) -> PreTrainedConfig:
    """Build the tiny config of a model type, or of a variant of it, such as ``gemma3:wide``."""
    cls = CONFIG_MAPPING[name.partition(":")[0]]
    with zoo.quiet():
        return zoo.tiny(cls, _sized(cls, ENTRIES[name].changes))


def build_model(
    name: str, *, dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> PreTrainedModel:
    """Build a tiny model, in evaluation mode, the same in every process."""
    cls = getattr(transformers, names()[name.partition(":")[0]])
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the default one has no float64
    with zoo.quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls._from_config(build_config(name), **options)
    zoo.redraw(model, 0)
    return model.eval()


def takes_text(name: str) -> bool:
    """Return whether the stock model can be called without media."""
    forward = inspect.signature(getattr(transformers, names()[name]).forward)
    needed = [x for x in forward.parameters.values() if x.default is x.empty]
    return "pixel_values" not in [x.name for x in needed]


# ---------------------------------------------------------------- batches

Document = list[int | tuple[int, int]]
"""Numbers of text tokens, and (kind, size) of media between them; 0 for as many as fit."""


def _rows(kind: str, kinds: tuple[int, ...]) -> list[list[Document]]:
    """Return the documents of each row."""
    first, last = kinds[0], kinds[-1]
    if kind == "text":
        return [[[0]], [[0]]]
    if kind == "packed":
        return [
            [[5, (first, 0), 6], [9], [3, (first, 1), 4, (last, 0), 0]],
            [[12], [4, (last, 1), 8], [0]],
        ]
    # Items that differ, across the borders of 2, 3 or 4 ranks; the second row may hold none.
    return [[[14, (first, 0), 5, (last, 1), 0]], [[0]] if kind == "left" else [[20, (last, 0), 0]]]


@dataclass
class _Row:
    tokens: list[int]
    kinds: list[int]
    prefix: list[int]
    media: list[dict[str, Tensor]]


@lru_cache(maxsize=16)
def _documents(name: str, kind: str, length: int, seed: int) -> list[list[_Row]]:
    """Draw the documents of a batch: of each row, of ``length`` tokens together."""
    entry, model = ENTRIES[name], build_model(name)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.get_text_config().vocab_size)

    def text(count: int) -> list[int]:
        return torch.randint(FIRST_TEXT, vocabulary, (count,), generator=generator).tolist()

    rows = []
    for documents in _rows(kind, entry.kinds):
        drawn: list[_Row] = []
        total = 0
        for document in documents:
            row = _Row([], [], [], [])
            for part in document:
                if isinstance(part, tuple):
                    item = entry.style(model, *part, generator)
                    row.tokens += item.tokens
                    row.kinds += item.kinds
                    row.media.append(item.media)
                    row.prefix = [0] * len(row.tokens)
                else:
                    count = part or max(2, length - total - len(row.tokens))
                    row.tokens += text(count)
                    row.kinds += [0] * count
            row.prefix += [1] * (len(row.tokens) - len(row.prefix))
            drawn.append(row)
            total += len(row.tokens)
        rows.append(drawn)
    longest = max(sum(len(d.tokens) for d in row) for row in rows)
    for row in rows:  # all rows are equally long: the last document gets more text
        more = longest - sum(len(d.tokens) for d in row)
        row[-1].tokens += text(more)
        row[-1].kinds += [0] * more
        row[-1].prefix += [1] * more
    return rows


def _media(entry: Entry, rows: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Join the tensors of items: one after another, or those of each sample together."""
    keys = dict.fromkeys(key for row in rows for item in row for key in item)
    joined = {}
    for key in keys:
        parts = [[item[key] for item in row if key in item] for row in rows]
        if key in entry.by_row:
            most = max(map(len, parts))
            zero = torch.zeros_like(next(x for part in parts for x in part))
            joined[key] = torch.stack(
                [torch.cat(part + [zero] * (most - len(part))) for part in parts]
            )
        else:
            flat = [x for part in parts for x in part]
            joined[key] = torch.cat(_padded_alike(flat))
    return joined


def _padded_alike(parts: list[Tensor]) -> list[Tensor]:
    """Pad tensors at the end of dim 1, where they differ (crops of images)."""
    if len({x.shape[1:] for x in parts}) == 1:
        return parts
    most = max(x.shape[1] for x in parts)
    return [torch.cat([x, x.new_zeros(len(x), most - x.shape[1], *x.shape[2:])], 1) for x in parts]


def build_batches(
    name: str, kind: str, *, dtype: torch.dtype = torch.float32, length: int = 61, seed: int = 7
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Build a batch as a user would give it, and what the stock model takes for the same.

    They differ where documents are packed: the stock model gets each as a sample of its own.
    """
    entry, model = ENTRIES[name], build_model(name)
    rows = _documents(name, kind, length, seed)
    joined = [
        _Row(
            [t for d in row for t in d.tokens],
            [t for d in row for t in d.kinds],
            [t for d in row for t in d.prefix],
            [m for d in row for m in d.media],
        )
        for row in rows
    ]
    batch = _collate(entry, model, joined, dtype)
    stock = batch
    if kind == "packed":
        numbers = [[number for number, d in enumerate(row) for _ in d.tokens] for row in rows]
        batch["document_ids"] = torch.tensor(numbers)
        stock = _collate(entry, model, [d for row in rows for d in row], dtype)
    elif kind in ("left", "right"):
        _pad(batch, kind)
    if entry.masks and kind != "packed":
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    if entry.extra is not None:
        batch |= entry.extra(model, batch)
        stock |= entry.extra(model, stock)
    stock = {k: v for k, v in stock.items() if k != "document_ids"}
    stock.setdefault("attention_mask", torch.ones_like(stock["input_ids"]))
    return batch, stock


_PER_TOKEN = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids", "attention_mask")


def _pad(batch: dict[str, Tensor], kind: str) -> None:
    """Add padding to two rows, on one side; the first has less, and some text instead."""
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    widths, text = (3, 9), torch.arange(FIRST_TEXT, FIRST_TEXT + 9)
    more = {"input_ids": text, "labels": text, "attention_mask": torch.ones_like(text)}
    for key in _PER_TOKEN:
        if key not in batch:
            continue
        x = batch[key]
        last = x[0, -1:].expand(len(text)) if key not in more else more[key]
        rows = []
        for row, width in zip(x, widths, strict=True):
            padding = row.new_full((width,), -100 if key == "labels" else 0)
            rest = last[: len(text) - width]
            parts = [padding, row, rest] if kind == "left" else [row, rest, padding]
            rows.append(torch.cat(parts))
        batch[key] = torch.stack(rows)
    # What the last padding token predicts depends on the stock implementation: it sees nothing.
    batch["labels"][:, 1:][batch["attention_mask"].diff(dim=1) == 1] = -100


def _collate(
    entry: Entry, model: PreTrainedModel, rows: list[_Row], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Lay documents out as rows, padded at their end, with what the processor would add."""
    longest = max(len(row.tokens) for row in rows)

    def lay(values: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([x + [fill] * (longest - len(x)) for x in values])

    ids, kinds = lay([r.tokens for r in rows], 0), lay([r.kinds for r in rows], 0)
    inside = lay([[1] * len(r.tokens) for r in rows], 0)
    labels = torch.where((kinds == 0) & (inside == 1) & (ids % 5 != 0), ids, -100)
    batch = {"input_ids": ids, "labels": labels}
    if not bool(inside.all()):
        batch["attention_mask"] = inside
    parameters = inspect.signature(type(model).forward).parameters
    if "mm_token_type_ids" in parameters:
        batch["mm_token_type_ids"] = kinds
    if "token_type_ids" in parameters:
        prefix = lay([r.prefix for r in rows], 0)
        batch["token_type_ids"] = prefix if entry.types == "prefix" else (kinds == IMAGE).long()
    batch |= _media(entry, [r.media for r in rows])
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
