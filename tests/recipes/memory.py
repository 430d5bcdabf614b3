"""How much memory a config takes on each GPU, by arithmetic: what its header says.

Bytes of `bf16-mixed` under FSDP2 with activation checkpointing. What a layer takes while it is
computed is rough. Measured on one H200 (torch 2.11, November 2026, GB of `max_memory_allocated`),
when the loss held 256 MiB of logits at once; with 1 GiB, 3.2 GB more are computed:

    model, layers, tokens            computed   measured
    Llama 8B, 4, all, 16,384             55.2       43.5
    Llama 8B, 8, LoRA 64, 16,384         17.9       15.5
    Llama 8B, 8, LoRA 64, 65,536         40.6       35.7
    Qwen3 8B, 8, all, 32,768             80.7       63.6
    Qwen3 30B-A3B, 4, all, 16,384        75.1       62.5
    Gemma 3 12B, 6, all, 16,384          65.5       57.3
    gpt-oss 20B, 6, LoRA 32, 32,768      33.2       29.3
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from hf_patches.model.forward import LARGEST_LOGITS
from hf_patches.weights.auto import auto_class
from lightning_cp.fsdp.sharding import find_blocks

_LLAMA: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8}
_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "tie_word_embeddings": False}

REAL: dict[str, PreTrainedConfig] = {
    "meta-llama/Llama-3.1-8B": transformers.LlamaConfig(
        **_LLAMA,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
    ),
    "meta-llama/Llama-3.1-70B": transformers.LlamaConfig(
        **_LLAMA,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
    ),
    "Qwen/Qwen3-8B": transformers.Qwen3Config(
        **_QWEN3,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Qwen/Qwen3-30B-A3B-Base": transformers.Qwen3MoeConfig(
        **_QWEN3,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "google/gemma-3-12b-pt": transformers.Gemma3Config(
        text_config={
            "vocab_size": 262_208,
            "hidden_size": 3840,
            "intermediate_size": 15_360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
        },
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
    ),
    "Qwen/Qwen3-VL-8B-Instruct": transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "openai/gpt-oss-20b": transformers.GptOssConfig(
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
}
"""The sizes of models of the hub, from memory of their configs: there is no hub in a test."""
REAL["Qwen/Qwen3-8B-Base"] = REAL["Qwen/Qwen3-8B"]


@dataclass(frozen=True)
class Job:
    """What memory depends on.

    Args:
        config: of the model.
        num_ranks: over which weights are cut.
        seq_len: tokens of a sequence.
        cp_size: ranks that share it.
        ulysses: of them, those that swap tokens for heads.
        batch_size: samples per data rank.
        lora_rank: 0 for all weights.
        lora_targets: names of linear layers, or ``all-linear``.
        freeze: patterns of parameters that are not trained.
        keeps_attention: whether attention results are kept for backward.
        num_branches: completions that share a prompt; 1 for plain samples.
        has_media: whether sequences are images or video, all of their tokens.
    """

    config: PreTrainedConfig
    num_ranks: int
    seq_len: int
    cp_size: int
    ulysses: int = 1
    batch_size: int = 1
    lora_rank: int = 0
    lora_targets: Sequence[str] | str = ()
    freeze: Sequence[str] = ()
    keeps_attention: bool = False
    num_branches: int = 1
    has_media: bool = False


def job_of(config: Mapping[str, Any]) -> Job:
    """Read from a config what its memory depends on."""
    model, trainer, data = config["model"], config["trainer"], config["data"]["init_args"]
    lora = model.get("lora") or {}
    strategy = trainer["strategy"]["init_args"]
    shared, memory = strategy["context_parallel_size"], strategy.get("memory", {})
    inside, between = shared if isinstance(shared, list) else (1, shared)
    return Job(
        REAL[model["model"]],
        num_ranks=trainer["devices"] * trainer["num_nodes"],
        seq_len=data["seq_len"],
        cp_size=inside * between,
        ulysses=inside,
        batch_size=data["batch_size"],
        lora_rank=lora.get("rank", 0),
        lora_targets=lora.get("target_modules", ()),
        freeze=model.get("freeze", ()),
        keeps_attention=memory.get("keep_attention") == "all",
        num_branches=2 if data.get("share_prompts") else 1,
        has_media=config["data"]["class_path"].endswith("MediaChatData"),
    )


def describe(job: Job) -> str:
    """Say in a sentence what `compute` found."""
    parts = compute(job)
    told = ", ".join(f"{count:.1f} {name}" for name, count in parts.items())
    return f"{sum(parts.values()):.0f} of 80 GB per GPU, computed: {told}"


def compute(job: Job) -> dict[str, float]:
    """Return what takes how many GB (10^9 bytes) on each GPU."""
    with torch.device("meta"):
        model = auto_class(job.config).from_config(job.config)
    text: Any = job.config.get_text_config()
    full = not job.lora_rank
    trained, frozen = _count(model, job)
    blocks = [b for b in find_blocks(model) if "vision" not in type(b).__name__.lower()]
    in_blocks = {id(p) for b in find_blocks(model) for p in b.parameters()}
    root = sum(p.numel() for p in model.parameters() if id(p) not in in_blocks)
    largest = max(sum(p.numel() for p in b.parameters()) for b in blocks)
    head = model.get_output_embeddings().weight.numel()
    tokens = job.batch_size * job.seq_len // job.cp_size
    width, layers = text.hidden_size, text.num_hidden_layers
    head_dim = getattr(text, "head_dim", None) or width // text.num_attention_heads
    queries, keys = text.num_attention_heads * head_dim, text.num_key_value_heads * head_dim
    residual = 4 if full else 2  # embeddings that are trained are float32, and what they give
    taken = {
        # float32: weight, gradient, two moments; bfloat16 for what is not trained
        "weights with gradients and Adam states": (16 * trained + 2 * frozen) / job.num_ranks,
        # gathered from forward to backward, with gradients; those of the head once more, from the
        # loss that is computed in pieces
        "full embeddings and head": (8 * root + 4 * head) if full else 2 * root,
        # two at a time in float32, one in bfloat16, one's gradients and their copy on the way
        "two full layers": largest * (18 if full else 4),
        "one activation per layer": layers * tokens * width * residual,
        "recomputing one layer": tokens * _work(text, width, queries, keys, residual),
        # keys and values in bfloat16, their gradients in float32
        "full keys and values": job.batch_size * job.seq_len * 2 * keys * 6 / job.ulysses,
        # logits of a piece in float32, a few times
        "the loss": 4 * LARGEST_LOGITS + tokens * width * 2 * residual,
    }
    if job.keeps_attention:
        # the output in bfloat16, and lse in float32
        per_token = 2 * queries + 4 * text.num_attention_heads
        taken["kept attention"] = layers * tokens * per_token * job.num_branches
    if job.num_branches > 1:
        # another call of attention for each: its output, and the gradients of queries and keys
        calls = job.num_branches - 1
        taken["attention of another branch"] = calls * tokens * (4 * queries + 8 * keys)
    if job.ulysses > 1:
        # queries, keys, values and output once more, and their gradients
        taken["tokens swapped for heads"] = tokens * 2 * (queries + keys) * 2 * 2
    if job.has_media:
        taken |= _media(job, taken)
    return {name: count / 1e9 for name, count in taken.items()}


def _media(job: Job, decoder: Mapping[str, float]) -> dict[str, float]:
    """Return what media take on every rank, before they are cut: the tower is frozen."""
    vision, width = job.config.vision_config, job.config.get_text_config().hidden_size
    tokens = job.batch_size * job.seq_len
    patches = tokens * vision.spatial_merge_size**2
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    # embeddings before and after the merge, features of the last layer and of others
    num_features = 3 + len(vision.deepstack_visual_indexes)
    # a layer of the tower: queries and keys in float32 and rotated, norms, values
    tower = patches * 30 * vision.hidden_size
    later = ("one activation per layer", "recomputing one layer", "the loss", "kept attention")
    freed = sum(decoder.get(name, 0) for name in later)
    return {
        "pixels in float32": patches * pixels * 4,
        "full features": num_features * tokens * width * 2,
        "the vision tower beyond what the decoder takes after it": max(0, tower - freed),
    }


def _count(model: nn.Module, job: Job) -> tuple[int, int]:
    """Return how many parameters are trained, and how many are not."""
    whole = sum(p.numel() for p in model.parameters())
    if job.lora_rank:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        in_decoder = set(model.get_decoder().modules())  # type: ignore[operator]
        adapted = [
            m
            for name, m in model.named_modules()
            if isinstance(m, nn.Linear)
            and m is not head
            and m in in_decoder
            and (job.lora_targets == "all-linear" or name.split(".")[-1] in job.lora_targets)
        ]
        return sum(job.lora_rank * (m.in_features + m.out_features) for m in adapted), whole
    kept = [p for n, p in model.named_parameters() if any(fnmatch(n, f) for f in job.freeze)]
    frozen = sum(p.numel() for p in kept)
    return whole - frozen, frozen


def _work(text: Any, width: int, queries: int, keys: int, residual: int) -> int:
    """Return the bytes per token while a layer is recomputed and goes backward."""
    experts = getattr(text, "num_experts_per_tok", None)
    inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    mlp = 14 * inner
    if experts:
        mlp = experts * (14 * inner + 8 * width)  # each token is copied for each of its experts
    return (8 * residual + 10) * width + 12 * (queries + keys) + mlp
