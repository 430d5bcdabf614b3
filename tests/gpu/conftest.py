"""Ranks of the GPU tests."""

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="module")
def nccl():
    """Return a function that gives a pool of so many NCCL processes on the one GPU."""
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size, "nccl"))
    for pool in pools.values():
        pool.stop()
