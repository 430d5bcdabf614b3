"""``auto`` of activation_checkpointing, offload and tile: the fastest run whose plan fits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patches import model_shape
from lightning_cp import ContextParallelStrategy, token_mean
from lightning_cp.config import Memory
from lightning_cp.lightning.memory import memory_choice, memory_plan
from lightning_cp.lightning.memory.memory_choice import HOST_MARGIN, MARGIN, RunSetup
from lightning_cp.memory import budget, offload, tiles
from lightning_cp.planner import Setup
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
        patch.setattr(memory_plan, "device_bytes", lambda _: total)
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


def run_all(names):
    share = budget.SHARE / 2  # of the host, for each of two ranks
    some = 1.01 * needed(**FULL, **ALL)[1] / share
    few = 0.5 * some
    runs = {
        "reference": partial(fit, None),
        "nothing": partial(fit, least(PLAIN), **AUTO),
        "some layers": partial(
            fit, least(SOME, more_than=[PLAIN, {**SOME, "checkpointed_layers": 4}]), **AUTO
        ),
        "kept": partial(fit, least(KEEP, more_than=[PLAIN]), **AUTO),
        "kept on the host": partial(fit, least({**KEEP, **ALL}, more_than=[KEEP]), **AUTO),
        "recomputed": partial(fit, least(FULL, more_than=[KEEP]), host=few, **AUTO),
        "on the host": partial(fit, least({**FULL, **ALL}, more_than=[FULL]), host=some, **AUTO),
        "kept, tiles": partial(fit, least({**KEEP, **TILES}, more_than=[FULL]), host=few, **AUTO),
        "kept on the host, tiles": partial(
            fit,
            least({**KEEP, **ALL, **TILES}, more_than=[{**FULL, **ALL}, {**KEEP, **TILES}]),
            **AUTO,
        ),
        "tiles": partial(
            fit, least({**FULL, **TILES}, more_than=[{**KEEP, **TILES}]), host=few, **AUTO
        ),
        "on the host, tiles": partial(
            fit, least({**FULL, **ALL, **TILES}, more_than=[{**FULL, **TILES}]), host=some, **AUTO
        ),
        "too large": partial(fit, 0.2 * least({**FULL, **ALL, **TILES}), **AUTO),
        "no device": partial(fit, None, **AUTO),
        "no plan": partial(fit, 80e9, cls=TinyModule, **AUTO),
        "offload is enough": partial(
            fit, least({**KEEP, **ALL}, more_than=[FULL]), activation_checkpointing=True, offload=1
        ),
    }
    return {name: runs[name]() for name in names}


# Whether layers are recomputed, offloaded and tiled; and of how many attention is kept. Results in
# float32 are twice as large as planned: where the device just holds all of them, half are kept.
EXPECTED = {
    "nothing": ((False, False, False), 0),
    "some layers": ((True, False, False), 2),
    "kept": ((True, False, False), 4),
    "kept on the host": ((True, True, False), 8),
    "recomputed": ((True, False, False), 0),
    "on the host": ((True, True, False), 0),
    "kept, tiles": ((True, False, True), 4),
    "kept on the host, tiles": ((True, True, True), 8),
    "tiles": ((True, False, True), 0),
    "on the host, tiles": ((True, True, True), 0),
    "no device": ((False, False, False), 0),
    "offload is enough": ((True, True, False), 8),
}


NUM_CHECKPOINTED = {"nothing": 0, "some layers": 5, "no device": 0}  # others: all 8


@pytest.mark.ranks
@pytest.mark.slow
def test_auto_takes_the_fastest_run_that_fits_and_changes_no_result(ranks):
    names = tuple(EXPECTED)
    found = ranks(2).run(run_all, ("reference", "too large", "no plan", *names))
    exact = found[0]["reference"]
    result_bytes = LENGTH // 2 * (32 + 4) * 4  # output and log-sum-exp of a layer
    for results in found:
        for name in names:
            one, (seen, num_kept) = results[name], EXPECTED[name]
            assert one["seen"] == {seen}, name
            assert one["num_checkpointed"] == [NUM_CHECKPOINTED.get(name, 8)], name
            assert one["kept"] == num_kept * result_bytes, name
            is_tiled = seen[-1]  # other shapes of matrix products: the same up to rounding
            tolerance = {"rtol": 1e-4, "atol": 1e-6} if is_tiled else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(one["losses"], exact["losses"], **tolerance, msg=name)
            torch.testing.assert_close(one["gradients"], exact["gradients"], **tolerance)
        assert "This training step needs" in results["too large"]
        assert "more context ranks, shorter sequences, or LoRA" in results["too large"]
    first = found[0]
    (line,) = first["kept on the host, tiles"]["lines"]
    assert " activation_checkpointing=True offload=all tile=True keep_attention_limit_gb=" in line
    (line,) = first["nothing"]["lines"]
    assert line.endswith(" activation_checkpointing=False offload=none tile=False")
    (line,) = first["some layers"]["lines"]
    assert " activation_checkpointing=5 offload=none tile=False keep_attention_limit_gb=" in line
    assert "no device" not in first or first["no device"]["lines"] == []
    (line,) = first["no plan"]["lines"]
    assert "offload='auto', tile='auto'): the memory of this run cannot be planned" in line


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
            assert auto["lines"][1] == "memory plan: tokens=256 activation_checkpointing=5"


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


@pytest.mark.parametrize("given", [PLAIN, {"offload": "all", "checkpointing": "keep"}])
def test_a_run_fits_with_a_margin(given):
    shape, setup = model_shape(CONFIG), Setup(LENGTH, 2, precision="bf16-true", **given)
    plan = plan_memory(shape, setup)
    device, host = MARGIN * plan.peak / USABLE, HOST_MARGIN * plan.host / 2
    check = partial(memory_choice.fits, shape, setup)
    assert check(device=1.001 * device, host=1.001 * host)
    assert not check(device=0.999 * device, host=1.001 * host)
    assert (plan.host > 0) == (given is not PLAIN)
    assert check(device=1.001 * device, host=0.999 * host) == (plan.host == 0)


def test_what_auto_may_mean_comes_in_the_order_of_its_cost():
    def names(is_checkpointed=False, checkpointing=False, tile=False, num_layers=0, **options):
        memory = {"activation_checkpointing": checkpointing, "tile": tile, "compile": "layers"}
        config = doors.config(**{"keep_attention": "none", **memory, **options})
        run = RunSetup(config, 8, "bf16-true", "full", 8)
        return [
            (
                one.memory.activation_checkpointing,
                one.memory.tile,
                one.memory.keep_attention,
                one.memory.offload,
            )
            for one in run.choices(is_checkpointed=is_checkpointed, num_layers=num_layers)
        ]

    recomputed = [
        (True, False, "all", "none"),
        (True, False, "all", "all"),
        (True, False, "auto", "none"),
        (True, False, "auto", "all"),
        (True, True, "all", "none"),
        (True, True, "all", "all"),
        (True, True, "auto", "none"),
        (True, True, "auto", "all"),
    ]
    auto = {"keep_attention": "auto", "offload": "auto", "tile": "auto"}
    assert names(checkpointing=True, **auto) == recomputed
    assert names(checkpointing="auto", **auto) == [(False, False, "all", "none"), *recomputed]
    some = [(number, False, "all", "none") for number in (False, 1, 2)]
    assert names(checkpointing="auto", num_layers=3, **auto) == [*some, *recomputed]
    # A model that recomputes its layers is left as it is.
    own = [(False, *others) for _, *others in recomputed]
    assert names(True, checkpointing="auto", num_layers=3, **auto) == own
    assert names(True, **auto) == own
    # Without recomputation there is nothing to move or to keep.
    assert names(**auto) == [(False, False, "all", "none")]
    # What is given stays.
    assert names(checkpointing="auto", tile=64, offload=3, keep_attention="none") == [
        (False, 64, "none", 3),
        (True, 64, "none", 3),
    ]
    assert names(checkpointing=5, **auto) == [(5, *others) for _, *others in recomputed]


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
