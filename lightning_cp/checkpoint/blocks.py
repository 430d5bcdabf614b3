# SPDX-License-Identifier: Apache-2.0
"""Shards of several blocks, for DCP, which by default takes a shard for one block.

Tensor ranks each hold a part of the gate and a part of the up projection of a fused weight
(`_StridedShard`): two blocks of the full tensor, which are one tensor on the rank.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def as_blocks(state: Any) -> Any:
    """Return a nested state in which shards of several blocks are `Blocks`, which share memory."""
    if isinstance(state, DTensor):
        return _blocks(state)
    if isinstance(state, Mapping):
        return {key: as_blocks(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(as_blocks(value) for value in state)
    return state


def full_tensor(x: DTensor) -> Tensor:
    """Return the full tensor, also of several blocks (torch 2.11 does not). Collective."""
    if _is_one_block(x):
        return x.full_tensor()
    full = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    mesh, position = x.device_mesh, x.device_mesh.get_coordinate()
    is_copy = [p.is_replicate() for p in x.placements]
    assert position is not None  # noqa: S101
    if not any(index and copy for index, copy in zip(position, is_copy, strict=True)):
        for at, part in _parts(x).items():
            target = tuple(slice(a, a + p.stop - p.start) for a, p in zip(at, part, strict=True))
            full[target] = x.to_local()[part]
    for dim in range(mesh.ndim):  # bytes: each is 0 on all ranks but one
        dist.all_reduce(full.flatten().view(torch.uint8), group=mesh.get_group(dim))
    return full


class Blocks(Tensor):
    """A shard whose blocks DCP writes and reads one by one."""

    full_size: torch.Size
    starts: dict[torch.Size, tuple[slice, ...]]
    """The slices of this tensor, by the offsets of the block in the full one."""

    # DCP calls these three methods of a tensor that has them.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return what to write."""
        properties = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.full_size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return which parts of the full tensor this rank holds."""
        return [
            ChunkStorageMetadata(at, torch.Size(x.stop - x.start for x in part))
            for at, part in self.starts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the block at an offset."""
        assert index.offset is not None  # noqa: S101
        return self.as_subclass(Tensor)[self.starts[index.offset]]

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the full tensor, which DCP compares with the saved one."""
        return self.full_size if dim is None else self.full_size[dim]


def _is_one_block(x: DTensor) -> bool:
    return all(type(placement) in (Shard, Replicate) for placement in x.placements)


def _blocks(x: DTensor) -> Tensor:
    """Return a shard as `Blocks` if it may be more than one block."""
    if _is_one_block(x) or len(parts := _parts(x)) == 1:
        return x
    blocks = x.to_local().detach().as_subclass(Blocks)
    blocks.full_size, blocks.starts = x.shape, parts
    return blocks


def _parts(x: DTensor) -> dict[torch.Size, tuple[slice, ...]]:
    """Return the slices of the local tensor, by where they are in the full one."""
    runs = [list(_runs(x, dim)) for dim in range(x.ndim)]
    return {
        torch.Size(at for at, _ in combination): tuple(part for _, part in combination)
        for combination in itertools.product(*runs)
    }


def _runs(x: DTensor, dim: int) -> Iterator[tuple[int, slice]]:
    """Yield the runs of neighbouring indices that a rank holds along a dim.

    Yields:
        Where a run starts in the full tensor, and the slice of the local tensor.
    """
    placements = []
    for placement in x.placements:
        moved: Any = Replicate()
        if getattr(placement, "dim", None) == dim:
            split = getattr(placement, "split_factor", None)
            kind: Any = type(placement)
            moved = Shard(0) if split is None else kind(0, split_factor=split)
        placements.append(moved)
    indices = torch.arange(x.shape[dim], device=x.device_mesh.device_type)
    local = distribute_tensor(indices, x.device_mesh, placements, src_data_rank=None).to_local()
    held = local.tolist()
    start = 0
    for stop in range(1, len(held) + 1):
        if stop == len(held) or held[stop] != held[stop - 1] + 1:
            yield held[start], slice(start, stop)
            start = stop
