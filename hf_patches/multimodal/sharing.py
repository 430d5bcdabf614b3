# SPDX-License-Identifier: Apache-2.0
"""Images, frames and audio clips are shared among the ranks that share a sequence.

Each rank runs a tower on some items, a contiguous range of about equal cost, and features are
exchanged (`features`): all of them, or those of this rank's tokens where the model merges its shard
only. In backward a rank gets the gradients of its own items from all ranks.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from hf_patches.multimodal.features import UsedOutput, agree_on_counts, exchange_rows
from hf_patches.multimodal.outer import merged_ids, on_full_sequences
from hf_patches.multimodal.seam import rows_of
from hf_patches.multimodal.table import Unit
from lightning_cp.comm.collective_errors import raise_on_all
from lightning_cp.data.batch import SEQUENCE_DIMS
from lightning_cp.geometry.ranges import IntArray, Range
from lightning_cp.step.step import Step

_logger = logging.getLogger(__name__)

METHODS: Final = ("get_image_features", "get_video_features", "get_audio_features")

_OF_SAMPLES: Final = ("batch_num_images",)
_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class _Items:
    """Media of a call, cut into units.

    Args:
        costs: patches or values of each unit.
        owners: the item that each unit belongs to, increasing.
        select: returns the arguments for a range of units: units of one item as one item.
    """

    costs: IntArray
    owners: IntArray
    select: Callable[[Range], dict[str, Any]]

    def owners_of(self, units: Range) -> IntArray:
        """Return the items that a range of units belongs to."""
        return np.unique(self.owners[units.start : units.stop])

    def split(
        self, rows: Tensor, counts: Sequence[IntArray], ranges: Sequence[Range]
    ) -> tuple[Tensor, ...]:
        """Return the rows of each item, given how many each rank has of its items."""
        sizes = np.zeros(self.owners[-1] + 1, np.int64)
        for units, numbers in zip(ranges, counts, strict=True):
            sizes[self.owners_of(units)] += numbers
        return torch.split(rows, sizes.tolist())


_is_sharing = False


@contextmanager
def _sharing() -> Iterator[None]:
    global _is_sharing
    _is_sharing = True
    try:
        yield
    finally:
        _is_sharing = False


def shared_features(
    name: str,
    unit: Unit,
    module: nn.Module,
    stock: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute features of all media, some of them on each rank.

    Args:
        name: of the method, one of `METHODS`.
        unit: what a rank computes as a whole.
        module: the part of a model that holds its towers.
        stock: the method.
        args: of the call.
        kwargs: of the call.
    """
    step = on_full_sequences()
    # A method for videos may call that for images.
    if step is None or step.cp_size == 1 or _is_sharing:
        return stock(*args, **kwargs)
    bound = inspect.signature(stock).bind(*args, **kwargs).arguments
    call_arguments = {**bound, **bound.get("kwargs", {})}
    call_arguments.pop("kwargs", None)
    placeholders = _placeholders(module, name)
    items = None if _normalizes_batches(module) else _cut(call_arguments, unit)
    if items is None:
        with _sharing():
            output = stock(*args, **kwargs)
        return output if placeholders is None else _select(output, name, placeholders, step)
    ranges = deal(items.costs, step.cp_size)
    own = ranges[step.cp_rank]
    # A rank without units computes one all the same: its collectives must pair up with those of
    # other ranks.
    dummy = int(items.costs.argmin())

    def compute() -> Any:
        with _sharing():
            computed = items.select(own if own.size else Range(dummy, dummy + 1))
            return stock(**{**call_arguments, **computed, "return_dict": True})

    failure = (
        f"{type(module).__name__} could not compute the media of another rank. Each rank computes "
        "some images, frames or clips of the batch."
    )
    output = raise_on_all(compute, failure, step.groups.context)
    used = UsedOutput(output, is_dummy=own.size == 0)
    return _exchange(used, items, ranges, name, placeholders, step)


def _exchange(
    used: UsedOutput,
    items: _Items,
    ranges: Sequence[Range],
    name: str,
    placeholders: Tensor | None,
    step: Step,
) -> Any:
    """Return the output for all items, or for the placeholders of this rank's tokens."""
    num_items = [len(items.owners_of(units)) for units in ranges]
    counts = agree_on_counts(used.leaves, num_items, step.groups.context)
    wanted = None if placeholders is None else _wanted(placeholders, step)
    full: list[Any] = []
    for leaf, numbers in zip(used.leaves, counts, strict=True):
        sizes = np.array([each.sum() for each in numbers])
        if placeholders is not None:
            _check_number(name, placeholders, int(sizes.sum()))
        everything = [np.arange(sizes.sum())] * step.cp_size
        rows = exchange_rows(leaf.rows, sizes, wanted or everything, step)
        if leaf.counts is None:
            full.append(rows)
        else:
            full.append((rows,) if wanted else items.split(rows, numbers, ranges))
    return used.rebuild(full)


def _placeholders(module: nn.Module, name: str) -> Tensor | None:
    """Return which tokens of full sequences take the features, if the model merges its shard."""
    ids = merged_ids()
    if ids is None:
        return None
    config: Any = module.config
    token = config.video_token_id if "video" in name else config.image_token_id
    return torch.eq(ids, token)


def _check_number(name: str, placeholders: Tensor, num_rows: int) -> None:
    """Raise if there is not one feature for each placeholder token."""
    kind, num_tokens = name.split("_")[1], int(placeholders.sum())
    if num_rows != num_tokens:
        raise ValueError(
            f"{kind.capitalize()} features and {kind} tokens do not match: the batch has "
            f"{num_tokens} placeholder tokens, and its media have {num_rows} features. Use the "
            "processor of the model, and do not truncate what it returns."
        )


def _wanted(placeholders: Tensor, step: Step) -> list[IntArray]:
    """Return the numbers of the features of each rank's tokens."""
    return [rows_of(placeholders, step.layout, rank).cpu().numpy() for rank in range(step.cp_size)]


def _select(output: Any, name: str, placeholders: Tensor, step: Step) -> Any:
    """Return the features of this rank's tokens, where every rank has computed all."""
    used = UsedOutput(output)
    wanted = rows_of(placeholders, step.layout, step.cp_rank)
    full: list[Any] = []
    for leaf in used.leaves:
        _check_number(name, placeholders, len(leaf.rows))
        rows = leaf.rows.index_select(0, wanted.to(leaf.rows.device))
        full.append(rows if leaf.counts is None else (rows,))
    return used.rebuild(full)


def deal(costs: IntArray, num_ranks: int) -> list[Range]:
    """Return a range of units for each rank, with about equal sums of costs; some may be empty.

    Args:
        costs: of each unit, in order.
        num_ranks: the ranks.

    Example:
        >>> deal(np.array([4, 4, 1, 1, 1, 1]), 3)
        [Range(start=0, stop=1), Range(start=1, stop=2), Range(start=2, stop=6)]
    """
    middle = costs.cumsum() - costs / 2
    ranks = np.floor(middle * (num_ranks / costs.sum())).astype(np.int64)
    stops = np.searchsorted(ranks, np.arange(num_ranks), side="right")
    starts = np.concatenate([[0], stops[:-1]])
    return [Range(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]


def _cut(call_arguments: Mapping[str, Any], unit: Unit) -> _Items | None:
    """Return the units of a call; None if its arguments do not fit: the model then sees them all.

    All ranks have the same arguments, so that they agree, and fail together where the model fails.
    """
    tensors = {
        name: x for name, x in call_arguments.items() if isinstance(x, Tensor) and x.dim() > 0
    }
    # What belongs to tokens or samples, and lists, which may hold one entry per item.
    others = [
        name for name in tensors if SEQUENCE_DIMS.get(name) is not None or name in _OF_SAMPLES
    ]
    others += [
        name for name, x in call_arguments.items() if isinstance(x, list) and "layer" not in name
    ]
    if not tensors or others:
        return None
    cut = _cut_items if unit == "items" else partial(_cut_grids, by_frame=unit == "frames")
    return cut(tensors)


def _cut_items(tensors: Mapping[str, Tensor]) -> _Items | None:
    sizes = {x.shape[0] for x in tensors.values()}
    if len(sizes) != 1 or 0 in sizes:
        return None
    (num_items,) = sizes

    def select(units: Range) -> dict[str, Any]:
        return {name: x[units.start : units.stop] for name, x in tensors.items()}

    return _Items(np.ones(num_items, np.int64), np.arange(num_items), select)


def _cut_grids(tensors: Mapping[str, Tensor], *, by_frame: bool) -> _Items | None:
    grid_name = next((name for name in tensors if "grid" in name), "")
    if not grid_name or tensors[grid_name].dim() != 2 or not len(tensors[grid_name]):
        return None
    grid = tensors[grid_name]
    sizes: IntArray = grid.cpu().numpy().astype(np.int64)
    owners = np.arange(len(sizes))
    if by_frame:
        owners = np.repeat(owners, sizes[:, 0])
        sizes = np.concatenate([np.ones((len(owners), 1), np.int64), sizes[owners, 1:]], 1)
    costs = sizes.prod(1)
    patches = [name for name, x in tensors.items() if x.shape[0] == costs.sum()]
    others = [name for name in tensors if name not in (grid_name, *patches)]
    if (
        not costs.sum()
        or len(patches) != 1
        or any(tensors[name].shape[0] != len(grid) for name in others)
    ):
        return None
    ends = np.concatenate([[0], costs.cumsum()])

    def select(units: Range) -> dict[str, Any]:
        chosen, counts = np.unique(owners[units.start : units.stop], return_counts=True)
        rows = torch.from_numpy(chosen).to(grid.device)
        part = grid[rows]
        if by_frame:
            part[:, 0] = torch.from_numpy(counts)
        return {
            patches[0]: tensors[patches[0]][ends[units.start] : ends[units.stop]],
            grid_name: part,
            **{name: tensors[name][rows] for name in others},
        }

    return _Items(costs, owners, select)


def _normalizes_batches(module: nn.Module) -> bool:
    """Return whether features of an item depend on others, by the statistics of a batch."""
    has_batch_norm = any(isinstance(m, _BATCH_NORMS) and m.training for m in module.modules())
    if has_batch_norm:
        _log_replicated(type(module).__name__)
    return has_batch_norm


@lru_cache(maxsize=8)
def _log_replicated(name: str) -> None:
    _logger.info(
        "media of %s are computed by every rank: batch normalization in training needs all of "
        "them; with frozen statistics (.eval()) they are shared",
        name,
    )
