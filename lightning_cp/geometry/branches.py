# SPDX-License-Identifier: Apache-2.0
"""Branches: parts of a document that share its beginning and do not see each other.

For completions of one prompt, which is then computed once. A token of a branch sees the beginning
of its document and its own branch: two intervals of keys. `Bounds` have one, so attention is a sum
of calls, one per branch of a document; a query has keys in one of them, and 0 from the others.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_cp.geometry.bounds import Bounds, build_bounds
from lightning_cp.geometry.mask import NO_DOCUMENT, Mask, check_runs, runs
from lightning_cp.geometry.ranges import BoolArray, IntArray

SHARED = -1
"""The branch of tokens that all branches of their document see."""


@dataclass(frozen=True, eq=False)
class Branches:
    """Which branch of its document a token belongs to.

    Args:
        numbers: int64 [R, S], counted from 0 in each document; -1 for its beginning.
        count: the largest number of branches of a document.
        offsets: int64 [R, S], the number of tokens of other branches between the beginning of the
            document and the branch: what position ids leave out.
    """

    numbers: IntArray
    count: int
    offsets: IntArray


def read_branches(
    ids: IntArray, documents: IntArray | None, padding: BoolArray | None = None
) -> Branches | None:
    """Number the branches of each document; None if no document has two.

    Args:
        ids: [B, S], equal neighbours are one branch; -1 for tokens of no branch.
        documents: [B or 1, S], None where each sequence is one document.
        padding: [B, S], whose ids are ignored; None for none.

    Example:
        >>> branches = read_branches(np.array([[-1, -1, 4, 4, 5, 5, 5]]), None)
        >>> branches.numbers.tolist(), branches.offsets.tolist()
        ([[-1, -1, 0, 0, 1, 1, 1]], [[0, 0, 0, 0, 2, 2, 2]])
    """
    if padding is not None:  # it belongs to the branch before it
        ids = np.broadcast_to(ids, (max(len(ids), len(padding)), ids.shape[1]))
        before = np.maximum.accumulate(np.where(padding, -1, np.arange(ids.shape[1])), 1)
        ids = np.where(before < 0, SHARED, np.take_along_axis(ids, np.maximum(before, 0), 1))
    check_runs("branch_ids", ids)
    documents = np.zeros((1, ids.shape[1]), np.int64) if documents is None else documents
    documents = np.broadcast_to(documents, ids.shape)
    inside = ids != SHARED
    new_document = np.ones(ids.shape, np.bool_)
    new_document[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = inside.copy()
    starts[:, 1:] &= (ids[:, 1:] != ids[:, :-1]) | new_document[:, 1:]
    after = ~inside & ~new_document & (documents != NO_DOCUMENT)
    after[:, 1:] &= inside[:, :-1]
    after[:, 0] = False
    if after.any():
        sample, position = np.argwhere(after)[0].tolist()
        raise ValueError(
            f"`branch_ids` of sample {sample} are -1 at position {position}, after a branch of the "
            "same document. What branches share is the beginning of their document: put it first, "
            "and give every token after it a branch; or start another document there."
        )
    position = np.arange(ids.shape[1])
    begin = np.maximum.accumulate(np.where(new_document, position, 0), 1)
    total = np.cumsum(starts, 1)
    before = np.take_along_axis(total - starts, begin, 1)
    numbers = np.where(inside, total - before - 1, SHARED)
    count = int(numbers.max()) + 1
    if count < 2:
        return None
    # Where the branch starts, less where the first branch of its document starts.
    first = np.where(starts & (numbers == 0), position, begin)
    own = np.maximum.accumulate(np.where(starts, position, 0), 1)
    origin = np.maximum.accumulate(first, 1)
    offsets = np.where(inside, own - origin, 0)
    return Branches(numbers, count, offsets)


@dataclass(frozen=True, eq=False)
class BranchMask(Mask):
    """A causal mask of one branch of each document: other queries see nothing.

    The beginning of a document belongs to its first branch.

    Args:
        branches: of the full sequences.
        number: the branch.
    """

    branches: Branches | None = None
    number: int = 0

    def key(self) -> tuple[object, ...]:
        """Return a cache key."""
        return ("branch", self.number)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return nothing: documents and padding are the step's."""
        return ()

    def bounds(
        self,
        seq_len: int,
        *,
        padded_len: int | None = None,
        documents: IntArray | None = None,
        padding: BoolArray | None = None,
    ) -> Bounds:
        """Compute the bounds: an interval of keys, of which those of other branches are hidden."""
        assert self.branches is not None  # noqa: S101  for the types
        numbers = self.branches.numbers
        document = np.zeros((1, seq_len), np.int64) if documents is None else documents
        num_samples = max(len(x) for x in (numbers, document, *_listed(padding)))
        numbers, document = (
            np.broadcast_to(x, (num_samples, seq_len)) for x in (numbers, document)
        )
        position = np.arange(seq_len)
        real = document != NO_DOCUMENT
        belongs, active = real, real & (numbers == self.number)
        if self.number == 0:
            active = active | (real & (numbers == SHARED))
        real = real & ((numbers == SHARED) | (numbers == self.number))
        if padding is not None:
            real = real & ~padding
        first, _ = runs(document)
        # A query without keys gets an empty interval between those of the queries around it.
        latest = np.maximum.accumulate(np.where(active, position, -1), 1)
        empty = np.where(latest >= first, latest + 1, first)
        start = np.where(belongs, np.where(active, first, empty), position)
        stop = np.where(belongs, np.where(active, position + 1, empty), position)
        return build_bounds(start, stop, real, seq_len if padded_len is None else padded_len)


def _listed(x: BoolArray | None) -> tuple[BoolArray, ...]:
    return () if x is None else (x,)
