# SPDX-License-Identifier: Apache-2.0
"""The tiny models are alike everywhere, tame, and show when attention goes wrong."""

import pytest
import torch
from torch import Tensor, nn

from tests.parity import zoo

# Plain, windows, biases, latent attention, sinks and experts, an encoder type, fused projections
SAMPLE = ["llama", "gemma2", "qwen2", "deepseek_v3", "gpt_oss", "bert", "gpt2"]
BUILDABLE = [name for name in zoo.causal_names() if name not in zoo.UNBUILDABLE]
HEADED = [(head, name) for head in zoo.HEADS if head != "causal" for name in zoo.head_names(head)]
# Their output hardly depends on other tokens: other kinds of layers, or inputs without a norm.
FAINT = {"cpmant", "openai-gpt", "zaya"}


def gradients(
    name: str, batch: dict[str, Tensor], model: nn.Module | None = None, head: str = "causal"
) -> dict[str, Tensor]:
    model = model or zoo.build_model(name, head=head)
    output = model(**batch)
    loss = output.last_hidden_state.square().mean() if head == "base" else output.loss
    assert loss.isfinite()
    loss.backward()
    found = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    assert all(grad.isfinite().all() for grad in found.values())
    return {"loss": loss.detach(), **found}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a gradient that is more than rounding."""
    return max(
        ((one[key] - other[key]).norm() / one[key].norm()).item()
        for key in one.keys() & other.keys()
        if key != "loss" and one[key].abs().max() > 1e-6
    )


def check_no_chance(model: nn.Module) -> None:
    for module in model.modules():
        assert not isinstance(module, nn.Dropout) or module.p == 0
    assert all(x.isfinite().all() and x.any() for x in model.parameters())


def check_gradients(name: str) -> None:
    model = zoo.build_model(name)
    check_no_chance(model)
    found = gradients(name, zoo.sample_batch(name), model)
    # From plain chance to a few units more; some are asked for the token that they see.
    assert 2 < found["loss"] < 7
    idle = [
        key
        for key, _ in model.named_parameters()
        if key not in found or found[key].abs().max() < 1e-7
    ]
    assert idle == [key for key, _ in model.named_parameters() if zoo.is_idle(name, key)]
    assert max(found[key].norm() for key in found if key != "loss") < 10


def check_sees_early_tokens(name: str) -> None:
    """Shuffle the first half, and look at losses of the second half: only attention tells."""
    batch = zoo.sample_batch(name)
    batch["labels"][:, :49] = -100
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    shuffled = batch["input_ids"].clone()
    shuffled[:, :48] = shuffled[:, order]
    one = gradients(name, batch)
    other = gradients(name, {**batch, "input_ids": shuffled})
    changes = [
        ((one[key] - other[key]).norm() / one[key].norm()).item()
        for key in one
        if key != "loss" and one[key].abs().max() > 1e-6
    ]
    least = 0.01 if name in FAINT else 0.1
    assert sorted(changes)[len(changes) // 2] > least


@pytest.mark.parametrize("name", SAMPLE)
def test_gradients_are_tame_and_reach_every_parameter(name):
    check_gradients(name)


@pytest.mark.parametrize("name", SAMPLE)
def test_gradients_tell_the_order_of_early_tokens(name):
    check_sees_early_tokens(name)


def test_a_model_depends_on_its_seed_alone():
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first = zoo.build_model("gemma2", seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    again = zoo.build_model("gemma2", seed=1).state_dict()
    other = zoo.build_model("gemma2", seed=2).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_other_dtypes_round_the_same_values():
    single = zoo.build_model("gpt_oss").state_dict()
    for dtype in (torch.float64, torch.bfloat16):
        other = zoo.build_model("gpt_oss", dtype=dtype).state_dict()
        assert all(torch.equal(single[key].to(dtype), other[key]) for key in single)


def test_single_precision_is_enough():
    batch = zoo.sample_batch("deepseek_v3")
    single = gradients("deepseek_v3", batch)
    double = gradients("deepseek_v3", batch, zoo.build_model("deepseek_v3", dtype=torch.float64))
    assert difference(double, {key: x.double() for key, x in single.items()}) < 1e-5


def test_buffers_keep_their_values():
    model = zoo.build_model("llama")
    rotary = model.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, 10000.0 ** (-torch.arange(0, 16, 2) / 16))


def test_a_window_wider_by_one_shows(monkeypatch):
    batch = zoo.sample_batch("mistral")
    narrow = gradients("mistral", batch)
    monkeypatch.setitem(zoo.SIZES, "sliding_window", zoo.WINDOW + 1)
    assert difference(narrow, gradients("mistral", batch)) > 0.1


@pytest.mark.parametrize("name", ["llama:dynamic", "phi3:longrope"])
def test_frequencies_depend_on_the_length(name):
    for length, same in ((24, True), (61, False)):
        model = zoo.build_model(name)
        start = model.model.rotary_emb.inv_freq.clone()
        model(**zoo.sample_batch(name, length=length))
        assert torch.equal(model.model.rotary_emb.inv_freq, start) == same


def test_an_unknown_variant_names_those_that_exist():
    with pytest.raises(ValueError, match="no variant 'llama:blue'.*llama:dynamic"):
        zoo.build_config("llama:blue")


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDABLE)
def test_gradients_of_every_name(name):
    check_gradients(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDABLE)
def test_every_name_tells_the_order_of_early_tokens(name):
    check_sees_early_tokens(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.VARIANTS)
def test_every_variant_differs_from_its_base(name):
    batch = zoo.sample_batch(name)
    model = zoo.build_model(name)
    check_no_chance(model)
    found, base = gradients(name, batch, model), gradients(name.partition(":")[0], batch)
    assert difference(found, base) > 0.1
    if name.endswith(":aux"):
        assert found["loss"] > base["loss"] + 1


@pytest.mark.slow
@pytest.mark.parametrize(("head", "name"), HEADED)
def test_every_head_has_gradients(head, name):
    model = zoo.build_model(name, head=head)
    check_no_chance(model)
    gradients(name, zoo.sample_batch(name, head=head), model, head)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.UNBUILDABLE)
def test_what_cannot_be_built_says_so(name):
    with pytest.raises(Exception, match=r"\w"):
        zoo.build_model(name)(**zoo.sample_batch(name))
