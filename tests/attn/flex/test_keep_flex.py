"""A kept graph of FlexAttention holds its results, and none of its inputs."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_cp.attn.flex.keep_flex import KeptGraph
from lightning_cp.attn.flex.kernel import FlexFunctions, attend_plain


def compute(q, k, v, sinks):
    functions = FlexFunctions(lambda b, h, i, j: i >= j)
    return attend_plain(q, k, v, functions, scale=0.3, sinks=sinks).out


def draw(*needs_grad):
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, 21, 16), (2, 2, 21, 16), (2, 2, 21, 8), (4,)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(needs)
        for shape, needs in zip(shapes, needs_grad, strict=True)
    ]


@pytest.mark.parametrize(
    "needs_grad", [(True,) * 4, (True, False, False, False), (False, True, True, False)]
)
def test_gradients_come_from_inputs_that_are_given_again(needs_grad):
    inputs = draw(*needs_grad)
    graph = KeptGraph(compute)
    out = graph.run(inputs)
    graph.out = out.clone()  # as a recomputation does
    held = [StorageWeakRef(x.untyped_storage()) for x in inputs[:3]]
    del inputs
    gc.collect()
    assert all(storage.expired() for storage in held)

    again = draw(*needs_grad)
    again[0].data = again[0].detach().transpose(1, 2).contiguous().transpose(1, 2)
    exact = compute(*again)
    torch.testing.assert_close(out, exact, rtol=0, atol=0)
    dout = torch.randn_like(exact)
    exact.backward(dout)
    for _ in range(2):  # the second time it is computed again
        found = graph.gradients(again, needs_grad, dout)
        for gradient, x in zip(found, again, strict=True):
            assert (gradient is None) == (x.grad is None)
            if x.grad is not None:
                assert torch.equal(gradient, x.grad)


def test_an_output_that_was_changed_in_place_is_computed_again():
    inputs = draw(True, True, True, True)
    graph = KeptGraph(compute)
    graph.run(inputs).zero_()  # then a recomputation gives it no output
    exact = compute(*inputs)
    exact.sum().backward()
    found = graph.gradients(inputs, (True,) * 4, torch.ones_like(exact))
    assert all(torch.equal(gradient, x.grad) for gradient, x in zip(found, inputs, strict=True))


def test_a_part_of_an_input_is_no_copy_of_it():
    x = torch.randn(3, 5, 8, 4, requires_grad=True)
    graph = KeptGraph(lambda x, *_: (x[1:, :, ::2].transpose(0, 1) ** 3).sum((2, 3)))
    graph.out = graph.run([x, None, None, None])
    storage = StorageWeakRef(x.untyped_storage())
    values = x.detach().clone()
    del x
    gc.collect()
    assert storage.expired()
    wide = torch.zeros(3, 5, 8, 4)
    wide.copy_(values)
    (gradient, *_) = graph.gradients(
        [wide, None, None, None], (True,) + (False,) * 3, torch.ones(5, 2)
    )
    expected = torch.zeros_like(values)
    expected[1:, :, ::2] = 3 * values[1:, :, ::2] ** 2
    torch.testing.assert_close(gradient, expected)
