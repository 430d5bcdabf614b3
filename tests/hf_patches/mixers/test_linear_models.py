"""Models with convolutions and linear recurrences, enabled: exact, copied, restored, refused."""

import copy
import itertools
import pickle
from contextlib import ExitStack
from types import MethodType
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_patches import enable
from hf_patches.mixers import INSTALLERS, delta_net, mamba2, rows
from hf_patches.support import ARCHITECTURES
from lightning_cp.sequence.halo import visible_halo
from tests.parity import zoo
from tests.parity.hf import KINDS, Job, build_batch, build_cp, compare, compare_all, errors

# One of each kind: `python -m tools.parity` compares all names.
KINDS_OF_MIXERS = {
    "convolution": "lfm2",
    "gated-delta-net": "qwen3_next",
    "kimi-delta-attention": "kimi_linear",
    "mamba-2": "bamba",
    "lightning-attention": "minimax",
}
NAMES = tuple(KINDS_OF_MIXERS.values())
QUICK = ("qwen3_next", "bamba", "minimax")
LAYOUTS = ("zigzag", "contiguous", "balanced")


def spread(names, kinds=KINDS, turn=0, **options):
    """Give each name all kinds of batches; layouts take turns."""
    layouts = itertools.islice(itertools.cycle(LAYOUTS), turn, None)
    pairs = itertools.product(names, kinds)
    for layout, (name, kind) in zip(layouts, pairs, strict=False):
        yield Job(name, kind, options=(("layout", layout),), **options)


def check(ranks, cp_size, jobs, limit=1e-9, loss_limit=1e-11):
    results = ranks(cp_size).run(compare_all, jobs)[0]
    for job, found in zip(jobs, results, strict=True):
        assert not isinstance(found, str), (str(job), found)
        assert abs(found.loss - found.exact_loss) < loss_limit, (str(job), found.loss, found)
        assert found.worst[1] < limit, (str(job), found.worst)


def test_every_installer_is_tested():
    ours = set(KINDS_OF_MIXERS)
    assert ours <= INSTALLERS.keys()
    assert {ARCHITECTURES[name].mixers for name in NAMES} == ours


# ---------------------------------------------------------------- on ranks


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in NAMES]
)
def test_in_double_precision_the_algebra_is_exact(ranks, name):
    turn = NAMES.index(name)
    # test_rows.py has documents of Kimi's kernel, which takes as long as the others together.
    kinds = ("left",) if name == "kimi_linear" else ("packed", "left")
    jobs = spread([name], turn=turn, dtype=torch.float64)
    check(ranks, 3, [job for job in jobs if job.kind in kinds])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_batch_is_exact(ranks, name):
    turn = NAMES.index(name)
    check(ranks, 3, list(spread([name], turn=turn, dtype=torch.float64)))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_other_numbers_of_ranks_change_nothing(ranks, cp_size):
    jobs = list(spread(NAMES, ("packed", "left"), turn=cp_size))
    check(ranks, cp_size, jobs, limit=1e-4, loss_limit=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("names", [NAMES[:2], pytest.param(NAMES[2:], marks=pytest.mark.slow)])
def test_layers_may_be_recomputed_in_backward(ranks, names):
    jobs = list(spread(names, ("packed",), checkpointing=False))
    check(ranks, 2, jobs, limit=1e-4, loss_limit=1e-5)


def reentrant(inside):
    """Recompute with reentrant checkpoints, whose layers do not know their step."""
    batch = build_batch(Job("qwen3_next"), zoo.VOCAB_SIZE, 1)
    model, cp = zoo.build_model("qwen3_next").train(), build_cp(layout="zigzag")
    enable(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    try:
        with cp.step(batch) as local:
            loss = model(**local).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    except RuntimeError as error:
        return str(error)
    return float(model.model.layers[0].linear_attn.A_log.grad.norm())


@pytest.mark.ranks
def test_reentrant_checkpoints_are_recomputed_inside_of_their_step_only(ranks):
    assert all(norm > 0 for norm in ranks(2).run(reentrant, True))
    for text in ranks(2).run(reentrant, False):
        assert "runs again in backward" in text
        assert "use_reentrant=False" in text


def sharded(name):
    batch = build_batch(Job(name, "packed"), zoo.VOCAB_SIZE, 1)
    found = []
    for shards in (False, True):
        model, cp = zoo.build_model(name), build_cp(layout="zigzag")
        enable(model)
        if shards:
            for layer in model.get_decoder().layers:
                fully_shard(layer)
            fully_shard(model)
        with cp.step(batch) as local:
            model(**local).loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named(model)}
        if not shards:
            for grad in grads.values():
                torch.distributed.all_reduce(grad)
                grad /= cp.cp_size
        found.append({n: g.full_tensor() if shards else g for n, g in grads.items()})
    return max(errors(*found).values())


def named(model):
    return list(model.named_parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("bamba", marks=pytest.mark.slow)])
def test_sharded_models_are_exact(ranks, name):
    assert max(ranks(2).run(sharded, name)) < 1e-5


# ---------------------------------------------------------------- what the suite notices


def _short_halo():
    visible = visible_halo
    return mock.patch(
        "lightning_cp.sequence.halo.visible_halo",
        lambda tokens, held, left: visible(tokens, held, left - 1),
    )


def _no_reset():
    return mock.patch.object(rows, "find_cuts", return_value=[])


def _no_gradient():
    stack = ExitStack()
    for module in (delta_net, mamba2):
        states = module.initial_states
        stack.enter_context(
            mock.patch.object(
                module, "initial_states", lambda *a, f=states, **k: f(*a, **k).detach()
            )
        )
    return stack


def _no_state():
    stack = ExitStack()
    for module in (delta_net, mamba2):
        stack.enter_context(
            mock.patch.object(
                module, "initial_states", lambda decay, state, **_: torch.zeros_like(state)
            )
        )
    return stack


BREAKS = {
    "a halo one token short": (_short_halo, "plain", NAMES[:4]),
    "a state that passes into the next document": (_no_reset, "packed", NAMES[1:]),
    "a state without its gradient": (_no_gradient, "plain", NAMES[:0:-1]),
    "a state that stays on its rank": (_no_state, "plain", NAMES[1:]),
}


def compare_broken(what, count):
    breaking, kind, names = BREAKS[what]
    names = names[:count]
    with breaking():
        return [compare(Job(name, kind, options=(("layout", "contiguous"),))) for name in names]


@pytest.mark.ranks
@pytest.mark.parametrize("count", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", BREAKS)
def test_the_suite_notices(ranks, what, count):
    names = BREAKS[what][2][:count]
    for name, found in zip(names, ranks(2).run(compare_broken, what, count)[0], strict=True):
        assert found.worst[1] > 3e-3, (name, found.worst)


# ---------------------------------------------------------------- one process


@pytest.fixture
def batch():
    return build_batch(Job("lfm2", "packed"), zoo.VOCAB_SIZE, 1)


def loss_in_step(model, cp, batch):
    with cp.step(batch) as local:
        return model(**local).loss


def forwards(model):
    return {name for name, module in model.named_modules() if "forward" in module.__dict__}


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["qwen3_next", "minimax"])
def test_enabled_models_are_copied(cp, batch, way, name):
    model = zoo.build_model(name)
    handle = enable(model)
    exact = loss_in_step(model, cp, batch)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loss_in_step(other, cp, batch), exact)
    handle.undo()
    torch.testing.assert_close(loss_in_step(other, cp, batch), exact)
    with torch.no_grad():  # the copy computes with its own weights
        other.get_decoder().layers[0].input_layernorm.weight.zero_()
        for part in other.modules():
            if isinstance(part, nn.Linear):
                part.weight.zero_()
    enable(model)
    torch.testing.assert_close(loss_in_step(model, cp, batch), exact)
    assert (loss_in_step(other, cp, batch) - exact).abs() > 1e-3
    for each in (model, other):
        enable(each).undo()
        assert forwards(each) == set()


@pytest.mark.parametrize("name", NAMES)
def test_outside_of_steps_models_are_stock(batch, name):
    model = zoo.build_model(name).eval()
    given = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    exact = model(**given).loss
    handle = enable(model)
    assert forwards(model) > {""}
    assert torch.equal(model(**given).loss, exact)
    handle.undo()
    assert forwards(model) == set()
    assert torch.equal(model(**given).loss, exact)


def test_other_models_of_the_class_see_nothing(cp, batch):
    stock, model = zoo.build_model("qwen3_next").eval(), zoo.build_model("qwen3_next").eval()
    exact = stock(input_ids=batch["input_ids"]).logits
    enable(model)
    with cp.step(batch) as local:
        model(**local)
        with cp.paused():
            assert torch.equal(stock(input_ids=batch["input_ids"]).logits, exact)


# ---------------------------------------------------------------- refusals


def test_a_layer_that_was_replaced_is_refused():
    model = zoo.build_model("qwen3_next")
    layer = model.model.layers[0].linear_attn
    layer.forward = MethodType(type(layer).forward, layer)
    with pytest.raises(ValueError, match=r"The forward of model.layers.0.linear_attn .* has been"):
        enable(model)
    assert forwards(model) == {"model.layers.0.linear_attn"}
    assert zoo.attention_of(model.config) != "lightning_cp"


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(4, 4, 3, groups=4)

    def forward(self, hidden_states, **_):
        return hidden_states


class Half(Renamed):
    def forward(self, hidden_states, **_):
        return causal_conv1d_fn(hidden_states)  # noqa: F821


Renamed.__module__ = Half.__module__ = "transformers.models.novel"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Renamed, "has a convolution that is computed in another way, which is not supported"),
        (Half, "has a forward that does not call torch_chunk_gated_delta_rule, which is not"),
    ],
)
def test_layers_of_an_unknown_form_are_refused(layer, message):
    model = zoo.build_model("qwen3_next")
    model.model.layers[0].linear_attn = layer()
    with pytest.raises(ValueError, match=message):
        enable(model)
    assert forwards(model) == set()


def test_linear_layers_of_an_unknown_form_are_refused():
    model = zoo.build_model("minimax")
    linear = model.config.layer_types.index("linear_attention")
    del model.model.layers[linear].self_attn.slope_rate
    with pytest.raises(ValueError, match="has 1 other linear layers, which is not supported"):
        enable(model)


def test_mixers_are_found_by_what_they_call():
    model = zoo.build_model("nemotron_h")
    installed = list(INSTALLERS["mamba-2"](model))
    assert installed
    assert {patch.name for patch in installed} == {"forward"}
    assert len(installed) == len([m for m in model.modules() if isinstance(m, nn.Conv1d)])
