"""What a script writes down for the test that has started it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer


def write_report(trainer: Trainer, out: Path, **found: Any) -> None:
    """Write where this rank lies in the mesh, and what it has found. All ranks must call it."""
    strategy = trainer.strategy
    mesh = strategy.device_mesh
    named = trainer.lightning_module.named_parameters()
    whole = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.data.clone() for name, p in named
    }
    report = {
        "node": trainer.node_rank,
        "local_rank": trainer.local_rank,
        "global_rank": trainer.global_rank,
        "context_ranks": dist.get_process_group_ranks(mesh["context_parallel"].get_group()),
        "data_ranks": dist.get_process_group_ranks(mesh["data_parallel"].get_group()),
        "context_rank": strategy.context_parallel_rank,
        "data_rank": strategy.data_parallel_rank,
        "environment": type(strategy.cluster_environment).__name__,
        "weights": {name.removeprefix("model."): w.detach() for name, w in whole.items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        **found,
    }
    torch.save(report, out / f"rank{trainer.global_rank}.pt")
