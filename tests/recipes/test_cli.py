"""The command line: help that can be read, one line for a mistake, and every way to start it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentError
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

# No option of Lightning's says what launches.
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher,  # Lightning's launchers are all private
)

from hf_patches.command import main as hf_main
from lightning_cp import ContextParallelStrategy
from lightning_cp.comm.transport import gather
from recipes import cli
from recipes.command import run_recipes
from tests.lightning.jobs import elastic_environment
from tests.lightning.scripts.start import Job, free_port

main = partial(run_recipes, prog="python -m recipes")
ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "recipes" / "configs" / "laptop.yaml"
LAUNCH = ROOT / "recipes" / "launch"
FIT_ON_TWO = ["fit", "--trainer.accelerator=cpu", "--trainer.devices=2", "--data.cache_dir=cache"]


@pytest.fixture(autouse=True)
def _no_seed_left(monkeypatch):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("form", ["flag", "flag with =", "file"])
def test_a_word_for_a_group_stays_beside_flags_for_its_fields(form, tmp_path, capsys):
    init = "{parameters: none, verify: false}" if form == "file" else "{}"
    file = tmp_path / "words.yaml"
    path = "lightning_cp.ContextParallelStrategy"
    file.write_text(f"trainer: {{strategy: {{class_path: {path}, init_args: {init}}}}}")
    words = ["--trainer.strategy.parameters none", "--trainer.strategy.verify false"]
    words = [word.replace(" ", "=") if form == "flag with =" else word for word in words]
    args = [] if form == "file" else " ".join(words).split()
    args += ["--trainer.strategy.verify.max_len", "64"]
    args += ["--trainer.strategy.parameters.reduce_every_microbatch", "false"]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(file), *args, "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]
    assert (printed["verify"]["steps"], printed["verify"]["max_len"]) == (False, 64)
    assert printed["parameters"]["sharding"] == "none"
    assert printed["parameters"]["reduce_every_microbatch"] is False


def test_in_a_command_of_ones_own_a_word_for_a_group_is_refused_not_dropped():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ContextParallelStrategy, "strategy")
    given = ["--strategy.parameters.offload", "true", "--strategy.verify.max_len", "64"]
    assert parser.parse_args(given).strategy.verify.max_len == 64
    with pytest.raises(ArgumentError, match="none"):
        parser.parse_args(["--strategy.parameters", "none", *given])


def test_without_arguments_it_says_what_it_can_do(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "python -m recipes fit --config recipes/configs/laptop.yaml" in said
    assert len(said.splitlines()) < 20


def test_help_begins_with_the_model(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m recipes fit [--config FILE] [options]\n")
    places = [said.index(name) for name in ("--model.lr", "--data", "--monitor", "--trainer.dev")]
    assert places == sorted(places)
    assert "the highest learning rate" in said


def print_config(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *args, "--print_config"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_groups_are_set_by_configs_and_on_the_command_line(capsys, tmp_path):
    groups = {"memory": {"offload": "all"}, "parameters": {"sharding": "none"}, "verify": False}
    strategy = {"class_path": "lightning_cp.ContextParallelStrategy", "init_args": groups}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    former = {"offload": "all", "parameter_sharding": "none", "verify_steps": False}
    (tmp_path / "former.yaml").write_text(
        yaml.safe_dump({"trainer": {"strategy": {**strategy, "init_args": former}}})
    )
    options = ["memory.offload=all", "parameters.sharding=none", "verify=false"]
    for given in (
        ["--config", str(tmp_path / "given.yaml")],
        ["--config", str(tmp_path / "former.yaml")],
        [f"--trainer.strategy.{option}" for option in options],
    ):
        said = yaml.safe_load(print_config(capsys, *given))["trainer"]["strategy"]["init_args"]
        assert said["memory"]["offload"] == "all"
        assert said["memory"]["keep_attention"] == "auto"
        assert said["parameters"]["sharding"] == "none"
        assert said["verify"]["steps"] is False


def test_what_is_printed_can_be_read_again(capsys, tmp_path):
    said = print_config(capsys, "--config", str(LAPTOP), "--model.lr", "0.5")
    config = yaml.safe_load(said)
    assert config["model"]["lr"] == 0.5
    assert config["trainer"]["strategy"]["init_args"]["context_parallel_size"] == 2
    file = tmp_path / "again.yaml"
    file.write_text(said)
    assert print_config(capsys, "--config", str(file)) == said


def test_configs_of_the_package_are_found_outside_of_a_checkout(capsys, tmp_path, monkeypatch):
    inside = print_config(capsys, "--config", str(LAPTOP))
    monkeypatch.chdir(tmp_path)
    assert print_config(capsys, "--config", "laptop.yaml") == inside
    assert print_config(capsys, "--config=recipes/configs/laptop.yaml") == inside
    (tmp_path / "laptop.yaml").write_text("model: {lr: 0.25}")
    own = yaml.safe_load(print_config(capsys, "--config", "laptop.yaml"))
    assert own["model"]["lr"] == 0.25


def test_defaults_are_a_small_model_and_our_strategy(capsys):
    config = yaml.safe_load(print_config(capsys))
    assert config["model"]["model"] is None
    assert config["data"]["class_path"] == "recipes.data.TextData"
    # Nothing of one data module is left when another is named.
    assert config["data"]["init_args"]["long_documents"] == "split"
    chat = yaml.safe_load(print_config(capsys, "--data", "ChatData", "--data.source", "x.jsonl"))
    assert chat["data"]["init_args"]["long_documents"] == "refuse"
    assert config["trainer"]["strategy"]["class_path"] == "lightning_cp.ContextParallelStrategy"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(["fitt"], "invalid choice: 'fitt'", marks=pytest.mark.slow),
        (["fit", "--config", "none.yaml"], "none.yaml: there is no such file .* laptop.yaml"),
        (["fit", "--config", "MODEL"], "does not accept option 'model.lrr'"),
        pytest.param(["fit", "--config", "TOP"], "trayner.max_steps", marks=pytest.mark.slow),
        (["fit", "--config", "DATA"], "seq_le"),
        pytest.param(["fit", "--config", "LORA"], "rnk", marks=pytest.mark.slow),
        (["fit", "--config", "BROKEN"], "BROKEN.yaml is not valid YAML: .*line 1, column 8"),
        pytest.param(["fit", "--model.lrr", "3"], "model.lrr", marks=pytest.mark.slow),
        (["fit", "--model.lr", "fast"], "model.lr.*float.*fast"),
        pytest.param(
            ["fit", "--model.schedule", "cos"],
            "model.schedule.*Literal.*cos",
            marks=pytest.mark.slow,
        ),
        pytest.param(["fit", "--data", "TextDat"], "data.*TextDat", marks=pytest.mark.slow),
        (["fit", "--data.source", "./no.jsonl"], "source='./no.jsonl': there is no such file"),
        pytest.param(
            ["fit", "--data", "ChatData"],
            "ChatData.: the following arguments are required: source",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["fit", "--data.seq_len", "x"],
            "Parser key .seq_len.: Expected a .*int.*Got value: x",
            marks=pytest.mark.slow,
        ),
        (["fit", "--data.seq_len", "-4"], "data.*seq_len=-4: give a number of at least 2"),
        pytest.param(
            ["fit", "--model.model", "no/body"],
            "model='no/body' could not be loaded",
            marks=pytest.mark.slow,
        ),
        (["fit", "--model.model", "./no"], "model='./no' is not a folder"),
        (["fit", "--model.config.hidden_sizes", "3"], "Did you mean `hidden_size`"),
        (
            ["fit", "--trainer.strategy.layout", "zig"],
            "layout.: .*Literal.*Got value: zig",
        ),
        (
            ["fit", "--trainer.strategy.kernel", "flex"],
            r"strategy: kernel=... is now attention=Attention\(kernel=...\): --trainer",
        ),
        (
            ["fit", "--trainer.strategy.balance", "1"],
            r": balance=Mask.*strategy.attention.balance_w",
        ),
        (["fit", "--trainer.strategy.memories.offload", "all"], "unrecognized .*: --memories"),
        (["fit", "--trainer.strategy.memory", "null"], "strategy.memory=null: give fields, --tr"),
        (
            ["fit", "--trainer.strategy.memory.offload", "-1"],
            r"error: trainer.strategy: memory=Memory\(offload=-1.0\): give the GiB",
        ),
        (["fit", "--trainer.strategy.checkpoint_staging_dir", "/x"], "is gone. checkpoints=Ch"),
        pytest.param(
            ["fit", "--config", "STAGED"],
            "checkpoint_staging_dir is gone. checkpoints=Checkpoints",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["fit", "--data.streaming", "true"],
            "streaming is gone. Samples are packed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["fit", "--model.expert_parallel_size", "8"],
            "expert_parallel_size is gone. Experts are",
            marks=pytest.mark.slow,
        ),
        (["fit", "--config", "WARM"], "warmup_fraction is gone. Write it as warmup_steps: below 1"),
        (["fit", "--trainer.precision", "64-true"], "precision=.64-true.*Choose a different"),
        pytest.param(
            ["fit", "--trainer.strategy", "no.Klass"],
            "trainer: You selected an invalid strategy",
            marks=pytest.mark.slow,
        ),
        (["fit", "--trainer.strategy.context_parallel_size", "3"], "=3 does not divide the 1 proc"),
        (["validate", "--ckpt_path", "no.ckpt"], "ckpt_path='no.ckpt': there is no such checkpoi"),
    ],
)
def test_a_mistake_is_one_line(args, message, tmp_path, ranks):
    files = {
        "MODEL": "model: {lrr: 3}",
        "WARM": "model: {warmup_fraction: 0.1}",
        "TOP": "trayner: {max_steps: 3}",
        "DATA": "data: {class_path: TextData, init_args: {seq_le: 3}}",
        "LORA": "model: {lora: {rnk: 3}}",
        "BROKEN": "model: [1",
        "STAGED": """trainer:
  strategy:
    class_path: lightning_cp.ContextParallelStrategy
    init_args: {checkpoint_staging_dir: /local}""",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    given = [str(tmp_path / f"{arg}.yaml") if arg in files else arg for arg in args]
    small = ["--data.max_documents=2", "--data.cache_dir=cache", "--trainer.accelerator=cpu"]
    given += small if len(args) > 1 and args[1:2] != ["--config"] else []
    given += ["--trainer.devices=1"] if len(args) > 1 else []
    ((status, said),) = ranks(1).run(run_main, given, tmp_path)
    assert status == 2
    (line,) = [line for line in said.splitlines() if line.startswith("error")]
    assert "Traceback" not in said
    assert re.search(message, line), line


def run_main(args, folder):
    """Run a command as torchrun's only process; return the status, and what went to stderr."""
    with (
        patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        elastic_environment(),
        contextlib.chdir(folder),
        (folder / "stderr").open("w+") as file,
        contextlib.redirect_stderr(file),
    ):
        status = main(args)
        file.seek(0)
        return status, file.read()


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        return 1 / 0

    monkeypatch.setattr("recipes.cli.RecipesCLI", fail)
    with pytest.raises(ZeroDivisionError):
        main(["fit"])


def test_what_torch_raises_in_our_code_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):  # as a collective that our code calls, when a link breaks
        gather(torch.ones(1), SimpleNamespace(size=-2))

    monkeypatch.setattr("recipes.cli.RecipesCLI", fail)
    with pytest.raises(RuntimeError, match="negative dimension"):
        main(["fit"])


def test_a_file_that_code_of_a_user_misses_keeps_its_traceback(monkeypatch):
    def read(*_, **__):  # this file is not ours
        Path("its.csv").read_text()

    monkeypatch.setattr(cli, "RecipesCLI", read)
    with pytest.raises(FileNotFoundError, match="its.csv"):
        main(["fit"])
    monkeypatch.setattr(cli, "RecipesCLI", Mock(side_effect=FileNotFoundError("of a library")))
    assert main(["fit"]) == 2


def test_debug_keeps_the_traceback():
    with pytest.raises(Exception, match="model.lrr"):
        main(["fit", "--model.lrr", "3", "--debug"])


def test_what_is_not_installed_is_named():
    code = (
        "import runpy, sys; sys.modules['jsonargparse'] = None; sys.argv = ['recipes', 'fit'];"
        "runpy.run_module('recipes', run_name='__main__')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: The recipes need a package that is not installed")
    assert "jsonargparse" in line
    assert "pip install 'lightning-cp[recipes]'" in line


@pytest.fixture
def job(tmp_path):
    with Job(tmp_path) as job:
        yield job


def missing_config(folder):
    return ["--config", "none.yaml"], "--config none.yaml: there is no such file"


def bad_lines(folder):
    file = folder / "bad.jsonl"
    file.write_text('{"text": "words"}\n{"text": words}\n')
    return ["--data.source", str(file)], f"source='{file}' cannot be read as json"


def test_bad_data_is_found_before_other_processes_are_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", pytest.fail)
    args, message = bad_lines(tmp_path)
    assert main([*FIT_ON_TWO, *args]) == 2
    assert message in capsys.readouterr().err


def test_a_user_error_ends_the_processes_that_were_started(tmp_path, monkeypatch):
    launchers, started = [], []

    def launch(self, *_, **__):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]))
        self.procs = [*started]
        launchers.append(self)
        raise MisconfigurationException("only now")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", launch)
    monkeypatch.setattr("recipes.data.TextData.prepare_data", lambda self: None)
    assert main(FIT_ON_TWO) == 2
    assert started[0].wait(10) == -signal.SIGKILL
    # Lightning looks at these every 5 s, and kills this process if one has failed.
    assert launchers[0].procs == []


@pytest.mark.slow  # what torchrun makes of it: tests/comm/test_error_report.py
@pytest.mark.parametrize("case", [missing_config, bad_lines])
def test_torchrun_quotes_a_user_error_once(case, job, tmp_path):
    args, message = case(tmp_path)
    args += [f"--data.cache_dir={tmp_path}", f"--trainer.default_root_dir={tmp_path}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job.start([sys.executable, *launcher, "-m", "recipes", *FIT_ON_TWO, *args])
    outcome = job.wait()
    assert outcome.codes == [1]  # torchrun's own
    above, _, cause = outcome.text.partition("Root Cause")
    assert re.search(r"exitcode  : 2 .*\n.*\n  traceback : error: " + re.escape(message), cause)
    assert message not in above


# ---------------------------------------------------------------- running


def small_config(folder, *, devices=2, **trainer):
    """Write the laptop's config with less of everything; all that is written goes to a folder."""
    config = yaml.safe_load(LAPTOP.read_text())
    config["data"]["init_args"] |= {
        "seq_len": 128,
        "max_documents": 3,
        "cache_dir": str(folder / "cache"),
    }
    config["monitor"]["verify_first_batch"] = False
    config["trainer"]["strategy"]["init_args"]["context_parallel_size"] = devices
    config["trainer"] |= {
        "devices": devices,
        "default_root_dir": str(folder / "run"),
        "max_steps": 4,
        "val_check_interval": 4,
        "limit_val_batches": 1,
        "limit_test_batches": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer,
    }
    (saver,) = config["trainer"]["callbacks"]
    saver["init_args"] |= {"dirpath": str(folder / "run" / "checkpoints"), "every_n_train_steps": 2}
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.slow
@pytest.mark.ranks
def test_every_command_runs(ranks, tmp_path):
    config = str(small_config(tmp_path))
    last = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    commands = {
        "fit": [],
        "validate": ["--ckpt_path", last],
        "test": ["--ckpt_path", last],
        "predict": ["--ckpt_path", last, "--trainer.limit_predict_batches", "1"],
    }
    for command, args in commands.items():
        for status, said in ranks(2).run(run_main, [command, "--config", config, *args], tmp_path):
            assert status == 0, said
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "last.ckpt"
    (found,) = torch.load(tmp_path / "run" / "predictions" / "0.pt", weights_only=True)
    assert found["next_ids"].shape == found["input_ids"].shape == (2, 128)
    # The run's own config runs again, and the checkpoint becomes a model.
    (written,) = (tmp_path / "run" / "lightning_logs" / "version_0").glob("config.yaml")
    for status, said in ranks(2).run(run_main, ["validate", "--config", str(written)], tmp_path):
        assert status == 0, said
    assert hf_main(["export", last, str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def steps_of(folder):
    """The steps whose loss was logged, run by run."""
    found = []
    for file in sorted(folder.rglob("metrics.csv")):
        rows = [line.split(",") for line in file.read_text().splitlines()]
        step, loss = rows[0].index("step"), rows[0].index("train_loss")
        found.append([int(row[step]) for row in rows[1:] if row[loss]])
    return found


@pytest.mark.slow
def test_a_plain_command_starts_its_own_processes(job, tmp_path):
    config = small_config(tmp_path)
    job.start([sys.executable, "-m", "recipes", "fit", "--config", str(config)])
    outcome = job.wait(limit=900)
    assert outcome.codes == [0], outcome.text
    assert steps_of(tmp_path / "run") == [[0, 1, 2, 3]]
    assert "MEMBER: 2/2" in outcome.text


@pytest.mark.slow
def test_one_node_resumes(job, tmp_path):
    config = small_config(tmp_path)
    script = [str(LAUNCH / "one_node.sh"), "2", str(config)]
    job.start(script, PYTHON=sys.executable)
    outcome = job.wait(limit=900)
    assert outcome.codes == [0], outcome.text
    job.start([*script, "--trainer.max_steps=6"], PYTHON=sys.executable)
    outcome = job.wait(limit=900)
    assert outcome.codes == [0, 0], outcome.text
    assert steps_of(tmp_path / "run") == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.slow
def test_two_nodes_find_each_other(job, tmp_path):
    config = small_config(tmp_path)
    endpoint = f"localhost:{free_port()}"
    for _ in range(2):
        job.start(
            [str(LAUNCH / "several_nodes.sh"), "2", "1", endpoint, str(config)],
            PYTHON=sys.executable,
        )
    outcome = job.wait(limit=900)
    assert outcome.codes == [0, 0], outcome.text
    assert steps_of(tmp_path / "run") == [[0, 1, 2, 3]]


@pytest.mark.slow
def test_a_launcher_says_what_is_wrong_before_it_starts_anything(job, tmp_path):
    config = small_config(tmp_path)
    job.start([str(LAUNCH / "one_node.sh"), "2"])
    job.start(
        [str(LAUNCH / "one_node.sh"), "2", str(config), "--model.lrr=1"], PYTHON=sys.executable
    )
    job.start([str(LAUNCH / "several_nodes.sh"), "2"])
    job.start([str(LAUNCH / "slurm.sbatch")])
    outcome = job.wait()
    assert outcome.codes == [2, 2, 2, 2], outcome.text
    lines = [line for line in outcome.text.splitlines() if line]
    assert len(lines) == 4, outcome.text
    assert all(line.startswith("error: ") for line in lines)


SRUN = """\
import os, signal, subprocess, sys

args = sys.argv[1:]
while args[0].startswith("--"):
    args.pop(0)
per_node, tasks = int(os.environ["SLURM_NTASKS_PER_NODE"]), []
for rank in range(int(os.environ["SLURM_NTASKS"])):
    place = {"PROCID": rank, "LOCALID": rank % per_node, "NODEID": rank // per_node}
    env = os.environ | {f"SLURM_{key}": str(value) for key, value in place.items()}
    tasks.append(subprocess.Popen(args, env=env))
with open(__file__ + ".pid", "w") as file:
    file.write(str(os.getpid()))
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.NAME) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


def fake_slurm(folder, name):
    """Make commands that do what SLURM's do, as far as our script goes; return its environment.

    Args:
        folder: for the commands.
        name: of the signal that the ranks get.
    """
    folder.mkdir()
    told = f'#!/usr/bin/env bash\necho "$@" >> {folder}/told\n'
    commands = {
        "srun": f"#!{sys.executable}\n{SRUN}".replace("NAME", name),
        "scancel": f"{told}kill -USR1 $(< {folder}/srun.pid)\n",
        "scontrol": told,
    }
    for command, text in commands.items():
        (folder / command).write_text(text)
        (folder / command).chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_JOB_ID": 4711,
        "SLURM_JOB_NAME": "recipes",
        "SLURM_NNODES": 1,
        "SLURM_NTASKS": 2,
        "SLURM_NTASKS_PER_NODE": 2,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": free_port(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_slurm_takes_the_job_back_and_it_goes_on(name, job, tmp_path):
    config = small_config(tmp_path, max_steps=100_000, val_check_interval=100_000)
    environment = fake_slurm(tmp_path / "slurm", name)
    script = [str(LAUNCH / "slurm.sbatch"), str(config)]
    job.start(script, **environment)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    deadline = time.time() + 600
    while not last.exists():
        assert time.time() < deadline, job.text()
        time.sleep(0.2)
    time.sleep(1)  # in the middle of some step
    os.kill(job.started[0].pid, signal.SIGUSR1)
    outcome = job.wait(limit=600)
    assert outcome.codes == [0], outcome.text
    assert (tmp_path / "slurm" / "told").read_text() == "--signal=TERM 4711\nrequeue 4711\n"
    saved = torch.load(last / "meta.pt", weights_only=True)["global_step"]

    job.start([*script, f"--trainer.max_steps={saved + 2}"], **environment)
    outcome = job.wait(limit=600)
    assert outcome.codes == [0, 0], outcome.text
    first, second = steps_of(tmp_path / "run")
    assert first[-1] == saved - 1
    assert second == [saved, saved + 1]


def test_a_checkpoint_that_lost_its_name_gets_it_back(tmp_path):
    aside, last = tmp_path / ".last.ckpt.replaced", tmp_path / "last.ckpt"
    aside.mkdir()
    (aside / "meta.pt").touch()
    restore = cli.restore_last  # what a run does first
    restore(str(tmp_path))
    assert (last / "meta.pt").is_file()
    aside.mkdir()
    restore(str(tmp_path))  # a newer one has it
    assert aside.is_dir()
    restore(None)


def test_whole_numbers_stay_whole():
    """1 is one batch and 1.0 are all, whoever was the first to write ``Union[float, int]``."""

    def trainer(limit: float | int | None = None, every: str | float | int = 1):
        return limit, every

    cli.parse_int_before_float(trainer)  # what the command does to Lightning's Trainer
    parser = ArgumentParser()
    parser.add_function_arguments(trainer)
    for text, number in (("1", 1), ("1.0", 1.0), ("0.25", 0.25)):
        for name in ("limit", "every"):
            found = parser.parse_args([f"--{name}={text}"])[name]
            assert (type(found), found) == (type(number), number)


def test_missing_gpus_are_told_before_a_hub_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("recipes.module.load_config", pytest.fail)
    assert main(["fit", "--trainer.accelerator=gpu", "--trainer.devices=8"]) == 2
    assert "accelerator=gpu, but this machine has no GPU. Use --tr" in capsys.readouterr().err
