"""Modules inside FSDP2 units that are called directly, and units that are called several times."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_patches import enable
from lightning_cp.fsdp.gathering import gather_parts
from lightning_cp.fsdp.sharding import shard_parameters
from tests import doors
from tests.lightning.jobs import full
from tests.parity import zoo

pytestmark = pytest.mark.ranks


def build_pair():
    """Return an enabled model to be sharded, and its copy."""
    model = zoo.build_model("llama")
    alone = copy.deepcopy(model)
    enable(model)
    enable(alone)
    return model, alone


def step(model, calls):
    batch = zoo.sample_batch("llama", rows=2, length=12)
    with doors.parallel(None).step(batch) as local:
        sum(model(**local).loss for _ in range(calls)).backward()


def differences(model, alone):
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((full(p.grad) - q.grad).abs().max().item() for p, q in pairs)


def run_roots():
    """Run a model three times before a backward, whose layers are FSDP2 roots by themselves."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    model, alone = build_pair()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    gather_parts(nn.Sequential(model))
    for one in (model, alone):
        step(one, calls=3)
    return differences(model, alone)


def run_direct_calls(shard_modules):
    """Call parts of units that are called as a whole before; the first call of all raises."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    model, alone = build_pair()
    owner = nn.Sequential(model)
    shard_parameters(owner, mesh, device=torch.device("cpu"), shard_modules=shard_modules)
    gather_parts(owner)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.model.layers[0].self_attn.q_proj(torch.zeros(1, 1))
    for one in (model, alone):
        step(one, calls=1)
    found = [differences(model, alone)]
    x = torch.randn(1, 3, model.config.hidden_size, dtype=model.dtype)
    positions = alone.model.rotary_emb(x, torch.arange(3)[None])
    layer, other = model.model.layers[0], alone.model.layers[0]
    with torch.no_grad():
        found.append((layer.mlp(x) - other.mlp(x)).abs().max().item())
        # The forward of a layer, whose own hooks are not called.
        pair = (one.forward(x, position_embeddings=positions) for one in (layer, other))
        found.append(torch.sub(*pair).abs().max().item())
    return max(found)


def run_all():
    units = [None, ["LlamaDecoderLayer", "LlamaMLP"]]
    return [run_roots(), *map(run_direct_calls, units)]


def test_units_that_are_roots_and_parts_that_are_called_directly_compute_the_same(ranks):
    for errors in ranks(2).run(run_all):
        assert max(errors) < 1e-12, errors
