# SPDX-License-Identifier: Apache-2.0
"""The part of the strategy that saves and loads checkpoints: a folder of shards, or one file."""

from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies.strategy import Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp import checkpoint as checkpoints
from lightning_cp.adapters import describe_models
from lightning_cp.lightning.checkpoints import trainer_state
from lightning_cp.lightning.processes.mesh_strategy import MeshStrategy


class CheckpointStrategy(MeshStrategy):
    """Saves what any number of ranks can load. Its arguments are those of `MeshStrategy`."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._saver = checkpoints.BackgroundSaver(self._timeout)
        self._is_set_up = False

    @override
    def setup_environment(self) -> None:
        """Connect the processes; until `teardown`, saves may go on in the background."""
        super().setup_environment()
        self._is_set_up = True

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is saved in the background is complete. Collective."""
        self._saver.wait()

    def _is_async(self) -> bool:
        """Return whether folders are saved in the background."""
        by_plugin = isinstance(self.checkpoint_io, AsyncCheckpointIO)
        saved = self._config.checkpoints
        return saved.asynchronous or (by_plugin and saved.distributed)

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
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a folder or a file; a job that is killed meanwhile leaves the previous one.

        In the background, this returns once training may change all tensors.
        """
        trainer_state.check_storage_options(storage_options, type(self).__name__)
        path = Path(self.broadcast(filepath))
        checkpoint |= describe_models(self._module())
        if self._is_async():
            trainer_state.save_folder(checkpoint, path, self._saver.save)
            if not self._is_set_up:  # nothing else would wait, in on_fit_end() or later
                self._saver.close()
            elif path.name.startswith("hpc_ckpt_"):  # SLURM requeues after that of Lightning
                self._saver.wait()
        elif self._save_distributed_checkpoint:
            trainer_state.save_folder(checkpoint, path)
        else:
            save = partial(Strategy.save_checkpoint, self)
            trainer_state.save_file(checkpoint, path, save, is_global_zero=self.is_global_zero)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load into the sharded model and its optimizers, saved by any number of ranks."""
        self._saver.wait()
        path = Path(self.broadcast(checkpoint_path))
        return trainer_state.load(self._trainer(), path, weights_only=weights_only)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, once the one that is saved in the background is complete."""
        self._saver.after_save(partial(super().remove_checkpoint, filepath))

    @override
    def teardown(self) -> None:
        """Wait for the checkpoint that is saved in the background."""
        self._is_set_up = False
        try:
            self._saver.close()
        finally:
            super().teardown()
