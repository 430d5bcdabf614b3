"""Token-wise modules in tiles: found by a probe, exact, one forward more at most, less memory."""

import copy
import gc
import pickle
import weakref
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import LlamaConfig

from hf_patches import enable
from lightning_cp.fsdp.gathering import gather_parts
from lightning_cp.memory import tile_modules, tiles
from tests.memory import token_wise
from tests.memory.token_wise import (
    assert_close,
    gradients_of,
    lora,
    names_in_layers,
    reasons,
    tiled_names,
)
from tests.parity import zoo
from tests.parity.hf import build_cp, errors
from tests.planner.live_bytes import Live, measure

EXACT = 1e-9


@contextmanager
def double():
    """Let models compute in float64 where they ask for float32, in backward too.

    Torch function modes, as in tests/parity, are not active where backward computes forwards.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def train(model, batch, *, checkpointing=None):
    """Return the loss and every gradient of a step in float64, recompute and tiles included."""
    with double():
        return token_wise.train(model, batch, checkpointing=checkpointing)


def assert_equal(found, exact):
    token_wise.assert_close(found, exact, EXACT)


# Models of transformers

EXPECTED = {**token_wise.EXPECTED, "gpt2": {"mlp"}}


@pytest.mark.parametrize("name", EXPECTED)
def test_loss_and_every_gradient_are_those_of_the_plain_model(name):
    model = zoo.build_model(name, dtype=torch.float64)
    batch = zoo.sample_batch(name, rows=2, length=37)
    exact = train(model, batch)
    handle = tile_modules(model, tile_tokens=7)
    assert_equal(train(model, batch), exact)
    assert names_in_layers(handle) == EXPECTED[name], str(handle)
    assert_equal(train(model, batch, checkpointing=False), exact)
    handle.remove()
    assert_equal(train(model, batch), exact)


@pytest.mark.parametrize(
    ("rows", "length", "tile"),
    [(1, 1, 1), (3, 1, 1), (1, 13, 1), (3, 5, 2), (2, 9, 100), (2, 8, 8)],
)
def test_any_number_of_tokens_and_tiles(rows, length, tile):
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(rows, length, 6, dtype=torch.float64)
    exact = gradients(model, x)
    tile_modules(model, tile_tokens=tile)
    assert_equal(gradients(model, x), exact)


@pytest.mark.parametrize("first", ["tiles", "lora"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_with_lora(first, checkpointing):
    batch = zoo.sample_batch("llama", rows=2, length=19)
    exact = train(lora(zoo.build_model("llama", dtype=torch.float64)).double(), batch)
    model = zoo.build_model("llama", dtype=torch.float64)
    if first == "tiles":
        handle = tile_modules(model, tile_tokens=5)
        model = lora(model).double()
    else:
        model = lora(model).double()
        handle = tile_modules(model, tile_tokens=5)
    assert_equal(train(model, batch, checkpointing=checkpointing), exact)
    assert len([name for name in tiled_names(handle) if name.endswith(".mlp")]) == 2
    assert len(exact) == 1 + 2 * 2 * 3


def test_experts_are_left_alone_and_said_so():
    model = zoo.build_model("deepseek_v3")
    batch = zoo.sample_batch("deepseek_v3")
    exact = train(model, batch)
    handle = tile_modules(model, tile_tokens=20)
    assert_close(train(model, batch), exact, 1e-5)
    routed = "model.layers.1.mlp"
    assert "routes tokens to experts; hooks that record its router" in reasons(handle)[routed]
    assert f"{routed}.shared_experts" in tiled_names(handle)
    assert "self_attn.kv_a_layernorm" in str(handle)


# Modules of our own

CALLS = []


class MLP(nn.Module):
    def __init__(self, width=6, inner=24):
        super().__init__()
        self.up, self.gate = nn.Linear(width, inner), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        CALLS.append(x.shape[1])
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mix, self.mlp = nn.Linear(6, 6), mlp

    def forward(self, x):
        x = x + self.mix(x).cumsum(1)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, mlp=MLP, *, num=2, checkpointing=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer(mlp()) for _ in range(num))
        self.checkpointing = checkpointing

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=False, **self.checkpointing)
        return x


def gradients(model, x, **autocast):
    model.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        loss = model(x).float().pow(2).mean() if autocast else model(x).pow(2).mean()
    loss.backward()
    return {"loss": loss.detach(), "x": x.grad, **gradients_of(model)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def x():
    return torch.randn(2, 11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_parity_test_notices_a_lost_tile(model, x, monkeypatch):
    exact = gradients(model, x)
    tile_modules(model, tile_tokens=4)
    monkeypatch.setattr(
        tiles, "add_gradients", lambda sums, found: sums.__setitem__(slice(None), found)
    )
    with pytest.raises(AssertionError):
        assert_equal(gradients(model, x), exact)


def test_checkpointing_runs_a_tiled_module_as_often_as_a_plain_one(x):
    model = Model(checkpointing={}).double()
    counts = {}
    for tile in (None, 4):
        if tile:
            handle = tile_modules(model, tile_tokens=tile)
        gradients(model, x)  # the first call probes
        CALLS.clear()
        model(x.requires_grad_())
        forward = sum(CALLS)
        CALLS.clear()
        gradients(model, x)
        counts[tile] = forward, sum(CALLS)
    assert tiled_names(handle) == {"layers.0.mlp", "layers.1.mlp"}
    assert counts[None] == counts[4] == (22, 44)  # two layers of 11 tokens: forward, and the step


def test_frozen_weights_and_inputs_without_gradient(x):
    for frozen in ("mlp.down", "mlp", "mix"):
        torch.manual_seed(0)
        model = Model().double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        exact = gradients(model, x)
        tile_modules(model, tile_tokens=4)
        assert_equal(gradients(model, x), exact)
    mlp = copy.deepcopy(model.layers[0].mlp)
    y = mlp(x.detach())  # layers.0.mlp, whose input needs no gradient
    y.sum().backward()
    assert mlp.up.weight.grad is not None
    with torch.no_grad():
        assert torch.allclose(mlp(x), MLP.forward(mlp, x), rtol=0, atol=1e-12)
    assert not mlp(x.detach()).isnan().any()


def test_hooks_see_whole_tensors_and_gradients_once(model, x):
    mlp = model.layers[0].mlp
    seen = Counter()
    handle = tile_modules(model, tile_tokens=4)
    mlp.register_forward_hook(lambda m, args, out: seen.update([("forward", *out.shape)]))
    mlp.register_full_backward_hook(lambda m, dx, dy: seen.update([("backward", *dy[0].shape)]))
    weight = mlp.up.weight
    weight.register_hook(lambda g: seen.update(["gradient"]))
    weight.register_post_accumulate_grad_hook(lambda p: seen.update(["accumulated"]))
    gradients(model, x)
    assert seen == {
        ("forward", 2, 11, 6): 1, ("backward", 2, 11, 6): 1, "gradient": 1, "accumulated": 1,
    }  # fmt: skip
    # A hook inside appears after the fact: that module is computed as a whole from now on.
    hook = mlp.down.register_forward_hook(lambda m, args, out: seen.update([out.shape]))
    gradients(model, x)
    assert seen[2, 11, 6] == 1
    assert "hooks on modules inside" in reasons(handle)["layers.0.mlp"]
    assert tiled_names(handle) == {"layers.1.mlp"}
    hook.remove()
    gradients(model, x)
    assert tiled_names(handle) == {"layers.0.mlp", "layers.1.mlp"}


def test_a_single_block(model, x):
    handle = tile_modules(model.layers[0], tile_tokens=4)
    model(x)
    assert tiled_names(handle) == {"mlp"}


class Stacked(MLP):
    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def forward(self, x):
        return super().forward(self.norm(x))


@pytest.mark.parametrize("routes", [False, True])
def test_modules_inside_of_a_tiled_one_are_part_of_its_tiles(routes, x):
    model = Model(Stacked, num=1).double()
    if routes:
        model.layers[0].mlp.register_module("up", Selecting(6, 24).double())
    exact = gradients(model, x)
    handle = tile_modules(model, tile_tokens=4)
    assert_equal(gradients(model, x), exact)
    CALLS.clear()
    model(x)
    assert tiled_names(handle) == ({"layers.0.mlp.norm"} if routes else {"layers.0.mlp"})
    assert CALLS.count("norm") == 6  # of 22 tokens


def test_modules_are_named_by_name_or_class(model, x):
    for modules in (["layers.1.mlp"], ["M?P"]):
        handle = tile_modules(model, tile_tokens=4, modules=modules)
        model(x)
        assert "layers.1.mlp" in tiled_names(handle)
        assert ("layers.0.mlp" in tiled_names(handle)) == (modules == ["M?P"])
        handle.remove()
    with pytest.raises(ValueError, match=r"No module of Model .* like \*\.ffw\. Name those"):
        tile_modules(model, modules=["*.ffw"])


class Mixes(MLP):
    def forward(self, x):
        return super().forward(x) + 1e-6 * x.mean(1, keepdim=True)


class MixesSamples(MLP):
    def forward(self, x):
        return super().forward(x) * x.amax(0)


class ByPosition(MLP):
    def forward(self, x):
        return super().forward(x) * torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class ByLength(MLP):
    def forward(self, x):
        return super().forward(x) / x.shape[1]


class Drops(MLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Normalises(MLP):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Counts(MLP):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class InPlace(MLP):
    def forward(self, x):
        return super().forward(x.mul_(2))


class ReturnsTwo(MLP):
    def forward(self, x):
        return super().forward(x), None


HIDDEN = nn.Parameter(torch.ones(6))


class UsesAnother(MLP):
    def forward(self, x):
        return super().forward(x) * HIDDEN.to(x.dtype)


class Selecting(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.topk(2).values.sum(-1, keepdim=True)


class Selects(MLP):
    def forward(self, x):
        return super().forward(x) * x.topk(2).values.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        (Mixes, "it mixes tokens"),
        (MixesSamples, "it mixes tokens"),
        (ByPosition, "depends on their positions"),
        (ByLength, "it mixes tokens"),
        (Drops, "random numbers in training mode (dropout)"),
        (Normalises, "it mixes tokens"),
        (Counts, "changes its buffers or attributes"),
        (InPlace, "changes its input in place"),
        (ReturnsTwo, "returns a tuple"),
        (UsesAnother, "not among its parameters"),
        (Selects, "routes tokens to experts"),
    ],
)
def test_what_is_not_provably_token_wise_is_left_alone(mlp, reason, x):
    model = Model(mlp).double().eval()
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    handle = tile_modules(model, tile_tokens=4)
    layer = model.layers[0]
    mlp = layer.mlp
    mlp(x)
    assert reason in reasons(handle)["layers.0.mlp"]
    assert not tiled_names(handle)
    assert "forward" not in mlp.__dict__
    assert mlp.__dict__.get("calls", 1) == 1
    assert not any(part.training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_several_arguments_and_dims_are_left_alone(model, x):
    class Scaled(MLP):
        def forward(self, x, scale=None):
            return super().forward(x) * (1 if scale is None else scale)

    model.layers[0].mlp = Scaled().double()
    handle = tile_modules(model, tile_tokens=4)
    mlp = model.layers[0].mlp
    assert torch.equal(mlp(x, x[..., :1]), Scaled.forward(mlp, x, x[..., :1]))
    assert "something else than one tensor" in reasons(handle)["layers.0.mlp"]
    mlp(x=x)
    assert tiled_names(handle) == {"layers.0.mlp"}
    mlp(x[None, None])
    assert reasons(handle)["layers.0.mlp"] == "its input has 5 dims"


def test_a_model_on_the_meta_device_is_decided_at_its_first_call(x):
    with torch.device("meta"):
        model = Model(Drops, num=1)
        model.layers.append(Layer(MLP()))
    handle = tile_modules(model, tile_tokens=4)
    assert [report.is_tiled for report in handle.report() if report.name.endswith("mlp")] == [
        None, None,
    ]  # fmt: skip
    assert "layers.*.mlp (2): decided at its first call" in str(handle)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.double()(x)
    assert "dropout" in reasons(handle)["layers.0.mlp"]
    assert tiled_names(handle) == {"layers.1.mlp"}


def test_autocast_is_that_of_forward(x):
    torch.manual_seed(0)
    model, x = Model(), x.float()
    full = gradients(model, x)
    exact = gradients(model, x, autocast=True)
    tile_modules(model, tile_tokens=4)
    found = gradients(model, x, autocast=True)
    rounding, error = errors(exact, full), errors(found, full)
    for name in full:
        assert error[name] <= 2 * rounding[name] + 1e-3, name
    assert max(error.values()) > 1e-4  # it ran in bfloat16
    for context in (torch.no_grad, torch.inference_mode):
        with context(), torch.autocast("cpu", torch.bfloat16):
            assert not model(x).requires_grad


class Noting(MLP):
    """Notes whether autocast is on when it is called."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def forward(self, x):
        self.noted.append(torch.is_autocast_enabled("cpu"))
        return super().forward(x)


@pytest.mark.parametrize("is_on", [True, False])
def test_backward_computes_tiles_under_the_autocast_of_forward(is_on):
    layer = Layer(Noting())
    tile_modules(layer, tile_tokens=4)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
        out = layer(torch.randn(1, 12, 6))
    layer.mlp.noted.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_on):
        out.sum().backward()
    assert layer.mlp.noted == [is_on] * 3


def test_gradients_of_half_precision_weights_are_summed_in_float32():
    layer = Layer(MLP()).bfloat16()
    handle = tile_modules(layer, tile_tokens=4)
    layer.mlp(torch.randn(1, 2048, 6, dtype=torch.bfloat16)).sum().backward()
    # In bfloat16, 1024 + 4 is 1024.
    assert layer.mlp.down.bias.grad.tolist() == [2048] * 6
    assert tiled_names(handle) == {"mlp"}


def test_second_derivatives_raise(model, x):
    tile_modules(model, tile_tokens=4)
    (dx,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


class Kept:
    """What lives as long as a node of the graph."""


def test_a_graph_is_kept_for_a_second_backward_and_freed_without_one(model, x):
    tile_modules(model, tile_tokens=4)
    exact = gradients(model, x)
    loss = model(x).pow(2).mean()
    model.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, 2 * exact[name], rtol=1e-9), name
    gc.disable()
    try:
        y = model(x)
        kept = weakref.ref(y.grad_fn.next_functions[1][0].metadata.setdefault("kept", Kept()))
        del y
        assert kept() is None
    finally:
        gc.enable()


def test_selective_checkpointing_recomputes_what_it_has_counted(model, x):
    def policy(_, op, *args, **kwargs):
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    exact = gradients(model, x)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    model.checkpointing = {"context_fn": contexts}
    tile_modules(model, tile_tokens=4)
    for _ in range(2):
        assert_equal(gradients(model, x), exact)


@pytest.mark.slow
def test_compiled_models_break_their_graph_around_tiles(model, x):
    exact = gradients(model, x)
    handle = tile_modules(model, tile_tokens=4)
    for model.checkpointing in ({}, None):
        CALLS.clear()
        compiled = torch.compile(model, backend="eager")
        found = {n.replace("_orig_mod.", ""): g for n, g in gradients(compiled, x).items()}
        assert_equal(found, exact)
        assert max(CALLS) <= 5  # a tile, or a probe
    handle.remove()
    for layer in model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend="eager", dynamic=True)
    handle = tile_modules(model, tile_tokens=4)
    assert_equal(gradients(model, x), exact)
    assert tiled_names(handle) == {"layers.0.mlp", "layers.1.mlp"}


def test_copies_and_removal(model, x):
    exact = gradients(model, x)
    handle = tile_modules(model, tile_tokens=4)
    again = tile_modules(model, tile_tokens=2)
    assert reasons(again)["layers.0.mlp"] == "it is tiled already"
    alone = copy.deepcopy(model.layers[0].mlp)
    assert len(pickle.dumps(alone)) < len(pickle.dumps(model))
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert_equal(gradients(copied, x), exact)  # with its own weights
    CALLS.clear()
    copied(x)
    assert max(CALLS) <= 2  # in tiles: 4 tokens of two samples
    ours, mlp = model.layers[1].mlp.forward, model.layers[1].mlp
    mlp.forward = lambda x: ours(x)  # somebody wraps it
    handle.remove()
    again.remove()
    CALLS.clear()
    model(x)
    assert CALLS == [11, 11]
    assert not tiled_names(handle)
    assert "forward" not in model.layers[0].mlp.__dict__


@pytest.mark.parametrize("tile_tokens", [0, -3, 2.5, True, "all"])
def test_tile_tokens_are_checked(tile_tokens, model):
    with pytest.raises(ValueError, match="give the number of tokens of a tile, 1 or more"):
        tile_modules(model, tile_tokens=tile_tokens)


def test_auto_divides_by_what_is_saved():
    model = Model(num=1)
    tile_modules(model)
    for tokens, longest in [(2048, 2048), (4095, 4095), (4096, 2048), (2**17, 2**17 // 16)]:
        CALLS.clear()
        with torch.no_grad():
            model.layers[0].mlp(torch.zeros(1, tokens, 6))
        calls = [call for call in CALLS if call > 5]
        assert (max(calls), sum(calls)) == (longest, tokens)


def test_heads_are_not_tokens():
    """A norm of queries [batch, tokens, heads, head dim] has as many tiles as one of tokens."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_norm = Norm()

        def forward(self, x, mask):
            return self.q_norm(x.unflatten(-1, (3, 2))).flatten(2).cumsum(1) + mask

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            CALLS.append(x.shape[1])
            wide = x.double()
            return self.weight * (wide / (1 + wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)

    layer = nn.Sequential()
    layer.attention = Attention()
    handle = tile_modules(layer, tile_tokens=8)
    x = torch.randn(2, 16, 6)
    layer.attention(x, 0)
    assert tiled_names(handle) == {"attention.q_norm"}
    CALLS.clear()
    layer.attention(x, 0)
    assert CALLS == [4, 4, 4, 4]  # of two samples


# Norms


class Norm(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        CALLS.append("norm")
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v, self.o = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, scale=None):
        return self.o(self.q(x).cumsum(1) * self.v(x))


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class PostNorm(PreNorm):
    def forward(self, x):
        x = self.norms[0](x + self.attention(x))
        return self.norms[1](x + self.mlp(x))


def normed(layer, checkpointing=None):
    torch.manual_seed(0)
    model = Model(num=2, checkpointing=checkpointing)
    model.layers = nn.ModuleList([layer(), layer()])
    return model.double()


@pytest.mark.parametrize("checkpointing", [None, {}])
@pytest.mark.parametrize("layer", [PreNorm, PostNorm])
def test_norms_save_their_input(layer, checkpointing, x):
    model = normed(layer, checkpointing)
    exact = gradients(model, x)
    handle = tile_modules(model, tile_tokens=4)
    assert_equal(gradients(model, x), exact)
    assert len(tiled_names(handle)) == 6
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert_equal(gradients(model, x), exact)


def test_a_graph_with_norms_is_kept_and_freed(x):
    for checkpointing in (None, {}):
        model = normed(PreNorm, checkpointing)
        tile_modules(model, tile_tokens=4)
        exact = gradients(model, x)
        loss = model(x).pow(2).mean()
        model.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, 2 * exact[name], rtol=1e-9), name
        gc.collect()
        gc.disable()
        try:
            y = model(x.requires_grad_())
            node = y.grad_fn.next_functions[1][0]
            kept = weakref.ref(node.metadata.setdefault("kept", Kept()))
            del y, node
            assert kept() is None
        finally:
            gc.enable()


def test_norms_under_autocast(x):
    model, x = normed(PreNorm, {}).float(), x.float()
    full = gradients(model, x)
    exact = gradients(model, x, autocast=True)
    tile_modules(model, tile_tokens=4)
    found = gradients(model, x, autocast=True)
    rounding, error = errors(exact, full), errors(found, full)
    for name in full:
        assert error[name] <= 2 * rounding[name] + 1e-3, name


# Memory


def kib_per_token(tile_tokens, keep_attention="none"):
    """Return the peak of a checkpointed layer of Llama-8B's proportions, scaled to its width.

    Without its input and the results of attention that are kept: all layers hold these.
    """
    width, num_tokens = 256, 2087  # of which no tensor has the size of a weight
    config = LlamaConfig(
        hidden_size=width, intermediate_size=896, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, num_hidden_layers=1, vocab_size=64, use_cache=False,
    )  # fmt: skip
    found = measure(
        config, num_tokens=num_tokens, checkpointing=True, tile_tokens=tile_tokens,
        keep_attention=keep_attention,
    )  # fmt: skip
    held = 2 * width + (2 * width + 4 * 8 if keep_attention == "all" else 0)
    rotary = 2 * 2 * 32  # cos and sin, which all layers share
    return (found.peak - held - rotary) * (4096 / width) / 1024


@pytest.mark.slow
def test_recomputing_a_layer_takes_less_memory(monkeypatch):
    """The numbers of docs/memory.md."""
    monkeypatch.setattr(tiles, "MIN_TOKENS", 130)
    assert kib_per_token(None) == pytest.approx(261, abs=1)
    assert kib_per_token(131) == pytest.approx(73, abs=1)
    assert kib_per_token("auto", "all") == pytest.approx(66, abs=1)


@pytest.mark.parametrize("keep_attention", ["none", "all"])
def test_checkpoints_are_freed_layer_by_layer(keep_attention, monkeypatch):
    monkeypatch.setattr(tiles, "MIN_TOKENS", 16)
    model = zoo.build_model("llama")
    enable(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tile_modules(model)
    live = Live(model)
    bytes_left = []

    def note(_):
        live.sweep()
        bytes_left.append(live.now)

    for layer in model.model.layers:
        layer.input_layernorm.weight.register_post_accumulate_grad_hook(note)
    batch = zoo.sample_batch("llama", length=64)
    cp = build_cp(keep_attention=keep_attention)
    with live, cp.step(batch) as local:
        model(**local).loss.backward()
    live.sweep()
    checkpoint_bytes = batch["input_ids"].numel() * model.config.hidden_size * 4
    last, first = bytes_left
    assert last - first >= (1 if keep_attention == "none" else 2) * checkpoint_bytes


def test_a_probe_leaves_no_graph_behind(model, x, monkeypatch):
    monkeypatch.setattr(tiles, "MIN_TOKENS", 1)
    weights = [weakref.ref(p) for p in model.parameters()]
    handle = tile_modules(model)
    model(x)
    assert tiled_names(handle)
    handle.remove()
    for module in model.modules():
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            setattr(module, name, None)  # as FSDP2 replaces them
    gc.collect()
    assert not any(ref() is not None for ref in weights)


# Ranks


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in str(func):
            self.count[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


UNITS = {
    "mlp": ["mlp"],
    "inside": ["mlp.gate_proj"],
    "around the mlp": ["input_layernorm", "post_attention_layernorm", "self_attn"],
}


def step_on_ranks(name, *, tile, units, checkpointing, peft=False, gathered=False):
    """Return gradients, numbers of collectives, and the report of a step with FSDP2."""
    cp = build_cp()
    mesh = init_device_mesh("cpu", (cp.cp_size,))
    model = zoo.build_model(name, dtype=torch.float64)
    base, model = model, lora(model).double() if peft else model
    enable(model)
    early = tile_modules(model, tile_tokens=tile) if tile and units != "late" else None
    for layer in base.model.layers:
        for unit in UNITS.get(units, ()):
            fully_shard(layer.get_submodule(unit), mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if gathered:
        gather_parts(model)
    handle = tile_modules(model, tile_tokens=tile) if tile and early is None else early
    with Collectives() as collectives, cp.step(zoo.sample_batch(name, length=45)) as local:
        found = train(model, local, checkpointing=checkpointing)
    found = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}
    return found, dict(collectives.count), handle and (tiled_names(handle), reasons(handle))


CASES = [
    {"name": "llama", "units": "late", "checkpointing": None, "gathered": True},
    {"name": "llama", "units": "mlp", "checkpointing": False},
    {"name": "llama", "units": "around the mlp", "checkpointing": False},
    {"name": "llama", "units": "late", "checkpointing": False, "peft": True},
]
MORE_CASES = [
    {"name": "llama", "units": "layer", "checkpointing": False},
    {"name": "llama", "units": "layer", "checkpointing": None},
    {"name": "llama", "units": "late", "checkpointing": False, "gathered": True},
    {"name": "llama", "units": "mlp", "checkpointing": None},
    {"name": "gemma2", "units": "late", "checkpointing": False},
    {"name": "llama", "units": "late", "checkpointing": None, "peft": True},
]


def compare_on_ranks(cases):
    results = []
    for case in cases:
        exact, plain, _ = step_on_ranks(**case, tile=None)
        found, count, tiled = step_on_ranks(**case, tile=3)
        assert found.keys() == exact.keys()
        results.append((case, max(errors(found, exact).values()), plain, count, tiled))
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [CASES, MORE_CASES])
@pytest.mark.slow
def test_fsdp2_gathers_as_often_as_without_tiles(cases, ranks):
    for results in ranks(2).run(compare_on_ranks, cases):
        for case, worst, plain, count, (tiled, _) in results:
            assert worst <= EXACT, case
            assert count == plain, case
            assert plain["_allgather_base_"] > 0
            assert len([name for name in tiled if name.endswith(".mlp")]) == 2, case


@pytest.mark.ranks
@pytest.mark.slow
def test_fsdp2_units_inside_a_module_leave_it_alone(ranks):
    case = {"name": "llama", "units": "inside", "checkpointing": False, "tile": 3}
    for _, _, (tiled, left) in ranks(2).run(partial(step_on_ranks, **case)):
        alone = [reason for name, reason in left.items() if name.endswith(".mlp")]
        assert alone == ["an FSDP2 unit inside it would be gathered for every tile"] * 2
        assert any(name.endswith("layernorm") for name in tiled)
