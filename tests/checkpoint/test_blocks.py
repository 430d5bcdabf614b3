"""Shards of several blocks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # FSDP2 makes them

from lightning_cp.checkpoint.blocks import full_tensor

PLACEMENTS = {
    "fused": [Shard(0), _StridedShard(1, split_factor=2)],
    "copies": [Replicate(), _StridedShard(0, split_factor=2)],
    "one dim": [Shard(0), _StridedShard(0, split_factor=2)],
    "plain": [Shard(1), Shard(0)],
}


def gather():
    mesh = init_device_mesh("cpu", (2, 2))
    full = -torch.arange(8 * 12, dtype=torch.float64).view(8, 12)  # -0.0 is one of them
    shards = (distribute_tensor(full, mesh, placements) for placements in PLACEMENTS.values())
    return [torch.equal(full_tensor(x).view(torch.int64), full.view(torch.int64)) for x in shards]


@pytest.mark.ranks
def test_the_full_tensor_is_gathered_block_by_block(ranks):
    for equal in ranks(4).run(gather):
        assert equal == [True] * len(PLACEMENTS)
