# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.plan_gpu [--only NAME ...] [--out DIR]`: plans and measured steps.

Training steps with AdamW of models with few layers, as one rank of N on one GPU (`emulate.py`,
links that take no time), FSDP2 over one rank: peak memory and time of a step, measured and planned.
The weights are not sharded here, so that the plan's shares of them are multiplied by N. ``memory``
points hold 128k, 256k and 512k tokens per rank, with a window, for bytes per token. ``lora x 32``
points train a whole model of 8B on one GPU: minutes for a step, run where ``--only`` names them.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto import AutoConfig

from benchmarks.emulate import emulated_parallel
from benchmarks.measure import (
    Records,
    describe,
    kernel_times,
    peak_memory,
    print_profile,
    synchronize,
    timed,
)
from hf_patches import enable, model_shape
from lightning_cp.attn.hardware import Links
from lightning_cp.config import Memory
from lightning_cp.fsdp.sharding import find_blocks, shard_parameters
from lightning_cp.lightning.memory.activations import prepare_layers
from lightning_cp.memory import budget, checkpoint_layers, tile_modules
from lightning_cp.memory.tiles import MIN_TOKENS
from lightning_cp.planner import Setup
from lightning_cp.planner.memory import MemoryPlan, plan_memory
from lightning_cp.planner.shapes import ModelShape
from lightning_cp.planner.time import plan_time

NO_LINKS = Links(inside_gbs=1e9, between_gbs=1e9, latency_us=0.0, slowdown=0.0)
"""Links of the emulated ranks: transfers take no time."""

MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "gemma3-12b": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
    },
}


def build_config(name: str, num_layers: int, *, tiny: bool = False) -> PreTrainedConfig:
    """Return the config of a model with few layers."""
    values = {**MODELS[name], "num_hidden_layers": num_layers, "use_cache": False}
    values |= {"max_position_embeddings": 1 << 23}
    if tiny:
        small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16}
        small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 32}
        small |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        values |= {key: value for key, value in small.items() if key in values}
    config: PreTrainedConfig = AutoConfig.for_model(**values)
    return config


@dataclass(frozen=True)
class Point:
    """A training step.

    Args:
        name: for ``--only``.
        model: a name of `MODELS`.
        num_layers: of the model.
        setup: sizes and options of the step.
    """

    name: str
    model: str
    num_layers: int
    setup: Setup


def _point(name: str, num_layers: int, seq_len: int, cp_size: int, **options: Any) -> Point:
    options = {"precision": "bf16-true", **options}
    model = name.split(" ")[0]
    local_len = options.get("batch_size", 1) * seq_len // cp_size
    if options.pop("tile", False):
        options["tiles"] = max(1, min(16, -(-local_len // MIN_TOKENS)))
    setup = Setup(seq_len=seq_len, num_gpus=cp_size, accumulates=False, **options)
    return Point(name, model, num_layers, setup)


K = 1024
POINTS = (
    _point("llama-8b 32k", 4, 32 * K, 8),
    _point("llama-8b 32k none", 4, 32 * K, 8, checkpointing="none"),
    _point("llama-8b 128k", 4, 128 * K, 8),
    _point("llama-8b 128k none", 4, 128 * K, 8, checkpointing="none"),
    _point("llama-8b 128k keep", 4, 128 * K, 8, checkpointing="keep"),
    _point("llama-8b 128k keep offload", 6, 128 * K, 8, checkpointing="keep", offload="all"),
    _point("llama-8b 128k compile", 4, 128 * K, 8, checkpointing="keep", compiled=True),
    _point("llama-8b 128k tile", 4, 128 * K, 8, tile=True),
    _point("llama-8b 256k all", 4, 256 * K, 8, checkpointing="keep", offload="all", tile=True),
    _point("llama-8b 128k mixed", 3, 128 * K, 8, precision="bf16-mixed"),
    _point(
        "llama-8b 128k policy keep", 3, 128 * K, 8, precision="bf16-policy", checkpointing="keep"
    ),
    _point("llama-8b 64k cp4", 4, 64 * K, 4),
    _point("llama-8b 32k cp2 batch", 4, 32 * K, 2, batch_size=2),
    _point("llama-8b 16k cp1 mixed", 3, 16 * K, 1, precision="bf16-mixed"),
    _point("llama-8b 96k cp3", 4, 96 * K, 3),
    _point("llama-8b 128k cp16", 8, 128 * K, 16, checkpointing="keep"),
    _point("llama-8b 128k documents", 4, 128 * K, 8, documents=(4 * K, 24 * K, 1 * K)),
    _point("llama-8b 128k lora", 8, 128 * K, 8, lora_rank=16, checkpointing="keep"),
    _point("llama-8b 64k lora cp2", 8, 64 * K, 2, lora_rank=16),
    _point("llama-1b 128k", 16, 128 * K, 8),
    _point("llama-70b 64k", 2, 64 * K, 8, checkpointing="keep"),
    _point("mistral-7b 256k", 4, 256 * K, 8),
    _point("mistral-7b 512k offload tile", 6, 512 * K, 8, offload="all", tile=True),
    _point("qwen3-8b 64k cp4", 4, 64 * K, 4),
    _point("qwen3-8b 128k mixed keep", 3, 128 * K, 8, precision="bf16-mixed", checkpointing="keep"),
    _point("qwen3-30b-a3b 64k", 4, 64 * K, 8),
    _point("gemma3-12b 64k cp4", 6, 64 * K, 4),
    *(
        _point(
            f"mistral-7b memory {tokens}k x {layers}",
            layers,
            8 * tokens * K,
            8,
            checkpointing="keep",
            offload="all",
            tile=True,
        )
        for tokens, layers in ((128, 4), (128, 8), (256, 4), (512, 4))
    ),
    *(
        _point(
            f"llama-8b lora {tokens}k x 32",
            32,
            tokens * K,
            1,
            lora_rank=16,
            offload="all",
            tile=True,
        )
        for tokens in (128, 256, 384)
    ),
)


class _Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        options: Any = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Linear(base.in_features, rank, **options)
        self.up = nn.Linear(rank, base.out_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x))
        return added + functional.linear(x, self.base.weight)


def _adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model and add adapters to the linear layers of its blocks."""
    model.requires_grad_(False)
    for block in find_blocks(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(parent, _Adapted):
                    setattr(parent, name, _Adapted(child, rank))


def build(
    point: Point, config: PreTrainedConfig, mesh: DeviceMesh, device: torch.device
) -> tuple[nn.Module, Callable[[], None]]:
    """Build the model of a point, sharded over one rank; return it and what ends its patches."""
    setup = point.setup
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    is_half = setup.precision == "bf16-true" or setup.lora_rank
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if is_half else torch.float32)
    model.set_attn_implementation("sdpa")
    model.train()
    handle = enable(model)
    if setup.lora_rank:
        _adapt(model, setup.lora_rank)
    if setup.compiled:
        prepare_layers(model, Memory(compile="layers"), None, training=True)
    if setup.checkpointing != "none":
        checkpoint_layers(model)
    if setup.tiles:
        tile_modules(model)
    policy = torch.bfloat16 if setup.precision == "bf16-policy" else None
    holder = nn.ModuleList([model])
    shard_parameters(holder, mesh, compute_dtype=policy, device=device)
    return model, handle.undo


def build_batch(point: Point, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """Return the full batch."""
    setup = point.setup
    ids = torch.randint(vocab, (setup.batch_size, setup.seq_len), device=device)
    batch = {"input_ids": ids, "labels": ids}
    if setup.documents:
        lengths = torch.tensor(setup.documents)
        lengths = lengths.repeat(-(-setup.seq_len // int(lengths.sum())))
        documents = torch.arange(len(lengths)).repeat_interleave(lengths)[: setup.seq_len]
        batch["document_ids"] = documents.expand(setup.batch_size, -1).to(device)
    return batch


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, peak bytes, bytes of offloaded tensors, and times of kernels."""

    ms: float
    peak: int
    host: int
    kernels: dict[str, tuple[float, int]]


def measure(
    point: Point,
    config: PreTrainedConfig,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    repeats: int = 3,
    profile: bool = False,
) -> Measured:
    """Run the steps of a point."""
    setup = point.setup
    model, undo = build(point, config, mesh, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    available = setup.num_gpus * (budget.available_bytes() or 0)  # all for this rank of N
    with patch.object(budget, "available_bytes", lambda: available):
        parallel = emulated_parallel(
            setup.num_gpus // 2,
            setup.num_gpus,
            keep_attention="all" if setup.checkpointing == "keep" else "none",
            offload=setup.offload,
        )
    batch = build_batch(point, config.get_text_config().vocab_size, device)
    is_mixed = setup.precision == "bf16-mixed" and not setup.lora_rank

    def call() -> None:
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_mixed)
        with parallel.step(batch) as local, autocast:
            model(**local).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if repeats:
        call()  # compiles, and creates the moments
    ms = timed(call, device, repeats=repeats) if repeats > 1 else 0.0
    held = _allocated(device)
    start = time.perf_counter()
    peak = held + peak_memory(call, device)
    ms = ms or 1e3 * (time.perf_counter() - start)
    kernels = kernel_times(call, device) if profile else {}
    store = parallel.offloaded
    host = 0 if store is None else store.arena.num_bytes
    parallel.close()
    undo()
    return Measured(ms, peak, host, kernels)


def _allocated(device: torch.device) -> int:
    synchronize(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def unsharded_peak(plan: MemoryPlan, num_ranks: int) -> float:
    """Return the peak of a plan whose weights are not sharded, without *other buffers*.

    The steps here free gradients after the optimizer, before the next forward.
    """
    states = ("weights", "gradients", "optimizer")
    return max(
        sum(
            size * (num_ranks if name in states else 1)
            for name, size in parts.items()
            if name != "other buffers" and (name, moment) != ("gradients", "loss")
        )
        for moment, parts in plan.moments.items()
    )


def planned_ms(shape: ModelShape, setup: Setup) -> float:
    """Return the planned time of a step that updates all weights, not a rank's share of them."""
    step = plan_time(shape, setup, links=NO_LINKS)
    return 1e3 * (step.step + (setup.num_shards - 1) * step.seconds["optimizer"])


HEADER = (
    "| point | layers | tokens per rank | peak, GB | planned | off | step, ms | planned | off "
    "| host, GB |\n" + "|---" * 10 + "|"
)


def run_one(
    point: Point,
    records: Records,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    tiny: bool,
    repeats: int,
    profile: bool,
) -> None:
    """Measure and plan a point, and print both."""
    config = build_config(point.model, point.num_layers, tiny=tiny)
    shape = model_shape(config)
    setup = point.setup
    memory = unsharded_peak(plan_memory(shape, setup), setup.num_gpus)
    ms = planned_ms(shape, setup)
    found = measure(point, config, mesh, device, repeats=repeats, profile=profile)
    print(
        f"| {point.name} | {point.num_layers} | {setup.local_len:,} | {found.peak / 1e9:.2f} "
        f"| {memory / 1e9:.2f} | {memory / max(found.peak, 1) - 1:+.1%} | {found.ms:.1f} "
        f"| {ms:.1f} | {ms / found.ms - 1:+.1%} | {found.host / 1e9:.1f} |",
        flush=True,
    )
    records.add(
        what="plan",
        point=point.name,
        layers=point.num_layers,
        local_len=setup.local_len,
        peak_bytes=found.peak,
        planned_bytes=memory,
        ms=found.ms,
        planned_ms=ms,
        host_bytes=found.host,
    )
    if profile:
        print_profile(found.kernels)


@contextmanager
def one_rank(device: torch.device) -> Iterator[DeviceMesh]:
    """Start a process group of this process, and yield its mesh."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=where, rank=0, world_size=1)
        try:
            yield DeviceMesh(device.type, [0], mesh_dim_names=("shard",))
        finally:
            dist.destroy_process_group()


def run(
    points: Sequence[Point],
    device: torch.device,
    out: Path | None,
    *,
    tiny: bool = False,
    repeats: int = 3,
    profile: bool = False,
) -> None:
    """Print the table, line by line."""
    where = describe(device)
    records = Records(out, "plan_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ".\n")
    print(HEADER, flush=True)
    with one_rank(device) as mesh:
        for point in points:
            try:
                run_one(point, records, mesh, device, tiny=tiny, repeats=repeats, profile=profile)
            except Exception as error:  # noqa: BLE001  continue with the next point
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                print(f"| {point.name} | failed: {reason} |||||||||", flush=True)
            gc.collect()  # hooks of models and optimizers form cycles
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _shrink(point: Point) -> Point:
    """Return a point that a CPU computes in a second."""
    seq_len = 96 * point.setup.num_gpus
    documents = tuple(length // K for length in point.setup.documents)
    setup = replace(point.setup, seq_len=seq_len, documents=documents)
    return replace(point, num_layers=2, setup=setup)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [point.name for point in POINTS]
    short = [name for name in names if not name.startswith("llama-8b lora")]  # minutes for a step
    parser.add_argument("--only", nargs="+", default=short, choices=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed steps; 0: the first step is the only one"
    )
    parser.add_argument("--profile", action="store_true", help="kernels by kind, after each point")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU")
    args = parser.parse_args(arguments)
    points = [point for point in POINTS if point.name in args.only]
    if args.tiny:
        torch.set_num_threads(1)
        run([_shrink(point) for point in points], torch.device("cpu"), args.out, tiny=True)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    run(points, device, args.out, repeats=args.repeats, profile=args.profile)


if __name__ == "__main__":
    main()
