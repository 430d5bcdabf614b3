"""Single SDPA calls on ranks: masks of every shape, and what torch's own tests check of its ring.

torch tests its context parallelism on GPUs: with and without load balancing, both ways of moving
keys, causal and not, compiled and not, and that buffers are cut and put back. The same here, on
CPU processes.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from lightning_cp.data.shard import shard
from lightning_cp.step import active_step
from tests import doors
from tests.oracle import errors

pytestmark = pytest.mark.ranks

LENGTH = 13


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole_inputs(kv_heads=4):
    return [draw(seed, 2, heads, LENGTH, 8) for seed, heads in enumerate((4, kv_heads, kv_heads))]


def run_whole(mask, **kwargs):
    leaves = [x.requires_grad_() for x in whole_inputs(kwargs.pop("kv_heads", 4))]
    kwargs["enable_gqa"] = leaves[1].shape[1] != 4
    out = functional.scaled_dot_product_attention(*leaves, attn_mask=mask, **kwargs)
    grads = torch.autograd.grad(out, leaves, draw(7, *out.shape))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def run_shared(mask, cut, options, compiled=False, **kwargs):
    """Return whole rows of out and gradients of one call inside a step."""
    cp = doors.parallel(dist.group.WORLD, **options)
    inputs = whole_inputs(kwargs.pop("kv_heads", 4))
    kwargs["enable_gqa"] = inputs[1].shape[1] != 4

    def call(*args, **kwargs):
        return functional.scaled_dot_product_attention(*args, **kwargs)

    if compiled:
        call = torch.compile(call, backend="aot_eager")
    with cp.step({"inputs_embeds": torch.zeros(2, LENGTH, 1)}):
        layout = active_step.current().layout

        def local(x, dim):
            return shard(x, dim, layout=layout, rank=cp.cp_rank)

        leaves = [local(x, 2).requires_grad_() for x in inputs]
        if mask is not None and cut is not None:
            mask = local(mask, cut)
        out = call(*leaves, attn_mask=mask, **kwargs)
        grads = torch.autograd.grad(out, leaves, local(draw(7, 2, 4, LENGTH, 8), 2))
        parts = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        return {name: cp.unshard(x, dim=2) for name, x in parts.items()}


def run_all(jobs):
    return [run_shared(**job) for job in jobs]


def check(ranks, cp_size, jobs):
    ours = ("cut", "options", "compiled")
    exact = [run_whole(**{k: v for k, v in job.items() if k not in ours}) for job in jobs]
    for found in ranks(cp_size).run(run_all, jobs):
        for job, part, whole in zip(jobs, found, exact, strict=True):
            worst = errors(part, whole)
            assert max(worst.values()) < 1e-10, (job, worst)


def hidden(mask, dtype):
    return mask > -1 if dtype == torch.bool else mask.masked_fill(mask < -1, float("-inf"))


@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_masks_of_every_shape(ranks, cp_size, dtype):
    shapes = {
        ((LENGTH, LENGTH), -2): "this rank's queries, all keys",
        ((2, 1, LENGTH, LENGTH), -2): "the same for each row",
        ((4, LENGTH, LENGTH), -2): "the same for each head",
        ((LENGTH, LENGTH), None): "all queries, all keys",
        ((2, 4, 1, LENGTH), None): "all keys",
        ((2, 1, 1, LENGTH), -1): "this rank's keys",
        ((LENGTH, 1), -2): "this rank's queries",
        ((2, 1, 1, 1), None): "rows",
    }
    jobs = [
        {"mask": hidden(draw(20, *shape), dtype), "cut": cut, "options": {"algorithm": algorithm}}
        for (shape, cut), algorithm in itertools.product(shapes, ["gather", "ring", "ulysses"])
    ]
    if cp_size == 3:  # algorithms take turns
        turn = 1 if dtype == torch.bool else 0
        jobs = [job for n, job in enumerate(jobs) if (n // 3 + turn) % 3 == n % 3]
    check(ranks, cp_size, jobs)


def short_rows(length):
    """Give keys of very short rows a mask, this rank's part of it; return the largest error."""
    cp = doors.parallel(dist.group.WORLD, layout="contiguous")
    q, k, v = (draw(seed, 2, 4, length, 8) for seed in range(3))
    mask = draw(20, 2, 1, 1, length)
    with cp.step({"inputs_embeds": torch.zeros(2, length, 1)}):
        layout = active_step.current().layout
        local = [shard(x, 2, layout=layout, rank=cp.cp_rank) for x in (q, k, v)]
        part = shard(mask, 3, layout=layout, rank=cp.cp_rank)
        try:
            out = functional.scaled_dot_product_attention(*local, attn_mask=part)
        except ValueError as error:
            return str(error)
        found = cp.unshard(out, dim=2)
    return float((found - functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)).norm())


@pytest.mark.parametrize("cp_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_masks_of_rows_as_short_as_the_number_of_ranks(ranks, cp_size):
    assert max(ranks(cp_size).run(short_rows, cp_size)) < 1e-12
    assert all("is ambiguous" in said for said in ranks(cp_size).run(short_rows, 1))


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_what_torch_checks_of_its_own(ranks, cp_size):
    """Load balancing, way of moving keys, causal, shared heads, compiled."""
    jobs = [
        {
            "mask": None,
            "cut": None,
            "options": {"layout": layout, "algorithm": algorithm},
            "is_causal": causal,
            "kv_heads": kv_heads,
            "compiled": compiled,
        }
        for layout, algorithm, causal, kv_heads, compiled in itertools.product(
            ["zigzag", "contiguous"],
            ["gather", "ring", "ulysses"],
            [True, False],
            [4, 2],
            [False, True],
        )
    ]
    check(ranks, cp_size, jobs)


def cut_and_put_back(layout):
    """Cut several buffers along several dims and put them back, with what torch refuses."""
    cp = doors.parallel(
        dist.group.WORLD,
        layout=layout,
        sequence_dims={"rope": 0, "scores": 2, "flags": 1, "line": 0},
    )
    buffers = {
        "inputs_embeds": draw(1, 2, LENGTH, 3).requires_grad_(),
        "rope": draw(2, LENGTH, 4),
        "scores": draw(3, 2, 5, LENGTH).to(torch.bfloat16),
        "flags": torch.arange(2 * LENGTH).view(2, LENGTH) % 3 == 0,
        "line": torch.arange(LENGTH, dtype=torch.int16),
    }
    before = {name: x.detach().clone() for name, x in buffers.items()}
    dims = {"inputs_embeds": 1, "rope": 0, "scores": 2, "flags": 1, "line": 0}
    with cp.step(buffers) as local:
        back = {name: cp.unshard(local[name], dims[name]) for name in buffers}
    kept = all(torch.equal(buffers[name], before[name]) for name in buffers)
    return kept and all(torch.equal(back[name], before[name]) for name in buffers)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_buffers_are_cut_and_put_back(ranks, cp_size, layout):
    assert ranks(cp_size).run(cut_and_put_back, layout) == [True] * cp_size


def mask_message(shape):
    cp = doors.parallel(dist.group.WORLD)
    with cp.step({"inputs_embeds": torch.zeros(2, 12, 1)}):
        q = torch.zeros(2, 4, 6, 8)
        try:
            functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(shape).bool())
        except ValueError as error:
            return str(error)
    return "accepted"


@pytest.mark.parametrize("shape", [(6, 6), (2, 1, 6, 6), (5, 12), (1, 7)])
def test_a_mask_that_lacks_keys_is_refused_with_the_shape_that_works(ranks, shape):
    for message in ranks(2).run(mask_message, shape):
        assert f"attn_mask has shape {shape}" in message
        assert "[..., 6, 12]" in message
        assert "[..., 1, 6]" in message
