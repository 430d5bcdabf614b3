"""Models that transformers has distributed itself, with tensor and expert parallelism."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.lightning.mesh_runs import SHAPE, Module, build, check, norm, route, run_alone, run_fit


class Loaded(Module):
    """Loads a folder in configure_model(): each rank reads its part of the weights."""

    def __init__(self, folder, cls, sizes):
        super().__init__("llama")
        self.folder, self.cls, self.sizes, self.model = folder, cls, sizes, None

    def configure_model(self):
        self.model = self.model or self.cls.from_pretrained(
            self.folder,
            distributed_config=DistributedConfig(**self.sizes),
            dtype=torch.float64,
            experts_implementation="eager",
        )
        self.model.train()


def run_loaded(folder, sizes, context, options, accumulate=1, cls=Qwen3MoeForCausalLM, **kwargs):
    def load(_):
        return Loaded(folder, cls, sizes)

    with pytest.MonkeyPatch.context() as patch:  # in float64; plans wrap forward of the instances
        patch.setattr(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", norm)
        patch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", route)
        return run_fit("moe", 2, context, options, accumulate, kind=load, **kwargs)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    build("moe").save_pretrained(folder)
    return str(folder)


TENSOR = {"tensor_parallel_size": 2}
CASES = {
    # One copy of the experts: torch divides their gradients twice.
    "one copy": ({"fsdp_size": 4, "ep_size": 4}, 4, {"verify_steps": False}, 1),
    "two copies": ({"fsdp_size": 4, "ep_size": 2}, 2, {}, 2),
    "tensor": ({"fsdp_size": 2, "tp_size": 2}, 2, TENSOR, 2),
    "tensor, two copies": ({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, 2, TENSOR, 1),
    "tensor, one copy": ({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, 1, TENSOR, 1),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    list(CASES),
)
@pytest.mark.slow
def test_a_model_that_transformers_has_distributed_trains_as_one_process(ranks, moe, case):
    sizes, context, options, accumulate = CASES[case]
    exact = run_alone("moe", 2, accumulate)
    for found in ranks(4).run(run_loaded, moe, sizes, context, options, accumulate):
        check(found, exact)


class WithAdapters:
    @staticmethod
    def from_pretrained(*args, **options):
        model = Qwen3MoeForCausalLM.from_pretrained(*args, **options)
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def run_refused(folder, sizes, options, cls=LlamaForCausalLM, accumulate=1):
    try:
        run_loaded(folder, sizes, 1, options, accumulate, cls)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.ranks
@pytest.mark.slow
def test_distributed_models_that_are_not_exact_are_refused(ranks, moe, tmp_path):
    torch.manual_seed(0)
    tied = str(tmp_path)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(tied)
    pool, both = ranks(4), {"fsdp_size": 2, "tp_size": 2}
    mlp = "model.layers.*.mlp"
    masked = {f"{mlp}.gate": "ep_router", f"{mlp}.experts": "moe_tp_experts"}
    for arguments, message in (
        ((tied, {"fsdp_size": 4}, {}), "has tied weights: from the second step on, its head would"),
        (
            (moe, both, {}, Qwen3MoeForCausalLM),
            "loaded with DistributedConfig(tp_size=2, pp_size=1)",
        ),
        (
            (moe, both, {**TENSOR, "reduce_every_microbatch": False}, Qwen3MoeForCausalLM, 2),
            "would sum the gradients of its norms of heads over tensor ranks once more",
        ),
        (
            (moe, both, TENSOR, WithAdapters),
            "tensor_parallel_size=2: PeftModel has adapters, which",
        ),
        (
            (moe, {**both, "ep_size": 2, "ep_plan": masked}, TENSOR, Qwen3MoeForCausalLM),
            "was loaded with a plan of yours, DistributedConfig(tp_plan=None, ep_plan={'model.lay",
        ),
    ):
        for text in pool.run(run_refused, *arguments):
            assert message in text
