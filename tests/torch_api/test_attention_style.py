"""The style of attention modules in plans of `parallelize_module`: parity, and what is refused."""

import itertools
import re
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from lightning_cp import ContextParallelAttention, Mask, attention
from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import build_layout
from tests import doors
from tests.oracle import errors

WINDOW = 5
LAYOUTS = ("contiguous", "zigzag")


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def window(b, h, i, j):
    return (i >= j) & (i - j < WINDOW)


def window_mask(length):
    i = torch.arange(length)
    return window(0, 0, i[:, None], i)


class Core(nn.Module):
    """Attention of queries, keys and values, called in one of several ways."""

    def __init__(self, how, seq_len):
        super().__init__()
        self.how, self.seq_len = how, seq_len

    def forward(self, q, k, v):
        if self.how == "window by attention":
            return attention(q, k, v, mask=Mask(causal=True, window=WINDOW))
        if self.how == "window by flex":
            blocks = create_block_mask(window, None, None, self.seq_len, self.seq_len, "cpu")
            return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        if self.how == "window by mask":
            mask = window_mask(self.seq_len)
            return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        is_causal = self.how == "causal"
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


HOWS = ("causal", "full", "window by attention", "window by flex", "window by mask")


def qkv(length, kv_heads):
    return [2 * draw(i, 2, n, length, 8) for i, n in enumerate((4, kv_heads, kv_heads))]


def attend_alone(how, length, kv_heads):
    leaves = [x.requires_grad_() for x in qkv(length, kv_heads)]
    q, k, v = leaves
    if how == "full":
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    else:
        i = torch.arange(length)
        seen = window_mask(length) if "window" in how else i[:, None] >= i
        out = scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, draw(7, *out.shape))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def world():
    return init_device_mesh("cpu", (dist.group.WORLD.size(),))


def attend_sharded(job):
    """Return the full output and gradients of a module that a plan has changed."""
    how, layout_name, length, kv_heads, recompute = job
    mesh = world()
    model = nn.ModuleDict({"core": Core(how, length)})
    cp = doors.parallel(mesh)
    style = ContextParallelAttention(cp, seq_dim=2, layout=layout_name)
    parallelize_module(model, mesh, {"core": style})
    leaves = [x.requires_grad_() for x in qkv(length, kv_heads)]
    layout = build_layout(layout_name, seq_len=length, cp_size=mesh.size(), shows_padding=False)
    part = lambda x: shard(x, 2, layout=layout, rank=dist.get_rank())  # noqa: E731
    shards = [part(x) for x in leaves]
    if recompute is None:
        out = model["core"](*shards)
    else:
        out = checkpoint(model["core"], *shards, use_reentrant=recompute)
    out.backward(part(draw(7, 2, 4, length, 8)))
    full = torch.zeros(2, 4, length, 8, dtype=torch.float64)
    positions = layout.positions(dist.get_rank())[: out.shape[2]]
    full[:, :, positions] = out.detach()
    found = [full, *(x.grad for x in leaves)]
    for x in found:
        dist.all_reduce(x)
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))


def attend_jobs(jobs):
    return [attend_sharded(job) for job in jobs]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_a_module_that_a_plan_names_attends_to_full_sequences(ranks, cp_size):
    lengths = (8 * cp_size, 11, 2)  # even, uneven, less than ranks
    jobs = [
        (how, layout, length, 2 - turn % 2, (None, False, True)[turn % 3])
        for turn, (how, layout, length) in enumerate(itertools.product(HOWS, LAYOUTS, lengths))
        if (how, length) != ("window by mask", 2)  # ambiguous, and refused
    ]
    for found in ranks(cp_size).run(attend_jobs, jobs):
        for job, part in zip(jobs, found, strict=True):
            worst = errors(part, attend_alone(*job[:1], *job[2:4]))
            assert max(worst.values()) < 1e-12, (job, worst)


class Attention(nn.Module):
    """Attention with projections, whose core is a module."""

    def __init__(self, seq_len):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.out = (nn.Linear(16, 16, dtype=torch.float64) for _ in range(2))
        # A bias of keys has no gradient but rounding.
        self.k, self.v = (nn.Linear(16, 8, bias=b, dtype=torch.float64) for b in (False, True))
        self.core = Core("causal", seq_len)

    def forward(self, x):
        heads = [
            y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        ]
        return self.out(self.core(*heads).transpose(1, 2).flatten(2))


def train(model, x, slope):
    x.requires_grad_()
    y = model(x)
    y.backward(slope)
    grads = {n: p.grad for n, p in model.named_parameters()}
    return y.detach(), x.grad, grads


def train_sharded(length, layout_name, whole, inside):
    """Return errors of a plan that divides heads over tensor ranks, tokens over context ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    cp = doors.parallel(mesh["context"], tensor=mesh["tensor"], check_batches=0, layout=layout_name)
    model = Attention(length)
    style = ContextParallelAttention(cp, seq_dim=1 if whole else 2, layout=layout_name)
    plan = {**dict.fromkeys("qkv", ColwiseParallel()), "out": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], {**plan, "" if whole else "core": style})
    x, slope = draw(1, 2, length, 16), draw(2, 2, length, 16)
    if inside:
        with cp.step({"inputs_embeds": x}) as local:
            layout = build_layout(layout_name, seq_len=length, cp_size=2)
            sharded = shard(slope, 1, layout=layout, rank=cp.cp_rank)
            y, dx, grads = train(model, local["inputs_embeds"].detach(), sharded)
    else:
        layout = build_layout(layout_name, seq_len=length, cp_size=2, shows_padding=False)
        sharded = [shard(t, 1, layout=layout, rank=cp.cp_rank) for t in (x, slope)]
        y, dx, grads = train(model, *sharded)
    exact_y, exact_dx, exact = train(Attention(length), x, slope)
    real = layout.is_real(cp.cp_rank)
    at = layout.positions(cp.cp_rank)[: len(real)][real]
    found = {"y": (y[:, real], exact_y[:, at]), "dx": (dx[:, real], exact_dx[:, at])}
    for name, grad in grads.items():
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        dist.all_reduce(full, group=mesh.get_group("context"))
        found[name] = full, exact[name]
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in found.items()}


def train_jobs(jobs):
    return [train_sharded(*job) for job in jobs]


@pytest.mark.ranks
@pytest.mark.slow
def test_plans_divide_heads_and_tokens_of_one_module(ranks):
    """By a plan alone and inside a step; any three of four choices."""
    choices = itertools.product((16, 13), LAYOUTS, (False, True), (False, True))
    jobs = [
        job
        for job in choices
        if ((job[0] == 16) + LAYOUTS.index(job[1]) + job[2] + job[3]) % 2 == 0
    ]
    for results in ranks(4).run(train_jobs, jobs):
        for job, found in zip(jobs, results, strict=True):
            assert max(found.values()) < 1e-12, (job, found)


# ---------------------------------------------------------------- what is refused


def message_of(case):
    mesh, rank = world(), dist.get_rank()
    layout = "zigzag" if case == "zigzag" else "contiguous"
    cp = doors.parallel(mesh)
    style = ContextParallelAttention(cp, seq_dim=9 if case == "dim" else 2, layout=layout)
    core = Core("causal", 8)
    x = draw(0, 1, 2, 4, 8)
    if case in ("lengths", "zigzag"):
        x = x[:, :, : (3, 4)[rank]]
    if case == "shapes":
        x = x[:, :, :, : (8, 4)[rank]]
    if case == "dtensor" and rank == 1:  # the other rank must not wait for it
        x = DTensor.from_local(x, mesh)
    if case == "matmul":
        core.forward = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    if case == "local mask":
        mask = torch.ones(4, 4).bool()
        core.forward = lambda q, k, v: scaled_dot_product_attention(q, k, v, mask)
    has_positions = case == "positions" and rank == 1  # the other rank must not wait for it
    options = {"position_ids": torch.arange(4)[None]} if has_positions else {}
    arguments = () if case == "nothing" else (x, x, x)
    try:
        style.apply(core)(*arguments, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "lengths",
            r"ranks hold \[3, 4\] tokens, but layout='contiguous' of 7 tokens gives them \[4, 3\]",
        ),
        ("zigzag", ""),  # of 7 tokens the first rank has 3
        ("shapes", r"with the same other sizes and dtype on all ranks; here it is a Tensor of"),
        (
            "dtensor",
            r"here it is a (DT|T)ensor of shape .*; for a DTensor, use_local_output=True",
        ),
        ("dim", r"seq_dim=9\): the first tensor of a call must be .* shape \(1, 2, 4, 8\)"),
        ("nothing", r"of shape \(\). Name a module that takes q, k, v or hidden states"),
        ("matmul", "has not called F.scaled_dot_product_attention, flex_attention or lightning"),
        ("positions", r"`position_ids` are not taken: rotate outside of the module, or use cp.ste"),
        (
            "local mask",
            r"attn_mask has shape \(4, 4\) inside a step whose ranks hold 4 of 8 tokens",
        ),
    ],
)
def test_what_the_style_cannot_know_is_refused_on_all_ranks(ranks, case, message):
    for text in ranks(2).run(message_of, case):
        if message:
            assert re.search(message, text), text
        else:
            assert text == ""


def run_again(reentrant, forward_inside):
    """Run forward inside or outside of a step, and backward in the other place."""
    cp = doors.parallel(None)
    core = ContextParallelAttention(cp, seq_dim=2, layout="zigzag").apply(
        Core("window by attention", 8)
    )
    x, batch = draw(0, 1, 2, 8, 8).requires_grad_(), {"input_ids": torch.zeros(1, 8).long()}

    def forward():
        return checkpoint(core, x, x, x, use_reentrant=reentrant).sum()

    if forward_inside:
        with cp.step(batch):
            loss = forward()
        loss.backward()
    else:
        loss = forward()
        with cp.step(batch):
            loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_runs_again_in_another_step_is_refused(reentrant):
    """Documents and layout would be those of the other one."""
    with pytest.raises(RuntimeError, match="ran outside of a cp.step and runs again, in backward,"):
        run_again(reentrant, forward_inside=False)
    if reentrant:
        with pytest.raises(RuntimeError, match="ran inside of a cp.step and runs again"):
            run_again(reentrant, forward_inside=True)
    else:
        run_again(reentrant, forward_inside=True)  # checkpointing opens the step again


def test_a_module_can_be_copied():
    style = ContextParallelAttention(doors.parallel(None), seq_dim=2, layout="zigzag")
    core, x = style.apply(Core("causal", 8)), draw(0, 1, 2, 8, 8)
    copy = deepcopy(core)
    copy.how = "full"
    assert not torch.equal(copy(x, x, x), core(x, x, x))


def test_parts_of_hugging_face_models_and_other_layouts_are_refused():
    cp = doors.parallel(None)
    with pytest.raises(ValueError, match="'balanced'"):
        ContextParallelAttention(cp, seq_dim=1, layout="balanced")
    with pytest.raises(TypeError, match=r"got a NoneType as its ranks. Give ContextParallel\(mesh"):
        ContextParallelAttention(None, seq_dim=1, layout="zigzag")
    part = LlamaAttention(LlamaConfig(hidden_size=8, num_attention_heads=2), 0)
    with pytest.raises(ValueError, match="LlamaAttention is a part of a Hugging Face model, which"):
        ContextParallelAttention(cp, seq_dim=1, layout="zigzag").apply(part)


def test_attention_that_is_paused_or_declared_unsharded_is_left_alone():
    cp, x = doors.parallel(None), draw(0, 1, 2, 6, 8)
    core = Core("causal", 6)
    expected = core(x, x, x)
    ContextParallelAttention(cp, seq_dim=9, layout="zigzag").apply(core)
    with cp.paused():
        assert torch.equal(core(x, x, x), expected)
    with cp.exempt():
        assert torch.equal(core(x, x, x), expected)
    with pytest.raises(ValueError, match="seq_dim=9"):
        core(x, x, x)
