# SPDX-License-Identifier: Apache-2.0
"""Filters for warnings that do not apply under the strategy.

Each filter matches one text, so that other warnings of the same category are shown.
"""

import re
import warnings


def ignore_known_warnings() -> None:
    """Ignore deprecations inside Lightning that every run would show.

    Lightning 2.6 builds a `LeafSpec` for each loader, which torch 2.13 deprecates.
    """
    _ignore(r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def ignore_sync_advice(name: str) -> None:
    """Ignore the advice to log a value with ``sync_dist=True`` that is global already.

    Args:
        name: the name under which it is logged.
    """
    _ignore(re.escape(f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)`"))


def _ignore(message: str) -> None:
    # An existing filter is not added again: each change of the filters makes Python repeat warnings
    # that it has shown once.
    messages = (entry[1] for entry in warnings.filters)
    if not any(getattr(pattern, "pattern", pattern) == message for pattern in messages):
        warnings.filterwarnings("ignore", message=message)
