# SPDX-License-Identifier: Apache-2.0
"""Options that take one of a few names: one way of refusing the others."""

from collections.abc import Iterable


def check_choice(option: str, given: object, known: Iterable[str]) -> None:
    """Refuse a value that an option does not have, and say which it has.

    Example:
        >>> check_choice("kernel", "fast", ["auto", "cpu"])
        Traceback (most recent call last):
        ...
        ValueError: kernel='fast' is unknown. Use one of 'auto', 'cpu'.
    """
    known = tuple(known)
    if given not in known:
        names = ", ".join(repr(name) for name in known)
        raise ValueError(f"{option}={given!r} is unknown. Use one of {names}.")
