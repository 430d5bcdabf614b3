# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.memory_gpu [--only CELL ...] [--layers N] [--out DIR]`: the default.

A Llama of 8B's width, with fewer layers, trains on one GPU through the strategy, with an optimizer:
what ``memory="auto"`` chooses, beside combinations that are set by hand. Each cell prints the time
of a step, what it peaks at, and what was planned; at its end the default over the best by hand.
"""

import argparse
import gc
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.measure import Records, describe, synchronize
from benchmarks.training_gpu import Shape
from lightning_cp import ContextParallelStrategy, Memory, Verify

BY_HAND: Final[Mapping[str, Mapping[str, Any]]] = {
    "nothing": {"activation_checkpointing": False},
    "half": {"activation_checkpointing": 0.5, "keep_attention": "all"},
    "all": {"activation_checkpointing": True, "keep_attention": "none"},
    "all, kept": {"activation_checkpointing": True, "keep_attention": "all"},
    "all, kept, host": {
        "activation_checkpointing": True,
        "keep_attention": "all",
        "offload": "all",
    },
    "tiles": {"activation_checkpointing": True, "keep_attention": "none", "tile": True},
    "tiles, kept": {"activation_checkpointing": True, "keep_attention": "all", "tile": True},
    "tiles, kept, host": {
        "activation_checkpointing": True,
        "keep_attention": "all",
        "tile": True,
        "offload": "all",
    },
}
"""Values of `Memory`; a fraction is that of the layers. What is not named is off."""


@dataclass(frozen=True)
class Cell:
    """A sequence and what is trained.

    Args:
        seq_len: its tokens.
        lora: whether adapters are trained, or all weights.
        packed: whether it holds documents of 1k to 16k tokens.
    """

    seq_len: int
    lora: bool = False
    packed: bool = False

    @property
    def name(self) -> str:
        """Return its name, for ``--only``."""
        what = "lora" if self.lora else "full"
        return f"{what}-{self.seq_len >> 10}k" + ("-packed" if self.packed else "")


CELLS: Final = (
    *(Cell(1024 * size) for size in (16, 32, 64)),
    *(Cell(1024 * size, lora=True) for size in (16, 32, 64)),
    *(Cell(1024 * size, packed=True) for size in (32, 64)),
    Cell(128 * 1024),
    Cell(128 * 1024, lora=True),
)


class Sequences(IterableDataset[dict[str, Tensor]]):
    """The same sequence of random tokens, again and again."""

    def __init__(self, cell: Cell, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab, (1, cell.seq_len), generator=generator)
        self._batch = {"input_ids": ids, "labels": ids}
        if cell.packed:
            ends = torch.rand(cell.seq_len, generator=generator).lt(1 / 5000)
            self._batch["document_ids"] = ends.cumsum(0)[None]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self._batch


class Module(LightningModule):
    """A model that is built on the GPU, with AdamW."""

    def __init__(self, shape: Shape, device: torch.device, *, lora: bool) -> None:
        super().__init__()
        model: Any = shape.build(device)
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        self.model: nn.Module = model.train()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return fused AdamW."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-5, fused=trained[0].is_cuda)


class Clock(Callback):
    """Times steps, and reads the peak of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begun = device, 0.0
        self.ms: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Start."""
        synchronize(self._device)
        self._begun = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Stop."""
        synchronize(self._device)
        self.ms.append(1e3 * (time.perf_counter() - self._begun))


def memory_of(values: Mapping[str, Any] | None, num_layers: int) -> Memory:
    """Return the group of a combination; None is the default."""
    if values is None:
        return Memory()
    off = {"activation_checkpointing": False, "offload": "none", "tile": False}
    given = {**off, "keep_attention": "none", **values}
    share = given["activation_checkpointing"]
    if isinstance(share, float):
        given["activation_checkpointing"] = max(1, int(share * num_layers))
    return Memory(check=False, **given)


def train(
    cell: Cell, shape: Shape, device: torch.device, values: Mapping[str, Any] | None, steps: int
) -> dict[str, Any]:
    """Train with a combination; return times, the peak and the plan."""
    clock = Clock(device)
    memory = memory_of(values, shape.layers)
    strategy = ContextParallelStrategy(1, memory=memory, verify=Verify(steps=False))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-true",
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(shape, device, lora=cell.lora)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loader = DataLoader(Sequences(cell, shape.vocab), batch_size=None)
    trainer.fit(module, loader)
    is_gpu = device.type == "cuda"
    plan = strategy.memory_plan
    return {
        "first_ms": clock.ms[0],
        "ms": median(clock.ms[1:]),
        "peak": torch.cuda.max_memory_allocated(device) if is_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved(device) if is_gpu else 0,
        "planned": 0.0 if plan is None else plan.peak,
    }


def run(cells: Sequence[Cell], shape: Shape, device: torch.device, out: Path | None) -> None:
    """Print the table, line by line."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.basicConfig(level=logging.INFO, format="    %(message)s")
    warnings.simplefilter("ignore")
    where = describe(device)
    records = Records(out, "memory_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + f"; {shape}.\n")
    print("| cell | memory | step, ms | first, ms | peak, GiB | reserved, GiB | plan, GiB |")
    print("|---" * 7 + "|", flush=True)
    for cell in cells:
        times: dict[str, float] = {}
        for name, values in (("default", None), *BY_HAND.items()):
            try:
                one = train(cell, shape, device, values, 3 if cell.seq_len > 1 << 16 else 5)
            except Exception as error:  # noqa: BLE001  out of memory, say: go on with the next
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
                print(f"| {cell.name} | {name} | {reason} |||||", flush=True)
                records.add(what="memory", cell=cell.name, memory=name, failed=reason)
                continue
            finally:
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            times[name] = one["ms"]
            gib = [one[key] / 2**30 for key in ("peak", "reserved", "planned")]
            print(
                f"| {cell.name} | {name} | {one['ms']:.0f} | {one['first_ms']:.0f} | "
                + " | ".join(f"{x:.1f}" for x in gib)
                + " |",
                flush=True,
            )
            records.add(what="memory", cell=cell.name, memory=name, layers=shape.layers, **one)
        others = [ms for name, ms in times.items() if name != "default"]
        if others and "default" in times:
            share = times["default"] / min(others)
            print(f"| {cell.name} | default / best by hand | **{share:.3f}** |||||", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[cell.name for cell in CELLS])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a few small sequences, on the CPU")
    args = parser.parse_args(arguments)
    if args.tiny:
        shape = Shape(hidden=64, heads=4, kv_heads=2, inner=96, layers=2, vocab=128)
        run([Cell(64), Cell(64, packed=True)], shape, torch.device("cpu"), args.out)
        return
    chosen = [cell for cell in CELLS if args.only is None or cell.name in args.only]
    run(chosen, Shape(layers=args.layers), torch.device("cuda"), args.out)


if __name__ == "__main__":
    main()
