"""The demo: two runs that agree, a page about them, and a status that tells when they do not."""

import builtins
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import demo, report
from recipes.report import Generated, Run, largest_difference, read_run, write_report

ROOT = Path(__file__).parents[2]
VERIFIED = "verified: loss=5.5, full_loss=5.5, tokens=8"
WROTE = Generated(model="LlamaForCausalLM", prompt="def ", text="f(x):", num_tokens=5)


def build_run(losses, *, log=(VERIFIED,), cp_size=2):
    metrics = {
        "train_loss": dict(enumerate(losses)),
        "val_loss_at/0-8": {2: 5.0},
        "val_loss_at/8-": {2: 4.0},
        "tokens_per_second": {0: 1.0, 1: 30.0, 2: 20.0},
        "peak_memory_gb": {0: 0.5, 1: 0.75},
    }
    work = {"zigzag": [10] * cp_size, "contiguous": list(range(5, 5 + 10 * cp_size, 10))}
    return Run(metrics, [16] * cp_size, work, list(log))


def write(out, sharded, single):
    return write_report(
        out,
        sharded=sharded,
        single=single,
        generated=WROTE,
        commands={"python -m recipes fit": 3.0},
        seconds=5.0,
        tolerance=1e-4,
        length=16,
    )


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
    assert "**the same**" in page
    assert "verified: loss" in page
    shared, alone = read_run(out / "cp2"), read_run(out / "cp1")
    assert sorted(shared.losses) == sorted(alone.losses) == [0, 1, 2]
    assert list(shared.by_position) == ["0-32", "32-64", "64-128", "128-"]
    for place, loss in shared.by_position.items():
        assert loss == pytest.approx(alone.by_position[place], abs=1e-4)
    assert shared.tokens == [3 * 2 * 128] * 2  # steps, rows, tokens of a row
    assert alone.tokens == [3 * 2 * 256]
    assert sum(shared.work["zigzag"]) == sum(alone.work["zigzag"])
    assert sum(shared.work["contiguous"]) == sum(shared.work["zigzag"])
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
    monkeypatch.setattr(demo.Commands, "run", lambda *_, **__: None)
    monkeypatch.setattr(demo, "generate", lambda folder: WROTE)
    monkeypatch.setattr(demo, "read_run", lambda folder: runs[folder.name])
    monkeypatch.setattr(demo, "write_report", lambda *_, **__: out / "report.md")
    return demo.run_demo(out, steps=3, length=16)


@pytest.mark.parametrize(
    ("losses", "log", "message"),
    [
        ([5.0, 4.0, 3.01], (VERIFIED,), "differ by more than 0.0001"),
        ([5.0, math.nan, 3.0], (VERIFIED,), "differ by more than 0.0001"),
        ([5.0, 4.0], (VERIFIED,), "differ by more than 0.0001"),
        ([5.0, 4.0, 3.0], (), "does not report that the first batch was verified"),
    ],
    ids=["a step", "NaN", "a step that is missing", "not verified"],
)
def test_what_differs_fails(losses, log, message, capsys, monkeypatch, tmp_path):
    sharded, single = build_run(losses, log=log), build_run([5.0, 4.0, 3.0], cp_size=1)
    assert run_demo(monkeypatch, tmp_path, sharded, single) == 1
    assert message in capsys.readouterr().err


def test_curves_that_agree_pass(capsys, monkeypatch, tmp_path):
    single = build_run([5.0, 4.0, 3.0], cp_size=1)
    sharded = build_run([5.0, 4.0, 3.00002])
    assert run_demo(monkeypatch, tmp_path, sharded, single) == 0
    assert "2.0e-05, at step 3 of 3" in capsys.readouterr().out


def test_the_largest_difference_is_not_hidden_by_nan():
    found, step = largest_difference(build_run([5.0, math.nan, 9.0]), build_run([5.0, 4.0, 3.0]))
    assert math.isnan(found)
    assert step == 2


def test_a_command_that_fails_ends_the_demo(capfd):
    with pytest.raises(SystemExit) as stopped:
        demo.Commands().run("fail", "-c", "raise SystemExit(3)")
    assert stopped.value.code == 1
    assert "ended with status 3" in capfd.readouterr().err


def test_the_page_says_when_curves_differ(tmp_path):
    page = write(tmp_path, build_run([5.0, 4.0, 3.5]), build_run([5.0, 4.0, 3.0], cp_size=1))
    text = re.sub(" +", " ", page.read_text())
    assert "**NOT the same**: the largest difference is 5.0e-01, at step 3" in text
    assert "| 3 | 3.500000 | 3.000000 | 5.0e-01 |" in text
    assert "| 0-8 | 5.000000 | 5.000000 | 0.0e+00 |" in text
    assert "| 1 | 16 (50.0%) | 10 (50.0%) | 15 (75.0%) |" in text
    assert "| 2 ranks | 30 (20 to 30) | 0.75 |" in text
    assert "def f(x):" in text


def test_a_page_with_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    page = write(tmp_path, build_run([5.0, 4.0, 3.0]), build_run([5.0, 4.0, 3.0], cp_size=1))
    assert f"]({report.PICTURE})" in page.read_text()
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_page_says_so(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path / report.PICTURE).write_bytes(b"of a former run")
    page = write(tmp_path, build_run([5.0, 4.0, 3.0]), build_run([5.0, 4.0, 3.0], cp_size=1))
    assert "No picture: install matplotlib" in page.read_text()
    assert not (tmp_path / report.PICTURE).exists()


def test_the_last_value_of_each_step_is_read(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss_at/0-8\n0,0,5.5,\n0,1,5.25,\n0,1,,5.0\n"
    )
    (tmp_path / "balance.json").write_text(json.dumps({"tokens": [8], "work": {"zigzag": [36]}}))
    (tmp_path / "library.log").write_text("context parallelism: 1 data x 1\n")
    run = read_run(tmp_path)
    assert run.losses == {0: 5.5, 1: 5.25}
    assert run.by_position == {"0-8": 5.0}
    assert run.verified == ""


@pytest.mark.parametrize("given", [["--steps", "1"], ["--length", "63"], ["--length", "x"]])
def test_sizes_that_are_too_small_are_refused(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(given)
    assert stopped.value.code == 2
    assert "give an integer of at least" in capsys.readouterr().err
