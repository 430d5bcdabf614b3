# SPDX-License-Identifier: Apache-2.0
"""Packing of prompts and their completions into samples of equal length.

Pure: knows token ids, not where they come from. The prompt of several completions is computed once
(``branch_ids``), or once per completion.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.data.packing import COLUMNS, IGNORED_LABEL, NO_DOCUMENT, Sample, fill_samples

IntArray = NDArray[np.int32]

NO_COMPLETION: Final = -1
"""The branch id of a prompt, and of padding."""

PAIR_COLUMNS: Final = (*COLUMNS, "branch_ids")
"""The keys of a packed sample."""

REFERENCE: Final = "reference_logps"
"""The key of log-probabilities of a reference: at the first token of each completion, 0 elsewhere.

The bits of float32 as integers, since samples hold integers.
"""


class Pair(NamedTuple):
    """A prompt and its completions.

    Args:
        prompt: at least one token.
        completions: the chosen one, the rejected one and, for KTO, one of another prompt.
        reference: the log-probability of each completion; empty if it is not stored.
        number: the index of its record in the source, for messages.
    """

    prompt: IntArray
    completions: tuple[IntArray, ...]
    reference: tuple[float, ...] = ()
    number: int = 0


def lay_out(pair: Pair, *, share_prompt: bool) -> Sample:
    """Return the tokens of a pair as they stand in a sample.

    With a shared prompt: the prompt without its last token, then a branch for each completion,
    which starts with that token: it predicts another first token in each. Documents and branches
    are numbered from 0; labels are those of the completions.

    Example:
        >>> pair = Pair(np.array([5, 6, 7]), (np.array([1, 2]), np.array([3])))
        >>> sample = lay_out(pair, share_prompt=True)
        >>> sample["input_ids"].tolist(), sample["branch_ids"].tolist()
        ([5, 6, 7, 1, 2, 7, 3], [-1, -1, 0, 0, 0, 1, 1])
        >>> lay_out(pair, share_prompt=False)["input_ids"].tolist()
        [5, 6, 7, 1, 2, 5, 6, 7, 3]
    """
    prompt, parts = pair.prompt, list[tuple[IntArray, int, int, int]]()
    if share_prompt:
        parts.append((prompt[:-1], 0, NO_COMPLETION, 0))
    for number, completion in enumerate(pair.completions):
        document = 0 if share_prompt else number
        if not share_prompt:
            parts.append((prompt[:-1], document, NO_COMPLETION, 0))
        # In a document of its own the last token of the prompt belongs to the prompt.
        last = number if share_prompt else NO_COMPLETION
        parts += [(prompt[-1:], document, last, 0), (completion, document, number, 1)]
    columns = ("input_ids", "document_ids", "branch_ids", "labels")
    sample = {
        name: np.concatenate(
            [np.full(len(ids), part[at], np.int32) if at else ids for ids, part in _with(parts)]
        ).astype(np.int32)
        for at, name in enumerate(columns)
    }
    sample["labels"] = np.where(sample["labels"] > 0, sample["input_ids"], IGNORED_LABEL)
    sample["labels"] = sample["labels"].astype(np.int32)
    if pair.reference:
        starts = _completion_starts(sample)
        values = np.zeros(len(sample["labels"]), np.float32)
        values[starts] = pair.reference
        sample[REFERENCE] = values.view(np.int32)
    return sample


def _with(
    parts: list[tuple[IntArray, int, int, int]],
) -> Iterator[tuple[IntArray, tuple[IntArray, int, int, int]]]:
    return ((part[0], part) for part in parts)


def _completion_starts(sample: Sample) -> NDArray[np.int64]:
    """Return the position of the first label of each completion."""
    labelled = sample["labels"] != IGNORED_LABEL
    return np.flatnonzero(labelled & ~np.concatenate([[False], labelled[:-1]]))


def pack_pairs(
    pairs: Iterable[Pair], seq_len: int, *, share_prompt: bool = True, pad_id: int = 0
) -> Iterator[Sample]:
    """Pack pairs into samples of exactly ``seq_len`` tokens; no pair is split.

    Args:
        pairs: in their order.
        seq_len: tokens per sample.
        share_prompt: compute a prompt once.
        pad_id: the padding token.

    Yields:
        Samples with the keys of `PAIR_COLUMNS`; completions are numbered 0, 1, ... in each, those
        of a pair one after the other.

    Example:
        >>> pairs = [Pair(np.array([5, 6]), (np.array([1]), np.array([2])))] * 2
        >>> for sample in pack_pairs(pairs, seq_len=12):
        ...     print(*sample["branch_ids"])
        -1 0 0 1 1 -1 2 2 3 3 -1 -1
    """

    def parts() -> Iterator[tuple[Sample, int]]:
        for pair in pairs:
            part = lay_out(pair, share_prompt=share_prompt)
            size = len(part["input_ids"])
            if size > seq_len:
                raise ValueError(
                    f"Pair {pair.number} takes {size} tokens, but samples hold seq_len={seq_len}. "
                    "Use a larger seq_len, or long_pairs='skip' to leave such pairs out."
                )
            yield part, size

    return fill_samples(parts(), lambda part: _OpenSample(seq_len, pad_id, tuple(part)))


class _OpenSample:
    """A sample that has room for pairs."""

    def __init__(self, seq_len: int, pad_id: int, columns: tuple[str, ...]) -> None:
        fills = {
            "input_ids": pad_id,
            "labels": IGNORED_LABEL,
            "document_ids": NO_DOCUMENT,
            "branch_ids": NO_COMPLETION,
        }
        self.sample: Sample = {
            name: np.full(seq_len, fills.get(name, 0), np.int32) for name in columns
        }
        self.free = seq_len

    def add(self, part: Sample) -> None:
        start = len(self.sample["input_ids"]) - self.free
        tokens = slice(start, start + len(part["input_ids"]))
        for name, values in part.items():
            known = self.sample[name]
            if name in ("document_ids", "branch_ids"):
                values = np.where(values >= 0, values + known.max() + 1, values)
            known[tokens] = values
        self.free -= tokens.stop - tokens.start
