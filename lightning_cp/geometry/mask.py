# SPDX-License-Identifier: Apache-2.0
"""`Mask`: which query sees which key, as users write it; computes `Bounds` for one length."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_cp.geometry.bounds import Bounds, build_bounds, minimum_from_end
from lightning_cp.geometry.ranges import BoolArray, IntArray
from lightning_cp.private.modules import tensor_version

NO_DOCUMENT = -1
"""Document id of a token that belongs to none: it sees nothing and nothing sees it."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees, in global positions.

    A query ``q`` sees a key ``k`` when (``causal``, ``window`` and ``chunk`` allow it, or both are
    in the same bidirectional span), and both belong to the same document, and ``k`` is not padding.

    Args:
        causal: ``k <= q``.
        window: ``W`` keeps the nearest W keys on each side, the query itself counted:
            ``|q - k| < W``. A pair ``(left, right)`` keeps ``q - left <= k <= q + right``.
        chunk: only keys of the query's own chunk of that many tokens. Chunks are counted from the
            first token of the document (of the sequence, where there are no documents) that is not
            padding.
        documents: integer ids [B, S] or [S]; equal neighbours are one document, -1 belongs to none.
            ``None`` takes the documents of the active step, ``False`` ignores them.
        spans: integer ids [B, S] or [S] of spans whose tokens see each other in both directions
            (a prefix, the tokens of one image); -1 is in no span.
        padding: bool [B, S] or [S], true where a token is padding and is not visible to any query.
            ``None`` takes the padding of the active step, ``False`` ignores it.
        cut_spans: whether ``window`` and ``chunk`` also hide earlier keys of a query's own span.

    Example:
        >>> from lightning_cp.geometry.ranges import Range
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
    cut_spans: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.window is not None and not isinstance(self.window, int):
            object.__setattr__(self, "window", tuple(self.window))  # JSON and YAML have lists
        _check_window(self.window)
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"Mask(chunk={self.chunk}): a chunk holds at least 1 token.")
        for name in ("documents", "spans", "padding"):
            _check_type(name, getattr(self, name), may_be_false=name != "spans")
        for name in ("documents", "spans"):
            _check_ids(name, getattr(self, name))
        if isinstance(self.padding, Tensor) and self.padding.dtype != torch.bool:
            raise TypeError(
                f"Mask(padding=...) has dtype {self.padding.dtype}, but must be bool, true where a "
                "token is padding. From a Hugging Face attention_mask: padding=attention_mask == 0."
            )

    def key(self) -> tuple[object, ...]:
        """Return a cache key: the settings, and the identity and version of the tensors."""
        tensors: list[object] = [
            (id(x), tensor_version(x)) if isinstance(x, Tensor) else x for x in self.tensors()
        ]
        return (self.causal, self.window, self.chunk, self.cut_spans, *tensors)

    def is_windowed(self, seq_len: int) -> bool:
        """Return whether a window or chunks hide keys of sequences of that length.

        Example:
            >>> mask = Mask(causal=True, window=4)
            >>> mask.is_windowed(5), mask.is_windowed(4)
            (True, False)
        """
        window = self.window
        if isinstance(window, tuple):
            window = 1 + (window[0] if self.causal else min(window))
        return any(size is not None and size < seq_len for size in (window, self.chunk))

    def tensors(self) -> tuple[Tensor | Literal[False] | None, ...]:
        """Return documents, spans and padding."""
        return self.documents, self.spans, self.padding

    def bounds(
        self,
        seq_len: int,
        *,
        padded_len: int | None = None,
        documents: IntArray | None = None,
        padding: BoolArray | None = None,
    ) -> "Bounds":
        """Compute the bounds of sequences of ``seq_len`` tokens.

        ``documents`` and ``padding`` are the step's, used where those of the mask are None.
        Positions from ``seq_len`` to ``padded_len`` see nothing and are not visible.
        """
        spans = _to_host("spans", self.spans, seq_len)
        if self.documents is not None:
            documents = _to_host("documents", self.documents, seq_len)
        hidden: IntArray | BoolArray | None = padding
        if self.padding is not None:
            hidden = _to_host("padding", self.padding, seq_len)
        padded_len = seq_len if padded_len is None else padded_len
        if documents is None and hidden is None and spans is None:
            return _shared_bounds(self.causal, self.window, self.chunk, seq_len, padded_len)
        return _compute_bounds(
            self,
            seq_len=seq_len,
            padded_len=padded_len,
            documents=documents,
            padding=hidden,
            spans=spans,
        )


def _check_window(window: int | tuple[int, int] | None) -> None:
    if isinstance(window, tuple):
        if len(window) != 2 or min(window) < 0:
            raise ValueError(
                f"Mask(window={window}): a pair (left, right) counts the keys on each side, "
                "0 or more."
            )
    elif window is not None and window < 1:
        raise ValueError(f"Mask(window={window}): a window holds at least 1 key, the query itself.")


def _check_type(name: str, value: object, *, may_be_false: bool) -> None:
    if value is None or isinstance(value, Tensor) or (may_be_false and value is False):
        return
    raise TypeError(
        f"Mask({name}=...) got a {type(value).__name__}. Give a tensor of the full sequence, or "
        + ("None, or False to ignore the batch's own." if may_be_false else "None.")
    )


def _check_ids(name: str, ids: Tensor | Literal[False] | None) -> None:
    if isinstance(ids, Tensor) and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise TypeError(f"Mask({name}=...) has dtype {ids.dtype}, but must hold integer ids.")


def _to_host(name: str, value: Tensor | Literal[False] | None, seq_len: int) -> IntArray | None:
    """Return a mask's tensor on the host as [R, S]; None for False."""
    if not isinstance(value, Tensor):
        return None
    if value.dim() not in (1, 2) or value.shape[-1] != seq_len:
        raise ValueError(
            f"Mask({name}=...) has shape {tuple(value.shape)}, but the full sequence has {seq_len} "
            f"tokens: give [batch, {seq_len}] or [{seq_len}]. Masks are written in global "
            "positions, not in the positions of one rank."
        )
    return value.detach().cpu().reshape(-1, seq_len).numpy()


def runs(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return, for each position, where its run of equal ids starts and where it stops."""
    length = ids.shape[1]
    positions = np.arange(length)
    change = ids[:, 1:] != ids[:, :-1]
    start = np.zeros(ids.shape, np.int64)
    start[:, 1:] = np.where(change, positions[1:], 0)
    stop = np.full(ids.shape, length, np.int64)
    stop[:, :-1] = np.where(change, positions[1:], length)
    return np.maximum.accumulate(start, 1), minimum_from_end(stop)


def check_runs(name: str, ids: IntArray) -> None:
    """Raise if an id is used again after another one: it would not be one interval of positions."""
    for sample, values in enumerate(ids):
        starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
        starts = starts[values[starts] != NO_DOCUMENT]
        unique, counts = np.unique(values[starts], return_counts=True)
        if (counts > 1).any():
            repeated = int(unique[counts > 1][0])
            position = int(starts[values[starts] == repeated][1])
            raise ValueError(
                f"Sample {sample} of `{name}` uses id {repeated} again at position {position}, "
                "after another id. Tokens of one id must be consecutive: give each run an id of "
                "its own, or sort the sequence."
            )


@lru_cache(maxsize=6)
def _shared_bounds(
    causal: bool,
    window: int | tuple[int, int] | None,
    chunk: int | None,
    seq_len: int,
    padded_len: int,
) -> Bounds:
    """Compute the bounds of sequences of one document each, which are the same in every batch."""
    bounds = _compute_bounds(
        Mask(causal=causal, window=window, chunk=chunk),
        seq_len=seq_len,
        padded_len=padded_len,
        documents=None,
        padding=None,
        spans=None,
    )
    return replace(bounds, is_shared=True)


def _compute_bounds(
    mask: Mask,
    *,
    seq_len: int,
    padded_len: int,
    documents: IntArray | None,
    padding: IntArray | BoolArray | None,
    spans: IntArray | None,
) -> Bounds:
    num_samples = max((x.shape[0] for x in (documents, padding, spans) if x is not None), default=1)
    for name, ids in (("documents", documents), ("spans", spans)):
        if ids is not None:
            check_runs(name, ids)
    position = np.arange(seq_len)
    document = np.zeros((1, seq_len), np.int64) if documents is None else documents
    real = np.broadcast_to(document != NO_DOCUMENT, (num_samples, seq_len))
    if padding is not None:
        real = real & ~padding.astype(np.bool_)

    document_first, document_last = runs(document)
    first, last = (
        np.broadcast_to(x, (num_samples, seq_len)) for x in (document_first, document_last)
    )
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
        # The query is in its span and in what the rest allows, so that the union of the two
        # is one interval again.
        span_first, span_last = runs(spans)
        inside = spans != NO_DOCUMENT
        if not mask.cut_spans:
            start = np.minimum(first, np.maximum(span_first, document_first))
            first = np.where(inside, start, first)
        last = np.where(inside, np.maximum(last, np.minimum(span_last, document_last)), last)
    belongs = np.broadcast_to(document != NO_DOCUMENT, (num_samples, seq_len))
    first = np.where(belongs, first, position)
    last = np.where(belongs, last, position)
    return build_bounds(first, last, real, padded_len)


def _chunk_starts(first: IntArray, last: IntArray, real: BoolArray, chunk: int) -> IntArray:
    """Return where each position's chunk starts, counted from its document's first real token."""
    length = real.shape[1]
    position = np.arange(length)
    next_real = minimum_from_end(np.where(real, position, length))
    origin = np.take_along_axis(next_real, np.ascontiguousarray(first), 1)
    origin = np.where(origin < last, origin, first)
    starts: IntArray = origin + (position - origin) // chunk * chunk
    return starts
