"""`checkpoint_layers`: layers of any model are recomputed, with the same gradients."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import token_mean
from lightning_cp.memory import checkpoint_layers
from lightning_cp.memory.activation_checkpointing import switched_layers
from lightning_cp.private.autograd import checkpoint_contexts
from lightning_cp.private.modules import module_hooks
from tests import doors
from tests.attn.test_keep_attention import make_batch
from tests.parity import zoo
from tests.tiny import TinyLM


@pytest.fixture
def regions():
    """Count calls of torch's checkpoint, also by who holds the function itself."""
    calls = []

    def contexts():
        calls.append(None)
        return nullcontext(), nullcontext()

    with checkpoint_contexts(contexts, saving_inputs=lambda forward: nullcontext()):
        yield calls


def gradients(model):
    model.zero_grad()
    cp, batch = doors.parallel(None), make_batch()
    with cp.step(batch) as local:
        token_mean(model(local["input_ids"], cp.position_ids()), local["labels"]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_blocks_of_any_model_are_recomputed(regions):
    model = TinyLM(num_layers=3).double().train()
    names = list(model.state_dict())
    exact = gradients(model)
    assert not regions
    handle = checkpoint_layers(model)
    assert list(model.state_dict()) == names
    found = gradients(model)
    assert handle.num_blocks == len(regions) == 3
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    model.eval()
    gradients(model)
    assert len(regions) == 3  # not in evaluation
    handle.remove()
    gradients(model.train())
    assert len(regions) == 3
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_a_forward_that_a_user_has_put_on_a_block_is_called_and_comes_back(regions):
    model, calls = TinyLM(num_layers=2).double().train(), []
    block = model.blocks[0]
    forward = block.forward

    def own(*args, **kwargs):
        calls.append(args)
        return forward(*args, **kwargs)

    block.forward = own
    handle = checkpoint_layers(model)
    gradients(model)
    assert (len(regions), len(calls)) == (2, 2)  # forward, and once more in backward
    handle.remove()
    assert block.forward is own


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def test_models_of_transformers_checkpoint_their_own_layers(regions):
    model = zoo.build_model("llama").train()
    handle = checkpoint_layers(Holder(model))
    assert model.is_gradient_checkpointing
    assert handle.num_blocks == 0
    ids = torch.arange(9)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(regions) == model.config.num_hidden_layers
    handle.remove()
    assert not model.is_gradient_checkpointing


def test_a_model_that_checkpoints_already_stays_as_it_is():
    model = zoo.build_model("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpoint_layers(model).remove()
    assert model.is_gradient_checkpointing


def test_some_blocks_of_any_model_are_recomputed(regions):
    model = TinyLM(num_layers=3).double().train()
    exact = gradients(model)
    handle = checkpoint_layers(model, num_layers=2)
    found = gradients(model)
    assert handle.num_blocks == len(regions) == 2
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    assert ["forward" in block.__dict__ for block in model.blocks] == [True, True, False]
    handle.remove()
    gradients(model)
    assert len(regions) == 2


def build_llama(num_layers):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).train()


def switches(model):
    return [layer.gradient_checkpointing for layer in model.model.layers]


def test_some_layers_of_transformers_are_recomputed(regions):
    model = build_llama(4).double()
    ids = torch.arange(9)[None]

    def found():
        regions.clear()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    exact = found()
    first = checkpoint_layers(Holder(model), num_layers=1)
    some = found()
    assert len(regions) == 1
    assert switches(model) == [True, False, False, False]
    more = checkpoint_layers(Holder(model), num_layers=4)  # of a model that recomputes some
    all_layers = found()
    assert len(regions) == 4
    for name, gradient in exact.items():
        assert torch.equal(some[name], gradient)
        assert torch.equal(all_layers[name], gradient)
    more.remove()
    assert switches(model) == [True, False, False, False]
    first.remove()
    assert switches(model) == [False] * 4
    assert not model.is_gradient_checkpointing


def test_a_model_that_checkpoints_all_of_its_layers_gets_fewer_until_it_is_restored():
    model = build_llama(3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = checkpoint_layers(model, num_layers=2)
    assert switches(model) == [True, True, False]
    handle.remove()
    assert switches(model) == [True] * 3


@pytest.mark.parametrize("name", ["bert", "gemma3_text", "gpt2", "llama", "mamba", "qwen3_moe"])
def test_layers_are_switched_one_by_one(name, regions):
    model = zoo.build_model(name).train()
    batch = zoo.sample_batch(name, length=8)
    layers = switched_layers(model)
    checkpoint_layers(model, num_layers=len(layers) - 1)
    regions.clear()
    model(**batch).loss.backward()
    assert len(regions) == len(layers) - 1 >= 1


@pytest.mark.parametrize("main_input", ["input_ids", "pixel_values"])
def test_a_handle_leaves_no_hooks(main_input):
    model = build_llama(2)
    model.main_input_name = main_input  # of others transformers adds no hooks
    model.enable_input_require_grads()  # by a user
    hooks = module_hooks(model.model.embed_tokens)
    for number in (None, 1):
        handle = checkpoint_layers(model, num_layers=number)
        assert module_hooks(model.model.embed_tokens) == hooks
        handle.remove()
    assert module_hooks(model.model.embed_tokens) == hooks
    model.disable_input_require_grads()
    assert not module_hooks(model.model.embed_tokens)


def test_frozen_layers_below_trained_ones_stay_outside_of_the_graph():
    model = build_llama(3)
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    checkpoint_layers(model)
    outputs = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *args: outputs.append(args[-1].requires_grad))
    ids = torch.arange(9)[None]
    model(input_ids=ids, labels=ids)
    assert outputs == [False, False, True]


def test_a_model_of_which_a_user_has_enabled_a_part(regions):
    model = zoo.build_model("bart").train()
    decoder = model.model.decoder
    batch = zoo.sample_batch("bart", length=8)
    first, *others = decoder.layers
    first.gradient_checkpointing = True  # as if a part of it were enabled
    # transformers has no public way to enable a part.
    first._gradient_checkpointing_func = partial(torch_checkpoint.checkpoint, use_reentrant=False)
    handle = checkpoint_layers(model, num_layers=len(decoder.layers))
    model(**batch).loss.backward()
    assert len(regions) == len(decoder.layers) >= 2
    handle.remove()
    flags = [layer.gradient_checkpointing for layer in others]
    assert (first.gradient_checkpointing, flags) == (True, [False] * len(others))


def test_models_of_which_nothing_is_trained_do_not_count():
    pair = Holder(build_llama(3).requires_grad_(False))
    pair.policy = build_llama(3)
    assert switched_layers(pair) == list(pair.policy.model.layers)
    handle = checkpoint_layers(pair, num_layers=2)
    assert switches(pair.policy) == [True, True, False]
    assert switches(pair.inner) == [False] * 3
    handle.remove()
    with pytest.raises(ValueError, match=r"=4\): Holder has 3 layers"):
        checkpoint_layers(pair, num_layers=4)


def test_layers_inside_a_layer_are_switched_with_it(regions):
    model = zoo.build_model("zamba2").train()  # a hybrid layer holds one of Mamba
    first, *others = switched_layers(model)
    checkpoint_layers(model, num_layers=1)
    model(**zoo.sample_batch("zamba2", length=16)).loss.backward()
    assert len(regions) == sum(hasattr(type(m), "gradient_checkpointing") for m in first.modules())
    parts = [m for layer in others for m in layer.modules()]
    assert not any(getattr(m, "gradient_checkpointing", False) for m in parts)


def test_a_model_that_does_not_checkpoint_itself_has_blocks(regions):
    model = zoo.build_model("jetmoe").train()  # its layers have switches that nothing sets up
    assert not switched_layers(model)
    assert checkpoint_layers(model, num_layers=1).num_blocks == 1
    model(**zoo.sample_batch("jetmoe", length=16), use_cache=False).loss.backward()
    assert len(regions) == 1


@pytest.mark.parametrize("number", [0, 4])
def test_a_number_of_layers_that_a_model_does_not_have_is_refused(number):
    model = TinyLM(num_layers=3)
    with pytest.raises(ValueError, match=rf"={number}\): TinyLM has 3 layers .* or True for all"):
        checkpoint_layers(model, num_layers=number)
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="no layers were found in Linear"):
        checkpoint_layers(nn.Linear(2, 2))
