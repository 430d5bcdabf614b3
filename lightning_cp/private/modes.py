# SPDX-License-Identifier: Apache-2.0
"""Torch function modes, dispatch modes and autocast."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import overrides
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)


def any_autocast() -> bool:
    """Return whether autocast is on for any kind of device (`_C._is_any_autocast_enabled`).

    `torch.is_autocast_enabled` asks for one kind, and takes some microseconds to read its name.
    """
    return torch._C._is_any_autocast_enabled()


def is_higher_order(func: object) -> bool:
    """Return whether a torch function is an operator that calls Python functions (`torch._ops`)."""
    return isinstance(func, HigherOrderOperator)


def plain_functions() -> AbstractContextManager[None]:
    """Switch torch function modes off, also those entered inside (`_C.DisableTorchFunction`)."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled


def num_function_modes() -> int:
    """Return how many torch function modes are active (`_C._len_torch_function_stack`)."""
    return int(torch._C._len_torch_function_stack())


@contextmanager
def without_modes() -> Iterator[None]:
    """Remove the active torch function modes (`overrides._pop_mode`); those entered inside work.

    Also inside `plain_functions` (`_C._EnableTorchFunction`): FlexAttention traces with a mode.
    """
    modes = [overrides._pop_mode() for _ in range(num_function_modes())]  # type: ignore[no-untyped-call]
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)  # type: ignore[no-untyped-call]


class RecordedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the operators that run inside (`torch.utils._python_dispatch`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operator, and call it."""
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Switch the active dispatch modes off inside (`_disable_current_modes`).

    Selective activation checkpointing is one: it counts the operators of a forward, and expects the
    same ones when it recomputes.
    """
    off: AbstractContextManager[Any] = _disable_current_modes()
    return off
