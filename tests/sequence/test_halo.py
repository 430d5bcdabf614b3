import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.sequence import halo
from lightning_cp.sequence.token_map import held_ranges
from tests import doors
from tests.ranks import run_threads
from tests.sequence.cases import LAYOUTS, Case, cases


def expected_halo(case, x, start, left):
    """Return what the token at ``start`` sees of the ``left`` tokens before it, [B, left, ...]."""
    found = x.new_zeros(case.batch, left, *x.shape[2:])
    for sample in range(case.batch):
        for back in range(1, min(left, start) + 1):
            if start < case.length and case.sees(sample, start, start - back):
                found[sample, left - back] = x[sample, start - back]
    return found


@given(case=cases(), left=st.integers(0, 7))
def test_halos_and_their_gradients_are_those_of_full_sequences(threads, case, left):
    generator = torch.Generator().manual_seed(case.length)
    full = torch.randn(case.batch, case.length, 2, generator=generator, dtype=torch.float64)
    layout = case.build_layout()
    leaf = full.clone().requires_grad_()
    exact = [
        [
            expected_halo(case, leaf, held.tokens.start, left)
            if held.tokens.size
            else leaf.new_zeros(case.batch, left, 2)
            for held in held_ranges(layout, rank)
        ]
        for rank in range(case.cp_size)
    ]
    weights = [[torch.randn_like(part) for part in parts] for parts in exact]
    total = sum(
        (part * weight).sum()
        for pair in zip(exact, weights, strict=True)
        for part, weight in zip(*pair, strict=True)
    )
    (dx,) = torch.autograd.grad(total + leaf.sum() * 0, leaf)

    def work(transport):
        threads.enter(case.build_step(transport))
        x = case.cut(full, 1, transport.rank).requires_grad_()
        parts = halo(x, left)
        loss = sum((a * b).sum() for a, b in zip(parts, weights[transport.rank], strict=True))
        (grad,) = torch.autograd.grad(loss, x)
        return [part.detach() for part in parts], grad

    for rank, (parts, grad) in enumerate(run_threads(case.cp_size, work)):
        for part, one in zip(parts, exact[rank], strict=True):
            assert torch.equal(part, one)
        torch.testing.assert_close(grad, case.cut(dx, 1, rank), atol=1e-12, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_halos_are_sent(threads, layout):
    case = Case(64, 4, layout)

    def work(transport):
        threads.enter(case.build_step(transport))
        halo(torch.zeros(2, 16, 5), 3)
        return transport.numbers_sent

    borders = 3 if layout == "contiguous" else 6
    assert sum(run_threads(4, work)) == borders * 3 * 2 * 5


def test_nothing_is_sent_across_documents(threads):
    case = Case(16, 2, "contiguous", documents=((8, 8), (7, 1, 8)))

    def work(transport):
        threads.enter(case.build_step(transport))
        halo(torch.zeros(2, 8, 5), 3)
        return transport.numbers_sent

    assert run_threads(2, work) == [0, 0]


def test_halos_of_any_dim_and_of_integers(threads):
    case = Case(8, 2, "contiguous")
    full = torch.arange(2 * 3 * 8 * 2).view(2, 3, 8, 2)

    def work(transport):
        threads.enter(case.build_step(transport))
        x = case.cut(full, 2, transport.rank).contiguous(memory_format=torch.channels_last)
        return halo(x, 2, dim=-2)[0]

    assert torch.equal(run_threads(2, work)[1], full[:, :, 2:4])


def test_a_negative_halo_is_refused():
    with pytest.raises(ValueError, match=r"halo\(left=-1\): give the number of .* 0 or more"):
        halo(torch.zeros(1, 4), -1)


def test_a_second_derivative_is_refused():
    x = torch.randn(1, 4, 2, requires_grad=True)
    with doors.parallel(None).step({"input_ids": torch.arange(4)[None]}):
        (part,) = halo(x, 2)
    with pytest.raises(RuntimeError, match="Context parallelism has no second derivative"):
        torch.autograd.grad(part.sum(), x, create_graph=True)


def test_outside_a_step_and_in_a_step_of_one_rank_halos_are_zero():
    x = torch.randn(2, 4, 3)
    cp = doors.parallel(None)
    with cp.step({"input_ids": torch.arange(8).view(2, 4)}):
        inside = halo(x, 6)
        with cp.paused():
            paused = halo(x[:, :2], 6)
    for parts in (inside, paused, halo(x, 6)):
        assert [part.shape for part in parts] == [(2, 6, 3)]
        assert not parts[0].any()
