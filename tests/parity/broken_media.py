# SPDX-License-Identifier: Apache-2.0
"""Faults of multimodal models that the comparison must notice, each put in on purpose."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_patches.model import mask_reader
from hf_patches.multimodal import outer, seam, sharing
from tests.parity.hf import Found
from tests.parity.media import MediaJob, compare


@contextmanager
def _replaced(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    stock = getattr(owner, name)

    def broken(*args: Any) -> Any:
        return change(stock, *args)

    with mock.patch.object(owner, name, broken):
        yield


def _late_positions(stock: Any, module: Any, name: str, x: Tensor, dim: int, step: Any) -> Tensor:
    if name == "position_ids":
        x = x.clone()
        x[..., 18:] += 1  # the first image ends there
    return stock(module, name, x, dim, step)


def _other_sample(stock: Any, name: str, x: Any, step: Any) -> Any:
    full = stock(name, x, step)
    return full.roll(1, 0) if name == "pixel_values" else full


def _other_rows(stock: Any, mask: Tensor, layout: Any, rank: int) -> Tensor:
    return stock(mask, layout, rank).flip(0)


def _counted_by_owner(stock: Any, x: Tensor, sizes: Any, wanted: Any, step: Any) -> Tensor:
    return stock(x + (step.cp_size - 1) * (x - x.detach()), sizes, wanted, step)


def _in_other_order(stock: Any, x: Tensor, sizes: Any, wanted: Any, step: Any) -> Tensor:
    return stock(x, sizes, [rows[::-1] for rows in wanted], step)


def _counted_by_rank(stock: Any, module: Any, name: str, x: Tensor, dim: int, step: Any) -> Tensor:
    if name == "inputs_embeds":
        x = x + (step.cp_size - 1) * (x - x.detach())
    return stock(module, name, x, dim, step)


def _cut_blocks(stock: Any, blocks: Tensor, step: Any, config: Any) -> Tensor | None:
    spans = stock(blocks, step, config)
    if spans is None:
        return None
    starts = [x.start for rank in range(step.cp_size) for x in step.layout.ranges(rank)]
    for start in starts:
        spans[:, start:] = torch.where(spans[:, start:] >= 0, spans[:, start:] + 1000, -1)
    return spans


BREAKS: dict[str, tuple[Callable[[], AbstractContextManager[None]], MediaJob]] = {
    "positions one off after an image": (
        lambda: _replaced(seam, "_shard_at", _late_positions),
        MediaJob("qwen3_vl", options=(("layout", "zigzag"),)),
    ),
    "features on the wrong sample": (
        lambda: _replaced(outer, "full_value", _other_sample),
        MediaJob("llava"),
    ),
    "features added to the wrong tokens": (
        lambda: _replaced(seam, "rows_of", _other_rows),
        MediaJob("cohere_compass"),
    ),
    "features merged into the wrong tokens of a shard": (
        lambda: _replaced(sharing, "rows_of", _other_rows),
        MediaJob("qwen3_vl"),
    ),
    "features exchanged in another order": (
        lambda: _replaced(sharing, "exchange_rows", _in_other_order),
        MediaJob("llava"),
    ),
    "gradients of shared features counted twice": (
        lambda: _replaced(sharing, "exchange_rows", _counted_by_owner),
        MediaJob("voxtral"),
    ),
    "vision gradients counted by every rank": (
        lambda: _replaced(seam, "_shard_at", _counted_by_rank),
        MediaJob("llava"),
    ),
    "a block cut at the border of a rank": (
        lambda: _replaced(mask_reader, "_full_spans", _cut_blocks),
        MediaJob("gemma3", options=(("layout", "zigzag"),)),
    ),
}


def compare_broken(what: str) -> Found | None:
    """Run a job with something broken, on this rank."""
    breaking, job = BREAKS[what]
    with breaking():
        return compare(job)
