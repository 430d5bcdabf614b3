"""Shapes: parameter counts are those of the models, widths those that attention gets."""

import pytest
import torch
from transformers import AutoModelForCausalLM, ViTConfig

from hf_patches import model_shape
from lightning_cp.planner import KNOWN
from tests.parity.zoo import build_config
from tests.recipes.memory import REAL

NAMES = {
    "llama-8b": "meta-llama/Llama-3.1-8B",
    "llama-70b": "meta-llama/Llama-3.1-70B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-Base",
    "gpt-oss-20b": "openai/gpt-oss-20b",
}
ARCHITECTURES = [
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "gpt_oss"),
    *("deepseek_v3", "mistral", "phi3", "gpt2", "qwen3_next", "cohere2", "gemma3"),
]


def test_all_known_models_are_compared():
    assert NAMES.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", NAMES)
def test_known_shapes_are_those_of_the_models(name):
    assert model_shape(REAL[NAMES[name]], name=name) == KNOWN[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_the_model(name):
    config = build_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(config)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert len(shape.layers) == config.get_text_config().num_hidden_layers


def test_layers_have_the_widths_and_windows_of_the_config():
    full, latent = (model_shape(build_config(name)).layers[1] for name in ("llama", "deepseek_v3"))
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.window) == (4, 2, 16, None)
    assert (latent.num_kv_heads, latent.head_dim, latent.value_dim) == (4, 20, 14)
    windows = [layer.window for layer in model_shape(build_config("gemma2")).layers]
    assert windows == [13, None]
    mixed = model_shape(build_config("qwen3_next")).layers
    assert [layer.num_heads for layer in mixed] == [0, 4]


def test_a_token_meets_only_its_experts():
    layer = model_shape(build_config("mixtral")).layers[0]
    expert = 3 * 64 * 96
    assert layer.num_params - layer.num_active_params == 2 * expert  # two of four


def test_tied_heads_are_counted_once():
    plain, tied = (model_shape(build_config(name)) for name in ("llama", "llama:tied"))
    assert tied.is_tied
    assert not plain.is_tied
    assert plain.num_params - tied.num_params == plain.head_params == tied.head_params


def test_a_model_without_a_causal_head_is_refused():
    with pytest.raises(ValueError, match=r"'vit' has no causal language model .*Give"):
        model_shape(ViTConfig())


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("jamba", "its Mamba layers are computed on full sequences on every rank"),
        ("gpt_neo", "the model runs on full sequences on every rank"),
    ],
)
def test_the_cost_of_replicated_layers_is_unknown(name, what):
    with pytest.raises(ValueError, match=f"of type '{name}' are unknown: .*{what}"):
        model_shape(build_config(name))


def test_layers_with_a_halo_are_known():
    assert len(model_shape(build_config("zaya")).layers) == 2


def test_lora_parameters_are_those_of_peft():
    peft = pytest.importorskip("peft")
    config = build_config("llama")
    model = AutoModelForCausalLM.from_config(config)
    options = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, options)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert model_shape(config).lora_params(3) == trained
