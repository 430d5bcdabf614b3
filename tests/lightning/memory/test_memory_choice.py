"""``auto`` of activation_checkpointing, offload and tile: the fastest run whose plan fits."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patches import model_shape
from lightning_cp import Attention, Checkpoints, ContextParallelStrategy, Memory, token_mean
from lightning_cp.config import Config
from lightning_cp.lightning.memory import memory_choice, memory_plan
from lightning_cp.lightning.memory.memory_choice import (
    HOST_MARGIN,
    MARGIN,
    Choice,
    Limits,
    RunSetup,
    Size,
)
from lightning_cp.memory import budget, offload, tiles
from lightning_cp.planner import KNOWN, Setup
from lightning_cp.planner import memory as planner_memory
from lightning_cp.planner.memory import USABLE, plan_memory
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full, logged_lines
from tests.tiny import TinyLM

LENGTH = 512
AUTO = {"activation_checkpointing": "auto", "offload": "auto", "tile": "auto"}
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model = LlamaForCausalLM(CONFIG)
        self.losses, self.gradients, self.seen, self.num_checkpointed = [], {}, [], []

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.losses.append(float(loss.detach()))
        self.seen.append(self.state())
        layers = self.model.model.layers
        self.num_checkpointed.append(sum(layer.gradient_checkpointing for layer in layers))
        return loss

    def state(self):
        """Return whether layers are recomputed, offloaded and tiled."""
        store = self.trainer.strategy.context_parallel.offloaded
        is_moved = store is not None and store.used_bytes > 0
        is_tiled = tiles.is_tiled(self.model.model.layers[0].mlp)
        return self.model.is_gradient_checkpointing, is_moved, is_tiled

    def on_before_optimizer_step(self, optimizer):
        if not self.gradients:
            self.gradients = {n: full(p.grad) for n, p in self.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class TinyModule(Module):
    def __init__(self):
        super().__init__()
        self.model = TinyLM(num_layers=2)

    def training_step(self, batch, batch_idx):
        positions = self.trainer.strategy.context_parallel.position_ids()
        loss = token_mean(self.model(batch["input_ids"], positions), batch["labels"])
        self.losses.append(float(loss.detach()))
        return loss


def batches(*lengths):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, 60, (1, length), generator=generator) for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def fit(total, *, host=1e12, cls=Module, lengths=(LENGTH,), **options):
    """Train a step on each length, in float32 but planned as bf16; return what was seen."""
    plan = RunSetup.of

    with elastic_environment(), logged_lines() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "device_bytes", lambda _: None if total is None else int(total))
        patch.setattr(budget, "available_bytes", lambda: int(host))
        patch.setattr(offload, "SMALL_BYTES", 0)
        patch.setattr(tiles, "MIN_TOKENS", 64)
        patch.setattr(memory_choice, "MIN_TOKENS", 64)
        patch.setattr(planner_memory, "OTHER_BYTES", 0.0)
        patch.setattr(
            RunSetup, "of", lambda run, *args: plan(replace(run, precision="bf16-true"), *args)
        )
        module = cls()
        strategy = doors.strategy(verify_steps=False, **options)
        trainer = build_trainer(strategy=strategy, max_steps=len(lengths))
        try:
            trainer.fit(module, DataLoader(batches(*lengths), batch_size=None))
        except MemoryError as error:
            return str(error)
        kept = strategy.last_step.cache.kept_bytes
    if "tensor_parallel_size" not in options:  # transformers leaves its own
        assert not any("forward" in part.__dict__ for part in module.model.modules())
    assert not getattr(module.model, "is_gradient_checkpointing", False)
    return {
        "losses": module.losses,
        "gradients": module.gradients,
        "seen": set(module.seen),
        "num_checkpointed": module.num_checkpointed,
        "kept": kept,
        "lines": [line for line in lines if "memory" in line],
    }


def needed(cp_size=2, length=LENGTH, **options):
    """Return the device memory from which a run fits, and the host memory of a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_memory, "OTHER_BYTES", 0.0)
        setup = Setup(length, 2, cp_size, precision="bf16-true", **options)
        plan = plan_memory(model_shape(CONFIG), setup)
    return MARGIN * plan.peak / USABLE, HOST_MARGIN * plan.host / 2


PLAIN = {"checkpointing": "none"}
FULL = {"checkpointing": "full"}
KEEP = {"checkpointing": "keep"}
SOME = {**KEEP, "checkpointed_layers": 5}
ALL = {"offload": "all"}
TILES = {"tiles": 4}


def least(how, *, more_than=()):
    """Return a device on which a run just fits, and others, which come before it, do not."""
    assert all(needed(**other)[0] > 1.001 * needed(**how)[0] for other in more_than)
    return 1.001 * needed(**how)[0]


def fit_uneven():
    """Train on two data ranks, of which one has short sequences, for which nothing is needed."""
    total = 1.001 * needed(cp_size=1, **KEEP)[0]
    length = LENGTH if dist.get_rank() == 0 else 64
    return fit(total, context_parallel_size=1, lengths=(length,), **AUTO)["seen"]


NO_HOST = {"offload": "none"}
PLAINLY = {"tile": False}


def run_all(names):
    share = budget.SHARE / 2  # of the host, for each of two ranks
    some = 1.01 * needed(**FULL, **ALL)[1] / share
    runs = {
        "reference": partial(fit, None),
        "nothing": partial(fit, least(PLAIN), **AUTO),
        "some layers": partial(
            fit, least(SOME, more_than=[PLAIN, {**SOME, "checkpointed_layers": 4}]), **AUTO
        ),
        "kept": partial(fit, least(KEEP, more_than=[PLAIN]), **{**AUTO, **NO_HOST, **PLAINLY}),
        "kept on the host": partial(fit, least({**KEEP, **ALL}), **{**AUTO, **PLAINLY}),
        "recomputed": partial(fit, least(FULL), **{**AUTO, **NO_HOST, **PLAINLY}),
        "on the host": partial(fit, least({**FULL, **ALL}), host=some, **{**AUTO, **PLAINLY}),
        "kept, tiles": partial(fit, least({**KEEP, **TILES}), **{**AUTO, **NO_HOST}),
        "kept on the host, tiles": partial(fit, least({**KEEP, **ALL, **TILES}), **AUTO),
        "tiles": partial(fit, least({**FULL, **TILES}), **{**AUTO, **NO_HOST}),
        "on the host, tiles": partial(fit, least({**FULL, **ALL, **TILES}), host=some, **AUTO),
        "too large": partial(fit, 0.2 * least({**FULL, **ALL, **TILES}), **AUTO),
        "no device": partial(fit, None, **AUTO),
        "no plan": partial(fit, 80e9, cls=TinyModule, **AUTO),
        "no plan, little memory": partial(fit, 1e5, cls=TinyModule, **AUTO),
    }
    return {name: runs[name]() for name in names}


# What each device leaves: the number of recomputed layers, whether they are offloaded, and tiled.
EXPECTED = {
    "nothing": (False, "none", False),
    "some layers": (5, "none", False),
    "kept": (True, "none", False),
    "kept on the host": (True, "all", False),
    "recomputed": (True, "none", False),
    "on the host": (True, "all", False),
    "kept, tiles": (True, "none", True),
    "kept on the host, tiles": (True, "all", True),
    "tiles": (True, "none", True),
    "on the host, tiles": (True, "all", True),
}
SAID = re.compile(
    r"fastest of those that fit: memory=Memory\(activation_checkpointing=(\w+), "
    r"offload='(\w+)', tile=(\w+)\)"
)


@pytest.mark.ranks
@pytest.mark.slow
def test_what_auto_chooses_is_carried_out_and_changes_no_result(ranks):
    others = ("reference", "too large", "no device", "no plan", "no plan, little memory")
    found = ranks(2).run(run_all, (*others, *EXPECTED))
    first, exact = found[0], found[0]["reference"]
    for name, expected in EXPECTED.items():
        line, plan = first[name]["lines"]
        number, offload, tile = SAID.search(line).groups()
        assert (number, offload, tile) == tuple(map(str, expected)), name
        assert plan.startswith("memory plan: peak_gb=")
        for results in found:
            one = results[name]
            is_on = (number != "False", offload == "all", tile == "True")
            assert one["seen"] == {is_on}, name
            layers = 8 if number == "True" else int(number) if number != "False" else 0
            assert one["num_checkpointed"] == [layers], name
            # Tiles have other shapes of matrix products: the same up to rounding.
            tolerance = {"rtol": 1e-4, "atol": 1e-6} if is_on[-1] else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(one["losses"], exact["losses"], **tolerance, msg=name)
            torch.testing.assert_close(one["gradients"], exact["gradients"], **tolerance)
            assert one["kept"] == first[name]["kept"]
    for results in found:
        assert "This training step needs" in results["too large"]
        assert "more context ranks, shorter sequences, or LoRA" in results["too large"]
        assert results["no device"]["seen"] == results["no plan"]["seen"] == {(False,) * 3}
    assert first["no device"]["lines"] == first["no plan"]["lines"] == []
    (line,) = first["no plan, little memory"]["lines"]
    assert re.search(r"may take \d+ of \d+ GB, and no plan knows it: its 2 layers are", line)


LENGTHS = (64, 512, 64)


def fit_longer():
    """Train on sequences of which the second needs more memory than the first."""
    total = 1.001 * needed(**SOME)[0]
    assert total > needed(length=LENGTHS[0], **PLAIN)[0]
    return fit(None, lengths=LENGTHS), fit(total, lengths=LENGTHS, **AUTO)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_longer_batch_recomputes_more_layers_and_changes_no_result(ranks):
    for exact, auto in ranks(2).run(fit_longer):
        assert exact["num_checkpointed"] == [0] * 3
        assert auto["num_checkpointed"] == [0, 5, 5]
        assert auto["losses"] == exact["losses"]
        torch.testing.assert_close(auto["gradients"], exact["gradients"], rtol=0, atol=0)
        if auto["lines"]:  # of the first rank
            assert auto["lines"][-1] == "memory plan: tokens=256 activation_checkpointing=5"


class FrozenModule(Module):
    """Backward ends above the embeddings, which are in FSDP2's outermost unit."""

    def __init__(self):
        super().__init__()
        self.model.model.embed_tokens.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer):
        if not self.gradients:
            named = self.named_parameters()
            self.gradients = {n: full(p.grad) for n, p in named if p.grad is not None}


def fit_longer_on_one(cls):
    """Train on two data ranks, of which one has a longer sequence in the second step."""
    lengths = LENGTHS if dist.get_rank() == 0 else (64, 96, 80)
    total = 1.001 * needed(cp_size=1, **SOME)[0]
    given = {"context_parallel_size": 1, "lengths": lengths, "cls": cls}
    return fit(None, **given), fit(total, **given, **AUTO)


@pytest.mark.ranks
@pytest.mark.parametrize("cls", [FrozenModule, Module])
@pytest.mark.slow
def test_data_ranks_recompute_as_many_layers_as_each_needs(ranks, cls):
    found = ranks(2).run(fit_longer_on_one, cls)
    assert [auto["num_checkpointed"] for _, auto in found] == [[0, 5, 5], [0] * 3]
    for exact, auto in found:
        assert auto["losses"] == exact["losses"]
        torch.testing.assert_close(auto["gradients"], exact["gradients"], rtol=0, atol=0)


def fit_on_tensor_ranks():
    """Train where one of two tensor ranks has less memory: recomputed layers communicate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_memory, "OTHER_BYTES", 0.0)
        setup = Setup(LENGTH, 2, 1, tp_size=2, precision="bf16-true", **SOME)
        total = MARGIN * plan_memory(model_shape(CONFIG), setup).peak / USABLE
    total *= 1.001 if dist.get_rank() else 1.5
    given = {"context_parallel_size": 1, "tensor_parallel_size": 2, "lengths": LENGTHS[:2]}
    return fit(None, **given), fit(total, **given, **AUTO)


@pytest.mark.ranks
@pytest.mark.slow
def test_tensor_ranks_recompute_as_many_layers_as_the_one_with_the_least_memory(ranks):
    for exact, auto in ranks(2).run(fit_on_tensor_ranks):
        assert auto["num_checkpointed"] == [0, 5]
        assert auto["losses"] == exact["losses"]
        torch.testing.assert_close(auto["gradients"], exact["gradients"], rtol=0, atol=0)


@pytest.mark.ranks
def test_data_ranks_decide_alike(ranks):
    assert ranks(2).run(fit_uneven) == [{(True, False, False)}] * 2


def fits_into(shape, setup, *, device, host):
    run = RunSetup(Config(), 2, "bf16-true", "full", 2)
    choice = Choice(run, setup, plan_memory(shape, setup))
    return memory_choice.fits(choice, Limits(device, host))


@pytest.mark.parametrize("given", [PLAIN, {"offload": "all", "checkpointing": "keep"}])
def test_a_run_fits_with_a_margin(given):
    shape, setup = model_shape(CONFIG), Setup(LENGTH, 2, precision="bf16-true", **given)
    plan = plan_memory(shape, setup)
    device, host = MARGIN * plan.peak / USABLE, HOST_MARGIN * plan.host / 2
    check = partial(fits_into, shape, setup)
    assert check(device=1.001 * device, host=1.001 * host)
    assert not check(device=0.999 * device, host=1.001 * host)
    assert (plan.host > 0) == (given is not PLAIN)
    assert check(device=1.001 * device, host=0.999 * host) == (plan.host == 0)


LLAMA = {"shape": KNOWN["llama-8b"], "lora_rank": 0, "is_checkpointed": False}
NUMBERS = (*range(1, 32), True)


def choose(seq_len, *, gb=80, host=200, model=None, numbers=NUMBERS, size=None, **memory):
    """Return what is chosen for Llama 8B over 8 ranks."""
    model = {**LLAMA, **(model or {})}
    run = RunSetup(Config(memory=Memory(**memory)), 8, "bf16-true", "full", 8)
    one = SimpleNamespace(size=1)
    step = SimpleNamespace(
        layout=SimpleNamespace(seq_len=seq_len, cp_size=8),
        batch_size=1,
        cp_size=8,
        groups=SimpleNamespace(tensor=one, inside=one),
    )
    size = size or Size(seq_len, 1)
    limits = Limits(gb * 1e9, host * 1e9)
    found = memory_choice.choose(run, model, step, size, limits, numbers=numbers)
    setup = found.of(model, step, size)
    choice = Choice(found, setup, plan_memory(model["shape"], setup))
    is_fitting = memory_choice.fits(choice, limits)
    return choice, is_fitting, memory_choice.planned_seconds(choice, model["shape"], limits)


HAND_SET = (
    {"activation_checkpointing": False, "offload": "none", "tile": False},
    {"activation_checkpointing": 16, "keep_attention": "all", "offload": "none", "tile": False},
    {"activation_checkpointing": True, "keep_attention": "none", "offload": "none", "tile": False},
    {"activation_checkpointing": True, "keep_attention": "all", "offload": "none", "tile": False},
    {"activation_checkpointing": True, "keep_attention": "all", "offload": "all", "tile": False},
    {"activation_checkpointing": True, "keep_attention": "none", "offload": "none", "tile": True},
    {"activation_checkpointing": True, "keep_attention": "all", "offload": "none", "tile": True},
    {"activation_checkpointing": True, "keep_attention": "all", "offload": "all", "tile": True},
)


@pytest.mark.parametrize("gb", [40, 80, 141])
@pytest.mark.parametrize("seq_len", [2**15, 2**17, 2**18, 2**20])
def test_no_combination_that_fits_is_faster_by_plan(seq_len, gb):
    choice, is_fitting, seconds = choose(seq_len, gb=gb)
    others = [choose(seq_len, gb=gb, **memory) for memory in HAND_SET]
    times = [time for _, fits, time in others if fits]
    assert is_fitting == bool(times) or is_fitting
    assert all(seconds <= 1.011 * time for time in times), choice.run.memory


def test_what_is_simple_comes_first():
    memory = choose(2**15)[0].run.memory
    found = memory.activation_checkpointing, memory.offload, memory.tile
    assert found == (False, "none", False)
    some = choose(2**17)[0].run.memory
    assert 1 < some.activation_checkpointing < 32
    assert (some.keep_attention, some.offload, some.tile) == ("all", "none", False)


@pytest.mark.parametrize(
    "given",
    [
        {"activation_checkpointing": 5},
        {"activation_checkpointing": True},
        {"activation_checkpointing": False},
        {"tile": 64},
        {"tile": False, "offload": "none"},
        {"offload": 3.0},
        {"keep_attention": "none"},
    ],
)
def test_what_a_user_has_set_stays(given):
    for seq_len in (2**15, 2**20):
        memory = choose(seq_len, **given)[0].run.memory
        assert {name: getattr(memory, name) for name in given} == given


def test_nothing_is_moved_or_tiled_without_recomputation():
    memory = choose(2**20, activation_checkpointing=False)[0].run.memory
    assert (memory.offload, memory.tile) == ("none", False)


def test_a_model_that_recomputes_by_itself_is_left_so():
    memory = choose(2**20, model={"is_checkpointed": True})[0].run.memory
    assert memory.activation_checkpointing is False
    assert memory.offload == "all"


def test_layers_that_are_left_out_are_planned_as_kept():
    choice = choose(2**18, numbers=(1, 2, 3))[0]
    assert choice.run.memory.activation_checkpointing == 3
    assert choice.setup.checkpointed_layers == 3
    assert choose(2**18, numbers=())[0].run.memory.activation_checkpointing is False


def test_the_longest_sequence_decides():
    assert choose(64, size=Size(2**17, 1))[0].run == choose(2**17)[0].run


def test_attention_gets_less_memory_before_a_length_is_refused():
    long = 2**22
    choice, is_fitting, _ = choose(long)
    assert is_fitting
    assert choice.run.config.attention.memory is not None
    default = plan_memory(LLAMA["shape"], replace(choice.setup, attention=Attention()))
    assert MARGIN * default.peak > USABLE * 80e9
    assert choose(2**17)[0].run.config.attention.memory is None


def test_adapters_get_a_wider_margin():
    setup = Setup(2**17, 8, precision="bf16-true")
    assert memory_choice.margin(replace(setup, lora_rank=8)) > memory_choice.margin(setup)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_host_memory_that_is_taken_later_is_left_free(offload, asynchronous):
    shape = KNOWN["llama-8b"]
    setup = Setup(2**17, 8, precision="bf16-true", parameter_offload=offload)
    plan = plan_memory(shape, setup)
    config = Config(checkpoints=Checkpoints(asynchronous=asynchronous))
    weights = 2 * shape.num_params / 8
    later = (3 * weights if offload else 0) + (3 * weights if asynchronous else 0)
    assert memory_choice.other_host_bytes(plan, setup, config) == pytest.approx(later)


@pytest.mark.parametrize("name", ["activation_checkpointing", "tile", "offload", "keep_attention"])
def test_config_files_may_say_auto(name):
    parser = ArgumentParser()
    parser.add_class_arguments(ContextParallelStrategy, "strategy")
    assert parser.parse_args([f"--strategy.memory.{name}=auto"]).strategy.memory[name] == "auto"
    values = {
        "tile": {"true": True, "64": 64},
        "activation_checkpointing": {"true": True, "1": 1, "14": 14},
        "offload": {"3": 3.0, "all": "all"},
    }
    for text, value in values.get(name, {}).items():
        found = parser.parse_args([f"--strategy.memory.{name}={text}"]).strategy.memory[name]
        assert (type(found), found) == (type(value), value)


def test_a_loop_of_ones_own_has_no_plan():
    assert doors.parallel(None, offload="auto", keep_attention="auto").offloaded is None
    assert Memory(offload="auto").offload_bytes == Memory(keep_attention="auto").kept_bytes == 0
