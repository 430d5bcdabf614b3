from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import Layout, build_layout, layout_of_shards
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import Range
from tests.strategies import masks

SIZES = [1, 2, 3, 5, 6, 8, 64]


@st.composite
def laid_out(draw):
    """Draw a layout; ``auto`` and ``balanced`` see any mask, over one or two rows."""
    name = draw(st.sampled_from(["contiguous", "zigzag", "auto", "balanced"]))
    cp_size, seq_len = draw(st.sampled_from(SIZES)), draw(st.integers(1, 500))
    mask = Mask(causal=True)
    if name in ("auto", "balanced"):
        seq_len = min(seq_len, 200)
        mask = draw(masks(draw(st.integers(1, 2)), seq_len))
    return build_layout(name, seq_len=seq_len, cp_size=cp_size, bounds=lambda: mask.bounds(seq_len))


layouts = laid_out()


def check_owners(layout):
    owned = torch.cat([layout.positions(rank) for rank in range(layout.cp_size)])
    assert owned.sort().values.tolist() == list(range(layout.padded_len))
    assert 0 <= layout.padded_len - layout.seq_len < 2 * layout.cp_size
    assert {len(layout.positions(r)) for r in range(layout.cp_size)} == {layout.local_len}


def check_shards(layout):
    """See that shards end to end are the row, and without padding the beginning of those with."""
    row = torch.arange(layout.seq_len) * 7
    hiding = replace(layout, shows_padding=False)
    shards = []
    for rank in range(layout.cp_size):
        real = shard(row, 0, layout=hiding, rank=rank)
        padded = shard(row, 0, layout=layout, rank=rank, fill=-1)
        assert len(real) == hiding.tensor_len(rank) == int(layout.is_real(rank).sum())
        assert torch.equal(real, padded[: len(real)])
        assert (padded[len(real) :] == -1).all()
        assert hiding.is_real(rank).all()
        assert layout.tensor_len(rank) == layout.local_len
        shards.append(padded)
    assert torch.equal(torch.cat(shards)[layout.order], row)


@given(layouts)
def test_every_position_has_one_owner_and_shards_are_the_row(layout):
    check_owners(layout)
    check_shards(layout)
    # The work of all ranks is the work of the row.
    bounds = Mask(causal=True, window=5).bounds(layout.seq_len, padded_len=layout.padded_len)
    row = Range(0, layout.padded_len)
    assert sum(layout.work(bounds)) == bounds.work(row, row)


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


@given(st.sampled_from(["contiguous", "zigzag"]), st.sampled_from(SIZES), st.integers(1, 40))
def test_a_layout_is_known_by_what_its_ranks_hold(name, cp_size, seq_len):
    layout = build_layout(name, seq_len=seq_len, cp_size=cp_size, shows_padding=False)
    lengths = [layout.tensor_len(rank) for rank in range(cp_size)]
    assert layout_of_shards(name, lengths) == layout
    if lengths != lengths[::-1]:
        with pytest.raises(ValueError, match=f"but layout='{name}' of {seq_len} tokens gives"):
            layout_of_shards(name, lengths[::-1])


def must_not_be_called():
    raise AssertionError("the mask was worked out for nothing")


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_layouts_that_do_not_look_at_the_mask_do_not_pay_for_it(name):
    def build():
        return build_layout(name, seq_len=640, cp_size=4, bounds=must_not_be_called)

    assert build().work_imbalance is None
    assert build() is build()


def test_one_rank_has_nothing_to_choose():
    layout = build_layout("auto", seq_len=640, cp_size=1, bounds=must_not_be_called)
    assert layout.owned == ((Range(0, 640),),)


def documents_of(*sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def chosen(mask, cp_size, seq_len=4096):
    bounds = mask.bounds(seq_len)
    layout = build_layout("auto", seq_len=seq_len, cp_size=cp_size, bounds=lambda: bounds)
    work = layout.work(mask.bounds(seq_len, padded_len=layout.padded_len))
    return layout, max(work) * cp_size / max(sum(work), 1)


def test_auto_is_zigzag_for_rows_that_are_causal_and_nothing_else():
    assert build_layout("auto", seq_len=4096, cp_size=4).name == "zigzag"


FLAT = {
    "bidirectional": Mask(),
    "small window": Mask(causal=True, window=256),
    "small documents": Mask(causal=True, documents=documents_of(*[64] * 64)),
    "nothing to see": Mask(causal=True, documents=torch.full((4096,), -1)),
}
EVEN = {
    "causal": Mask(causal=True),
    "one long document": Mask(causal=True, documents=documents_of(4000, 96)),
}
UNEVEN = {
    "large window": Mask(causal=True, window=2048),
    "chunks": Mask(causal=True, chunk=1500),
    "documents": Mask(causal=True, documents=documents_of(3000, 1000, 96)),
    "left padding": Mask(causal=True, padding=torch.arange(4096) < 1500),
    "bidirectional documents": Mask(documents=documents_of(3000, 1096)),
}


@pytest.mark.parametrize("name", FLAT)
def test_auto_is_in_one_piece_where_that_is_even_enough(name):
    layout, imbalance = chosen(FLAT[name], cp_size=4)
    assert layout.name == "contiguous"
    assert imbalance <= 1.05


@pytest.mark.parametrize(("cp_size", "seq_len"), [(24, 253), (32, 93), (64, 124)])
def test_auto_leaves_no_rank_with_padding_alone(cp_size, seq_len):
    layout, _ = chosen(Mask(causal=True, window=4), cp_size=cp_size, seq_len=seq_len)
    assert min(int(layout.is_real(rank).sum()) for rank in range(cp_size)) > 0


@pytest.mark.parametrize("name", EVEN)
def test_auto_is_zigzag_where_that_is_even_enough(name):
    layout, imbalance = chosen(EVEN[name], cp_size=4)
    assert layout.name == "zigzag"
    assert imbalance <= 1.05


@pytest.mark.parametrize("name", UNEVEN)
def test_auto_is_balanced_elsewhere(name):
    layout, imbalance = chosen(UNEVEN[name], cp_size=4)
    assert layout.name == "balanced"
    assert layout.work_imbalance == pytest.approx(imbalance)
    assert imbalance <= 1.02


def test_auto_keeps_zigzag_where_balancing_makes_nothing_better():
    documents = torch.full((16,), -1)
    documents[0] = 0  # all there is to do, for one rank
    assert chosen(Mask(documents=documents), cp_size=2, seq_len=16)[0].name == "zigzag"


def test_one_ownership_serves_rows_with_other_documents():
    documents = torch.stack([documents_of(3000, 1000, 96), documents_of(100, 3900, 96)])
    layout, imbalance = chosen(Mask(causal=True, documents=documents), cp_size=4)
    assert (layout.name, imbalance) == ("balanced", pytest.approx(1.0, abs=0.01))
    for row in documents:  # which is not the one that a row by itself would get
        alone, _ = chosen(Mask(causal=True, documents=row), cp_size=4)
        assert alone.owned != layout.owned


def test_balanced_is_zigzag_for_a_causal_row():
    zigzag, balanced = (
        build_layout(name, seq_len=4096, cp_size=4) for name in ("zigzag", "balanced")
    )
    assert [list(balanced.positions(r)) for r in range(4)] == [
        list(zigzag.positions(r)) for r in range(4)
    ]


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
        ("spiral", 8, 2, "layout='spiral' is unknown. Use one of 'auto', 'balanced', 'contiguous'"),
        ("zigzag", 0, 2, "sequences of length 0: there is nothing to attend to"),
        ("zigzag", 8, 0, "cp_size=0: a sequence needs at least 1 rank"),
    ],
)
def test_bad_layouts_are_refused(name, seq_len, cp_size, message):
    with pytest.raises(ValueError, match=message):
        build_layout(name, seq_len=seq_len, cp_size=cp_size)
