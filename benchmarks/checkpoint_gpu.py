# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.checkpoint_gpu [--only WAY ...] [--out DIR]`: the cost of a save.

Training steps of a Llama of 1.2 billion parameters under a Trainer on one device, float32 weights
and AdamW states: 15 GB, which is what a rank of 8 holds of a model of 8 billion. Groups of steps
without a save and groups with one, after their second step, take turns; a save costs the
difference. Saves stop the run until they are written (``blocking``), or until they are copied to
host memory (``async``): 15 GB at 50 GB/s are 0.3 s, for which ``save_checkpoint`` lasts, besides
what the GPU still has to do.
"""

import argparse
import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from benchmarks.host_gpu import TINY, Batches, Language, Shape
from benchmarks.measure import Records, describe, synchronize
from lightning_cp import Checkpoints, ContextParallelStrategy

WAYS: Final = ("blocking", "async")
SHAPE: Final = Shape(layers=24, warmup=4, steps=10)
NUM_SAVES: Final = 2
SAVE_AFTER: Final = 2
"""Steps of a group before its save."""


class OnDevice(Language):
    """A model that is initialized on the GPU."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(shape, shard=False, precision="bf16-mixed")
        self._where = device

    def configure_model(self) -> None:
        """Build the model."""
        with torch.device(self._where):
            super().configure_model()


class Saves(Callback):
    """Times groups of steps, of which every second one has a save."""

    def __init__(self, shape: Shape, device: torch.device, folder: Path) -> None:
        self._shape, self._device, self._folder = shape, device, folder
        self._begun = 0.0
        self.plain_ms: list[float] = []
        self.saved_ms: list[float] = []
        self.call_ms: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """End a group, and begin the next one."""
        group, rest = divmod(index + 1 - self._shape.warmup, self._shape.steps)
        if rest == SAVE_AFTER and group % 2:
            begun = time.perf_counter()  # the GPU is behind, and the call waits for it
            trainer.save_checkpoint(self._folder / str(group))
            self.call_ms.append(1e3 * (time.perf_counter() - begun))
        if rest or group < 0:
            return
        synchronize(self._device)
        now = time.perf_counter()
        if group:
            (self.plain_ms if group % 2 else self.saved_ms).append(1e3 * (now - self._begun))
        else:
            trainer.save_checkpoint(self._folder / "first")  # pins memory
        strategy: Any = trainer.strategy
        strategy.wait_for_checkpoint()
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        synchronize(self._device)
        self._begun = time.perf_counter()


def train(way: str, tokens: int, shape: Shape, device: torch.device, root: Path) -> dict[str, Any]:
    """Train with saves of one way, and return their times in milliseconds."""
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name) / "run"
        folder.mkdir()
        saves = Saves(shape, device, folder)
        trainer = Trainer(
            strategy=ContextParallelStrategy(
                context_parallel_size=1,
                checkpoints=Checkpoints(asynchronous=way == "async"),
            ),
            accelerator="cuda" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=shape.warmup + 2 * NUM_SAVES * shape.steps,
            callbacks=[saves],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        module = OnDevice(shape, device)
        trainer.fit(module, DataLoader(Batches(shape.vocab, tokens), batch_size=1))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    step = median(saves.plain_ms) / shape.steps
    cost = median(saves.saved_ms) - median(saves.plain_ms)
    num_bytes = sum(12 * param.numel() for param in module.parameters())
    return {
        "bytes": num_bytes,
        "step_ms": step,
        "cost_ms": cost,
        "share": cost / step,
        "call_ms": median(saves.call_ms),
        "peak_bytes": peak,
        "plain_ms": saves.plain_ms,
        "saved_ms": saves.saved_ms,
    }


def run(
    ways: Sequence[str],
    tokens: int,
    shape: Shape,
    device: torch.device,
    root: Path,
    out: Path | None,
) -> None:
    """Print the table, line by line."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    where = describe(device)
    records = Records(out, "checkpoint_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
    print(f"{shape}, {tokens:,} tokens; medians of {NUM_SAVES} groups.\n")
    print("| save | GB | step, ms | costs, ms | of a step | call, ms | peak, GiB |")
    print("|---" * 7 + "|", flush=True)
    for way in ways:
        one = train(way, tokens, shape, device, root)
        print(
            f"| {way} | {one['bytes'] / 1e9:.1f} | {one['step_ms']:.0f} | {one['cost_ms']:.0f} "
            f"| {one['share']:.3f} | {one['call_ms']:.0f} | {one['peak_bytes'] / 2**30:.1f} |",
            flush=True,
        )
        records.add(what="save", way=way, tokens=tokens, shape=asdict(shape), **one)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=SHAPE.steps, help="of a group")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    args = parser.parse_args(arguments)
    shape = (
        replace(TINY, warmup=1, steps=3)
        if args.tiny
        else replace(SHAPE, layers=args.layers, steps=args.steps)
    )
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    tokens = 16 if args.tiny else args.tokens
    run(args.only, tokens, shape, device, args.folder or Path(tempfile.gettempdir()), args.out)


if __name__ == "__main__":
    main()
