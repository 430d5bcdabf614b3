"""Known models run without the mode of a step up to their head; code of users inside does not."""

import copy
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama import modeling_llama

from hf_patches import enable
from lightning_cp import routing
from lightning_cp.fsdp import gathering
from lightning_cp.fsdp.sharding import shard_parameters
from lightning_cp.memory import checkpoint_layers, tile_modules
from tests import doors
from tests.parity import zoo


@pytest.fixture
def seen(monkeypatch):
    """Return the functions that the mode sees."""
    functions = []
    inner = routing._Dispatch.__torch_function__

    def spy(self, func, types, args=(), kwargs=None):
        functions.append(getattr(func, "__name__", str(func)))
        return inner(self, func, types, args, kwargs)

    monkeypatch.setattr(routing._Dispatch, "__torch_function__", spy)
    return functions


def step(model, name="llama", length=12):
    batch = zoo.sample_batch(name, rows=2, length=length)
    with doors.parallel(None).step(batch) as local:
        loss = model(**local).loss
        loss.backward()
    return loss


ATTENTION = "scaled_dot_product_attention"


def attend(x):
    heads = x[:, None]
    return x + functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]


class OwnMLP(nn.Module):
    def forward(self, x):
        return attend(x)


def hook(model, monkeypatch):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: attend(out))


def override(model, monkeypatch):
    model.model.layers[1].mlp.forward = attend


def override_by_partial(model, monkeypatch):
    model.model.layers[1].mlp.forward = partial(attend)


def replaced(model, monkeypatch):
    model.model.layers[1].mlp = OwnMLP()


def patched_class(model, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: attend(x))


def patched_layer(model, monkeypatch):
    plain = modeling_llama.LlamaDecoderLayer.forward
    monkeypatch.setattr(
        modeling_llama.LlamaDecoderLayer,
        "forward",
        lambda self, x, *args, **kwargs: attend(plain(self, x, *args, **kwargs)),
    )


def hooked_layer(model, monkeypatch):
    model.model.layers[1].register_forward_hook(lambda module, args, out: attend(out))


def hooked_embedding(model, monkeypatch):
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: attend(out))


def wrapped_layer(model, monkeypatch):
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda x, *args, **kwargs: attend(forward(x, *args, **kwargs))


def replaced_norm(model, monkeypatch):
    model.model.norm = OwnMLP()


def patched_stack(model, monkeypatch):
    plain = modeling_llama.LlamaModel.forward

    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.last_hidden_state = attend(output.last_hidden_state)
        return output

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)


def attends_after(cls):
    """Return a method `__call__` that attends after that of a class."""
    plain = cls.__call__

    def call(self, *args, **kwargs):
        return attend(plain(self, *args, **kwargs))

    return call


def call_of_layers(model, monkeypatch):
    cls = modeling_llama.LlamaDecoderLayer
    monkeypatch.setattr(cls, "__call__", attends_after(cls))


def call_of_norms(model, monkeypatch):
    cls = modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(cls, "__call__", attends_after(cls))


def call_of_a_subclass(model, monkeypatch):
    cls = type(model.model.norm)
    model.model.norm.__class__ = type("Norm", (cls,), {"__call__": attends_after(cls)})


def compiled_call(model, monkeypatch):
    norm = model.model.norm
    norm._compiled_call_impl = lambda x: attend(norm._call_impl(x))


def other_attributes(model, monkeypatch):
    norm = model.model.norm
    object.__setattr__(norm, "__dict__", {**norm.__dict__, "forward": attend})


def hook_of_all_modules(kind):
    """Return a change that attends after each module of a class."""

    def change(model, monkeypatch):
        handle = register_module_forward_hook(
            lambda module, args, out: attend(out) if isinstance(module, kind) else None
        )
        model.__dict__["cleanup"] = handle.remove

    change.__name__ = f"hook_of_all_modules_{kind.__name__}"
    return change


CHANGES = [
    call_of_a_subclass,
    call_of_layers,
    call_of_norms,
    compiled_call,
    other_attributes,
    hook_of_all_modules(modeling_llama.LlamaDecoderLayer),
    hook_of_all_modules(modeling_llama.LlamaMLP),
    hook_of_all_modules(nn.Embedding),
    hook,
    hooked_embedding,
    hooked_layer,
    override,
    override_by_partial,
    patched_class,
    patched_layer,
    patched_stack,
    replaced,
    replaced_norm,
    wrapped_layer,
]


def test_a_known_stack_runs_without_the_mode(seen):
    model = zoo.build_model("llama")
    enable(model)
    step(model)
    assert not {"embedding", "silu", "rsqrt", "cos", "cross_entropy"} & set(seen)
    assert seen.count("linear") == 1  # the head


def test_a_known_layer_runs_without_the_mode(seen):
    """Also where code of a user runs elsewhere in its stack."""
    model = zoo.build_model("llama")
    enable(model)
    model.model.norm.register_forward_hook(lambda *_: None)
    step(model)
    outside = len(seen)
    assert "rsqrt" in seen
    assert "silu" not in seen
    seen.clear()
    four = zoo.build_model("llama")
    four.model.layers.extend(copy.deepcopy(four.model.layers))
    four.config.num_hidden_layers = 4
    for layer in four.model.layers:
        layer.self_attn.config = four.config
    enable(four)
    four.model.norm.register_forward_hook(lambda *_: None)
    step(four)
    assert 0 < len(seen) <= outside  # none in a layer


def test_a_stack_with_a_convolution_is_routed(seen):
    model = zoo.build_model("llama")
    model.model.conv = nn.Conv1d(1, 1, 1)
    enable(model)
    step(model)
    assert "embedding" in seen
    assert "silu" not in seen


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "late",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["before the first step", "later"],
)
def test_code_of_users_is_routed(seen, monkeypatch, change, late):
    model = zoo.build_model("llama")
    handle = enable(model)
    if late:
        step(model)
        assert ATTENTION not in seen
    change(model, monkeypatch)
    try:
        step(model)
    finally:
        model.__dict__.pop("cleanup", handle.undo)()
    assert ATTENTION in seen


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3_moe", "gemma2"])
def test_undo_restores_the_layers(name):
    model = zoo.build_model(name, head="masked" if name == "bert" else "causal")
    handle = enable(model)
    assert any("forward" in module.__dict__ for module in model.modules() if module is not model)
    handle.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_with_adapters_tiles_and_checkpoints(seen):
    model = zoo.build_model("llama")
    enable(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"]))
    checkpoint_layers(model)
    tile_modules(model, tile_tokens=8)
    step(adapted)
    assert "silu" not in seen


def test_copies_are_independent(seen):
    model = zoo.build_model("llama")
    enable(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = other.model.layers[0]
        assert layer.forward.args[0].module is layer
        layer.mlp = OwnMLP()
        seen.clear()
        step(other)
        assert ATTENTION in seen
    seen.clear()
    step(model)
    assert ATTENTION not in seen


def test_a_copy_of_a_layer_alone_holds_no_model():
    model = zoo.build_model("llama")
    enable(model)
    layer = model.model.layers[0]
    assert layer.forward.args[0].stack.module is model.model
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.forward.args[0].stack is None
    whole = copy.deepcopy(model)
    assert whole.model.layers[0].forward.args[0].stack.module is whole.model


def test_a_shallow_copy_runs_its_own_layers(seen):
    """A draft model of fewer layers, that shares its weights."""
    model = zoo.build_model("llama")
    enable(model)
    draft = copy.copy(model.model)
    draft._modules = dict(model.model._modules)
    draft.layers = nn.ModuleList(list(model.model.layers)[:1])
    ids = zoo.sample_batch("llama", rows=1, length=8)["input_ids"]
    kept = model.model.layers
    found = draft(ids).last_hidden_state
    model.model.layers = nn.ModuleList(list(kept)[:1])
    torch.testing.assert_close(found, model.model(ids).last_hidden_state, rtol=0, atol=0)
    model.model.layers = kept
    assert not torch.equal(found, model.model(ids).last_hidden_state)


def test_an_error_in_a_layer_restores_the_mode(seen):
    model = zoo.build_model("llama")
    enable(model)
    batch = zoo.sample_batch("llama", rows=2, length=12)
    mlp = model.model.layers[1].mlp
    weight, mlp.gate_proj.weight = mlp.gate_proj.weight, nn.Parameter(torch.zeros(1, 1))
    with doors.parallel(None).step(batch) as local:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(**local)
        assert not model.model.layers[0].forward.args[0].stack.is_unrouted
        seen.clear()
        attend(torch.randn(2, 12, 8))
        assert ATTENTION in seen
        mlp.gate_proj.weight = weight
        model(**local).loss.backward()


def run_roots():
    """Run a model twice before a backward, whose layers are FSDP2 roots by themselves."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    model = zoo.build_model("llama")
    alone = copy.deepcopy(model)
    for one in (model, alone):
        enable(one)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    gathering.gather_parts(nn.Sequential(model))
    batch = zoo.sample_batch("llama", rows=2, length=12)
    for one in (model, alone):
        with doors.parallel(None).step(batch) as local:
            (one(**local).loss + one(**local).loss).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(
        (getattr(p.grad, "full_tensor", lambda p=p: p.grad)() - q.grad).abs().max().item()
        for p, q in pairs
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_layers_that_are_roots_are_called_twice(ranks):
    assert all(error < 1e-12 for error in ranks(2).run(run_roots))


def run_sharded(shard_modules):
    """Return which units hooks of their modules looked at in a step, and what differs from one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    model = zoo.build_model("llama")
    alone = copy.deepcopy(model)
    enable(model)
    enable(alone)
    owner = nn.Sequential(model)
    shard_parameters(owner, mesh, device=torch.device("cpu"), shard_modules=shard_modules)
    gathering.gather_parts(owner)
    with pytest.raises(RuntimeError):  # its hook after forward stays until the next call
        model.model.layers[0].self_attn.q_proj(torch.zeros(1, 1))
    with mock.patch.object(gathering, "is_in_forward", wraps=gathering.is_in_forward) as looks:
        step(model)
    units = [type(call.args[0]).__name__ for call in looks.call_args_list]
    step(alone)
    pairs = [
        (p.grad.full_tensor(), q.grad)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    x = torch.randn(1, 3, model.config.hidden_size, dtype=model.dtype)
    # From outside of their layers, and a layer whose hooks are not called.
    layer, other = model.model.layers[0], alone.model.layers[0]
    positions = alone.model.rotary_emb(x, torch.arange(3)[None])
    with torch.no_grad():
        pairs.append((layer.mlp(x), other.mlp(x)))
        found = layer.forward(x, position_embeddings=positions)
        pairs.append((found, other.forward(x, position_embeddings=positions)))
    return units, max((a - b).abs().max().item() for a, b in pairs)


def run_both():
    return [run_sharded(None), run_sharded(["LlamaDecoderLayer", "LlamaMLP"])]


@pytest.mark.ranks
def test_hooks_of_modules_inside_a_layer_run_where_they_are_needed(ranks):
    """In the module whose hook after forward is left over; in all, if a layer has a unit inside."""
    for found in ranks(2).run(run_both):
        for (units, error), num_inner in zip(found, (1, 14), strict=True):
            assert "FSDPLlamaForCausalLM" in units
            assert units.count("FSDPLlamaDecoderLayer") == num_inner
            assert error < 1e-12
