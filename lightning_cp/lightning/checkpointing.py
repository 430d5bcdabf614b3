# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the strategy: what Lightning hands over, split for `lightning_cp.checkpoint`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_cp import checkpoint as checkpoints
from lightning_cp.lightning import averaging


def check_storage_options(storage_options: object, strategy: str) -> None:
    """Raise for options of a CheckpointIO."""
    if storage_options is not None:
        raise TypeError(
            f"`{strategy}.save_checkpoint(..., storage_options=...)` is not supported: distributed "
            "checkpoints are not written by a CheckpointIO."
        )


def save_folder(checkpoint: dict[str, Any], path: Path) -> None:
    """Save a checkpoint as a folder, into which every rank writes its shards. Collective."""
    state = {"state_dict": checkpoint.pop("state_dict")}
    for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer_state
    checkpoints.save_folder(state, checkpoint, path)


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
        weights_only=_requested_weights_only() if weights_only is None else weights_only,
        with_weights=averaging.needs_weights(trainer),
    )
    averaging.clear_schedulers(trainer, checkpoint)
    return checkpoint


def _requested_weights_only() -> bool | None:
    """Return the ``weights_only`` of `Trainer.fit`, read from the frame of `Trainer._run`.

    Lightning 2.6 drops it for strategies that restore after setup: `Trainer._run` calls
    `_restore_modules_and_callbacks(ckpt_path)` without it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            weights_only: bool | None = frame.f_locals.get("weights_only")
            return weights_only
        frame = frame.f_back
    return None
