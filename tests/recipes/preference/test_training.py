"""Preference training from a config: two ranks as one, uneven pairs, a resumed run."""

import csv
import math
from pathlib import Path

import pytest

from tests.recipes.shrunken import write_config
from tests.recipes.test_configs import CONFIGS, fit

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def arguments(folder, name, devices, **more):
    """Train the laptop config, from weights of a folder, on a few long and short pairs."""
    options = {
        "model.model": folder / "model",
        "model.lr": 0.01,
        "model.warmup_steps": 0,
        "model.schedule": "constant",
        "data.seq_len": 160,
        "data.max_documents": 30,
        "data.pairs_per_document": 5,
        "data.val_fraction": 0.2,
        "data.cache_dir": folder / "cache",
        "trainer.devices": devices,
        "trainer.strategy.context_parallel_size": devices,
        "trainer.max_steps": 4,
        "trainer.accumulate_grad_batches": 2,
        "trainer.val_check_interval": 4,
        "trainer.limit_val_batches": 2,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
        "trainer.logger.save_dir": folder / name,
        "trainer.default_root_dir": folder / name,
        **more,
    }
    args = ["fit", "--config", str(CONFIGS / "laptop_dpo.yaml")]
    return args + [f"--{key}={value}" for key, value in options.items()]


def curve(folder):
    """Return what each step logged, without speed and memory."""
    (file,) = Path(folder).rglob("metrics.csv")
    rows = list(csv.DictReader(file.open()))
    names = [n for n in rows[0] if any(x in n for x in ("loss", "rewards", "logps", "kl"))]
    rows = [{n: float(row[n]) for n in names if row[n]} for row in rows]
    return [row for row in rows if row]


def assert_same(found, exact):
    assert len(found) == len(exact)
    for one, other in zip(found, exact, strict=True):
        assert one == pytest.approx(other, abs=2e-4)


@pytest.fixture
def train(ranks, tmp_path):
    """Return a function that trains and returns what was logged."""

    def run(name, size, *args, **more):
        folder = tmp_path / name
        folder.mkdir()
        args = [*arguments(tmp_path, name, size, **more), *args]
        for status, _ in ranks(size).run(fit, args, folder):
            assert status == 0
        return curve(folder)

    return run


def steps(rows):
    return [row for row in rows if "train_loss" in row]


def resume_from(folder):
    return f"--ckpt_path={folder / 'runs' / 'laptop_dpo' / 'checkpoints' / 'last.ckpt'}"


def test_two_ranks_train_as_one_and_a_resumed_run_loads_its_reference(train, tmp_path):
    write_config("llama", tmp_path / "model", weights=True)
    one = train("one", 1)
    assert one[0]["train_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert one[1]["train_loss"] != pytest.approx(math.log(2), abs=1e-3)
    assert_same(train("two", 2), one)
    half = train("half", 2, **{"trainer.max_steps": 2})
    resumed = train("resumed", 1, resume_from(tmp_path / "half"))
    assert_same(steps(half) + steps(resumed), steps(one))


def test_a_resumed_run_restores_a_reference_that_cannot_be_loaded(train, tmp_path):
    new = {"model.model": "null"}
    whole, half = train("whole", 2, **new), train("half", 2, **new, **{"trainer.max_steps": 2})
    resumed = train("resumed", 2, resume_from(tmp_path / "half"), **new)
    assert_same(steps(half) + steps(resumed), steps(whole))
