"""The library's entry points, as tests call them: who renames an option changes this file alone.

Tests name an option by one word, however the library groups it. `strategy` and `parallel` pass the
words on.
"""

from typing import Any

from lightning_cp import ContextParallel, ContextParallelStrategy


def strategy(*sizes: int, **options: Any) -> ContextParallelStrategy:
    """Return the strategy of Lightning's Trainer."""
    return ContextParallelStrategy(*sizes, **options)


def parallel(*groups: Any, **options: Any) -> ContextParallel:
    """Return context parallelism of a loop of one's own."""
    return ContextParallel(*groups, **options)
