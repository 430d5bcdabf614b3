"""What the tests of tiles share: models, a step, and reading reports."""

import torch
from peft import LoraConfig, get_peft_model

from tests.parity.hf import errors

EXPECTED = {
    "llama": {"input_layernorm", "post_attention_layernorm", "mlp"},
    "qwen3": {
        "input_layernorm", "post_attention_layernorm", "mlp", "self_attn.q_norm",
        "self_attn.k_norm",
    },
    "gemma2": {
        "input_layernorm", "post_attention_layernorm", "mlp", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    },
    "qwen3_moe": {
        "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm",
    },
}  # fmt: skip
"""The token-wise modules inside a layer of a model of tests/parity/zoo.py."""


def train(model, batch, *, checkpointing=None):
    """Return the loss and every gradient of a step."""
    model.train()
    model.zero_grad()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing:
            model.enable_input_require_grads()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def gradients_of(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found, exact, tolerance):
    assert found.keys() == exact.keys()
    worst = max(errors(found, exact).items(), key=lambda item: item[1])
    assert worst[1] <= tolerance, worst


def tiled_names(handle):
    return {report.name for report in handle.report() if report.is_tiled}


def names_in_layers(handle):
    """Return the names of tiled modules in their layer."""
    parts = [name.split(".") for name in tiled_names(handle)]
    return {".".join(name[3:]) for name in parts if name[1:2] in (["layers"], ["h"])}


def reasons(handle):
    return {report.name: report.reason for report in handle.report() if not report.is_tiled}


def lora(model):
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, target_modules=["gate_proj", "down_proj", "q_proj"], init_lora_weights=False
    )
    return get_peft_model(model, config)
