# SPDX-License-Identifier: Apache-2.0
"""Packing of documents into samples of equal length, with an id per document.

Pure: knows token ids, not where they come from. Labels belong to the same token; the library shifts
them, and never across documents.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
Sample = dict[str, IntArray]
"""``input_ids``, ``labels`` and ``document_ids``, each of ``seq_len`` tokens, and token types.

``media`` and ``media_kinds`` have an entry for each document with media.
"""

LongDocuments = Literal["split", "refuse", "truncate"]

IGNORED_LABEL: Final = -100
NO_DOCUMENT: Final = -1
"""The document id of padding."""

COLUMNS: Final = ("input_ids", "labels", "document_ids")
OPEN_SAMPLES: Final = 64
"""The number of samples that are searched for the best place of a document."""


class Document(NamedTuple):
    """Token ids, and a label for each: the id itself, or -100 where it is not learned."""

    ids: IntArray
    labels: IntArray
    number: int = 0
    """The index of its record in the source."""
    types: Mapping[str, IntArray] = MappingProxyType({})
    """Types of its tokens, by the name that the model gives them."""
    media_kinds: int | None = None
    """The sum of the kinds of its media; None in data without media."""


def document(ids: list[int], labels: list[int] | None = None, *, number: int = 0) -> Document:
    """Build a document from token ids; by default every token is a label."""
    tokens = np.array(ids, np.int32)
    return Document(tokens, tokens if labels is None else np.array(labels, np.int32), number)


def pack(
    documents: Iterable[Document],
    seq_len: int,
    *,
    long_documents: LongDocuments = "split",
    pad_id: int = 0,
) -> Iterator[Sample]:
    """Pack documents into samples of exactly ``seq_len`` tokens.

    ``split`` concatenates documents and splits them at the end of a sample; the rest becomes a
    document of the next sample. No token is lost, only the last sample is padded, and one sample is
    held in memory. It suits plain text, which can be split anywhere.

    The others never split a document, since the second part would lack its beginning (the question
    of an answer): each goes into the fullest open sample that has room, and samples are padded. A
    document longer than a sample is an error (``refuse``) or is truncated (``truncate``).

    Documents without tokens are skipped. Padding has document -1 and label -100.

    Args:
        documents: in their order.
        seq_len: tokens per sample.
        long_documents: what to do with a document that does not fit.
        pad_id: the padding token.

    Yields:
        Samples; documents are numbered 0, 1, ... in each.

    Example:
        >>> samples = pack([document([5, 6, 7]), document([8, 9])], seq_len=4, pad_id=0)
        >>> [sample["input_ids"].tolist() for sample in samples]
        [[5, 6, 7, 8], [9, 0, 0, 0]]
    """
    if long_documents not in get_args(LongDocuments):
        raise ValueError(
            f"long_documents={long_documents!r}: use one of {', '.join(get_args(LongDocuments))}."
        )
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: samples need at least 1 token.")
    if long_documents == "split":
        return _pack_split(documents, seq_len, pad_id)
    return _pack_whole(documents, seq_len, pad_id, truncate=long_documents == "truncate")


class _OpenSample:
    """A sample that has room for documents."""

    def __init__(self, seq_len: int, pad_id: int) -> None:
        self.sample: Sample = {
            "input_ids": np.full(seq_len, pad_id, np.int32),
            "labels": np.full(seq_len, IGNORED_LABEL, np.int32),
            "document_ids": np.full(seq_len, NO_DOCUMENT, np.int32),
        }
        self.free = seq_len
        self._num_documents = 0

    def add(self, part: Document) -> None:
        start = len(self.sample["input_ids"]) - self.free
        tokens = slice(start, start + len(part.ids))
        self.sample["input_ids"][tokens] = part.ids
        self.sample["labels"][tokens] = part.labels
        self.sample["document_ids"][tokens] = self._num_documents
        for name, types in part.types.items():
            empty = np.zeros(len(self.sample["input_ids"]), np.int32)
            self.sample.setdefault(name, empty)[tokens] = types
        if part.media_kinds is not None:
            self._add_media(part.number, part.media_kinds)
        self.free -= len(part.ids)
        self._num_documents += 1

    def _add_media(self, number: int, kinds: int) -> None:
        for name, value in (("media", number), ("media_kinds", kinds)):
            former = self.sample.get(name, np.empty(0, np.int32))
            self.sample[name] = np.append(former, np.int32(value)) if kinds else former


def _pack_split(documents: Iterable[Document], seq_len: int, pad_id: int) -> Iterator[Sample]:
    last = _OpenSample(seq_len, pad_id)
    for ids, labels, *_ in documents:
        start = 0
        while start < len(ids):
            stop = min(start + last.free, len(ids))
            last.add(Document(ids[start:stop], labels[start:stop]))
            start = stop
            if not last.free:
                yield last.sample
                last = _OpenSample(seq_len, pad_id)
    if last.free < seq_len:
        yield last.sample


def _pack_whole(
    documents: Iterable[Document], seq_len: int, pad_id: int, *, truncate: bool
) -> Iterator[Sample]:
    samples: list[_OpenSample] = []
    for part in _fitting(documents, seq_len, truncate=truncate):
        room = [sample for sample in samples if sample.free >= len(part.ids)]
        best = min(room, key=lambda sample: sample.free, default=None)
        if best is None:
            best = _OpenSample(seq_len, pad_id)
            samples.append(best)
        best.add(part)
        if not best.free or len(samples) > OPEN_SAMPLES:
            fullest = min(samples, key=lambda sample: sample.free)
            samples.remove(fullest)
            yield fullest.sample
    for sample in samples:
        yield sample.sample


def _fitting(documents: Iterable[Document], seq_len: int, *, truncate: bool) -> Iterator[Document]:
    """Yield documents that have tokens, as long as a sample at most."""
    for part in documents:
        ids, labels, number = part[:3]
        if len(ids) > seq_len and not truncate:
            raise ValueError(
                f"Document {number} has {len(ids)} tokens, but samples hold seq_len={seq_len}. "
                "Use a larger seq_len, or long_documents='truncate' (its end is lost) or 'split'."
            )
        if len(ids) > seq_len:
            part = Document(ids[:seq_len], labels[:seq_len], number)
        if len(ids):
            yield part
