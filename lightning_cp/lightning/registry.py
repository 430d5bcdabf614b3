# SPDX-License-Identifier: Apache-2.0
"""Tells Lightning the strategy's names and how its folders are read, without importing Lightning.

`import lightning_cp` must be enough for `Trainer(strategy="context_parallel")` and for
`load_from_checkpoint(FOLDER)`, whichever is imported first; but importing Lightning takes seconds,
and not everybody wants it. So both go in when Lightning's own modules appear.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_STRATEGIES: Final = "lightning.pytorch.strategies"
_SAVING: Final = "lightning.pytorch.core.saving"
_NAME: Final = "context_parallel"
_SIZES: Final = range(1, 1025)
"""Lightning knows no patterns: each name is an entry of its own."""


def register() -> None:
    """Tell Lightning now if it is there, else as soon as it is."""
    for name, ready in ((_STRATEGIES, "StrategyRegistry"), (_SAVING, "_load_from_checkpoint")):
        if name in sys.modules and hasattr(sys.modules[name], ready):
            _tell(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Finder(name))


def _tell(home: ModuleType) -> None:
    if home.__name__ == _STRATEGIES:
        _add_names(home)
    else:
        read_folders(home)


def read_folders(saving: ModuleType) -> None:
    """Let `load_from_checkpoint` read checkpoint folders; `undo_read_folders` takes it back.

    Lightning 2.6 has no door for this: `load_from_checkpoint` of modules and of data modules calls
    `saving.pl_load`, which opens its path as a file. That one name is replaced; folders come to us,
    and everything else goes to Lightning's own function as before.
    """
    plain_load = getattr(saving, "pl_load", None)
    if plain_load is None or hasattr(plain_load, "__wrapped__"):
        return

    @wraps(plain_load)
    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | Path) and not os.path.isfile(path_or_url):
            from lightning_cp.checkpoint import find_folder, read_whole

            folder = find_folder(Path(path_or_url))
            if folder.is_dir():
                return read_whole(folder, map_location=map_location, weights_only=weights_only)
        return plain_load(path_or_url, map_location=map_location, weights_only=weights_only)

    saving.pl_load = load  # type: ignore[attr-defined]


def undo_read_folders(saving: ModuleType) -> None:
    """Give Lightning its own function back."""
    saving.pl_load = getattr(saving.pl_load, "__wrapped__", saving.pl_load)  # type: ignore[attr-defined]


def _add_names(home: ModuleType) -> None:
    registry = home.StrategyRegistry
    for name, size in [(_NAME, "auto"), *((f"{_NAME}_{size}", size) for size in _SIZES)]:
        if name not in registry:
            registry.register(
                name,
                partial(_build, context_parallel_size=size),
                description=f"Rows cut across ranks (context_parallel_size={size}), exactly.",
            )


def _build(**options: Any) -> Any:
    from lightning_cp.lightning.strategy import ContextParallelStrategy

    return ContextParallelStrategy(**options)


class _Finder(MetaPathFinder):
    """Finds one module, the way the others do, and lets `_Loader` load it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Step aside for every module but that one."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module as its own loader does, then tells it of us."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then tell it."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _tell(module)
