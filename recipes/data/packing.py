# SPDX-License-Identifier: Apache-2.0
"""Documents -> rows of equal length that say which tokens belong together.

Pure: knows token ids and nothing of where they come from. Labels are those of the same token; the
library shifts them, and never across documents.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.step import IGNORED_LABEL

IntArray = NDArray[np.int32]
Row = dict[str, IntArray]
"""``input_ids``, ``labels`` and ``document_ids``, each of ``seq_len`` tokens."""

LongDocuments = Literal["split", "refuse", "truncate"]

COLUMNS: Final = ("input_ids", "labels", "document_ids")
OPEN_ROWS: Final = 64
"""Among how many rows the best place for a whole document is looked for."""


class Document(NamedTuple):
    """Token ids, and for each the label: itself, or -100 where nothing is to be learned."""

    ids: IntArray
    labels: IntArray
    number: int = 0
    """Of its record in the source, for messages."""


def document(ids: list[int], labels: list[int] | None = None, *, number: int = 0) -> Document:
    """Make a document of token ids; every token is a label unless labels are given."""
    tokens = np.array(ids, np.int32)
    return Document(tokens, tokens if labels is None else np.array(labels, np.int32), number)


def pack(
    documents: Iterable[Document],
    seq_len: int,
    *,
    long_documents: LongDocuments = "split",
    pad_id: int = 0,
) -> Iterator[Row]:
    """Pack documents into rows of exactly ``seq_len`` tokens.

    ``split`` writes documents one after the other and cuts them where a row ends; the rest is a
    document of its own in the next row. No token is lost, no row but the last is padded, and one
    row is held in memory: right for plain text, where a row's end is as good a place as any.

    The others never cut a document at a row's end, since what follows would have lost its beginning
    (the question of an answer): each goes whole to the fullest of the open rows that has room, and
    rows are padded. One longer than a row is an error (``refuse``) or loses its end (``truncate``).

    Documents without tokens are left out. Padding has document -1 and label -100.

    Args:
        documents: in their order.
        seq_len: tokens per row.
        long_documents: what to do with a document that does not fit.
        pad_id: the token that pads.

    Yields:
        Rows; documents are numbered 0, 1, ... along each.

    Example:
        >>> rows = pack([document([5, 6, 7]), document([8, 9])], seq_len=4, pad_id=0)
        >>> [row["input_ids"].tolist() for row in rows]
        [[5, 6, 7, 8], [9, 0, 0, 0]]
    """
    if long_documents not in get_args(LongDocuments):
        raise ValueError(
            f"long_documents={long_documents!r}: use one of {', '.join(get_args(LongDocuments))}."
        )
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: rows need at least 1 token.")
    if long_documents == "split":
        return _pack_split(documents, seq_len, pad_id)
    return _pack_whole(documents, seq_len, pad_id, truncate=long_documents == "truncate")


class _OpenRow:
    """A row that still takes documents."""

    def __init__(self, seq_len: int, pad_id: int) -> None:
        self.row: Row = {
            "input_ids": np.full(seq_len, pad_id, np.int32),
            "labels": np.full(seq_len, IGNORED_LABEL, np.int32),
            "document_ids": np.full(seq_len, NO_DOCUMENT, np.int32),
        }
        self.free = seq_len
        self._num_documents = 0

    def add(self, part: Document) -> None:
        start = len(self.row["input_ids"]) - self.free
        place = slice(start, start + len(part.ids))
        self.row["input_ids"][place] = part.ids
        self.row["labels"][place] = part.labels
        self.row["document_ids"][place] = self._num_documents
        self.free -= len(part.ids)
        self._num_documents += 1


def _pack_split(documents: Iterable[Document], seq_len: int, pad_id: int) -> Iterator[Row]:
    last = _OpenRow(seq_len, pad_id)
    for ids, labels, _ in documents:
        start = 0
        while start < len(ids):
            stop = min(start + last.free, len(ids))
            last.add(Document(ids[start:stop], labels[start:stop]))
            start = stop
            if not last.free:
                yield last.row
                last = _OpenRow(seq_len, pad_id)
    if last.free < seq_len:
        yield last.row


def _pack_whole(
    documents: Iterable[Document], seq_len: int, pad_id: int, *, truncate: bool
) -> Iterator[Row]:
    rows: list[_OpenRow] = []
    for ids, labels, number in documents:
        if not len(ids):
            continue
        if len(ids) > seq_len and not truncate:
            raise ValueError(
                f"Document {number} has {len(ids)} tokens, but rows hold seq_len={seq_len}. Use a "
                "larger seq_len, or long_documents='truncate' (its end is lost) or 'split'."
            )
        part = Document(ids[:seq_len], labels[:seq_len])
        fitting = [row for row in rows if row.free >= len(part.ids)]
        if fitting:
            best = min(fitting, key=lambda row: row.free)
        else:
            best = _OpenRow(seq_len, pad_id)
            rows.append(best)
        best.add(part)
        if not best.free or len(rows) > OPEN_ROWS:
            fullest = min(rows, key=lambda row: row.free)
            rows.remove(fullest)
            yield fullest.row
    for row in rows:
        yield row.row
