"""Every mesh of 8 ranks (replicate, shard, context, tensor, expert), compared with one process.

`python -m tests.cells --write docs/cells.md` trains 20 steps in each cell, in float64, with AdamW
and clipping. Each cell then resumes from the checkpoint that the cell before it has saved after ten
steps. `--results FILE` keeps what is done, so that a second call continues the first.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.lightning.mesh_runs import Module, build, hybrid, norm, route, run_alone, run_fit
from tests.ranks import RankPool

NUM_RANKS, NUM_BATCHES = 8, 10
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
class Result:
    """The largest differences from one process."""

    loss: float
    weight: float
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


def compare(
    pool: RankPool, name: str, folder: str, before: Cell, cell: Cell, scratch: Path
) -> Result:
    """Train in a cell, and resume in it what the cell before has trained."""
    exact = run_alone(name, NUM_BATCHES, epochs=2, num_losses=NUM_STEPS, **HEADS)
    if not path_of(scratch, name, before).exists():
        pool.run(run_fresh, name, folder, before, scratch)
    whole = pool.run(run_fresh, name, folder, cell, scratch)
    resumed = pool.run(run_resumed, name, folder, before, cell, scratch)
    lengths = {len(losses) for losses, _ in whole}, {len(losses) for losses, _ in resumed}
    assert lengths == ({NUM_STEPS}, {NUM_BATCHES}), lengths
    fresh = [max(pair) for pair in zip(*(differences(x, exact) for x in whole), strict=True)]
    later = [max(pair) for pair in zip(*(differences(x, exact) for x in resumed), strict=True)]
    return Result(*fresh, *later)


def path_of(scratch: Path, name: str, cell: Cell) -> Path:
    return scratch / f"{name}-{'-'.join(map(str, asdict(cell).values()))}.ckpt"


def run_fresh(name, folder, cell, scratch):
    return run_cell(name, folder, cell, save=path_of(scratch, name, cell))


def run_resumed(name, folder, before, cell, scratch):
    return run_cell(name, folder, cell, resume=path_of(scratch, name, before))


def page(results: dict[str, dict[str, list]]) -> str:
    """Return the table."""
    lines = [
        "# Meshes that were compared with one process",
        "",
        f"Written by `python -m tests.cells`. On {NUM_RANKS} CPU ranks, in float64: {NUM_STEPS} "
        "steps of AdamW with clipping, of a Llama with tied",
        "embeddings and of a Qwen3-MoE with 8 experts, both with 8 heads, on rows with few or "
        "many labels. Then the same, but resumed after ten",
        "steps from a checkpoint of the cell in the row before. Largest differences of any loss, "
        "and of any weight at the end.",
        "",
    ]
    for name, found in results.items():
        worst = max(max(numbers) for _, numbers in found.values())
        lines += [
            f"## {name}: {len(found)} cells, largest difference {worst:.0e}",
            "",
            "| replicate | shard | context | tensor | expert | loss | weights | resumed: loss "
            "| weights |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for cell, numbers in found.values():
            row = [*map(str, cell.values()), *(f"{x:.0e}" for x in numbers)]
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "cells.json"))
    arguments = parser.parse_args()
    file = arguments.results
    results = json.loads(file.read_text()) if file.is_file() else {}
    pool = RankPool(NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        build("moe", **HEADS).save_pretrained(folder)
        for name in ("llama", "moe"):
            every = cells(name)
            found = results.setdefault(name, {})
            for index, cell in enumerate(every):
                if str(index) in found:
                    continue
                result = compare(pool, name, folder, every[index - 1], cell, Path(scratch))
                found[str(index)] = (asdict(cell), list(asdict(result).values()))
                file.write_text(json.dumps(results))
                numbers = " ".join(f"{x:.0e}" for x in found[str(index)][1])
                sys.stdout.write(f"{name} {cell} {numbers}\n")
                sys.stdout.flush()
    if arguments.write:
        arguments.write.write_text(page(results))


if __name__ == "__main__":
    main()
