# SPDX-License-Identifier: Apache-2.0
"""Features of Lightning that cannot work with sharded parameters: an error before training starts.

Knows Lightning's callbacks, plugins and flags; docs/lightning-features.md lists all of them.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import DeepSpeedPrecision
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_cp.comm.mesh import gather_objects
from lightning_cp.lightning.private import draws_graph
from lightning_cp.patch import Patch
from lightning_cp.private.modules import module_hooks


def check_module(module: LightningModule) -> None:
    """Raise for steps that fetch batches, and for modules that FSDP1 has wrapped."""
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
            raise ValueError(
                f"{type(module).__name__}.{name}(dataloader_iter) fetches its own batches, which "
                f"the strategy cannot shard. Use {name}(self, batch, batch_idx)."
            )
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise TypeError(
            "Found modules that are wrapped with `torch.distributed.fsdp.FullyShardedDataParallel`."
            " The strategy only supports the new FSDP2 APIs in PyTorch >= 2.4: shard nothing, or "
            "use fully_shard(module, mesh=self.trainer.strategy.shard_mesh) in configure_model()."
        )


def check_features(trainer: Trainer) -> None:
    """Raise for callbacks and plugins that would fail in the middle of a run."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ValueError(
            "ModelPruning is not supported: it selects weights by comparing all of them, but each "
            "rank holds a shard (with parameters='none' it fails as well). Prune the full "
            "weights after training: `lightning-cp consolidate DIR OUT`, then "
            "torch.nn.utils.prune."
        )
    if any(draws_graph(logger) for logger in trainer.loggers):
        raise ValueError(
            "TensorBoardLogger(log_graph=True) runs the model on rank 0 only, which would wait "
            "forever for the shards of other ranks. Remove log_graph, or write the graph in a "
            "separate script on one device: SummaryWriter.add_graph(model, inputs)."
        )
    if isinstance(trainer.precision_plugin, DeepSpeedPrecision):
        raise ValueError(
            "plugins=[DeepSpeedPrecision(...)] belongs to DeepSpeedStrategy, whose engine runs "
            "the optimizer. Use Trainer(precision='bf16-true') or 'bf16-mixed' instead."
        )


def check_offload_features(trainer: Trainer) -> None:
    """Raise for callbacks that cannot use parameters in host memory."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} keeps its average on the device, but "
                "parameters=Parameters(offload=True) keeps parameters in host memory. Remove one "
                "of them."
            )


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Raise for optimizers that need all parameters as one vector."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "torch.optim.LBFGS is not supported: it flattens all parameters into one vector, but "
            "each rank holds a shard. Use an optimizer that updates each parameter separately, "
            "such as AdamW or SGD."
        )


def check_hooks(module: LightningModule, mesh: DeviceMesh) -> None:
    """Raise on all ranks if only some have a hook: to read sharded parameters needs all ranks.

    Args:
        module: the module whose submodules may have hooks.
        mesh: all ranks, as one axis.
    """
    counts = gather_objects(mesh, _num_hooks(module))
    if len(set(counts)) > 1:
        raise ValueError(
            f"The ranks have different numbers of hooks on their modules ({counts}). A hook on one "
            "rank that reads sharded parameters waits forever for the others. The usual cause is "
            "`WandbLogger.watch(model)`, which registers hooks on rank 0 only: remove it, and log "
            "norms in on_before_optimizer_step() on all ranks. Register other hooks on all ranks."
        )


def _num_hooks(module: nn.Module) -> int:
    return sum(len(module_hooks(part)) for part in module.modules())


def disable_inference_mode(trainer: Trainer) -> Callable[[], None]:
    """Run evaluation under `torch.no_grad`; return what restores the Trainer's own setting.

    Parameters that FSDP2 gathers in inference mode cannot be used by a later training step.
    """
    loops: list[Any] = [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    patches = [Patch(loop, "inference_mode", False) for loop in loops]

    def restore() -> None:
        for patch in patches:
            patch.remove()

    return restore
