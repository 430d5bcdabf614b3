"""`verify(trainer)`: the first batches of a trainer against the stock model."""

import importlib
import random
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from hf_patches import context_parallel
from hf_patches.trainers import verify
from tests.hf_patches.trainers import trainer_jobs
from tests.parity import zoo
from tests.parity.trainer_step import forget_processes, processes

pytestmark = pytest.mark.ranks

# The package has the function of this name.
sharded_forward = importlib.import_module("hf_patches.shard_in_forward")

COLLATORS = {
    "padded": trainer_jobs.padded,
    "flattened": DataCollatorWithFlattening(),
    "documents": trainer_jobs.packed_by_ids,
}


def build(folder, collator=trainer_jobs.padded, model=None, **arguments):
    settings = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, **settings | arguments
    )
    model = zoo.build_model("llama") if model is None else model
    rows = trainer_jobs.token_rows(10)
    return Trainer(model, args, train_dataset=rows, data_collator=collator)


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def verify_batches(folder, names):
    """Return the reports of each collator, and the losses of training with and without them."""
    reports, curves = {}, []
    with processes():
        for name in names:
            trainer = build(folder, COLLATORS[name])
            context_parallel(trainer, size=2)
            reports[name] = verify(trainer, num_batches=2)
            forget_processes()
        for is_verified in (False, True):
            trainer = build(folder)
            context_parallel(trainer, size=2)
            if is_verified:
                before = random_states()
                verify(trainer)
                assert random_states() == before
            curves.append(losses(trainer))
            forget_processes()
    return reports, curves


@pytest.mark.parametrize(
    "names",
    [["documents"], pytest.param(["padded", "flattened"], marks=pytest.mark.slow)],
    ids=len,
)
def test_batches_of_a_trainer_pass_and_training_starts_as_without(ranks, tmp_path, names):
    reports, curves = ranks(2).run(verify_batches, str(tmp_path), names)[0]
    for name, found in reports.items():
        assert len(found) == 2, name
        assert all(report.passed and report.earned and report.cp_size == 2 for report in found)
        assert found[0].loss != found[1].loss
    assert curves[0] == curves[1]


def rolled(first_rank):
    """Let the model of a trainer, on some ranks, predict other tokens."""
    shift = sharded_forward.shift_labels

    def wrong(*args):
        return shift(*args).roll(1, 1) if dist.get_rank() >= first_rank else shift(*args)

    return mock.patch.object(sharded_forward, "shift_labels", wrong)


def messages(folder):
    found = []

    def refuse(trainer, **options):
        with pytest.raises((ValueError, RuntimeError)) as error:
            verify(trainer, **options)
        found.append(str(error.value))

    with processes():
        trainer = build(folder)
        refuse(trainer)
        context_parallel(trainer, size=2)
        refuse(trainer, num_batches=6)
        with rolled(0):
            refuse(trainer)
        assert verify(trainer)[0].passed
        trainer.data_collator = lambda rows: {
            "input_ids": trainer_jobs.padded(rows)["input_ids"],
            "completion_mask": torch.ones(2, 2),
        }
        refuse(trainer)
        trainer.accelerator = SimpleNamespace(device=torch.device("cuda"))
        refuse(trainer)
        trainer = build(folder, model=trainer_jobs.Own())
        context_parallel(trainer, trainer.model.backbone, size=2)
        refuse(trainer)
    return found


def test_what_differs_and_what_cannot_be_compared_is_refused(ranks, tmp_path):
    expected = [
        "got a Trainer without context parallelism. Call context_parallel",
        "num_batches=6.: the training data has 5 batches .* smaller number",
        "(?s)changes the results of this Trainer: loss=.*FAILED: different results on 2 ranks",
        "no labels for it: it holds input_ids, completion_mask. Verify an SFTTrainer",
        "a model on cpu, and the processes communicate on cuda: .* in on_train_begin",
        "shards the LlamaModel inside of Own. Compare the losses of a few steps",
    ]
    for found in ranks(2).run(messages, str(tmp_path)):
        assert len(found) == len(expected)
        for message, pattern in zip(found, expected, strict=True):
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(message)


def wrong_on_one_data_rank(folder):
    with processes():
        trainer = build(folder)
        context_parallel(trainer, size=2)
        with rolled(2), pytest.raises(RuntimeError) as wrong:
            verify(trainer)
        labels = mock.patch.object(
            sharded_forward, "shift_labels", side_effect=KeyError("no labels")
        )
        is_failing = dist.get_rank() > 1
        with labels if is_failing else nullcontext(), pytest.raises(Exception) as failed:  # noqa: PT011
            verify(trainer)
    return str(wrong.value), str(failed.value)


@pytest.mark.slow
def test_all_data_ranks_fail_together(ranks, tmp_path):
    found = ranks(4).run(wrong_on_one_data_rank, str(tmp_path))
    for wrong, failed in found[:2]:
        assert "another rank has found it" in wrong
        assert "failed on another rank" in failed
    for wrong, failed in found[2:]:
        assert "FAILED: different results" in wrong
        assert "no labels" in failed


class Verify(TrainerCallback):
    def on_train_begin(self, *_, **__):
        self.reports = verify(self.trainer)


def verify_sharded(folder):
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    with processes(), trainer_jobs.fsdp_on_cpu(True):
        trainer = build(folder, fsdp=True, fsdp_config=layers)
        context_parallel(trainer, size=2)
        callback = Verify()
        callback.trainer = trainer
        trainer.add_callback(callback)
        trainer.train()
        return callback.reports


@pytest.mark.slow
def test_a_sharded_model_is_verified_when_training_begins(ranks, tmp_path):
    for (report,) in ranks(2).run(verify_sharded, str(tmp_path)):
        assert report.passed
        assert not report.earned
