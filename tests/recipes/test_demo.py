"""The demo: two runs that agree, a page about them, and a status that tells when they do not."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import demo
from recipes.demo import largest_difference, read_metrics, write_report

ROOT = Path(__file__).parents[2]


def build_run(losses):
    return {
        "train_loss": dict(enumerate(losses)),
        "val_loss_at/0-8": {1: 6.0, 2: 5.0},
        "val_loss_at/8-": {1: 6.0, 2: 4.0},
    }


@pytest.mark.slow
@pytest.mark.ranks
def test_the_demo_runs_from_training_to_text(tmp_path):
    sizes = ["--steps", "3", "--length", "256", "--out", str(tmp_path / "demo")]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.demo", *sizes],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stderr.count("verified: loss") == 1
    assert re.search(r"train_loss=\d\.\d+, tokens_per_second=\d+", done.stdout)
    found = re.search(r"Largest difference of the two loss curves: (\S+), at step", done.stdout)
    assert float(found[1]) < 1e-4

    out = tmp_path / "demo"
    page = (out / "report.md").read_text()
    assert "Largest difference of the two loss curves" in page
    shared, alone = (read_metrics(out / name / "log") for name in ("cp2", "cp1"))
    assert sorted(shared["train_loss"]) == sorted(alone["train_loss"]) == [0, 1, 2]
    places = [name for name in shared if name.startswith("val_loss_at/")]
    assert len(places) == 4
    for name in ("train_loss", *places):
        assert shared[name] == pytest.approx(alone[name], abs=1e-4)
    # It is a model as any other.
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_the_two_configs_differ_in_ranks_and_folders_only(tmp_path):
    built = [
        demo.build_config(tmp_path, cp_size=cp_size, steps=60, length=2048) for cp_size in (2, 1)
    ]
    assert built[0]["monitor"].pop("verify_first_batch") is True
    assert built[1]["monitor"].pop("verify_first_batch") is False
    for config, cp_size in zip(built, (2, 1), strict=True):
        assert config["trainer"].pop("devices") == cp_size
        strategy = config["trainer"]["strategy"]["init_args"]
        assert strategy.pop("context_parallel_size") == cp_size
    texts = [yaml.safe_dump(config) for config in built]
    assert texts[0].replace("cp2", "cp1") == texts[1]


def run_demo(monkeypatch, out, sharded, single):
    """Run the demo with runs that are over; return its status."""
    runs = {f"cp{demo.RANKS}": sharded, "cp1": single}
    monkeypatch.setattr(demo, "run", lambda *_, **__: None)
    monkeypatch.setattr(demo, "generate", lambda folder: "f(x):")
    monkeypatch.setattr(demo, "read_metrics", lambda folder: runs[folder.parent.name])
    return demo.run_demo(out, steps=3, length=16)


@pytest.mark.parametrize(
    "losses",
    [[5.0, 4.0, 3.01], [5.0, math.nan, 3.0], [5.0, 4.0]],
    ids=["a step", "NaN", "a step that is missing"],
)
def test_what_differs_fails(losses, capsys, monkeypatch, tmp_path):
    sharded, single = build_run(losses), build_run([5.0, 4.0, 3.0])
    assert run_demo(monkeypatch, tmp_path, sharded, single) == 1
    assert "differ by more than 0.0001" in capsys.readouterr().err


def test_curves_that_agree_pass(capsys, monkeypatch, tmp_path):
    sharded, single = build_run([5.0, 4.0, 3.00002]), build_run([5.0, 4.0, 3.0])
    assert run_demo(monkeypatch, tmp_path, sharded, single) == 0
    assert "2.0e-05, at step 3 of 3" in capsys.readouterr().out


def test_the_largest_difference_is_not_hidden_by_nan():
    curve = {0: 5.0, 1: 4.0, 2: 3.0}
    found, step = largest_difference({0: 5.0, 1: math.nan, 2: 9.0}, curve)
    assert math.isnan(found)
    assert step == 2
    assert math.isnan(largest_difference({0: 5.0}, curve)[0])
    assert math.isnan(largest_difference({}, {})[0])


def test_a_command_that_fails_ends_the_demo(capfd):
    with pytest.raises(SystemExit) as stopped:
        demo.run("fail", "-c", "raise SystemExit(3)")
    assert stopped.value.code == 1
    assert "ended with status 3" in capfd.readouterr().err


def test_the_page_holds_both_runs(tmp_path):
    page = tmp_path / "report.md"
    write_report(page, build_run([5.0, 4.0, 3.5]), build_run([5.0, 4.0, 3.0]), text="f(x):")
    text = re.sub(" +", " ", page.read_text())
    assert "Largest difference of the two loss curves: 5.0e-01, at step 3 of 3." in text
    assert "| 3 | 3.500000 | 3.000000 | 5.0e-01 |" in text
    assert "| 0-8 | 5.000000 | 5.000000 | 0.0e+00 |" in text
    assert f"{demo.PROMPT}f(x):" in text


def test_the_last_value_of_each_step_is_read(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss_at/0-8\n0,0,5.5,\n0,1,5.25,\n0,1,,5.0\n"
    )
    metrics = read_metrics(tmp_path)
    assert metrics["train_loss"] == {0: 5.5, 1: 5.25}
    assert metrics["val_loss_at/0-8"] == {1: 5.0}


@pytest.mark.parametrize("given", [["--steps", "1"], ["--length", "63"], ["--length", "x"]])
def test_sizes_that_are_too_small_are_refused(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(given)
    assert stopped.value.code == 2
    assert "give an integer of at least" in capsys.readouterr().err
