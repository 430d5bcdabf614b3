# SPDX-License-Identifier: Apache-2.0
"""The table of architectures that are supported or refused, for `enable()`, tests and docs.

Supported are models that mix tokens in registered attention, and those whose other mixers
(convolutions, recurrences, attention that is written out) have a replacement in
`hf_patches.mixers`. For the others the table says where else they mix tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_patches.forward import HeadKind

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
    """

    features: str = ""
    caveat: str = ""
    refusal: str = ""
    scores: HeadKind = "next token"
    mixers: str = ""

    @property
    def is_served(self) -> bool:
        """Return whether such models can be enabled."""
        return not self.refusal


def _plain(names: str) -> Iterator[tuple[str, Architecture]]:
    return ((name, Architecture()) for name in names.split())


def _with(features: str, names: str, **known: str) -> Iterator[tuple[str, Architecture]]:
    return ((name, Architecture(features, **known)) for name in names.split())  # type: ignore[arg-type]


def _refused(reason: str, names: str) -> Iterator[tuple[str, Architecture]]:
    return ((name, Architecture(refusal=reason)) for name in names.split())


def _whole(layers: str) -> str:
    return f"its {layers} layers are computed on full sequences on every rank"


_NOT_SHIFTED: Final = "labels are those of the same token: the model does not shift them"

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
            "codegen gpt_neox_japanese gptj openai-gpt",
            mixers="written",
        ),
        *_with("attention written out, local windows", "gpt_neo", mixers="written"),
        *_with("attention written out, ALiBi", "bloom mpt", mixers="written"),
        *_with("attention written out, RoPE or ALiBi", "falcon", mixers="written"),
        *_with(
            "attention written out",
            "big_bird megatron-bert rembert roformer xglm",
            mixers="keys",
        ),
        (
            "xlm",
            Architecture("attention written out", _NOT_SHIFTED, scores="same token", mixers="keys"),
        ),
        *_with(
            "attention written out, table of positions",
            "mvp trocr",
            caveat=_NOT_SHIFTED,
            scores="same token",
            mixers="keys",
        ),
        (
            "xlnet",
            Architecture(
                "both directions, bias by distance",
                _NOT_SHIFTED,
                scores="same token",
                mixers="relative",
            ),
        ),
        (
            "cpmant",
            Architecture(
                "both directions, prompt, bias by distance",
                f"{_NOT_SHIFTED}; one document per sequence",
                scores="same token",
                mixers="relative",
            ),
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
            mixers="whole",
        ),
        *_with(
            "recurrent layers, sliding window",
            "recurrent_gemma",
            caveat=_whole("recurrent"),
            mixers="whole",
        ),
        *_with("recurrent layers", "rwkv xlstm", caveat=_whole("recurrent"), mixers="whole"),
        *_with("convolutions of queries, keys and values, sliding window", "zaya", mixers="whole"),
        *_with(
            "convolutions, bias by position, sliding window",
            "inkling_text",
            caveat=_whole("attention"),
            mixers="whole",
        ),
        *_with(
            "compressed keys, indexer, sliding window, sinks",
            "deepseek_v4",
            caveat=_whole("attention"),
            mixers="whole",
        ),
        *_with(
            "gated delta net, indexer, n-gram embeddings",
            "qwen4_exp qwen4_exp_text",
            caveat=_whole("linear-attention and attention"),
            mixers="whole",
        ),
        *_refused("it groups bytes into patches along the row", "blt"),
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


def architecture_of(model: PreTrainedModel) -> Architecture | None:
    """Return the entry of a model's type; None for an unknown type."""
    return ARCHITECTURES.get(model.config.model_type)


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
    for owner in type(model).__mro__:
        if owner.__name__ in _heads():
            kind = _heads()[owner.__name__]
            known = architecture_of(model)
            return known.scores if kind == "next token" and known is not None else kind
    return None
