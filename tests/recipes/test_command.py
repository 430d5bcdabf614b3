"""`lightning-cp`: subcommands reach their packages, and nothing else is imported for them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_cp.renamed import REMOVED, RENAMED, UNSET, update_options
from recipes import command
from recipes.command import COMMANDS, main
from recipes.files import find_files

TARGETS = {
    "fit": "recipes.cli.main",
    "validate": "recipes.cli.main",
    "test": "recipes.cli.main",
    "predict": "recipes.cli.main",
    "plan": "recipes.plan_command.main",
    "verify": "hf_patches.command.main",
    "export": "hf_patches.command.main",
    "consolidate": "lightning_cp.checkpoint.command.main",
}


def test_every_command_has_a_target():
    assert TARGETS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_a_command_is_run_by_its_package(name):
    with patch(TARGETS[name], return_value=7) as target:
        assert main([name, "--option", "value"]) == 7
    target.assert_called_once_with([name, "--option", "value"], prog="lightning-cp")


@pytest.mark.parametrize("name", ["fit", "export", "consolidate"])
def test_usage_names_the_command(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: lightning-cp {name} ")


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"]])
def test_help_lists_all_commands(args, capsys):
    assert main(args) == 0
    out = capsys.readouterr().out
    for name, (summary, _) in COMMANDS.items():
        assert f"  {name:<12} {summary}\n" in out
    assert max(map(len, out.splitlines())) < 90


def test_an_unknown_command_is_status_2(capsys):
    assert main(["train"]) == 2
    error = capsys.readouterr().err
    assert "there is no command 'train'" in error
    assert ", ".join(COMMANDS) in error


def test_a_command_that_is_gone_names_the_way(capsys):
    assert main(["reference", "--model", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: lightning-cp reference is gone. A ref_model of TRL's DPOTrainer", line)


@pytest.mark.parametrize(
    "text",
    [
        "data: {class_path: recipes.preference.PairData, init_args: {share_prompts: true}}",
        "data: {class_path: PairData}\nmodel: {loss: sigmoid, reference: model}",
        "data: recipes.preference.data.PairData",
    ],
)
def test_a_config_of_the_preference_recipe_names_the_way(text, tmp_path, capsys):
    (tmp_path / "dpo.yaml").write_text(text)
    with patch("recipes.cli.main", side_effect=AssertionError("too late")):
        assert main(["fit", "--config", str(tmp_path / "dpo.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    message = r"error: data: [\w.]*PairData is gone. Use DPOTrainer, KTOTrainer, RewardTrainer or "
    assert re.match(message, line)
    assert "hf_patches.context_parallel(trainer, size=...)" in line
    assert main(["fit", "--data=PairData"]) == 2
    assert "PairData is gone" in capsys.readouterr().err


def test_what_serves_instead_exists():
    root = Path(command.__file__).parents[1]
    for instead in REMOVED.values():
        for file in re.findall(r"[\w-]+/[\w-]+\.(?:md|py)", instead):
            assert (root / file).is_file(), file
    assert not set(REMOVED) & set(RENAMED)
    assert set(UNSET) <= set(REMOVED)


def test_options_that_are_gone_are_passed_over_where_they_did_nothing():
    ours = {"class_path": "recipes.data.TextData", "init_args": {"streaming": False, "seed": 1}}
    assert update_options(ours) == {**ours, "init_args": {"seed": 1}}
    was_set = {"class_path": "TextData", "init_args": {"streaming": True}}
    assert update_options(was_set) == was_set  # the parser refuses it
    theirs = {"class_path": "their.Data", "init_args": {"streaming": False, "inner": ours}}
    found = update_options({"data": theirs, "model": {"decay_embeddings": True, "lr": 1.0}})
    assert found["model"] == {"lr": 1.0}
    assert found["data"]["init_args"] == {"streaming": False, "inner": update_options(ours)}


def test_a_missing_package_names_the_extra(capsys):
    with patch.dict(sys.modules, {"recipes.cli": None}):
        assert main(["fit"]) == 2
    assert "pip install 'lightning-cp[recipes]'" in capsys.readouterr().err


def test_a_missing_file_is_found_before_anything_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {class_path: ChatData, init_args: {source: ./no}}")
    missing = [
        ["--config", "none.yaml"],
        ["--config=run.yaml"],
        ["--data.source", "no.jsonl"],
        ["--model.model", "./no"],
    ]
    code = (
        "import json, sys; from recipes.command import main\n"
        "found = [main(['fit', *args]) for args in json.loads(sys.argv[1])]\n"
        "print(found, [m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(missing)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(command.__file__).parents[1])},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "[2, 2, 2, 2] []\n"
    errors = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in errors] == ["error"] * 4
    for line, name in zip(errors, ("none.yaml", "./no", "no.jsonl", "./no"), strict=True):
        assert name in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--config none.yaml", r"--config none.yaml: .*Packaged configs are .*laptop.yaml"),
        ("--config=configs/none.yaml", r"--config configs/none.yaml: there is no such file"),
        ("--config named.yaml", "source='./no.jsonl': there is no such file or folder"),
        ("--data.val_source no/data.csv", "source='no/data.csv': there is no such file or folder"),
        ("--data.init_args.source=/no", "source='/no': there is no such file or folder"),
        ("--data ChatData --data.tokenizer ./no", "tokenizer='./no': there is no such folder"),
        ("--data MediaChatData --data.processor ~/no", "processor='~/no': there is no such folder"),
        ("--model.model ./no", "model='./no' is not a folder"),
        ("--ckpt_path no.ckpt", r"ckpt_path='no.ckpt': there is no such checkpoint \(in "),
    ],
)
def test_files_that_are_missing_are_named(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.yaml").write_text(
        "data:\n  init_args: {source: ./no.jsonl}\n  class_path: recipes.data.TextData\n"
    )
    with pytest.raises(FileNotFoundError, match=message):
        find_files(["fit", *args.split()])


@pytest.mark.parametrize(
    "args",
    [
        "--data.source ./no.jsonl --print_config",
        "--config named.yaml --data.source there.txt",
        "--config named.yaml --data.source null",
        "--config named.yaml --data PasskeyData",
        "--config named.yaml --data other.Data --data.source ./no.jsonl",
        "--data.source some/name --model.model other/name --data.tokenizer third/name",
        "--ckpt_path last",
        "--ckpt_path s3://bucket/no.ckpt",
        "--ckpt_path replaced.ckpt",
    ],
)
def test_what_may_be_there_is_not_refused(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = "data: {class_path: TextData, init_args: {source: ./no.jsonl}}"
    files = {
        "named.yaml": config,
        "there.txt": "",
        ".replaced.ckpt.replaced": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert find_files(["fit", *args.split()]) == ["fit", *args.split()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"trainer: {max_steps: \xff}",
            "run.yaml is not text in UTF-8: .*byte 0xff in position 21",
        ),
        (b"", "run.yaml is empty. A config names options"),
        (b"- 1", "run.yaml holds a list. A config names options"),
        (b"trainer: [1", "run.yaml is not valid YAML: .*line 1, column 12"),
        (b"trainer:\n\tmax_steps: 1", "run.yaml is not valid YAML: .*cannot start any token"),
        (None, "run.yaml: Is a directory. Give a YAML file"),
    ],
)
def test_a_config_without_options_is_named(content, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.mkdir() if content is None else file.write_bytes(content)
    with patch("recipes.cli.main", side_effect=AssertionError("too late")):
        assert main(["fit", "--config", "run.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: --config {message}", line), line


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from recipes.command import main; main(['--help'])\n"
        "print([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert command.PROG in done.stdout
