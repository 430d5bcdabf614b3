from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.data.shard import shard, shift_labels, unshard
from lightning_cp.geometry.layout import build_layout
from tests import doors
from tests.ranks import run_threads

LAYOUTS = ["zigzag", "contiguous", "balanced"]


@given(
    st.integers(1, 30),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from(LAYOUTS),
    st.booleans(),
)
def test_shards_put_back_are_the_row(length, cp_size, name, shown):
    layout = build_layout(name, seq_len=length, cp_size=cp_size, shows_padding=shown)
    x = torch.arange(2.0 * length * 3).view(2, length, 3)

    def work(transport):
        part = shard(x, 1, layout=layout, rank=transport.rank, fill=9)
        return unshard(part, 1, layout=layout, transport=transport)

    assert all(torch.equal(whole, x) for whole in run_threads(cp_size, work))


def test_gradients_of_a_shard_reach_the_whole_tensor_once():
    layout = build_layout("zigzag", seq_len=7, cp_size=2)
    x = torch.randn(7, requires_grad=True)
    total = sum(shard(x, 0, layout=layout, rank=rank).sum() for rank in range(2))
    total.backward()
    assert torch.equal(x.grad, torch.ones(7))


def test_gradients_pass_through_rows_put_together_from_shards_of_different_lengths():
    layout = build_layout("zigzag", seq_len=7, cp_size=2, shows_padding=False)
    weights = torch.arange(1.0, 8)

    def work(transport):
        part = shard(torch.zeros(7), 0, layout=layout, rank=transport.rank).requires_grad_()
        whole = unshard(part, 0, layout=layout, transport=transport)
        (whole * weights).sum().backward()
        return part.grad.tolist()

    assert run_threads(2, work) == [[2, 4, 14], [6, 8, 10, 12]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_ranks_are_added_in_float32_or_wider(dtype):
    layout = build_layout("contiguous", seq_len=6, cp_size=3)

    def work(transport):
        part = torch.zeros(2, dtype=dtype, requires_grad=True)
        unshard(part, 0, layout=layout, transport=transport).sum().backward()
        assert part.grad.dtype == dtype
        return transport.dtypes_reduced

    wide = torch.promote_types(dtype, torch.float32)
    assert run_threads(3, work) == [[wide]] * 3


def test_what_lies_beyond_the_row_is_left_out():
    layout = build_layout("zigzag", seq_len=7, cp_size=2, shows_padding=False)
    table = torch.arange(20)
    assert shard(table, 0, layout=layout, rank=0).tolist() == [0, 1, 6]
    assert shard(table, 0, layout=layout, rank=1).tolist() == [2, 3, 4, 5]


def test_integers_are_put_back_without_gradients():
    layout = build_layout("contiguous", seq_len=5, cp_size=2)

    def work(transport):
        part = shard(torch.arange(5), -1, layout=layout, rank=transport.rank, fill=-100)
        return unshard(part, -1, layout=layout, transport=transport).tolist()

    assert run_threads(2, work) == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("labels", "documents", "shifted"),
    [
        ([[1, 2, 3]], None, [[2, 3, -100]]),
        ([[1]], None, [[-100]]),
        ([[1, -100, 3]], None, [[-100, 3, -100]]),
        ([[1, 2, 3, 4]], [[0, 1, 1, -1]], [[-100, 3, -100, -100]]),
        ([[1, 2, 3, 4]], [[-1, -1, 0, -1]], [[-100, -100, -100, -100]]),
        ([[1, 2], [3, 4]], [[0, 0]], [[2, -100], [4, -100]]),
    ],
)
def test_labels_are_those_of_the_next_token_of_the_document(labels, documents, shifted):
    ids = None if documents is None else torch.tensor(documents)
    assert shift_labels(torch.tensor(labels), ids).tolist() == shifted


class Output(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


def test_outputs_keep_their_types_when_they_are_put_together():
    cp = doors.parallel(None, sequence_dims={"across": 2, "kept": None})
    with cp.step({"input_ids": torch.arange(6).view(2, 3)}) as local:
        x = local["input_ids"]
        whole = cp.unshard_all(
            {
                "named": Output(x, x.sum()),
                "list": [x, None, "text"],
                "pair": (x, 1),
                "across": x[:, None],
                "kept": x.T,
            }
        )
    assert type(whole["named"]) is Output
    assert torch.equal(whole["named"].logits, x)
    assert whole["list"][1:] == [None, "text"]
    assert type(whole["pair"]) is tuple
    assert whole["kept"].shape == (3, 2)
