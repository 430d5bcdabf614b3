# SPDX-License-Identifier: Apache-2.0
"""Which query sees which key, in global positions.

`Mask` is what a user writes; `Bounds` is the same thing worked out for one row length: the visible
keys of every query as one interval, never a table of S x S. Pure integers: this module knows no
process group, no layout and no kernel. Read next: `layout.py`, `engine/plan.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_cp.torch_private import tensor_version

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NO_DOCUMENT = -1
"""Document id of a token that belongs to none: it sees nothing and nothing sees it."""


class Range(NamedTuple):
    """Consecutive global positions, ``stop`` excluded."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return how many positions there are."""
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
    """Return the same positions as few, sorted, disjoint ranges.

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


@dataclass(frozen=True, eq=False)
class Mask:
    """Say which keys a query sees, in positions of the whole row.

    A query ``q`` sees a key ``k`` when (``causal``, ``window`` and ``chunk`` allow it, or both lie
    in the same bidirectional span), and both belong to the same document, and ``k`` is not padding.

    Args:
        causal: ``k <= q``.
        window: ``W`` keeps the nearest W keys on each side, the query itself counted:
            ``|q - k| < W``. A pair ``(left, right)`` keeps ``q - left <= k <= q + right``.
        chunk: only keys of the query's own chunk of that many tokens. Chunks are counted from the
            first real token of the document (of the row, where there are no documents).
        documents: integer ids [B, S] or [S]; equal neighbours are one document, -1 belongs to none.
            ``None`` takes the documents of the active step, ``False`` ignores them.
        spans: integer ids [B, S] or [S] of spans whose tokens see each other in both directions
            (a prefix, the tokens of one image); -1 is in no span.
        padding: bool [B, S] or [S], true where a token is padding and so is no key for anyone.
            ``None`` takes the padding of the active step, ``False`` ignores it.

    Example:
        >>> bounds = Mask(causal=True, window=2).bounds(4)
        >>> bounds.visible(Range(0, 4), Range(0, 4))[0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    causal: bool = False
    window: int | tuple[int, int] | None = None
    chunk: int | None = None
    documents: Tensor | Literal[False] | None = None
    spans: Tensor | None = None
    padding: Tensor | Literal[False] | None = None

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.window is not None and not isinstance(self.window, int):
            object.__setattr__(self, "window", tuple(self.window))  # JSON and YAML have lists
        _check_window(self.window)
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"Mask(chunk={self.chunk}): a chunk holds at least 1 token.")
        for name in ("documents", "spans", "padding"):
            _check_given(name, getattr(self, name), may_be_false=name != "spans")
        for name in ("documents", "spans"):
            _check_ids(name, getattr(self, name))
        if isinstance(self.padding, Tensor) and self.padding.dtype != torch.bool:
            raise TypeError(
                f"Mask(padding=...) has dtype {self.padding.dtype}, but must be bool, true where a "
                "token is padding. From a Hugging Face attention_mask: padding=attention_mask == 0."
            )

    def key(self) -> tuple[object, ...]:
        """Return what tells this mask from another: its settings, and which tensors it holds."""
        settings = (self.causal, self.window, self.chunk, *self.tensors())
        if not any(isinstance(x, Tensor) for x in settings[3:]):
            return settings
        tensors = (
            (id(x), tensor_version(x)) if isinstance(x, Tensor) else x for x in self.tensors()
        )
        return (self.causal, self.window, self.chunk, *tensors)

    def tensors(self) -> tuple[Tensor | Literal[False] | None, ...]:
        """Return what the mask holds beside plain settings."""
        return self.documents, self.spans, self.padding

    def bounds(
        self,
        seq_len: int,
        *,
        padded_len: int | None = None,
        documents: IntArray | None = None,
        padding: BoolArray | None = None,
    ) -> "Bounds":
        """Work the mask out for rows of ``seq_len`` tokens.

        ``documents`` and ``padding`` are the step's, used where the mask leaves its own open.
        Positions from ``seq_len`` to ``padded_len`` see nothing and are seen by nothing.
        """
        own_documents = _whole_row("documents", self.documents, seq_len)
        own_padding = _whole_row("padding", self.padding, seq_len)
        spans = _whole_row("spans", self.spans, seq_len)
        documents = documents if self.documents is None else own_documents
        hidden = padding if self.padding is None else own_padding
        padded_len = seq_len if padded_len is None else padded_len
        if documents is None and hidden is None and spans is None:
            return _work_out_once(self.causal, self.window, self.chunk, seq_len, padded_len)
        return _work_out(
            self,
            seq_len=seq_len,
            padded_len=padded_len,
            documents=documents,
            padding=hidden,
            spans=spans,
        )


class Tile(NamedTuple):
    """A rectangle of queries x keys, and how much of it is visible.

    ``full``: all. ``causal``: a square on the diagonal, ``k <= q``. ``masked``: ask the bounds.
    """

    query: Range
    keys: Range
    kind: Literal["full", "causal", "masked"]


class Kept:
    """What others have worked out from bounds that outlive their batch.

    No plain dict: FSDP2 follows those through whatever a module returns, and plans hold their
    bounds.
    """

    def __init__(self) -> None:
        self.plans: dict[object, object] = {}


@dataclass(frozen=True, eq=False)
class Bounds:
    """The visible keys of every query: ``first[row, q] <= k < last[row, q]``, if ``k`` is real.

    Both bounds never decrease along a row, which makes every question about a block a look at its
    corners. Rows that are all alike are kept once.

    Args:
        first: int64 [R, S], the first visible key.
        last: int64 [R, S], one past the last visible key; equal to ``first`` where there is none.
        real_before: int64 [R, S + 1], how many keys before a position can be seen at all.
        kept: what was worked out from these bounds, where later batches get the same object; else
            None.
    """

    first: IntArray
    last: IntArray
    real_before: IntArray
    kept: Kept | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of different rows: 1, or the batch size."""
        return int(self.first.shape[0])

    @property
    def length(self) -> int:
        """Return the length of a row, our padding included."""
        return int(self.first.shape[1])

    def row(self, row: int) -> "Bounds":
        """Return the bounds of one row."""
        part = slice(row, row + 1)
        return Bounds(self.first[part], self.last[part], self.real_before[part])

    def hull(self, query: Range) -> tuple[Range, ...]:
        """Return the keys that some query of the range sees, as disjoint ranges over all rows."""
        if query.size == 0:
            return ()
        starts, stops = self.first[:, query.start], self.last[:, query.stop - 1]
        rows = zip(starts.tolist(), stops.tolist(), strict=True)
        return union(Range(start, stop) for start, stop in rows)

    def work(self, query: Range, keys: Range) -> int:
        """Return the number of visible (query, key) pairs in a block, summed over the rows."""
        if query.size == 0 or keys.size == 0:
            return 0
        part = slice(query.start, query.stop)
        start = np.clip(self.first[:, part], keys.start, keys.stop)
        stop = np.clip(self.last[:, part], keys.start, keys.stop)
        seen = np.take_along_axis(self.real_before, stop, 1)
        seen -= np.take_along_axis(self.real_before, start, 1)
        return int(np.maximum(seen, 0).sum())

    def work_before(self) -> IntArray:
        """Return the visible pairs of all queries before each position, over the rows, [S + 1].

        Example:
            >>> Mask(causal=True, window=2).bounds(4).work_before().tolist()
            [0, 1, 3, 5, 7]
        """
        seen = np.take_along_axis(self.real_before, self.last, 1)
        seen -= np.take_along_axis(self.real_before, self.first, 1)
        before = np.zeros(self.length + 1, np.int64)
        np.cumsum(seen.sum(0), out=before[1:])
        return before

    def classify(self, query: Range, keys: Range) -> Literal["empty", "full", "partial"]:
        """Say whether a block is empty, full or partial, over all rows.

        Example:
            >>> bounds = Mask(causal=True).bounds(8)
            >>> [bounds.classify(Range(4, 6), Range(k, k + 2)) for k in (0, 4, 6)]
            ['full', 'partial', 'empty']
        """
        work = self.work(query, keys)
        if work == 0:
            return "empty"
        return "full" if work == self.num_rows * query.size * keys.size else "partial"

    def visible(self, query: Range, keys: Range) -> Tensor:
        """Return a bool tensor [R, queries, keys]: the block written out. For small blocks."""
        positions = torch.arange(keys.start, keys.stop)
        part = slice(query.start, query.stop)
        first = torch.from_numpy(self.first[:, part]).unsqueeze(-1)
        last = torch.from_numpy(self.last[:, part]).unsqueeze(-1)
        real = torch.from_numpy(np.diff(self.real_before[:, keys.start : keys.stop + 1]) > 0)
        return (positions >= first) & (positions < last) & real.unsqueeze(1)

    def trim(self, query: Range, keys: Range) -> tuple[Range, Range] | None:
        """Cut off the queries that see none of the keys and the keys that none of them see.

        Example:
            >>> Mask(causal=True, window=3).bounds(10).trim(Range(0, 10), Range(4, 5))
            (Range(start=4, stop=7), Range(start=4, stop=5))
        """
        if query.size == 0 or keys.size == 0:
            return None
        part = slice(query.start, query.stop)
        begin = min(int(row.searchsorted(keys.start, "right")) for row in self.last[:, part])
        end = max(int(row.searchsorted(keys.stop, "left")) for row in self.first[:, part])
        if begin >= end:
            return None
        query = Range(query.start + begin, query.start + end)
        starts, stops = self.first[:, query.start], self.last[:, query.stop - 1]
        keys = keys.meet(Range(int(starts.min()), int(stops.max())))
        return (query, keys) if keys.size > 0 else None

    def tiles(self, query: Range, keys: Range, *, size: int) -> Iterator[Tile]:
        """Cut a block into as few tiles as show its structure; empty ones are left out.

        Whole and causal parts become one tile each, however large. What remains is cut until a tile
        holds no more than ``size`` squared pairs.

        Example:
            >>> bounds = Mask(causal=True).bounds(512)
            >>> for tile in bounds.tiles(Range(256, 512), Range(0, 512), size=64):
            ...     print(*tile.query, *tile.keys, tile.kind)
            256 512 256 512 causal
            256 512 0 256 full
        """
        pending = [(query, keys)]
        while pending:
            trimmed = self.trim(*pending.pop())
            if trimmed is None:
                continue
            query, keys = trimmed
            common = self._common(query, keys)
            if common == keys:
                yield Tile(query, keys, "full")
            elif keys.stop == query.stop > query.start >= keys.start and self._is_causal(query):
                yield Tile(query, query, "causal")
                pending.append((query, Range(keys.start, query.start)))
            elif common.size >= size:
                yield Tile(query, common, "full")
                pending.append((query, Range(keys.start, common.start)))
                pending.append((query, Range(common.stop, keys.stop)))
            elif query.size * keys.size <= size * size:
                if self.work(query, keys) > 0:
                    yield Tile(query, keys, "masked")
            else:
                pending.extend(self._halves(query, keys, size))

    def _common(self, query: Range, keys: Range) -> Range:
        """Return keys that every query of the range sees in every row, without a hole."""
        start = int(self.first[:, query.stop - 1].max())
        stop = int(self.last[:, query.start].min())
        common = keys.meet(Range(start, max(start, stop)))
        return common if self._is_whole(common) else Range(keys.start, keys.start)

    def _is_whole(self, keys: Range) -> bool:
        real = self.real_before[:, keys.stop] - self.real_before[:, keys.start]
        return bool((real == keys.size).all())

    def _is_causal(self, square: Range) -> bool:
        """Say whether the square on the diagonal holds exactly the pairs ``k <= q``."""
        steps = np.arange(square.start + 1, square.stop + 1)
        part = slice(square.start, square.stop)
        return (
            bool((self.first[:, square.stop - 1] <= square.start).all())
            and bool((self.last[:, part] == steps).all())
            and self._is_whole(square)
        )

    def _halves(self, query: Range, keys: Range, size: int) -> Iterator[tuple[Range, Range]]:
        """Split the queries where a document starts, else the longer side in the middle."""
        jumps = np.diff(self.first[:, query.start : query.stop].max(0))
        starts = np.flatnonzero(jumps >= max(size // 2, 1)) + query.start + 1
        if starts.size:
            # The one nearest to the middle, so that many documents are halved again and again.
            middle = int(starts[np.abs(2 * starts - query.start - query.stop).argmin()])
        elif keys.size > query.size:
            middle = (keys.start + keys.stop) // 2
            yield query, Range(keys.start, middle)
            yield query, Range(middle, keys.stop)
            return
        else:
            middle = (query.start + query.stop) // 2
        yield Range(query.start, middle), keys
        yield Range(middle, query.stop), keys


def _check_window(window: int | tuple[int, int] | None) -> None:
    if isinstance(window, tuple):
        if len(window) != 2 or min(window) < 0:
            raise ValueError(
                f"Mask(window={window}): a pair (left, right) counts the keys on each side, "
                "0 or more."
            )
    elif window is not None and window < 1:
        raise ValueError(f"Mask(window={window}): a window holds at least 1 key, the query itself.")


def _check_given(name: str, value: object, *, may_be_false: bool) -> None:
    if value is None or isinstance(value, Tensor) or (may_be_false and value is False):
        return
    raise TypeError(
        f"Mask({name}=...) got a {type(value).__name__}. Give a tensor of the whole row, or None"
        + (", or False to ignore the batch's own." if may_be_false else ".")
    )


def _check_ids(name: str, ids: Tensor | Literal[False] | None) -> None:
    if isinstance(ids, Tensor) and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise TypeError(f"Mask({name}=...) has dtype {ids.dtype}, but must hold integer ids.")


def _whole_row(name: str, value: Tensor | Literal[False] | None, seq_len: int) -> IntArray | None:
    """Bring a mask's tensor to the host as [rows, S]."""
    if not isinstance(value, Tensor):
        return None
    if value.dim() not in (1, 2) or value.shape[-1] != seq_len:
        raise ValueError(
            f"Mask({name}=...) has shape {tuple(value.shape)}, but the whole row has {seq_len} "
            f"tokens: give [batch, {seq_len}] or [{seq_len}]. Masks are written in global "
            "positions, not in the positions of one rank."
        )
    return value.detach().cpu().reshape(-1, seq_len).numpy()


def _runs(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return, for each position, where its run of equal ids starts and where it stops."""
    length = ids.shape[1]
    positions = np.arange(length)
    change = ids[:, 1:] != ids[:, :-1]
    start = np.zeros(ids.shape, np.int64)
    start[:, 1:] = np.where(change, positions[1:], 0)
    stop = np.full(ids.shape, length, np.int64)
    stop[:, :-1] = np.where(change, positions[1:], length)
    return np.maximum.accumulate(start, 1), _accumulate_back(stop)


def _accumulate_back(values: IntArray) -> IntArray:
    """Return the minimum of each value and all that follow it in the row."""
    return np.minimum.accumulate(values[:, ::-1], 1)[:, ::-1]


def check_runs(name: str, ids: IntArray) -> None:
    """Refuse an id that comes back after another one: it would not be one interval of positions."""
    for row, values in enumerate(ids):
        begins = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
        named = begins[values[begins] != NO_DOCUMENT]
        found, counts = np.unique(values[named], return_counts=True)
        if (counts > 1).any():
            again = int(found[counts > 1][0])
            at = int(named[values[named] == again][1])
            raise ValueError(
                f"Row {row} of `{name}` uses id {again} again at position {at}, after another id. "
                "Tokens that belong together must be neighbours: give each run an id of its own, "
                "or sort the row."
            )


@lru_cache(maxsize=6)
def _work_out_once(
    causal: bool,
    window: int | tuple[int, int] | None,
    chunk: int | None,
    seq_len: int,
    padded_len: int,
) -> Bounds:
    """Work out rows of one document each, which are the same in every batch."""
    bounds = _work_out(
        Mask(causal=causal, window=window, chunk=chunk),
        seq_len=seq_len,
        padded_len=padded_len,
        documents=None,
        padding=None,
        spans=None,
    )
    return replace(bounds, kept=Kept())


def _work_out(
    mask: Mask,
    *,
    seq_len: int,
    padded_len: int,
    documents: IntArray | None,
    padding: IntArray | BoolArray | None,
    spans: IntArray | None,
) -> Bounds:
    rows = max((x.shape[0] for x in (documents, padding, spans) if x is not None), default=1)
    for name, ids in (("documents", documents), ("spans", spans)):
        if ids is not None:
            check_runs(name, ids)
    position = np.arange(seq_len)
    document = np.zeros((1, seq_len), np.int64) if documents is None else documents
    real = np.broadcast_to(document != NO_DOCUMENT, (rows, seq_len))
    if padding is not None:
        real = real & ~padding.astype(np.bool_)

    document_first, document_last = _runs(document)
    first, last = (np.broadcast_to(x, (rows, seq_len)) for x in (document_first, document_last))
    if mask.chunk is not None:
        chunk_first = _chunk_starts(first, last, real, mask.chunk)
        first = np.maximum(first, chunk_first)
        last = np.minimum(last, chunk_first + mask.chunk)
    if mask.window is not None:
        reach = mask.window
        left, right = reach if isinstance(reach, tuple) else (reach - 1, reach - 1)
        first = np.maximum(first, position - left)
        last = np.minimum(last, position + right + 1)
    if mask.causal:
        last = np.minimum(last, position + 1)
    if spans is not None:
        # The query itself lies in its span and in what the rest allows, so the union of the two
        # is one interval again.
        span_first, span_last = _runs(spans)
        inside = spans != NO_DOCUMENT
        first = np.where(inside, np.minimum(first, np.maximum(span_first, document_first)), first)
        last = np.where(inside, np.maximum(last, np.minimum(span_last, document_last)), last)
    belongs = np.broadcast_to(document != NO_DOCUMENT, (rows, seq_len))
    first = np.where(belongs, first, position)
    last = np.where(belongs, last, position)
    return _trimmed(first, last, real, padded_len)


def _chunk_starts(first: IntArray, last: IntArray, real: BoolArray, chunk: int) -> IntArray:
    """Return where each position's chunk starts, counted from its document's first real token."""
    length = real.shape[1]
    position = np.arange(length)
    next_real = _accumulate_back(np.where(real, position, length))
    origin = np.take_along_axis(next_real, np.ascontiguousarray(first), 1)
    origin = np.where(origin < last, origin, first)
    starts: IntArray = origin + (position - origin) // chunk * chunk
    return starts


def _trimmed(first: IntArray, last: IntArray, real: BoolArray, padded_len: int) -> Bounds:
    """Pull both bounds in to real keys, add our padding, keep equal rows once."""
    rows, seq_len = real.shape
    extra = padded_len - seq_len
    tail = np.broadcast_to(np.arange(seq_len, padded_len), (rows, extra))
    first = np.concatenate([first, tail], 1)
    last = np.concatenate([last, tail], 1)
    real = np.concatenate([real, np.zeros((rows, extra), np.bool_)], 1)

    position = np.arange(padded_len)
    after_real = np.maximum.accumulate(np.where(real, position + 1, 0), 1)
    # Nothing reaches past the last real key, not even the bounds of queries that see nothing.
    edge = after_real[:, -1:]
    next_real = _accumulate_back(np.where(real, position, padded_len))
    next_real = np.concatenate([np.minimum(next_real, edge), edge], 1)
    after_real = np.concatenate([np.zeros((rows, 1), np.int64), after_real], 1)
    first = np.take_along_axis(next_real, first, 1)
    last = np.maximum(first, np.take_along_axis(after_real, last, 1))
    real_before = np.zeros((rows, padded_len + 1), np.int64)
    np.cumsum(real, 1, out=real_before[:, 1:])
    if rows > 1 and all((x == x[:1]).all() for x in (first, last, real_before)):
        first, last, real_before = first[:1], last[:1], real_before[:1]
    return Bounds(first, last, real_before)
