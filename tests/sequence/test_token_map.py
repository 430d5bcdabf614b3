import pytest
import torch
from hypothesis import given

from lightning_cp.geometry.layout import build_layout
from lightning_cp.sequence import document_starts, split_ranges
from lightning_cp.sequence.token_map import build_token_map, held_ranges
from tests import doors
from tests.sequence.cases import Case, cases


@given(cases())
def test_ranges_hold_the_tokens_of_the_layout_in_its_order(case):
    layout = case.build_layout()
    for rank in range(case.cp_size):
        held = held_ranges(layout, rank)
        positions = [p for part in held for p in range(*part.tokens)]
        assert positions == layout.positions(rank)[: layout.tensor_len(rank)].tolist()
        assert [part.offset for part in held] == [
            sum(part.tokens.size for part in held[:index]) for index in range(len(held))
        ]


def test_the_last_rank_of_zigzag_holds_one_range():
    layout = build_layout("zigzag", seq_len=16, cp_size=4)
    assert [len(held_ranges(layout, rank)) for rank in range(4)] == [2, 2, 2, 1]


@given(cases())
def test_documents_start_where_a_token_sees_nothing_before_it(case):
    layout = case.build_layout()
    for rank in range(case.cp_size):
        found = build_token_map(layout, rank, documents=case.document_ids, padding=case.is_padding)
        for sample in range(found.num_samples):
            for local, position in enumerate(found.positions.tolist()):
                expected = position >= case.length or case.starts(sample, position)
                assert found.starts[sample, local] == expected


def test_a_step_of_one_rank_has_one_range_and_its_documents():
    ids, documents = torch.arange(12).view(2, 6), torch.tensor([[0] * 6, [0, 0, 1, 2, 2, 2]])
    with doors.parallel(None).step({"input_ids": ids, "document_ids": documents}) as local:
        (part,) = split_ranges(local["input_ids"])
        assert torch.equal(part, ids)
        starts = document_starts(torch.zeros(2, 3, 6), dim=-1)
    assert starts.int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0]]
    assert document_starts(ids).int().tolist() == [[1, 0, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        ((2, 6), 0, r"got a tensor of shape \(2, 6\) and the sequence dim 0. The first dim is"),
        ((2, 6), 2, r"and the sequence dim 2"),
        ((2, 5), 1, r"got 5 tokens in dim 1 of shape \(2, 5\), inside a step whose ranks hold 6"),
        ((3, 6), 1, r"got 3 samples, but the batch of the step describes .* of 2. Keep"),
    ],
)
def test_tensors_that_do_not_hold_the_tokens_are_refused(shape, dim, message):
    batch = {"input_ids": torch.zeros(2, 6).long(), "document_ids": torch.arange(12).view(2, 6)}
    with doors.parallel(None).step(batch), pytest.raises(ValueError, match=message):
        split_ranges(torch.zeros(shape), dim=dim)


def test_documents_of_a_case_are_those_of_its_rows():
    case = Case(5, 1, documents=((2, -1, 2),))
    assert case.document_ids.tolist() == [[0, 0, -1, 2, 2]]
