# SPDX-License-Identifier: Apache-2.0
"""What differs between multimodal models by type: where they become sharded, and by which names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Literal

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

Unit = Literal["", "items", "grids", "frames"]
"""What one rank computes of the media of a batch, as a whole.

Entries of dim 0 (``items``), images and videos as patches in one dim with a grid of their numbers
(``grids``), or the frames of such videos, where a tower does not attend between them (``frames``).
Empty where every rank computes all media.
"""


@dataclass(frozen=True)
class Media:
    """How media and text meet in the models of one type.

    Args:
        seam: where the model becomes sharded: at its text ``decoder``, or at each of the
            ``layers`` of a decoder that merges media by itself.
        decoder: path of the decoder; found by `find_decoder` if empty.
        dims: sequence dims of arguments of the decoder or its layers, besides `seam.DIMS`.
        cross: names of the classes of attention to media, whose keys every rank holds.
        first_position: where the model around the decoder starts to count positions; None if it
            leaves counting to the decoder.
        drops_labels: whether the stock loss ignores labels of padding.
        packing: why packed documents are refused; empty if they are not.
        unit: how media are shared among ranks.
        merges_shards: whether the model around the decoder gets this rank's tokens and features,
            and full sequences for 3-D positions only.
    """

    seam: Literal["decoder", "layers"] = "decoder"
    decoder: str = ""
    dims: Mapping[str, int | None] = field(default_factory=dict)
    cross: tuple[str, ...] = ()
    first_position: int | None = None
    drops_labels: bool = False
    packing: str = ""
    unit: Unit = ""
    merges_shards: bool = False


UNITS: Final[Mapping[Unit, str]] = {
    "items": (
        "aria audioflamingo3 aya_vision blip-2 cohere2_vision deepseek_vl deepseek_vl_hybrid "
        "fun_asr_nano fuyu gemma3 gemma4 gemma4_unified glmasr got_ocr2 granite4_vision "
        "granite_speech granite_speech_plus instructblip instructblipvideo internvl janus lfm2_vl "
        "lighton_ocr llama4 llava llava_next llava_next_video llava_onevision mistral3 "
        "moss_transcribe_diarize paligemma pp_chart2table qianfan_ocr qwen3_asr shieldgemma2 "
        "video_llava vipllava voxtral"
    ),
    "grids": (
        "ernie4_5_vl_moe glm46v glm4v glm4v_moe glm_ocr glmga hunyuan_vl kimi_k25 "
        "paddleocr_vl video_llama_3"
    ),
    "frames": (
        "cohere_compass cosmos3_edge cosmos3_omni exaone4_5 hyperclovax_vision_v2 "
        "muse_glimmer qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe "
        "qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe"
    ),
}
"""Types whose media are shared, by unit."""

MERGE_SHARDS: Final = "qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe"
"""Types with `Media.merges_shards`: their sequences may be longer than a rank can embed."""


def with_unit(name: str, media: Media) -> Media:
    """Return an entry with what the tables above say about a type."""
    units = (unit for unit, names in UNITS.items() if name in names.split())
    unit: Unit = next(units, "")
    return replace(media, unit=unit, merges_shards=name in MERGE_SHARDS.split())


@lru_cache(maxsize=1)
def _classes() -> frozenset[str]:
    """Return the names of the classes that take media besides text."""
    names = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    names |= set(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values())
    names |= {"AudioFlamingo3ForConditionalGeneration", "MusicFlamingoForConditionalGeneration"}
    return frozenset(names)


def is_multimodal(model: PreTrainedModel) -> bool:
    """Return whether the class of a model takes media besides text."""
    return any(owner.__name__ in _classes() for owner in type(model).__mro__)


_INSIDE = ("model", "decoder", "language_model", "text_model", "transformer")


def find_decoder(model: PreTrainedModel, media: Media) -> str:
    """Return the path of the text decoder: the innermost model that computes hidden states."""
    if media.decoder:
        return media.decoder
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    inside = True
    while inside:
        children = (getattr(decoder, name, None) for name in _INSIDE)
        inner = next((x for x in children if isinstance(x, PreTrainedModel)), None)
        inside = inner is not None
        decoder = inner if inner is not None else decoder
    paths: dict[object, str] = {module: name for name, module in model.named_modules()}
    return paths[decoder]
