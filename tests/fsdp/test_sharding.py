"""Parameters: blocks are found, all ranks get the same weights, meta models are filled."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp.fsdp.sharding import (
    fill_sharded,
    find_blocks,
    is_sharded,
    reshard,
    shard_parameters,
)
from tests.lightning.jobs import full

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    dtype="float32",
)


class Owner(nn.Module):
    """Stands for a LightningModule."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)})


def llama(device="cpu", seed=0):
    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM(LLAMA).eval()


def test_blocks_are_those_that_the_model_names():
    blocks = find_blocks(llama())
    assert [type(block).__name__ for block in blocks] == ["LlamaDecoderLayer"] * 3


def test_blocks_are_the_items_of_the_outermost_lists():
    inner = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([inner, nn.ReLU(), nn.Linear(2, 2)]))
    assert find_blocks(model) == [inner, model[1][2]]


def test_blocks_may_be_named_by_class_or_pattern():
    model = llama()
    assert find_blocks(model, ["LlamaMLP"]) == [layer.mlp for layer in model.model.layers]
    assert find_blocks(model, ["model.layers.1"]) == [model.model.layers[1]]


def run_shard(device, sharding):
    """Shard a model of which each rank has other weights; return what it computes and holds."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_cp",))  # noqa: TID251
    model = llama(device, seed=dist.get_rank())
    owner = Owner(model)
    shard_parameters(owner, mesh, sharding=sharding, device=torch.device("cpu"))
    is_full = sharding == "full"
    assert is_sharded(owner) == is_full
    assert all(isinstance(p, DTensor) == is_full for p in owner.parameters())
    assert isinstance(model.model.layers[0], FSDPModule) == is_full
    assert model.lm_head.weight is model.model.embed_tokens.weight
    logits = model(input_ids=torch.arange(8)[None]).logits
    reshard(owner)  # a forward without backward leaves the root gathered
    weights = {name: full(p.detach()) for name, p in model.named_parameters()}
    held = sum((p.to_local() if is_full else p).numel() for p in owner.parameters())
    return logits.detach(), weights, model.model.rotary_emb.inv_freq, held


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_every_rank_computes_with_the_weights_of_rank_0(ranks, sharding):
    stock = llama(seed=0)
    expected = stock(input_ids=torch.arange(8)[None]).logits
    whole = sum(p.numel() for p in Owner(stock).parameters())
    for logits, weights, _, held in ranks(2).run(run_shard, "cpu", sharding):
        torch.testing.assert_close(logits, expected)
        for name, parameter in stock.named_parameters():
            assert torch.equal(weights[name], parameter)
        assert held == (whole // 2 if sharding == "full" else whole)


@pytest.mark.ranks
def test_a_model_on_the_meta_device_is_filled_block_by_block(ranks):
    stock = llama()
    found = ranks(2).run(run_shard, "meta", "full")
    for logits, weights, inv_freq, _ in found:
        assert torch.equal(logits, found[0][0])
        assert logits.isfinite().all()
        # A buffer that no checkpoint holds: whatever the memory held would be wrong for ever.
        assert torch.equal(inv_freq, stock.model.rotary_emb.inv_freq)
        assert all(torch.equal(weights[name], value) for name, value in found[0][1].items())
        assert 0.01 < weights["model.layers.0.mlp.up_proj.weight"].std() < 0.03


def run_user_sharded():
    """Fill a model that its user has sharded on the meta device."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    owner = Owner(llama("meta"))
    for layer in owner.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(owner.model, mesh=mesh)
    fill_sharded(owner, torch.device("cpu"))
    return owner.model(input_ids=torch.arange(8)[None]).logits.detach()


@pytest.mark.ranks
def test_a_model_that_its_user_sharded_on_the_meta_device_is_filled(ranks):
    first, second = ranks(2).run(run_user_sharded)
    assert torch.equal(first, second)
    assert first.isfinite().all()


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def run_no_reset():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_cp",))
    with torch.device("meta"):
        owner = Owner(NoReset())
    try:
        shard_parameters(owner, mesh, device=torch.device("cpu"))
    except TypeError as error:
        return str(error)


@pytest.mark.ranks
def test_what_cannot_be_filled_is_refused(ranks):
    (said,) = ranks(1).run(run_no_reset)
    assert "NoReset was built on the meta device, and nothing sets" in said
    assert "its `weight`" in said
