"""Hybrid sharding: parameters sharded over some ranks, with copies on others, as on one process."""

import itertools
from functools import partial
from math import inf

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patches import enable
from lightning_cp import ContextParallelCallback
from lightning_cp.comm.mesh import resolve_shard_size
from lightning_cp.fsdp import sharding
from lightning_cp.lightning.model import model_setup, preparation
from lightning_cp.lightning.model.model_setup import choose_sharding
from lightning_cp.loss.means import global_mean
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.lightning.mesh_runs import (
    GLOBAL_BATCH,
    SHAPE,
    Module,
    Samples,
    build,
    build_optimizer,
    check,
    hybrid,
    run_alone,
    run_fit,
)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "context"), [("llama", 2), ("moe", 4)])
def test_copies_of_shards_train_as_one_process(ranks, name, context):
    exact = run_alone(name, 5)
    for found in ranks(4).run(run_fit, name, 5, context, hybrid(2)):
        check(found, exact)
        _, weights, held, said = found
        assert held < 0.51 * sum(weight.numel() for weight in weights.values())
        assert "parameters=hybrid shard_size=2" in said


def run_loop(num_batches):
    """Train in a loop of torch's own, with a copy of the parameters for each data rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "context_parallel"))
    cp = doors.parallel(mesh["context_parallel"], mesh["data_parallel"])
    model, samples, losses = build("llama"), Samples(num_batches), []
    enable(model)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh["data_parallel", "context_parallel"])
    optimizer = build_optimizer(model)
    for index in range(num_batches):
        start, stop = GLOBAL_BATCH * index, GLOBAL_BATCH * (index + 1)
        rows = slice(start + mesh.get_local_rank("data_parallel"), stop, 2)
        batch = {"input_ids": samples.tokens[rows], "labels": samples.labels[rows]}
        with cp.step(batch) as local:
            loss = model(**local).loss
            loss.backward()
        losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: full(p.detach()) for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plain_loop_with_copies_trains_as_one_process(ranks):
    exact = run_alone("llama", 3)
    for found in ranks(4).run(run_loop, 3):
        check(found, exact)


SPLITS = list(itertools.product(("llama", "moe"), (1, 2, 4, 8), (1, 2, 4, 8)))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "shard_size", "context"), SPLITS)
def test_twenty_steps_of_every_split_of_eight_ranks(ranks, name, shard_size, context):
    exact = run_alone(name, 20)
    for found in ranks(8).run(run_fit, name, 20, context, hybrid(shard_size)):
        check(found, exact)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "every"), [("moe", False), ("llama", False), ("llama", True)])
def test_accumulated_gradients_may_be_reduced_between_copies_once(ranks, name, every):
    exact = run_alone(name, 3, accumulate=2)
    options = hybrid(2, reduce_every_microbatch=every, verify_steps=False)
    for found in ranks(4).run(run_fit, name, 3, 2, options, 2):
        check(found, exact)


def run_offloaded(accumulate):
    """Train with parameters in host memory; return how FSDP2 was told so, too.

    Gradients are accumulated and reduced between copies once.
    """
    policies = []

    def record(*args, offload_policy, **kwargs):
        policies.append(offload_policy)
        return fully_shard(*args, offload_policy=offload_policy, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "fully_shard", record)
        options = hybrid(
            2, parameter_offload=True, reduce_every_microbatch=False, verify_steps=False
        )
        return run_fit("moe", 3, 2, options, accumulate), policies


@pytest.mark.ranks
@pytest.mark.slow
def test_parameters_in_host_memory_train_as_on_a_device(ranks):
    exact = run_alone("moe", 3, accumulate=2)
    for found, policies in ranks(4).run(run_offloaded, 2):
        check(found, exact)
        assert policies == [CPUOffloadPolicy(pin_memory=False)] * 3  # two layers and the root


class Averaged(Module):
    def configure_callbacks(self):
        return [StochasticWeightAveraging(0.1)]


def run_refused(kind):
    with elastic_environment():
        strategy = doors.strategy(2, parameter_offload=True, verify_steps=False)
        trainer = build_trainer(strategy=strategy, max_steps=1)
        module = kind("llama")
        try:
            for _ in range(2):  # a second run finds what the first one has sharded
                trainer.fit(module, DataLoader(Samples(1), GLOBAL_BATCH))
        except ValueError as error:
            return str(error)


@pytest.mark.ranks
def test_what_cannot_be_offloaded_is_refused(ranks):
    with pytest.raises(ValueError, match="sharding='none' replicates them. Use shard"):
        doors.strategy(parameter_offload=True, parameter_sharding="none")
    assert (
        "but configure_model() has sharded the model" in ranks(2).run(run_refused, SharedByUser)[0]
    )
    assert (
        "StochasticWeightAveraging keeps its average on" in ranks(2).run(run_refused, Averaged)[0]
    )
    assert ranks(2).run(run_refused, Module) == [None, None]


LAYOUTS = {
    "hybrid": (2, hybrid(2)),
    "full": (4, {"parameter_sharding": "full"}),
    "none": (1, {"parameter_sharding": "none"}),
    "hybrid of one": (4, hybrid(1)),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("hybrid", "full"),
        ("full", "hybrid"),
        ("none", "hybrid"),
        ("hybrid", "none"),
        ("hybrid", "hybrid of one"),
        ("hybrid of one", "hybrid"),
    ],
)
@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.slow
def test_a_checkpoint_of_one_sharding_resumes_in_another(ranks, tmp_path, before, after, folder):
    exact = run_alone("llama", 2, epochs=2)
    path, kind = str(tmp_path / "saved.ckpt"), {"save_distributed_checkpoint": folder}
    context, options = LAYOUTS[before]
    options = {**options, **kind, "verify_steps": False}
    ranks(4).run(run_fit, "llama", 2, context, options, 1, None, path)
    context, options = LAYOUTS[after]
    options = {**options, "verify_steps": False}
    for found in ranks(4).run(run_fit, "llama", 2, context, options, 1, path, None, 2):
        losses, weights, *_ = found
        check((losses, weights), exact)


def run_export(path):
    """Train one step, save the model for transformers, and return its weights."""
    with elastic_environment():
        module = Module("llama")
        trainer = build_trainer(strategy=doors.strategy(2, **hybrid(2)), max_steps=1)
        trainer.fit(module, DataLoader(Samples(1), GLOBAL_BATCH))
        module.model.save_pretrained(path)
        return {n: full(p.detach()) for n, p in module.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_model_of_copies_is_saved_for_transformers(ranks, tmp_path):
    weights = ranks(4).run(run_export, str(tmp_path))[0]
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.named_parameters():
        assert torch.equal(weight.double(), weights[name]), name


class SharedByUser(Module):
    """Shards its model over the mesh of the strategy."""

    def configure_model(self):
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.trainer.strategy.shard_mesh)
        fully_shard(self.model, mesh=self.trainer.strategy.shard_mesh)


class Float32(Module):
    """The stock model: `verify` compares with its loss, which is computed in float32."""

    def __init__(self, name):
        super().__init__(name)
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()


def run_verified(kind, options):
    with elastic_environment():
        module = kind("llama")
        trainer = build_trainer(
            strategy=doors.strategy(2, **options),
            max_epochs=1,
            callbacks=[ContextParallelCallback(verify_first_batch=kind is Float32)],
        )
        sampler = DistributedSampler(Samples(2), 2, dist.get_rank() // 2, shuffle=False)
        trainer.fit(module, DataLoader(Samples(2), GLOBAL_BATCH // 2, sampler=sampler))
        mesh = next(module.parameters()).device_mesh
        return module.losses[-2:], tuple(mesh.shape)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Float32, SharedByUser])
@pytest.mark.slow
def test_copies_are_verified_and_may_be_made_by_the_user(ranks, kind):
    for losses, shape in ranks(4).run(run_verified, kind, hybrid(2)):
        assert shape == (2, 2)
        if kind is SharedByUser:
            assert losses == pytest.approx(run_alone("llama", 2, clip=inf)[0], abs=1e-9)


class Skipping(LightningModule):
    """Uses its second part in the first batch of a window only."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def training_step(self, batch, batch_idx):
        x = self.parts[0](batch["inputs_embeds"])
        if batch_idx % 2 == 0:
            x = self.parts[1](x)
        return global_mean(x.sum(), torch.tensor(float(x.shape[:2].numel())))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_skipping(every):
    with elastic_environment():
        trainer = build_trainer(
            strategy=doors.strategy(
                2, **hybrid(2), reduce_every_microbatch=every, verify_steps=False
            ),
            max_epochs=1,
            accumulate_grad_batches=2,
        )
        batches = [{"inputs_embeds": torch.ones(1, 4, 4)}] * 2
        try:
            trainer.fit(Skipping(), DataLoader(batches, batch_size=None))
        except RuntimeError as error:
            return str(error)


@pytest.mark.ranks
def test_gradients_that_would_be_reduced_too_late_are_refused(ranks):
    for message in ranks(4).run(run_skipping, False):
        assert "Linear was not used in the last batch of an accumulation window" in message
        assert "reduce_every_microbatch=True" in message
    assert ranks(4).run(run_skipping, True) == [None] * 4


def run_auto(memory):
    """Return what ``auto`` is on two nodes of two devices with so many bytes."""
    with elastic_environment(), pytest.MonkeyPatch.context() as patch:
        own = None if memory is None else memory + dist.get_rank()
        patch.setattr(preparation, "device_bytes", lambda device: own)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("LOCAL_RANK", str(dist.get_rank() % 2))
        patch.setenv("GROUP_RANK", str(dist.get_rank() // 2))
        module = Module("llama")
        trainer = build_trainer(
            strategy=doors.strategy(parameter_sharding="auto", verify_steps=False),
            devices=2,
            num_nodes=2,
            max_steps=1,
        )
        sampler = DistributedSampler(Samples(1), 2, dist.get_rank() // 2, shuffle=False)
        trainer.fit(module, DataLoader(Samples(1), GLOBAL_BATCH // 2, sampler=sampler))
        return trainer.strategy.describe(), module.losses


WEIGHTS = sum(p.nbytes for p in build("llama").parameters())
ENOUGH = int(4 * WEIGHTS / 2 / model_setup.HYBRID_SHARE)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (ENOUGH, "hybrid shard_size=2"),
        pytest.param(ENOUGH - 1, "full", marks=pytest.mark.slow),
        pytest.param(None, "full", marks=pytest.mark.slow),
    ],
)
def test_auto_makes_copies_on_several_nodes_if_a_node_holds_them(ranks, memory, expected):
    exact = run_alone("llama", 1)[0]
    for said, losses in ranks(4).run(run_auto, memory):
        assert said.endswith(f"parameters={expected}")
        assert losses == pytest.approx(exact, abs=1e-9)


def test_auto_counts_frozen_weights_once(monkeypatch):
    class Ranks:
        def size(self):
            return 16

    monkeypatch.setattr(model_setup, "gather_objects", lambda mesh, value: [value, 2 * value])
    model = nn.Linear(100, 10, bias=False)  # 4,000 bytes, and 12,000 for training
    choose = partial(choose_sharding, model, Ranks(), ranks_per_node=8)
    assert choose(device_bytes=8000) == "hybrid"
    assert choose(device_bytes=7999) == "full"
    model.requires_grad_(False)
    assert choose(device_bytes=2000) == "hybrid"
    assert choose(device_bytes=1999) == "full"
    one_per_node = partial(choose_sharding, model, Ranks(), ranks_per_node=1)
    assert one_per_node(device_bytes=8000) == "full"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": 4}, r"shard_size=4\) is the number .* but it is 'full'. Set 'hybrid', or"),
        (hybrid(0), r"shard_size=0\): give a whole number of at least 1, or 'auto'"),
        (hybrid("node"), r"shard_size='node'\) is unknown. Use one of 'auto', a whole"),
    ],
)
def test_sizes_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        doors.strategy(**options)


def test_a_size_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(ValueError, match="shard_size=3 does not divide the 8 processes"):
        resolve_shard_size(3, world_size=8, ranks_per_node=8)
    assert resolve_shard_size("auto", world_size=8, ranks_per_node=8) == 8
