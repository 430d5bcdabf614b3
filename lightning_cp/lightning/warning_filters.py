# SPDX-License-Identifier: Apache-2.0
"""Warnings that tell users of the strategy nothing: which, and why.

Each is filtered by its own text, so that others of the same kind are seen.
"""

import re
import warnings


def expect_known() -> None:
    """Silence what Lightning and torch say to each other on every run.

    Lightning 2.6 makes a `LeafSpec` for each loader, which torch 2.13 calls deprecated: nobody but
    Lightning can change it.
    """
    _ignore(r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def expect_global(name: str) -> None:
    """Silence the advice to log a value with ``sync_dist=True`` that is global already.

    Args:
        name: under which it is logged.
    """
    _ignore(re.escape(f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)`"))


def _ignore(message: str) -> None:
    # A filter that is there already is left alone: each change makes Python show again what it has
    # shown once.
    known = (entry[1] for entry in warnings.filters)
    if not any(getattr(pattern, "pattern", pattern) == message for pattern in known):
        warnings.filterwarnings("ignore", message=message)
