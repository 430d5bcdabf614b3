"""Ranks of the GPU tests."""

import pytest
import torch

from tests.ranks import RankPool, litter


@pytest.fixture(autouse=True)
def _litter() -> None:
    if torch.cuda.is_initialized():
        litter()


@pytest.fixture(scope="module")
def nccl():
    """Return a function that gives a pool of so many NCCL processes on the one GPU."""
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size, "nccl"))
    for pool in pools.values():
        pool.stop()
