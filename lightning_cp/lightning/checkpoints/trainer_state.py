# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the strategy: what Lightning hands over, split for `lightning_cp.checkpoint`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_cp import checkpoint as checkpoints
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


def save_folder(
    checkpoint: dict[str, Any],
    path: Path,
    save: Callable[[dict[str, Any], dict[str, Any], Path], None] = checkpoints.save_folder,
) -> None:
    """Save a checkpoint as a folder, into which every rank writes its shards. Collective.

    Args:
        checkpoint: the checkpoint.
        path: the folder.
        save: saves shards and the rest, now or in the background.
    """
    state = {"state_dict": checkpoint.pop("state_dict")}
    for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer_state
    save(state, checkpoint, path)


def save_file(
    checkpoint: dict[str, Any],
    path: Path,
    save: Callable[[dict[str, Any], Path], None],
    *,
    is_global_zero: bool,
) -> None:
    """Save a checkpoint as one file, written by rank 0. Collective.

    Args:
        checkpoint: the checkpoint; shards in it are gathered.
        path: the file, replaced only once it is complete.
        save: writes a file.
        is_global_zero: whether this is rank 0.
    """
    checkpoint = checkpoints.gather_shards(checkpoint)

    def write() -> None:
        if is_global_zero:
            with checkpoints.replacing(path):
                save(checkpoint, path)

    checkpoints.together(write, f"{path} was not saved.", keep=(OSError,))


def load(trainer: Trainer, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Load a folder or a file into the module and the optimizers of a Trainer. Collective."""
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
