"""Hybrid sharding, tensor and expert parallelism on NCCL ranks: in float64 equal to one process, in
bfloat16 no further from float32 than one process."""

import inspect

import pytest
import torch
from lightning.pytorch import LightningModule
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.lightning.mesh_runs import (
    SHAPE,
    Module,
    build_optimizer,
    check,
    hybrid,
    run_alone,
    run_fit,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

try:
    from transformers.distributed import DistributedConfig

    SIZES = inspect.signature(DistributedConfig).parameters
except ImportError:
    SIZES = {}
distributes = pytest.mark.skipif(
    "ep_size" not in SIZES, reason="transformers older than 5.21 does not divide models"
)

LENGTH, NUM_BATCHES = 333, 20
LARGER = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def build_stock(name):
    torch.manual_seed(0)
    shape = SHAPE | LARGER | {"initializer_range": 0.1}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).train()
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **EXPERTS)).train()


class Stock(Module):
    """Trains a model as transformers builds it."""

    def __init__(self, name):
        LightningModule.__init__(self)
        self.model, self.losses = build_stock(name), []

    def configure_optimizers(self):
        optimizer = build_optimizer(self)
        optimizer.param_groups[0]["lr"] = 1e-3
        return optimizer


class Loaded(Stock):
    """Each rank reads its part of the weights."""

    def __init__(self, folder, sizes):
        LightningModule.__init__(self)
        self.folder, self.sizes, self.model, self.losses = folder, sizes, None, []

    def configure_model(self):
        self.model = self.model or Qwen3MoeForCausalLM.from_pretrained(
            self.folder,
            distributed_config=DistributedConfig(**self.sizes),
            dtype=torch.bfloat16,
        )
        self.model.train()


def run_stock(name, context, options, precision, loaded=None):
    kind = Stock if loaded is None else lambda _: Loaded(*loaded)
    losses, weights, *_ = run_fit(
        name, NUM_BATCHES, context, options, kind=kind, length=LENGTH, precision=precision
    )
    return losses, {name: weight.cpu() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def alone(nccl):
    """Return the run of a model on one rank, by precision."""
    done = {}

    def get(name, precision):
        key = (name, precision)
        if key not in done:
            done[key] = nccl(1).run(run_stock, name, 1, {}, precision, timeout=300)[0]
        return done[key]

    return get


def distances(a, b):
    """Return how far losses and weights are from each other."""
    losses = (torch.tensor(a[0]) - torch.tensor(b[0])).square().mean().sqrt().item()
    weights = [(a[1][name].double() - b[1][name].double()).square().sum() for name in b[1]]
    return losses, sum(weights).sqrt().item()


def check_close(found, alone, name, precision):
    exact = alone(name, "32-true")
    noise = distances(alone(name, precision), exact)
    distance = distances(found, exact)
    print(f"{distance=} {noise=}")  # noqa: T201
    assert distance[0] < 2 * noise[0]
    assert distance[1] < 2 * noise[1]
    assert sum(found[0][-5:]) < sum(found[0][:5])


TENSOR = {"tensor_parallel_size": 2}
CELLS = {
    "data 2, context 2, hybrid": ("llama", 4, 2, hybrid(2)),
    "context 4, hybrid": ("llama", 4, 4, hybrid(2)),
    "experts, data 2, context 2, hybrid": ("moe", 4, 2, hybrid(2)),
    "tensor 2": ("llama", 2, 1, TENSOR),
    "context 2, tensor 2": ("llama", 4, 2, TENSOR),
    "data 2, tensor 2, hybrid": ("llama", 4, 1, hybrid(1, **TENSOR)),
    "experts, context 2, tensor 2": ("moe", 4, 2, TENSOR),
}
PARAMS = [pytest.param(name, marks=distributes if "tensor" in name else ()) for name in CELLS]


@pytest.mark.parametrize("cell", PARAMS)
def test_in_float64_a_mesh_trains_as_one_process(nccl, cell):
    name, size, context, options = CELLS[cell]
    exact = run_alone(name, 4, device="cuda")
    for found in nccl(size).run(run_fit, name, 4, context, options, timeout=300):
        check(found, exact)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("cell", PARAMS)
def test_in_bfloat16_a_mesh_is_as_close_to_float32_as_one_process(nccl, alone, cell, precision):
    name, size, context, options = CELLS[cell]
    for found in nccl(size).run(run_stock, name, context, options, precision, timeout=300):
        check_close(found, alone, name, precision)


@distributes
@pytest.mark.parametrize(
    ("sizes", "context", "options"),
    [
        ({"fsdp_size": 4, "ep_size": 4}, 4, {}),
        ({"fsdp_size": 4, "ep_size": 2}, 2, {}),
        ({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, 2, TENSOR),
    ],
    ids=["one copy", "two copies", "tensor"],
)
def test_in_bfloat16_experts_on_ranks_are_as_close_to_float32_as_one_process(
    nccl, alone, tmp_path, sizes, context, options
):
    build_stock("moe").save_pretrained(tmp_path)
    loaded = (str(tmp_path), sizes)
    pool = nccl(4)
    for found in pool.run(run_stock, "moe", context, options, "bf16-true", loaded, timeout=300):
        check_close(found, alone, "moe", "bf16-true")
