"""Gather and ring on several ranks (threads of this process) against one device."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from lightning_cp.attn import accumulators
from lightning_cp.attn.accumulators import merge_into
from lightning_cp.attn.blockwise import function as attend_module
from lightning_cp.attn.blockwise.kernels import base, dense
from lightning_cp.attn.blockwise.kernels.cpu import CpuKernel
from lightning_cp.attn.plan import Plan
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import Range
from lightning_cp.step import guards
from tests.attn.cases import (
    HEADS,
    KERNELS,
    MASKS,
    Case,
    attend_rank,
    build_call,
    make_case,
    put_together,
)
from tests.oracle import assert_earned, attend_whole, errors, make_inputs
from tests.ranks import run_threads
from tests.strategies import masks

ALGORITHMS = ["gather", "ring"]


def worst_error(case, cp_size):
    found = put_together(run_threads(cp_size, attend_rank, case), case)
    exact = attend_whole(
        case.inputs, case.mask, scale=case.scale, softcap=case.softcap, bias=case.whole_bias
    )
    return max(errors(found, exact).values())


def few_masks():
    """Return all masks; quick are the first, the middle and the last one."""
    quick = [*MASKS][:: len(MASKS) // 2]
    return [m if m in quick else pytest.param(m, marks=pytest.mark.slow) for m in MASKS]


def grid():
    """Return all combinations; quick are three ranks, with every two of the others together."""
    numbered = [list(enumerate(values)) for values in (ALGORITHMS, MASKS, HEADS)]
    for *which, size in itertools.product(*numbered, (1, 2, 3, 4)):
        numbers, (algorithm, mask, heads) = zip(*which, strict=True)
        is_quick = size == 3 and sum(numbers) % 2 == 0
        marks = () if is_quick else pytest.mark.slow
        name = f"{algorithm}-{mask}-{heads}-{size}"
        yield pytest.param(algorithm, mask, heads, size, marks=marks, id=name)


@pytest.mark.parametrize(("algorithm", "mask", "heads", "cp_size"), list(grid()))
def test_out_and_gradients_are_those_of_one_device(algorithm, mask, heads, cp_size):
    for layout in ("zigzag", "contiguous", "balanced"):
        case = make_case(mask, heads=heads, algorithm=algorithm, layout=layout)
        assert worst_error(case, cp_size) < 1e-10, layout


def swapping_meshes():
    for mesh, heads in itertools.product([(3, 1), (2, 2), (2, 1), (4, 1)], HEADS):
        is_quick = (mesh, heads) in [((2, 2), "gqa"), ((2, 2), "mqa"), ((3, 1), "mha")]
        yield pytest.param(mesh, heads, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("mesh", "heads"), list(swapping_meshes()), ids=str)
@pytest.mark.parametrize("mask", few_masks())
def test_swapping_heads_gives_the_numbers_of_one_device(mask, heads, mesh):
    inside, between = mesh
    for layout, algorithm in itertools.product(
        ("zigzag", "contiguous"), ALGORITHMS if between > 1 else ["gather"]
    ):
        case = make_case(mask, heads=heads, algorithm=algorithm, layout=layout, ulysses=inside)
        assert worst_error(case, inside * between) < 1e-10, (layout, algorithm)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_key_heads_that_neighbours_share_unevenly(cp_size):
    """Of three query heads of a rank, two have one key head, and the third has half of another."""
    for mask in ("causal", "documents", "left padding"):
        case = make_case(mask, ulysses=2)
        case.inputs = make_inputs(batch=2, heads=(6, 3), length=37, dims=(8, 6), sinks=True, seed=3)
        assert worst_error(case, cp_size) < 1e-10, mask


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("mask", ["causal", "documents+window", "left padding"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_softcap_runs_on_the_reference_kernel(algorithm, mask, cp_size):
    case = make_case(mask, algorithm=algorithm, kernel="reference", softcap=2.0)
    assert worst_error(case, cp_size) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", few_masks())
def test_lower_precisions_earn_their_tolerance(mask, dtype):
    algorithm = ALGORITHMS[(list(MASKS).index(mask) + dtype.itemsize) % 2]
    case = make_case(mask, algorithm=algorithm, length=101)
    case.inputs = case.inputs.to(dtype)
    found = put_together(run_threads(4, attend_rank, case), case)
    same = attend_whole(case.inputs, case.mask)
    exact = attend_whole(case.inputs.to(torch.float64), case.mask)
    assert_earned(found, same, exact, dtype)


def attend_and_count(transport, case):
    """Return a rank's results, what it sent to be added up, in bytes, and in which precisions."""
    found = attend_rank(transport, case)
    return found, transport.bytes_reduced, set(transport.dtypes_reduced)


def run_wire(case, cp_size, wire):
    case.gradient_wire = wire
    parts, num_bytes, dtypes = zip(*run_threads(cp_size, attend_and_count, case), strict=True)
    return put_together(list(parts), case), num_bytes, set.union(*dtypes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "bidirectional", "prefix"])
def test_gradients_in_the_models_precision_are_half_of_the_bytes(mask, dtype):
    case = make_case(mask, length=104)
    case.inputs = case.inputs.to(dtype)
    whole, whole_bytes, whole_dtypes = run_wire(case, 4, "float32")
    half, half_bytes, half_dtypes = run_wire(case, 4, "model")
    assert (whole_dtypes, half_dtypes) == ({torch.float32}, {dtype})
    numbers = case.inputs.k.numel() + case.inputs.v.numel()
    assert set(whole_bytes) == {numbers * 4 * 3 // 4}  # 4 bytes, to 3 of 4 ranks
    assert set(half_bytes) == {numbers * 2 * 3 // 4}
    same = attend_whole(case.inputs, case.mask)
    exact = attend_whole(case.inputs.to(torch.float64), case.mask)
    assert_earned(whole, same, exact, dtype)
    ours, theirs = errors(half, exact), errors(same, exact)
    for name in ("dk", "dv"):
        assert ours[name] <= 3 * theirs[name] + 4 * torch.finfo(dtype).eps, name
        assert not torch.equal(half[name], whole[name])
    for name in ("out", "dq", "dsinks"):
        assert torch.equal(half[name], whole[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_higher_precisions_travel_as_they_are_on_any_wire(dtype):
    case = make_case("causal")
    case.inputs = case.inputs.to(dtype)
    default, model = (run_wire(case, 3, wire) for wire in ("float32", "model"))
    assert default[1:] == model[1:]
    assert model[2] == {dtype}
    for name, x in default[0].items():
        assert torch.equal(x, model[0][name]), name


def test_a_ring_has_no_sums_on_the_wire():
    case = make_case("causal", algorithm="ring")
    case.inputs = case.inputs.to(torch.bfloat16)
    default, model = (run_wire(case, 3, wire) for wire in ("float32", "model"))
    assert default[1] == model[1] == (0, 0, 0)
    for name, x in default[0].items():
        assert torch.equal(x, model[0][name]), name


def shuffled_layout(length, cp_size, random):
    """Hand out blocks in any order: nothing may rely on what our own layouts have in common."""
    per_rank = 3
    size = -(-length // (cp_size * per_rank))
    blocks = [Range(i * size, (i + 1) * size) for i in range(cp_size * per_rank)]
    random.shuffle(blocks)
    return Layout("by hand", length, tuple(tuple(blocks[r::cp_size]) for r in range(cp_size)))


@st.composite
def biases(draw, batch, heads, length):
    """Draw numbers to add to scores, of which some hide a key, for all or some of the dims."""
    shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, length)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    bias = torch.randn(*shape, length, generator=generator, dtype=torch.float64)
    hidden = torch.rand(*shape, length, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    return bias.masked_fill(hidden, float("-inf"))


def slopes(num_heads):
    """Another slope for each head, one of them 0."""
    return torch.arange(num_heads, dtype=torch.float64) * 0.3


ROADS = [("gather", 1), ("ring", 1), ("gather", 4), ("ring", 2)]


@pytest.mark.parametrize(
    ("road", "mask"),
    [pair for n, pair in enumerate(itertools.product(ROADS, MASKS)) if n % 2 == 0],
    ids=str,
)
def test_slopes_by_distance(road, mask):
    kernel = list(KERNELS)[(list(MASKS).index(mask) + road[1]) % len(KERNELS)]
    case = make_case(mask, algorithm=road[0], ulysses=road[1], kernel=kernel, bias=slopes(4))
    assert worst_error(case, 4) < 1e-10


@st.composite
def cases(draw, cp_size):
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, 70))
    heads = draw(st.sampled_from([(1, 1), (3, 3), (6, 2), (6, 3), (5, 1)]))
    dims = draw(st.sampled_from([(4, 4), (3, 7), (8, 2)]))
    inputs = make_inputs(
        batch=batch,
        heads=heads,
        length=length,
        dims=dims,
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    softcap = draw(st.sampled_from([None, None, 1.5]))
    layout: str | Layout = draw(st.sampled_from(["zigzag", "contiguous", "balanced", "by hand"]))
    if layout == "by hand":
        layout = shuffled_layout(length, cp_size, draw(st.randoms(use_true_random=False)))
    sizes = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
    return Case(
        ulysses=draw(st.sampled_from(sizes)),
        mask=draw(masks(batch, length)),
        inputs=inputs,
        bias=draw(st.none() | biases(batch, heads[0], length) | st.just(slopes(heads[0]))),
        algorithm=draw(st.sampled_from(ALGORITHMS)),
        layout=layout,
        kernel="reference" if softcap else draw(st.sampled_from(list(KERNELS))),
        softcap=softcap,
        scale=draw(st.sampled_from([None, 0.3])),
    )


sized_cases = st.sampled_from([1, 2, 3, 4, 5, 8]).flatmap(
    lambda cp_size: st.tuples(cases(cp_size), st.just(cp_size))
)


@settings(max_examples=40)
@given(sized_cases)
def test_any_mask_shape_size_and_ownership_is_exact(drawn):
    assert worst_error(*drawn) < 1e-10


@pytest.mark.slow
@settings(max_examples=2000, derandomize=False)
@seed(20261115)
@given(sized_cases)
def test_many_masks_shapes_sizes_and_ownerships_are_exact(drawn):
    assert worst_error(*drawn) < 1e-10


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_owner_that_holds_its_ranges_out_of_order(algorithm):
    owned = ((Range(8, 12), Range(0, 4)), (Range(4, 8), Range(12, 16)))
    documents = torch.arange(16) // 12
    case = make_case("causal", length=16, algorithm=algorithm)
    case.mask = Mask(causal=True, documents=documents)
    case.layout = Layout("by hand", 16, owned)
    assert worst_error(case, 2) < 1e-10


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_ranks_that_hold_only_padding_take_part(algorithm, length):
    case = make_case("causal", length=length, algorithm=algorithm)
    assert worst_error(case, 4) < 1e-10


@pytest.mark.parametrize("ulysses", [2, 4])
def test_a_bias_of_one_query_per_rank_is_not_that_of_all_queries(ulysses):
    case = make_case("causal", length=8, ulysses=ulysses, bias=torch.randn(2, 1, 8, 8).double())
    assert worst_error(case, 8) < 1e-10


class RecordingKernel:
    """A kernel that writes down when it computes, in the log of the transport."""

    name = "recording"

    def __init__(self, kernel, log):
        self.kernel, self.log = kernel, log

    def forward(self, *args):
        self.log.append("compute")
        return self.kernel.forward(*args)

    def backward(self, *args):
        self.log.append("compute")
        return self.kernel.backward(*args)


def record(transport, case):
    """Return the order of events on this rank, forward and backward apart."""
    call = build_call(case, transport)
    call = attend_module.BlockwiseCall(
        call.plan, transport, RecordingKernel(call.kernel, transport.log), call.scores
    )
    inputs = case.inputs
    leaves = [
        shard(x, 2, layout=call.plan.layout, rank=transport.rank).requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v)
    ]
    out = call.run(*leaves, None, None)
    forward = list(transport.log)
    transport.log.clear()
    out.sum().backward()
    return forward, transport.log


def test_keys_of_the_next_stage_travel_while_this_one_is_computed():
    case = make_case("bidirectional", algorithm="ring", groups=(1, 1))
    for forward, backward in run_threads(3, record, case):
        assert forward == [
            "start exchange 0",
            "compute",  # the rank's own keys
            "start exchange 1",
            "wait exchange 0",
            "compute",
            "wait exchange 1",
            "compute",
        ]
        # 2, 3: keys again. 4, 5: gradients on their way home; the first is awaited only after the
        # next stage has begun.
        assert backward == [
            "start exchange 2",
            "compute",
            "start exchange 3",
            "wait exchange 2",
            "compute",
            "start exchange 4",
            "wait exchange 3",
            "compute",
            "wait exchange 4",
            "start exchange 5",
            "wait exchange 5",
        ]


def test_the_next_group_of_heads_is_gathered_while_this_one_is_computed():
    for forward, backward in run_threads(2, record, make_case("causal", algorithm="gather")):
        assert forward == [
            "start all_gather 0",  # the second chunks of all ranks,
            "start all_gather 1",  # the first ones
            "compute",  # the rank's own tokens
            "start all_gather 2",
            "start all_gather 3",
            "wait all_gather 0",
            "wait all_gather 1",
            "compute",
            "compute",
            "wait all_gather 2",
            "wait all_gather 3",
            "compute",
        ]
        # Gradients of a group leave while the rank's own tokens are computed.
        assert backward[backward.index("start reduce_scatter 8") :] == [
            "start reduce_scatter 8",
            "start reduce_scatter 9",
            "compute",
            "wait all_gather 6",
            "wait all_gather 7",
            "wait reduce_scatter 8",
            "wait reduce_scatter 9",
            "compute",
            "start reduce_scatter 10",
            "start reduce_scatter 11",
            "compute",
            "wait reduce_scatter 10",
            "wait reduce_scatter 11",
        ]


def count_numbers(transport, case):
    """Return how many numbers this rank sent in forward, and how many its plan says."""
    call, inputs = build_call(case, transport), case.inputs
    q, k, v = (
        shard(x, 2, layout=call.plan.layout, rank=transport.rank)
        for x in (inputs.q, inputs.k, inputs.v)
    )
    with torch.no_grad():
        call.run(q, k, v, None, None)
    per_token = k.shape[0] * (k.shape[3] + v.shape[3])
    planned = sum(
        stage.heads.size * per_token * stage.num_tokens_sent for stage in call.plan.stages
    )
    return transport.numbers_sent, planned, k.shape[1] * per_token


@pytest.mark.parametrize(
    "heads", ["gqa", *(pytest.param(x, marks=pytest.mark.slow) for x in HEADS if x != "gqa")]
)
@pytest.mark.parametrize(
    ("mask", "algorithm"),
    [(m, "ring") for m in MASKS] + [(m, "gather") for m in ("window", "chunk", "documents+window")],
)
def test_bytes_sent_are_what_the_plan_says(mask, algorithm, heads):
    case = make_case(mask, algorithm=algorithm, heads=heads, length=256)
    for sent, planned, _ in run_threads(4, count_numbers, case):
        assert sent == planned


def test_a_window_moves_about_its_own_width():
    case = make_case("window", algorithm="ring", layout="contiguous", length=256)
    sent = run_threads(4, count_numbers, case)
    assert [numbers / per_token for numbers, _, per_token in sent] == [5, 5, 5, 0]


def test_grouped_keys_are_not_expanded_on_the_wire():
    def total(heads):
        case = make_case("causal", algorithm="ring", heads=heads, length=64)
        return sum(numbers for numbers, *_ in run_threads(4, count_numbers, case))

    assert total("mha") == 2 * total("gqa") == 4 * total("mqa")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_frozen_keys_return_no_gradients(algorithm):
    def run(transport, case):
        call, inputs = build_call(case, transport), case.inputs
        q, k, v = (
            shard(x, 2, layout=call.plan.layout, rank=transport.rank)
            for x in (inputs.q, inputs.k, inputs.v)
        )
        out = call.run(q.requires_grad_(), k, v, None, None)
        before = transport.numbers_sent
        out.sum().backward()
        return transport.numbers_sent - before, before, q.grad is not None

    for backward, forward, has_gradient in run_threads(
        2, run, make_case("causal", algorithm=algorithm)
    ):
        assert backward == forward  # the keys once more, and nothing back
        assert has_gradient


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_calls_in_one_graph_and_one_backward(algorithm):
    case = make_case("documents", algorithm=algorithm, heads="mha")
    case.inputs.sinks = None
    square = make_inputs(batch=2, heads=(4, 4), length=37, dims=(8, 8), sinks=False, seed=11)
    case.inputs = square

    def twice(q, k, v, call):
        return call(call(q, k, v), k, v)

    def run(transport, case):
        call = build_call(case, transport)
        leaves = [
            shard(x, 2, layout=call.plan.layout, rank=transport.rank).requires_grad_()
            for x in (square.q, square.k, square.v)
        ]
        out = twice(*leaves, lambda q, k, v: call.run(q, k, v, None, None))
        dout = shard(square.dout, 2, layout=call.plan.layout, rank=transport.rank)
        grads = torch.autograd.grad(out, leaves, dout)
        return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

    (whole,) = run_threads(1, run, case)
    length = case.inputs.q.shape[2]
    whole = {name: x[:, :, :length] for name, x in whole.items()}
    found = put_together(run_threads(3, run, case), case)
    assert max(errors(found, whole).values()) < 1e-10


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_call_of_one_tile_is_what_its_stages_compute(mask, heads, monkeypatch):
    """Bit by bit: nothing is accumulated, so nothing may be rounded."""

    def is_one_tile(case):
        call, inputs = build_call(case, LoneTransport()), case.inputs
        return call.only_tile(inputs.q, inputs.k) is not None

    for dtype in (torch.float64, torch.bfloat16):
        case = make_case(mask, heads=heads)
        case.inputs = case.inputs.to(dtype)
        (one,) = run_threads(1, attend_rank, case)
        assert is_one_tile(case) == ("padding" not in mask)  # whose tile leaves tokens out
        with monkeypatch.context() as patch:
            patch.setattr(Plan, "local_block", None)
            assert not is_one_tile(case)
            (many,) = run_threads(1, attend_rank, case)
        for name, x in many.items():
            assert torch.equal(one[name], x), name


def run_alone_on(call, tensors, dout):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = call.run(*leaves, None, None)
    return out, [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", ["causal", "bidirectional", "window"])
def test_a_call_of_one_rectangle_is_differentiated_by_torch(mask, heads, dtype):
    """Bit by bit what our own backward computes, which runs where saved tensors are replaced."""
    case = make_case(mask, heads=heads)
    inputs = case.inputs.to(dtype)
    tensors = inputs.q, inputs.k, inputs.k.flip(2)
    dout = inputs.q.flip(3).transpose(1, 2).contiguous().transpose(1, 2)
    call = build_call(case, LoneTransport())
    native, found = run_alone_on(call, tensors, dout)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        ours, expected = run_alone_on(call, tensors, dout)
    assert ours.grad_fn.name() == "_AttendBackward"
    assert (native.grad_fn.name() == "_AttendBackward") == (mask == "window")
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_sinks_and_different_head_dims_are_differentiated_by_our_own_backward():
    call, inputs = build_call(make_case("causal"), LoneTransport()), make_case("causal").inputs
    q, k = inputs.q.requires_grad_(), inputs.k
    assert call.run(q, k, k, inputs.sinks, None).grad_fn.name() == "_AttendBackward"
    assert call.run(q, k, inputs.v, None, None).grad_fn.name() == "_AttendBackward"
    assert call.run(q, k, k, None, None).grad_fn.name() != "_AttendBackward"


@pytest.mark.parametrize("cp_size", [2, 3])
def test_a_call_that_exchanges_keys_is_not_one_tile(cp_size):
    def run(transport, case):
        call, inputs = build_call(case, transport), case.inputs
        return call.only_tile(inputs.q, inputs.k)

    for algorithm in ALGORITHMS:
        case = make_case("causal", algorithm=algorithm)
        assert run_threads(cp_size, run, case) == [None] * cp_size


def test_second_derivatives_are_refused():
    case = make_case("causal")

    def run(transport, case):
        call, inputs = build_call(case, transport), case.inputs
        q = inputs.q.clone().requires_grad_()
        out = call.run(q, inputs.k, inputs.v, None, None)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RuntimeError, match="no second derivative.*without create_graph"):
        run_threads(1, run, case)
    case.inputs.v = case.inputs.k  # torch's own backward
    with pytest.raises(RuntimeError, match="no second derivative.*without create_graph"):
        run_threads(1, run, case)


@pytest.mark.parametrize("native", [True, False])
def test_backward_says_which_step_it_passes(native):
    case = make_case("causal")
    call = replace(build_call(case, LoneTransport()), uid=77)
    q, k, v = case.inputs.q.requires_grad_(), case.inputs.k, case.inputs.v
    refusals = []

    def recompute(grad):
        guards.check_recompute(SimpleNamespace(uid=77))
        with pytest.raises(RuntimeError, match="recomputed under another step") as error:
            guards.check_recompute(SimpleNamespace(uid=78))
        refusals.append(error)

    q.register_hook(recompute)
    guards.forget_backward()
    call.run(q, k, k if native else v, None, None).sum().backward()
    assert len(refusals) == 1
    guards.forget_backward()


# A test that cannot fail proves nothing: each of these breaks one thing, and parity must notice.


def broken(monkeypatch, case, cp_size=3):
    error = worst_error(case, cp_size)
    monkeypatch.undo()
    assert worst_error(case, cp_size) < 1e-10
    return error


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parity_notices_a_window_that_is_off_by_one(monkeypatch, algorithm):
    case = make_case("window", algorithm=algorithm)
    wrong = Mask(causal=True, window=7)
    monkeypatch.setattr(
        type(case.mask), "bounds", lambda self, n, _b=Mask.bounds, **kw: _b(wrong, n, **kw)
    )
    assert broken(monkeypatch, case) > 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parity_notices_a_merge_without_weights(monkeypatch, algorithm):
    def unweighted(out, lse, a, b):
        out.copy_(a[0] + b[0])
        torch.logaddexp(a[1], b[1], out=lse)

    monkeypatch.setattr(accumulators, "merge_into", unweighted)
    assert broken(monkeypatch, make_case("causal", algorithm=algorithm)) > 1e-3


def test_parity_notices_a_merge_that_forgets_its_sum(monkeypatch):
    def forgetful(out, lse, a, b):
        merge_into(out, lse.clone(), a, b)

    monkeypatch.setattr(accumulators, "merge_into", forgetful)
    # What it leaves is memory that nobody has written: NaN, perhaps.
    assert not broken(monkeypatch, make_case("bidirectional", algorithm="ring")) < 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parity_notices_shards_in_another_order(monkeypatch, algorithm):
    case = make_case("causal", algorithm=algorithm, length=36)
    right = case.build_layout(3)
    swapped = Layout("swapped", 36, tuple(tuple(reversed(parts)) for parts in right.owned))
    layouts = itertools.chain([right] * 3, itertools.repeat(swapped))
    monkeypatch.setattr(Case, "build_layout", lambda self, cp_size: next(layouts))
    assert broken(monkeypatch, case) > 1e-3


def test_parity_notices_a_missing_sink(monkeypatch):
    case = make_case("causal")
    monkeypatch.setattr(attend_module, "add_sinks_", lambda out, lse, sinks: None)
    assert broken(monkeypatch, case) > 1e-3
    assert accumulators.add_sinks_ is attend_module.add_sinks_


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        ("gather", ["causal", "window"]),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ALGORITHMS),
    ],
)
def test_huge_tiles_are_differentiated_in_halves(algorithm, names, monkeypatch):
    """Only a GPU's kernels do; here those of the CPU, with less for huge."""
    cut = []

    def halve_tile(tile, multiple):
        cut.append(tile.keys.size)
        return base.halve_tile(tile, multiple)

    monkeypatch.setattr(dense, "halve_tile", halve_tile)
    monkeypatch.setattr(CpuKernel, "backward_tiles", dense.DenseKernel.backward_tiles)
    monkeypatch.setattr(CpuKernel, "min_pairs_to_halve", 5_000, raising=False)
    monkeypatch.setattr(CpuKernel, "tile_size", 64)
    masks = {
        "causal": Mask(causal=True),
        "full": Mask(),
        "window": Mask(causal=True, window=150),
        "chunk": Mask(chunk=100),
        "documents": Mask(causal=True, documents=torch.arange(601) // 220),
    }
    for name, heads in [*((name, "gqa") for name in names or masks), ("full", "mha")]:
        case, mask = make_case("causal", heads=heads, length=601, algorithm=algorithm), masks[name]
        case.mask = mask
        cut.clear()
        assert worst_error(case, 3) < 1e-10, (name, heads)
        assert cut or heads == "mha" or name not in ("causal", "full"), name
        assert not cut or heads == "gqa", name
        assert all(size > 128 for size in cut)
