# SPDX-License-Identifier: Apache-2.0
"""Registers the strategy's names and the reader of checkpoint folders, without importing Lightning.

`import lightning_cp` must suffice for `Trainer(strategy="context_parallel")` and for
`load_from_checkpoint(FOLDER)`, whichever package is imported first. Importing Lightning takes
seconds, and it has no entry point for strategies (2.6): its modules are extended once imported.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lightning_cp.renamed import update_names

_NAME: Final = "context_parallel"
# Lightning's registry has no patterns: each name is an entry.
_SIZES: Final = range(1, 1025)


def register() -> None:
    """Extend Lightning's modules now if they are imported, else as soon as they are."""
    for name, ready, extend in (
        ("lightning.pytorch.strategies", "StrategyRegistry", _add_strategies),
        ("lightning.pytorch.core.saving", "_load_from_checkpoint", read_folders),
    ):
        if hasattr(sys.modules.get(name), ready):
            extend(sys.modules[name])
        else:
            sys.meta_path.insert(0, _ExtendOnImport(name, extend))


class _ExtendOnImport(MetaPathFinder):
    """Calls a function on one module after its import, then removes itself."""

    def __init__(self, name: str, extend: Callable[[ModuleType], None]) -> None:
        self._name, self._extend = name, extend

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as other finders do; return None for all other modules."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_extend(module: ModuleType) -> None:
                execute(module)
                self._extend(module)

            spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec


def _add_strategies(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    for name, size in [(_NAME, "auto"), *((f"{_NAME}_{size}", size) for size in _SIZES)]:
        if name not in registry:
            registry.register(
                name,
                partial(_build, context_parallel_size=size),
                description=f"Context parallelism with context_parallel_size={size}.",
            )


def _build(**options: Any) -> Any:
    from lightning_cp.lightning.strategy import ContextParallelStrategy

    return ContextParallelStrategy(**options)


def read_folders(saving: ModuleType) -> None:
    """Let `load_from_checkpoint` read folders and former names; `undo_read_folders` reverts it.

    Lightning 2.6 opens the path as a file, by `saving.pl_load`, for modules and data modules. Only
    that name is replaced; other paths go to Lightning's own function.
    """
    plain_load = getattr(saving, "pl_load", None)
    if plain_load is None or hasattr(plain_load, "__wrapped__"):
        return

    @wraps(plain_load)
    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        read: Callable[..., dict[str, Any]] = plain_load
        if isinstance(path_or_url, str | Path) and not os.path.isfile(path_or_url):
            from lightning_cp.checkpoint import find_folder, read_whole

            folder = find_folder(Path(path_or_url))
            if folder.is_dir():
                read, path_or_url = read_whole, folder
        checkpoint = read(path_or_url, map_location=map_location, weights_only=weights_only)
        update_names(checkpoint)
        return checkpoint

    saving.pl_load = load  # type: ignore[attr-defined]


def undo_read_folders(saving: ModuleType) -> None:
    """Restore Lightning's own function."""
    saving.pl_load = getattr(saving.pl_load, "__wrapped__", saving.pl_load)  # type: ignore[attr-defined]
