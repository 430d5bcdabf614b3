"""The GPU's kernels against the reference in float64, on one rank and on several that share a GPU.

Errors are at most twice those of the reference kernel on the same inputs in the same precision,
and one ulp: reference sums are in float32, those of the GPU's ops partly in half precision.
"""

import itertools
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from lightning_cp import Mask, attention
from lightning_cp.attn.accumulators import NEVER
from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Request, Scores
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel, backward_op
from lightning_cp.attn.blockwise.kernels.dense import DenseKernel
from lightning_cp.attn.blockwise.kernels.select import select_kernel
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.data.shard import shard
from lightning_cp.step import active_step
from tests.attn import cases
from tests.attn.cases import (
    ALL_KERNELS,
    HEADS,
    Case,
    backward_block,
    build_call,
    forward_block,
    put_together,
)
from tests.oracle import errors, make_inputs
from tests.parity.steps import build_cp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
# cuDNN takes tiles of any shape here, not only of those that are worth a plan.
KERNELS = ["flash", "cudnn", "cudnn always"]


def documents(batch, length):
    """Return documents longer than a tile, others in each row, one of a single token."""
    rows = []
    for row in range(batch):
        sizes = torch.tensor([[100, 1, 73, 126], [30, 199, 71]][row % 2])
        ids = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        reps = -(-length // len(ids))
        rows.append(torch.cat([ids + 10 * r for r in range(reps)])[:length])
    return torch.stack(rows)


def one_row_of_padding(batch, length):
    return (torch.arange(batch) == 0)[:, None].expand(batch, length).clone()


MASKS = {
    **cases.MASKS,
    "wide window": lambda b, s: Mask(causal=True, window=150),
    "two-sided window": lambda b, s: Mask(window=(90, 70)),
    "long documents": lambda b, s: Mask(causal=True, documents=documents(b, s)),
    "a row of padding": lambda b, s: Mask(causal=True, padding=one_row_of_padding(b, s)),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(DenseKernel, "tile_size", 64)


@pytest.fixture
def kernel(request, monkeypatch):
    """Return a kernel by its name in KERNELS."""
    if request.param == "cudnn always":
        monkeypatch.setattr(CudnnKernel, "grain", 1)
    return ALL_KERNELS[request.param.split()[0]]


every_kernel = pytest.mark.parametrize("kernel", KERNELS, indirect=True)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make_case(mask, dtype, *, heads="gqa", length=301, dims=(64, 64), bias=None):
    inputs = make_inputs(
        batch=2, heads=HEADS[heads], length=length, dims=dims, sinks=False, seed=11
    ).to(dtype)
    return Case(MASKS[mask](2, length), inputs, layout="contiguous", kernel="reference", bias=bias)


def run(kernel, case, inputs=None, backward=None):
    """Return what a kernel computes of the block that is the whole row, and its gradients.

    These by the same kernel, or by another one.
    """
    call = build_call(case, LoneTransport())
    block, scores = call.plan.stages[0].block, call.scores
    inputs = (inputs or case.inputs).on(CUDA)
    q, dout = inputs.q[:, :, block.q_slice], inputs.dout[:, :, block.q_slice]
    bias = None if case.bias is None else case.bias[:, :, block.q_slice].to(CUDA)
    out, lse = forward_block(kernel, q, inputs.k, inputs.v, bias, block, scores)
    out = out.to(q.dtype)
    sure = torch.where(lse == NEVER, float("inf"), lse)
    given = BackwardInputs(dout, q, inputs.k, inputs.v, out, sure)
    grads = backward_block(backward or kernel, given, bias, block, scores)
    named = zip(("dq", "dk", "dv"), (x.to(q.dtype) for x in grads), strict=True)
    return {"out": out, "lse": lse, **dict(named)}


@cache
def expected(mask, dtype, **options):
    """Return the exact result, and that of the reference kernel in the same precision."""
    case = make_case(mask, dtype, **options)
    reference = ALL_KERNELS["reference"]
    exact = run(reference, case, case.inputs.to(torch.float64))
    return case, exact, run(reference, case)


def assert_earned(found, exact, same, dtype):
    if "lse" in found:
        assert_lse(found, exact["lse"])
    found, exact, same = ({n: x for n, x in y.items() if n != "lse"} for y in (found, exact, same))
    ours, theirs = errors(found, exact), errors(same, exact)
    ulp = torch.finfo(dtype).eps
    for name in exact:
        assert ours[name] <= 2 * theirs[name] + ulp, (name, ours[name], theirs[name])


def assert_lse(found, exact):
    lse, seen = found["lse"], exact > NEVER
    assert lse.dtype == torch.float32
    assert torch.equal(lse > NEVER, seen)
    assert not found["out"][~seen].any()
    torch.testing.assert_close(lse[seen].double(), exact[seen], rtol=0, atol=3e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
@every_dtype
@pytest.mark.parametrize("kernel", ["flash", "cudnn"], indirect=True)
def test_every_mask(kernel, dtype, heads, mask):
    case, exact, same = expected(mask, dtype, heads=heads)
    assert_earned(run(kernel, case), exact, same, dtype)


@pytest.mark.parametrize("mask", ["wide window", "long documents", "left padding"])
@every_dtype
@pytest.mark.parametrize("kernel", ["cudnn always"], indirect=True)
def test_cudnn_on_tiles_of_any_shape(kernel, dtype, mask):
    case, exact, same = expected(mask, dtype)
    assert_earned(run(kernel, case), exact, same, dtype)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("kernel", ["cudnn always"], indirect=True)
@pytest.mark.parametrize("first", ["forward", "backward"])
def test_passes_by_two_kernels(kernel, first, mask):
    """Both passes of a new shape are planned for themselves, one may be a step ahead."""
    case, exact, same = expected(mask, torch.bfloat16)
    flash = ALL_KERNELS["flash"]
    forward, backward = (kernel, flash) if first == "forward" else (flash, kernel)
    assert_earned(run(forward, case, backward=backward), exact, same, torch.bfloat16)


@pytest.mark.parametrize("dims", [(40, 40), (80, 80), (128, 128), (64, 32), (40, 72), (36, 3)])
@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@every_dtype
@every_kernel
def test_head_dims(kernel, dtype, mask, dims):
    case, exact, same = expected(mask, dtype, length=129, dims=dims)
    assert_earned(run(kernel, case), exact, same, dtype)


@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (201, 64)])
@every_dtype
@pytest.mark.parametrize("kernel", ["flash"], indirect=True)
def test_large_head_dims(kernel, dtype, dims):
    case, exact, same = expected("causal", dtype, length=129, dims=dims)
    assert_earned(run(kernel, case), exact, same, dtype)


@pytest.mark.parametrize("length", [1, 2, 7, 127, 128, 640])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@every_kernel
def test_lengths(kernel, mask, heads, length):
    case, exact, same = expected(mask, torch.bfloat16, heads=heads, length=length)
    assert_earned(run(kernel, case), exact, same, torch.bfloat16)


@pytest.mark.parametrize("rows", ["one", "of each query"])
@every_dtype
@pytest.mark.parametrize("kernel", ["flash", "cudnn"], indirect=True)
def test_a_bias(kernel, dtype, rows):
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(2, 4, 1 if rows == "one" else 301, 301, generator=generator)
    bias[0, :, :, 10:20] = NEVER
    case = make_case("causal", dtype, bias=bias)
    reference = ALL_KERNELS["reference"]
    exact = run(reference, case, case.inputs.to(torch.float64))
    assert_earned(run(kernel, case), exact, run(reference, case), dtype)


def as_tokens_first(x):
    """Return the same numbers with tokens before heads in memory, as most models have them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def as_part_of_more(x):
    """Return the same numbers inside a larger tensor, off the boundaries that the ops rely on."""
    larger = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    larger[..., 1:-2] = x
    return larger[..., 1:-2]


def as_expanded(x):
    """Return the first row's numbers for every row, held once."""
    return x[:1].expand_as(x)


@pytest.mark.parametrize("change", [as_tokens_first, as_part_of_more, as_expanded])
@pytest.mark.parametrize("mask", ["causal", "wide window"])
@every_kernel
def test_any_layout_in_memory(kernel, mask, change):
    case = make_case(mask, torch.bfloat16)
    inputs = case.inputs.on(CUDA)
    changed = replace(inputs, q=change(inputs.q), k=change(inputs.k), v=change(inputs.v))
    reference = ALL_KERNELS["reference"]
    exact = run(reference, case, changed.to(torch.float64))
    same = run(reference, case, changed)
    assert_earned(run(kernel, case, changed), exact, same, torch.bfloat16)


@pytest.mark.parametrize("kernel", ["cudnn"], indirect=True)
def test_plans_that_others_made_for_another_layout_are_not_used(kernel):
    inputs = make_case("causal", torch.bfloat16, length=384, dims=(48, 48)).inputs.on(CUDA)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    how = {"causal": True, "scale": 0.1}
    out, lse = kernel.rectangle_forward(q, k, v, **how)
    theirs = as_tokens_first(dout), q, k, v, out, lse.unsqueeze(-1)
    unused = torch.empty((), dtype=torch.int64, device=CUDA)
    wanted = backward_op(
        *theirs, unused, unused, None, None, None, 384, 384, 0.0, True, scale=how["scale"]
    )
    for changed in (lambda x: x, as_tokens_first):
        given = BackwardInputs(changed(dout), q, k, v, changed(out), lse)
        found = kernel.rectangle_backward(given, **how)
        for ours, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("causal", [True, False])
@every_dtype
@every_kernel
def test_queries_whose_lse_is_infinite_take_no_part_in_backward(kernel, dtype, causal):
    inputs = make_case("causal", dtype, length=256).inputs.on(CUDA)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    how = {"causal": causal, "scale": 0.125}
    out, lse = kernel.rectangle_forward(q, k, v, **how)
    blind = torch.zeros(256, dtype=torch.bool, device=CUDA)
    blind[[0, 5, 64, 65, 200, 255]] = True
    infinite = lse.masked_fill(blind, float("inf"))
    dq, dk, dv = kernel.rectangle_backward(BackwardInputs(dout, q, k, v, out, infinite), **how)
    assert not dq[:, :, blind].any()
    # The same from queries whose output nobody asks about.
    silent = dout.masked_fill(blind[:, None], 0.0)
    wanted = kernel.rectangle_backward(BackwardInputs(silent, q, k, v, out, lse), **how)
    for found, other in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"], indirect=True)
def test_long_rows_are_never_written_out(kernel, monkeypatch):
    monkeypatch.undo()
    length = 32768
    case = make_case("causal", torch.bfloat16, length=length)
    documents = torch.arange(length).ge(20000).long()
    case.mask = Mask(causal=True, window=4000, documents=documents)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(kernel, case)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 40 * case.inputs.q.numel() * 2


def request(dtype=torch.bfloat16, head_dim=64):
    return Request(CUDA, dtype, Scores(0.1), head_dim)


def test_auto_takes_the_fastest():
    major, _ = torch.cuda.get_device_capability()
    fastest = "cudnn" if major >= 9 else "flash"
    assert select_kernel("auto", request()).name == fastest
    assert select_kernel("auto", request(head_dim=256)).name == "flash"
    assert select_kernel("auto", request(head_dim=257)).name == "reference"
    assert select_kernel("auto", request(torch.float32)).name == "reference"


WAYS = [*itertools.product(["gather", "ring"], ["zigzag", "contiguous"]), ("ulysses", "zigzag")]
GRID = [
    (kernel, *way, mask)
    for kernel, way, mask in itertools.product(
        ["flash", "cudnn"], WAYS, ["causal", "long documents", "wide window"]
    )
]
LENGTH = 1536  # its chunks are whole grains for 2 and for 3 ranks, so that cuDNN is asked too


def make_shared_case(mask, dtype, layout):
    inputs = make_inputs(
        batch=2, heads=HEADS["gqa"], length=LENGTH, dims=(64, 64), sinks=True, seed=12
    ).to(dtype)
    return Case(MASKS[mask](2, LENGTH), inputs, layout=layout, kernel="reference")


def with_gradients(inputs, cut, attend_with):
    """Return out and all gradients of an attention call on a part of the inputs."""
    leaves = [cut(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    leaves.append(inputs.sinks.clone().requires_grad_())
    out = attend_with(*leaves)
    grads = torch.autograd.grad(out, leaves, cut(inputs.dout))
    names = ("out", "dq", "dk", "dv", "dsinks")
    return {n: x.detach().cpu() for n, x in zip(names, (out, *grads), strict=True)}


@cache
def expected_whole(mask, dtype):
    """Return what one rank computes with the reference kernel: exactly, and in this precision."""
    case = make_shared_case(mask, dtype, "contiguous")
    call = build_call(case, LoneTransport())

    def whole(inputs):
        return with_gradients(inputs.on(CUDA), torch.clone, lambda *leaves: call.run(*leaves, None))

    return whole(case.inputs.to(torch.float64)), whole(case.inputs)


def share(kernel, algorithm, layout, mask, dtype):
    """Return this rank's part of an attention() call inside a step."""
    case = make_shared_case(mask, dtype, layout)
    cp, _ = build_cp("cuda", 1, kernel=kernel, algorithm=algorithm, layout=layout)
    with cp.step({"input_ids": torch.zeros(2, LENGTH, dtype=torch.long, device=CUDA)}):
        cut = partial(shard, dim=2, layout=active_step.current().layout, rank=cp.cp_rank)
        return with_gradients(
            case.inputs.on(CUDA),
            cut,
            lambda q, k, v, sinks: attention(q, k, v, mask=case.mask, sinks=sinks),
        )


def share_grid(dtype):
    DenseKernel.tile_size, before = 64, DenseKernel.tile_size
    try:
        return [share(*choice, dtype) for choice in GRID]
    finally:
        DenseKernel.tile_size = before


@pytest.mark.parametrize("cp_size", [2, 3])
@every_dtype
def test_attention_shared_by_ranks(nccl, dtype, cp_size):
    results = nccl(cp_size).run(share_grid, dtype, timeout=300)
    for choice, *parts in zip(GRID, *results, strict=True):
        *_, layout, mask = choice
        found = put_together(parts, make_shared_case(mask, dtype, layout))
        assert_earned(found, *expected_whole(mask, dtype), dtype)
