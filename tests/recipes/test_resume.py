"""Killed in the middle of an epoch and resumed: the same batches in their order, the same losses.

Through the command line, on two ranks that share rows. The uninterrupted run is compared number by
number, without a tolerance: on CPUs the same sums are taken in the same order.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback

from tests.lightning.scripts.start import Job
from tests.recipes.test_cli import run_main

STEPS, SAVE_EVERY = 14, 3
EPOCH = 7
"""Batches of an epoch."""

CASES = {  # options of the data, and of the trainer
    "packed": ({}, {}),
    "packed, read ahead, accumulated": ({"num_workers": 2}, {"accumulate_grad_batches": 2}),
}


class Watch(Callback):
    """Writes down what each step is given; at one step it waits to be killed.

    Args:
        folder: for the files.
        run: their name.
        hold_at: the step at whose first batch all ranks wait.
    """

    def __init__(self, folder: str, run: str, hold_at: int | None = None) -> None:
        self.folder, self.run, self.hold_at = Path(folder), run, hold_at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        digest = hashlib.sha256()
        for key in sorted(batch):
            digest.update(key.encode() + batch[key].numpy().tobytes())
        seen = [trainer.global_step, trainer.current_epoch, batch_idx, digest.hexdigest()]
        with (self.folder / f"{self.run}-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(seen) + "\n")
        if trainer.global_step == self.hold_at:
            (self.folder / f"{self.run}-{trainer.global_rank}.held").touch()
            time.sleep(600)


def write_text(folder):
    """Write documents of which several share a row, and some are longer than one."""
    draw = random.Random(0)
    words = ["a", "bee", "can", "dig", "even", "for", "green", "hay", "in", "June"]
    for name, number in (("train", 11), ("val", 3)):
        texts = [" ".join(draw.choices(words, k=draw.randint(2, 36))) for _ in range(number)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def write_config(folder, case, run, *, hold_at=None, keep_all=False):
    """Write the config of a run; what a run writes goes to a folder of its name."""
    data, trainer = CASES[case]
    home = folder / run.split("-")[0]
    config = {
        "model": {
            "config": {"num_hidden_layers": 2},
            "lr": 5e-3,
            "warmup_steps": 2,
            "schedule": "linear",
            "gradient_checkpointing": False,
        },
        "data": {
            "class_path": "recipes.data.TextData",
            "init_args": {
                "source": str(folder / "train.jsonl"),
                "val_source": str(folder / "val.jsonl"),
                "cache_dir": str(folder / "cache"),
                "seq_len": 64,
                "batch_size": 2,
                **data,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_cp.ContextParallelStrategy",
                "init_args": {"context_parallel_size": 2},
            },
            "max_steps": STEPS,
            "max_epochs": -1,
            "gradient_clip_val": 1.0,
            "check_val_every_n_epoch": None,
            "val_check_interval": 4,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(home),
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {
                    "save_dir": str(folder / "logs"),
                    "name": run,
                    "flush_logs_every_n_steps": 1,
                },
            },
            "callbacks": [
                {
                    "class_path": "tests.recipes.test_resume.Watch",
                    "init_args": {"folder": str(folder), "run": run, "hold_at": hold_at},
                },
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {
                        "dirpath": str(home / "checkpoints"),
                        "filename": "{step}",
                        "every_n_train_steps": SAVE_EVERY,
                        "save_top_k": -1 if keep_all else 0,
                        "save_last": True,
                    },
                },
            ],
            **trainer,
        },
    }
    file = folder / f"{run}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def read_batches(folder, run):
    """Return step, epoch, batch and digest of each batch, which both ranks must have seen."""
    first, second = (
        [json.loads(line) for line in (folder / f"{run}-{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    )
    assert first == second
    return first


def read_losses(folder, run):
    """Return the losses, as (name, step): value."""
    (file,) = (folder / "logs" / run).rglob("metrics.csv")
    names, *rows = (line.split(",") for line in file.read_text().splitlines())
    found = {}
    for row in rows:
        values = dict(zip(names, row, strict=True))
        for name in ("train_loss", "val_loss"):
            if values.get(name):
                found[name, int(values["step"])] = float(values[name])
    return found


def check_whole(folder):
    """See that the uninterrupted run can tell: all batches differ, and so do all losses."""
    seen, losses = read_batches(folder, "whole"), read_losses(folder, "whole")
    first, second = ([x for _, epoch, _, x in seen if epoch == number] for number in range(2))
    assert len(set(first)) == len(first) == len(second) == EPOCH
    assert second != first
    assert len({x for (name, _), x in losses.items() if name == "train_loss"}) == STEPS
    assert len({x for (name, _), x in losses.items() if name == "val_loss"}) > 1


def check_same(folder, run, *, start, stop=STEPS):
    """Compare what a run did from one step to another with the uninterrupted run."""
    steps = range(start, stop)
    whole, found = read_batches(folder, "whole"), read_batches(folder, run)
    assert [seen for seen in found if seen[0] < stop] == [x for x in whole if x[0] in steps]
    losses, found = read_losses(folder, "whole"), read_losses(folder, run)
    assert [step for name, step in found if name == "train_loss"] == list(steps)
    assert found == {key: loss for key, loss in losses.items() if key[1] in steps}


@pytest.fixture
def job(tmp_path):
    with Job(tmp_path) as job:
        yield job


def start(job, file, *args):
    job.start([sys.executable, "-m", "recipes", "fit", "--config", str(file), *args])


def finish(job):
    outcome = job.wait(limit=900)
    assert outcome.codes[-1] == 0, outcome.text


def kill_when_held(job, run):
    """Kill the command and all processes that it has started, at once."""
    deadline = time.time() + 600
    while not all((job.folder / f"{run}-{rank}.held").exists() for rank in range(2)):
        assert time.time() < deadline, job.text()
        time.sleep(0.05)
    os.killpg(job.started[-1].pid, signal.SIGKILL)
    assert job.wait(limit=120).codes[-1] == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_twice_and_resumed_it_trains_as_if_nothing_had_been(case, job, tmp_path):
    write_text(tmp_path)
    start(job, write_config(tmp_path, case, "whole"))
    finish(job)
    check_whole(tmp_path)

    # Each time in the middle of an epoch, and two steps after a checkpoint.
    start(job, write_config(tmp_path, case, "killed-0", hold_at=5))
    kill_when_held(job, "killed-0")
    check_same(tmp_path, "killed-0", start=0, stop=5)
    start(job, write_config(tmp_path, case, "killed-1", hold_at=11), "--ckpt_path", "last")
    kill_when_held(job, "killed-1")
    check_same(tmp_path, "killed-1", start=3, stop=11)
    start(job, write_config(tmp_path, case, "killed-2"), "--ckpt_path", "last")
    finish(job)
    check_same(tmp_path, "killed-2", start=9)


@pytest.mark.slow  # quick, of the data alone and under the strategy: tests/recipes/test_data.py
@pytest.mark.ranks
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_with_the_same_losses(ranks, tmp_path):
    # The same in little: what a killed run leaves is its last checkpoint.
    def fit(run, *args, **options):
        given = ["fit", "--config", str(write_config(tmp_path, "packed", run, **options)), *args]
        for status, said in ranks(2).run(run_main, given, tmp_path):
            assert status == 0, said

    write_text(tmp_path)
    fit("whole", keep_all=True)
    check_whole(tmp_path)
    fit("resumed", "--ckpt_path", str(tmp_path / "whole" / "checkpoints" / "step=9.ckpt"))
    check_same(tmp_path, "resumed", start=9)
