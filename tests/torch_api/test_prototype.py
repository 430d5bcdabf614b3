"""torch's names for context parallelism: parity, buffers, and what is refused.

torch tests its prototype on GPUs: outputs and gradients against one device, causal and not, with
both ways of moving keys; that buffers are cut in place and put back. The same here, on CPU
processes, and for what it cannot do: any length, gradients of buffers, backward outside.
"""

import dataclasses
import gc
import inspect
import itertools
import random
import re
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lightning_cp
from lightning_cp import context_parallel, context_parallel_unshard, set_rotate_method, token_mean
from lightning_cp.private.groups import num_process_groups
from lightning_cp.private.modes import num_function_modes
from lightning_cp.step import active_step
from tests.oracle import errors
from tests.ranks import RankPool
from tests.scripts.run import run_alone, run_shared
from tests.torch_names import prototype

sdpa = functional.scaled_dot_product_attention


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def world(axes=1):
    if axes == 2:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_between", "cp_inside"))
    return init_device_mesh("cpu", (dist.group.WORLD.size(),))


# ---------------------------------------------------------------- attention


@dataclasses.dataclass(frozen=True)
class Job:
    length: int = 24
    causal: bool = True
    kv_heads: int = 2
    rotate: str = "allgather"
    # Where gradients are asked for: of buffers that require them, leaves or not, or inside.
    grads: str = "leaf"
    backward_inside: bool = True
    unshard_inside: bool = True
    axes: int = 1


def qkv(job):
    heads = (4, job.kv_heads, job.kv_heads)
    return [2 * draw(seed, 2, num, job.length, 8) for seed, num in enumerate(heads)]


def attend_whole(job):
    leaves = [x.requires_grad_() for x in qkv(job)]
    out = sdpa(*leaves, is_causal=job.causal, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, draw(7, *out.shape))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def attend_shared(job):
    """Return whole rows of out and gradients."""
    mesh, leaves = world(job.axes), qkv(job)
    set_rotate_method(job.rotate)
    if job.grads != "inside":
        leaves = [x.requires_grad_() for x in leaves]
    q, k, v = buffers = [x * 1 for x in leaves] if job.grads == "computed" else leaves
    dout = draw(7, 2, 4, job.length, 8)
    with context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2, 2, -2, 2]):
        if job.grads == "inside":
            for x in (q, k, v):
                x.requires_grad = True
        out = sdpa(q, k, v, is_causal=job.causal, enable_gqa=True)
        slope = dout.clone()
        if job.backward_inside:
            out.backward(slope)
        if job.unshard_inside:
            (whole,) = context_parallel_unshard(mesh, [out], [2])
        if job.grads == "inside":
            grads = context_parallel_unshard(mesh, [x.grad for x in (q, k, v)], [2, 2, 2])
    if not job.backward_inside:
        out.backward(slope)
    if not job.unshard_inside:
        (whole,) = context_parallel_unshard(mesh, [out.detach()], [2])
    if job.grads != "inside":
        # What came to this rank's tokens; the other ranks have the rest.
        grads = [x.grad.clone() for x in leaves]
        for grad in grads:
            dist.all_reduce(grad)
    for x, original in zip(buffers, qkv(job), strict=True):
        assert torch.equal(x, original)
    assert dout.shape[2] == job.length
    assert functional.scaled_dot_product_attention is sdpa
    set_rotate_method("allgather")
    return dict(zip(("out", "dq", "dk", "dv"), (whole.detach(), *grads), strict=True))


def attend_jobs(jobs):
    return [attend_shared(job) for job in jobs]


def check_jobs(ranks, cp_size, jobs):
    for found in ranks(cp_size).run(attend_jobs, jobs):
        for job, part in zip(jobs, found, strict=True):
            worst = errors(part, attend_whole(job))
            assert max(worst.values()) < 1e-10, (job, worst)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cp_size", "share"),
    [(3, 0.4), *(pytest.param(size, 1.0, marks=pytest.mark.slow) for size in (1, 2, 3, 4))],
)
def test_attention_is_that_of_one_device(ranks, cp_size, share):
    lengths = [8 * cp_size, 5 * cp_size, 13, 1]  # balanced, contiguous, uneven, less than ranks
    ways = [(4, "allgather"), (2, "alltoall"), (1, "allgather")]
    jobs = [
        Job(length, causal, *way)
        for length, causal, way in itertools.product(lengths, [True, False], ways)
    ]
    places = itertools.product(
        (8 * cp_size, 13), ["leaf", "computed", "inside"], [True, False], [True, False]
    )
    jobs += [
        Job(length, grads=grads, backward_inside=inside, unshard_inside=unshard)
        for length, grads, inside, unshard in places
        if inside or grads != "inside"  # the leaf is the local tensor, and gone
    ]
    check_jobs(ranks, cp_size, random.Random(0).sample(jobs, round(share * len(jobs))))


@pytest.mark.ranks
def test_two_axes_are_ulysses_between_neighbours(ranks):
    ways = itertools.product([32, 13], ["allgather", "alltoall"], [True, False])
    check_jobs(
        ranks, 4, [Job(n, rotate=way, backward_inside=inside, axes=2) for n, way, inside in ways]
    )


MASKS = {
    "its queries": ((13, 13), 0),
    "all queries": ((2, 1, 13, 13), None),
    "all keys": ((1, 13), None),
    "its keys": ((2, 1, 1, 13), 3),
}


def masks_shared(axes):
    """Return whole rows under masks, of which some are cut, where ranks hold 13 tokens unevenly."""
    mesh, found = world(axes), {}
    for name, (shape, dim) in MASKS.items():
        mask, tensors = draw(9, *shape) > -1, qkv(Job(13, kv_heads=4))
        buffers, dims = [*tensors, mask], [2, 2, 2, dim]
        if dim is None:
            buffers, dims = buffers[:3], dims[:3]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
            out = sdpa(*tensors, attn_mask=mask)
            (found[name],) = context_parallel_unshard(mesh, [out], [2])
    x = torch.ones(1, 1, 3, 4)
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]),
        pytest.raises(
            ValueError,
            match="ambiguous: a sequence of 3 tokens is too short compared with the \\d",
        ),
    ):
        sdpa(x, x, x, attn_mask=torch.ones(1, 1).bool())
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("cp_size", "axes"), [(2, 1), (4, 2)])
def test_masks_where_ranks_hold_different_numbers_of_tokens(ranks, cp_size, axes):
    exact = {
        name: sdpa(*qkv(Job(13, kv_heads=4)), attn_mask=draw(9, *shape) > -1)
        for name, (shape, _) in MASKS.items()
    }
    for found in ranks(cp_size).run(masks_shared, axes):
        assert max(errors(found, exact).values()) < 1e-10


# ---------------------------------------------------------------- buffers


def cut_and_put_back():
    mesh, rank = world(), dist.get_rank()
    rows = torch.arange(18).view(2, 9)
    inputs, labels = rows[:, :-1], rows[:, 1:]  # views of one storage, which overlap
    table, scale = torch.arange(60.0).view(20, 3), torch.arange(8)
    whole = [x.clone() for x in (inputs, labels, table, scale)]
    same_object, view = inputs, table[:5]
    with context_parallel(
        mesh,
        buffers=[inputs, labels, table, scale],
        buffer_seq_dims=[-1, 1, 0, 0],
        no_restore_buffers={labels},
    ):
        mine = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert torch.equal(inputs, whole[0][:, mine])
        assert same_object is inputs
        assert torch.equal(labels, whole[1][:, mine])
        assert torch.equal(table, whole[2][mine])
        assert torch.equal(scale, whole[3][mine])
        assert torch.equal(view, whole[2][:5])
        inputs.zero_()  # of this rank, and of no other tensor
        put = context_parallel_unshard(mesh, [table, labels.bool(), scale], [0, 1, 0])
        assert torch.equal(put[0], whole[2][:8])
        assert torch.equal(put[1], whole[1].bool())
        assert torch.equal(put[2], whole[3])
    assert torch.equal(rows, torch.arange(18).view(2, 9))
    assert torch.equal(inputs, whole[0])
    assert torch.equal(labels, whole[1][:, mine])
    assert torch.equal(table, whole[2])
    assert torch.equal(scale, whole[3])
    (put,) = context_parallel_unshard(mesh, (labels,), (1,))
    assert torch.equal(put, whole[1])


@pytest.mark.ranks
def test_buffers_are_cut_in_place_and_put_back(ranks):
    ranks(2).run(cut_and_put_back)


def shards_of_both(length):
    """Return the shard of a row of torch, and ours; torch 2.11 does not take every length."""
    mine, theirs = torch.arange(length), torch.arange(length)
    with context_parallel(world(), buffers=[mine], buffer_seq_dims=[0]):
        ours = mine.tolist()
    try:
        with prototype().context_parallel(world(), buffers=[theirs], buffer_seq_dims=[0]):
            return theirs.tolist(), ours
    except AssertionError:
        return ours, ours


def both_orders(lengths):
    mesh = world()
    for length in lengths:
        theirs, ours = shards_of_both(length)
        assert theirs == ours
        row = torch.tensor(ours)[None]
        (whole,) = context_parallel_unshard(mesh, [row], [1])
        assert whole.tolist() == [list(range(length))]
        options = prototype()._cp_options  # where scripts set them: the module has no others
        options.enable_load_balance = False
        try:
            theirs, ours = shards_of_both(length)
            assert theirs == ours == sorted(ours)
            assert ours[-1] - ours[0] == len(ours) - 1
            (whole,) = context_parallel_unshard(mesh, [torch.tensor(ours)[None]], [1])
            assert whole.tolist() == [list(range(length))]
        finally:
            options.enable_load_balance = True


@pytest.mark.ranks
@pytest.mark.parametrize("cp_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shards_are_those_of_torch_wherever_torch_takes_the_length(ranks, cp_size):
    ranks(cp_size).run(both_orders, [12, 24, 5 * cp_size])


def two_before_backward():
    """Open two contexts of one leaf, one of them shorter, and go backward through both at last."""
    mesh, x = world(), draw(4, 2, 2, 16, 4).requires_grad_()
    total = 0.0
    for length in (16, 11):
        part = x[:, :, :length]
        for buffer in (part, x) if length == 16 else (part,):
            with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]):
                out = sdpa(buffer, buffer, buffer, is_causal=True)
                total = total + (out * buffer).sum()
    total.backward()
    dist.all_reduce(x.grad)
    return x.grad


@pytest.mark.ranks
def test_several_contexts_before_one_backward(ranks):
    x = draw(4, 2, 2, 16, 4).requires_grad_()
    parts = [x, x, x[:, :, :11]]
    sum((sdpa(part, part, part, is_causal=True) * part).sum() for part in parts).backward()
    for grad in ranks(2).run(two_before_backward):
        torch.testing.assert_close(grad, x.grad)


def memory_of_both():
    x, y = torch.randn(4, 64), torch.randn(4, 64)
    kept, freed = (StorageWeakRef(t.untyped_storage()) for t in (x, y))
    with context_parallel(None, buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers=[y]):
        gc.collect()
        return kept.expired(), freed.expired()


def test_what_is_not_put_back_is_freed():
    assert memory_of_both() == (False, True)


def test_buffers_are_put_back_after_an_error():
    x = torch.arange(6)
    whole = x.clone()
    with pytest.raises(RuntimeError), context_parallel(None, buffers=[x], buffer_seq_dims=[0]):
        x.zero_().add_(torch.ones(2))
    assert torch.equal(x, whole)
    with context_parallel(None, buffers=[x], buffer_seq_dims=[0]):  # and may be cut again
        pass


def test_what_the_caller_has_put_on_a_tensor_stays_there():
    x, seen = torch.randn(6, 2, requires_grad=True), []
    x.label = "mine"
    x.register_hook(lambda grad: seen.append(grad.shape))
    with context_parallel(None, buffers=[x], buffer_seq_dims=[0]):
        assert x.label == "mine"
        assert not x.is_leaf
        x.sum().backward()
    assert x.is_leaf
    assert x.label == "mine"
    assert seen == [(6, 2)]
    assert torch.equal(x.grad, torch.ones(6, 2))


def test_parameters_may_be_tables():
    tokens, table = torch.arange(6)[None], nn.Parameter(torch.randn(9, 2))
    with context_parallel(None, buffers=[tokens, table], buffer_seq_dims=[1, 0]):
        assert isinstance(table, nn.Parameter)
        assert table.shape == (6, 2)
        loss = table.sum()
    loss.backward()
    assert isinstance(table, nn.Parameter)
    assert table.grad.sum(1).tolist() == [2] * 6 + [0] * 3


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_all_modes(mode):
    x = draw(3, 2, 6, 4).requires_grad_()
    with mode():
        y = x * 2
        with context_parallel(None, buffers=[x, y], buffer_seq_dims=[1, 1]):
            out = sdpa(y, y, y)
        assert torch.equal(y, x * 2)
        torch.testing.assert_close(out, sdpa(y, y, y))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_may_remember_a_buffer(inside):
    x, weight = torch.randn(2, 6, 4), torch.randn(3, 4)
    x.requires_grad_(not inside)
    with torch.autocast("cpu", torch.bfloat16):
        functional.linear(x, weight)
        with context_parallel(None, buffers=[x], buffer_seq_dims=[1]):
            x.requires_grad_() if inside else None
            functional.linear(x, weight).sum().backward()
    assert x.requires_grad is not inside
    assert (x.grad is None) is inside


def test_the_signatures_are_those_of_torch():
    for name in ("context_parallel", "context_parallel_unshard", "set_rotate_method"):
        theirs = inspect.signature(getattr(prototype(), name)).parameters.values()
        ours = inspect.signature(getattr(lightning_cp, name)).parameters.values()
        described = [[(p.name, p.kind, p.default) for p in side] for side in (theirs, ours)]
        assert described[0] == described[1]


# ---------------------------------------------------------------- steps of a model


class Tiny(nn.Module):
    """Embeds, attends in one direction and scores; positions come from a table."""

    def __init__(self):
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(19, 8), nn.Linear(8, 24), nn.Linear(8, 19)
        self.register_buffer("table", draw(5, 64, 8))

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + sdpa(3 * q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, tokens, x=None):
        x = self.tokens(tokens) if x is None else x
        x = checkpoint(self.attend, x + self.table[: x.shape[1]], use_reentrant=False)
        return self.head(self.attend(x))


def build_tiny():
    torch.manual_seed(1)
    return Tiny().double()


def tokens_and_labels(length):
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 19, (2, length), generator=generator)
    return tokens, tokens.masked_fill(torch.rand(2, length, generator=generator) < 0.4, -100)


def gradients(model, loss):
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def step_alone(length):
    model, (tokens, labels) = build_tiny(), tokens_and_labels(length)
    loss = token_mean(model(tokens), labels)
    loss.backward()
    return gradients(model, loss)


def step_shared(length, embed, backward_inside, compiled=False):
    mesh, model = world(), build_tiny()
    tokens, labels = tokens_and_labels(length)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    buffers, dims = [labels, model.table], [1, 0]
    x = model.tokens(tokens) if embed else None
    buffers, dims = [tokens if x is None else x, *buffers], [1, *dims]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims) as cp:
        loss = token_mean(call(tokens, x), labels)
        assert cp.position_ids().shape == labels.shape
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    for parameter in model.parameters():
        cp.groups.mean(parameter.grad)
    torch.compiler.reset()
    return gradients(model, loss)


def steps_shared(jobs):
    return [step_shared(*job) for job in jobs]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cp_size", "is_whole"),
    [(2, False), *((size, True) for size in (2, 3))],
)
@pytest.mark.slow
def test_token_means_of_a_model_are_exact(ranks, cp_size, is_whole):
    jobs = list(itertools.product([24, 21, 2], [False, True], [False, True]))
    if not is_whole:
        jobs = [(24, False, True), (21, True, False), (2, False, False)]
    if cp_size == 2:
        jobs.append((21, False, False, True))
    for found in ranks(cp_size).run(steps_shared, jobs):
        for job, part in zip(jobs, found, strict=True):
            worst = errors(part, step_alone(job[0]))
            assert max(worst.values()) < 1e-10, (job, worst)


@pytest.mark.ranks
@pytest.mark.parametrize("cp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_script_for_the_prototype_runs_with_another_import(ranks, cp_size):
    exact = run_alone("cpu", torch.float64, length=48)
    for found in ranks(cp_size).run(run_shared_f64):
        worst = errors(found, exact)
        assert max(worst.values()) < 1e-10, worst
    assert exact["losses"][-1] < exact["losses"][0]


def run_shared_f64():
    return run_shared("cpu", torch.float64, length=48)


def hugging_face(lengths):
    """Return the loss of an enabled model beside that of the stock model, and gradients."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_patches import enable

    config = LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    mesh, worst = world(), []
    for length in lengths:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        tokens, labels = tokens_and_labels(length)
        places = torch.arange(length)[None]
        loss = model(tokens, position_ids=places, labels=labels).loss
        loss.backward()
        exact = gradients(model, loss)
        model.zero_grad()
        handle = enable(model)
        buffers, dims = [tokens, labels, places], [1, 1, 1]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims) as cp:
            loss = model(tokens, position_ids=places, labels=labels).loss
        loss.backward()
        for parameter in model.parameters():
            cp.groups.mean(parameter.grad)
        worst.append(max(errors(gradients(model, loss), exact).values()))
        handle.undo()
    return worst


@pytest.mark.ranks
def test_hugging_face_models_run_once_they_are_enabled(ranks):
    for worst in ranks(2).run(hugging_face, [12, 13]):
        assert max(worst) < 1e-4, worst


def uneven_parts():
    context_parallel_unshard(world(), [torch.randn(1, 1, 2 + 3 * dist.get_rank(), 4)], [2])


@pytest.mark.ranks
def test_parts_that_fit_no_row_are_refused_on_all_ranks():
    check_refused(
        uneven_parts, r"hold \[2, 5\] tokens, but layout='zigzag' of 7 tokens gives them \[3, 4\]"
    )


# ---------------------------------------------------------------- groups


def meshes():
    """Use the two axes of a mesh in turn, and look at how many groups that makes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    rows = torch.arange(8)
    counts, found = [], []
    for _ in range(3):
        for axis in ("cp", "dp"):
            row = rows.clone()
            with context_parallel(mesh[axis], buffers=[row], buffer_seq_dims=[0]):
                found.append((axis, mesh[axis].get_local_rank(), row.tolist()))
                with context_parallel(mesh["cp"], buffers=[inner := rows + 1], buffer_seq_dims=[0]):
                    x = inner.double()[None, :, None]
                    torch.testing.assert_close(sdpa(x, x, x), sdpa_of(rows + 1, inner))
                x = row.double()[None, :, None]
                torch.testing.assert_close(sdpa(x, x, x), sdpa_of(rows, row))
        counts.append(num_process_groups())
    assert len(set(counts)) == 1
    return found


def sdpa_of(rows, places):
    """Return attention over whole rows, of some of the queries."""
    scores = torch.outer(places.double(), rows.double())
    return (torch.softmax(scores, -1) @ rows.double())[None, :, None]


@pytest.mark.ranks
def test_each_mesh_has_its_own_ranks_and_makes_groups_once(ranks):
    for found in ranks(4).run(meshes):
        for _, rank, row in found:
            assert row == [[0, 1, 6, 7], [2, 3, 4, 5]][rank]


def join_again(folder):
    before = attend_shared(Job())
    size, rank = dist.group.WORLD.size(), dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size
    )
    return before, attend_shared(Job())


@pytest.mark.ranks
def test_groups_that_were_destroyed_are_not_used_again():
    pool = RankPool(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for results in pool.run(join_again, folder):
                for found in results:
                    assert max(errors(found, attend_whole(Job())).values()) < 1e-10
    finally:
        pool.stop()


def test_nothing_is_left_active():
    before = num_function_modes()
    with context_parallel(None, buffers=[torch.arange(4)], buffer_seq_dims=[0]):
        assert active_step.current() is not None
    assert num_function_modes() == before
    assert active_step.current() is None


# ---------------------------------------------------------------- what is refused


def check_refused(fn, message, *args):
    """Check that both ranks refuse, in the words of the one that sees why."""
    pool = RankPool(2)
    try:
        for said in pool.run(said_by, fn, args):
            assert re.search(message, said), said
    finally:
        pool.stop()


def said_by(fn, args):
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


TOKENS = torch.arange(12).view(2, 6)
TABLE = torch.randn(6, 3)


class Own(torch.Tensor):
    pass


REFUSED = {
    "more buffers than dims": (
        {"buffers": [TOKENS, TABLE], "buffer_seq_dims": [1]},
        r"context_parallel\(\) got 2 buffers and 1 buffer_seq_dims: give one dim for each",
    ),
    "no buffers": ({}, r"got no buffers.*buffers=\[tokens\], buffer_seq_dims=\[1\]"),
    "no dims": ({"buffers": [TOKENS]}, "got 1 buffers and 0 buffer_seq_dims"),
    "a tensor for a list": (
        {"buffers": TOKENS, "buffer_seq_dims": 1},
        r"needs a list of tensors and a list of dims: \[x\] and \[1\]",
    ),
    "no tensor": (
        {"buffers": [TOKENS.tolist()], "buffer_seq_dims": [1]},
        r"buffers\[0\] is a list, but only plain tensors",
    ),
    "another kind of tensor": (
        {"buffers": [TOKENS, TABLE.as_subclass(Own)], "buffer_seq_dims": [1, 0]},
        r"buffers\[1\] is a Own.*to_local\(\)",
    ),
    "no such dim": (
        {"buffers": [TOKENS], "buffer_seq_dims": [2]},
        r"buffers\[0\] has shape \(2, 6\), but buffer_seq_dims gives dim 2",
    ),
    "kept, and not given": (
        {"buffers": [TOKENS], "buffer_seq_dims": [1], "no_restore_buffers": {TOKENS.clone()}},
        "no_restore_buffers=...\\) holds a tensor that is not in buffers",
    ),
    "given twice": (
        {"buffers": [TABLE, TABLE], "buffer_seq_dims": [0, 0]},
        r"context_parallel\(buffers=...\) holds a tensor twice. Give it once",
    ),
    "no tokens": (
        {"buffers": [TOKENS[:, :0]], "buffer_seq_dims": [1]},
        "sequences of length 0: there is nothing to attend to",
    ),
    "shorter than the first": (
        {"buffers": [TOKENS, TOKENS[:, 1:]], "buffer_seq_dims": [1, 1]},
        r"buffers\[0\] of shape \(2, 6\) gives a sequence length of 6, but buffers\[1\] of shape "
        r"\(2, 5\) has 5. Put a buffer of the sequence first",
    ),
    "another sequence": (
        {"buffers": [TOKENS, torch.randn(2, 9, 4)], "buffer_seq_dims": [1, 1]},
        r"length of 6, but buffers\[1\] of shape \(2, 9, 4\) has 9. .* Only a table of "
        r"positions may be longer: .*Another sequence needs a context_parallel\(\) of its own",
    ),
    "another sequence without a batch": (
        {"buffers": [TABLE, torch.randn(9, 4)], "buffer_seq_dims": [0, 0]},
        r"length of 6, but buffers\[1\] of shape \(9, 4\) has 9.",
    ),
    "a longer table of numbers": (
        {"buffers": [TOKENS, torch.arange(9)], "buffer_seq_dims": [1, 0]},
        "Only a table of positions may be longer: floating-point values without a batch dim",
    ),
    "one token more": (
        {"buffers": [TOKENS[:1], torch.arange(7)[None]], "buffer_seq_dims": [1, 1]},
        r"buffers\[1\] of shape \(1, 7\) has 7. .*Only a table of positions",
    ),
    "a longer table with a batch dim": (
        {"buffers": [TOKENS[:1], torch.randn(1, 9, 4)], "buffer_seq_dims": [1, 1]},
        "Only a table of positions may be longer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_buffers_are_refused_and_left_as_they_are(name):
    given, message = REFUSED[name]
    tokens, table = TOKENS.clone(), TABLE.clone()
    with (
        pytest.raises((TypeError, ValueError), match=message),
        context_parallel(None, **given),
    ):
        pass
    assert torch.equal(tokens, TOKENS)
    assert torch.equal(table, TABLE)


def cut_again(way):
    mesh, x = world(), torch.arange(12).view(2, 6)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]) as cp:
        if way == "context":
            again = context_parallel(mesh, buffers=[x], buffer_seq_dims=[1])
        else:
            again = cp.step({"input_ids": x})
        with again:
            pass


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["context", "step"])
def test_a_buffer_is_cut_once(way):
    check_refused(cut_again, "which is already this rank's shard: the active step has sharded", way)


@pytest.mark.parametrize(
    ("buffers", "dims", "message"),
    [
        ([TABLE], [], r"context_parallel_unshard\(\) got 1 buffers and 0 seq_dims"),
        ([TABLE], [3], r"buffers\[0\] has shape \(6, 3\), but seq_dims gives dim 3"),
        ([TABLE[:0]], [0], "sequences of length 0"),
    ],
)
def test_what_cannot_be_put_together_is_refused(buffers, dims, message):
    with pytest.raises(ValueError, match=message):
        context_parallel_unshard(None, buffers, dims)


def test_load_balancers_are_refused():
    balancer = prototype()._HeadTailLoadBalancer(6, 1, "cpu")
    with pytest.raises(ValueError, match=r"load_balancer=_HeadTailLoadBalancer\).*Leave it out"):
        context_parallel_unshard(None, [TABLE], [0], balancer)


def test_no_buffers_are_put_together():
    assert context_parallel_unshard(None, [], []) == []


def test_unknown_ways_of_moving_keys_are_refused():
    with pytest.raises(ValueError, match="rotate_method='ring' is unknown. Use one of 'allgather'"):
        set_rotate_method("ring")


def test_meshes_of_two_axes_and_other_things_are_refused():
    with pytest.raises(TypeError, match="got a str. Give a 1-D DeviceMesh"):
        context_parallel("cp").__enter__()


def different_buffers(kind):
    rank = dist.get_rank()
    rows = TOKENS + rank if kind == "values" else TOKENS[:, : 6 - rank]
    dims = [1 + rank] if kind == "dims" else [1]
    with context_parallel(world(), buffers=[rows], buffer_seq_dims=dims):
        pass


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("values", "must hold the same batch, but rank 1 and rank 0 differ in their values"),
        ("shapes", r"differ in their shapes; this is rank \d, with buffers\[0\] \(2, [56]\) int64"),
        ("dims", r"buffers\[0\] has shape \(2, 5\), but buffer_seq_dims gives dim 2"),
    ],
)
def test_buffers_that_differ_between_ranks_are_refused_on_all(kind, message):
    check_refused(different_buffers, message, kind)


def wrapped_model():
    model = nn.parallel.DistributedDataParallel(build_tiny())
    tokens, _ = tokens_and_labels(8)
    buffers = [tokens, model.module.table]
    with context_parallel(world(), buffers=buffers, buffer_seq_dims=[1, 0]):
        model(tokens)


@pytest.mark.ranks
def test_buffers_that_ddp_overwrites_are_noticed():
    check_refused(wrapped_model, r"buffers\[1\] was overwritten.*broadcast_buffers=False")
