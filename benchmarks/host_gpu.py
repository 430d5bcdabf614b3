# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.host_gpu [--only WAY ...] [--tokens N ...] [--out DIR]`: the host's share.

Training steps of a Llama under a Trainer on one device: without a strategy, with Lightning's own
FSDP2 strategy, and with ours (one rank), parameters sharded and replicated. At few tokens the GPU
waits for the host, so that differences between the ways are work of the host. Each way runs in a
process of its own; where its host time goes is printed by phase, and with --profile by function.
"""

import argparse
import cProfile
import json
import logging
import pstats
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Records, describe, synchronize
from lightning_cp import ContextParallelStrategy

Way = Literal["plain", "fsdp2", "ours", "ours-none"]
"""No strategy; ModelParallelStrategy with fully_shard; ours, parameters sharded or replicated."""

Precision = Literal["bf16-true", "bf16-mixed", "32-true"]

REFERENCE: Final[dict[str, str]] = {"ours": "fsdp2", "ours-none": "plain"}
"""What a way is compared with."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a measurement."""

    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 8
    inner: int = 5632
    layers: int = 8
    vocab: int = 32000
    warmup: int = 12
    steps: int = 20

    def config(self) -> LlamaConfig:
        """Return the model's configuration."""
        return LlamaConfig(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            vocab_size=self.vocab,
            max_position_embeddings=1 << 20,
            use_cache=False,
        )


TINY: Final = Shape(16, 2, 1, 32, 8, 64)


class Batches(IterableDataset[dict[str, Tensor]]):
    """The same random tokens, again and again."""

    def __init__(self, vocab: int, num_tokens: int) -> None:
        ids = torch.randint(vocab, (num_tokens,), generator=torch.Generator().manual_seed(0))
        self._sample = {"input_ids": ids, "labels": ids}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self._sample


class Language(LightningModule):
    """A language model, as a user of Lightning writes it."""

    def __init__(self, shape: Shape, *, shard: bool, precision: Precision) -> None:
        super().__init__()
        self._shape, self._shard, self._precision = shape, shard, precision
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model; with Lightning's strategy, shard it layer by layer."""
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(self._shape.config())
        self.model.set_attn_implementation("sdpa")
        self.model.train()
        if self._shard:
            assert self.device_mesh is not None  # noqa: S101
            mesh = self.device_mesh["data_parallel"]
            half = self._precision == "bf16-true"
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4)


class Clock(Callback):
    """Times steps: wall time of all of them, and host time of the phases of each."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._marks: list[tuple[str, float]] = []
        self._phases: dict[str, list[float]] = defaultdict(list)
        self._begun = self._cpu_begun = 0.0
        self.ms = self.cpu_ms = 0.0
        self.loss = float("nan")
        self.profile: cProfile.Profile | None = None

    def _mark(self, name: str) -> None:
        self._marks.append((name, time.perf_counter()))

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Begin the wall time after the warm-up."""
        if self._marks:
            self._mark("between steps")
            for (_, begun), (name, ended) in zip(self._marks, self._marks[1:], strict=False):
                self._phases[name].append(1e3 * (ended - begun))
        if index == self._shape.warmup:
            self._phases.clear()
            synchronize(self._device)
            self._begun, self._cpu_begun = time.perf_counter(), time.process_time()
            if self.profile is not None:
                self.profile.enable()
        self._marks = [("start", time.perf_counter())]

    def on_before_backward(self, *_: Any) -> None:
        """End what is between forward and backward."""
        self._mark("zero grad")

    def on_after_backward(self, *_: Any) -> None:
        """End the phase of backward."""
        self._mark("backward")

    def on_before_zero_grad(self, *_: Any) -> None:
        """End the phase of forward."""
        self._mark("forward")

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """End the phase of the optimizer; after the last step, the wall time."""
        self._mark("optimizer")
        if index + 1 == self._shape.warmup + self._shape.steps:
            if self.profile is not None:
                self.profile.disable()
            self.cpu_ms = 1e3 * (time.process_time() - self._cpu_begun) / self._shape.steps
            synchronize(self._device)
            self.ms = 1e3 * (time.perf_counter() - self._begun) / self._shape.steps
            self.loss = float(outputs["loss"])

    def phases(self) -> dict[str, float]:
        """Return the median host time of each phase, in milliseconds."""
        steps = max(1, self._shape.steps - 1)
        sums = {name: median(times) for name, times in self._phases.items()}
        counts = {name: round(len(times) / steps) for name, times in self._phases.items()}
        return {name: sums[name] * max(1, counts[name]) for name in sums}


def strategy_of(way: Way) -> Strategy | str:
    """Return the strategy of a way."""
    if way == "plain":
        return "auto"
    if way == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    sharding: Any = "none" if way == "ours-none" else "full"
    return ContextParallelStrategy(context_parallel_size=1, parameter_sharding=sharding)


def train(
    way: Way,
    num_tokens: int,
    shape: Shape,
    device: torch.device,
    *,
    precision: Precision,
    profile: int,
) -> dict[str, Any]:
    """Train with one way, and return its times."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    clock = Clock(shape, device)
    if profile:
        clock.profile = cProfile.Profile()
    trainer = Trainer(
        strategy=strategy_of(way),
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_steps=shape.warmup + shape.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Language(shape, shard=way == "fsdp2", precision=precision)
    trainer.fit(module, DataLoader(Batches(shape.vocab, num_tokens), batch_size=1))
    if clock.profile is not None:
        stats = pstats.Stats(clock.profile, stream=sys.stderr)
        stats.sort_stats("tottime").print_stats(profile)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    times = {"ms": clock.ms, "cpu_ms": clock.cpu_ms, "phases": clock.phases()}
    return {**times, "loss": clock.loss, "peak_bytes": peak}


MARKER: Final = "result: "


def run_way(way: Way, num_tokens: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Train in a process of its own, and return its times."""
    command = [sys.executable, "-m", "benchmarks.host_gpu", "--child", way]
    command += ["--tokens", str(num_tokens), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARKER)]
    if done.returncode or not lines:
        raise RuntimeError((done.stderr or done.stdout).strip()[-2000:])
    if "--profile" in arguments:
        print(done.stderr[done.stderr.find("function calls") - 20 :], flush=True)
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARKER))
    return result


HEADER: Final = (
    "| tokens | way | step, ms | compared with | CPU, ms | forward, ms | backward, ms "
    "| optimizer, ms | between steps, ms | peak, GiB | loss |\n" + "|---" * 11 + "|"
)
PHASES: Final = ("forward", "backward", "optimizer", "between steps")


def run(
    ways: Sequence[Way],
    tokens: Sequence[int],
    shape: Shape,
    device: torch.device,
    out: Path | None,
    *,
    precision: Precision,
    repeats: int,
    arguments: Sequence[str],
) -> None:
    """Print the table, line by line; ways alternate, so that load of the machine affects all."""
    where = describe(device)
    records = Records(out, "host_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
    print(f"{shape}; {precision}; CPU: time of the process; by phase: host time,")
    print(f"medians; the fastest of {repeats} runs.\n")
    print(HEADER, flush=True)
    for num_tokens in tokens:
        runs: dict[Way, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(repeats):
            for way in ways:
                runs[way].append(run_way(way, num_tokens, arguments))
        best = {way: min(results, key=lambda one: one["ms"]) for way, results in runs.items()}
        for way, one in best.items():
            reference: Any = best.get(REFERENCE.get(way, way))  # type: ignore[call-overload]
            ratio = "" if reference in (None, one) else f"{one['ms'] / reference['ms']:.3f}"
            against = f"{ratio} of {REFERENCE[way]}" if ratio else ""
            phases = " | ".join(f"{one['phases'].get(name, 0.0):.2f}" for name in PHASES)
            print(
                f"| {num_tokens:,} | {way} | {one['ms']:.2f} | {against} | {one['cpu_ms']:.2f} "
                f"| {phases} | {one['peak_bytes'] / 2**30:.2f} | {one['loss']:.4f} |",
                flush=True,
            )
            every = [result["ms"] for result in runs[way]]
            values = {"tokens": num_tokens, "precision": precision, "shape": asdict(shape)}
            records.add(what="host", way=way, **values, **one, every_ms=every)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    ways = get_args(Way)
    parser.add_argument("--only", nargs="+", default=ways, choices=ways, metavar="WAY")
    parser.add_argument("--tokens", nargs="+", type=int, default=None)
    parser.add_argument("--precision", default="bf16-true", choices=get_args(Precision))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", type=int, default=0, help="functions to print, by own time")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    size = {"layers": args.layers, "steps": args.steps}
    shape = Shape(**{**asdict(TINY), **size}) if args.tiny else Shape(**size)
    if args.tiny:
        torch.set_num_threads(1)
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    tokens = args.tokens or ([16] if args.tiny else [2048, 16384])
    if args.child is not None:
        common = {"precision": args.precision, "profile": args.profile}
        result = train(args.child, tokens[0], shape, device, **common)
        print(MARKER + json.dumps(result), flush=True)
        return
    passed = ["--precision", args.precision, "--layers", str(args.layers)]
    passed += ["--steps", str(args.steps)]
    passed += ["--profile", str(args.profile)] if args.profile else []
    passed += ["--tiny"] if args.tiny else []
    common = {"precision": args.precision, "repeats": args.repeats, "arguments": passed}
    run(args.only, tokens, shape, device, args.out, **common)


if __name__ == "__main__":
    main()
