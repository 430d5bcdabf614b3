"""Fixtures for all tests: ranks that start once, and a guard against leftovers."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from lightning_cp import context
from tests.ranks import RankPool

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Return a function that gives a pool of so many gloo processes, started at its first use."""
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.stop()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    yield
    after = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    assert after == before, "an environment variable was left behind"
    assert context._current is None, "a step was left active"
    assert not dist.is_initialized(), "a process group was left behind"
