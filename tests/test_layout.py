import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.layout import Layout, build_layout
from lightning_cp.mask import Mask, Range
from lightning_cp.sequence import shard

SIZES = [1, 2, 3, 5, 6, 8, 64]
layouts = st.builds(
    lambda name, cp_size, seq_len: build_layout(name, seq_len=seq_len, cp_size=cp_size),
    st.sampled_from(["contiguous", "zigzag", "auto"]),
    st.sampled_from(SIZES),
    st.integers(1, 500),
)


@given(layouts)
def test_every_position_has_exactly_one_owner(layout):
    owned = torch.cat([layout.positions(rank) for rank in range(layout.cp_size)])
    assert owned.sort().values.tolist() == list(range(layout.padded_len))
    assert layout.padded_len >= layout.seq_len


@given(layouts)
def test_all_ranks_hold_the_same_number_of_tokens(layout):
    assert {len(layout.positions(r)) for r in range(layout.cp_size)} == {layout.local_len}


@given(layouts)
def test_padding_is_less_than_one_piece_per_rank(layout):
    assert layout.padded_len - layout.seq_len < 2 * layout.cp_size


@given(layouts)
def test_shards_without_padding_are_the_beginning_of_those_with_it(layout):
    row = torch.arange(layout.seq_len)
    hiding = build_layout(
        layout.name, seq_len=layout.seq_len, cp_size=layout.cp_size, shows_padding=False
    )
    for rank in range(layout.cp_size):
        real = shard(row, 0, layout=hiding, rank=rank)
        padded = shard(row, 0, layout=layout, rank=rank, fill=-1)
        assert len(real) == hiding.held_len(rank) == int(layout.is_real(rank).sum())
        assert torch.equal(real, padded[: len(real)])
        assert (padded[len(real) :] == -1).all()
        assert hiding.is_real(rank).all()
        assert layout.held_len(rank) == layout.local_len


@given(layouts)
def test_shards_laid_end_to_end_give_the_row_back(layout):
    row = torch.arange(layout.seq_len) * 7
    shards = [shard(row, 0, layout=layout, rank=r, fill=-1) for r in range(layout.cp_size)]
    assert torch.equal(torch.cat(shards)[layout.order], row)


@given(st.sampled_from(SIZES), st.integers(1, 40))
def test_zigzag_balances_a_causal_row(cp_size, chunk):
    layout = build_layout("zigzag", seq_len=2 * cp_size * chunk, cp_size=cp_size)
    work = layout.work(Mask(causal=True).bounds(layout.seq_len))
    total = layout.seq_len * (layout.seq_len + 1) // 2
    assert work == [total // cp_size] * cp_size


@given(st.sampled_from(SIZES), st.integers(1, 40))
def test_contiguous_work_grows_with_the_rank(cp_size, size):
    layout = build_layout("contiguous", seq_len=cp_size * size, cp_size=cp_size)
    work = layout.work(Mask(causal=True).bounds(layout.seq_len))
    assert work == [r * size * size + size * (size + 1) // 2 for r in range(cp_size)]


@settings(max_examples=50)
@given(layouts)
def test_work_of_all_ranks_is_the_work_of_the_row(layout):
    bounds = Mask(causal=True, window=5).bounds(layout.seq_len, padded_len=layout.padded_len)
    row = Range(0, layout.padded_len)
    assert sum(layout.work(bounds)) == bounds.work(row, row)


def test_any_ownership_of_equal_size_is_a_layout():
    owned = ((Range(4, 6), Range(0, 1), Range(7, 8)), (Range(1, 4), Range(6, 7)))
    layout = Layout("by hand", 7, owned)
    assert layout.local_len == 4
    assert layout.positions(0).tolist() == [4, 5, 0, 7]
    assert layout.order.tolist() == [2, 4, 5, 6, 0, 1, 7]


def test_zigzag_of_64_ranks_and_one_token():
    layout = build_layout("zigzag", seq_len=1, cp_size=64)
    assert (layout.padded_len, layout.local_len) == (128, 2)


@pytest.mark.parametrize(
    ("name", "seq_len", "cp_size", "message"),
    [
        ("spiral", 8, 2, "layout='spiral' is unknown. Use one of 'auto', 'contiguous', 'zigzag'"),
        ("zigzag", 0, 2, "rows of length 0: there is nothing to attend to"),
        ("zigzag", 8, 0, "cp_size=0: a row needs at least 1 rank"),
    ],
)
def test_bad_layouts_are_refused(name, seq_len, cp_size, message):
    with pytest.raises(ValueError, match=message):
        build_layout(name, seq_len=seq_len, cp_size=cp_size)
