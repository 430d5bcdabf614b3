# SPDX-License-Identifier: Apache-2.0
"""The guard: inside a step, the stock mask functions refuse a model that is not enabled.

A model that is not a submodule of the LightningModule (a teacher in a list) is not enabled, and its
attention would see this rank's tokens only. `ContextParallel` installs the guard when a step opens
and removes it when the step closes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from transformers import AttentionMaskInterface

from hf_patches.interface.input_checks import not_enabled
from hf_patches.interface.names import NAMES, active
from hf_patches.model.mask_reader import search_skipped

REGISTERED: Final = AttentionMaskInterface()  # type: ignore[no-untyped-call]
"""The mask functions that are registered for all models."""

STOCK_NAMES: Final = tuple(name for name in NAMES if name in REGISTERED)
"""Attention implementations of transformers that build a mask."""


@dataclass(frozen=True)
class Guard:
    """Guarded mask functions, until `remove()`.

    Args:
        guarded: the registered functions, by implementation.
    """

    guarded: Mapping[str, partial[Any]]

    def remove(self) -> None:
        """Register the stock functions again, except where another one was registered since."""
        for name, function in self.guarded.items():
            if REGISTERED[name] is function:
                AttentionMaskInterface.register(name, function.args[0])


def install_guard() -> Guard:
    """Guard the stock mask functions that are not guarded yet.

    Returns:
        A handle; its ``remove()`` takes away what this call has installed.
    """
    guarded = {
        name: _guard(REGISTERED[name]) for name in STOCK_NAMES if not _is_guarded(REGISTERED[name])
    }
    for name, function in guarded.items():
        AttentionMaskInterface.register(name, function)
    return Guard(guarded)


@contextmanager
def guarded() -> Iterator[None]:
    """Guard the stock mask functions inside a ``with`` block."""
    installed = install_guard()
    try:
        with search_skipped():
            yield
    finally:
        installed.remove()


@lru_cache
def _guard(stock: Callable[..., Any]) -> partial[Any]:
    """Return the guarded function, the same one in every step: compiled code depends on it."""
    return partial(_refuse_in_step, stock)


def _is_guarded(function: Callable[..., Any]) -> bool:
    return isinstance(function, partial) and function.func is _refuse_in_step


def _refuse_in_step(stock: Callable[..., Any], **arguments: Any) -> Any:
    """Build a stock mask; raise inside a step, where the model sees a shard of each sequence."""
    if active() is not None:
        raise not_enabled(arguments["config"].model_type)
    return stock(**arguments)
