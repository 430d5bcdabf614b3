"""Models that return log-probabilities, and batches with branches that they do not support."""

import pytest
import torch
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_patches import enable
from hf_patches.model.forward import TokenLogpOutput
from lightning_cp import Mask, attention
from lightning_cp.sequence import halo
from tests import doors

SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **options))


def batch(length=13):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 31, (2, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def plain(model, inputs):
    logp = model(input_ids=inputs["input_ids"]).logits[:, :-1].log_softmax(-1)
    targets = inputs["labels"][:, 1:]
    found = logp.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(targets == -100, 0.0)


@pytest.mark.parametrize("chunked", ["always", "never"])
def test_a_model_returns_log_probabilities(chunked):
    model, inputs = build(), batch()
    exact = plain(model, inputs)
    weights = torch.linspace(-1, 2, exact.numel()).view(exact.shape)
    expected = torch.autograd.grad((exact * weights).sum(), list(model.parameters()))
    enable(model, chunked_loss=chunked)
    outside = model(**inputs, token_logp=True)
    assert isinstance(outside, TokenLogpOutput)
    torch.testing.assert_close(outside.token_logp, exact, atol=1e-5, rtol=1e-5)
    with doors.parallel(None).step(inputs) as local:
        inside = model(**local, token_logp=True).token_logp
    torch.testing.assert_close(inside, exact, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad((inside * weights).sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with doors.parallel(None).step(inputs) as local, torch.no_grad():
        as_tuple = model(**local, token_logp=True, return_dict=False)
    torch.testing.assert_close(as_tuple[0], exact, atol=1e-5, rtol=1e-5)


def test_what_has_no_log_probabilities_is_refused():
    model, inputs = build(), batch()
    enable(model)
    with pytest.raises(ValueError, match=r"\(token_logp=True\) scores each label by the token"):
        model(input_ids=inputs["input_ids"], token_logp=True)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = Qwen3MoeConfig(**SMALL, **experts, head_dim=4, output_router_logits=True)
    model = Qwen3MoeForCausalLM(config)
    enable(model)
    with (
        doors.parallel(None).step(inputs) as local,
        pytest.raises(ValueError, match="would leave out the balance loss of its experts"),
    ):
        model(**local, token_logp=True)


def forked(length=13):
    inputs = batch(length)
    ids = torch.full((2, length), -1)
    ids[:, 4:8], ids[:, 8:] = 0, 1
    return {**inputs, "branch_ids": ids}


@pytest.mark.parametrize(
    ("build_model", "message"),
    [
        (
            lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
            "a window or chunks",
        ),
        (
            lambda: OPTForCausalLM(
                OPTConfig(
                    vocab_size=31,
                    hidden_size=16,
                    ffn_dim=16,
                    word_embed_proj_dim=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    max_position_embeddings=64,
                    attention_dropout=0.0,
                )
            ),
            "mixes or numbers tokens in ways that know no branches",
        ),
    ],
)
def test_models_that_know_no_branches_are_refused(build_model, message):
    model = build_model()
    enable(model)
    with (
        doors.parallel(None).step(forked()) as local,
        pytest.raises(ValueError, match=message),
    ):
        model(**local, token_logp=True)


def test_a_window_that_hides_nothing_is_no_window():
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64))
    enable(model)
    with doors.parallel(None).step(forked()) as local:
        assert model(**local, token_logp=True).token_logp.shape == (2, 12)


def test_learned_positions_go_on_behind_the_prompt():
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    inputs = forked()
    alone = {name: x[:, [0, 1, 2, 3, *range(8, 13)]] for name, x in inputs.items()}
    exact = plain(model, alone)[:, 4:]
    enable(model)
    with doors.parallel(None).step(inputs) as local:
        found = model(**local, token_logp=True).token_logp[:, 8:]
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


def test_a_branch_does_not_predict_the_next_one():
    inputs = forked()
    del inputs["labels"]
    labels = torch.arange(26).view(2, 13)
    documents = torch.tensor([0] * 10 + [1] * 2 + [-1])
    for more in ({}, {"document_ids": documents.expand(2, -1)}):
        cp = doors.parallel(None)
        with cp.step({**inputs, "labels": labels, **more}) as local:
            found = cp.shift_labels(local["labels"])[0].tolist()
        ends = {7, 12, *((9, 11) if more else ())}
        assert found == [-100 if at in ends else at + 1 for at in range(13)]


def test_attention_that_knows_no_branches_is_refused():
    cp, x = doors.parallel(None), torch.randn(2, 2, 13, 8)
    calls = {
        "a window or chunks": lambda: attention(x, x, x, mask=Mask(causal=True, window=3)),
        "no causal mask": lambda: attention(x, x, x, mask=Mask()),
        "spans": lambda: attention(x, x, x, mask=Mask(causal=True, spans=torch.zeros(13).long())),
        "ALiBi slopes": lambda: attention(x, x, x, mask=Mask(causal=True), alibi=torch.ones(2)),
        "documents or padding of its own": lambda: functional.scaled_dot_product_attention(
            x, x, x, is_causal=True
        ),
        "A convolution, a recurrence or a halo": lambda: halo(torch.randn(2, 13, 4), 2),
    }
    for message, call in calls.items():
        with cp.step(forked()), pytest.raises(ValueError, match=message):
            call()


def test_batches_with_branches_that_cannot_be_read_are_refused():
    cp, inputs = doors.parallel(None), forked()
    with (
        pytest.raises(ValueError, match=r"`branch_ids` must be integers of shape \[2, 13\]"),
        cp.step({**inputs, "branch_ids": inputs["branch_ids"].float()}),
    ):
        pass
    with (
        pytest.raises(ValueError, match="cannot be compared with a stock model"),
        cp.reference(inputs, stock=True),
    ):
        pass
