"""The helpers that run tests on several ranks must themselves be right."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import (
    RankError,
    RankPool,
    average_over_ranks,
    end_process,
    run_threads,
    same_bits,
)

pytestmark = pytest.mark.ranks


def total_of_ranks():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def averages(apart):
    rank = float(dist.get_rank())
    tensors = [torch.tensor([[rank, 1.0], [2.0, rank]]), torch.tensor(10 * rank).double()]
    with same_bits() if apart else contextlib.nullcontext():
        average_over_ranks(tensors)
    return [x.tolist() for x in tensors]


def count_loops_of_gloo():
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    threads = Path("/proc/self/task").iterdir()
    return sum((thread / "comm").read_text().startswith("gloo_tcp_loop") for thread in threads)


def fail_on_one_rank(failing):
    if dist.get_rank() == failing:
        raise KeyError("broken on purpose")
    dist.all_reduce(torch.ones(1))


def sleep_on_one_rank(seconds):
    if dist.get_rank() == 1:
        time.sleep(seconds)


def die_on_one_rank(how):
    if dist.get_rank() == 1:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        ctypes.CDLL(None).abort() if how == "abort" else end_process(3)
    dist.all_reduce(torch.ones(1))


def answer_with_what_does_not_pickle():
    return lambda: None


def test_every_rank_returns_its_result(ranks):
    assert ranks(3).run(total_of_ranks) == [6.0] * 3


@pytest.mark.parametrize(("size", "mean"), [(1, 0.0), (2, 0.5), (3, 1.0)])
def test_tensors_are_averaged_in_their_places(ranks, size, mean):
    expected = [[[mean, 1.0], [2.0, mean]], 10 * mean]
    for apart in (False, True):
        assert ranks(size).run(averages, apart) == [expected] * size


def test_groups_share_the_thread_that_polls(ranks):
    assert max(ranks(2).run(count_loops_of_gloo)) <= 1  # torch may have no names for threads


def test_the_failing_rank_is_raised_and_the_pool_serves_again():
    pool = RankPool(2)
    pool.patience = 0.2
    try:
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 failed:(?s:.*)broken on purpose"):
            pool.run(fail_on_one_rank, 1)
        assert time.monotonic() - start < 30
        assert pool.run(total_of_ranks) == [3.0] * 2
    finally:
        pool.stop()


def test_a_rank_that_hangs_is_named():
    pool = RankPool(2)
    try:
        pool.run(total_of_ranks)
        named = r"in sleep_on_one_rank(?s:.*)ranks \[1\] of 2 did not finish in 1 s$"
        with pytest.raises(RankError, match=named):
            pool.run(sleep_on_one_rank, 60, timeout=1)
    finally:
        pool.stop()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("abort", r"last words(?s:.*)in die_on_one_rank(?s:.*)the process died: SIGABRT$"),
        ("exit", r"last words\nthe process died: exit code 3$"),
    ],
)
def test_a_rank_that_dies_says_how_and_where(how, message):
    """It is named although the other one, which lost its connection, fails with a traceback."""
    pool = RankPool(2)
    try:
        with pytest.raises(RankError, match=r"rank 1 of 2 failed:\n(?s:.*)" + message):
            pool.run(die_on_one_rank, how)
        assert pool.run(total_of_ranks) == [3.0] * 2
    finally:
        pool.stop()


def crash_deep(depth):
    if depth:
        return crash_deep(depth - 1)
    return os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_shows_where_it_happened_however_deep():
    pool = RankPool(2)
    try:
        with pytest.raises(RankError, match="Fatal Python error: Segm(?s:.*) in crash_deep"):
            pool.run(crash_deep, 120)
    finally:
        pool.stop()


def test_an_answer_that_does_not_pickle_is_a_failure_like_others(ranks):
    with pytest.raises(RankError, match="rank 0 of 3 failed:(?s:.*)pickle local object"):
        ranks(3).run(answer_with_what_does_not_pickle)


def test_threads_exchange_gather_and_reduce():
    def work(transport):
        out = torch.empty(3, 1)
        transport.all_gather(out, torch.tensor([float(transport.rank)]))()
        mine = torch.empty(1)
        transport.reduce_scatter(mine, torch.arange(3.0).unsqueeze(1) + transport.rank)()
        received = torch.empty(1)
        peers = (transport.rank + 1) % 3, (transport.rank - 1) % 3
        transport.exchange([(peers[0], out[transport.rank])], [(peers[1], received)])()
        return out.flatten().tolist(), mine.item(), received.item()

    assert run_threads(3, work) == [([0.0, 1.0, 2.0], 3.0 * r + 3, (r - 1) % 3) for r in range(3)]


def test_a_failing_thread_is_raised():
    def work(transport):
        if transport.rank == 1:
            raise KeyError("broken on purpose")

    with pytest.raises(KeyError, match="broken on purpose"):
        run_threads(2, work)


def test_a_thread_that_hangs_is_named():
    def work(transport):
        if transport.rank == 1:
            time.sleep(5)

    named = r"in work(?s:.*)threads \[1\] of 2 did not finish in 0.2 s$"
    with pytest.raises(RankError, match=named):
        run_threads(2, work, timeout=0.2)
