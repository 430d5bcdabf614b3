"""Parameters: blocks are found, all ranks get the same weights, meta models are filled."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_cp.fsdp.gathering import find_units
from lightning_cp.fsdp.sharding import (
    drop_unused_gradients,
    fill_sharded,
    find_blocks,
    is_sharded,
    prepare_reduction,
    reshard,
    set_gradient_reduction,
    shard_parameters,
)
from lightning_cp.private.fsdp2 import has_gradients_of_one_copy
from tests.lightning.jobs import full
from tests.parity import media_zoo, zoo

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


@zoo.needs_transformers("5.22")
def test_a_tower_that_the_model_names_is_sharded_by_its_layers():
    model = media_zoo.build_model("qwen2_5_omni_thinker")
    # So transformers names it, for itself alone.
    assert type(model.model.visual).__name__ in model._no_split_modules
    blocks = find_blocks(model)
    assert len(blocks) == len(set(blocks))
    assert not [type(block).__name__ for block in blocks if isinstance(block, PreTrainedModel)]
    assert {*model.model.visual.blocks, *model.model.audio_tower.layers} < set(blocks)


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


class Conditional(nn.Module):
    """Uses its second part only if it is told to."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, both):
        x = self.parts[0](x)
        return self.parts[1](x) * self.scale if both else x


def run_unused(num_ranks):
    """Return which gradients there are after backward passes that use a part or all."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp_cp",))
    torch.manual_seed(0)
    owner = nn.Sequential(Conditional())
    shard_parameters(owner, mesh, device=torch.device("cpu"))
    prepare_reduction(owner)
    model, found = owner[0], []

    def backward(both, *, sync=True):
        set_gradient_reduction(owner, sync)
        model(torch.ones(2, 4), both).sum().backward()
        drop_unused_gradients(find_units(owner), mesh)
        found.append([p.grad is not None for p in owner.parameters()])

    backward(True)
    owner.zero_grad()
    backward(False)
    backward(True)
    backward(False)  # a gradient of a former pass stays
    owner.zero_grad(set_to_none=False)
    backward(False)
    owner.zero_grad()
    backward(True, sync=False)
    backward(False)  # reduces what the pass before has left
    return found, model.scale.grad.full_tensor()


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameters_that_no_rank_used_have_no_gradient(num_ranks, ranks):
    every, some = [True] * 5, [False, True, True, False, False]
    for found, gradient in ranks(num_ranks).run(run_unused, num_ranks):
        assert found == [every, some, every, every, every, [False] * 5, every]
        assert gradient.abs().min() > 0


def run_unused_between_copies():
    """Return a gradient of a pass whose reduction between copies the next one does."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    owner = nn.Sequential(Conditional())
    shard_parameters(owner, mesh, device=torch.device("cpu"), sharding="hybrid")
    prepare_reduction(owner)
    for both in (True, False):
        set_gradient_reduction(owner, not both)
        owner[0](torch.ones(2, 4), both).sum().backward()
        drop_unused_gradients(find_units(owner), mesh)
    # Before torch 2.13 they wait on if the unit is not used; then training ends with an error.
    waits = any(has_gradients_of_one_copy(unit) for unit in find_units(owner))
    return [p.grad is not None or waits for p in owner.parameters()]


@pytest.mark.ranks
def test_gradients_that_wait_for_the_reduction_between_copies_stay(ranks):
    for found in ranks(2).run(run_unused_between_copies):
        assert all(found)


def run_used_by_one():
    """Return the gradients of what rank 1 has used, and rank 0 has not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    owner = nn.Sequential(Conditional())
    fully_shard(owner[0], mesh=mesh)
    prepare_reduction(owner)
    owner[0](torch.ones(2, 4), dist.get_rank() == 1).sum().backward()
    drop_unused_gradients(find_units(owner), mesh)
    return [p.grad.full_tensor() for p in owner.parameters()]


@pytest.mark.ranks
def test_a_parameter_that_one_rank_used_has_its_mean_gradient(ranks):
    first, second = ranks(2).run(run_used_by_one)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
        assert x.abs().sum() > 0


def run_half():
    """Return the reduced gradient of bfloat16 weights, and those of each rank before."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_cp",))
    torch.manual_seed(0)
    owner = nn.Sequential(nn.Linear(16, 32, dtype=torch.bfloat16))
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    scale = torch.linspace(0.3, 1.7, 32, dtype=torch.bfloat16)

    def gradient():
        owner.zero_grad()
        (owner[0](x.bfloat16()) * scale).sum().backward()
        return full(owner[0].weight.grad)

    local = gradient().float()
    each = [torch.empty_like(local) for _ in range(3)]
    dist.all_gather(each, local)
    shard_parameters(owner, mesh, device=torch.device("cpu"))
    prepare_reduction(owner)
    return gradient(), each


@pytest.mark.ranks
def test_gradients_of_half_precision_are_added_in_float32(ranks):
    for found, each in ranks(3).run(run_half):
        assert torch.equal(found, (sum(each) / 3).bfloat16())
        in_half = (each[0].bfloat16() + each[1].bfloat16() + each[2].bfloat16()) / 3
        assert not torch.equal(found, in_half)  # else nothing is seen


class Refuses(nn.Linear):
    def forward(self, x):
        if len(x) < 2:
            raise ValueError("too short")
        return super().forward(x)


def run_refused():
    """Return the kinds of parameters after a forward that has raised, and gradients of the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Refuses(3, 3))
    expected = torch.autograd.grad(model(torch.ones(2, 3)).sum(), [*model.parameters()])
    fully_shard(model[1])
    fully_shard(model)
    with pytest.raises(ValueError, match="too short"):
        model(torch.ones(1, 3))
    reshard(model)
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    return sharded, [full(p.grad) for p in model.parameters()], expected


@pytest.mark.ranks
def test_a_forward_that_has_raised_leaves_nothing_gathered(ranks):
    for sharded, grads, expected in ranks(2).run(run_refused):
        assert sharded
        torch.testing.assert_close(grads, list(expected))
