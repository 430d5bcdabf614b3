from dataclasses import replace

import pytest

from lightning_cp.attn.cost import (
    CallSize,
    TileShape,
    choose_exchange,
    compute_times,
    default_memory_budget,
    estimate,
    gather_tiles,
    kernel_time,
    ring_tiles,
)
from lightning_cp.attn.hardware import FREE, H200, Links

GiB = 2**30


def problem(seq_len, cp_size, **others):
    return CallSize(seq_len, cp_size, num_heads=32, num_kv_heads=8, head_dim=128, **others)


# queries, keys, heads, kind, milliseconds forward and backward: cuDNN on an H200
TILES = [
    (4096, 2048, 32, "full", 0.250, 0.711),
    (4096, 2048, 16, "full", 0.138, 0.377),
    (2048, 4096, 32, "full", 0.237, 0.689),
    (4096, 4096, 32, "causal", 0.282, 0.901),
    (2048, 26624, 32, "full", 1.33, 4.09),
    (32768, 32768, 32, "causal", 15.0, 41.8),
    (131072, 131072, 32, "causal", 256.0, 667.0),
]

# What splitting a gather cost there, without communication: whole / ranks / time
SPLITS = {
    (32768, 8): {1: 1.02, 2: 0.95, 4: 0.91, 8: 0.66},
    (131072, 8): {1: 1.03, 2: 1.02, 4: 1.02, 8: 1.00},
    (32768, 4): {1: 1.01, 2: 0.94, 4: 0.90, 8: 0.86},
}
WHOLE = {32768: 15.0 + 41.8, 131072: 256.0 + 667.0}


@pytest.mark.parametrize("measured", TILES, ids=str)
def test_kernels_take_what_was_measured(measured):
    queries, keys, heads, kind, *passes = measured
    for backward, spent in enumerate(passes):
        told = kernel_time(
            problem(32768, 8), TileShape(queries, keys, kind), heads, H200, backward=bool(backward)
        )
        assert 1e3 * told == pytest.approx(spent, rel=0.1)


@pytest.mark.parametrize(("seq_len", "cp_size"), SPLITS)
def test_splitting_a_gather_costs_what_was_measured(seq_len, cp_size):
    one = problem(seq_len, cp_size)
    for num_groups, share in SPLITS[seq_len, cp_size].items():
        parts = [
            compute_times(gather_tiles(one), one, num_groups, H200, backward=backward)
            for backward in (False, True)
        ]
        told = WHOLE[seq_len] / cp_size / (1e3 * num_groups * sum(map(sum, parts)))
        assert told == pytest.approx(share, rel=0.1), num_groups


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_the_tiles_of_all_ranks_are_the_whole_mask(cp_size, kind):
    one = problem(1 << 17, cp_size, kind=kind)
    whole = one.seq_len**2 / (2 if kind == "causal" else 1)
    for tiles in (gather_tiles(one), ring_tiles(one)):
        pairs = sum(t.queries * t.keys / (2 if t.kind == "causal" else 1) for t in tiles)
        assert pairs * cp_size == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["gather", "ring"])
def test_one_rank_pays_for_no_exchange_and_no_merge(algorithm):
    one = problem(8192, 1)
    slow = Links(inside_gbs=1, between_gbs=1)
    assert estimate(algorithm, one, links=slow) == estimate(algorithm, one, links=FREE)
    alone = sum(
        kernel_time(one, TileShape(8192, 8192, "causal"), 32, H200, backward=b)
        for b in (False, True)
    )
    assert estimate(algorithm, one).time == pytest.approx(alone)


@pytest.mark.parametrize("algorithm", ["gather", "ring"])
def test_slower_links_never_make_it_faster(algorithm):
    for seq_len in (8192, 131072):
        times = [
            estimate(
                algorithm, problem(seq_len, 8), groups=(2, 2), links=Links(inside_gbs=gbs)
            ).time
            for gbs in (1e6, 400, 50, 5)
        ]
        assert times == sorted(times)


def test_exchanges_slow_kernels_beside_them():
    links = Links(latency_us=0)
    for algorithm in ("gather", "ring"):
        one = problem(131072, 8)
        spent, less = (
            estimate(algorithm, one, groups=(4, 4), links=x).time
            for x in (links, replace(links, slowdown=0))
        )
        # Keys travel twice, their gradients once: by ring as they are, else in float32.
        moved = one.key_bytes(131072) * 7 / 8 * (3 if algorithm == "ring" else 4) / 400e9
        assert 0.7 * 0.1 * moved < spent - less <= 0.1 * moved
    # What waits for an exchange is not slowed down by it.
    assert Links(slowdown=0.1).together(1.0, 5.0) == 5.0


def test_gradients_in_half_precision_save_time_on_slow_links_and_cost_memory():
    links, row = Links(inside_gbs=1.0), problem(32768, 8).key_bytes(32768, 2)
    wires = [problem(32768, 8, wire_itemsize=size) for size in (4, 2)]
    whole, half = (estimate("gather", wire, links=links) for wire in wires)
    assert whole.forward == half.forward
    saved = whole.backward.time - half.backward.time
    assert saved == pytest.approx(row * 7 / 8 / 1e9, rel=0.01)
    assert 0 <= half.backward.memory - whole.backward.memory <= row
    whole, half = (estimate("ring", wire, links=links) for wire in wires)
    assert whole == half


def test_a_rings_last_gradients_are_hidden_by_own_tokens_of_the_last_of_several_groups():
    free = Links(inside_gbs=1e6, latency_us=0, slowdown=0)
    fast, slow = free, replace(free, inside_gbs=300)
    one = problem(131072, 8)
    shard = one.key_bytes(one.local_len) / 300e9
    for num_groups, exposed in ((1, shard), (2, 0.0)):
        groups = (1, num_groups)
        times = [estimate("ring", one, groups=groups, links=x).backward.time for x in (fast, slow)]
        assert times[1] - times[0] == pytest.approx(exposed, abs=1e-6)


def test_more_groups_need_less_memory_and_small_kernels_more_time():
    costs = [estimate("gather", problem(32768, 8), groups=(n, n)) for n in (1, 2, 4, 8)]
    memory = [cost.memory for cost in costs]
    assert memory == sorted(memory, reverse=True)
    times = [cost.time for cost in costs]
    assert times == sorted(times)


def test_a_group_that_crosses_nodes_is_held_up_by_the_network():
    inside = estimate("ring", problem(131072, 16), links=Links(ranks_per_node=16))
    across = estimate("ring", problem(131072, 16), links=Links(ranks_per_node=8, between_gbs=5))
    assert across.time > inside.time
    # Swapping inside the node leaves an eighth of the keys to cross.
    mixed = problem(131072, 16, ulysses_size=8)
    assert estimate("ring", mixed, links=Links(between_gbs=5)).time < across.time


def test_the_fastest_way_that_fits_is_chosen():
    one = problem(1 << 20, 64)
    plenty, little = (choose_exchange(one, memory_budget=n) for n in (80 * GiB, 1 * GiB))
    assert plenty.algorithm == "gather"
    assert little.algorithm == "ring"
    assert plenty.fits
    assert little.fits
    none = choose_exchange(one, memory_budget=1)
    assert not none.fits
    least = min(
        estimate(name, one, groups=(n, n)).memory for name in ("gather", "ring") for n in (1, 8)
    )
    groups = (none.num_groups_forward, none.num_groups_backward)
    assert estimate(none.algorithm, one, groups=groups).memory == least


def test_groups_are_few_where_kernels_are_small_and_as_many_as_memory_asks_for():
    short, long = problem(32768, 8), problem(131072, 8)
    few, many = (
        choose_exchange(one, memory_budget=default_memory_budget(one)) for one in (short, long)
    )
    assert (few.algorithm, few.num_groups_forward, few.num_groups_backward) == ("gather", 1, 1)
    assert (many.algorithm, many.num_groups_backward) == ("gather", 8)
    groups = (many.num_groups_forward, many.num_groups_backward)
    assert estimate("gather", long, groups=groups).memory <= 6 * long.query_bytes


def test_budgets_are_kept_for_any_number_of_ranks():
    for cp_size in (2, 8, 64, 256):
        one = problem(16384 * cp_size, cp_size)
        choice = choose_exchange(one, memory_budget=default_memory_budget(one))
        groups = (choice.num_groups_forward, choice.num_groups_backward)
        assert estimate(choice.algorithm, one, groups=groups).memory <= default_memory_budget(one)


def test_more_memory_is_taken_only_where_it_saves_a_tenth_of_the_time():
    def best(one, budget):
        return choose_exchange(one, memory_budget=budget)

    changed = set()
    for heads, kv_heads in ((32, 8), (32, 32), (16, 2)):
        for seq_len in (1 << 13, 1 << 15, 3 << 15, 1 << 17, 1 << 18, 1 << 20):
            for cp_size in (1, 2, 3, 8, 12, 48, 64):
                one = replace(problem(seq_len, cp_size), num_heads=heads, num_kv_heads=kv_heads)
                least = max(6 * one.query_bytes, 800 * 2**20)
                most = max(least, H200.spare_bytes)
                budget = default_memory_budget(one)
                assert least <= budget <= most
                taken, small, large = (best(one, x) for x in (budget, least, most))
                assert taken.fits or not large.fits
                assert taken.time <= 1.08 * large.time
                half = best(one, max(least, budget / 2))
                assert budget == least or not half.fits or half.time > 1.08 * large.time
                if budget > least:
                    assert not small.fits or small.time > 1.08 * large.time
                    changed.add((kv_heads, seq_len, cp_size))
    # One node is enough for keys that heads share; over eight a ring has one card of each.
    assert (8, 1 << 17, 8) not in changed
    assert (8, 1 << 18, 64) in changed
    assert (32, 1 << 18, 48) in changed
    # A ring that is named has no other way to be compared with.
    one = problem(1 << 18, 64)
    assert default_memory_budget(one, algorithms=("ring",)) == 800 * 2**20


def test_the_choice_follows_from_shapes_alone():
    for one in (problem(32768, 8), problem(32768, 8, kind="full")):
        again = choose_exchange(replace(one), memory_budget=1e9)
        assert choose_exchange(one, memory_budget=1e9) == again


def test_a_single_key_head_is_one_group():
    one = replace(problem(32768, 8), num_kv_heads=1)
    choice = choose_exchange(one, memory_budget=1)
    assert (choice.num_groups_forward, choice.num_groups_backward) == (1, 1)
    with_swap = replace(problem(32768, 8), ulysses_size=8)
    assert choose_exchange(with_swap, memory_budget=1e12).num_groups_forward == 1
