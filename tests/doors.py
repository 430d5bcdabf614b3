"""The library's entry points, as tests call them: who renames an option changes this file alone.

Tests name an option by one word, however the library groups it. `strategy`, `parallel` and `config`
put the words into their groups.
"""

from typing import Any

import lightning_cp
from lightning_cp import ContextParallel, ContextParallelStrategy
from lightning_cp.config import Config
from lightning_cp.renamed import group_arguments


def strategy(*sizes: int, **options: Any) -> ContextParallelStrategy:
    """Return the strategy of Lightning's Trainer."""
    return ContextParallelStrategy(*sizes, **grouped(options))


def parallel(*groups: Any, **options: Any) -> ContextParallel:
    """Return context parallelism of a loop of one's own."""
    return ContextParallel(*groups, **grouped(options))


def config(**options: Any) -> Config:
    """Return what a step holds of what was set."""
    return Config(**grouped(options))


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Return options in groups: ``kernel="flex"`` as ``attention=Attention(kernel="flex")``."""
    return {
        name: getattr(lightning_cp, name.capitalize())(**value)
        if isinstance(value, dict) and name != "sequence_dims"
        else value
        for name, value in group_arguments(options).items()
    }
