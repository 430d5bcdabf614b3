# SPDX-License-Identifier: Apache-2.0
"""Classes and arguments that have other names than in files and scripts of users, or are gone.

Files that a run has written, configs and checkpoints, are read with the present names of arguments;
checkpoints with those of classes, too. A former name in a script, in a command, or of a class in a
config is refused with one line, which has the present one, or what serves instead. Options that are
gone and were not set are passed over.
"""

from collections.abc import Mapping
from typing import Any, Final

RENAMED: Final[dict[str, str]] = {}
"""Former dotted names of classes, and the present ones: ``{"package.Old": "package.New"}``."""

ARGUMENTS: Final[dict[str, str]] = {
    "kernel": "attention.kernel",
    "attention_memory": "attention.memory",
    "gradient_wire": "attention.gradient_wire",
    "balance_window": "attention.balance_window",
    "ulysses_size": "attention.ulysses_size",
    "activation_checkpointing": "memory.activation_checkpointing",
    "keep_attention": "memory.keep_attention",
    "offload": "memory.offload",
    "offload_after": "memory.offload_after",
    "tile": "memory.tile",
    "compile": "memory.compile",
    "check_memory": "memory.check",
    "parameter_sharding": "parameters.sharding",
    "shard_size": "parameters.shard_size",
    "shard_modules": "parameters.shard_modules",
    "parameter_offload": "parameters.offload",
    "mixed_precision": "parameters.mixed_precision",
    "reduce_every_microbatch": "parameters.reduce_every_microbatch",
    "verify_steps": "verify.steps",
    "verify_max_len": "verify.max_len",
    "check_batches": "verify.check_batches",
    "broadcast_batch": "verify.broadcast_batch",
    "save_distributed_checkpoint": "checkpoints.distributed",
    "async_checkpoint": "checkpoints.asynchronous",
}
"""Former arguments of the strategy, `ContextParallel` and `hf_patches.context_parallel`, and the
groups and fields that they are now: ``{"kernel": "attention.kernel"}``."""

SHORT: Final[dict[str, str]] = {"parameters": "sharding", "verify": "steps"}
"""Groups for which one value may stand, in Python and in files: that of this field."""

METHODS: Final[dict[str, str]] = {
    "ContextParallel.alone": "reference(batch)",
    "ContextParallel.unsharded": "exempt(*modules)",
    "hf_patches.whole_rows": "shard_in_forward(model, cp)",
}
"""Former methods of `ContextParallel` and functions of `hf_patches`, and the present ones."""

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
    "checkpoint_staging_dir": "checkpoints=Checkpoints(asynchronous=True) copies each rank's part "
    "of a checkpoint to host memory. Where that has no room, leave it out: docs/lightning.md.",
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


def missing(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that is not there; of a former one, say what it is now.

    Example:
        >>> missing("ContextParallel", "alone")
        AttributeError('ContextParallel.alone is now reference(batch).')
    """
    if now := METHODS.get(f"{owner}.{name}"):
        return AttributeError(f"{owner}.{name} is now {now}.")
    return AttributeError(f"{owner!r} has no attribute {name!r}")


def explain_argument(name: str) -> str | None:
    """Return what a former argument is now; None for others.

    Example:
        >>> explain_argument("kernel")
        'kernel=... is now attention=Attention(kernel=...)'
    """
    if name == "balance":
        return (
            "balance=Mask(causal=True, window=...) is now attention=Attention(balance_window=...)"
        )
    if name not in ARGUMENTS:
        return None
    group, _, field = ARGUMENTS[name].partition(".")
    return f"{name}=... is now {group}={group.capitalize()}({field}=...)"


def refuse_arguments(function: str, arguments: Mapping[str, object]) -> None:
    """Raise for arguments that a function does not have; say what former ones are now."""
    if not arguments:
        return
    known = [line for name in arguments if (line := explain_argument(name))]
    if known:
        raise TypeError(f"{function}: {'; '.join(known)}.")
    for name in arguments:
        if gone := explain_removed(name):
            raise TypeError(f"{function}: {gone}")
    raise TypeError(f"{function} got an unexpected keyword argument {next(iter(arguments))!r}")


def group_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the strategy, from a file, with the former ones in their groups.

    Example:
        >>> group_arguments({"parameters": "none", "kernel": "flex"})
        {'parameters': {'sharding': 'none'}, 'attention': {'kernel': 'flex'}}
    """
    grouped = {name: value for name, value in arguments.items() if name not in ARGUMENTS}
    for group, field in SHORT.items():
        if isinstance(grouped.get(group), str | bool):
            grouped[group] = {field: grouped[group]}
    for name in (name for name in ARGUMENTS if name in arguments):
        group, _, field = ARGUMENTS[name].partition(".")
        given = grouped.setdefault(group, {})
        if not isinstance(given, dict) or "class_path" in given or field in given:
            raise ValueError(f"{explain_argument(name)}: write it into {group}, and there only.")
        grouped[group] = {**given, field: arguments[name]}
    return grouped


def update_options(options: Any, *, ours: bool = True) -> Any:
    """Return options under their present names, without those that are gone and were not set.

    What a run has written holds all options, also those with which it did nothing.

    Args:
        options: nested dicts and lists.
        ours: whether they are of a class of ours; classes in them that have a path tell.

    Example:
        >>> update_options({"class_path": "TextData", "init_args": {"streaming": False}})
        {'class_path': 'TextData', 'init_args': {}}
    """
    if isinstance(options, list):
        return [update_options(item, ours=ours) for item in options]
    if not isinstance(options, dict):
        return options
    path = options.get("class_path", options.get("_class_path"))
    if isinstance(path, str):  # without a package it is a class that the recipes know
        ours = "." not in path or path.startswith(("recipes.", "lightning_cp."))
    updated = {
        name: update_options(value, ours=ours)
        for name, value in options.items()
        if not (ours and name in UNSET and value == UNSET[name])
    }
    is_strategy = isinstance(path, str) and ours and path.endswith("ContextParallelStrategy")
    if is_strategy and isinstance(updated.get("init_args"), dict):
        updated["init_args"] = group_arguments(updated["init_args"])
    return updated


def update_names(checkpoint: dict[str, Any]) -> None:
    """Replace former names of classes in a checkpoint that was read.

    Lightning imports the class paths among hyperparameters, and looks for the states of callbacks
    and of a data module under the names of their classes.
    """
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if key in checkpoint:
            checkpoint[key] = update_options(checkpoint[key], ours=False)
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
