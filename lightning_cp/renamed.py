# SPDX-License-Identifier: Apache-2.0
"""Classes that have other names than in files of users: configs, and checkpoints.

Checkpoints are read with the present names; a config that holds a former one is refused by the
recipes, which name the present one.
"""

from typing import Any, Final

RENAMED: Final[dict[str, str]] = {}
"""Former dotted names of classes, and the present ones: ``{"package.Old": "package.New"}``."""


def update_names(checkpoint: dict[str, Any]) -> None:
    """Replace former names of classes in a checkpoint that was read.

    Lightning imports the class paths among hyperparameters, and looks for the states of callbacks
    and of a data module under the names of their classes.
    """
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        _update_paths(checkpoint.get(key))
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
