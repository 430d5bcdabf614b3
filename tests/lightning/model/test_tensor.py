"""Tensor parallelism: ranks that share the weights of each layer train as one process."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import ApertusConfig, ApertusForCausalLM

from hf_patches.enable import enable, is_enabled
from lightning_cp import token_mean
from lightning_cp.loss import chunked_loss
from lightning_cp.loss.vocabulary import sharded_cross_entropy
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
from tests.parity import zoo


def tensor(size=2, **options):
    return {"tensor_parallel_size": size, **options}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "context", "options"),
    [
        ("llama", 2, tensor()),
        ("llama", 1, tensor()),
        ("llama", 2, hybrid(1, **tensor())),
        ("moe", 2, tensor()),
        ("moe", 1, hybrid(1, **tensor())),
        ("moe", 1, hybrid(2, **tensor())),
    ],
)
@pytest.mark.slow
def test_weights_that_ranks_share_train_as_one_process(ranks, name, context, options):
    exact = run_alone(name, 2)
    for found in ranks(4).run(run_fit, name, 2, context, options):
        check(found, exact)
        assert "tensor=2" in found[3]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("every", [True, False])
def test_gradients_of_accumulated_batches_count_once(ranks, every):
    exact = run_alone("moe", 5, accumulate=2)  # its norms of heads have partial gradients
    options = tensor(reduce_every_microbatch=every)
    for found in ranks(4).run(run_fit, "moe", 5, 2, options, 2):
        check(found, exact)


LAYOUTS = {
    "tensor": (2, tensor()),
    "tensor and copies": (1, hybrid(1, **tensor())),
    "full": (4, {}),
    "none": (1, {"parameter_sharding": "none"}),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after", "folder"),
    [
        ("tensor", "full", True),
        ("full", "tensor", True),
        ("tensor", "tensor and copies", True),
        ("tensor and copies", "none", True),
        ("tensor", "full", False),
        ("full", "tensor", False),
    ],
)
@pytest.mark.slow
def test_a_checkpoint_resumes_with_another_number_of_tensor_ranks(
    ranks, tmp_path, before, after, folder
):
    exact = run_alone("llama", 2, epochs=2)
    path, kind = str(tmp_path / "saved.ckpt"), {"save_distributed_checkpoint": folder}
    context, options = LAYOUTS[before]
    options = {**options, **kind, "verify_steps": False}
    ranks(4).run(run_fit, "llama", 2, context, options, 1, None, path)
    context, options = LAYOUTS[after]
    options = {**options, "verify_steps": False}
    for found in ranks(4).run(run_fit, "llama", 2, context, options, 1, path, None, 2):
        check(found[:2], exact)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True, "keep_attention": "all"},
        {"activation_checkpointing": True, "offload": "all", "tile": 4},
        {"compile": "layers"},
        {"algorithm": "ring"},
        {"algorithm": "ulysses"},
        {"parameter_offload": True},
        {"broadcast_batch": True},
    ],
    ids=str,
)
def test_other_options_apply_to_the_parts_that_ranks_hold(ranks, options):
    exact = run_alone("moe", 2)
    for found in ranks(4).run(run_fit, "moe", 2, 2, tensor(**options)):
        check(found, exact)


class Chunked(Module):
    """Computes the loss in chunks, over a vocabulary that stays sharded."""

    def configure_model(self):
        if not is_enabled(self.model):
            enable(self.model, chunked_loss="always")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", pytest.param("moe", marks=pytest.mark.slow)])
def test_the_vocabulary_may_stay_sharded_in_the_loss(ranks, monkeypatch, name):
    exact = run_alone(name, 2)
    for found, shapes in ranks(4).run(run_chunked, name):
        check(found, exact)
        assert set(shapes) <= {(30,), (31,)}  # of 61


def run_chunked(name):
    shapes = []

    def record(logits, targets):
        shapes.append(tuple(logits.to_local().shape[2:]))
        return sharded_cross_entropy(logits, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "sharded_cross_entropy", record)
        patch.setattr(chunked_loss, "MAX_CHUNK_LOGITS", 300)  # chunks of 9 tokens
        return run_fit(name, 2, 2, tensor(verify_steps=False), kind=Chunked), shapes


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        heads = [
            part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)
        ]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(61, 16), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 61)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UserPlan(LightningModule):
    """A model of a user's own, with a plan of torch's, and a temperature that it learns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses = Plain().double(), []
        self.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def configure_model(self):
        mesh = self.trainer.strategy.tensor_mesh
        plan = {f"layers.{i}.{name}": ColwiseParallel() for i in range(2) for name in "qkv"}
        plan |= {f"layers.{i}.out": RowwiseParallel() for i in range(2)}
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(self.model, mesh, plan)

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["input_ids"]) / self.temperature.exp()
        loss = token_mean(logits, batch["labels"])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return build_optimizer(self)


def run_user_plan(context):
    with elastic_environment():
        module = UserPlan()
        strategy = doors.strategy(context, tensor_parallel_size=2)
        trainer = build_trainer(strategy=strategy, max_epochs=1)
        trainer.fit(module, DataLoader(Samples(3), GLOBAL_BATCH))
        return module.losses[-3:], {n: full(p.detach()) for n, p in module.named_parameters()}


def train_plain():
    module, samples, losses = UserPlan(), Samples(3), []
    optimizer = build_optimizer(module)
    for index in range(3):
        rows = slice(GLOBAL_BATCH * index, GLOBAL_BATCH * (index + 1))
        logits = module.model(samples.tokens[rows])[:, :-1].flatten(0, 1)
        logits = logits / module.temperature.exp()
        loss = nn.functional.cross_entropy(logits, samples.labels[rows, 1:].flatten())
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plan_of_the_user_trains_as_one_process(ranks):
    exact = train_plain()
    for context in (1, 2):
        for found in ranks(2 * context).run(run_user_plan, context):
            check(found, exact)


class NoPlan(UserPlan):
    def configure_model(self):
        pass


def run_refused(kind, options):
    with elastic_environment():
        trainer = build_trainer(strategy=doors.strategy(1, **options), max_steps=1)
        try:
            trainer.fit(kind(), DataLoader(Samples(1), GLOBAL_BATCH))
        except ValueError as error:
            return str(error)
        return None


def heads():
    return Module("llama")  # 2 KV heads


def adapters():
    module = Module("llama")
    module.model = get_peft_model(module.model, LoraConfig(target_modules=["q_proj"]))
    return module


def unknown():
    module = Module("llama")
    config = ApertusConfig(**SHAPE, pad_token_id=0)
    module.model = ApertusForCausalLM(config)
    return module


def narrow():
    module = Module("llama")
    module.model = build("llama", num_attention_heads=8, num_key_value_heads=8, intermediate_size=9)
    return module


def no_plan():
    module = Module("llama")
    module.model.tp_plan = {}
    return module


@pytest.mark.ranks
@pytest.mark.slow
def test_models_that_cannot_be_shared_are_refused(ranks):
    pool = ranks(4)
    for kind, size, message in (
        (NoPlan, 2, "NoPlan has no Hugging Face model whose plan could be applied. Apply a plan"),
        (heads, 4, "tensor_parallel_size=4 does not divide num_key_value_heads=2 of LlamaForCaus"),
        (adapters, 2, "has adapters, which the plans of transformers do not divide. Train all"),
        (unknown, 2, "the plan of ApertusForCausalLM (model type 'apertus') has not been found to"),
        (narrow, 4, "one of the ranks would have no part of `model.layers.0.mlp.gate_proj.weight`"),
        (no_plan, 2, "transformers has no tensor parallel plan for LlamaForCausalLM. Leave it"),
    ):
        for text in pool.run(run_refused, kind, tensor(size)):
            assert message in text


def run_other_batch():
    with elastic_environment():
        trainer = build_trainer(strategy=doors.strategy(2, **tensor()), max_steps=1)
        samples = Samples(1)
        samples.tokens = samples.tokens.roll(dist.get_rank() % 2, 0)  # by tensor rank
        try:
            trainer.fit(Module("llama"), DataLoader(samples, GLOBAL_BATCH))
        except ValueError as error:
            return str(error)
        return None


@zoo.needs_transformers("5.21")
@pytest.mark.ranks
def test_tensor_ranks_must_hold_the_same_batch(ranks):
    for text in ranks(4).run(run_other_batch):
        assert "All ranks of a tensor-parallel group must hold the same batch, but rank 1" in text


class Dropping(UserPlan):
    """Drops hidden states, which each tensor rank has in full."""

    def training_step(self, batch, batch_idx):
        x = self.model.embed(batch["input_ids"])
        for layer in self.model.layers:
            x = nn.functional.dropout(layer(x), 0.5)
        return token_mean(self.model.head(x), batch["labels"])


def run_dropping():
    with elastic_environment():
        torch.manual_seed(dist.get_rank())
        strategy = doors.strategy(1, tensor_parallel_size=4, verify_steps=False)
        module = Dropping()
        torch.manual_seed(dist.get_rank())
        build_trainer(strategy=strategy, max_steps=2).fit(
            module, DataLoader(Samples(2), GLOBAL_BATCH)
        )
        return module.model.embed.weight.full_tensor()


@pytest.mark.ranks
@pytest.mark.slow
def test_tensor_ranks_drop_the_same_hidden_states(ranks):
    first, *others = ranks(4).run(run_dropping)
    for other in others:
        assert torch.equal(first, other)
