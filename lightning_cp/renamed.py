# SPDX-License-Identifier: Apache-2.0
"""Classes that have other names than in files of users, configs and checkpoints, or are gone.

Checkpoints are read with the present names; a config or a command that holds a former one is
refused by the recipes, which name the present one, or what serves instead. Options that are gone
and were not set are passed over.
"""

from typing import Any, Final

RENAMED: Final[dict[str, str]] = {}
"""Former dotted names of classes, and the present ones: ``{"package.Old": "package.New"}``."""

_PREFERENCES: Final = (
    "Use DPOTrainer, KTOTrainer, RewardTrainer or GRPOTrainer of TRL, and "
    "hf_patches.context_parallel(trainer, size=...): docs/from-trainer.md. For ORPO and "
    "losses of your own: examples/orpo.py, docs/preference.md."
)
REMOVED: Final[dict[str, str]] = {
    "PairData": _PREFERENCES,
    "recipes.preference": _PREFERENCES,
    "lightning-cp reference": "A ref_model of TRL's DPOTrainer is sharded like the trained "
    "one, and LoRA needs none: docs/from-trainer.md.",
    "checkpoint_staging_dir": "async_checkpoint=True copies each rank's part of a checkpoint to "
    "host memory. Where that has no room, set async_checkpoint=False: docs/lightning.md.",
    "streaming": "Samples are packed once, and mapped into memory from disk. Leave it out; for a "
    "part of a large source set max_documents, or for the hub split='train[:1%]'.",
    "warmup_fraction": "Write it as warmup_steps: below 1 it is a fraction of all steps.",
    "decay_embeddings": "Embeddings have weight decay, as all matrices. Set weight_decay=0, or "
    "override configure_optimizers() in a script with a subclass of CausalLMModule.",
    "expert_parallel_size": "Experts are sharded, as other weights. For experts that stay on their "
    "ranks load the model in a script, with a distributed_config: docs/tensor-parallel.md.",
}
"""Classes, packages, commands and options that are gone, and what to use instead."""

UNSET: Final[dict[str, Any]] = {
    "checkpoint_staging_dir": None,
    "streaming": False,
    "warmup_fraction": None,
    "decay_embeddings": True,
    "expert_parallel_size": 1,
}
"""Options that are gone, and the values with which they did nothing."""


def explain_removed(name: str) -> str | None:
    """Return what to use instead of a class, command or option that is gone; None for others.

    Example:
        >>> explain_removed("recipes.preference.PairData")[:59]
        'recipes.preference.PairData is gone. Use DPOTrainer, KTOTra'
    """
    for former, instead in REMOVED.items():
        if name == former or name.startswith(f"{former}."):
            return f"{name} is gone. {instead}"
    return None


def drop_unset(options: Any, *, ours: bool = True) -> Any:
    """Return options without those that are gone and were not set.

    What a run has written holds all options, also those with which it did nothing.

    Args:
        options: nested dicts and lists.
        ours: whether they are of a class of ours; classes in them that have a path tell.

    Example:
        >>> drop_unset({"class_path": "recipes.data.TextData", "init_args": {"streaming": False}})
        {'class_path': 'recipes.data.TextData', 'init_args': {}}
    """
    if isinstance(options, list):
        return [drop_unset(item, ours=ours) for item in options]
    if not isinstance(options, dict):
        return options
    path = options.get("class_path", options.get("_class_path"))
    if isinstance(path, str):  # without a package it is a class that the recipes know
        ours = "." not in path or path.startswith(("recipes.", "lightning_cp."))
    return {
        name: drop_unset(value, ours=ours)
        for name, value in options.items()
        if not (ours and name in UNSET and value == UNSET[name])
    }


def update_names(checkpoint: dict[str, Any]) -> None:
    """Replace former names of classes in a checkpoint that was read.

    Lightning imports the class paths among hyperparameters, and looks for the states of callbacks
    and of a data module under the names of their classes.
    """
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if key in checkpoint:
            checkpoint[key] = drop_unset(checkpoint[key], ours=False)
            _update_paths(checkpoint[key])
    for states in (checkpoint, checkpoint.get("callbacks") or {}):
        for former, present in RENAMED.items():
            name, new_name = (path.rpartition(".")[2] for path in (former, present))
            if name in states:
                states[new_name] = states.pop(name)


def _update_paths(value: Any) -> None:
    """Replace the class paths in nested dicts and lists."""
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if key in ("class_path", "_class_path") and isinstance(item, str):
                value[key] = RENAMED.get(item, item)
            else:
                _update_paths(item)
