# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, of the demo and of pass keys."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, in which columns stand below each other.

    Example:
        >>> print(table(["step", "loss"], [["1", "5.25"], ["100", "4.5"]]))
        | step | loss |
        | ---- | ---- |
        | 1    | 5.25 |
        | 100  | 4.5  |
    """
    lines = [header, *rows]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([x.ljust(n) for x, n in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
