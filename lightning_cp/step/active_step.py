# SPDX-License-Identifier: Apache-2.0
"""The module variable that holds the active step, and the context managers that set it."""

from typing import Final

from lightning_cp.step.step import BatchOfParts, Opened, Step, not_sharded


class _Paused:
    """Stands for context parallelism being switched off."""


PAUSED: Final = _Paused()

# A module variable, not a ContextVar: with activation checkpointing, attention runs again on
# autograd's device threads, which do not inherit the caller's context.
_current: Opened | _Paused | None = None
_ever_active = False


def current() -> Step | None:
    """Return the active step; None if there is none, or if it is paused.

    Callers need a sequence: raise if the batch was not sharded.
    """
    if isinstance(_current, Step):
        return _current
    if isinstance(_current, BatchOfParts):
        raise not_sharded()
    return None


def opened() -> Opened | None:
    """Return the active step, or the batch whose parts are to be opened; None as in `current`."""
    return _current if isinstance(_current, Opened) else None


def is_paused() -> bool:
    """Return whether context parallelism is switched off."""
    return _current is PAUSED


# Number of enclosing declarations that leave attention calls unchanged; each step starts at 0.
_num_exempt = 0


class activate:
    """Make ``step`` the one that attention and loss see, and restore the previous one on exit.

    A class, since checkpointing enters the same object again when a graph is kept for a second
    backward.

    Args:
        step: the step, `PAUSED`, or None for none.
        num_exempt: the initial number of declarations of exempt attention.
    """

    def __init__(self, step: Opened | _Paused | None, *, num_exempt: int = 0) -> None:
        self._state: tuple[Opened | _Paused | None, int] = step, num_exempt
        self._previous: list[tuple[Opened | _Paused | None, int]] = []

    def __enter__(self) -> None:
        global _current, _num_exempt, _ever_active
        self._previous.append((_current, _num_exempt))
        _current, _num_exempt = self._state
        _ever_active = _ever_active or isinstance(_current, Opened)

    def __exit__(self, *_: object) -> None:
        global _current, _num_exempt
        _current, _num_exempt = self._previous.pop()


def declare_exempt(change: int) -> None:
    """Enter (1) or leave (-1) a declaration that leaves attention calls unchanged."""
    global _num_exempt
    _num_exempt += change


def num_exempt() -> int:
    """Return the number of enclosing declarations of exempt attention."""
    return _num_exempt


_FULL: Final = 1 << 16


def declare_full_sequences(change: int) -> None:
    """Enter (1) or leave (-1) a part of a model that runs on full sequences inside a step.

    Its attention is exempt too. Unlike other declarations, this one says that no tensor there is
    a shard; one number holds both, which activation checkpointing restores.
    """
    declare_exempt(change * _FULL)


def sees_full_sequences() -> bool:
    """Return whether a model runs on full sequences here."""
    return _num_exempt >= _FULL


def exchange_exempt(number: int) -> int:
    """Set the number of declarations of exempt attention; return the former one."""
    global _num_exempt
    former, _num_exempt = _num_exempt, number
    return former


def paused() -> activate:
    """Switch context parallelism off: full sequences, on this rank only."""
    return activate(PAUSED, num_exempt=_num_exempt)


def was_ever_active() -> bool:
    """Return whether any step has been opened in this process."""
    return _ever_active
