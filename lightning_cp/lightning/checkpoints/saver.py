# SPDX-License-Identifier: Apache-2.0
"""`CheckpointSaver`: saves folders of shards, now or in the background, or one file; loads both."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_cp import checkpoint as checkpoints
from lightning_cp.adapters import describe_models
from lightning_cp.config import Checkpoints
from lightning_cp.lightning.checkpoints import trainer_state


class CheckpointSaver:
    """Saves what any number of ranks can load.

    Args:
        config: a folder or a file, and whether in the background.
        timeout: of the process group of saves in the background.
    """

    def __init__(self, config: Checkpoints, timeout: timedelta | None) -> None:
        self._config = config
        self._saver = checkpoints.BackgroundSaver(timeout)
        self._is_open = False

    def open(self) -> None:
        """Let saves go on in the background until `close`."""
        self._is_open = True

    def close(self) -> None:
        """Wait for the checkpoint that is saved in the background."""
        self._is_open = False
        self._saver.close()

    def wait(self) -> None:
        """Wait until a checkpoint that is saved in the background is complete. Collective."""
        self._saver.wait()

    def is_async(self, checkpoint_io: CheckpointIO) -> bool:
        """Return whether folders are saved in the background."""
        by_plugin = isinstance(checkpoint_io, AsyncCheckpointIO)
        return self._config.asynchronous or (by_plugin and self._config.distributed)

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights: shards for a folder, full weights on rank 0 for a file."""
        return checkpoints.model_state(module, full=not self._config.distributed)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, as `model_state` does the weights."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return checkpoints.optimizer_state(module, optimizer, full=not self._config.distributed)

    def save(
        self,
        checkpoint: dict[str, Any],
        path: Path,
        module: nn.Module,
        checkpoint_io: CheckpointIO,
        *,
        is_global_zero: bool,
    ) -> None:
        """Save a folder or a file. Collective.

        Args:
            checkpoint: of Lightning.
            path: the same on all ranks.
            module: the LightningModule.
            checkpoint_io: writes a file.
            is_global_zero: whether this is rank 0.
        """
        checkpoint |= describe_models(module)
        if self.is_async(checkpoint_io):
            trainer_state.save_folder(checkpoint, path, self._saver.save)
            if not self._is_open:  # nothing else would wait, in on_fit_end() or later
                self._saver.close()
            elif path.name.startswith("hpc_ckpt_"):  # SLURM requeues after that of Lightning
                self._saver.wait()
        elif self._config.distributed:
            trainer_state.save_folder(checkpoint, path)
        else:
            save = partial(checkpoint_io.save_checkpoint, storage_options=None)
            trainer_state.save_file(checkpoint, path, save, is_global_zero=is_global_zero)

    def load(self, trainer: Trainer, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
        """Load into the sharded model and its optimizers, saved by any number of ranks."""
        self._saver.wait()
        return trainer_state.load(trainer, path, weights_only=weights_only)

    def after_save(self, remove: Callable[[], None]) -> None:
        """Call a function once the checkpoint that is saved in the background is complete."""
        self._saver.after_save(remove)
