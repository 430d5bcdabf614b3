"""Our own kernels against the same in plain torch."""

import pytest
import torch

from lightning_cp.attn import accumulators, triton_ops
from lightning_cp.attn.accumulators import NEVER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw(length, dim, dtype, *, kind):
    """Return [2, 3, length, dim]: in one piece, token by token, or cut out of something longer."""
    if kind == "tokens":
        x = torch.randn(2, length, 3, dim, device="cuda").transpose(1, 2)
    else:
        x = torch.randn(2, 3, length + 9, dim, device="cuda")[:, :, 5 : 5 + length]
    x = x.to(dtype)
    return x.contiguous() if kind == "whole" else x


def sums(length):
    return torch.randn(2, 3, length + 4, device="cuda")[:, :, 2 : 2 + length] * 3


@pytest.mark.parametrize("dim", [64, 128, 40, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_parts(dtype, dim, monkeypatch):
    for length in (77, 1, 300):  # the second and third start what the first has compiled
        a, b = (draw(length, dim, dtype, kind=kind) for kind in ("tokens", "cut"))
        a_lse, b_lse = sums(length), sums(length)
        a_lse[0, 0, : length // 2], b_lse[:, 1], b_lse[1, 2, -1] = NEVER, NEVER, 700.0
        a_lse[1, 1] = NEVER
        a[1, 1], b[:, 1] = 0, 0
        assert triton_ops.can_take(a, b)
        for into in (dtype, torch.float32):
            found = draw(length, dim, into, kind="whole"), torch.empty_like(a_lse)
            accumulators.merge_into(*found, (a, a_lse), (b, b_lse))
            same = torch.empty_like(found[0]), torch.empty_like(a_lse)
            with monkeypatch.context() as patch:
                patch.setattr(triton_ops, "can_take", lambda *_: False)
                accumulators.merge_into(*same, (a, a_lse), (b, b_lse))
            torch.testing.assert_close(found[0], same[0])
            torch.testing.assert_close(found[1], same[1])
        # In place, into an accumulator.
        total, lse = a.float(), a_lse.clone()
        accumulators.merge_(total, lse, b, b_lse)
        torch.testing.assert_close(total, found[0])
        torch.testing.assert_close(lse, found[1])


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("dtype", "sinks_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_sinks(dtype, sinks_dtype, dim):
    for length in (77, 1, 300):
        given, lse = draw(length, dim, dtype, kind="tokens"), sums(length)
        lse[0, :, : length // 2], lse[1, 2, -1] = NEVER, 700.0
        given[0, :, : length // 2] = 0
        for logits in ([0.5, NEVER, -15.0], [6e4, -6e4, 2.0]):
            sinks = torch.tensor(logits, device="cuda", dtype=sinks_dtype)
            found = given.clone(), lse.clone()
            accumulators.add_sinks_(*found, sinks)
            torch.testing.assert_close(found[0], accumulators.with_sinks(given, lse, sinks))
            expected = torch.logaddexp(lse, sinks.float()[:, None].expand_as(lse))
            torch.testing.assert_close(found[1], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_sinks(dtype):
    for length in (77, 1, 300):
        out, dout = (draw(length, 64, dtype, kind=kind) for kind in ("tokens", "cut"))
        lse, sinks = sums(length), torch.tensor([0.5, -15.0, 6.0], device="cuda")
        accumulators.add_sinks_(out, lse, sinks)
        found = accumulators.sink_gradient(dout, out, lse, sinks)
        exact = accumulators.sink_gradient(*(x.double() for x in (dout, out, lse, sinks)))
        torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=1e-4)


def test_sinks_elsewhere_are_refused():
    out, lse = torch.randn(1, 2, 4, 16, device="cuda"), torch.randn(1, 2, 4, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        accumulators.add_sinks_(out, lse, torch.zeros(2))


@pytest.mark.parametrize("dim", [64, 128, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype, dim):
    for length in (77, 300):
        a, b = (draw(length, dim, dtype, kind=kind) for kind in ("tokens", "cut"))
        exact = a.double() + b.double()
        for into in (dtype, torch.float32):
            out = draw(length, dim, into, kind="tokens")
            assert triton_ops.can_take(out, a, b)
            accumulators.sum_into(out, a, b)
            torch.testing.assert_close(out, exact.float().to(into), rtol=1e-6, atol=0)
            for part in (a, b):
                accumulators.sum_into(out, part)
                torch.testing.assert_close(out, part.to(into), rtol=0, atol=0)


def test_what_does_not_fit_is_left_to_torch():
    x = torch.randn(1, 2, 4, 12, device="cuda", dtype=torch.bfloat16)[..., 1:]
    assert not triton_ops.can_take(x)
    assert not triton_ops.can_take(torch.randn(1, 2, 4, 16, dtype=torch.float64, device="cuda"))
    assert not triton_ops.can_take(torch.randn(1, 2, 4, 16))
