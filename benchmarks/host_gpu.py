# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.host_gpu [--only WAY ...] [--tokens N ...] [--out DIR]`: the host's share.

Training steps of a Llama under a Trainer on one device: without a strategy, with Lightning's own
FSDP2 strategy, and with ours (one rank), parameters sharded and replicated. At few tokens the GPU
waits for the host, so that differences between the ways are work of the host. Each way runs in a
process of its own, and these take turns on the same cores: the speed of a host changes from minute
to minute and from core to core by more than the ways differ.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
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

REFERENCE: Final[dict[Way, Way]] = {"ours": "fsdp2", "ours-none": "plain"}
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
    rounds: int = 9
    cpus: int = 4

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


TINY: Final = Shape(16, 2, 1, 32, 8, 64, cpus=1)


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
    """Times rounds of steps: their wall time, and the host time of the phases of a step.

    Before each round it waits for a line on standard input; after it, it prints the times.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._marks: list[tuple[str, float]] = []
        self._phases: dict[str, list[float]] = defaultdict(list)
        self._begun = self._cpu_begun = 0.0

    def _mark(self, name: str) -> None:
        self._marks.append((name, time.perf_counter()))

    def _step_of_round(self, index: int) -> int:
        """Return which step of its round a step is; negative in the warm-up."""
        index -= self._shape.warmup
        return index if index < 0 else index % self._shape.steps

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Wait for the next round, or end what is between two steps."""
        if self._step_of_round(index) == 0:
            synchronize(self._device)
            input()
            self._phases.clear()
            self._begun, self._cpu_begun = time.perf_counter(), time.process_time()
        elif self._marks:
            self._mark("between steps")
            for (_, begun), (name, ended) in zip(self._marks, self._marks[1:], strict=False):
                self._phases[name].append(1e3 * (ended - begun))
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
        """End the phase of the optimizer; after the last step of a round, print its times."""
        self._mark("optimizer")
        steps = self._shape.steps
        if self._step_of_round(index) == steps - 1:
            cpu_ms = 1e3 * (time.process_time() - self._cpu_begun) / steps
            synchronize(self._device)
            ms = 1e3 * (time.perf_counter() - self._begun) / steps
            phases = {name: median(times) for name, times in self._phases.items()}
            peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0
            values = {"ms": ms, "cpu_ms": cpu_ms, "phases": phases, "peak_bytes": peak}
            print(MARKER + json.dumps({**values, "loss": float(outputs["loss"])}), flush=True)


def strategy_of(way: Way) -> Strategy | str:
    """Return the strategy of a way."""
    if way == "plain":
        return "auto"
    if way == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    sharding: Any = "none" if way == "ours-none" else "full"
    return ContextParallelStrategy(context_parallel_size=1, parameters=sharding)


def train(
    way: Way, num_tokens: int, shape: Shape, device: torch.device, precision: Precision
) -> None:
    """Train with one way, round by round."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # The same ones for all ways, which run in turns: cores differ in speed.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: shape.cpus])
    trainer = Trainer(
        strategy=strategy_of(way),
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_steps=shape.warmup + shape.rounds * shape.steps,
        callbacks=[Clock(shape, device)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Language(shape, shard=way == "fsdp2", precision=precision)
    trainer.fit(module, DataLoader(Batches(shape.vocab, num_tokens), batch_size=1))


MARKER: Final = "result: "


class Child:
    """A process that trains with one way, a round at a time."""

    def __init__(self, way: Way, num_tokens: int, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.host_gpu", "--child", way]
        command += ["--tokens", str(num_tokens), *arguments]
        self._way = way
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run_round(self) -> dict[str, Any]:
        """Run a round, and return its times."""
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARKER):
                result: dict[str, Any] = json.loads(line.removeprefix(MARKER))
                return result
        raise RuntimeError(f"The process of {self._way} has ended; its error is above.")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


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
    precision: Precision,
    arguments: Sequence[str],
) -> None:
    """Print the table, line by line."""
    where = describe(device)
    records = Records(out, "host_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
    print(f"{shape}; {precision}; CPU: time of the process; by phase: host time;")
    print(f"medians of {shape.rounds} rounds of {shape.steps} steps, in turns; ratios by round,")
    print("with their quartiles.\n")
    print(HEADER, flush=True)
    for num_tokens in tokens:
        children = {way: Child(way, num_tokens, arguments) for way in ways}
        rounds: dict[Way, list[dict[str, Any]]] = defaultdict(list)
        try:
            for _ in range(shape.rounds):
                for way, child in children.items():
                    rounds[way].append(child.run_round())
        finally:
            for child in children.values():
                child.end()
        for way, results in rounds.items():
            values: dict[str, Any] = {
                name: median(one[name] for one in results)
                for name in ("ms", "cpu_ms", "peak_bytes", "loss")
            }
            values["phases"] = {
                name: median(one["phases"].get(name, 0.0) for one in results) for name in PHASES
            }
            values["ratios"] = _ratios(results, rounds.get(REFERENCE.get(way, way), results))
            print(_line(num_tokens, way, values), flush=True)
            what = {"tokens": num_tokens, "precision": precision, "shape": asdict(shape)}
            every = [one["ms"] for one in results]
            records.add(what="host", way=way, **what, **values, every_ms=every)


def _ratios(results: list[dict[str, Any]], reference: list[dict[str, Any]]) -> list[float]:
    """Return the ratio of the times of each round; nothing for the reference itself."""
    if results is reference:
        return []
    return [one["ms"] / other["ms"] for one, other in zip(results, reference, strict=True)]


def _line(num_tokens: int, way: Way, values: dict[str, Any]) -> str:
    """Return a line of the table."""
    ratios, compared = values["ratios"], ""
    if len(ratios) > 1:
        low, middle, high = quantiles(ratios, n=4)
        compared = f"{middle:.3f} ({low:.3f} to {high:.3f}) of {REFERENCE[way]}"
    phases = " | ".join(f"{time:.2f}" for time in values["phases"].values())
    return (
        f"| {num_tokens:,} | {way} | {values['ms']:.2f} | {compared} | {values['cpu_ms']:.2f} "
        f"| {phases} | {values['peak_bytes'] / 2**30:.2f} | {values['loss']:.4f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    ways = get_args(Way)
    parser.add_argument("--only", nargs="+", default=ways, choices=ways, metavar="WAY")
    parser.add_argument("--tokens", nargs="+", type=int, default=None)
    parser.add_argument("--precision", default="bf16-true", choices=get_args(Precision))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    shape = replace(
        TINY if args.tiny else Shape(), layers=args.layers, steps=args.steps, rounds=args.rounds
    )
    if args.tiny:
        torch.set_num_threads(1)
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    tokens = args.tokens or ([16] if args.tiny else [2048, 16384])
    if args.child is not None:
        train(args.child, tokens[0], shape, device, args.precision)
        return
    passed = ["--precision", args.precision, "--layers", str(args.layers)]
    passed += ["--steps", str(args.steps), "--rounds", str(args.rounds)]
    passed += ["--tiny"] if args.tiny else []
    run(args.only, tokens, shape, device, args.out, args.precision, passed)


if __name__ == "__main__":
    main()
