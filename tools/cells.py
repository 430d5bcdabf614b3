"""Every mesh of 8 ranks (replicate, shard, context, tensor, expert), compared with one process.

`python -m tools.cells --write docs/cells.md` trains 20 steps in each cell, in float64, with AdamW
and clipping. The checkpoint that a cell saves after ten steps is compared with that of a plain
Trainer in one process; the next cell resumes from it, and so do cells of random pairs. Takes an
hour on 2 cores. `--results FILE` keeps what is done, with checkpoints in a folder beside it, so
that a second call continues the first. The exit code is 1 if a difference is larger than 1e-9.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

from lightning_cp.checkpoint import consolidate
from tests.lightning.mesh_runs import (
    GLOBAL_BATCH,
    Module,
    Samples,
    build,
    hybrid,
    norm,
    route,
    run_alone,
    run_fit,
)
from tests.ranks import RankPool
from tools.side_by_side import Pools, run_side_by_side

MODELS = ("llama", "moe")
NUM_RANKS, NUM_BATCHES = 8, 10
NUM_PAIRS = 20  # of each model
LIMIT = 1e-9
NUM_STEPS = 2 * NUM_BATCHES  # two epochs
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Cell:
    """The number of ranks along each axis; data ranks are replicate x shard / context."""

    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int = 1

    @property
    def options(self) -> dict:
        if self.expert > 1:  # sharded by transformers
            return {"tensor_parallel_size": self.tensor}
        return hybrid(self.shard, tensor_parallel_size=self.tensor)


@dataclass(frozen=True)
class Case:
    """A cell that is trained, and resumed from another one; or a pair, which is resumed only."""

    model: str
    before: Cell
    cell: Cell
    key: str
    is_pair: bool


@dataclass(frozen=True)
class Result:
    """The largest differences from one process."""

    loss: float
    weight: float
    saved: float
    resumed_loss: float
    resumed_weight: float


def sizes(number: int) -> list[int]:
    return [size for size in (1, 2, 4, 8) if number % size == 0]


def cells(model: str) -> list[Cell]:
    """Return all cells of a model."""
    dense = [
        Cell(rest // shard, shard, context, tensor)
        for tensor in sizes(NUM_RANKS)
        for rest in [NUM_RANKS // tensor]
        for shard in sizes(rest)
        for context in sizes(rest)
    ]
    if model == "llama":
        return dense
    return dense + [
        Cell(1, NUM_RANKS // tensor, context, tensor, expert)
        for tensor in (1, 2, 4)
        for expert in sizes(NUM_RANKS)[1:]
        if expert % tensor == 0
        for context in sizes(NUM_RANKS // tensor)
    ]


class Cells(Module):
    def __init__(self, name: str, folder: str, cell: Cell, save: Path | None) -> None:
        super().__init__(name)
        self.folder, self.cell, self.save = folder, cell, save
        self.model = build(name, **HEADS) if cell.expert == 1 else None

    def configure_model(self) -> None:
        if self.model is None:
            config = DistributedConfig(
                fsdp_size=self.cell.shard, tp_size=self.cell.tensor, ep_size=self.cell.expert
            )
            self.model = Qwen3MoeForCausalLM.from_pretrained(
                self.folder,
                distributed_config=config,
                dtype=torch.float64,
                experts_implementation="eager",
            )
            self.model.train()

    def on_train_epoch_end(self) -> None:
        if self.save is not None and self.current_epoch == 0:
            self.trainer.save_checkpoint(self.save)


class Alone(Module):
    """The stock model on one process, with a loss in float64, which that of HF is not."""

    def __init__(self, name: str, save: Path) -> None:
        super().__init__(name)
        self.model, self.save = build(name, **HEADS), save

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    on_train_epoch_end = Cells.on_train_epoch_end


def run_cell(
    name: str, folder: str, cell: Cell, *, save: Path | None = None, resume: Path | None = None
) -> tuple[list[float], dict]:
    with pytest.MonkeyPatch.context() as patch:  # in float64
        patch.setattr(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", norm)
        patch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", route)
        patch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
        losses, weights, *_ = run_fit(
            name,
            NUM_BATCHES,
            cell.context,
            {**cell.options, "verify_steps": False},
            kind=lambda name: Cells(name, folder, cell, save),
            resume=resume,
            epochs=2,
            num_losses=NUM_STEPS,
        )
    return losses, weights


def differences(found, exact) -> tuple[float, float]:
    losses, weights = found
    exact_losses, exact_weights = exact
    pairs = zip(losses[::-1], exact_losses[::-1], strict=False)
    loss = max(abs(x - y) for x, y in pairs)
    return loss, max(float((weights[n] - x).abs().max()) for n, x in exact_weights.items())


class Runs:
    """Trains in cells, each from its start once, and resumes what others have saved.

    Args:
        folder: the weights of a model that transformers shards.
        scratch: where checkpoints are kept.
    """

    def __init__(self, folder: str, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.locks = {path_of(scratch, x, cell): RLock() for x in MODELS for cell in cells(x)}
        self.found: dict[Path, list] = {}

    def run(self, case: Case, pools: Pools) -> list[float]:
        """Return the differences of a case from one process."""
        pool, model, before, cell = pools[NUM_RANKS], case.model, case.before, case.cell
        if case.is_pair:
            return self.resume(pool, model, before, cell)
        whole = self.train(pool, model, cell)
        saved = difference_of_content(
            read(path_of(self.scratch, model, cell)), read(save_alone(model, self.scratch))
        )
        resumed = self.resume(pool, model, before, cell)
        return list(asdict(Result(*worst(model, whole, NUM_STEPS), saved, *resumed)).values())

    def train(self, pool: RankPool, model: str, cell: Cell) -> list:
        """Train in a cell, and return losses and weights of all ranks."""
        path = path_of(self.scratch, model, cell)
        with self.locks[path]:
            if path not in self.found:
                self.found[path] = pool.run(run_fresh, model, self.folder, cell, self.scratch)
            return self.found[path]

    def resume(self, pool: RankPool, model: str, before: Cell, cell: Cell) -> list[float]:
        """Resume in a cell what another has saved; return the differences from one process."""
        path = path_of(self.scratch, model, before)
        with self.locks[path]:
            if not path.exists():
                self.train(pool, model, before)
        resumed = pool.run(run_resumed, model, self.folder, before, cell, self.scratch)
        return worst(model, resumed, NUM_BATCHES)


def worst(name: str, found: list, num_losses: int) -> list[float]:
    """Return the largest differences over ranks."""
    assert {len(losses) for losses, _ in found} == {num_losses}
    each = (differences(one, exact_run(name)) for one in found)
    return [max(pair) for pair in zip(*each, strict=True)]


@cache
def exact_run(name: str) -> tuple:
    return run_alone(name, NUM_BATCHES, epochs=2, num_losses=NUM_STEPS, **HEADS)


def save_alone(name: str, scratch: Path) -> Path:
    """Return the checkpoint of a plain Trainer in one process, after ten steps."""
    file = scratch / f"{name}-alone.ckpt"
    if not file.exists():
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Alone(name, file), DataLoader(Samples(NUM_BATCHES), GLOBAL_BATCH))
    return file


def read(path: Path) -> dict:
    """Read a checkpoint in one process; a folder as the file of a plain Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        file = path
        if path.is_dir():
            file = Path(folder) / "one.ckpt"
            consolidate(path, file)
        return torch.load(file, weights_only=False)


def difference_of_content(found: dict, exact: dict) -> float:
    """Return the largest difference of any number in two checkpoints, all of the same names."""
    ours, theirs = dict(flatten(found)), dict(flatten(exact))
    if ours.keys() != theirs.keys():
        raise AssertionError(f"names differ: {sorted(ours.keys() ^ theirs.keys(), key=str)}")
    most = 0.0
    for name, value in theirs.items():
        mine = ours[name]
        if isinstance(value, Tensor):
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape), name
            most = max(most, float((mine - value).abs().max()))
        else:
            assert mine == value, (name, mine, value)
    return most


def flatten(value: Any, *name: object) -> Iterator[tuple[tuple[object, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from flatten(part, *name, key)
    elif isinstance(value, list | tuple) and value:
        for index, part in enumerate(value):
            yield from flatten(part, *name, index)
    else:
        yield name, value


def pairs(name: str) -> list[tuple[int, int]]:
    """Return random pairs of cells that are not neighbours in the table."""
    number = len(cells(name))
    every = [
        (first, second)
        for first in range(number)
        for second in range(number)
        if second not in (first, (first + 1) % number)
    ]
    return random.Random(0).sample(every, NUM_PAIRS)


def all_cases() -> Iterator[Case]:
    """Yield every cell, each resumed from the one before, and the pairs."""
    for model in MODELS:
        every = cells(model)
        for index, cell in enumerate(every):
            yield Case(model, every[index - 1], cell, str(index), is_pair=False)
        for first, second in pairs(model):
            yield Case(model, every[first], every[second], f"{first} {second}", is_pair=True)


def kind(case: Case) -> str:
    return "pairs" if case.is_pair else "cells"


def path_of(scratch: Path, name: str, cell: Cell) -> Path:
    return scratch / f"{name}-{'-'.join(map(str, asdict(cell).values()))}.ckpt"


def run_fresh(name, folder, cell, scratch):
    return run_cell(name, folder, cell, save=path_of(scratch, name, cell))


def run_resumed(name, folder, before, cell, scratch):
    return run_cell(name, folder, cell, resume=path_of(scratch, name, before))


def page(results: dict[str, dict[str, dict[str, list]]]) -> str:
    """Return the tables."""
    lines = [
        "# Meshes that were compared with one process",
        "",
        f"Written by `python -m tools.cells`. On {NUM_RANKS} CPU ranks, in float64: {NUM_STEPS} "
        "steps of AdamW with clipping, of a Llama with tied",
        "embeddings and of a Qwen3-MoE with 8 experts, both with 8 heads, on rows with few or "
        "many labels.",
        "",
        "- **loss**, **weights**: largest differences of any loss, and of any weight at the end, "
        "from one process.",
        f"- **saved**: the checkpoint after {NUM_BATCHES} steps, read in one process, and that of "
        "a plain Trainer without this strategy:",
        "  largest difference of any weight and any state of the optimizer. Names, shapes, dtypes, "
        "counters and all else are equal.",
        f"- **resumed**: the next {NUM_BATCHES} steps from the checkpoint of the cell in the row "
        "before (the last row for the first).",
        "",
        "So what a cell loads does not depend on the cell that has saved it, and every cell has "
        f"loaded one; {NUM_PAIRS} random pairs of each",
        "model are below its table.",
        "",
    ]
    for name, found in results.items():
        lines += [
            f"## {name}: {len(found['cells'])} cells, largest difference {largest(found):.0e}",
            "",
            "| replicate | shard | context | tensor | expert | loss | weights | saved "
            "| resumed: loss | weights |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for cell, numbers in (found["cells"][str(n)] for n in range(len(cells(name)))):
            row = [*map(str, cell.values()), *(f"{x:.0e}" for x in numbers)]
            lines.append(f"| {' | '.join(row)} |")
        lines += [
            "",
            "replicate x shard, context, tensor, expert:",
            "",
            "| saved in | resumed in | loss | weights |",
            "|---|---|---|---|",
        ]
        for first, second, numbers in (found["pairs"][f"{x} {y}"] for x, y in pairs(name)):
            row = [show(first), show(second), *(f"{x:.0e}" for x in numbers)]
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def show(cell: dict[str, int]) -> str:
    replicate, shard, *others = cell.values()
    return f"{replicate} x {shard}, {', '.join(map(str, others))}"


def largest(found: dict[str, dict[str, list]]) -> float:
    rows = [*found["cells"].values(), *found["pairs"].values()]
    return max(max(numbers) for *_, numbers in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "cells.json"))
    arguments = parser.parse_args()
    file = arguments.results
    results = json.loads(file.read_text()) if file.is_file() else {}
    scratch = file.with_suffix(".checkpoints")
    scratch.mkdir(exist_ok=True)
    for model in MODELS:
        results.setdefault(model, {"cells": {}, "pairs": {}})
        exact_run(model), save_alone(model, scratch)  # once, not in each thread
    rest = [case for case in all_cases() if case.key not in results[case.model][kind(case)]]
    with tempfile.TemporaryDirectory() as folder:
        build("moe", **HEADS).save_pretrained(folder)
        runs = Runs(folder, scratch)
        for case, numbers in run_side_by_side(rest, runs.run, [NUM_RANKS]):
            shown = (case.before, case.cell) if case.is_pair else (case.cell,)
            row = [*map(asdict, shown), numbers]
            results[case.model][kind(case)][case.key] = row
            file.write_text(json.dumps(results))
            sys.stdout.write(f"{case.model} {' '.join(map(str, row))}\n")
            sys.stdout.flush()
    if arguments.write:
        arguments.write.write_text(page(results))
    count = sum(len(found["cells"]) + len(found["pairs"]) for found in results.values())
    worst = max(map(largest, results.values()))
    sys.stdout.write(f"{count} cells and pairs, largest difference {worst:.0e}\n")
    return int(any(largest(found) > LIMIT for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
