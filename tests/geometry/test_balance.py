"""Parts of a row that are equally long and equally dear: what is promised, and where it ends."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.geometry.balance import MIN_RANGE, TOLERABLE, imbalance, split_evenly
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask


def before(work):
    return np.concatenate([[0], np.cumsum(work)])


def document_work(sizes, length, **settings):
    """Return the work before each position of a row of documents, of which the last is cut off."""
    ids = np.repeat(np.arange(len(sizes)), sizes)[:length]
    return Mask(causal=True, **settings).bounds(length, documents=ids[None]).work_before()


def draw_sizes(length, shortest, longest, seed):
    """Draw documents whose lengths are spread evenly over the orders of magnitude."""
    random = np.random.default_rng(seed)
    low, high = np.log([shortest, longest + 1])
    sizes = np.exp(random.uniform(low, high, length)).astype(np.int64)
    return sizes[: np.searchsorted(np.cumsum(sizes), length) + 1]


@st.composite
def packed(draw, min_blocks):
    """Draw rows of documents; each part is ``min_blocks`` of the shortest ranges long, or more."""
    num_parts = draw(st.sampled_from([2, 3, 4, 5, 7, 8, 16]))
    length = num_parts * (MIN_RANGE * min_blocks + draw(st.integers(0, 1000)))
    shortest = draw(st.sampled_from([1, 16, 64, 256]))
    longest = draw(st.sampled_from([512, 4096, length]))
    sizes = draw_sizes(length, shortest, longest, draw(st.integers(0, 1 << 20)))
    window = draw(st.sampled_from([None, None, 300]))
    return document_work(sizes, length, window=window), num_parts


@st.composite
def uneven(draw):
    """Draw the work of tokens as no mask would make it: nothing, plateaus and single spikes."""
    num_parts = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]))
    length = draw(st.integers(1, 40) | st.integers(100, 3000))
    work = np.full(num_parts * length, draw(st.sampled_from([0, 0, 1, 100])))
    for _ in range(draw(st.integers(0, 10))):
        start = draw(st.integers(0, len(work) - 1))
        size = draw(st.sampled_from([1, 7, 64, 128, 129, 300, 2000]))
        work[start : start + size] = draw(st.integers(0, 1000))
    return before(work), num_parts


rows = uneven() | packed(min_blocks=2)


def check_parts(parts, row):
    """See that every position is in one part, and ranges are sorted, joined, and none is short."""
    assert len(parts) == row[1]
    assert len({sum(r.size for r in part) for part in parts}) == 1
    edges = sorted(r for part in parts for r in part)
    assert [a.stop for a in edges] == [b.start for b in edges[1:]] + [len(row[0]) - 1]
    assert edges[0].start == 0
    length = (len(row[0]) - 1) // row[1]
    for part in parts:
        assert list(part) == sorted(part)
        assert all(a.stop < b.start for a, b in pairwise(part)), "not joined"
        assert min(r.size for r in part) >= min(MIN_RANGE, max(length // 8, 1))


def dearest(row, size):
    """Return the work of the dearest run of so many tokens, over the mean of the parts."""
    work_before, num_parts = row
    return (work_before[size:] - work_before[:-size]).max() * num_parts / max(work_before[-1], 1)


def eighth(row):
    return -(-(len(row[0]) - 1) // row[1] // 8)


@settings(max_examples=100)
@given(rows)
def test_parts_are_whole_and_none_has_more_than_the_mean_and_an_eighth(row):
    """What is proved, for any work whatever."""
    parts = split_evenly(*row)
    check_parts(parts, row)
    most = dearest(row, eighth(row))
    assert imbalance(parts, row[0]) <= max(TOLERABLE, 1 + most) + 1e-9


@settings(max_examples=60)
@given(packed(min_blocks=16))
def test_documents_are_balanced_where_no_block_has_half_the_work_of_a_part(row):
    """What the search reaches, for documents as they come."""
    if dearest(row, MIN_RANGE) <= 0.5:
        parts = split_evenly(*row)
        assert imbalance(parts, row[0]) <= TOLERABLE
        assert sum(map(len, parts)) <= 4 * row[1]


@pytest.mark.parametrize(
    ("sizes", "num_parts", "length"),
    [((2172, 318), 5, 443), ((202, 3816), 4, 923), ((2667, 598), 5, 570)],
)
def test_short_parts_are_dealt_out_where_windows_would_leave_shorter_ranges(
    sizes, num_parts, length
):
    row = document_work(sizes, num_parts * length, window=300)
    assert imbalance(split_evenly(row, num_parts), row) <= TOLERABLE


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("sizes", [(1024, 16384), (16384, 65536)])
def test_long_documents_need_no_more_ranges_than_zigzag(sizes, window, seed):
    row = document_work(draw_sizes(1 << 17, *sizes, seed), 1 << 17, window=window)
    parts = split_evenly(row, 8)
    assert imbalance(parts, row) <= 1.02
    assert sum(map(len, parts)) <= 15
    assert not any(edge % MIN_RANGE for part in parts for r in part for edge in r)


def test_seven_equal_blocks_in_an_empty_row_are_cut_for_three():
    work = np.zeros(3 * 4096, np.int64)
    work[5000 : 5000 + 7 * 128] = 100
    assert imbalance(split_evenly(before(work), 3), before(work)) <= 1.01


def test_a_long_document_among_short_ones_is_more_than_some_layout_can_share_out():
    """No block has half the work of a part, and yet no layout in such blocks is even.

    The long document meets nine ranges of 128 tokens at most. Nine of 16 ranks must hold what all
    of them should share: on average 6% too much.
    """
    length = 16 * 4096
    row = document_work([100] * 200 + [900] + [100] * 500, length), 16
    assert dearest(row, MIN_RANGE) < 0.5
    long, mean = 900 * 901 / 2, row[0][-1] / 16
    assert (long + (9 * 4096 - 900) * 50.5) / 9 > 1.06 * mean
    found = imbalance(split_evenly(*row), row[0])
    assert 1.06 < found < 1.5


def test_a_layout_states_what_it_could_not_even_out():
    ids = np.repeat(np.arange(71), [100] * 20 + [900] + [100] * 50)[:7800]
    mask = Mask(causal=True, documents=torch.from_numpy(ids))
    layout = build_layout("balanced", seq_len=7800, cp_size=16, bounds=lambda: mask.bounds(7800))
    work = layout.work(mask.bounds(7800, padded_len=layout.padded_len))
    assert layout.work_imbalance == pytest.approx(max(work) * 16 / sum(work))
    assert layout.work_imbalance > 1.02


def test_a_row_without_work_is_even():
    parts = split_evenly(np.zeros(4 * 640 + 1, np.int64), 4)
    assert imbalance(parts, np.zeros(4 * 640 + 1, np.int64)) == 1.0


def test_the_same_row_is_always_cut_in_the_same_way():
    row = document_work(draw_sizes(1 << 15, 64, 8192, 0), 1 << 15)
    assert split_evenly(row, 8) == split_evenly(row.copy(), 8)


def test_a_million_tokens_for_64_ranks_take_no_time():
    row = document_work(draw_sizes(1 << 20, 1024, 16384, 0), 1 << 20)
    start = time.process_time()
    parts = split_evenly(row, 64)
    assert time.process_time() - start < 1  # some 0.05 s, on a machine with nothing else to do
    assert imbalance(parts, row) <= 1.02
    assert sum(map(len, parts)) <= 127


# What torch's own tests ask of its (private) load balancers, asked of ours: per-document head-tail
# (documents that 2 x ranks divide) and round robin by processing time (any block mask).


HEAD_TAIL = [(1024, 2048, 512, 512), (256,) * 16, (4096,)]
BLOCK_MASKS = {
    "causal": Mask(causal=True),
    "bidirectional": Mask(),
    "window": Mask(causal=True, window=512),
    "prefix": Mask(causal=True, spans=torch.where(torch.arange(4096) < 1000, 0, -1)),
}


def layout_for(mask, cp_size, name):
    bounds = mask.bounds(4096)
    return build_layout(name, seq_len=4096, cp_size=cp_size, bounds=lambda: bounds), bounds


def check_as_torch_does(mask, cp_size):
    balanced, bounds = layout_for(mask, cp_size, "balanced")
    shuffled = np.concatenate([balanced.positions(r).numpy() for r in range(cp_size)])
    assert sorted(shuffled) == list(range(4096)), "not a permutation"
    assert (shuffled[balanced.order.numpy()] == np.arange(4096)).all(), "restore is no inverse"
    assert {len(balanced.positions(r)) for r in range(cp_size)} == {4096 // cp_size}
    zigzag, _ = layout_for(mask, cp_size, "zigzag")
    mine, theirs = (max(layout.work(bounds)) for layout in (balanced, zigzag))
    assert mine <= theirs * 1.001
    return mine, theirs


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("sizes", HEAD_TAIL, ids=str)
def test_documents_are_balanced_at_least_as_well_as_by_head_and_tail(sizes, cp_size):
    ids = np.repeat(np.arange(len(sizes)), sizes)
    mine, theirs = check_as_torch_does(Mask(causal=True, documents=torch.from_numpy(ids)), cp_size)
    if sizes == (1024, 2048, 512, 512):
        assert mine < 0.9 * theirs


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_any_mask_is_balanced_at_least_as_well_as_by_head_and_tail(name, cp_size):
    check_as_torch_does(BLOCK_MASKS[name], cp_size)
