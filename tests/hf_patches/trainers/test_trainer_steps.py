"""The first steps of a trainer, compared with one device before they are believed."""

import logging
import os
import random
import re
import tempfile
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed import get_world_size  # noqa: TID251  as users import it
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_patches import context_parallel
from tests.hf_patches.trainers import trainer_jobs
from tests.hf_patches.trainers.trainer_jobs import Job
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


class Scaled(Trainer):
    """Multiplies its loss by a number of processes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * self.count()


class ByEnvironment(Scaled):
    def count(self):
        return int(os.environ["WORLD_SIZE"])


class ByState(Scaled):
    def count(self):
        return PartialState().num_processes


class ByImport(Scaled):
    def count(self):
        return get_world_size()


class OverAll(Trainer):
    """Divides a sum by the number of labels of all processes, as many repositories do."""

    factor = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        number = self.accelerator.gather((labels != -100).sum()).sum()
        return total / number * (self.accelerator.num_processes if self.factor else 1)


class Cancels(OverAll):
    factor = True


class Contrastive(Trainer):
    """Finds each row's own embedding among those of all processes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs, output_hidden_states=True)
        rows = nn.functional.normalize(output.hidden_states[-1].mean(1), dim=-1)
        others = self.accelerator.gather(rows.detach())
        own = torch.arange(len(rows)) + self.accelerator.process_index * len(rows)
        return output.loss + nn.functional.cross_entropy(rows @ others.T, own)


class Features(OwnLoss):
    """Has 50 features in each row, which are no tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        features = inputs.pop("features")
        assert features.shape[1] == 50
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


class Later(OwnLoss):
    """Adds its term with a weight that begins at 0."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = Trainer.compute_loss(self, model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + self.state.global_step * self.seen.pow(2).mean()


class Prompted(Trainer):
    """Trains a prompt that is no part of the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not hasattr(self, "prompt"):
            raise AssertionError
        ids = inputs.pop("input_ids")
        embeds = self.accelerator.unwrap_model(model).get_input_embeddings()(ids)
        return model(inputs_embeds=embeds + self.prompt, **inputs).loss


class AddsToLogs(Trainer):
    """Adds a hook's value to what is logged."""

    seen = None

    def log(self, logs, *args, **kwargs):
        super().log({**logs, "norm": self.seen.norm().item()}, *args, **kwargs)


class Updates(Trainer):
    """Updates a weight of its own in its loss."""

    def compute_loss(self, *args, **kwargs):
        weight = nn.Parameter(torch.ones(()))
        weight.sum().backward()
        torch.optim.SGD([weight]).step()
        return super().compute_loss(*args, **kwargs)


class Draws(Trainer):
    """Weights its loss by what a generator gives."""

    def compute_loss(self, *args, **kwargs):
        if not hasattr(self, "weights"):
            raise AssertionError
        return super().compute_loss(*args, **kwargs) * next(self.weights)


class Probes(TrainerCallback):
    """Calls the model on the first process only."""

    found = None

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.is_world_process_zero:
            batch = trainer_jobs.padded(trainer_jobs.token_rows(1))
            with torch.no_grad():
                self.found = float(model(**batch).loss)


def keep(trainer):
    def hook(module, inputs, output):
        trainer.seen = output

    trainer.model.model.layers[0].mlp.register_forward_hook(hook)


def keep_with_features(trainer):
    keep(trainer)
    trainer.args.remove_unused_columns = False
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: collate(rows) | {"features": torch.ones(len(rows), 50)}


def give_prompt(trainer):
    trainer.prompt = nn.Parameter(torch.full((32,), 0.1))


def give_weights(trainer):
    trainer.weights = (1.0 / n for n in range(1, 9))


def keep_norms(trainer):
    norms = []
    trainer.model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: norms.append(output.norm().item())
    )


def probe(trainer):
    trainer.add_callback(Probes())


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
    "processes of the environment": (ByEnvironment, None, "once per context rank"),
    "processes of PartialState": (ByState, None, "once per context rank"),
    "processes by an imported function": (ByImport, None, "once per context rank"),
    "labels of all processes": (OverAll, None, "returned output"),
    "labels of all processes, times them": (Cancels, None, None),
    "rows of all processes": (Contrastive, None, "returned output"),
    "features that are no tokens": (Features, keep_with_features, "returned output.*hook on"),
    "a term that begins later": (Later, keep, "returned output.*hook on a layer"),
    "a prompt of the trainer": (Prompted, give_prompt, "gradient of `.*prompt`.*no parameter of"),
    "a hook's value added to a log": (AddsToLogs, keep, r"logged \['norm'\].*on rank 0"),
    "a model called on one process": (Trainer, probe, None),
    "numbers that a hook keeps": (Trainer, keep_norms, None),
    "an optimizer in the loss": (Updates, None, None),
    "a generator in the loss": (Draws, give_weights, None),
}

# What is said where a step is not refused.
WARNINGS = {
    "numbers that a hook keeps": r"keeps other numbers on this rank.*`.*norms` has",
    "an optimizer in the loss": r"compute_loss\(\) is not compared .* calls step\(\) of an optim",
    "a generator in the loss": r"not compared .*draws from `give_weights.<locals>.<genexpr>`",
}


def run_script(name, folder):
    build, hang, _ = SCRIPTS[name]
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    arguments.max_steps = 3 if build is Later else 1  # the third step is compared again
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


QUICK = ("a hook's value in the loss",)


@contextmanager
def heard():
    """Collect what trial runs warn of."""
    handler, texts = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("hf_patches.trainers.trainer_steps")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def run_scripts(names):
    """Return the error of each script, or None, and what was warned of."""
    warnings.simplefilter("ignore")
    results = {}
    for name in names:
        error = None
        with processes(), tempfile.TemporaryDirectory() as folder, heard() as texts:
            try:
                run_script(name, folder)
            except ValueError as raised:
                error = str(raised)
        results[name] = error, texts
        forget_processes()
    return results


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in SCRIPTS if name not in QUICK], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_a_step_is_that_of_one_device_or_refused_on_all_ranks(ranks, names):
    """What cannot be refused is said once."""
    for results in ranks(2).run(run_scripts, names):
        for name, (error, texts) in results.items():
            expected = SCRIPTS[name][2]
            if expected is None:
                assert error is None, name
            else:
                assert error is not None, name
                assert re.search(expected, error), name
            assert len(texts) == (name in WARNINGS), name
            assert all(re.search(WARNINGS[name], text) for text in texts), name


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
    *(
        pytest.param(job, marks=pytest.mark.slow)
        for job in (
            Job("dpo", flags=("every_batch", "brief")),
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
        context_parallel(trainer, size=dist.group.WORLD.size(), verify=verify_steps)
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
            # What trainers of TRL count; they show it to nobody.
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
@pytest.mark.slow
def test_a_trial_run_leaves_no_trace(ranks, job):
    for verified, unverified in ranks(2).run(run_both, job):
        assert repr(verified) == repr(unverified)
