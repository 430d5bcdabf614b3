# SPDX-License-Identifier: Apache-2.0
"""The one variable that holds the active step, and the context managers that set it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lightning_cp.step import HandedOver, Step, not_sharded


class _Paused:
    """Stands for: context parallelism is off, on purpose."""


PAUSED: Final = _Paused()

# A module variable, not a ContextVar: with activation checkpointing, attention runs again on
# autograd's device threads, which do not inherit the caller's context.
_current: Step | _Paused | None = None
_ever_active = False


def current() -> Step | None:
    """Return the active step; None when there is none, or when it is paused.

    Whoever asks needs rows: a batch that was handed over whole has none, and is refused.
    """
    if isinstance(_current, HandedOver):
        raise not_sharded()
    return _current if isinstance(_current, Step) else None


def opened() -> Step | None:
    """Return the active step, also one that handed its batch over; None as in `current`."""
    return _current if isinstance(_current, Step) else None


def is_paused() -> bool:
    """Say whether context parallelism is off, on purpose."""
    return _current is PAUSED


# How many declarations say that attention calls are left alone; each step begins with none.
_num_unsharded = 0


class activate:
    """Make ``step`` the one that attention and loss see, and restore the former on exit.

    A class, since checkpointing enters the same one again when a graph is kept for a second
    backward.

    Args:
        step: the step, or `PAUSED`.
        num_unsharded: how many declarations of unsharded attention hold from the start.
    """

    def __init__(self, step: Step | _Paused, *, num_unsharded: int = 0) -> None:
        self._state: tuple[Step | _Paused | None, int] = step, num_unsharded
        self._previous: list[tuple[Step | _Paused | None, int]] = []

    def __enter__(self) -> None:
        global _current, _num_unsharded, _ever_active
        self._previous.append((_current, _num_unsharded))
        (_current, _num_unsharded), _ever_active = self._state, True

    def __exit__(self, *_: object) -> None:
        global _current, _num_unsharded
        _current, _num_unsharded = self._previous.pop()


def declare_unsharded(change: int) -> None:
    """Enter (1) or leave (-1) a place whose attention calls are left alone."""
    global _num_unsharded
    _num_unsharded += change


def num_unsharded() -> int:
    """Return in how many such places we are."""
    return _num_unsharded


@contextmanager
def paused() -> Iterator[None]:
    """Switch context parallelism off: whole rows, on this rank alone."""
    global _current
    previous, _current = _current, PAUSED
    try:
        yield
    finally:
        _current = previous


@contextmanager
def outside() -> Iterator[None]:
    """Leave the active step for a while, as if none had been opened."""
    global _current, _num_unsharded
    previous = _current, _num_unsharded
    _current, _num_unsharded = None, 0
    try:
        yield
    finally:
        _current, _num_unsharded = previous


def was_ever_active() -> bool:
    """Return whether any step has been opened in this process."""
    return _ever_active
