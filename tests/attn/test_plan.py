import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.attn.plan import build_plan, resolve_algorithm
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import Range
from tests import doors
from tests.strategies import masks


def plans(algorithm, mask, *, seq_len, cp_size, layout="zigzag", num_kv_heads=2, **options):
    built = build_layout(
        layout, seq_len=seq_len, cp_size=cp_size, bounds=lambda: mask.bounds(seq_len)
    )
    bounds = mask.bounds(seq_len, padded_len=built.padded_len)
    return [
        build_plan(
            algorithm, layout=built, bounds=bounds, rank=r, num_kv_heads=num_kv_heads, **options
        )
        for r in range(cp_size)
    ]


@st.composite
def random_plans(draw):
    batch, seq_len = draw(st.integers(1, 2)), draw(st.integers(1, 40))
    mask = draw(masks(batch, seq_len))
    return plans(
        draw(st.sampled_from(["gather", "ring"])),
        mask,
        seq_len=seq_len,
        cp_size=draw(st.sampled_from([1, 2, 3, 4, 6])),
        layout=draw(st.sampled_from(["zigzag", "contiguous", "balanced"])),
        num_groups=draw(st.integers(1, 2)),
        sorted_keys=draw(st.booleans()),
    )


def check_messages(drawn):
    """See that what one rank sends is what another expects."""
    assert len({len(plan.stages) for plan in drawn}) == 1, "stages pair up"
    for stages in zip(*(plan.stages for plan in drawn), strict=True):
        sent = {(r, p.peer): p.runs for r, stage in enumerate(stages) for p in stage.sends}
        due = {(p.peer, r): p.runs for r, stage in enumerate(stages) for p in stage.receives}
        assert sent == due
        assert len({stage.collective for stage in stages}) == 1


def check_pairs(drawn):
    for plan in drawn:
        queries = plan.layout.ranges(plan.rank)
        heads: dict[Range, int] = {}
        bounds = None
        for stage in plan.stages:
            if stage.block is not None:
                bounds = stage.block.bounds
                heads[stage.heads] = heads.get(stage.heads, 0) + stage.block.visible_pairs
        if bounds is not None:
            row = Range(0, bounds.length)
            expected = sum(bounds.work(query, row) for query in queries)
            assert set(heads.values()) == {expected}


def check_tiles(drawn, size):
    """See that fused tiles cover what the tiles cover."""
    for block in (stage.block for plan in drawn for stage in plan.stages if stage.block):
        width = max(piece.offset + piece.positions.size for piece in block.keys)
        shape = (block.bounds.num_samples, block.q_slice.stop - block.q_slice.start, width)
        kept = []
        for fused in (False, True):
            seen = torch.zeros(shape, dtype=torch.int64)
            for tile in block.tiles(size, fused=fused):
                place = seen[tile.batch, tile.q_slice, tile.k_slice]
                square = torch.ones(place.shape[1:], dtype=torch.int64)
                if tile.kind == "masked":
                    place += block.bounds.visible(tile.query, tile.keys)[tile.batch]
                else:
                    place += square.tril() if tile.kind == "causal" else square
            kept.append(seen)
        assert torch.equal(*kept)
        assert kept[0].max() <= 1


@settings(max_examples=100)
@given(random_plans(), st.sampled_from([1, 4, 64]))
def test_blocks_hold_all_visible_pairs_once(drawn, size):
    check_messages(drawn)
    check_pairs(drawn)
    check_tiles(drawn, size)


def tokens_sent(drawn):
    return [sum(stage.num_tokens_sent for stage in plan.stages) for plan in drawn]


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_a_window_moves_about_as_many_keys_as_it_is_wide(cp_size):
    window, mask = 16, Mask(causal=True, window=16)
    sent = tokens_sent(plans("ring", mask, seq_len=1024, cp_size=cp_size, layout="contiguous"))
    assert sent == [window - 1] * (cp_size - 1) + [0]
    zigzag = tokens_sent(plans("ring", mask, seq_len=1024, cp_size=cp_size))
    assert max(zigzag) <= 2 * (window - 1)
    gather = plans("gather", mask, seq_len=1024, cp_size=cp_size, num_kv_heads=1)
    assert not any(stage.collective for plan in gather for stage in plan.stages)
    assert tokens_sent(gather) == zigzag


def test_a_window_needs_two_stages_however_many_ranks_there_are():
    drawn = plans(
        "ring", Mask(causal=True, window=16), seq_len=1024, cp_size=8, layout="contiguous"
    )
    assert {len(plan.stages) for plan in drawn} == {2}


@pytest.mark.parametrize("algorithm", ["gather", "ring"])
def test_documents_that_end_inside_a_shard_move_nothing(algorithm):
    mask = Mask(causal=True, documents=torch.arange(64) // 16)
    drawn = plans(algorithm, mask, seq_len=64, cp_size=4, layout="contiguous")
    assert tokens_sent(drawn) == [0] * 4
    assert {len(plan.stages) for plan in drawn} == {1}


def test_a_document_over_one_border_moves_only_its_own_keys():
    documents = (torch.arange(64) >= 10).long() + (torch.arange(64) >= 22).long()
    drawn = plans(
        "ring", Mask(causal=True, documents=documents), seq_len=64, cp_size=4, layout="contiguous"
    )
    assert tokens_sent(drawn) == [6, 20, 16, 0]  # 10..15; 22..31 twice; 32..47 once


def test_causal_zigzag_does_the_same_work_in_every_stage():
    drawn = plans("ring", Mask(causal=True), seq_len=64, cp_size=4)
    for plan in drawn:
        first, *others = [stage.block.visible_pairs for stage in plan.stages]
        assert others == [128] * 3
        assert first == 128 + 8  # the two diagonals


def test_causal_zigzag_computes_half_a_shard_where_the_mask_needs_half():
    drawn = plans("ring", Mask(causal=True), seq_len=64, cp_size=4)
    stage = drawn[0].stages[1]  # rank 0 sees of a later rank only what its tail sees
    assert (stage.block.q_slice.start, stage.block.q_slice.stop) == (8, 16)
    assert drawn[3].stages[1].buffer_len == 8  # rank 3 needs only the head of an earlier one


def test_dense_gather_computes_its_own_tokens_while_a_group_of_heads_is_gathered():
    drawn = plans("gather", Mask(causal=True), seq_len=64, cp_size=4, num_kv_heads=8, num_groups=2)
    for plan in drawn:
        first, second = Range(0, 4), Range(4, 8)
        assert [(stage.heads, stage.collective) for stage in plan.stages] == [
            (first, False),
            (first, True),
            (second, False),
            (second, True),
        ]
        # In backward, while the gradients of the others' keys travel home.
        assert [stage.collective for stage in plan.backward_stages] == [True, False, True, False]


def test_a_rings_own_tokens_hide_its_first_keys_and_its_last_gradients():
    drawn = plans("ring", Mask(causal=True), seq_len=64, cp_size=3, num_kv_heads=6, num_groups=3)
    own_first, own_last = [False, True, True], [True, True, False]
    for plan in drawn:
        assert [stage.has_traffic for stage in plan.stages] == 3 * own_first
        assert [stage.has_traffic for stage in plan.backward_stages] == 2 * own_first + own_last
        assert [stage.heads.start for stage in plan.backward_stages] == [0] * 3 + [2] * 3 + [4] * 3
    for plan in plans("ring", Mask(causal=True), seq_len=64, cp_size=3):  # of one group no second
        assert [stage.has_traffic for stage in plan.backward_stages] == own_first


@pytest.mark.parametrize("rank", range(4))
def test_gather_makes_one_tile_of_what_a_chunk_sees_before_itself(rank):
    plan = plans("gather", Mask(causal=True), seq_len=1024, cp_size=4)[rank]
    own, others = (
        [(tile.kind, tile.q_slice.start) for tile in stage.block.tiles(128, fused=True)]
        for stage in plan.stages
    )
    assert sorted(own) == [("causal", 0), ("causal", 128)]
    assert sorted(others) == [("full", start) for start in ([0, 128] if rank else [128])]


@pytest.mark.parametrize("rank", range(4))
def test_ring_computes_each_stage_of_a_causal_row_at_once(rank):
    plan = plans("ring", Mask(causal=True), seq_len=1024, cp_size=4)[rank]
    kinds = [[tile.kind for tile in s.block.tiles(128, fused=True)] for s in plan.stages]
    assert kinds == [["causal"], ["full"], ["full"], ["full"]]


def test_rows_that_differ_are_cut_each_by_itself():
    lengths = torch.tensor([[4096], [256]])
    padding = torch.arange(4096) >= lengths
    (plan,) = plans("gather", Mask(causal=True, padding=padding), seq_len=4096, cp_size=1)
    tiles = plan.stages[0].block.tiles(128)
    assert [tile.kind for tile in tiles].count("masked") == 0
    assert len(tiles) < 8


def test_one_rank_moves_nothing_and_has_one_stage():
    for algorithm in ("gather", "ring"):
        (plan,) = plans(algorithm, Mask(causal=True), seq_len=10, cp_size=1)
        (stage,) = plan.stages
        assert stage.is_local
        assert not stage.sends


def test_auto_is_gather():
    assert resolve_algorithm("auto") == "gather"


def test_unknown_algorithm_is_refused():
    with pytest.raises(
        ValueError, match="algorithm='star' is unknown. Use one of 'auto', 'gather'"
    ):
        doors.config(algorithm="star")
