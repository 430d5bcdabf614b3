import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import Range, union
from tests import oracle
from tests.strategies import masks


@st.composite
def worked_out(draw):
    """Draw a mask with the same thing written out in full."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    extra = draw(st.integers(0, 5))
    mask = draw(masks(batch, length))
    table = np.zeros((batch, length + extra, length + extra), bool)
    table[:, :length, :length] = oracle.visible(mask, batch, length).numpy()
    return mask.bounds(length, padded_len=length + extra), table


@st.composite
def blocks(draw, length):
    first, second = (sorted(draw(st.tuples(*[st.integers(0, length)] * 2))) for _ in range(2))
    return Range(*first), Range(*second)


def check_visible(bounds, table):
    row = Range(0, bounds.length)
    found = bounds.visible(row, row).numpy()
    assert (np.broadcast_to(found, table.shape) == table).all()


def check_order(bounds):
    assert (np.diff(bounds.first) >= 0).all()
    assert (np.diff(bounds.last) >= 0).all()
    assert (bounds.last >= bounds.first).all(), "equal where a query sees nothing"


def check_ends(bounds):
    """See that bounds end at the last real key."""
    ends = np.array(
        [np.flatnonzero(np.diff(row)).max(initial=-1) + 1 for row in bounds.real_before]
    )
    assert (bounds.last <= ends[:, None]).all()


def check_work(bounds, table, query, keys):
    part = table[: bounds.num_samples, query.start : query.stop, keys.start : keys.stop]
    assert bounds.work(query, keys) == part.sum()


def check_hull(bounds, table, query):
    """See that the hull holds all keys that a range of queries sees."""
    seen = table[: bounds.num_samples, query.start : query.stop].any((0, 1))
    inside = np.zeros_like(seen)
    for part in bounds.hull(query):
        inside[part.start : part.stop] = True
    assert (inside | ~seen).all()


def check_tiles(bounds, table, query, keys, size):
    covered = np.zeros(table.shape[1:], int)
    for tile in bounds.tiles(query, keys, size=size):
        rows, columns = slice(*tile.query), slice(*tile.keys)
        part = table[: bounds.num_samples, rows, columns]
        assert part.any(), "an empty tile"
        if tile.kind == "full":
            assert part.all()
        if tile.kind == "causal":
            assert (part == np.tril(np.ones(part.shape[1:], bool))).all()
        covered[rows, columns] += 1
    block = np.zeros_like(covered, dtype=bool)
    block[query.start : query.stop, keys.start : keys.stop] = True
    assert covered.max(initial=0) <= 1
    assert (covered[block & table[: bounds.num_samples].any(0)] == 1).all()
    assert not covered[~block].any()


@settings(max_examples=100)
@given(worked_out(), st.data())
def test_bounds_are_the_mask_written_out(drawn, data):
    """What is visible, its order and end, and of any block the work, the tiles and the hull."""
    bounds, table = drawn
    check_visible(bounds, table)
    check_order(bounds)
    check_ends(bounds)
    query, keys = data.draw(blocks(bounds.length))
    check_work(bounds, table, query, keys)
    check_hull(bounds, table, query)
    check_tiles(bounds, table, query, keys, data.draw(st.sampled_from([1, 2, 4, 8])))


@pytest.mark.parametrize(
    "mask",
    [
        Mask(window=(9, 1)),
        Mask(window=(1, 9)),
        Mask(causal=True, spans=torch.tensor([-1, -1, -1, 0, 0, 0])),
        Mask(causal=True, documents=torch.tensor([0, 0, 0, 0, 1, 1])),
        Mask(causal=True, padding=torch.tensor([0, 0, 1, 0, 0, 0]).bool()),
    ],
    ids=str,
)
def test_tiles_of_all_blocks(mask):
    table = oracle.visible(mask, 1, 6).numpy()
    ranges = [Range(*pair) for pair in itertools.combinations(range(7), 2)]
    for query, keys, size in itertools.product(ranges, ranges, (1, 4)):
        check_tiles(mask.bounds(6), table, query, keys, size)


def test_memory_is_linear_in_the_row():
    documents = torch.arange(1 << 18) // 1000
    bounds = Mask(causal=True, window=4096, documents=documents).bounds(1 << 18)
    assert sum(x.nbytes for x in (bounds.first, bounds.last, bounds.real_before)) < 30 * (1 << 18)


def test_rows_that_are_alike_are_kept_once():
    documents = torch.tensor([[0, 0, 1, 1]] * 8)
    assert Mask(causal=True, documents=documents).bounds(4).num_samples == 1


def test_long_packed_rows_need_few_tiles():
    documents = torch.arange(1 << 16) // 1000
    bounds = Mask(causal=True, documents=documents).bounds(1 << 16)
    row = Range(0, 1 << 16)
    tiles = list(bounds.tiles(row, row, size=128))
    assert {tile.kind for tile in tiles} == {"causal"}
    assert len(tiles) == 66


def test_many_equal_documents_are_cut_quickly():
    documents = torch.arange(1 << 20) // 512
    bounds = Mask(causal=True, documents=documents).bounds(1 << 20)
    row = Range(0, 1 << 20)
    start = time.monotonic()
    assert len(list(bounds.tiles(row, row, size=128))) == 2048
    assert time.monotonic() - start < 5


def test_a_pair_may_come_as_a_list():
    assert Mask(window=[2, 1]).window == (2, 1)


def test_step_fills_in_what_the_mask_leaves_open():
    documents = np.array([[0, 0, 1, 1]])
    open_, closed = Mask(causal=True), Mask(causal=True, documents=False, padding=False)
    padding = np.array([[True, False, False, False]])
    whole = Range(0, 4)
    assert open_.bounds(4, documents=documents, padding=padding).work(whole, whole) == 4
    assert closed.bounds(4, documents=documents, padding=padding).work(whole, whole) == 10


def test_union_of_nothing_is_nothing():
    assert union([]) == ()


def test_bounds_refuse_nothing_that_hull_asks_for_an_empty_range():
    bounds: Bounds = Mask(causal=True).bounds(3)
    assert bounds.hull(Range(2, 2)) == ()
    assert bounds.trim(Range(0, 0), Range(0, 3)) is None


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Mask(window=0), ValueError, r"window=0\): a window holds at least 1 key"),
        (lambda: Mask(window=(-1, 2)), ValueError, r"counts the keys on each side, 0 or more"),
        (lambda: Mask(chunk=0), ValueError, r"chunk=0\): a chunk holds at least 1 token"),
        (lambda: Mask(documents=torch.zeros(3)), TypeError, "must hold integer ids"),
        (lambda: Mask(documents=[0, 1]), TypeError, r"documents=...\) got a list.*or False"),
        (lambda: Mask(padding=True), TypeError, r"padding=...\) got a bool"),
        (lambda: Mask(spans=False), TypeError, r"spans=...\) got a bool. Give a tensor"),
        (lambda: Mask(padding=torch.zeros(3)), TypeError, "attention_mask == 0"),
        (
            lambda: Mask(documents=torch.tensor([0, 0, 1])).bounds(4),
            ValueError,
            r"shape \(3,\), but the full sequence has 4 tokens.*global positions",
        ),
        (
            lambda: Mask(documents=torch.tensor([0, 1, 1, 0])).bounds(4),
            ValueError,
            "Sample 0 of `documents` uses id 0 again at position 3.*must be consecutive",
        ),
    ],
)
def test_bad_masks_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()
