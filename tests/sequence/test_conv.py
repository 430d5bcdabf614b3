import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_cp.sequence import causal_conv1d
from tests import doors
from tests.oracle import errors
from tests.ranks import run_threads
from tests.sequence.cases import LAYOUTS, Case, cases, convolve

CHANNELS = 3


def draw(case, width, dtype=torch.float64):
    """Return x, weight, bias and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.length * 10 + width)
    shape = (case.batch, CHANNELS, case.length)
    shapes = (shape, (CHANNELS, width), (CHANNELS,), shape)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in shapes
    ]


def gradients(out, dout, x, weight, bias):
    grads = torch.autograd.grad(out, [x, weight, bias], dout)
    return dict(zip(("out", "dx", "dweight", "dbias"), (out.detach(), *grads), strict=True))


def convolve_on_threads(threads, case, width, dtype=torch.float64):
    """Return out, dx of each rank, and dweight, dbias summed over the ranks."""
    full, weight, bias, dout = draw(case, width, dtype)

    def work(transport):
        threads.enter(case.build_step(transport))
        x = case.cut(full, 2, transport.rank).requires_grad_()
        leaves = [x, *(leaf.clone().requires_grad_() for leaf in (weight, bias))]
        out = causal_conv1d(*leaves)
        return gradients(out, case.cut(dout, 2, transport.rank), *leaves)

    return run_threads(case.cp_size, work)


def check(case, found, exact, tolerance=1e-9):
    layout = case.build_layout()
    named = {name: sum(part[name] for part in found) for name in ("dweight", "dbias")}
    for name in ("out", "dx"):
        ranks = [part[name] for part in found]
        if not case.shows_padding:
            ranks = [
                nn.functional.pad(part, (0, layout.local_len - part.shape[2])) for part in ranks
            ]
        named[name] = torch.cat(ranks, 2).index_select(2, layout.order)
    worst = errors(named, exact)
    assert max(worst.values()) <= tolerance, (case, worst)


@given(case=cases(), width=st.integers(1, 6))
def test_convolution_and_gradients_are_those_of_full_sequences(threads, case, width):
    x, weight, bias, dout = draw(case, width)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    exact = gradients(convolve(case, *leaves), dout, *leaves)
    check(case, convolve_on_threads(threads, case, width), exact)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_that_of_one_device(threads, layout):
    case = Case(37, 3, layout, documents=((9, 1, 1, 26), (37,)))
    x, weight, bias, dout = draw(case, 4, torch.bfloat16)
    leaves = [leaf.double().requires_grad_() for leaf in (x, weight, bias)]
    exact = gradients(convolve(case, *leaves), dout.double(), *leaves)
    found = convolve_on_threads(threads, case, 4, torch.bfloat16)
    assert found[0]["out"].dtype == torch.bfloat16
    check(case, found, exact, tolerance=8e-3)


def test_outside_a_step_it_is_the_layer_of_torch():
    layer = nn.Conv1d(4, 4, 3, groups=4, padding=2)
    x = torch.randn(2, 4, 7)
    out = causal_conv1d(x, layer.weight.squeeze(1), layer.bias)
    torch.testing.assert_close(out, layer(x)[..., :7])
    with doors.parallel(None).step({"input_ids": torch.arange(14).view(2, 7)}):
        inside = causal_conv1d(x, layer.weight.squeeze(1), layer.bias)
    torch.testing.assert_close(inside, out)


def test_without_a_bias():
    case = Case(5, 1, documents=((2, 3),))
    x, weight, _, _ = draw(case, 3)
    batch = {
        "input_ids": torch.arange(10).view(2, 5),
        "document_ids": torch.from_numpy(case.document_ids).expand(2, -1),
    }
    with doors.parallel(None).step(batch):
        out = causal_conv1d(x, weight)
    torch.testing.assert_close(out, convolve(case, x, weight, None))


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3), (3, 4)],
        [(2, 3, 5), (3, 1, 4)],
        [(2, 5, 3), (3, 4)],
        [(2, 3, 5), (3, 0)],
        [(2, 3, 5), (3, 4), (4,)],
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes):
    with pytest.raises(ValueError, match=r"needs x \[batch, channels, tokens\].* it got x \("):
        causal_conv1d(*map(torch.zeros, shapes))
