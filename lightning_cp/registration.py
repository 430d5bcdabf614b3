# SPDX-License-Identifier: Apache-2.0
"""Tells Lightning the strategy's names, without importing Lightning.

`import lightning_cp` must be enough for `Trainer(strategy="context_parallel")`, whichever of the
two is imported first; but importing Lightning takes seconds, and not everybody wants it. So the
names go in when Lightning's own registry appears.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_HOME: Final = "lightning.pytorch.strategies"
_NAME: Final = "context_parallel"
_SIZES: Final = (2, 4, 8, 16)


def register() -> None:
    """Register the names now if Lightning is there, else as soon as it is."""
    if _HOME in sys.modules and hasattr(sys.modules[_HOME], "StrategyRegistry"):
        _add_names(sys.modules[_HOME])
    else:
        sys.meta_path.insert(0, _Finder())


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
    from lightning_cp.strategy import ContextParallelStrategy

    return ContextParallelStrategy(**options)


class _Finder(MetaPathFinder):
    """Finds one module, the way the others do, and lets `_Loader` load it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Step aside for every module but the one that holds the registry."""
        if fullname != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module as its own loader does, then adds the names."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then register."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _add_names(module)
