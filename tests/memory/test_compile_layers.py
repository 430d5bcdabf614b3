"""Compiled MLPs and norms: found by a probe, exact, compiled once for all layers and lengths."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_patches import enable
from lightning_cp.memory import compile_layers, compiled, tile_modules
from tests import torch_names
from tests.attn.cases import say_again
from tests.memory import token_wise
from tests.memory.token_wise import (
    EXPECTED,
    lora,
    names_in_layers,
    reasons,
    replaced_names,
    train,
)
from tests.parity import zoo
from tests.parity.hf import build_cp

# Models compute norms in float32, whatever the dtype.
ROUNDING = 5e-6


@pytest.fixture
def counter(monkeypatch):
    """Compile without generating code, and count the graphs."""
    yield from count_graphs(monkeypatch)


def count_graphs(monkeypatch):
    torch.compiler.reset()
    say_again(compiled)
    backend = torch_names.counting_backend("aot_eager")
    monkeypatch.setattr(compiled, "BACKEND", backend)
    yield backend
    say_again(compiled)
    torch.compiler.reset()


def assert_close(found, exact, tolerance=ROUNDING):
    token_wise.assert_close(found, exact, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_loss_and_every_gradient_are_those_of_the_plain_model(counter, name):
    """Equal layers share a graph: one of the MLP, one for each shape of a norm."""
    model = zoo.build_model(name, dtype=torch.float64)
    batch = zoo.sample_batch(name, rows=2, length=37)
    exact = train(model, batch)
    handle = compile_layers(model)
    inside = names_in_layers(handle)
    assert inside == {*EXPECTED[name], "self_attn.apply_rotary_pos_emb"}, str(handle)
    assert_close(train(model, batch), exact)
    graphs = counter.frame_count
    assert 0 < graphs <= len({part.split(".")[-1] for part in inside}) + 1
    for checkpointing in (False, True):
        assert_close(train(model, batch, checkpointing=checkpointing), exact)
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
    before = counter.frame_count
    assert_close(train(model, batch), exact, 0.0)
    assert counter.frame_count == before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_generated_code_is_exact(monkeypatch, dtype):
    """By the compiler that users get, for eight lengths; nothing is compiled after the first."""
    graphs = []
    inner = compiled.exact_backend("inductor")

    def counting(graph, inputs):
        graphs.append(graph)
        return inner(graph, inputs)

    torch.compiler.reset()
    say_again(compiled)
    monkeypatch.setattr(compiled, "BACKEND", counting)
    plain = zoo.build_model("qwen3", dtype=dtype)
    model = copy.deepcopy(plain)
    handle = compile_layers(model)
    counts = []
    for length in (37, 64, 50, 128, 33, 99, 20, 130):
        batch = zoo.sample_batch("qwen3", rows=2, length=length)
        assert_close(
            train(model, batch), train(plain, batch), 1e-4 if dtype.itemsize == 4 else 5e-6
        )
        counts.append(len(graphs))
    assert counts[1] == counts[-1], counts
    handle.remove()
    say_again(compiled)
    torch.compiler.reset()


@pytest.mark.slow
def test_lengths_and_layers_are_not_compiled_again(counter):
    model = zoo.build_model("llama", dtype=torch.float32)
    compile_layers(model)
    counts = []
    for length in (37, 64, 50, 128, 33, 99, 20, 130):
        train(model, zoo.sample_batch("llama", rows=2, length=length), checkpointing=False)
        counts.append(counter.frame_count)
    assert counts == [3] * 8  # the MLP, the norms and the rotary embeddings
    with torch.no_grad():
        model(**zoo.sample_batch("llama", rows=2, length=41))
    assert 3 < counter.frame_count <= 7  # without gradients other code is compiled
    train(model, zoo.sample_batch("llama", rows=1, length=37))
    assert counter.frame_count <= 10  # one sample


ROTARY = ["gpt_oss", "deepseek_v3", "llama4_text", "cohere", "gpt_neox"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embeddings(counter, name):
    """Of partial and interleaved heads, complex ones, and latent attention."""
    model = zoo.build_model(name, dtype=torch.float64)
    batch = zoo.sample_batch(name, rows=2, length=37)
    exact = train(model, batch)
    handle = compile_layers(model)
    found = {name.split(".")[-1] for name in replaced_names(handle) if "rotary" in name}
    assert found, str(handle)
    compiled_fns = []
    with pytest.MonkeyPatch.context() as patch:
        copy_function = compiled.copy_function  # of all that is compiled
        patch.setattr(
            compiled,
            "copy_function",
            lambda fn, *rest: compiled_fns.append(fn) or copy_function(fn, *rest),
        )
        say_again(compiled)
        assert_close(train(model, batch), exact)
    say_again(compiled)
    assert {fn.__name__ for fn in compiled_fns} >= found
    handle.remove()
    assert_close(train(model, batch), exact, 0.0)


@pytest.mark.slow
def test_other_models_of_a_class_stay_plain(counter):
    """The function that applies rotary embeddings is shared by all models of a file."""
    batch = zoo.sample_batch("llama", rows=2, length=19)
    plain, model = (zoo.build_model("llama", dtype=torch.float64) for _ in range(2))
    exact = train(plain, batch)
    compile_layers(model)
    assert_close(train(model, batch), exact)
    before = counter.frame_count
    assert_close(train(plain, batch), exact, 0.0)
    assert counter.frame_count == before > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", ["compiled", "lora"])
def test_with_lora(counter, first):
    batch = zoo.sample_batch("llama", rows=2, length=19)
    exact = train(lora(zoo.build_model("llama", dtype=torch.float64)).double(), batch)
    model = zoo.build_model("llama", dtype=torch.float64)
    if first == "compiled":
        compile_layers(model)
        model = lora(model).double()
    else:
        model = lora(model).double()
        handle = compile_layers(model)
        assert sum(name.endswith(".mlp") for name in replaced_names(handle)) == 2
    assert_close(train(model, batch, checkpointing=False), exact)
    assert counter.frame_count > 0


@pytest.mark.slow
def test_inside_tiles(counter):
    batch = zoo.sample_batch("llama", rows=2, length=37)
    model = zoo.build_model("llama", dtype=torch.float64)
    exact = train(model, batch)
    handle = compile_layers(model)
    tiles = tile_modules(model, tile_tokens=16)
    assert any(report.is_replaced for report in tiles.report())
    for checkpointing in (None, False):
        assert_close(train(model, batch, checkpointing=checkpointing), exact)
    assert counter.frame_count > 0
    with pytest.raises(ValueError, match="is tiled already. Call compile_layers first"):
        compile_layers(model)
    tiles.remove()
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Noisy(Norm):
    def forward(self, x):
        return super().forward(torch.dropout(x, 0.5, self.training))


class Mixing(Norm):
    def forward(self, x):
        return self.weight * x.cumsum(1)


class Layer(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.parts.outer = nn.Identity()

    def forward(self, x, scale):
        return self.parts(x) * scale


def build_model(*parts):
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(*parts)])})


def test_what_is_left_alone():
    replaced = Norm(4)
    replaced.forward = lambda x: x
    handle = compile_layers(build_model(Norm(4), Noisy(4), Mixing(4), nn.Linear(4, 4), replaced))
    assert replaced_names(handle) == {"layers.0.parts.0"}
    found = reasons(handle)
    assert "random numbers" in found["layers.0.parts.1"]
    assert "mixes tokens" in found["layers.0.parts.2"]
    assert found["layers.0.parts.3"] == "it is one operator of torch"
    assert found["layers.0.parts.4"] == "its forward was replaced"
    assert "layers.*.parts.0 (1): compiled" in str(handle)


def test_compiled_models_are_refused():
    model = build_model(Norm(4))
    model["layers"][0].parts[0].compile(backend="eager")
    with pytest.raises(ValueError, match="`layers.0.parts.0` is compiled already"):
        compile_layers(model)
    with pytest.raises(ValueError, match="is compiled already"):
        compile_layers(torch.compile(build_model(Norm(4)), backend="eager"))


def test_a_second_call_leaves_compiled_modules_alone():
    model = build_model(Norm(4))
    assert replaced_names(compile_layers(model)) == {"layers.0.parts"}
    assert reasons(compile_layers(model))["layers.0.parts"] == "it is compiled already"


def test_copies_and_removal(counter):
    model = build_model(Norm(4), Norm(4), Mixing(4))
    handle = compile_layers(model)
    norm, x = model["layers"][0].parts[0], torch.randn(2, 5, 4)
    exact = Norm.forward(norm, x)
    assert len(pickle.dumps(norm)) < len(pickle.dumps(model))
    copied = copy.deepcopy(norm)
    norm.weight.data.zero_()
    torch.testing.assert_close(copied(x), exact)  # with its own weights
    assert counter.frame_count == 1
    ours = norm.forward
    norm.forward = lambda x: ours(x)  # somebody wraps it
    handle.remove()
    torch.testing.assert_close(norm(x), torch.zeros(2, 5, 4))
    assert counter.frame_count == 1
    assert "forward" not in model["layers"][0].parts[1].__dict__


def test_hooks_see_everything_and_other_arguments_run_plainly(counter):
    inner = nn.Sequential(Norm(4), Norm(4))
    model = build_model(inner, Mixing(4))
    compile_layers(model)
    seen = []
    x = torch.randn(2, 5, 4)
    handle = inner[0].register_forward_hook(lambda *_: seen.append(1))
    inner(x)
    assert (seen, counter.frame_count) == ([1], 0)
    handle.remove()
    inner.register_forward_hook(lambda *_: seen.append(2))  # outside of compiled code
    inner(x)
    assert (seen, counter.frame_count) == ([1, 2], 1)
    inner(x[0, 0])  # one token
    assert counter.frame_count == 1


def test_backward_may_run_again(counter):
    model = build_model(Norm(4))
    compile_layers(model)
    x = torch.randn(2, 5, 4, requires_grad=True)
    out = model["layers"][0](x, 2.0)
    first, second = (torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in "12")
    assert torch.equal(first, second)


# Ranks


def share_on_ranks(name, order, checkpointing, keep):
    """Return the loss and the gradients of two ranks that share sequences, and the graphs."""
    with pytest.MonkeyPatch.context() as patch:
        graphs = count_graphs(patch)
        backend = next(graphs)
        cp = build_cp(keep_attention="all" if keep else "none")
        model = zoo.build_model(name, dtype=torch.float64)
        enable(model)
        mesh = init_device_mesh("cpu", (2,))
        if order == "compiled first":
            compile_layers(model)
        if order != "unsharded":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if order != "compiled first":
            handle = compile_layers(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        results = []
        for length in (37, 52, 64):
            model.zero_grad()
            with cp.step(zoo.sample_batch(name, rows=2, length=length)) as local:
                loss = model(**local, use_cache=False).loss
                loss.backward()
            found = {"loss": loss.detach()}
            for key, p in model.named_parameters():
                grad = p.grad
                if isinstance(grad, DTensor):
                    found[key] = grad.full_tensor()
                elif grad is not None:
                    torch.distributed.all_reduce(grad)
                    found[key] = grad / 2
            results.append((found, backend.frame_count))
        if order == "sharded first":
            assert any(report.is_replaced for report in handle.report()), str(handle)
        return results


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("order", ["unsharded", "compiled first", "sharded first"])
def test_two_ranks(ranks, order, keep):
    exact = []
    for length in (37, 52, 64):
        model = zoo.build_model("qwen3", dtype=torch.float64)
        exact.append(train(model, zoo.sample_batch("qwen3", rows=2, length=length)))
    for results in ranks(2).run(share_on_ranks, "qwen3", order, keep, keep):
        for (found, _), expected in zip(results, exact, strict=True):
            assert_close(found, expected)
        graphs = [count for _, count in results]
        assert 0 < graphs[0] == graphs[-1] <= 5
