"""Attention as an operator of compiled graphs: the calls that eager code makes, or an error."""

import copy

import pytest
import torch
import torch.distributed as dist

from lightning_cp.attn import operator
from lightning_cp.attn.api import attention
from lightning_cp.attn.blockwise import function
from tests import doors, torch_names

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def heads(number=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, number, 12, 8, generator=generator, dtype=torch.float64)


@pytest.fixture
def calls(monkeypatch):
    """Count the attention calls that are computed."""
    found = []
    compute = function.compute_forward
    monkeypatch.setattr(
        function, "compute_forward", lambda *args: found.append(1) or compute(*args)
    )
    torch_names.compile_anew()
    yield found
    torch.compiler.reset()


@pytest.fixture
def mask():
    """Return the mask of a step with documents and padding, which has ended."""
    import torch._dynamo  # masks are marked from here on

    ids = torch.arange(24).reshape(2, 12)
    batch = {"input_ids": ids, "document_ids": ids % 12 // 5, "attention_mask": ids % 12 < 11}
    cp = doors.parallel(None)
    with cp.step(batch):
        return operator.mark_mask(cp.mask(causal=True, window=4))


def attend(q, k, v, mask, sinks=None, **options):
    options = {"scale": None, "softcap": None, **options}
    assert not torch.compiler.is_dynamo_compiling() or operator.can_trace(mask, q, v, None, None)
    if torch.compiler.is_dynamo_compiling():
        return operator.attend_in_graph(q, k, v, mask, sinks=sinks, **options)
    return attention(q, k, v, mask=mask, sinks=sinks, **options).transpose(1, 2)


def gradients(fn, mask, **options):
    tensors = [heads(4, 0), heads(2, 1), heads(2, 2), torch.linspace(-1, 1, 4).double()]
    for x in tensors:
        x.requires_grad_()
    q, k, v, sinks = tensors
    out = fn(q, k, v, mask, sinks, **options)
    return [out.detach(), *torch.autograd.grad(out.pow(2).sum(), tensors)]


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "softcap": 5.0}], ids=str)
def test_graphs_have_the_bits_of_eager_calls(calls, mask, options):
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for found, exact in zip(
            gradients(compiled, mask, **options), gradients(attend, mask, **options), strict=True
        ):
            assert torch.equal(found, exact)
    assert torch_names.num_graphs() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_calls_stay_two_and_unused_ones_run(calls, mask, backend):
    """A rank beside this one may run the same code eagerly, and would wait for a call left out."""

    def layer(q, mask):
        once, again = attend(q, q, q, mask), attend(q, q, q, mask)
        attend(2 * q, q, q, mask)
        return once + again

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for fn in (compiled, layer):
        for requires_grad in (True, False):
            q = heads().requires_grad_(requires_grad)
            calls.clear()
            out = fn(q, mask)
            assert len(calls) == 3, (fn, requires_grad)
            if requires_grad:
                calls.clear()
                out.sum().backward()
                assert not calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_gradients_run(calls, mask, backend, monkeypatch):
    found = []
    compute = operator.compute_gradients
    monkeypatch.setattr(
        operator, "compute_gradients", lambda *args: found.append(args[-1]) or compute(*args)
    )
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    q, k, v = heads().requires_grad_(), heads(2, 1).requires_grad_(), heads(2, 2)
    torch.autograd.grad(compiled(q, k, v, mask).sum(), q)
    assert found == [(True, True, False, False)]


def test_steps_and_masks_share_a_graph(calls, mask):
    cp = doors.parallel(None)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q = heads()
    for window in (None, 3):
        with cp.step({"input_ids": torch.arange(24).reshape(2, 12)}):
            other = operator.mark_mask(cp.mask(causal=True, window=window))
            for each in (other, mask):
                assert torch.equal(compiled(q, q, q, each), attend(q, q, q, each))
    assert torch_names.num_graphs() <= 2  # inside of a step and outside


def test_hooks_that_copy_what_is_saved(calls, mask):
    """A copy of a mark finds the step as long as it lives, and raises then."""
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q = heads().requires_grad_()
    (exact,) = torch.autograd.grad(attend(q, q, q, mask).sum(), q)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = compiled(q, q, q, mask)
        (found,) = torch.autograd.grad(out.sum(), q)
        out = compiled(q, q, q, copy.copy(mask))
    assert torch.equal(found, exact)
    mask.reference.mark = None
    operator._held.clear()
    with pytest.raises(RuntimeError, match="has lost its step: hooks for saved tensors"):
        out.sum().backward()


def test_second_derivatives_are_refused(calls, mask):
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q = heads().requires_grad_()
    out = compiled(q, q, q, mask).pow(2).sum()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(out, q, create_graph=True)[0].sum().backward()


def test_forward_derivatives_are_refused(calls, mask):
    def tangent(q):
        return torch.func.jvp(lambda x: attend(x, x, x, mask), (q,), (torch.ones_like(q),))

    for fn in (torch.compile(tangent, backend="aot_eager"), tangent):
        with pytest.raises(RuntimeError, match="functorch transforms"):
            fn(heads())


def test_other_masks_are_not_traced(mask):
    q = heads()
    assert operator.can_trace(mask, q, q, None, None)
    assert not operator.can_trace(None, q, q, None, None)
    cp = doors.parallel(None, kernel="flex")
    with cp.step({"input_ids": torch.arange(24).reshape(2, 12)}):
        assert not operator.can_trace(operator.mark_mask(cp.mask(causal=True)), q, q, None, None)


def test_calls_that_backward_would_compute_again_are_not_traced(mask):
    """Eager code on another rank computes them once."""
    q = heads()
    for option, value in {
        "activation_memory_budget": 0.5,
        "aggressive_recomputation": True,
    }.items():
        with torch_names.functorch_options(**{option: value}):
            assert not operator.can_trace(mask, q, q, None, None)


def test_replays_are_refused_by_cuda_graphs():
    for name in ("attend", "attend_backward"):
        op = getattr(torch.ops.lightning_cp, name).default
        assert torch.Tag.cudagraph_unsafe in op.tags


def give_up(rank):
    """Return whether calls have the bits of eager ones, and how many graphs this rank compiled."""
    import torch._dynamo

    torch_names.compile_anew()
    is_first = dist.get_rank() == rank
    cp = doors.parallel(dist.group.WORLD, algorithm="ring")
    compiled = torch.compile(attend, backend="aot_eager")
    are_equal = []
    with torch_names.compilations_at_most(1 if is_first else 8):
        for length in (
            12,
            16,
            19,
        ):  # of 19 one rank holds 9 tokens: unnamed tensors have no padding
            with cp.step((torch.arange(2 * length).reshape(2, -1),)) as (ids,):
                mask = operator.mark_mask(cp.mask(causal=True, window=5))
                tensors = [heads(n, n)[:, :, : ids.shape[1]].requires_grad_() for n in (4, 2, 2)]
                found, exact = (
                    torch.autograd.grad(fn(*tensors, mask).pow(2).sum(), tensors)
                    for fn in (compiled, attend)
                )
            are_equal += [torch.equal(x, y) for x, y in zip(found, exact, strict=True)]
    return all(are_equal), torch_names.num_graphs()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_stops_compiling_pairs_up_with_others(ranks):
    assert ranks(2).run(give_up, 1) == [(True, 2), (True, 1)]
