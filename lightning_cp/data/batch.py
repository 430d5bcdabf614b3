# SPDX-License-Identifier: Apache-2.0
"""From a user's batch to its sequence dims, documents, padding and position ids; sharding it.

Reads documents and padding from any of the tensors that may describe them. `consistency.py` checks
that all ranks hold the same batch.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_cp.comm.transport import to_device
from lightning_cp.config import SequenceDims
from lightning_cp.data.media_names import MEDIA
from lightning_cp.data.shard import shard
from lightning_cp.geometry.branches import SHARED, Branches, read_branches
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import NO_DOCUMENT, check_runs
from lightning_cp.geometry.ranges import BoolArray, IntArray
from lightning_cp.private.modules import tensor_version
from lightning_cp.step.leaves import BatchLeaf, Flat, parts_of
from lightning_cp.step.step import IGNORED_LABEL, Opened, Yielded

SEQUENCE_DIMS: Final[Mapping[str, int | None]] = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "labels": 1,
    "shift_labels": 1,
    "position_ids": -1,
    "attention_mask": 1,
    "token_type_ids": 1,
    "document_ids": 1,
    "branch_ids": 1,
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
    **dict.fromkeys(MEDIA),
}
"""The sequence dims of the tensors of a Hugging Face batch; None: not sharded."""

_FILL: Final[Mapping[str, int]] = {
    "labels": IGNORED_LABEL,
    "shift_labels": IGNORED_LABEL,
    "document_ids": NO_DOCUMENT,
    "branch_ids": SHARED,
}


_TOKENS: Final = ("input_ids", "inputs_embeds")
"""The inputs of a model: tensors of the same container describe the same sequences."""


@dataclass(frozen=True, eq=False)
class FullBatch:
    """A batch before it is sharded.

    Args:
        flat: the user's batch; its values have their roles and sequence dims. None has a dim if the
            user keeps all tensors full.
        batch_size: the number of samples.
        seq_len: tokens per sequence; of the longest part if nothing is sharded.
        documents: [B, S] or [1, S], None where each sequence is one document.
        padding: [B, S], None where nothing is padding.
        metadata: the values that describe the sequences, by role: ``position_ids``,
            ``attention_mask``.
        branches: parts of documents that do not see each other; None where there are none.
    """

    flat: Flat
    batch_size: int
    seq_len: int
    documents: IntArray | None = None
    padding: BoolArray | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    branches: Branches | None = None

    @property
    def leaves(self) -> tuple[BatchLeaf, ...]:
        """Return the values."""
        return self.flat.leaves

    @property
    def dims(self) -> dict[str, int]:
        """Return the sequence dim of each path that is sharded."""
        return {leaf.path: leaf.dim for leaf in self.leaves if leaf.dim is not None}

    @property
    def is_unsharded(self) -> bool:
        """Return whether nothing is sharded, as the user requests for every tensor."""
        return all(leaf.dim is None for leaf in self.leaves)

    @property
    def shows_padding(self) -> bool:
        """Return whether shards may be padded: the role of a tensor tells the fill value."""
        return all(leaf.role is not None for leaf in self.leaves if leaf.dim is not None)


def unnamed_batch(flat: Flat, dims: Sequence[int], *, batch_size: int, seq_len: int) -> FullBatch:
    """Return tensors of full sequences without documents and padding, as a batch.

    Ranks hold different numbers of tokens where the length does not divide.
    """
    pairs = zip(flat.leaves, dims, strict=True)
    leaves = tuple(leaf._replace(role=None, dim=dim) for leaf, dim in pairs)
    return FullBatch(Flat(flat.batch, leaves), batch_size, seq_len)


class _Rule(NamedTuple):
    """The sequence dim of a value, None to keep it full, and whether the user has given it."""

    dim: int | None
    is_users: bool


class _Sequences(NamedTuple):
    """The sequences of a batch, and the path that shows their length."""

    anchor: str
    batch_size: int
    seq_len: int


def read_batch(
    flat: Flat,
    *,
    sequence_dims: SequenceDims,
    checked_paths: set[str] | None = None,
) -> FullBatch:
    """Find the sequence dims, documents and padding of a batch.

    Args:
        flat: the user's batch.
        sequence_dims: the user's sequence dims, by name or by path.
        checked_paths: paths of unknown names that a former batch has shown to hold no sequence:
            they are not checked again, whatever their length; new ones are added.
    """
    if not isinstance(flat.batch, Tensor) and parts_of(flat.batch) is None:
        raise TypeError(
            f"cp.step() got a {type(flat.batch).__name__}, but needs tensors in a dict, tuple, "
            "list or data class, such as a Hugging Face batch. Name the tensors: "
            '{"input_ids": ..., "labels": ...}.'
        )
    rules = {x.path: rule for x in flat.leaves if (rule := _rule(x, sequence_dims)) is not None}
    wide = [leaf for leaf in flat.tensors if leaf.value.dim() > 1]
    if wide and all(rules.get(leaf.path) == (None, True) for leaf in wide):
        return FullBatch(flat, 0, max(leaf.value.shape[1] for leaf in wide))
    located = _find_sequences(flat.leaves, rules, sequence_dims)
    checked_paths = set() if checked_paths is None else checked_paths
    leaves, is_named = [], located.anchor in rules
    for leaf in flat.leaves:
        # No name is known: values in a list have none.
        if leaf.is_listed and not is_named:
            leaf = leaf._replace(role=None)
        dim = _dim_of(leaf, rules.get(leaf.path), flat.leaves, located, checked_paths)
        leaves.append(leaf if dim is None else leaf._replace(dim=dim))
    _check_labels(leaves)
    describing = [x for x in leaves if not (x.above and rules.get(x.path) == (None, True))]
    metadata, documents, padding = _read_metadata(describing, located)
    ids = _read_ids("branch_ids", metadata.get("branch_ids"), located)
    branches = None if ids is None else read_branches(ids, documents, padding)
    return FullBatch(
        Flat(flat.batch, tuple(leaves)),
        located.batch_size,
        located.seq_len,
        documents,
        padding,
        metadata,
        branches,
    )


def _check_labels(leaves: Sequence[BatchLeaf]) -> None:
    for path, x in ((x.path, x.value) for x in leaves if x.dim is not None and _fill(x) < 0):
        if x.dtype == torch.uint8:
            raise ValueError(
                f"`{path}` has dtype torch.uint8, which cannot hold {IGNORED_LABEL}, the label of "
                f"tokens that a loss ignores. Give `{path}.long()`."
            )


def _rule(leaf: BatchLeaf, dims: SequenceDims) -> _Rule | None:
    """Return the rule for a value: the user's, or that of its name.

    Its path takes precedence over a container that is kept full, and that over its name.
    """
    if leaf.path in dims:
        return _Rule(dims[leaf.path], True)
    inner = leaf.names if leaf.is_listed else leaf.names[:-1]
    if any(above in dims and dims[above] is None for above in (*leaf.above, *inner)):
        return _Rule(None, True)
    if leaf.role is not None and leaf.role in dims:
        return _Rule(dims[leaf.role], True)
    if leaf.role is not None and leaf.role in SEQUENCE_DIMS:
        return _Rule(SEQUENCE_DIMS[leaf.role], False)
    return None


@lru_cache(maxsize=16)
def _priority(names: tuple[str, ...]) -> dict[str, int]:
    """Return the order in which tensors are asked for the sequence length, by name."""
    order = dict.fromkeys((*_TOKENS, *SEQUENCE_DIMS, *names))
    return {name: index for index, name in enumerate(order)}


def _find_sequences(
    leaves: Sequence[BatchLeaf], rules: Mapping[str, _Rule], sequence_dims: SequenceDims
) -> _Sequences:
    """Find the value that determines the sequence length."""
    priority = _priority(tuple(sequence_dims))
    known = [leaf for leaf in leaves if leaf.path in rules and isinstance(leaf.value, Tensor)]
    for leaf in sorted(known, key=lambda leaf: priority.get(str(leaf.role), len(priority))):
        dim, value = rules[leaf.path].dim, leaf.value
        if dim is None:
            continue
        if value.dim() < 2 and leaf.role in _TOKENS:
            raise ValueError(
                f"`{leaf.path}` has shape {tuple(value.shape)}, but needs a batch dim: give "
                "[batch, tokens], for one sample x.unsqueeze(0)."
            )
        if value.dim() > 1 and _has_dim(value, dim):
            return _sequences(leaf, dim)
    return _sequences(_unnamed_anchor(leaves, rules), 1)


def _sequences(anchor: BatchLeaf, dim: int) -> _Sequences:
    shape = tuple(anchor.value.shape)
    if shape[dim] < 1:
        raise ValueError(
            f"`{anchor.path}` has shape {shape}: sequences of length 0, nothing to attend to. "
            "Leave such batches out, in the data set or in the collate function."
        )
    return _Sequences(anchor.path, shape[0], shape[dim])


def _unnamed_anchor(leaves: Sequence[BatchLeaf], rules: Mapping[str, _Rule]) -> BatchLeaf:
    """Find the sequences in tensors that have an index and no name: [batch, tokens, ...]."""
    unnamed = [
        leaf
        for leaf in leaves
        if leaf.path not in rules and (leaf.is_listed or leaf.role is None)
        if isinstance(leaf.value, Tensor) and leaf.value.dim() > 1
    ]
    if not unnamed:
        raise ValueError(
            f"The batch has the keys {sorted(x.path for x in leaves)}, and none of them is known "
            "to hold a sequence in a tensor. Give its dim: sequence_dims={'my_tokens': 1}; convert "
            "arrays first: torch.as_tensor(x)."
        )
    # [batch, features] looks like [batch, tokens]: floating-point tensors are ambiguous.
    sure = [x for x in unnamed if x.value.dim() > 2 or not x.value.is_floating_point()]
    if not sure or len({x.value.shape[:2] for x in sure}) > 1:
        shapes = ", ".join(f"`{x.path}` {tuple(x.value.shape)}" for x in unnamed)
        entries = ", ".join(f"'{x.path}': 1" for x in unnamed)
        raise ValueError(
            f"The batch holds tensors without names, and their shapes do not show the sequence "
            f"dim: {shapes}. Give it for each: sequence_dims={{{entries}}}, the dim of the tokens, "
            "or None to keep one full; or give a dict."
        )
    return sure[0]


def _has_dim(x: Tensor, dim: int) -> bool:
    return -x.dim() <= dim < x.dim()


def _dim_of(
    leaf: BatchLeaf,
    rule: _Rule | None,
    leaves: Sequence[BatchLeaf],
    located: _Sequences,
    checked_paths: set[str],
) -> int | None:
    """Return the dim along which a value is sharded; None to keep it full."""
    path, value, seq_len = leaf.path, leaf.value, located.seq_len
    if value is None:
        return None
    if rule is None:
        if leaf.role is None and isinstance(value, Tensor):
            return 1 if _is_unnamed_sequence(path, value, located) else None
        if path not in checked_paths:
            _check_unknown(path, value, seq_len)
            checked_paths.add(path)
        return None
    dim = rule.dim
    if not rule.is_users and _is_ready_mask(leaf.role, value, seq_len):
        dim = -2  # queries are sharded, keys are not
    if dim is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(
            f"`{path}` holds a sequence and would be sharded along dim {dim}, but is a "
            f"{type(value).__name__}. Give a tensor, or keep it full: "
            f"sequence_dims={{'{path}': None}}."
        )
    shape = tuple(value.shape)
    if not _has_dim(value, dim):
        if rule.is_users:
            raise ValueError(f"sequence_dims={{'{path}': {dim}}}, but `{path}` has shape {shape}.")
        if leaf.is_listed:
            raise ValueError(
                f"`{path}` has shape {shape}: a list of samples cannot be sharded. Stack them, "
                f"[batch, tokens], or keep it full: sequence_dims={{'{path}': None}}."
            )
        return None  # labels of shape [batch] belong to samples, not to tokens
    if shape[dim] != seq_len:
        raise ValueError(
            f"The batch holds two sequence lengths: `{located.anchor}` has {seq_len} tokens, "
            f"`{path}` of shape {shape} has {shape[dim]}. {_fix(leaves, located.anchor, leaf)}"
        )
    return dim


def _is_unnamed_sequence(path: str, x: Tensor, located: _Sequences) -> bool:
    """Return whether a tensor without a name is [batch, tokens, ...]; raise if it may be either."""
    _, batch_size, seq_len = located
    if x.dim() < 2 and (x.dim() == 0 or x.shape[0] == batch_size or x.shape[0] != seq_len):
        return False
    if x.shape[:2] == (batch_size, seq_len) and seq_len not in x.shape[2:]:
        return True
    dim = x.shape.index(seq_len) if seq_len in x.shape else 1
    sharded = f"sequence_dims={{'{path}': {dim}}} to shard it, " if seq_len in x.shape else ""
    raise ValueError(
        f"The batch holds `{path}` of shape {tuple(x.shape)} without a name, and "
        f"[{batch_size}, {seq_len}] tokens. Say whether it is sharded: {sharded}"
        f"sequence_dims={{'{path}': None}} to keep it full."
    )


def _fix(leaves: Sequence[BatchLeaf], anchor: str, other: BatchLeaf) -> str:
    """Return how to fix two sequence lengths in one batch."""
    parent = next(leaf.parent for leaf in leaves if leaf.path == anchor)
    if parent == other.parent:
        return (
            "Open one `cp.step` for each sequence (encoder and decoder, pairs), or keep this one "
            f"full: sequence_dims={{'{other.path}': None}}."
        )
    return _separate_steps([parent, other.parent])


def _separate_steps(parents: Sequence[str]) -> str:
    """Return how to open a step for each part of a batch."""
    paths = [path for path in dict.fromkeys(parents) if path]
    if not paths:
        return "Make them agree."
    entries = ", ".join(f"'{path}': None" for path in paths)
    keys = (key if key.isdigit() else f"'{key}'" for key in paths[0].split("."))
    index = "".join(f"[{key}]" for key in keys)
    return (
        f"Keep them full, sequence_dims={{{entries}}}, and open a step for each: "
        f"`with cp.step(batch{index}) as part:`, with cp = self.trainer.strategy.context_parallel."
    )


def _is_ready_mask(name: str | None, value: object, seq_len: int) -> bool:
    """Return whether this is a mask [batch, 1, queries, keys]."""
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
        f"the sequence. Say whether it is sharded: sequence_dims={{'{path}': {dim}}} to shard it, "
        f"{{'{path}': None}} to keep it full."
    )


_METADATA: Final = (
    "attention_mask",
    "branch_ids",
    "document_ids",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
)
"""The names of values that describe documents, padding and positions."""


def _read_metadata(
    leaves: Sequence[BatchLeaf], located: _Sequences
) -> tuple[dict[str, Any], IntArray | None, BoolArray | None]:
    """Return the values that describe the sequences, by role, and their documents and padding.

    In a container with tokens they describe these tokens, and all such containers must agree. In
    other containers they describe all tokens.
    """
    groups: dict[str, dict[str, Any]] = {x.parent: {} for x in leaves if x.role in _TOKENS}
    common: dict[str, Any] = {}
    for leaf in leaves:
        if leaf.role in _TOKENS and leaf.dim is not None and len(leaf.value) != located.batch_size:
            raise ValueError(
                f"`{leaf.path}` of shape {tuple(leaf.value.shape)} has another batch size than the "
                f"batch, {located.batch_size}. {_separate_steps([x.parent for x in leaves])}"
            )
        if leaf.role in _METADATA:
            _add(groups.get(leaf.parent, common), leaf)
    views = {parent: {**common, **own} for parent, own in groups.items()} or {"": common}
    (first, metadata), *others = views.items()
    documents, padding = _read_structure(metadata, located)
    for parent, other in others:
        both = (_read_all(values, located) for values in (metadata, other))
        for what, one, another in zip(_STRUCTURE, *both, strict=True):
            if (one is None) != (another is None) or not np.array_equal(one, another):
                raise ValueError(
                    f"`{first}` and `{parent}` are in one batch, and have different {what}. "
                    f"{_separate_steps(list(views))}"
                )
        metadata = {**other, **metadata}
    return metadata, documents, padding


def _add(values: dict[str, Any], leaf: BatchLeaf) -> None:
    """Add a value to those of its container; those of one role must be equal."""
    known = values.setdefault(str(leaf.role), leaf.value)
    if known is None or known is leaf.value:
        values[str(leaf.role)] = leaf.value
        return
    one, other = torch.as_tensor(known), torch.as_tensor(leaf.value)
    if one.shape != other.shape or not bool((one == other).all()):
        raise ValueError(
            f"The batch holds several `{leaf.role}`, and `{leaf.path}` differs from another. "
            f"{_separate_steps([leaf.parent or leaf.path])}"
        )


_STRUCTURE: Final = ("documents", "padding", "position ids")


def _read_all(metadata: Mapping[str, Any], located: _Sequences) -> tuple[Any, ...]:
    documents, padding = _read_structure(metadata, located)
    return documents, padding, _positions(metadata, documents, located.seq_len)


def _read_structure(
    metadata: Mapping[str, Any], located: _Sequences
) -> tuple[IntArray | None, BoolArray | None]:
    padding = _read_padding(metadata, located.seq_len)
    return _read_documents(metadata, located, padding), padding


def _positions(metadata: Mapping[str, Any], documents: IntArray | None, seq_len: int) -> IntArray:
    position_ids = metadata.get("position_ids")
    positions: IntArray = count_positions(documents, seq_len)
    if isinstance(position_ids, Tensor):
        positions = position_ids.detach().cpu().numpy()
    return positions[:1] if (positions == positions[:1]).all() else positions


def _read_padding(metadata: Mapping[str, Any], seq_len: int) -> BoolArray | None:
    mask = metadata.get("attention_mask")
    if mask is None or _is_ready_mask("attention_mask", mask, seq_len):
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"`attention_mask` of shape {shape} cannot be sharded: give [batch, {seq_len}], 1 for "
            "tokens and 0 for padding, and describe the rest with Mask(...) in the model; or a "
            f"4-D mask [batch, 1, {seq_len}, {seq_len}]."
        )
    padding = mask == 0
    if not (padding | (mask == 1)).all():
        raise ValueError(
            f"`attention_mask` holds values from {mask.min()} to {mask.max()}, but may only hold 1 "
            "for tokens and 0 for padding. Describe packed documents with `document_ids`."
        )
    is_padding: BoolArray = padding.cpu().numpy()
    return is_padding if is_padding.any() else None


def _read_documents(
    metadata: Mapping[str, Any], located: _Sequences, padding: BoolArray | None
) -> IntArray | None:
    """Return the documents, from any of the three values that may describe them."""
    sources = {
        "document_ids": _read_ids("document_ids", metadata.get("document_ids"), located),
        "cu_seq_lens_q": _documents_from_lengths(metadata, located),
    }
    has_documents = any(x is not None for x in sources.values())
    # Positions of branches start again where the document does not.
    has_branches = metadata.get("branch_ids") is not None
    sources["position_ids"] = _documents_from_jumps(
        None if has_branches else metadata.get("position_ids"),
        padding,
        has_documents=has_documents,
        has_mask=metadata.get("attention_mask") is not None,
    )
    numbered = {
        name: _numbered(name, ids, padding) for name, ids in sources.items() if ids is not None
    }
    if not numbered:
        return None
    (first, ids), *others = numbered.items()
    for name, other in others:
        differing = np.argwhere(ids != other)
        if len(differing):
            sample, position = differing[0].tolist()
            raise ValueError(
                f"The batch describes its documents in two ways that disagree: `{first}` and "
                f"`{name}` differ in sample {sample} at position {position}. Drop one of them, or "
                "make them agree."
            )
    return ids if (ids != ids[:, :1]).any() or (ids == NO_DOCUMENT).any() else None


def _read_ids(name: str, value: object, located: _Sequences) -> IntArray | None:
    if value is None:
        return None
    ids, (_, batch_size, seq_len) = torch.as_tensor(value), located
    if ids.is_floating_point() or ids.dim() != 2 or ids.shape[0] not in (1, batch_size):
        raise ValueError(
            f"`{name}` must be integers of shape [{batch_size}, {seq_len}], but are "
            f"{ids.dtype} of shape {tuple(ids.shape)}."
        )
    return ids.detach().cpu().numpy().astype(np.int64)


def _documents_from_lengths(metadata: Mapping[str, Any], located: _Sequences) -> IntArray | None:
    _, batch_size, seq_len = located
    lengths = [metadata.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    lengths = [x for x in lengths if x is not None]
    if not lengths:
        return None
    ends, *others = (torch.as_tensor(x).detach().cpu().numpy().astype(np.int64) for x in lengths)
    if others and not np.array_equal(ends, others[0]):
        raise ValueError(
            "`cu_seq_lens_q` and `cu_seq_lens_k` differ, but queries and keys are the same tokens."
        )
    if batch_size != 1:
        raise ValueError(
            f"`cu_seq_lens_q` describes one sample, but the batch has {batch_size}. Use "
            f"`document_ids` of shape [{batch_size}, {seq_len}], or one sample."
        )
    starts_at_0 = ends.ndim == 1 and ends.size and ends[0] == 0
    if not starts_at_0 or (np.diff(ends) < 0).any() or ends[-1] > seq_len:
        raise ValueError(
            f"`cu_seq_lens_q` must increase from 0 to at most the sequence length {seq_len}, but "
            f"is {ends.tolist()[:8]}{'...' if ends.size > 8 else ''}."
        )
    ids = np.searchsorted(ends[1:], np.arange(seq_len), side="right")
    return np.where(np.arange(seq_len) < ends[-1], ids, NO_DOCUMENT)[None]


def _documents_from_jumps(
    position_ids: object, padding: BoolArray | None, *, has_documents: bool, has_mask: bool
) -> IntArray | None:
    """Start a document wherever position ids do not increase by one; None where they always do.

    A token is compared with the last one before it that is not padding: positions may skip padding,
    or count it.
    """
    if not isinstance(position_ids, Tensor):
        return None
    if position_ids.dim() > 2 or position_ids.is_floating_point():
        restarts = (position_ids[..., 1:] <= 0) & (position_ids[..., :-1] > 0)
        if not has_documents and bool(restarts.any()):
            raise ValueError(
                f"`position_ids` of shape {tuple(position_ids.shape)} and dtype "
                f"{position_ids.dtype} start again at 0, as in packed sequences, but documents can "
                "only be read from integers of shape [batch, tokens]. Describe documents with "
                "`document_ids`."
            )
        return None
    positions = position_ids.detach().cpu().numpy().reshape(-1, position_ids.shape[-1])
    if padding is not None:
        positions = np.broadcast_to(positions, padding.shape)
    real = np.ones(positions.shape, np.bool_) if padding is None else ~padding
    index = np.arange(positions.shape[1])
    before = np.maximum.accumulate(np.where(real, index, -1), 1)[:, :-1]
    step = positions[:, 1:] - np.take_along_axis(positions, np.maximum(before, 0), 1)
    starts = (step != 1) & (step != index[1:] - before) & real[:, 1:] & (before >= 0)
    if not starts.any():
        return None
    if has_mask and not has_documents and (step[starts] > 0).any():
        sample, at = np.argwhere(starts & (step > 0))[0].tolist()
        raise ValueError(
            f"`position_ids` jump ahead in sample {sample} at position {at + 1}: a new document, "
            "or one document whose positions have a gap? Given an `attention_mask`, models assume "
            "the latter. Specify it with `document_ids`."
        )
    return np.pad(np.cumsum(starts, 1), ((0, 0), (1, 0)))


def _numbered(name: str, ids: IntArray, padding: BoolArray | None) -> IntArray:
    """Number documents 0, 1, ... along each sequence, so that two descriptions can be compared.

    Padding belongs to the document before it (at the start of the sequence, to the one after it):
    its ids are ignored, and padding inside a document does not split it.
    """
    if padding is not None:
        ids = np.broadcast_to(ids, (max(len(ids), len(padding)), ids.shape[1]))
        before = np.maximum.accumulate(np.where(padding, -1, np.arange(ids.shape[1])), 1)
        first = np.argmin(padding, 1)[:, None]
        ids = np.take_along_axis(ids, np.where(before < 0, first, before), 1)
    check_runs(name, ids)
    numbers = np.pad(np.cumsum(np.diff(ids, axis=1) != 0, 1), ((0, 0), (1, 0)))
    return np.where(ids == NO_DOCUMENT, NO_DOCUMENT, numbers)


def build_position_ids(full: FullBatch, device: torch.device) -> Tensor:
    """Return [B, S] position ids: those of the batch, else counted from each document's start."""
    ids = full.metadata.get("position_ids")
    if isinstance(ids, Tensor):
        return ids.expand(full.batch_size, -1) if ids.dim() <= 2 else ids
    if full.documents is None and full.branches is None:
        return torch.arange(full.seq_len, device=device).expand(full.batch_size, -1)
    positions = count_positions(full.documents, full.seq_len)
    if full.branches is not None:
        positions = positions - full.branches.offsets
    return to_device(torch.from_numpy(positions), device).expand(full.batch_size, -1)


def count_positions(documents: IntArray | None, seq_len: int) -> IntArray:
    """Return [B or 1, S]: the index of each token in its document, or in the sequence.

    Example:
        >>> count_positions(np.array([[0, 0, 0, 1, 1]]), 5).tolist()
        [[0, 1, 2, 0, 1]]
    """
    positions: IntArray = np.arange(seq_len)[None]
    if documents is None:
        return positions
    change = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    return positions - np.maximum.accumulate(np.where(change, positions, 0), 1)


def shard_leaf(leaf: BatchLeaf, *, layout: Layout, rank: int) -> Yielded:
    """Return a value as a step yields it: this rank's shard, if it has a sequence dim."""
    if leaf.dim is None:
        return Yielded(leaf, leaf.value)
    local = shard(leaf.value, leaf.dim, layout=layout, rank=rank, fill=_fill(leaf))
    return Yielded(leaf, local, tensor_version(local))


def _fill(leaf: BatchLeaf) -> int:
    return _FILL.get(leaf.role or "", 0)


def describe_filled(opened: Opened) -> str:
    """Return a hint on integers of unknown names that sharding has padded with 0; else nothing.

    Labels among them are not ignored there by a loss that does not ask for padding.
    """
    for step in opened.steps:
        layout = step.layout
        names = [
            leaf.role
            for leaf, x, _ in step.yielded
            if leaf.role not in SEQUENCE_DIMS and leaf.dim is not None and _holds_integers(x)
        ]
        if names and layout.shows_padding and layout.padded_len > layout.seq_len:
            return (
                f"Sequences of {layout.seq_len} tokens are padded to {layout.padded_len}, so that "
                f"{layout.cp_size} ranks share them evenly, and `{names[0]}` is padded with 0: its "
                "name does not say what a loss ignores. Call it `labels`, which is padded with "
                "-100; or leave out tokens where cp.token_mask() is false; or pad sequences to a "
                f"multiple of {2 * layout.cp_size} tokens yourself. "
            )
    return ""


def _holds_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def unpack_documents(full: FullBatch) -> Any:
    """Return the batch with every document as a sample of its own, padded at its end.

    A model that ignores documents then computes what it should compute for packed ones. Position
    ids are kept if the batch has some.
    """
    if full.documents is None:
        return full.flat.batch
    intervals = [
        (sample, int(start), int(stop))
        for sample in range(full.batch_size)
        for start, stop in _intervals(full.documents[min(sample, len(full.documents) - 1)])
    ]
    # Items of media follow each other in the order of the documents.
    unpacked = {
        x.path: x.value if x.role in MEDIA else _unpacked(x, full.batch_size, intervals)
        for x in full.leaves
        if x.role not in _PACKING
    }
    added: dict[str, dict[str, Any]] = {}
    if full.metadata.get("attention_mask") is None:
        for leaf in full.leaves:
            if leaf.dim is not None and leaf.role in _TOKENS:
                ones = leaf.value.new_ones(full.batch_size, full.seq_len, dtype=torch.int64)
                mask = _unpacked(BatchLeaf("", ones, dim=1), full.batch_size, intervals)
                added[leaf.parent] = {"attention_mask": mask}
    return full.flat.rebuild(unpacked, added=added)


_LENGTHS: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_PACKING: Final = ("document_ids", *_LENGTHS)


def _unpacked(leaf: BatchLeaf, batch_size: int, intervals: Sequence[tuple[int, int, int]]) -> Any:
    """Return one value of the batch with a sample for each of ``intervals``."""
    x, dim = leaf.value, leaf.dim
    if dim is None:
        has_samples = isinstance(x, Tensor) and x.dim() > 0 and len(x) == batch_size
        return x[[sample for sample, _, _ in intervals]] if has_samples else x
    longest, parts = max(stop - start for _, start, stop in intervals), []
    for sample, start, stop in intervals:
        source = x[sample : sample + 1] if x.shape[0] == batch_size else x[:1]
        part = source.narrow(dim, start, stop - start)
        shape = list(part.shape)
        shape[dim] = longest - (stop - start)
        parts.append(torch.cat([part, part.new_full((1,), _fill(leaf)).expand(shape)], dim))
    return torch.cat(parts)


def pad_samples(batch: Any) -> Any:
    """Return a batch in which every sample has some padding, if it has an attention mask.

    Samples have different numbers of tokens that are not padding. Labels of padding are ignored.

    Example:
        >>> pad_samples({"attention_mask": torch.ones(2, 8, dtype=torch.int64)})["attention_mask"]
        tensor([[1, 1, 1, 1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1, 1, 0, 0]])
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:  # or it is inside a nested batch
        return batch
    num_samples, length = mask.shape
    position = torch.arange(length, device=mask.device)
    sizes = 1 + torch.arange(num_samples, device=mask.device) % max(1, length // 2)
    if bool((mask[:, 0] == 0).any()):  # this batch is padded at its start
        padding = position < sizes[:, None]
    else:
        padding = position >= length - sizes[:, None]
    padded = {**batch, "attention_mask": mask.masked_fill(padding, 0)}
    for key in ("labels", "shift_labels"):
        labels = batch.get(key)
        if isinstance(labels, Tensor) and labels.shape == mask.shape:
            padded[key] = labels.masked_fill(padding, IGNORED_LABEL)
    return padded


def truncate(full: FullBatch, max_len: int) -> Any:
    """Return the batch with ``max_len`` tokens per sequence, around the first that has a label."""
    has_lengths = any(full.metadata.get(role) is not None for role in _LENGTHS[:2])
    dropped = {x.path: x for x in full.leaves if has_lengths and x.role in _LENGTHS}
    if any(leaf.parent or leaf.is_listed for leaf in dropped.values()):
        raise ValueError(
            f"Sequences of {full.seq_len} tokens cannot be truncated to max_len={max_len}: "
            "`cu_seq_lens_q` is inside a nested batch. Use `document_ids`, or a larger max_len."
        )
    labels = [x.value for x in full.leaves if x.role == "labels" and x.dim is not None]
    labelled = (labels[0] != IGNORED_LABEL).any(0).nonzero().flatten().tolist() if labels else []
    first = labelled[0] if labelled else 0
    start = min(max(0, first - max_len // 2), full.seq_len - max_len)
    values = {
        x.path: x.value if x.dim is None else x.value.narrow(x.dim, start, max_len)
        for x in full.leaves
        if x.path not in dropped
    }
    if not dropped or full.documents is None:
        return full.flat.rebuild(values)
    documents = torch.from_numpy(full.documents).narrow(1, start, max_len)
    return full.flat.rebuild(values, added={"": {"document_ids": documents}})


def _intervals(ids: IntArray) -> list[tuple[int, int]]:
    """Return the start and stop of each document; tokens of no document are left out."""
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    pairs = itertools.pairwise(edges)
    return [(start, stop) for start, stop in pairs if ids[start] != NO_DOCUMENT]
