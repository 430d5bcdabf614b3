"""`lightning-cp`: subcommands reach their packages, and nothing else is imported for them."""

import subprocess
import sys
from unittest.mock import patch

import pytest

from recipes import command
from recipes.command import COMMANDS, main

TARGETS = {
    "fit": "recipes.cli.main",
    "validate": "recipes.cli.main",
    "test": "recipes.cli.main",
    "predict": "recipes.cli.main",
    "plan": "recipes.plan.main",
    "reference": "recipes.preference.reference.main",
    "verify": "hf_patches.__main__.main",
    "export": "hf_patches.__main__.main",
    "consolidate": "lightning_cp.__main__.main",
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


def test_a_missing_package_names_the_extra(capsys):
    with patch.dict(sys.modules, {"recipes.cli": None}):
        assert main(["fit"]) == 2
    assert "pip install 'lightning-cp[recipes]'" in capsys.readouterr().err


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
