# SPDX-License-Identifier: Apache-2.0
"""`CheckpointSaver`: saves folders of shards, now or in the background, or one file; loads both."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_cp import checkpoint as checkpoints
from lightning_cp.adapters import describe_models
from lightning_cp.config import Checkpoints
from lightning_cp.lightning.model import averaging
from lightning_cp.lightning.private import requested_weights_only, saves_within_epochs
from lightning_cp.renamed import update_names


def check_storage_options(storage_options: object, strategy: str) -> None:
    """Raise for options of a CheckpointIO."""
    if storage_options is not None:
        raise TypeError(
            f"`{strategy}.save_checkpoint(..., storage_options=...)` is not supported: distributed "
            "checkpoints are not written by a CheckpointIO."
        )


def check_links(trainer: Trainer) -> None:
    """Raise for a callback that reads the names of checkpoints before they exist."""
    for callback in trainer.checkpoint_callbacks:
        name = getattr(callback, "filename", None) or "{epoch}-{step}"
        # Without a monitor, a checkpoint replaces the one before if it has the same name.
        keeps_several = getattr(callback, "save_top_k", 1) not in (0, 1)
        keeps_several &= getattr(callback, "monitor", None) is not None
        if keeps_several and not _is_new_each_time(name, callback, trainer):
            raise ValueError(
                f"ModelCheckpoint(filename={name!r}, save_top_k={callback.save_top_k}) gives a "  # type: ignore[attr-defined]
                "checkpoint another name if the file exists, but one that is saved in the "
                "background does not exist yet, and would be overwritten. Put the step into the "
                "name, filename='{step}', or leave out checkpoints=Checkpoints(asynchronous=True)."
            )
        if getattr(callback, "save_last", None) == "link":
            raise ValueError(
                "ModelCheckpoint(save_last='link') replaces its link before a checkpoint that is "
                "saved in the background exists: a job that is killed would have none. Use "
                "save_last=True, or leave out checkpoints=Checkpoints(asynchronous=True)."
            )


def _is_new_each_time(name: str, callback: object, trainer: Trainer) -> bool:
    """Return whether a callback saves each checkpoint under another name."""
    within_epochs = (
        saves_within_epochs(callback)
        or not isinstance(trainer.val_check_interval, float)
        or trainer.val_check_interval < 1
    )
    return "{step" in name or ("{epoch" in name and not within_epochs)


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
            _save_folder(checkpoint, path, self._saver.save)
            if not self._is_open:  # nothing else would wait, in on_fit_end() or later
                self._saver.close()
            elif path.name.startswith("hpc_ckpt_"):  # SLURM requeues after that of Lightning
                self._saver.wait()
        elif self._config.distributed:
            _save_folder(checkpoint, path, checkpoints.save_folder)
        else:
            gathered = checkpoints.gather_shards(checkpoint)

            def write() -> None:
                if is_global_zero:
                    with checkpoints.replacing(path):
                        checkpoint_io.save_checkpoint(gathered, path, storage_options=None)

            checkpoints.together(write, f"{path} was not saved.", keep=(OSError,))

    def load(self, trainer: Trainer, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
        """Load a folder or a file, saved by any number of ranks. Collective.

        Args:
            trainer: its module and optimizers, sharded, are loaded.
            path: the same on all ranks.
            weights_only: see `torch.load`.
        """
        self._saver.wait()
        module = trainer.lightning_module
        is_folder = checkpoints.is_checkpoint_folder(path)
        read = checkpoints.load_folder if is_folder else checkpoints.load_file
        checkpoint = read(
            module,
            trainer.strategy.optimizers,
            path,
            strict=module.strict_loading,
            weights_only=requested_weights_only() if weights_only is None else weights_only,
            with_weights=averaging.needs_weights(trainer),
        )
        update_names(checkpoint)
        averaging.clear_schedulers(trainer, checkpoint)
        return checkpoint

    def after_save(self, remove: Callable[[], None]) -> None:
        """Call a function once the checkpoint that is saved in the background is complete."""
        self._saver.after_save(remove)


def _save_folder(
    checkpoint: dict[str, Any],
    path: Path,
    save: Callable[[dict[str, Any], dict[str, Any], Path], None],
) -> None:
    """Save a checkpoint as a folder, into which every rank writes its shards. Collective."""
    state = {"state_dict": checkpoint.pop("state_dict")}
    for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer_state
    save(state, checkpoint, path)
