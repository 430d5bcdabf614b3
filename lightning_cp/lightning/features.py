# SPDX-License-Identifier: Apache-2.0
"""Features of Lightning that cannot work with sharded weights: refused before anything is trained.

Knows Lightning's callbacks and plugins. Every feature, and what becomes of it, is in
docs/lightning-features.md.
"""

from collections.abc import Iterable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins import DeepSpeedPrecision
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from lightning_cp.comm.mesh import gather_objects


def check_features(trainer: Trainer) -> None:
    """Refuse callbacks and plugins that would fail in the middle of a run."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ValueError(
            "ModelPruning is not supported: it chooses weights by comparing all of them, but each "
            "rank holds a part (with parameter_sharding='none' it fails as well). Prune the whole "
            "weights after training: `python -m lightning_cp consolidate DIR OUT`, then "
            "torch.nn.utils.prune."
        )
    if any(getattr(logger, "_log_graph", False) for logger in trainer.loggers):
        raise ValueError(
            "TensorBoardLogger(log_graph=True) runs the model on rank 0 only, which would wait for "
            "the other ranks' weights for ever. Leave log_graph out, or draw the graph in a script "
            "of its own on one device: SummaryWriter.add_graph(model, inputs)."
        )
    if isinstance(trainer.precision_plugin, DeepSpeedPrecision):
        raise ValueError(
            "plugins=[DeepSpeedPrecision(...)] belongs to DeepSpeedStrategy, whose engine takes "
            "the steps. Use Trainer(precision='bf16-true') or 'bf16-mixed' instead."
        )


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that need all weights as one vector."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "torch.optim.LBFGS is not supported: it flattens all weights into one vector, but each "
            "rank holds a part. Use an optimizer that treats each weight by itself: AdamW, SGD."
        )


def check_hooks(module: LightningModule, mesh: DeviceMesh) -> None:
    """Refuse hooks that only some ranks have: what they ask of sharded weights needs all ranks.

    Args:
        module: whose parts may have hooks.
        mesh: all ranks, as one axis.
    """
    counts = gather_objects(mesh, _num_hooks(module))
    if len(set(counts)) > 1:
        raise ValueError(
            f"The ranks have different numbers of hooks on their modules ({counts}). A hook of one "
            "rank that looks at sharded weights waits for the others for ever. The usual cause is "
            "`WandbLogger.watch(model)`, which sets hooks on rank 0 only: leave it out, and log "
            "norms in on_before_optimizer_step() on all ranks; other hooks, register on all ranks."
        )


def _num_hooks(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in module.modules() for kind in kinds)
