# SPDX-License-Identifier: Apache-2.0
"""One batch -> what this rank holds of it, and what the step must know about the whole.

Reads documents and padding in whatever way the batch tells them, and decides which tensors are cut.
That all ranks hold the same batch is `agreement.py`'s business.
"""

import itertools
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_cp.data.sharding import shard
from lightning_cp.data.structure import Leaf, flatten, is_container, rebuild
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import NO_DOCUMENT, check_runs
from lightning_cp.geometry.ranges import BoolArray, IntArray
from lightning_cp.step import IGNORED_LABEL

SEQUENCE_DIMS: Final[Mapping[str, int | None]] = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "labels": 1,
    "shift_labels": 1,
    "position_ids": -1,
    "attention_mask": 1,
    "token_type_ids": 1,
    "document_ids": 1,
    "loss_mask": 1,
    "special_tokens_mask": 1,
    "mm_token_type_ids": 1,
    "seq_idx": 1,
    "decoder_input_ids": 1,
    "decoder_inputs_embeds": 1,
    "decoder_attention_mask": 1,
    "cu_seq_lens_q": None,
    "cu_seq_lens_k": None,
    "max_length_q": None,
    "max_length_k": None,
}
"""Where the sequence lies in the tensors of a Hugging Face batch; None: kept whole."""

_FILL: Final[Mapping[str, int]] = {
    "labels": IGNORED_LABEL,
    "shift_labels": IGNORED_LABEL,
    "document_ids": NO_DOCUMENT,
}


_TOKENS: Final = ("input_ids", "inputs_embeds")
"""What a model is given: the tensors beside it describe the same rows."""


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """What is known of a batch before it is cut.

    Args:
        tensors: the values of the user's batch by path (`structure.flatten`).
        dims: for each path that is cut, along which dim; none where the batch is handed over.
        batch_size: number of rows.
        seq_len: tokens per row; of the longest part where the batch is handed over.
        documents: [B, S] or [1, S], None where each row is one document.
        padding: [B, S], None where nothing is padding.
        told: what describes the rows, by name: ``position_ids``, ``attention_mask``.
        names: the name by which each path is known; None where it has none.
    """

    tensors: Mapping[str, Any]
    dims: Mapping[str, int]
    batch_size: int
    seq_len: int
    documents: IntArray | None
    padding: BoolArray | None
    told: Mapping[str, Any]
    names: Mapping[str, str | None]

    @property
    def is_handed_over(self) -> bool:
        """Say whether nothing is cut, since the user said so of every tensor."""
        return not self.dims

    @property
    def shows_padding(self) -> bool:
        """Say whether ranks may fill their part up: they know with what, by a tensor's name."""
        return all(self.names[path] is not None for path in self.dims)


def read_batch(
    batch: Any,
    *,
    sequence_dims: Mapping[str, int | None],
    decided: MutableMapping[str, int | None],
) -> WholeBatch:
    """Read what a batch says about its rows.

    Args:
        batch: the user's batch.
        sequence_dims: the user's word on where the sequence lies, by name or by path.
        decided: paths that nobody named, and what the first batch showed of them; added to.
    """
    if not isinstance(batch, Tensor) and not is_container(batch):
        raise TypeError(
            f"cp.step() needs tensors in a dict, tuple, list or data class, such as a Hugging Face "
            f"batch; it got a {type(batch).__name__}. Name the tensors: "
            '{"input_ids": ..., "labels": ...}.'
        )
    leaves = flatten(batch)
    tensors = {path: leaf.value for path, leaf in leaves.items()}
    words = {path: _word_of(path, leaf, sequence_dims) for path, leaf in leaves.items()}
    named = {path for path, word in words.items() if word is not None}
    known = _known(leaves, words)
    names = {path: leaf.name for path, leaf in leaves.items()}
    if _is_handed_over(tensors, known, named):
        longest = max(x.shape[1] for x in tensors.values() if isinstance(x, Tensor) and x.dim() > 1)
        return WholeBatch(tensors, {}, 0, longest, None, None, {}, names)
    anchor, seq_len = _sequence(leaves, known, sequence_dims)
    if seq_len < 1:
        raise ValueError(
            f"`{anchor}` has shape {tuple(tensors[anchor].shape)}: rows of length 0, nothing to "
            "attend to. Leave such batches out, in the data set or in the collate function."
        )
    if anchor not in known:  # nothing has a name that we know: what lies in a list has none
        names = {path: None if leaves[path].is_listed else name for path, name in names.items()}
    dims = _dims(leaves, known, named, names, decided, anchor, seq_len)
    batch_size = tensors[anchor].shape[0]
    told, (documents, padding) = _read_rows(
        {
            path: leaf
            for path, leaf in leaves.items()
            if not (leaf.above and words[path] == (None,))
        },
        names,
        dims,
        batch_size,
        seq_len,
    )
    return WholeBatch(tensors, dims, batch_size, seq_len, documents, padding, told, names)


def _word_of(path: str, leaf: Leaf, words: Mapping[str, int | None]) -> tuple[int | None] | None:
    """Return what the user said of a value, in a tuple; None where nothing was said.

    Its path goes before a container that is kept whole, and that before its name.
    """
    if path in words:
        return (words[path],)
    for above in (*leaf.above, *leaf.names[:-1], *(leaf.names[-1:] if leaf.is_listed else ())):
        if above in words and words[above] is None:
            return (None,)
    return (words[leaf.name],) if leaf.name is not None and leaf.name in words else None


def _known(
    leaves: Mapping[str, Leaf], words: Mapping[str, tuple[int | None] | None]
) -> dict[str, int | None]:
    """Return, for each path that is known, along which dim it is cut."""
    known = {}
    for path, leaf in leaves.items():
        word = words[path]
        if word is not None:
            known[path] = word[0]
        elif leaf.name is not None and leaf.name in SEQUENCE_DIMS:
            known[path] = SEQUENCE_DIMS[leaf.name]
    return known


def _is_handed_over(
    tensors: Mapping[str, Any], known: Mapping[str, int | None], named: Collection[str]
) -> bool:
    """Say whether the user keeps every tensor whole that could hold a sequence."""
    could = [path for path, x in tensors.items() if isinstance(x, Tensor) and x.dim() > 1]
    return bool(could) and all(path in named and known[path] is None for path in could)


def _sequence(
    leaves: Mapping[str, Leaf],
    known: Mapping[str, int | None],
    sequence_dims: Mapping[str, int | None],
) -> tuple[str, int]:
    """Return the path that says how long rows are, and how long."""
    order = list(dict.fromkeys((*_TOKENS, *SEQUENCE_DIMS, *sequence_dims)))
    places = {name: place for place, name in enumerate(order)}
    last = len(places)
    for path in sorted(known, key=lambda path: places.get(str(leaves[path].name), last)):
        dim, leaf = known[path], leaves[path]
        value = leaf.value
        if not isinstance(value, Tensor) or dim is None:
            continue
        if value.dim() < 2 and leaf.name in _TOKENS:
            raise ValueError(
                f"`{path}` has shape {tuple(value.shape)}, but rows lie in a batch: give "
                "[batch, tokens], for one row x.unsqueeze(0)."
            )
        if value.dim() > 1 and _has_dim(value, dim):
            return path, value.shape[dim]
    return _unnamed_sequence(leaves, known)


def _unnamed_sequence(
    leaves: Mapping[str, Leaf], known: Mapping[str, int | None]
) -> tuple[str, int]:
    """Find the length of rows in tensors that have a place and no name: [batch, tokens, ...]."""
    placed = {
        path: leaf.value
        for path, leaf in leaves.items()
        if path not in known and (leaf.is_listed or leaf.name is None)
        if isinstance(leaf.value, Tensor) and leaf.value.dim() > 1
    }
    if not placed:
        raise ValueError(
            f"The batch has the keys {sorted(leaves)}, and none of them is known to hold a "
            "sequence. Say where it lies: sequence_dims={'my_tokens': 1}."
        )
    # [batch, features] looks like [batch, tokens]: floating-point numbers alone do not tell.
    sure = [path for path, x in placed.items() if x.dim() > 2 or not x.is_floating_point()]
    if not sure or len({placed[path].shape[:2] for path in sure}) > 1:
        shapes = ", ".join(f"`{path}` {tuple(x.shape)}" for path, x in placed.items())
        entries = ", ".join(f"'{path}': 1" for path in placed)
        raise ValueError(
            f"The batch holds tensors without names, and their shapes do not tell where the "
            f"sequence lies: {shapes}. Say it of each: sequence_dims={{{entries}}}, the dim of the "
            "tokens, or None to keep one whole; or give a dict."
        )
    return sure[0], placed[sure[0]].shape[1]


def _has_dim(x: Tensor, dim: int) -> bool:
    return -x.dim() <= dim < x.dim()


def _dims(
    leaves: Mapping[str, Leaf],
    known: Mapping[str, int | None],
    named: Collection[str],
    names: Mapping[str, str | None],
    decided: MutableMapping[str, int | None],
    anchor: str,
    seq_len: int,
) -> dict[str, int]:
    """Return the dim along which each path is cut; those that are kept whole are left out."""
    dims = {}
    rows = leaves[anchor].value.shape[0]
    for path, leaf in leaves.items():
        value = leaf.value
        if path not in known and names[path] is None and isinstance(value, Tensor):
            if _is_cut_by_place(path, value, rows, seq_len):
                dims[path] = 1
            continue
        if path not in known and path not in decided and value is not None:
            _check_unknown(path, value, seq_len)
            decided[path] = None
        dim = known.get(path)
        if path not in named and _is_ready_mask(leaf.name, value, seq_len):
            dim = -2  # queries are cut, keys are not
        if dim is None or value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"`{path}` holds a sequence and would be cut along dim {dim}, but is a "
                f"{type(value).__name__}. Give a tensor, or keep it whole: "
                f"sequence_dims={{'{path}': None}}."
            )
        if not _has_dim(value, dim):
            if path in named:
                raise ValueError(
                    f"sequence_dims={{'{path}': {dim}}}, but `{path}` has shape "
                    f"{tuple(value.shape)}."
                )
            if leaf.is_listed:
                raise ValueError(
                    f"`{path}` has shape {tuple(value.shape)}: rows in a list cannot be cut. Stack "
                    f"them, [batch, tokens], or keep it whole: sequence_dims={{'{path}': None}}."
                )
            continue  # labels of shape [batch] belong to rows, not to tokens
        if value.shape[dim] != seq_len:
            raise ValueError(
                f"The batch holds two sequence lengths: `{anchor}` has {seq_len} tokens, `{path}` "
                f"of shape {tuple(value.shape)} has {value.shape[dim]}. "
                f"{_cure(leaves, anchor, path)}"
            )
        dims[path] = dim
    return dims


def _is_cut_by_place(path: str, x: Tensor, rows: int, seq_len: int) -> bool:
    """Say whether a tensor without a name is [batch, tokens, ...]; refuse what may be either."""
    if x.dim() < 2 and (x.dim() == 0 or x.shape[0] == rows or x.shape[0] != seq_len):
        return False
    if x.shape[:2] == (rows, seq_len) and seq_len not in x.shape[2:]:
        return True
    dim = x.shape.index(seq_len) if seq_len in x.shape else 1
    cut = f"sequence_dims={{'{path}': {dim}}} to cut it, " if seq_len in x.shape else ""
    raise ValueError(
        f"The batch holds `{path}` of shape {tuple(x.shape)} without a name, beside rows of "
        f"[{rows}, {seq_len}] tokens. Say whether it is sharded: {cut}"
        f"sequence_dims={{'{path}': None}} to keep it whole."
    )


def _cure(leaves: Mapping[str, Leaf], one: str, other: str) -> str:
    """Say what to do about two sequences in one batch."""
    parents = [leaves[path].parent for path in (one, other)]
    if parents[0] == parents[1]:
        return (
            "Open one `cp.step` for each sequence (encoder and decoder, pairs), or keep this one "
            f"whole: sequence_dims={{'{other}': None}}."
        )
    return _apart(parents)


def _apart(parents: Sequence[str]) -> str:
    """Say how parts of a batch are worked on one after the other."""
    paths = [path for path in dict.fromkeys(parents) if path]
    if not paths:
        return "Make them agree."
    entries = ", ".join(f"'{path}': None" for path in paths)
    keys = (key if key.isdigit() else f"'{key}'" for key in paths[0].split("."))
    index = "".join(f"[{key}]" for key in keys)
    return (
        f"Have them handed over whole, sequence_dims={{{entries}}}, and open a step for each: "
        f"`with cp.step(batch{index}) as part:`, with cp = self.trainer.strategy.context_parallel."
    )


def _is_ready_mask(name: str | None, value: object, seq_len: int) -> bool:
    """Say whether this is a mask of queries x keys, which tells all that a model needs."""
    return (
        name == "attention_mask"
        and isinstance(value, Tensor)
        and value.dim() == 4
        and value.shape[-2:] == (seq_len, seq_len)
    )


def _check_unknown(path: str, value: object, seq_len: int) -> None:
    if not isinstance(value, Tensor) or seq_len not in value.shape:
        return
    dim = value.shape.index(seq_len)
    raise ValueError(
        f"The batch holds `{path}` of shape {tuple(value.shape)}, whose dim {dim} is as long as "
        f"the sequence. Say whether it is sharded: sequence_dims={{'{path}': {dim}}} to cut it, "
        f"{{'{path}': None}} to keep it whole."
    )


_ROWS: Final = ("attention_mask", "document_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k")
"""What tells documents, padding and positions."""

_Rows = tuple[IntArray | None, BoolArray | None]
"""Documents and padding."""


def _read_rows(
    leaves: Mapping[str, Leaf],
    names: Mapping[str, str | None],
    dims: Mapping[str, int],
    batch_size: int,
    seq_len: int,
) -> tuple[dict[str, Any], _Rows]:
    """Return what is told of the rows, by name, and the documents and padding that it means.

    Every container that has tokens tells of its own; they must agree. What lies beside no tokens is
    told of all.
    """
    groups: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        name = names[path]
        if name in _TOKENS and path in dims and leaf.value.shape[0] != batch_size:
            raise ValueError(
                f"`{path}` of shape {tuple(leaf.value.shape)} has other rows than the batch, whose "
                f"number is {batch_size}. {_apart([at.parent for at in leaves.values()])}"
            )
        if name in _ROWS or name in _TOKENS:
            _tell(groups.setdefault(leaf.parent, {}), str(name), path, leaf)
    tokens = [at for at, told in groups.items() if not told.keys().isdisjoint(_TOKENS)]
    common: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if names[path] in _ROWS and leaf.parent not in tokens:
            _tell(common, str(names[path]), path, leaf)
    views = {at: {**common, **groups[at]} for at in tokens} or {"": common}
    (first, told), *others = views.items()
    rows = _rows_of(told, batch_size, seq_len)
    for at, other in others:
        found = _rows_of(other, batch_size, seq_len)
        positions = [_positions(x, y[0], seq_len) for x, y in ((told, rows), (other, found))]
        pairs = {
            "documents": (rows[0], found[0]),
            "padding": (rows[1], found[1]),
            "position ids": (positions[0], positions[1]),
        }
        for what, (one, another) in pairs.items():
            if (one is None) != (another is None) or not np.array_equal(one, another):  # type: ignore[arg-type]
                raise ValueError(
                    f"`{first}` and `{at}` lie in one batch, and have different {what}. "
                    f"{_apart(list(views))}"
                )
        told = {**other, **told}
    return told, rows


def _tell(told: dict[str, Any], name: str, path: str, leaf: Leaf) -> None:
    """Note what is told; two tensors of one name must tell the same."""
    known = told.get(name)
    if name in _ROWS and known is not None:
        same = torch.as_tensor(known).shape == torch.as_tensor(leaf.value).shape
        if not same or not bool((torch.as_tensor(known) == torch.as_tensor(leaf.value)).all()):
            raise ValueError(
                f"The batch holds several `{name}`, and `{path}` differs from another. "
                f"{_apart([leaf.parent or path])}"
            )
    told[name] = leaf.value


def _rows_of(told: Mapping[str, Any], batch_size: int, seq_len: int) -> _Rows:
    padding = _read_padding(told, seq_len)
    return _read_documents(told, batch_size, seq_len, padding), padding


def _positions(told: Mapping[str, Any], documents: IntArray | None, seq_len: int) -> IntArray:
    given = told.get("position_ids")
    found: IntArray = count_positions(documents, seq_len)
    if isinstance(given, Tensor):
        found = given.detach().cpu().numpy()
    return found[:1] if (found == found[:1]).all() else found


def _read_padding(batch: Mapping[str, Any], seq_len: int) -> BoolArray | None:
    mask = batch.get("attention_mask")
    if mask is None or _is_ready_mask("attention_mask", mask, seq_len):
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"`attention_mask` of shape {shape} cannot be cut: give [batch, {seq_len}], 1 for "
            "tokens and 0 for padding, and say the rest with Mask(...) in the model; or a ready "
            f"mask [batch, 1, {seq_len}, {seq_len}]."
        )
    padding = mask == 0
    if not (padding | (mask == 1)).all():
        raise ValueError(
            f"`attention_mask` holds values from {mask.min()} to {mask.max()}, but knows only 1 "
            "for tokens and 0 for padding. Packed documents are told by `document_ids`."
        )
    found: BoolArray = padding.cpu().numpy()
    return found if found.any() else None


def _read_documents(
    batch: Mapping[str, Any], batch_size: int, seq_len: int, padding: BoolArray | None
) -> IntArray | None:
    """Return the documents, from whichever of the three ways the batch tells them."""
    told = {
        "document_ids": _documents_from_ids(batch.get("document_ids"), batch_size, seq_len),
        "cu_seq_lens_q": _documents_from_lengths(batch, batch_size, seq_len),
    }
    elsewhere = any(x is not None for x in told.values())
    told["position_ids"] = _documents_from_jumps(
        batch.get("position_ids"),
        padding,
        told_elsewhere=elsewhere,
        has_mask=batch.get("attention_mask") is not None,
    )
    found = {name: _numbered(name, ids, padding) for name, ids in told.items() if ids is not None}
    if not found:
        return None
    (first, ids), *others = found.items()
    for name, other in others:
        differ = np.argwhere(ids != other)
        if len(differ):
            row, at = differ[0].tolist()
            raise ValueError(
                f"The batch tells its documents in two ways that disagree: `{first}` and `{name}` "
                f"differ in row {row} at position {at}. Drop one of them, or make them agree."
            )
    return ids if (ids != ids[:, :1]).any() or (ids == NO_DOCUMENT).any() else None


def _documents_from_ids(given: object, batch_size: int, seq_len: int) -> IntArray | None:
    if given is None:
        return None
    ids = torch.as_tensor(given)
    if ids.is_floating_point() or ids.dim() != 2 or ids.shape[0] not in (1, batch_size):
        raise ValueError(
            f"`document_ids` must be integers of shape [{batch_size}, {seq_len}], but are "
            f"{ids.dtype} of shape {tuple(ids.shape)}."
        )
    return ids.detach().cpu().numpy().astype(np.int64)


def _documents_from_lengths(
    batch: Mapping[str, Any], batch_size: int, seq_len: int
) -> IntArray | None:
    both = [batch[k] for k in ("cu_seq_lens_q", "cu_seq_lens_k") if batch.get(k) is not None]
    if not both:
        return None
    ends, *others = (torch.as_tensor(x).detach().cpu().numpy().astype(np.int64) for x in both)
    if others and not np.array_equal(ends, others[0]):
        raise ValueError(
            "`cu_seq_lens_q` and `cu_seq_lens_k` differ, but queries and keys are the same tokens."
        )
    if batch_size != 1:
        raise ValueError(
            f"`cu_seq_lens_q` describes one row, but the batch has {batch_size}. Use "
            f"`document_ids` of shape [{batch_size}, {seq_len}], or one row."
        )
    good = ends.ndim == 1 and ends.size and ends[0] == 0
    if not good or (np.diff(ends) < 0).any() or ends[-1] > seq_len:
        raise ValueError(
            f"`cu_seq_lens_q` must rise from 0 to at most the row's {seq_len} tokens, but is "
            f"{ends.tolist()[:8]}{'...' if ends.size > 8 else ''}."
        )
    ids = np.searchsorted(ends[1:], np.arange(seq_len), side="right")
    return np.where(np.arange(seq_len) < ends[-1], ids, NO_DOCUMENT)[None]


def _documents_from_jumps(
    given: object, padding: BoolArray | None, *, told_elsewhere: bool, has_mask: bool
) -> IntArray | None:
    """Start a document wherever position ids do not go on by one; None where they always do.

    A token is compared with the last one before it that is no padding: positions may go on over
    padding, or count it.
    """
    if not isinstance(given, Tensor):
        return None
    if given.dim() > 2 or given.is_floating_point():
        if not told_elsewhere and bool(((given[..., 1:] <= 0) & (given[..., :-1] > 0)).any()):
            raise ValueError(
                f"`position_ids` of shape {tuple(given.shape)} and dtype {given.dtype} start again "
                "at 0, as if the rows were packed, but documents can only be read from integers of "
                "shape [batch, tokens]. Say which tokens belong together with `document_ids`."
            )
        return None
    positions = given.detach().cpu().numpy().reshape(-1, given.shape[-1])
    if padding is not None:
        positions = np.broadcast_to(positions, padding.shape)
    real = np.ones(positions.shape, np.bool_) if padding is None else ~padding
    place = np.arange(positions.shape[1])
    before = np.maximum.accumulate(np.where(real, place, -1), 1)[:, :-1]
    step = positions[:, 1:] - np.take_along_axis(positions, np.maximum(before, 0), 1)
    starts = (step != 1) & (step != place[1:] - before) & real[:, 1:] & (before >= 0)
    if not starts.any():
        return None
    if has_mask and not told_elsewhere and (step[starts] > 0).any():
        row, at = np.argwhere(starts & (step > 0))[0].tolist()
        raise ValueError(
            f"`position_ids` jump ahead in row {row} at position {at + 1}: a new document, or one "
            "document whose positions have a hole? Beside an `attention_mask` models take it for "
            "the latter. Say which with `document_ids`."
        )
    return np.pad(np.cumsum(starts, 1), ((0, 0), (1, 0)))


def _numbered(name: str, ids: IntArray, padding: BoolArray | None) -> IntArray:
    """Number documents 0, 1, ... along each row, so that two ways of telling can be compared.

    Padding belongs to the document before it (at the row's start, to the one after it): whatever
    id it was given tells nothing, and a hole must not cut a document in two.
    """
    if padding is not None:
        ids = np.broadcast_to(ids, (max(len(ids), len(padding)), ids.shape[1]))
        place = np.arange(ids.shape[1])
        before = np.maximum.accumulate(np.where(padding, -1, place), 1)
        first = np.argmin(padding, 1)[:, None]
        ids = np.take_along_axis(ids, np.where(before < 0, first, before), 1)
    check_runs(name, ids)
    numbers = np.pad(np.cumsum(np.diff(ids, axis=1) != 0, 1), ((0, 0), (1, 0)))
    return np.where(ids == NO_DOCUMENT, NO_DOCUMENT, numbers)


def build_position_ids(whole: WholeBatch, device: torch.device) -> Tensor:
    """Return [B, S] position ids: the batch's own, else counted from each document's start."""
    given = whole.told.get("position_ids")
    if isinstance(given, Tensor):
        return given.expand(whole.batch_size, -1) if given.dim() <= 2 else given
    positions = count_positions(whole.documents, whole.seq_len)
    return torch.from_numpy(positions).to(device).expand(whole.batch_size, -1)


def count_positions(documents: IntArray | None, seq_len: int) -> IntArray:
    """Return [B or 1, S]: the place of each token in its document, or in the row.

    Example:
        >>> count_positions(np.array([[0, 0, 0, 1, 1]]), 5).tolist()
        [[0, 1, 2, 0, 1]]
    """
    positions: IntArray = np.arange(seq_len)[None]
    if documents is None:
        return positions
    change = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    return positions - np.maximum.accumulate(np.where(change, positions, 0), 1)


def shard_batch(whole: WholeBatch, *, layout: Layout, rank: int) -> dict[str, Any]:
    """Return the values by path, each cut to what ``rank`` holds."""
    return {
        path: shard(x, whole.dims[path], layout=layout, rank=rank, fill=_fill(whole, path))
        if path in whole.dims
        else x
        for path, x in whole.tensors.items()
    }


def _fill(whole: WholeBatch, path: str) -> int:
    return _FILL.get(whole.names[path] or "", 0)


def named_values(batch: Any, name: str) -> list[Any]:
    """Return all values of a batch that are known by a name.

    Example:
        >>> named_values({"text": {"labels": 1, "input_ids": torch.zeros(1, 2)}}, "labels")
        [1]
    """
    return [leaf.value for leaf in flatten(batch).values() if leaf.name == name]


def unpack_documents(batch: Any, whole: WholeBatch) -> Any:
    """Return the batch with every document as a row of its own, padded at its end.

    What a model computes then that knows nothing of documents is what it should compute for packed
    ones. Position ids stay if the batch has some.
    """
    if whole.documents is None:
        return batch
    places = [
        (row, int(start), int(stop))
        for row in range(whole.batch_size)
        for start, stop in _intervals(whole.documents[min(row, len(whole.documents) - 1)])
    ]
    longest = max(stop - start for _, start, stop in places)
    told = ("document_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    unpacked = {
        path: _unpacked(whole, x, whole.dims.get(path), _fill(whole, path), places, longest)
        for path, x in whole.tensors.items()
        if whole.names[path] not in told
    }
    added: dict[str, dict[str, Any]] = {}
    if whole.told.get("attention_mask") is None:
        leaves = flatten(batch)
        for path in whole.dims:
            if whole.names[path] in _TOKENS:
                some = whole.tensors[path]
                ones = some.new_ones(whole.batch_size, whole.seq_len, dtype=torch.int64)
                mask = _unpacked(whole, ones, 1, 0, places, longest)
                added[leaves[path].parent] = {"attention_mask": mask}
    return rebuild(batch, unpacked, added=added)


def _unpacked(
    whole: WholeBatch,
    x: Any,
    dim: int | None,
    fill: int,
    places: Sequence[tuple[int, int, int]],
    longest: int,
) -> Any:
    """Return one value of the batch with a row for each of ``places``."""
    if dim is None:
        has_rows = isinstance(x, Tensor) and x.dim() > 0 and len(x) == whole.batch_size
        return x[[row for row, _, _ in places]] if has_rows else x
    parts = []
    for row, start, stop in places:
        own = x[row : row + 1] if x.shape[0] == whole.batch_size else x[:1]
        part = own.narrow(dim, start, stop - start)
        shape = list(part.shape)
        shape[dim] = longest - (stop - start)
        parts.append(torch.cat([part, part.new_full((1,), fill).expand(shape)], dim))
    return torch.cat(parts)


def pad_samples(batch: Any) -> Any:
    """Return a batch in which every sample has some padding, if it says which tokens are padding.

    Each sample has a different number of tokens that are no padding. Labels of padding are ignored.

    Example:
        >>> pad_samples({"attention_mask": torch.ones(2, 8, dtype=torch.int64)})["attention_mask"]
        tensor([[1, 1, 1, 1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1, 1, 0, 0]])
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:  # or it lies inside a nested batch
        return batch
    num_samples, length = mask.shape
    place = torch.arange(length, device=mask.device)
    sizes = 1 + torch.arange(num_samples, device=mask.device) % max(1, length // 2)
    if bool((mask[:, 0] == 0).any()):  # this batch is padded at its start
        hidden = place < sizes[:, None]
    else:
        hidden = place >= length - sizes[:, None]
    padded = {**batch, "attention_mask": mask.masked_fill(hidden, 0)}
    for key in ("labels", "shift_labels"):
        labels = batch.get(key)
        if isinstance(labels, Tensor) and labels.shape == mask.shape:
            padded[key] = labels.masked_fill(hidden, IGNORED_LABEL)
    return padded


def _intervals(ids: IntArray) -> list[tuple[int, int]]:
    """Return where each document starts and stops; tokens of no document are left out."""
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    pairs = itertools.pairwise(edges)
    return [(start, stop) for start, stop in pairs if ids[start] != NO_DOCUMENT]
