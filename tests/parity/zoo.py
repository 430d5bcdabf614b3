# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every causal-LM architecture of the installed transformers.

A parity test runs one of these with and without context parallelism, and compares the loss and
the gradient of every parameter. Freshly initialised models would hide most faults: their attention
is almost uniform, and many of their parameters are zero. So the parameters are drawn again here.
"""

import copy
import dataclasses
import logging
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

VOCAB_SIZE = 97
# The tokens below are padding, begin, end, images and the like: a batch must not hold them.
FIRST_TOKEN = 5
WINDOW, CHUNK = 13, 24

_HIDDEN, _HEADS, _KV_HEADS, _LAYERS, _EXPERTS = 64, 4, 2, 2, 4


def words(names: str) -> list[str]:
    return names.split()


# Every field that a config class has, of those below, gets the value before it.
SIZES: dict[str, Any] = {
    field: value
    for value, fields in [
        (_HIDDEN, "hidden_size d_model n_embd emb_dim embedding_size embedding_dim"),
        (_HIDDEN, "dim word_embed_proj_dim lru_width hidden_size_global output_proj_dims"),
        (_HIDDEN, "position_embedding_size mm_embed_dim mm_posemb_size audio_embed_dim"),
        (48, "input_embedding_size output_embedding_size"),
        (96, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dff n_inner dim_ff"),
        (96, "d_inner feed_forward_size ffn_hidden_size mlp_dim intermediate_size_mlp"),
        (96, "dense_intermediate_size hidden_dim"),
        (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
        (32, "expert_ffn_hidden_size moe_shared_expert_intermediate_size router_hidden_size"),
        (_LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"),
        (_LAYERS, "num_encoder_layers num_decoder_layers depth num_blocks"),
        (_HEADS, "num_attention_heads n_head n_heads num_heads attention_heads"),
        (_HEADS, "encoder_attention_heads decoder_attention_heads"),
        (_HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
        (_KV_HEADS, "num_key_value_heads num_kv_heads kv_n_heads"),
        (16, "head_dim d_head dim_head attention_head_size kv_channels"),
        (VOCAB_SIZE, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
        (256, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
        (256, "context_length model_max_length original_max_position_embeddings"),
        (WINDOW, "sliding_window sliding_window_size attention_window_size window_size"),
        (CHUNK, "attention_chunk_size"),
        (_EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"),
        (1, "n_shared_experts num_shared_experts moe_num_shared_experts"),
        (1, "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers"),
        (1, "moe_layer_start_index moe_layer_end_index"),
        # Scales that should show when someone else computes attention
        (12, "query_pre_attn_scalar"),
        (0.3, "attention_multiplier"),
        (3.0, "attn_logit_softcapping"),
        (4.0, "final_logit_softcapping"),
        (0.8, "logit_scale residual_multiplier"),
        (1.3, "embedding_multiplier logits_scaling"),
        # Latent attention
        (24, "q_lora_rank"),
        (20, "kv_lora_rank"),
        (12, "qk_nope_head_dim"),
        (8, "qk_rope_head_dim"),
        (14, "v_head_dim"),
        (2, "index_n_heads"),
        (16, "index_head_dim"),
        (12, "index_topk"),
        # Recurrent layers
        (8, "state_size ssm_state_size mamba_d_state mamba_n_heads mamba_num_heads mamba_dt_rank"),
        (8, "time_step_rank linear_key_head_dim linear_head_dim"),
        (16, "mamba_d_head mamba_head_dim mamba_chunk_size chunk_size linear_value_head_dim"),
        (2, "linear_num_key_heads"),
        (4, "linear_num_value_heads linear_num_heads"),
        # Towers for images and sound, which a batch of text does not reach
        (32, "image_size crop_size"),
        (8, "patch_size num_mel_bins"),
        # Special tokens
        (None, "pad_token_id"),
        (1, "bos_token_id cls_token_id decoder_start_token_id forced_eos_token_id"),
        (2, "eos_token_id eod_token_id"),
        (3, "image_token_id image_token_index"),
        (4, "video_token_id audio_token_id boi_token_id boi_token_index vision_start_token_id"),
        (4, "eoi_token_id eoi_token_index vision_end_token_id boa_token_id eoa_token_id"),
        (4, "eoa_token_index sep_token_id"),
    ]
    for field in words(fields)
}

BOTH = ["sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_SPARSE = ["dense", "sparse"]
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}

_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": BOTH * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
}
_GEMMA4 = {**_GEMMA3N, "global_head_dim": 32, "pad_token_id": 0}
_LLAMA4 = {
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "floor_scale": 16,  # the temperature changes within a short sequence
}
QWEN3_5 = {"layer_types": _LINEAR, "mlp_only_layers": []}
_QWEN4 = {
    "full_attention_interval": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": 16,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_ENCODERS = words(
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer "
    "rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
)
# They count positions from the padding token on, or their class insists on one.
_PADDED = words(
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod "
    "modernbert modernbert-decoder nomic_bert prophetnet xlm"
)

# The causal model of these is a part of the whole, with a config of its own.
_PARTS = ["musicgen", "musicgen_melody"]

# What a model type needs besides the sizes; a nested mapping is for a part of the config.
# With few heads many keys have a score of 0, and which of them are chosen depends on the length.
_INDEXER = {"index_n_heads": 32}
TWEAKS: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": BOTH},
    "axk1": {"mlp_layer_types": _SPARSE},
    "axk2": _INDEXER,
    "bailing_hybrid": {"layer_types": _LINEAR, "mlp_layer_types": _SPARSE},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"layer_types": BOTH, "mlp_layer_types": _SPARSE},
    "big_bird": {"attention_type": "original_full"},
    "blt": {
        "encoder_hash_byte_group_vocab": 100,
        "num_hidden_layers": 2,
        "patching_threshold": 3.5,
    },
    "codegen": {"rotary_dim": 8},
    "cohere2": {"layer_types": BOTH},
    "cohere2_moe": {"layer_types": BOTH, "mlp_layer_types": _SPARSE},
    "cohere_compass_text": {
        "layer_types": BOTH,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "mrope_section": [3, 3, 2]}
            for kind, theta in zip(BOTH, [10000.0, 500.0], strict=True)
        },
    },
    "cpmant": {"prompt_length": 4},
    "cwm": {"layer_types": BOTH},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 3.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "deepseek_v32": _INDEXER,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
    },
    "doge": {"keep_window_size": 24},
    "emu3": {"text_config": {"pad_token_id": 0}},
    "exaone4": {"layer_types": BOTH},
    "exaone_moe": {"layer_types": BOTH, "mlp_layer_types": _SPARSE},
    "falcon_h1": {"mamba_d_ssm": 128},
    "flint": {"layer_types": BOTH, "mlp_only_layers": [0]},
    "gemma2": {"layer_types": BOTH},
    "gemma3": {"text_config": {"layer_types": BOTH}, "mm_tokens_per_image": 4},
    "gemma3_text": {"layer_types": BOTH},
    "gemma3n_text": {
        **_GEMMA3N,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "glm_moe_dsa": _INDEXER,
    "got_ocr2": {
        "vision_config": {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1]}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_oss": {
        "layer_types": BOTH,
        "rope_parameters": {**_YARN, "truncate": False, "original_max_position_embeddings": 64},
    },
    "gptj": {"rotary_dim": 8},
    "granite_swa": {"layer_types": BOTH, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoe_swa": {"layer_types": BOTH, "layer_rope_theta": [10000.0, 0.0]},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "hy_v4": _INDEXER,
    "hrm_text": {"num_hidden_layers": 1, "L_cycles": 2, "embedding_scale": 1.0},
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": _SPARSE,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "d_rel": 4,
        "rel_extent": 64,
        "logits_mup_width_multiplier": 1.3,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR, "mlp_layer_types": _SPARSE},
    "kolibri1": {"layer_types": BOTH},
    "laguna": {
        "layer_types": BOTH,
        "mlp_layer_types": _SPARSE,
        "num_attention_heads_per_layer": [4, 6],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "marian": {"scale_embedding": True},
    "mellum": {"layer_types": BOTH},
    "mimo_v2_flash": {
        "layer_types": BOTH,
        "mlp_layer_types": _SPARSE,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in zip(BOTH, [10000.0, 500.0], strict=True)
        },
    },
    "minicpm3": {"scale_emb": 1.5, "dim_model_base": 48},
    "minimax": {"block_size": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": _SPARSE,
        "rotary_dim": 8,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "ministral": {"layer_types": BOTH},
    "ministral3": {
        # The scale of a query depends on its position.
        "rope_parameters": {
            **_YARN,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "modernbert-decoder": {"layer_types": BOTH, "local_attention": 2 * WINDOW},
    "musicgen": {"pad_token_id": VOCAB_SIZE},
    "musicgen_melody": {"pad_token_id": VOCAB_SIZE},
    "nemotron_h": {"num_hidden_layers": 4, "n_groups": 2},
    "olmo3": {"layer_types": BOTH},
    "olmo_hybrid": {"layer_types": _LINEAR},
    "pegasus": {"scale_embedding": True},
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        }
    },
    "prophetnet": {"add_cross_attention": False},
    "qwen3_5": {"text_config": QWEN3_5},
    "qwen3_5_moe": {"text_config": QWEN3_5},
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": QWEN3_5,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "concat_input": False,
        "pronunciation_vocab_size": VOCAB_SIZE,
        "pronunciation_embed_dim": _HIDDEN,
        "shape_vocab_size": VOCAB_SIZE,
        "shape_embed_dim": _HIDDEN,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "vaultgemma": {"layer_types": BOTH},
    "xlm": {"causal": True},
    "xlstm": {"qk_dim_factor": 1.0, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "sliding_window": WINDOW,
    },
}


AUX = {"output_router_logits": True, "router_aux_loss_coef": 2.0}
_WITH_AUX = words(
    "deepseek_v4 ernie4_5_moe flex_olmo flint gpt_oss granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared jamba laguna mellum minimax minimax_m2 minimax_m3_vl_text mixtral olmoe "
    "phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text"
)
_CHANGES: dict[str, dict[str, Any]] = {
    "dbrx:aux": {"output_router_logits": True, "ffn_config": {"moe_loss_weight": 2.0}},
    "falcon:alibi": {"alibi": True},
    "gemma3_text:bidirectional": {"use_bidirectional_attention": True},
    "jetmoe:aux": {"output_router_logits": True, "aux_loss_coef": 2.0},
    "llama:bidirectional": {"is_causal": False},
    # The frequencies of these two depend on the length of the whole sequence, from 65 tokens on.
    "llama:dynamic": {
        "max_position_embeddings": 24,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "phi3:longrope": {
        "original_max_position_embeddings": 24,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 24,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
        },
    },
    "llama:linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
    },
    "llama:tied": {"tie_word_embeddings": True},
    "llama:yarn": {"rope_parameters": {**_YARN, "original_max_position_embeddings": 64}},
    "mistral:full": {"sliding_window": None},
    "qwen2:window": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_5_moe:aux": {"text_config": AUX},
    "qwen4_exp:aux": {"text_config": AUX},
    **{f"{name}:aux": AUX for name in _WITH_AUX},
}
# Without the scores of their routers in 5.17, so that an auxiliary loss fails or is zero.
_NO_SCORES = words(
    "dbrx granitemoe granitemoe_swa granitemoehybrid granitemoeshared jetmoe"
    if Version(transformers.__version__) < Version("5.22")
    else ""
)
# What a variant of a model type changes in its config.
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        f"{base}:{variant}": _CHANGES[f"{base}:{variant}"]
        for base, variant in sorted(name.split(":") for name in _CHANGES)
        if base in CONFIG_MAPPING_NAMES and not (variant == "aux" and base in _NO_SCORES)
    }
)

# The class that builds a model with this head, and the model types that have it.
HEADS: Mapping[str, tuple[Any, Mapping[str, Any]]] = MappingProxyType(
    {
        "causal": (
            transformers.AutoModelForCausalLM,
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        ),
        "masked": (
            transformers.AutoModelForMaskedLM,
            modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        ),
        "sequence": (
            transformers.AutoModelForSequenceClassification,
            modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        ),
        "token": (
            transformers.AutoModelForTokenClassification,
            modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        ),
        "question": (
            transformers.AutoModelForQuestionAnswering,
            modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        ),
        "base": (transformers.AutoModel, modeling_auto.MODEL_MAPPING_NAMES),
    }
)
_LABELS = 3
_HEADED = words(
    "albert bert camembert deberta deberta-v2 distilbert electra ernie eurobert gemma gemma2 "
    "gemma3_text gpt2 gpt_neox gpt_oss llama mistral mixtral modernbert modernbert-decoder mpnet "
    "nomic_bert opt phi3 qwen2 qwen3 qwen3_moe roberta smollm3 xlm-roberta"
)

# Causal names of which there is no model to train.
UNBUILDABLE: Mapping[str, str] = MappingProxyType(
    {
        "gemma3n": "its vision tower needs timm; gemma3n_text is the same without it",
        "gemma4_assistant": "a drafter, which reads the keys and values of another model",
        "gemma4_unified_assistant": "a drafter, which reads the keys and values of another model",
    }
)


def causal_names() -> list[str]:
    """Return the model types that the installed transformers trains as causal language models."""
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_newer_than_the_table() -> bool:
    """Return whether transformers is newer than the version whose model types are in the table.

    Types that came since are refused as unknown.
    """
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    (tested,) = re.findall(r"^transformers==(\S+)", constraints, re.MULTILINE)
    return Version(transformers.__version__) > Version(tested)


def needs_transformers(version: str) -> Any:
    """Return a mark of tests of what older versions do not have, or do otherwise."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_older, reason=f"needs transformers {version}")


def head_names(head: str) -> list[str]:
    """Return well-known model types that have this head in the installed transformers."""
    return [name for name in _HEADED if name in HEADS[head][1]]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both; a part of the config that both change gets both changes."""
    parts = [name for name in first.keys() & second.keys() if name.endswith("_config")]
    return {**first, **second, **{name: {**first[name], **second[name]} for name in parts}}


def tiny(cls: type[PreTrainedConfig], changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Build a config of ``cls`` with the sizes above, then ``changes``, also in its parts."""
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    values = {name: value for name, value in SIZES.items() if name in fields}
    for name, default in fields.items():
        if ("drop" in name or "jitter" in name) and isinstance(default, float):
            values[name] = 0.0
    if fields.get("sliding_window", 0) is None:  # no window unless asked for
        values["sliding_window"] = None
    if "kv_lora_rank" in fields:  # latent attention has neither groups nor one head dim
        values["num_key_value_heads"] = _HEADS
        values.pop("head_dim", None)
    values.update(changes)
    for name, part in cls.sub_configs.items():
        kind = type(getattr(cls(), name)) if part is AutoConfig else part
        values[name] = tiny(kind, values.get(name, {}))
    # A config may write into the lists it is given.
    return cls(**copy.deepcopy(values))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what transformers has to say about unusual configs."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def build_config(name: str, *, head: str = "causal") -> PreTrainedConfig:
    """Build the tiny config of a model type, or of a variant of it, such as ``llama:dynamic``."""
    base, _, variant = name.partition(":")
    if variant and name not in VARIANTS:
        raise ValueError(f"There is no variant {name!r}, but there are {', '.join(VARIANTS)}.")
    changes = _merged(TWEAKS.get(base, {}), VARIANTS.get(name, {}))
    if base in _PADDED:
        changes["pad_token_id"] = 1
    if head == "causal" and base in _ENCODERS:
        changes["is_decoder"] = True
    if head in ("sequence", "token"):
        changes["num_labels"] = _LABELS
        changes["classifier_dropout"] = 0.0  # many take 0.1 where their config does not say
    if head == "sequence":
        changes.setdefault("pad_token_id", 0)  # decoders look for the last token before it
    cls = CONFIG_MAPPING[base]
    if base in _PARTS:
        cls = cls.sub_configs["decoder"]
    with quiet():
        return tiny(cls, changes)


_QUERY_KEY = re.compile(
    r"(^|[._])(q|k|qkv|wqkv|wq|wk|query|key|query_key_value|c_attn|project_q|project_k|in_proj)"
    r"(_b)?(_proj|_lin|_proj_weight)?$",
    re.IGNORECASE,
)
_VALUE_OUT = re.compile(r"(^|[._])(v|o|value|out|wv|dense)(_proj|_lin)?$", re.IGNORECASE)
_QUERY_KEY_NORM = re.compile(r"(^|[._])(q|k|query|key)_?(layer)?norm$")


def _gain(path: str) -> float:
    """Return how much larger than usual the weight of the module at ``path`` is drawn."""
    path = path.removesuffix(".linear")
    if _QUERY_KEY.search(path):
        return 1.4  # the scores of one query then spread by about two
    if _VALUE_OUT.search(path) or path.endswith(("lm_head", "output_projection")):
        return 1.5
    # A router then sends the tokens to different experts.
    return 2.0 if path.endswith((".gate", ".router", ".classifier")) else 1.0


def _norm_gain(path: str, model: nn.Module) -> float:
    """Return the mean weight of a norm; one of queries or keys sets how the scores spread."""
    if not _QUERY_KEY_NORM.search(path):
        return 1.0
    scaling = getattr(model.get_submodule(path.rpartition(".")[0]), "scaling", None)
    return 1.4 if scaling is None else math.sqrt(2 / (scaling * math.sqrt(SIZES["head_dim"])))


def _fan_in(owner: nn.Module, shape: torch.Size) -> float:
    if isinstance(owner, Conv1D):
        return shape[0]
    if isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return math.prod(shape[1:])
    # Experts hold one matrix each, some of them transposed.
    return shape[-1] if len(shape) == 2 else math.sqrt(shape[-1] * shape[-2])


def _drawn(
    name: str, old: Tensor, owner: nn.Module, noise: Tensor, embedding_std: float, norm_gain: float
) -> Tensor:
    """Return new values for one parameter; what it is shows in its name, owner and old values."""
    path, _, leaf = name.rpartition(".")
    first = float(old.flatten()[0])
    constant = bool((old == first).all())
    if "Sinusoidal" in type(owner).__name__ or leaf.startswith(("time_decay", "time_mix")):
        return old
    if isinstance(owner, nn.Embedding):
        if re.search(r"type|shape|pronunciation", path):  # the same for every token
            return 0.3 * embedding_std * noise
        # Of a tied embedding the scale is wanted: it undoes the small values.
        scale = getattr(owner, "embed_scale", 1.0) if embedding_std == 1 else 1.0
        return embedding_std / scale * noise
    if leaf == "A_log":  # this and the next: recurrences that neither explode nor forget at once
        return noise.abs()
    if leaf in ("dt_bias", "dt_proj_bias", "recurrent_param") and not constant:
        return 0.5 * noise - 3.5
    if "sink" in leaf:
        return noise
    if "bias" in leaf:
        return 0.3 * noise
    if constant and first != 0 and "1P" not in type(owner).__name__:  # a norm, or another scale
        return first * (norm_gain + 0.3 * noise)
    if constant and old.ndim < 2:  # a norm that adds one, or an offset
        return norm_gain - 1 + 0.3 * noise
    if old.ndim < 2:
        return 0.3 * noise
    return noise * _gain(path if leaf == "weight" else name) / math.sqrt(_fan_in(owner, old.shape))


def redraw(model: nn.Module, seed: int) -> None:
    """Give every parameter a value that matters, the same in every process; leave the buffers."""
    owners: dict[Tensor, nn.Module] = {}
    tied = False
    for module in model.modules():
        embeds = isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False):
            tied |= isinstance(owners.get(parameter, module), nn.Embedding) != embeds
            if parameter not in owners or embeds:
                owners[parameter] = module
    # A head that is the embedding too must not give logits at which softmax saturates.
    embedding_std = 1 / math.sqrt(_HIDDEN) if tied else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            gain = _norm_gain(name.rpartition(".")[0], model)
            owner = owners[parameter]
            parameter.copy_(_drawn(name, parameter, owner, noise, embedding_std, gain))


def build_model(
    name: str,
    *,
    head: str = "causal",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention: str = "eager",
) -> PreTrainedModel:
    """Build a tiny model, in training mode and without dropout, the same in every process.

    Args:
        name: a model type, or one of `VARIANTS`.
        head: one of `HEADS`.
        dtype: of the parameters; their values are drawn in float32, then rounded.
        seed: of the parameters. The global random state is neither used nor changed.
        attention: the name that transformers knows the attention function by.
    """
    auto, classes = HEADS[head]
    config = build_config(name, head=head)
    if config.model_type not in classes:
        auto = getattr(transformers, classes[name.partition(":")[0]])
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the default one has no float64
    # Classes that no auto class knows have no public way from a config to a model with options.
    build = getattr(auto, "from_config", None) or auto._from_config
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config, **options)
    redraw(model, seed)
    return model


# Parameters that a batch of text does not reach, or that only choose: experts, keys, patches.
_IDLE = re.compile(
    r"encoder_attn|vision_|audio_|embed_vision|embed_audio|multi_modal_projector|embed_tokens_extend"
    r"|expert_bias|e_score_correction_bias|\.indexer\.|\.patcher\."
)
_IDLE_OF = {
    "big_bird": "pooler",
    "deepseek_v4": r"layers\.0\.mlp\.gate\.",  # by token: one weight, which is normalised away
    "hrm_text": "z_L_init",  # before the cycles that training follows back
    "marian": "embed_positions",
    "mllama": r"layers\.1\.",
    "pegasus": "embed_positions",
    "phimoe": r"mlp\.router\.",  # without jitter it takes the best expert as it is
    "reformer": r"lm_head\.bias",
    "roc_bert": "pronunciation_embed|shape_embed",
    "roformer": "embed_positions",
    "xlnet": "r_s_bias|seg_embed|mask_emb",
}
# Their keys are not rotated, so a bias adds the same to all scores of a query: softmax drops it.
_UNROTATED = words(
    "bart bert bert-generation big_bird biogpt blenderbot blenderbot-small camembert ctrl "
    "data2vec-text electra ernie git marian mbart megatron-bert mvp opt pegasus plbart prophetnet "
    "rembert roberta roberta-prelayernorm roc_bert trocr xglm xlm xlm-roberta xlm-roberta-xl xmod"
)
_KEY_BIAS = re.compile(r"(k_proj|key|Wk|k_lin|key_proj)\.bias$")


def is_idle(name: str, parameter: str) -> bool:
    """Return whether `sample_batch` gives this parameter no gradient, or nothing but rounding."""
    base = name.partition(":")[0]
    return bool(
        (_IDLE.search(parameter) and (base != "git" or "vision" not in parameter))
        or (base in _IDLE_OF and re.search(_IDLE_OF[base], parameter))
        or (base in _UNROTATED and _KEY_BIAS.search(parameter))
    )


def attention_of(config: Any) -> str:
    """Return the name of the attention function; transformers has no public name for it."""
    return config._attn_implementation


def sample_batch(
    name: str, *, head: str = "causal", rows: int = 2, length: int = 96, seed: int = 0
) -> dict[str, Any]:
    """Draw what ``build_model(name, head=head)`` is called with to get a loss."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    base = name.partition(":")[0]
    tokens = draw(VOCAB_SIZE, rows, length, low=FIRST_TOKEN)
    batch: dict[str, Any] = {"input_ids": tokens}
    if base in _PARTS:
        books = build_config(name).num_codebooks
        tokens = draw(VOCAB_SIZE, rows, length, books, low=FIRST_TOKEN)
        batch["input_ids"] = tokens.transpose(1, 2).flatten(0, 1)
    if base == "git":  # counts image tokens even where there are none
        batch["pixel_values"] = torch.randn(rows, 3, 32, 32, generator=generator)
    if base == "xlstm":  # writes its state in place, which backward does not survive
        batch["use_cache"] = False
    if head in ("causal", "masked"):
        batch["labels"] = tokens.clone()
    elif head == "sequence":
        batch["labels"] = draw(_LABELS, rows)
    elif head == "token":
        batch["labels"] = draw(_LABELS, rows, length)
    elif head == "question":
        batch["start_positions"] = draw(length, rows)
        batch["end_positions"] = draw(length, rows)
    return batch
