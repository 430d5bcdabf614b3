# SPDX-License-Identifier: Apache-2.0
"""One batch -> what this rank holds of it, and what the step must know about the whole.

Reads documents and padding in whatever way the batch tells them, decides which tensors are cut, and
makes sure that all ranks of a group hold the same batch. Refusals are raised by all ranks together.
"""

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_cp.collectives import Transport
from lightning_cp.context import IGNORED_LABEL, Targets
from lightning_cp.layout import Layout
from lightning_cp.mask import NO_DOCUMENT, BoolArray, IntArray, check_runs
from lightning_cp.sequence import shard, shift_labels

SEQUENCE_DIMS: Final[Mapping[str, int | None]] = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "labels": 1,
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

_FILL: Final[Mapping[str, int]] = {"labels": IGNORED_LABEL, "document_ids": NO_DOCUMENT}


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
    padding = _read_padding(batch, seq_len)
    return WholeBatch(
        tensors=batch,
        dims=dims,
        batch_size=batch[anchor].shape[0],
        seq_len=seq_len,
        documents=_read_documents(batch, seq_len, padding),
        padding=padding,
    )


def _sequence(batch: Mapping[str, Any], known: Mapping[str, int | None]) -> tuple[str, int]:
    """Return the key that says how long rows are, and how long."""
    for key in dict.fromkeys(("input_ids", "inputs_embeds", *known)):
        dim, value = known.get(key), batch.get(key)
        if (
            isinstance(value, Tensor)
            and dim is not None
            and _has_dim(value, dim)
            and value.dim() > 1
        ):
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
        if key not in known and key not in decided:
            for name, x in _tensors(key, value):
                _check_unknown(name, x, seq_len)
            decided[key] = None
        dim = known.get(key)
        if dim is None or not isinstance(value, Tensor):
            continue
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


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors inside a value of the batch, with a name for each."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(f"{name}[{index}]", inner)


def _check_unknown(name: str, x: Tensor, seq_len: int) -> None:
    if seq_len in x.shape:
        dim = x.shape.index(seq_len)
        raise ValueError(
            f"The batch holds `{name}` of shape {tuple(x.shape)}, whose dim {dim} is as long as "
            f"the sequence. Say whether it is sharded: sequence_dims={{'{name}': {dim}}} to cut "
            f"it, {{'{name}': None}} to keep it whole."
        )


def _read_padding(batch: Mapping[str, Any], seq_len: int) -> BoolArray | None:
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"`attention_mask` of shape {shape} cannot be cut: give [batch, {seq_len}], 1 for "
            "tokens and 0 for padding, and say the rest with Mask(...) in the model."
        )
    values = mask.detach().cpu().numpy()
    if not np.isin(values, (0, 1)).all():
        raise ValueError(
            f"`attention_mask` holds values from {values.min()} to {values.max()}, but knows only "
            "1 for tokens and 0 for padding. Packed documents are told by `document_ids`."
        )
    padding: BoolArray = values == 0
    return padding if padding.any() else None


def _read_documents(
    batch: Mapping[str, Any], seq_len: int, padding: BoolArray | None
) -> IntArray | None:
    """Return the documents, from whichever of the three ways the batch tells them."""
    told = {
        "document_ids": _documents_from_ids(batch.get("document_ids"), seq_len),
        "cu_seq_lens_q": _documents_from_lengths(batch, seq_len),
        "position_ids": _documents_from_jumps(batch.get("position_ids"), padding),
    }
    found = {name: _numbered(ids, padding) for name, ids in told.items() if ids is not None}
    if not found:
        return None
    (first, ids), *others = found.items()
    for name, other in others:
        row, at = _first_difference(ids, other)
        if at is not None:
            raise ValueError(
                f"The batch tells its documents in two ways that disagree: `{first}` and `{name}` "
                f"differ in row {row} at position {at}. Drop one of them, or make them agree."
            )
    return ids if (ids != ids[:, :1]).any() or (ids == NO_DOCUMENT).any() else None


def _documents_from_ids(ids: Tensor | None, seq_len: int) -> IntArray | None:
    if ids is None:
        return None
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(
            f"`document_ids` must be integers of shape [batch, {seq_len}], but are {ids.dtype} of "
            f"shape {tuple(ids.shape)}."
        )
    values: IntArray = ids.detach().cpu().numpy().astype(np.int64)
    check_runs("document_ids", values)
    return values


def _documents_from_lengths(batch: Mapping[str, Any], seq_len: int) -> IntArray | None:
    given = batch.get("cu_seq_lens_q")
    if given is None:
        return None
    ends = torch.as_tensor(given).detach().cpu().numpy().astype(np.int64)
    rows = next((batch[key].shape[0] for key in ("input_ids", "inputs_embeds") if key in batch), 1)
    if rows != 1:
        raise ValueError(
            f"`cu_seq_lens_q` describes one row, but the batch has {rows}. Use `document_ids` of "
            f"shape [{rows}, {seq_len}], or one row."
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
    position_ids: Tensor | None, padding: BoolArray | None
) -> IntArray | None:
    """Start a document wherever position ids do not go on by one; None where they always do."""
    if position_ids is None or position_ids.dim() != 2 or position_ids.is_floating_point():
        return None
    positions = position_ids.detach().cpu().numpy()
    jumps = np.diff(positions, axis=1) != 1
    if padding is not None:
        jumps = jumps & ~padding[:, 1:] & ~padding[:, :-1]
    if not jumps.any():
        return None
    return np.pad(np.cumsum(jumps, 1), ((0, 0), (1, 0)))


def _numbered(ids: IntArray, padding: BoolArray | None) -> IntArray:
    """Number documents 0, 1, ... along each row, so that two ways of telling can be compared."""
    if padding is not None:
        ids = np.where(padding, NO_DOCUMENT, ids)
    change = np.diff(ids, axis=1) != 0
    numbers = np.pad(np.cumsum(change, 1), ((0, 0), (1, 0)))
    return np.where(ids == NO_DOCUMENT, NO_DOCUMENT, numbers)


def _first_difference(ids: IntArray, other: IntArray) -> tuple[int, int | None]:
    differ = np.argwhere(ids != other)
    return (int(differ[0][0]), int(differ[0][1])) if len(differ) else (0, None)


def build_position_ids(whole: WholeBatch, device: torch.device) -> Tensor:
    """Return [B, S] position ids: the batch's own, else counted from each document's start."""
    given = whole.tensors.get("position_ids")
    if isinstance(given, Tensor):
        return given
    positions = np.arange(whole.seq_len)[None]
    if whole.documents is not None:
        change = np.diff(whole.documents, axis=1, prepend=whole.documents[:, :1]) != 0
        positions = positions - np.maximum.accumulate(np.where(change, positions, 0), 1)
    return torch.from_numpy(positions).to(device).expand(whole.batch_size, -1)


def build_targets(
    whole: WholeBatch, local: Mapping[str, Any], layout: Layout, rank: int
) -> Targets | None:
    """Shift the labels on whole rows and count the valid ones; None without token labels."""
    if "labels" not in whole.dims:
        return None
    labels: Tensor = whole.tensors["labels"]
    ids = None if whole.documents is None else torch.from_numpy(whole.documents).to(labels.device)
    shifted = shift_labels(labels, ids)
    mine: Tensor = local["labels"]
    return Targets(
        labels=mine,
        version=mine._version,
        shifted=shard(shifted, 1, layout=layout, rank=rank, fill=IGNORED_LABEL),
        num_shifted=(shifted != IGNORED_LABEL).sum(),
        num_plain=(labels != IGNORED_LABEL).sum(),
    )


def shard_batch(whole: WholeBatch, *, layout: Layout, rank: int) -> dict[str, Any]:
    """Return the user's keys, each cut to what ``rank`` holds."""
    return {
        key: shard(value, whole.dims[key], layout=layout, rank=rank, fill=_FILL.get(key, 0))
        if key in whole.dims
        else value
        for key, value in whole.tensors.items()
    }


_MESSAGE_BYTES = 2048
_SAMPLED = 1 << 20


def agree(
    batch: Mapping[str, Any], problem: Exception | None, context: Transport, *, values: bool
) -> Exception | None:
    """Return what all ranks of the group must raise: one refuses its batch, or they differ.

    Args:
        batch: this rank's batch.
        problem: why this rank refuses it, if it does.
        context: the ranks that must hold the same batch.
        values: compare the contents too, not only names, shapes and dtypes.
    """
    shapes = 0 if problem else _digest(_describe(batch))
    contents = _checksum(batch) if values and not problem else 0
    mine = torch.tensor([int(problem is not None), shapes, contents], device=context.device)
    states = mine.new_empty(context.size, 3)
    context.all_gather(states, mine)()
    table = states.tolist()
    refused = next((rank for rank, state in enumerate(table) if state[0]), None)
    if refused is not None:
        text = _share_text(str(problem or ""), context, refused)
        return problem or ValueError(
            f"Rank {refused} of the context-parallel group refused its batch: {text}"
        )
    odd = next((rank for rank, state in enumerate(table) if state != table[0]), None)
    if odd is None:
        return None
    what = "shapes" if table[odd][1] != table[0][1] else "values"
    return ValueError(
        f"All ranks of a context-parallel group must hold the same batch, but rank {odd} and rank "
        f"0 differ in their {what}; this is rank {context.rank}, with {_describe(batch)}. Usual "
        "causes: a sampler or an iterable data set that is split by the global rank instead of the "
        "data-parallel rank, shuffling or augmentation without a common seed, worker seeds that "
        "follow the global rank."
    )


def sum_counts(
    targets: Targets | None, problem: Exception | None, data: Transport
) -> tuple[Targets | None, Exception | None]:
    """Sum the token counts over the data axis.

    Groups there hold other rows, and one may have refused its batch: then all must stop, for the
    others would wait for it. Returns the targets with their new counts, and what to raise.
    """
    counts = torch.zeros(3, dtype=torch.int64, device=data.device)
    if targets is not None:
        counts[0], counts[1] = targets.num_shifted, targets.num_plain
    counts[2] = int(problem is not None)
    data.all_reduce(counts)
    if problem is None and int(counts[2]):
        problem = ValueError(
            "Another context-parallel group of this job (other rows of the data axis) refused its "
            "batch; its ranks say why."
        )
    if targets is not None:
        num_shifted, num_plain, _ = counts.to(targets.labels.device).unbind()
        targets = replace(targets, num_shifted=num_shifted, num_plain=num_plain)
    return targets, problem


def _describe(batch: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        for key in sorted(batch)
        for name, x in _tensors(key, batch[key])
    )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _checksum(batch: Mapping[str, Any]) -> int:
    """Return an integer that tells contents apart: exact sums over bits, position by position."""
    total = 0
    for key in sorted(batch):
        for _, x in _tensors(key, batch[key]):
            flat = x.detach().reshape(-1)
            flat = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
            bits = flat.view(torch.uint8).to(torch.int64)
            weights = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
            total = (total * 31 + int((bits * weights).sum())) % (1 << 56)
    return total


def _share_text(text: str, context: Transport, source: int) -> str:
    """Return the text of the rank ``source`` on every rank."""
    data = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    mine = torch.tensor(list(data), dtype=torch.uint8, device=context.device)
    all_ = mine.new_empty(context.size, _MESSAGE_BYTES)
    context.all_gather(all_, mine)()
    return bytes(all_[source].tolist()).rstrip(b"\0").decode(errors="replace")
