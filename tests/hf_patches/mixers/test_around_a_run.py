"""Models with mixers in `verify`, validation, prediction and `export`, and with slow ranks."""

import random
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import hf_patches
from hf_patches.command import main
from hf_patches.mixers import delta_net, mamba2
from lightning_cp.sequence import initial_states
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.parity import hf, zoo
from tests.parity.hf import Job

pytestmark = pytest.mark.ranks

# A gated delta net, Mamba-2, a convolution, an indexer, attention written by hand, full sequences.
NAMES = ("qwen3_next", "nemotron_h", "lfm2", "deepseek_v32", "falcon", "mamba")


def verify(name, kind, how):
    job = Job(name, kind)
    model = zoo.build_model(name)
    batch = hf.build_batch(job, zoo.VOCAB_SIZE, hf.padding_of(model))
    if how == "lora":
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config)
    if how == "sharded":
        mesh = init_device_mesh("cpu", (hf.build_cp().cp_size,))
        for block in model.get_decoder().layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return hf_patches.verify(model, batch, cp=hf.build_cp(), check=False)


def verify_all(cases):
    return [verify(*case) for case in cases]


QUICK = [("deepseek_v32", "packed", "full"), ("lfm2", "packed", "sharded")]
SLOW = [(name, "left" if name == "falcon" else "packed", "full") for name in NAMES]
SLOW += [("qwen3_next", "packed", "lora"), ("nemotron_h", "packed", "sharded")]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_verify_passes(ranks, cases):
    for reports in ranks(2).run(verify_all, cases):
        for case, report in zip(cases, reports, strict=True):
            assert report.passed, (case, report)
            assert report.cp_size == 2


def verify_broken(name):
    """Verify while recurrences do not get the states of earlier ranks."""

    def lose(*pair, **options):
        return 0 * initial_states(*pair, **options)

    with (
        patch.multiple(delta_net, initial_states=lose),
        patch.multiple(mamba2, initial_states=lose),
    ):
        return verify(name, "plain", "full")


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_verify_notices_states_that_are_lost(ranks, name):
    for report in ranks(2).run(verify_broken, name):
        assert not report.passed


class Module(LightningModule):
    def __init__(self, name, path):
        super().__init__()
        self.save_hyperparameters()
        self.model = zoo.build_model(name)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss)

    def predict_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"]).logits

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def batches():
    return [zoo.sample_batch("llama", length=37, seed=seed) for seed in range(2)]


def train(name, base, path):
    """Train two steps; return the loss of validation, logits and weights."""
    with elastic_environment():
        module = Module(name, base)
        trainer = build_trainer(strategy=doors.strategy(), max_steps=2)
        trainer.fit(module, DataLoader(batches(), batch_size=None))
        trainer.save_checkpoint(path)
        (metrics,) = trainer.validate(module, DataLoader(batches(), batch_size=None))
        predicted = trainer.predict(module, DataLoader(batches(), batch_size=None))
        weights = {name: full(p.detach()) for name, p in module.model.named_parameters()}
        return metrics["val_loss"], predicted, weights


@pytest.mark.parametrize(
    "name",
    NAMES,
)
@pytest.mark.slow
def test_validation_predictions_and_export_are_those_of_the_trained_model(ranks, tmp_path, name):
    base, path = tmp_path / "base", tmp_path / "last.ckpt"
    zoo.build_config(name).save_pretrained(base)
    results = ranks(2).run(train, name, str(base), str(path))
    trained = zoo.build_model(name).eval()
    trained.load_state_dict(results[0][2], strict=False)  # tied weights have one name
    with torch.no_grad():
        outputs = [trained(**batch, use_cache=False) for batch in batches()]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches()]
    losses = [float(out.loss) * count for out, count in zip(outputs, counts, strict=True)]
    for val_loss, predicted, _ in results:
        assert val_loss == pytest.approx(sum(losses) / sum(counts), abs=2e-5)
        for found, out in zip(predicted, outputs, strict=True):
            torch.testing.assert_close(found, out.logits, atol=1e-4, rtol=1e-4)
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(loaded) is type(trained)
    with torch.no_grad():
        again = loaded.eval()(**batches()[0], use_cache=False)
    torch.testing.assert_close(again.logits, outputs[0].logits, atol=1e-5, rtol=1e-5)


def train_with_delays(name, num_steps):
    """Train while each rank waits at random before its layers, in forward and in backward."""
    cp = hf.build_cp(layout="zigzag")
    delays = random.Random(cp.cp_rank)

    def wait(*_):
        if delays.random() < 0.2:
            time.sleep(0.01 * delays.random())

    model = zoo.build_model(name).train()
    hf_patches.enable(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.get_decoder().layers:
        layer.register_forward_pre_hook(wait)
        layer.register_full_backward_pre_hook(wait)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step in range(num_steps):
        kind = ("plain", "packed", "right")[step % 3]
        batch = hf.build_batch(Job(name, kind), zoo.VOCAB_SIZE, hf.padding_of(model))
        with cp.step(batch) as local:
            loss = model(**local).loss
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= cp.cp_size
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [pytest.param(n, 200, marks=pytest.mark.slow) for n in ("qwen3_next", "nemotron_h")],
)
def test_slow_ranks_do_not_deadlock(ranks, name, num_steps):
    first, *others = ranks(4).run(train_with_delays, name, num_steps)
    assert len(first) == num_steps
    assert all(losses == first for losses in others)
    assert sum(first[-3:]) < sum(first[:3])
