"""The first steps of a trainer, compared with one device before they are believed."""

import random
import re
import tempfile
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_patches.trainer import context_parallel
from tests.hf_patches import trainer_jobs
from tests.hf_patches.trainer_jobs import Job
from tests.parity.hf import Double
from tests.parity.trainer_step import forget_processes, processes

pytestmark = pytest.mark.ranks


class OwnLoss(Trainer):
    """Adds a term of a hook's value to the loss, as in distillation of features."""

    seen = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + self.seen.pow(2).mean()


class PerProcess(Trainer):
    """Multiplies its loss as stock trainers do, where processes have different batches."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * self.accelerator.num_processes


class PerDataRank(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * (self.accelerator.num_processes // self.get_tp_size())


class OwnStep(Trainer):
    """Computes its loss without `compute_loss`."""

    seen = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**self._prepare_inputs(inputs)).loss
        if self.seen is not None:
            loss = loss + self.seen.pow(2).mean()
        self.accelerator.backward(loss)
        return loss.detach()


class Logs(Trainer):
    """Logs what a hook has seen."""

    seen = None

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.log({"norm": self.seen.norm().item()})
        return loss


class DroppedOut(Trainer):
    """Draws random numbers in its loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * (0.5 + torch.rand(()))


def keep(trainer):
    def hook(module, inputs, output):
        trainer.seen = output

    trainer.model.model.layers[0].mlp.register_forward_hook(hook)


def normalise(trainer):
    def hook(module, inputs, outputs):
        return tuple(x / x.norm() for x in outputs)

    trainer.model.model.layers[1].register_full_backward_hook(hook)


def double(trainer):
    def hook(module, inputs, outputs):
        return tuple(2 * x for x in outputs)

    trainer.model.model.layers[1].register_full_backward_hook(hook)


# What users write: the trainer, what they hang on its model, and the error if it is refused.
SCRIPTS = {
    "a hook's value in the loss": (OwnLoss, keep, "returned output.*hook on a layer"),
    "a hook's value in an own step": (OwnStep, keep, "training_step.* returned output"),
    "a hook's value in a log": (Logs, keep, r"logged \['norm'\].*on rank 0"),
    "a loss times all processes": (PerProcess, None, "once per context rank"),
    "a loss times the data ranks": (PerDataRank, None, None),
    "gradients by their norm": (Trainer, normalise, "other gradients: that of `model"),
    "gradients by a constant": (Trainer, double, None),
    "a hook whose value stays": (Trainer, keep, None),
    "an own step": (OwnStep, None, None),
    "random numbers": (DroppedOut, None, None),
}


def run_script(name, folder):
    build, hang, _ = SCRIPTS[name]
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, save_strategy="no"
    )
    rows = trainer_jobs.token_rows(8)
    trainer = build(
        trainer_jobs.tiny(dtype=torch.float32),
        arguments,
        train_dataset=rows,
        data_collator=trainer_jobs.padded,
    )
    if hang is not None:
        hang(trainer)
    context_parallel(trainer, size=dist.group.WORLD.size())
    trainer.train()


QUICK = (
    "a hook's value in the loss",
    "a hook's value in a log",
    "a loss times all processes",
    "gradients by their norm",
    "a hook whose value stays",
    "random numbers",
)


def run_scripts(names):
    """Return the error of each script, or None."""
    warnings.simplefilter("ignore")
    errors = {}
    for name in names:
        errors[name] = None
        with processes(), tempfile.TemporaryDirectory() as folder:
            try:
                run_script(name, folder)
            except ValueError as error:
                errors[name] = str(error)
        forget_processes()
    return errors


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in SCRIPTS if name not in QUICK], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_a_step_is_that_of_one_device_or_refused_on_all_ranks(ranks, names):
    for errors in ranks(2).run(run_scripts, names):
        for name, error in errors.items():
            expected = SCRIPTS[name][2]
            if expected is None:
                assert error is None, name
            else:
                assert error is not None, name
                assert re.search(expected, error), name


def hook_weight(trainer):
    trainer.model.lm_head.weight.register_hook(torch.zeros_like)


def refuse_sharded():
    """Return what is refused under FSDP2: a hook on a weight, and smoothed labels."""
    found = []
    for hang, smoothing in ((hook_weight, 0.0), (None, 0.1)):
        with (
            processes(),
            tempfile.TemporaryDirectory() as folder,
            trainer_jobs.fsdp_on_cpu(True),
        ):
            trainer = trainer_jobs.build_trainer(Job(flags=("fsdp",)), folder)
            trainer.args.label_smoothing_factor = smoothing
            if hang is not None:
                hang(trainer)
            with pytest.raises(ValueError, match="FSDP2") as error:
                context_parallel(trainer, size=dist.group.WORLD.size())
            found.append(str(error.value))
        forget_processes()
    return found


def test_what_a_sharded_model_would_do_otherwise_is_refused(ranks):
    for hook, smoothing in ranks(2).run(refuse_sharded):
        assert re.search(r"`lm_head.weight` has a hook.*or leave parameters as they are: DDP", hook)
        assert re.search(r"label_smoothing_factor=0.1 under FSDP2: .*Use DDP", smoothing)


class Counts(TrainerCallback):
    calls = 0

    def on_step_end(self, *_, **__):
        self.calls += 1


TRACES = [
    Job(flags=("fsdp", "every_batch", "brief")),
    Job("dpo", flags=("every_batch", "brief")),
    *(
        pytest.param(job, marks=pytest.mark.slow)
        for job in (
            Job(flags=("metrics",)),
            Job(flags=("fsdp",)),
            Job("sft", flags=("packed",)),
            Job("dpo"),
            Job("dpo", flags=("fsdp",)),
            Job("grpo"),
        )
    ),
]


def run_traced(job, verify_steps):
    """Return everything that a run has changed."""
    warnings.simplefilter("ignore")
    counted = {"forward": 0}

    def count(*_):
        counted["forward"] += 1

    random.seed(7)
    np.random.seed(7)
    with (
        tempfile.TemporaryDirectory() as folder,
        processes(),
        trainer_jobs.fsdp_on_cpu("fsdp" in job.flags),
        Double() if job.kind == "trainer" else nullcontext(),
    ):
        trainer = trainer_jobs.build_trainer(job, folder)
        callback = Counts()
        trainer.add_callback(callback)
        trainer.model.get_decoder().layers[0].register_forward_hook(count)
        context_parallel(trainer, size=dist.group.WORLD.size(), verify_steps=verify_steps)
        trainer.train()
        log = [
            {name: x for name, x in entry.items() if "time" not in name and "second" not in name}
            for entry in trainer.state.log_history
        ]
        state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        weights = [
            float((x.full_tensor() if hasattr(x, "full_tensor") else x).double().norm())
            for x in state.values()
        ]
        found = (
            log,
            weights,
            counted["forward"],
            callback.calls,
            trainer.state.total_flos,
            getattr(trainer, "_step", None),
            getattr(trainer, "_total_train_tokens", None),
            torch.rand(2).tolist(),
            random.random(),
            float(np.random.rand()),
        )
    forget_processes()
    return found


def run_both(job):
    return [run_traced(job, verify_steps) for verify_steps in (True, False)]


@pytest.mark.parametrize("job", TRACES, ids=lambda job: " ".join((job.kind, *job.flags)))
def test_a_trial_run_leaves_no_trace(ranks, job):
    for verified, unverified in ranks(2).run(run_both, job):
        assert repr(verified) == repr(unverified)
