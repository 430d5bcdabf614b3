"""Ray Train starts the processes: they train, resume after a failure, and equal one process."""

import csv
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback

from tests.lightning.scripts.start import ROOT, Job
from tests.recipes.test_cli import small_config

# Not imported here: ray sets environment variables.
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'ray[train]'"
)
SCRIPT = ROOT / "recipes" / "launch" / "ray_train.py"


class FailOnce(Callback):
    """Raises on rank 1 after three steps, but not a second time.

    Args:
        marker: the file that says that it has.
    """

    def __init__(self, marker: str) -> None:
        self._marker = Path(marker)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 3 and not self._marker.exists():
            self._marker.touch()
            raise RuntimeError("a worker fails")


def write_config(folder, *, devices, batch_size):
    """A small run that saves every two steps and logs to CSV, whatever is installed."""
    folder.mkdir()
    file = small_config(folder, devices=devices, max_steps=6)
    config = yaml.safe_load(file.read_text())
    config["data"]["init_args"]["batch_size"] = batch_size
    config["trainer"]["strategy"]["init_args"]["context_parallel_size"] = min(devices, 2)
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder / "run"), "flush_logs_every_n_steps": 1},
    }
    if devices > 1:
        config["trainer"]["callbacks"].append(
            {
                "class_path": "tests.lightning.processes.test_ray.FailOnce",
                "init_args": {"marker": str(folder / "failed")},
            }
        )
    file.write_text(yaml.safe_dump(config))
    return file


def losses_of(folder):
    """The loss of each step; of a step that was repeated, the last."""
    found = {}
    for file in sorted(folder.rglob("metrics.csv")):
        for row in csv.DictReader(file.open()):
            if row["train_loss"]:
                found[int(row["step"])] = float(row["train_loss"])
    return found


@pytest.fixture
def job(tmp_path):
    with Job(tmp_path) as job:
        yield job


@needs_ray
@pytest.mark.slow
def test_workers_of_ray_train_as_one_process_and_resume(job, tmp_path):
    alone = write_config(tmp_path / "alone", devices=1, batch_size=2)
    job.start([sys.executable, "-m", "recipes", "fit", "--config", str(alone)])
    config = write_config(tmp_path / "ray", devices=2, batch_size=2)
    ray = [sys.executable, str(SCRIPT), "2", str(config)]
    job.start([*ray, "--max-failures", "1"], RAY_USAGE_STATS_ENABLED=0)
    outcome = job.wait(limit=900)
    assert outcome.codes == [0, 0], outcome.text
    assert "a worker fails" in outcome.text
    assert (tmp_path / "ray" / "failed").exists()
    exact, found = losses_of(tmp_path / "alone"), losses_of(tmp_path / "ray")
    assert sorted(found) == list(range(6))
    assert found == pytest.approx(exact, rel=1e-5)


@needs_ray
@pytest.mark.slow
def test_a_mistake_is_one_line_before_ray_starts(job, tmp_path):
    config = write_config(tmp_path / "ray", devices=2, batch_size=2)
    job.start([sys.executable, str(SCRIPT), "2", str(config), "--model.lrr=1"])
    outcome = job.wait()
    assert outcome.codes == [2], outcome.text
    (line,) = [line for line in outcome.text.splitlines() if line.startswith("error: ")]
    assert "model.lrr" in line
    assert "Started a local Ray instance" not in outcome.text


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(["2", "laptop.yaml"]) == 2
    assert "pip install 'ray[train]'" in capsys.readouterr().err
