import itertools

import pytest
import torch

from lightning_cp.attn.accumulators import (
    NEVER,
    GradAccumulator,
    OutputAccumulator,
    TensorRegion,
    add_sinks_,
    merge_,
    sink_gradient,
    with_sinks,
)
from lightning_cp.geometry.ranges import Range
from lightning_cp.step.precision import accumulation_dtype


def softmax_parts(scores, values):
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    return weights @ values, lse


def test_merged_parts_are_the_whole():
    scores = torch.randn(2, 3, 5, 8, dtype=torch.float64) * 4
    values = torch.randn(2, 3, 8, 4, dtype=torch.float64)
    out, lse = softmax_parts(scores[..., :3], values[:, :, :3])
    for part in (slice(3, 4), slice(4, 8)):
        merge_(out, lse, *softmax_parts(scores[..., part], values[:, :, part]))
    expected_out, expected_lse = softmax_parts(scores, values)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_rows_that_saw_nothing_stay_empty_and_finite():
    out, lse = torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), NEVER)
    block_out = torch.tensor([[[[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]]])
    block_lse = torch.tensor([[[0.5, NEVER, 700.0]]])
    merge_(out, lse, block_out, block_lse)
    assert torch.equal(out, block_out)
    assert torch.equal(lse, block_lse)
    merge_(out, lse, torch.zeros_like(out), torch.full_like(lse, NEVER))
    assert torch.equal(out, block_out)
    assert torch.equal(lse, block_lse)


def test_far_apart_parts_do_not_overflow():
    out, lse = torch.ones(1, 1, 1, 1), torch.tensor([[[1e4]]])
    merge_(out, lse, torch.full((1, 1, 1, 1), 5.0), torch.tensor([[[-1e4]]]))
    assert out.item() == 1.0
    assert lse.item() == 1e4


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_kept_in_float32_and_float64_is_never_lowered(dtype, kept):
    assert accumulation_dtype(dtype) == kept


def test_a_sink_is_a_key_of_value_zero():
    scores = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    values = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(2, 3, 5, 1)], -1)
    expected = torch.softmax(with_sink, -1)[..., :-1] @ values
    dout = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, sinks, dout)
    out, lse = softmax_parts(scores, values)
    add_sinks_(out, lse, sinks)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, torch.logsumexp(with_sink, -1).detach())
    torch.testing.assert_close(sink_gradient(dout, out, lse, sinks.detach()), expected_grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_take_the_same_share_in_place_and_out_of_place(dtype):
    out, lse, sinks = torch.randn(2, 3, 5, 6).to(dtype), torch.randn(2, 3, 5), torch.randn(3)
    kept, kept_lse = out.clone(), lse.clone()
    shared = with_sinks(out, lse, sinks)
    assert torch.equal(out, kept)
    assert torch.equal(lse, kept_lse)
    add_sinks_(out, lse, sinks)
    torch.testing.assert_close(shared, out)


def test_a_row_that_sees_only_its_sink_is_zero():
    out, lse = torch.zeros(1, 2, 1, 1), torch.full((1, 2, 1), NEVER)
    add_sinks_(out, lse, torch.tensor([0.5, NEVER]))
    assert torch.equal(out, torch.zeros(1, 2, 1, 1))
    assert lse.flatten().tolist() == [0.5, NEVER]


def place(start, stop):
    return TensorRegion(Range(0, 1), Range(start, stop))


@pytest.mark.parametrize("expects_more", [False, True])
@pytest.mark.parametrize(
    "cuts",
    [
        [[(0, 6)]],
        [[(0, 6)], [(0, 6)]],
        [[(0, 6)]] * 4,
        [[(0, 2), (2, 6)], [(2, 6)]],
        [[(0, 2), (4, 6)], [(1, 5)], [(0, 6)]],
        [[(3, 5)], [(3, 5)]],
        [],
    ],
    ids=str,
)
def test_parts_that_cover_anything_add_up(cuts, expects_more):
    q = torch.zeros(1, 2, 6, 3, dtype=torch.float64)
    scores = torch.randn(1, 2, 6, 4 * max(1, len(cuts)), dtype=torch.float64)
    values = torch.randn(1, 2, scores.shape[-1], 3, dtype=torch.float64)
    hidden = torch.full_like(scores, NEVER)
    softmax, total = (
        OutputAccumulator(q, 3, expects_more=expects_more),
        GradAccumulator(q, expects_more=expects_more),
    )
    expected = torch.zeros_like(q)
    for number, parts in enumerate(cuts):
        keys = slice(4 * number, 4 * number + 4)
        for start, stop in parts:
            hidden[:, :, start:stop, keys] = scores[:, :, start:stop, keys]
            part = softmax_parts(scores[:, :, start:stop, keys], values[:, :, keys])
            softmax.add(place(start, stop), part)
            total.add(place(start, stop), part[0])
            expected[:, :, start:stop] += part[0]
    out, lse = softmax_parts(hidden, values)
    written = torch.empty_like(out), torch.empty_like(lse)
    softmax.write(written)
    for found in (written, softmax.result()):
        torch.testing.assert_close(found, (out, lse))
    torch.testing.assert_close(total.result(), expected)


@pytest.mark.parametrize("kinds", [*itertools.product([torch.bfloat16, torch.float32], repeat=3)])
@pytest.mark.parametrize("expects_more", [False, True])
def test_sums_are_rounded_once(kinds, expects_more):
    """Each part is lost in bfloat16 if it is added alone, and not if all are added in float32."""
    parts = [torch.full((1, 1, 1, 1), x) for x in (1.0, 2**-9, 2**-9, 2**-8)]
    kinds = (*kinds, torch.float32)
    total = GradAccumulator(
        torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16), expects_more=expects_more
    )
    for part, kind in zip(parts, kinds, strict=True):
        total.add(place(0, 1), part.to(kind))
    assert total.result().dtype == torch.bfloat16
    assert total.result().item() == 1 + 2**-7
