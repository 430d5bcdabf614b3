"""Comparisons side by side, each on its own ranks: as many at once as there are cores for."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import LifoQueue
from typing import TypeVar

from tests.ranks import RankPool

Case = TypeVar("Case")
Result = TypeVar("Result")
Pools = dict[int, RankPool]
"""By number of ranks."""


def run_side_by_side(
    cases: Iterable[Case],
    run: Callable[[Case, Pools], Result],
    sizes: Iterable[int],
    *,
    at_least: int = 1,
) -> Iterator[tuple[Case, Result]]:
    """Call `run(case, pools)` for each case, and yield what it returns as soon as it has ended.

    Args:
        cases: to run, in this order: one for every two cores at once.
        run: called in a thread, with pools that no other case uses meanwhile.
        sizes: the numbers of ranks of the pools.
        at_least: cases at once, of those that mostly wait.
    """
    at_once = max(at_least, (os.cpu_count() or 1) // 2)
    every = [{size: RankPool(size) for size in {*sizes}} for _ in range(at_once)]
    free: LifoQueue[Pools] = LifoQueue()  # those whose ranks have been started come first
    for pools in every:
        free.put(pools)

    def work(case: Case) -> tuple[Case, Result]:
        pools = free.get()
        try:
            return case, run(case, pools)
        finally:
            free.put(pools)

    executor = ThreadPoolExecutor(at_once)
    try:
        for done in as_completed([executor.submit(work, case) for case in cases]):
            yield done.result()
    finally:
        executor.shutdown(cancel_futures=True)
        for pools in every:
            for pool in pools.values():
                pool.stop()
