"""Replicated parameters: each backward leaves the mean of all ranks' gradients on every rank."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_cp.fsdp import replication
from lightning_cp.fsdp.gathering import gather_parts
from lightning_cp.fsdp.replication import average_gradients, is_replicated, set_averaging
from lightning_cp.fsdp.scalars import unsharded_scalars
from lightning_cp.fsdp.sharding import shard_parameters
from tests.lightning.jobs import full

pytestmark = pytest.mark.ranks


class Experts(nn.Module):
    """A trunk, and experts of which each call uses one."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 3, dtype=dtype)
        self.experts = nn.ModuleList(nn.Linear(3, 3, dtype=dtype) for _ in range(3))

    def forward(self, x, expert):
        return self.experts[expert](self.trunk(x)).square().sum()


def build(dtype=torch.float64):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_cp",))  # noqa: TID251
    model = Experts(dtype)
    return model, average_gradients(model, mesh)


def sample(rank, dtype=torch.float64):
    return torch.arange(1, 4, dtype=dtype) * (rank + 1) / 7


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


def exact(dtype=torch.float64, times=1):
    """Return the mean over two ranks, rank r with expert r, computed by one process."""
    model = Experts(dtype)
    for _ in range(times):
        for rank in range(2):
            (model(sample(rank, dtype), rank) / 2).backward()
    return grads(model)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-14, atol=1e-15)


def run_averaged():
    rank = dist.get_rank()
    model, stop = build()
    assert is_replicated(model)
    assert not is_replicated(deepcopy(model))  # an average of weights, say
    model(sample(rank), rank).backward()
    same(grads(model), exact())  # the expert that no rank used has no gradient
    model(sample(rank), rank).backward()  # into gradients that are averaged already
    same(grads(model), exact(times=2))

    model.zero_grad()
    set_averaging(model, enabled=False)  # gradient accumulation
    model(sample(rank), rank).backward()
    assert model.experts[1 - rank].weight.grad is None
    set_averaging(model, enabled=True)
    model(sample(rank), rank).backward()
    same(grads(model), exact(times=2))

    stop()
    assert not is_replicated(model)
    model.zero_grad()
    model(sample(rank), rank).backward()
    assert model.experts[1 - rank].weight.grad is None


def run_unfrozen():
    """Parameters that were frozen at the start, and a backward that raises."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    model = Experts().requires_grad_(False)
    average_gradients(model, mesh)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    x = sample(rank).requires_grad_()
    with pytest.raises(ValueError, match="on purpose"):
        model(Fails.apply(x), rank).backward()
    model.zero_grad()
    model(sample(rank), rank).backward()
    same(grads(model), exact())


def run_small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replication, "BUCKET_BYTES", 64)  # of 128 MiB
        run_averaged()


def run_half():
    """bfloat16 gradients are summed in float32, and rounded once: seen with three ranks."""
    rank = dist.get_rank()
    model, _ = build(torch.bfloat16)
    local = Experts(torch.bfloat16)
    local(sample(rank, torch.bfloat16), 0).backward()
    model(sample(rank, torch.bfloat16), 0).backward()
    mine = local.trunk.weight.grad.float()
    each = [torch.empty_like(mine) for _ in range(3)]
    dist.all_gather(each, mine)
    assert torch.equal(model.trunk.weight.grad, (sum(each) / 3).bfloat16())
    first, second, third = (x.bfloat16() for x in each)
    assert not torch.equal(model.trunk.weight.grad, (first + second + third) / 3)


def run_sparse():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    model = nn.Embedding(4, 2, sparse=True)
    average_gradients(model, mesh)
    model(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("run", [run_averaged, run_unfrozen, run_small_buckets])
def test_gradients_are_the_mean_over_ranks(ranks, run):
    ranks(2).run(run)


def test_gradients_of_half_precision_are_added_in_float32(ranks):
    ranks(3).run(run_half)


def test_sparse_gradients_are_refused(ranks):
    with pytest.raises(AssertionError, match="`weight` has a sparse gradient"):
        ranks(2).run(run_sparse)


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))


class Beside(nn.Module):
    """A trunk to shard, but for a number, and a parameter of its own that one rank does not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = Scaled()
        self.bonus = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x, rank):
        out = self.trunk(x) * self.trunk.scale
        out = self.trunk(out)  # after a use of what is never gathered
        return (out * self.bonus if rank == 0 else out).square().sum()


def run_beside():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    model = Beside()
    shard_parameters(model, mesh, device=torch.device("cpu"))
    gather_parts(model)
    average_gradients(model, mesh)
    assert not is_replicated(model)  # not all of it
    for times in (1, 2):
        with unsharded_scalars():
            model(sample(rank), rank).backward()
        one = Beside()
        for _ in range(times):
            for other in range(2):
                (one(sample(other), other) / 2).backward()
        same({name: full(x) for name, x in grads(model).items()}, grads(one))


def test_what_one_rank_does_not_use_is_averaged_beside_shards(ranks):
    ranks(2).run(run_beside)
