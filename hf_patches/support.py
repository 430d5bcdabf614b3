# SPDX-License-Identifier: Apache-2.0
"""The table of architectures that are supported or refused, for `enable()`, tests and docs.

Supported are models that mix tokens in registered attention, and those whose other mixers
(convolutions, recurrences, attention that is written out) have a replacement in
`hf_patches.mixers`. For the others the table says where else they mix tokens. A type that it does
not name is refused, unless the user allows it and `verify` has compared it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_patches.model.forward import HeadKind
from hf_patches.multimodal.table import Media, is_multimodal, with_unit

LIBRARIES: Final = {"torch", "transformers", "peft", "bitsandbytes", "torchao", "liger_kernel"}
"""Their layers, kernels and quantized layers among them, work token by token."""


@dataclass(frozen=True)
class Architecture:
    """An entry of the table: the models of one type.

    Args:
        features: of its attention, besides causal masks.
        caveat: what to know before using it.
        refusal: why it cannot run under context parallelism; empty if it can.
        scores: the token that a label of its language-model head belongs to.
        mixers: how its layers mix tokens other than by registered attention: names of
            `hf_patches.mixers.INSTALLERS`, separated by spaces.
        media: how media and text meet; None for models of text.
    """

    features: str = ""
    caveat: str = ""
    refusal: str = ""
    scores: HeadKind = "next token"
    mixers: str = ""
    media: Media | None = None

    @property
    def is_served(self) -> bool:
        """Return whether such models can be enabled."""
        return not self.refusal

    @property
    def is_replicated(self) -> bool:
        """Return whether layers of such models run on full sequences on every rank."""
        return "replicated" in self.mixers


def _plain(names: str) -> Iterator[tuple[str, Architecture]]:
    return ((name, Architecture()) for name in names.split())


def _with(features: str, names: str, **known: str) -> Iterator[tuple[str, Architecture]]:
    return ((name, Architecture(features, **known)) for name in names.split())  # type: ignore[arg-type]


def _refused(reason: str, names: str) -> Iterator[tuple[str, Architecture]]:
    return ((name, Architecture(refusal=reason)) for name in names.split())


def _whole(layers: str) -> str:
    return f"its {layers} layers are computed on full sequences on every rank"


_NOT_SHIFTED: Final = "labels are those of the same token: the model does not shift them"

_REPLICATED: Final = "at most 4,096 positions: the model runs on full sequences on every rank"

ARCHITECTURES: Final[Mapping[str, Architecture]] = dict(
    [
        *_plain(
            "apertus arcee aria_text bert bert-generation biogpt bitnet cohere ctrl dots1 electra "
            "emu3 emu3_text_model ernie ernie4_5 fuyu gemma glm glm4 glm4_moe got_ocr2 gpt-sw3 "
            "gpt2 gpt_bigcode gpt_neox granite helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
            "hyperclovax jais2 llama ministral3 moshi moss_transcribe_diarize nanochat nemotron "
            "olmo olmo2 opt persimmon phi phi3 phi4_multimodal qwen2 qwen3 roc_bert seed_oss "
            "smollm3 solar_open stablelm starcoder2"
        ),
        *_with(
            "mixture of experts",
            "dbrx ernie4_5_moe flex_olmo granitemoe granitemoeshared jetmoe minimax_m2 mixtral "
            "olmoe phimoe qwen2_moe qwen3_moe",
        ),
        *_with(
            "positions counted from the padding token",
            "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod",
        ),
        *_with(
            "table of positions",
            "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart",
            caveat=_NOT_SHIFTED,
            scores="same token",
        ),
        ("whisper", Architecture("table of positions", _NOT_SHIFTED, scores="same token")),
        *_with(
            "sliding window",
            "afmoe beam cohere2 cohere2_moe cohere_compass_text cwm exaone4 exaone_moe gemma3 "
            "gemma3_text kolibri1 laguna mellum ministral mistral modernbert-decoder olmo3",
        ),
        *_with("sliding window, sinks", "flint gpt_oss granite_swa granitemoe_swa"),
        ("mimo_v2_flash", Architecture("sliding window, sinks, value dim of its own")),
        *_with("sliding window, softcap", "gemma2 vaultgemma"),
        *_with(
            "sliding window, keys shared between layers",
            "gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
        ),
        *_with("chunks, temperature by position", "llama4 llama4_text"),
        *_with(
            "latent attention (MLA)",
            "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 youtu",
        ),
        ("diffllama", Architecture("differential attention")),
        *_with("cross-attention layers", "mllama mllama_text_model", caveat="text only"),
        ("hrm_text", Architecture("layers used several times")),
        *_with(
            "attention written out",
            "codegen gpt_neox_japanese gptj megatron-bert rembert xglm",
            mixers="keys",
        ),
        *_with("attention written out, ALiBi", "bloom mpt", mixers="keys"),
        *_with("attention written out, RoPE or ALiBi", "falcon", mixers="keys"),
        *_with(
            "replicated",
            "big_bird gpt_neo openai-gpt roformer",
            caveat=_REPLICATED,
            mixers="replicated-model",
        ),
        *_with(
            "replicated",
            "xlm xlnet",
            caveat=f"{_REPLICATED}; {_NOT_SHIFTED}",
            scores="same token",
            mixers="replicated-model",
        ),
        *_with(
            "replicated, prompt",
            "cpmant",
            caveat=f"{_REPLICATED}; {_NOT_SHIFTED}; one document per sequence",
            scores="same token",
            mixers="replicated-model",
        ),
        *_with(
            "attention written out, table of positions",
            "mvp trocr",
            caveat=_NOT_SHIFTED,
            scores="same token",
            mixers="keys",
        ),
        *_with(
            "latent attention (MLA), keys chosen by an indexer",
            "axk2 deepseek_v32 glm_moe_dsa hy_v4",
            mixers="keys",
        ),
        (
            "minimax_m3_vl_text",
            Architecture(
                "blocks of keys chosen by an indexer",
                "padding on the right only",
                mixers="keys block-indexer",
            ),
        ),
        ("doge", Architecture("masks computed from values", mixers="keys")),
        *_with("both directions, local and global windows", "modernbert"),
        *_with("both directions", "albert distilbert eurobert nomic_bert"),
        *_with("short convolutions", "lfm2 lfm2_moe", mixers="convolution"),
        *_with(
            "gated delta net",
            "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next",
            mixers="gated-delta-net",
        ),
        *_with(
            "delta net, latent attention (MLA)",
            "bailing_hybrid kimi_linear",
            mixers="kimi-delta-attention",
        ),
        *_with(
            "state-space layers (Mamba-2)",
            "bamba falcon_h1 granitemoehybrid mamba2 nemotron_h zamba2",
            mixers="mamba-2",
        ),
        *_with("lightning attention", "minimax", mixers="lightning-attention"),
        *_with(
            "state-space layers (Mamba)",
            "falcon_mamba jamba mamba zamba",
            caveat=_whole("Mamba"),
            mixers="replicated",
        ),
        *_with(
            "recurrent layers, sliding window",
            "recurrent_gemma",
            caveat=_whole("recurrent"),
            mixers="replicated",
        ),
        *_with("recurrent layers", "rwkv xlstm", caveat=_whole("recurrent"), mixers="replicated"),
        *_with("convolutions of queries, keys and values, sliding window", "zaya", mixers="halo"),
        *_with(
            "convolutions, bias by position, sliding window",
            "inkling_text",
            caveat=_whole("attention"),
            mixers="replicated",
        ),
        *_with(
            "compressed keys, indexer, sliding window, sinks",
            "deepseek_v4",
            caveat=_whole("attention"),
            mixers="replicated",
        ),
        *_with(
            "gated delta net, indexer, n-gram embeddings",
            "qwen4_exp qwen4_exp_text",
            caveat=_whole("linear-attention and attention"),
            mixers="replicated",
        ),
        *_refused("it groups bytes into patches along the sequence", "blt"),
        *_refused("its loss needs the pixels of an image before the text", "git"),
        *_refused(
            "its attention is written out and does not go through AttentionInterface",
            "deberta deberta-v2 mpnet prophetnet reformer",
        ),
        *_refused(
            "it predicts several streams of codes with a loss of its own",
            "musicgen musicgen_decoder musicgen_melody musicgen_melody_decoder",
        ),
        *_refused(
            "it has an encoder and a decoder: two sequences, and attention between them",
            "fsmt led longt5 m2m_100 mt5 nllb-moe pegasus_x switch_transformers t5 t5gemma "
            "t5gemma2 udop umt5",
        ),
        *_refused(
            "it needs the keys of another model, and has no loss",
            "gemma4_assistant gemma4_unified_assistant",
        ),
    ]
)
"""Entries by the model type of the config."""


def _media(
    features: str, names: str, media: Media | None = None, caveat: str = "", mixers: str = ""
) -> Iterator[tuple[str, Architecture]]:
    for name in names.split():
        entry = with_unit(name, Media() if media is None else media)
        yield name, Architecture(features, caveat, mixers=mixers, media=entry)


MULTIMODAL: Final[Mapping[str, Architecture]] = dict(
    [
        *_media(
            "images",
            "aria aya_vision blip-2 cohere2_vision deepseek_ocr2 deepseek_vl deepseek_vl_hybrid "
            "emu3 got_ocr2 idefics2 idefics3 instructblip internvl janus lighton_ocr llava "
            "llava_next mistral3 ovis2 pp_chart2table qianfan_ocr smolvlm step3p7 "
            "unlimited_ocr vipllava",
        ),
        *_media("images", "kimi_k25", caveat="video was not compared"),
        *_media("images", "fuyu", Media(first_position=0)),
        *_media("images, chunks, temperature by position", "llama4"),
        *_media("images, short convolutions", "lfm2_vl", mixers="convolution"),
        *_media(
            "images, video",
            "exaone4_5 hyperclovax_vision_v2 llava_next_video llava_onevision muse_glimmer "
            "video_llama_3 video_llava",
        ),
        *_media("video", "instructblipvideo"),
        *_media(
            "images, video, blocks of keys chosen by an indexer",
            "minimax_m3_vl",
            caveat="padding on the right only",
            mixers="keys block-indexer",
        ),
        *_media(
            "audio",
            "audioflamingo3 fun_asr_nano glmasr moss_transcribe_diarize musicflamingo qwen3_asr "
            "voxtral",
        ),
        *_media(
            "audio", "granite_speech granite_speech_plus qwen2_audio", Media(drops_labels=True)
        ),
        *_media("images, video, 3-D positions", "cosmos3_edge ernie4_5_vl_moe qwen2_5_vl qwen2_vl"),
        *_media("images, 3-D positions", "hunyuan_vl paddleocr_vl"),
        *_media(
            "images, 3-D positions",
            "glm46v glm4v glm4v_moe glm_ocr glmga",
            caveat="video was not compared",
        ),
        *_media(
            "images, video, 3-D positions",
            "qwen2_5_omni_thinker",
            caveat="audio was not compared",
        ),
        *_media(
            "images, video, 3-D positions, gated delta net",
            "qwen3_5 qwen3_5_moe",
            mixers="gated-delta-net",
        ),
        *_media(
            "images, video, 3-D positions, features added in layers",
            "cohere_compass cosmos3_omni qwen3_vl qwen3_vl_moe",
        ),
        *_media(
            "images, video, 3-D positions, features added in layers",
            "qwen3_omni_moe_thinker",
            caveat="audio was not compared",
        ),
        *_media("images, features added in layers", "granite4_vision"),
        *_media("images in both directions, sliding window", "gemma3 shieldgemma2"),
        *_media(
            "images in both directions, sliding window, keys shared between layers",
            "gemma4 gemma4_unified",
            caveat="video and audio were not compared",
        ),
        *_media("prefix in both directions", "paligemma", Media(first_position=1)),
        *_media(
            "cross-attention to images",
            "mllama",
            Media(
                cross=("MllamaTextCrossAttention",),
                packing="its images belong to samples, not to documents",
            ),
        ),
        *_media(
            "images, merged in the decoder", "chameleon", Media(seam="layers", first_position=0)
        ),
        *_media(
            "images, merged in the decoder",
            "phi4_multimodal",
            Media(seam="layers", first_position=0),
            caveat="audio was not compared",
        ),
        *_media("none: a model of text", "mistral4"),
        *_refused(
            "its text decoder has cross-attention blocks between its layers", "evolla idefics"
        ),
        *_refused("its text decoder does not take its attention from AttentionInterface", "blip"),
        *_refused(
            "it has an encoder and a decoder: two sequences, and attention between them",
            "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder",
        ),
        *_refused("its loss needs the pixels of an image before the text", "git"),
        *_refused(
            "all images of a sample are one block of tokens that see each other, with text between",
            "molmo2",
        ),
        *_refused("its loss is that of a flow of actions, not of tokens", "pi0"),
        *_refused("it has no loss to train with", "diffusion_gemma"),
        *_refused("it predicts streams of codes beside the text", "kyutai_speech_to_text"),
        *_refused(
            "the model that generates speech has no forward to train; use its thinker",
            "qwen2_5_omni qwen3_omni_moe",
        ),
        *_refused(
            "its layers that are computed on full sequences do not take masks of a model with "
            "media yet; its text model is supported",
            "qwen4_exp",
        ),
        *_refused(
            "it has not been compared with the stock model yet",
            "fast_vlm gemma3n glm5_next inkling_mm_model kosmos-2 kosmos-2.5 minicpm_ocr "
            "minicpmv4_6 minicpmv4_7 mistral_large4 muse_spark nemo_speechlm nemotron_h_omni "
            "perception_lm vibevoice_asr voxtral_realtime",
        ),
    ]
)
"""Entries of models that take media besides text, by the model type of the config."""


def architecture_of(model: PreTrainedModel) -> Architecture | None:
    """Return the entry of a model's type; None for an unknown type."""
    kind = model.config.model_type
    if is_multimodal(model) and kind in MULTIMODAL:
        return MULTIMODAL[kind]
    return ARCHITECTURES.get(kind)


@lru_cache(maxsize=1)
def _heads() -> Mapping[str, HeadKind]:
    """Return what a label belongs to, by class name."""
    kinds: dict[str, HeadKind] = {}
    for mapping, kind in (
        ("MODEL_MAPPING_NAMES", "none"),
        ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "next token"),
        ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "same token"),
        ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "same token"),
        ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "sequence"),
        ("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", "sequence"),
    ):
        for names in getattr(modeling_auto, mapping).values():
            for name in (names,) if isinstance(names, str) else names:
                kinds.setdefault(name, kind)  # type: ignore[arg-type]
    return kinds


def head_of(model: PreTrainedModel) -> HeadKind | None:
    """Return what a label of a model belongs to; None if its class is unknown."""
    if is_multimodal(model):
        known = architecture_of(model)
        return "next token" if known is None else known.scores
    for owner in type(model).__mro__:
        if owner.__name__ in _heads():
            kind = _heads()[owner.__name__]
            known = architecture_of(model)
            return known.scores if kind == "next token" and known is not None else kind
    return None
