# SPDX-License-Identifier: Apache-2.0
"""The part of the strategy that saves and loads checkpoints: a folder of shards, or one file."""

from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies.strategy import Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp import checkpoint as checkpoints
from lightning_cp.adapters import describe_models
from lightning_cp.lightning import checkpointing
from lightning_cp.lightning.mesh_strategy import MeshStrategy


class CheckpointStrategy(MeshStrategy):
    """Saves what any number of ranks can load."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights: shards for a folder, full weights on rank 0 for a file."""
        return checkpoints.model_state(self._module(), full=not self._save_distributed_checkpoint)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, as `lightning_module_state_dict` does the weights."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        full = not self._save_distributed_checkpoint
        return checkpoints.optimizer_state(self._module(), optimizer, full=full)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Save a folder or a file; a job that is killed meanwhile leaves the previous one."""
        checkpointing.check_storage_options(storage_options, type(self).__name__)
        path = Path(self.broadcast(filepath))
        checkpoint |= describe_models(self._module())
        if self._save_distributed_checkpoint:
            checkpointing.save_folder(checkpoint, path)
        else:
            save = partial(Strategy.save_checkpoint, self)
            checkpointing.save_file(checkpoint, path, save, is_global_zero=self.is_global_zero)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load into the sharded model and its optimizers, saved by any number of ranks."""
        path = Path(self.broadcast(checkpoint_path))
        return checkpointing.load(self._trainer(), path, weights_only=weights_only)
