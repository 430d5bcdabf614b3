# SPDX-License-Identifier: Apache-2.0
"""Ranges of global positions, and the array types of this package."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Range(NamedTuple):
    """Consecutive global positions, ``stop`` excluded."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of positions."""
        return self.stop - self.start

    def meet(self, other: "Range") -> "Range":
        """Return the common part; its size is 0 when there is none.

        Example:
            >>> Range(0, 5).meet(Range(3, 9)), Range(0, 2).meet(Range(4, 6)).size
            (Range(start=3, stop=5), 0)
        """
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the same positions as sorted, disjoint ranges, as few as possible.

    Example:
        >>> union([Range(4, 6), Range(0, 2), Range(2, 3), Range(5, 9), Range(7, 7)])
        (Range(start=0, stop=3), Range(start=4, stop=9))
    """
    merged: list[Range] = []
    for part in sorted(part for part in ranges if part.size > 0):
        if merged and part.start <= merged[-1].stop:
            merged[-1] = Range(merged[-1].start, max(merged[-1].stop, part.stop))
        else:
            merged.append(part)
    return tuple(merged)
