# SPDX-License-Identifier: Apache-2.0
"""One batch -> what this rank holds of it, and what the step must know about the whole.

Reads documents and padding in whatever way the batch tells them, and decides which tensors are cut.
That all ranks hold the same batch is `agreement.py`'s business.
"""

import itertools
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_cp.agreement import named_tensors
from lightning_cp.context import IGNORED_LABEL
from lightning_cp.layout import Layout
from lightning_cp.mask import NO_DOCUMENT, BoolArray, IntArray, check_runs
from lightning_cp.sequence import shard

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


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """What is known of a batch before it is cut.

    Args:
        tensors: the user's keys and values.
        dims: for each key that is cut, along which dim.
        batch_size: number of rows.
        seq_len: tokens per row.
        documents: [B, S] or [1, S], None where each row is one document.
        padding: [B, S], None where nothing is padding.
    """

    tensors: Mapping[str, Any]
    dims: Mapping[str, int]
    batch_size: int
    seq_len: int
    documents: IntArray | None
    padding: BoolArray | None


def read_batch(
    batch: Mapping[str, Any],
    *,
    sequence_dims: Mapping[str, int | None],
    decided: MutableMapping[str, int | None],
) -> WholeBatch:
    """Read what a batch says about its rows.

    Args:
        batch: the user's batch.
        sequence_dims: the user's word on where the sequence lies.
        decided: keys that nobody named, and what the first batch showed of them; added to.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"cp.step() needs a dict of tensors, such as a Hugging Face batch; it got a "
            f"{type(batch).__name__}. Name the tensors: "
            '{"input_ids": ..., "labels": ...}.'
        )
    known = {**SEQUENCE_DIMS, **sequence_dims}
    anchor, seq_len = _sequence(batch, known)
    if seq_len < 1:
        raise ValueError(
            f"`{anchor}` has shape {tuple(batch[anchor].shape)}: rows of length 0, nothing to "
            "attend to. Leave such batches out, in the data set or in the collate function."
        )
    dims = _dims(batch, known, sequence_dims, decided, anchor, seq_len)
    batch_size = batch[anchor].shape[0]
    padding = _read_padding(batch, seq_len)
    documents = _read_documents(batch, batch_size, seq_len, padding)
    return WholeBatch(batch, dims, batch_size, seq_len, documents, padding)


def _sequence(batch: Mapping[str, Any], known: Mapping[str, int | None]) -> tuple[str, int]:
    """Return the key that says how long rows are, and how long."""
    for key in dict.fromkeys(("input_ids", "inputs_embeds", *known)):
        dim, value = known.get(key), batch.get(key)
        if not isinstance(value, Tensor) or dim is None:
            continue
        if value.dim() < 2 and key in ("input_ids", "inputs_embeds"):
            raise ValueError(
                f"`{key}` has shape {tuple(value.shape)}, but rows lie in a batch: give "
                "[batch, tokens], for one row x.unsqueeze(0)."
            )
        if value.dim() > 1 and _has_dim(value, dim):
            return key, value.shape[dim]
    raise ValueError(
        f"The batch has the keys {sorted(batch)}, and none of them is known to hold a sequence. "
        "Say where it lies: sequence_dims={'my_tokens': 1}."
    )


def _has_dim(x: Tensor, dim: int) -> bool:
    return -x.dim() <= dim < x.dim()


def _dims(
    batch: Mapping[str, Any],
    known: Mapping[str, int | None],
    named: Mapping[str, int | None],
    decided: MutableMapping[str, int | None],
    anchor: str,
    seq_len: int,
) -> dict[str, int]:
    """Return the dim along which each key is cut; keys that are kept whole are left out."""
    dims = {}
    for key, value in batch.items():
        if key not in known and key not in decided and value is not None:
            _check_unknown(key, value, seq_len)
            decided[key] = None
        dim = known.get(key)
        if key not in named and _is_ready_mask(key, value, seq_len):
            dim = -2  # queries are cut, keys are not
        if dim is None or value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"`{key}` holds a sequence and would be cut along dim {dim}, but is a "
                f"{type(value).__name__}. Give a tensor, or keep it whole: "
                f"sequence_dims={{'{key}': None}}."
            )
        if not _has_dim(value, dim):
            if key in named:
                raise ValueError(
                    f"sequence_dims={{'{key}': {dim}}}, but `{key}` has shape {tuple(value.shape)}."
                )
            continue  # labels of shape [batch] belong to rows, not to tokens
        if value.shape[dim] != seq_len:
            raise ValueError(
                f"The batch holds two sequence lengths: `{anchor}` has {seq_len} tokens, `{key}` "
                f"of shape {tuple(value.shape)} has {value.shape[dim]}. Open one `cp.step` for "
                f"each sequence (encoder and decoder, pairs), or keep this one whole: "
                f"sequence_dims={{'{key}': None}}."
            )
        dims[key] = dim
    return dims


def _is_ready_mask(key: str, value: object, seq_len: int) -> bool:
    """Say whether this is a mask of queries x keys, which tells all that a model needs."""
    return (
        key == "attention_mask"
        and isinstance(value, Tensor)
        and value.dim() == 4
        and value.shape[-2:] == (seq_len, seq_len)
    )


def _check_unknown(key: str, value: object, seq_len: int) -> None:
    for name, x in named_tensors(key, value):
        if seq_len not in x.shape:
            continue
        dim = x.shape.index(seq_len)
        cure = (
            f"Say whether it is sharded: sequence_dims={{'{key}': {dim}}} to cut it, "
            f"{{'{key}': None}} to keep it whole."
            if x is value
            else f"Only tensors at the top of the batch are cut: move it there, or keep all of "
            f"`{key}` whole: sequence_dims={{'{key}': None}}."
        )
        raise ValueError(
            f"The batch holds `{name}` of shape {tuple(x.shape)}, whose dim {dim} is as long as "
            f"the sequence. {cure}"
        )


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
    given = whole.tensors.get("position_ids")
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
    """Return the user's keys, each cut to what ``rank`` holds."""
    return {
        key: shard(value, whole.dims[key], layout=layout, rank=rank, fill=_FILL.get(key, 0))
        if key in whole.dims
        else value
        for key, value in whole.tensors.items()
    }


def unpack_documents(batch: Mapping[str, Any], whole: WholeBatch) -> dict[str, Any]:
    """Return the batch with every document as a row of its own, padded at its end.

    What a model computes then that knows nothing of documents is what it should compute for packed
    ones. Position ids stay if the batch has some.
    """
    if whole.documents is None:
        return dict(batch)
    places = [
        (row, int(start), int(stop))
        for row in range(whole.batch_size)
        for start, stop in _intervals(whole.documents[min(row, len(whole.documents) - 1)])
    ]
    longest = max(stop - start for _, start, stop in places)
    dims = dict(whole.dims)
    told = ("document_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    tensors = {key: value for key, value in batch.items() if key not in told}
    if tensors.get("attention_mask") is None:
        some = batch[next(iter(dims))]
        ones = torch.ones(whole.batch_size, whole.seq_len, dtype=torch.int64, device=some.device)
        tensors["attention_mask"], dims["attention_mask"] = ones, 1
    unpacked = {}
    for key, value in tensors.items():
        if key in dims:
            parts = []
            for row, start, stop in places:
                own = value[row : row + 1] if value.shape[0] == whole.batch_size else value[:1]
                part = own.narrow(dims[key], start, stop - start)
                fill = part.new_full((1,), _FILL.get(key, 0))
                shape = list(part.shape)
                shape[dims[key]] = longest - (stop - start)
                parts.append(torch.cat([part, fill.expand(shape)], dims[key]))
            unpacked[key] = torch.cat(parts)
        elif isinstance(value, Tensor) and value.dim() > 0 and len(value) == whole.batch_size:
            unpacked[key] = value[[row for row, _, _ in places]]
        else:
            unpacked[key] = value
    return unpacked


def pad_samples(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch in which every sample has some padding, if it says which tokens are padding.

    Each sample has a different number of tokens that are no padding. Labels of padding are ignored.

    Example:
        >>> pad_samples({"attention_mask": torch.ones(2, 8, dtype=torch.int64)})["attention_mask"]
        tensor([[1, 1, 1, 1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1, 1, 0, 0]])
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return dict(batch)
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
