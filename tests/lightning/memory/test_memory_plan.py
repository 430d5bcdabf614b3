"""The strategy plans the memory of the first training step, and refuses what cannot fit."""

import re
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelCallback
from lightning_cp.lightning.memory import memory_plan
from lightning_cp.lightning.memory.memory_choice import RunSetup
from lightning_cp.memory import budget
from lightning_cp.planner import KNOWN, Setup
from lightning_cp.planner.memory import plan_memory
from lightning_cp.step import active_step
from tests import doors
from tests.hf_patches.test_lightning import Batches, build
from tests.lightning.jobs import build_trainer, elastic_environment, logged_lines
from tests.tiny import TinyLM


class Module(LightningModule):
    def __init__(self, lora=False):
        super().__init__()
        self.model = build("llama", lora)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def fit(total, *, lora=False, precision="bf16-mixed", freeze=False, host=1e12, **options):
    """Train a step on a device of so many bytes; return what was logged, or the error."""
    with elastic_environment(), logged_lines() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "device_bytes", lambda _: total)
        patch.setattr(budget, "available_bytes", lambda: int(host))
        module = Module(lora)
        if freeze:
            module.model.get_input_embeddings().requires_grad_(False)
        strategy = doors.strategy(verify_steps=False, **options)
        trainer = build_trainer(
            strategy=strategy,
            precision=precision,
            max_steps=1,
            callbacks=[ContextParallelCallback()],
        )
        try:
            trainer.fit(module, DataLoader(Batches(1), batch_size=None))
        except MemoryError as error:
            return str(error)
    kept = strategy.last_step.cache.kept_bytes
    return kept, [line for line in lines if line.startswith("memory plan")]


def run_all():
    return {
        "fits": fit(80e9, keep_attention="all"),
        "too large": fit(1e6),
        "too large, gone on": fit(1e6, check_memory=False),
        "unknown weights": fit(1e6, freeze=True),
        "none": fit(80e9, keep_attention="none"),
        "auto": fit(80e9),
        "auto, offload": fit(80e9, offload="all"),
        "auto, offload, host is full": fit(80e9, offload="all", host=1),
    }


@pytest.mark.ranks
@pytest.mark.slow
def test_a_plan_is_logged_and_refused_on_all_ranks(ranks):
    first, second = ranks(2).run(run_all)
    all_kept, (start,) = first["fits"]
    assert re.match(r"memory plan: peak_gb=1\.0 device_gb=80\.0 moment=\S+ other_buffers_gb", start)
    for found in (first, second):
        assert "This training step needs 1 GB on each rank by plan" in found["too large"]
        assert found["too large"].endswith("go on with memory=Memory(check=False).")
    for how in ("too large, gone on", "unknown weights"):
        assert len(first[how][1]) == 1, how  # planned, but not refused
    for how in ("auto", "auto, offload"):
        assert first[how][0] == second[how][0] == all_kept > 0, how
    for how in ("none", "auto, offload, host is full"):
        assert first[how][0] == second[how][0] == 0, how
    assert "keep_attention" not in start
    assert first["auto"][1][0].endswith("keep_attention_limit_gb=74.1")
    # Two ranks share 80% of the host, of whose chunks a fifth may be empty.
    assert first["auto, offload"][1][0].endswith("keep_attention_limit_gb=320.0")


def check_memory(shape, setup, total, *, host=0.0, refuse=False):
    """Check the first step of a model with this setup; return the plan and what it may keep.

    Without a setup, as for a precision that the planner does not know.
    """
    offload = "none" if setup is None else setup.offload
    config = doors.config(keep_attention="auto", offload=offload, check_memory=refuse)
    run = RunSetup(config, 8, "bf16-true", "full", 8)
    model = {"shape": shape, "is_known": True, "is_checkpointed": False}
    store = SimpleNamespace(budget=SimpleNamespace(host_bytes=host))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "device_bytes", lambda _: total)
        patch.setattr(memory_plan, "plan_models", lambda _: [model])
        patch.setattr(memory_plan, "store_of", lambda _: store)
        patch.setattr(RunSetup, "of", lambda *_: setup)
        cp = doors.parallel(None)
        check = memory_plan.MemoryCheck(None, torch.device("cuda"), run, cp=cp, prepare=None)
        with cp.step({"input_ids": torch.ones(1, 8, dtype=torch.int64)}):
            step = active_step.current()
            check.check(step)
            return check.plan, step.cache.kept_limit


def test_the_refusal_names_the_options_that_help():
    with pytest.raises(MemoryError, match="the device has 80 GB") as error:
        check_memory(KNOWN["llama-8b"], Setup(2**24, 8), 80e9, refuse=True)
    for option in ("activation_checkpointing='auto'", "offload='auto'", "tile='auto'", "LoRA"):
        assert option in str(error.value)
    # What is named helps: this one fits by it.
    less = Setup(2**17, 8, checkpointing="none")
    with pytest.raises(MemoryError):
        check_memory(KNOWN["llama-8b"], less, 80e9, refuse=True)
    check_memory(KNOWN["llama-8b"], replace(less, checkpointing="full"), 80e9, refuse=True)


def test_attention_is_kept_on_the_host_where_the_device_has_no_room():
    model, total, host = KNOWN["llama-8b"], 80e9, 180e9

    def kept(setup, total, host):
        return check_memory(model, setup, total, host=host)[1]

    setup = Setup(2**20, 8, precision="bf16-true")
    assert kept(setup, total, host) == 0
    setup = replace(setup, offload="all")
    checkpoints = 2**17 * 32 * 4096 * 2
    room = kept(setup, total, host)
    assert room == pytest.approx(host / memory_plan.HOST_MARGIN - checkpoints)
    assert room > 2**17 * 32 * 4096 * 2  # all layers
    assert kept(setup, total, checkpoints) == 0  # the host has none
    assert kept(setup, 20e9, host) == 0  # of three layers neither


def test_without_a_plan_nothing_is_kept_and_without_a_device_everything():
    model, setup = KNOWN["llama-8b"], Setup(2**17, 8)
    assert check_memory(model, None, 1e6, refuse=True) == (None, 0)
    assert check_memory(model, setup, None, refuse=True) == (None, inf)


def test_attention_is_kept_in_what_a_plan_leaves_free():
    model = KNOWN["gpt-oss-20b"]
    setup = Setup(2**18, 8, precision="bf16-true")
    plan = plan_memory(model, setup)
    for room in (1e12, 5e8, 0.0):
        total = round((room + memory_plan.MARGIN * plan.peak) / memory_plan.USABLE)
        found, limit = check_memory(model, setup, total)
        assert found == plan
        assert limit == pytest.approx(room, abs=2)


def test_a_model_without_an_adapter_has_no_plan():
    assert memory_plan.plan_models(TinyLM(num_layers=1)) == []


def test_memory_of_other_processes_is_not_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    assert memory_plan.device_bytes(torch.device("cuda", 1)) == 50
    assert memory_plan.device_bytes(torch.device("cpu")) is None
