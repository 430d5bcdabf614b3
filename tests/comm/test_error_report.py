"""A user error is one line, under torchrun in its report; and the process ends with it."""

import os
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_cp.comm import error_report
from lightning_cp.comm.error_report import report_error


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("TORCHELASTIC_", "LOCAL_RANK", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The file that torchrun reads when a process has failed."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def report_of_torchrun(file, exit_code):
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file=str(file))
    return str(ChildFailedError("train.py", {0: failure}))


def run(code, **environment):
    """Run Python code in a process of its own; nothing in it may import torch."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_error_is_one_line_on_stderr(capsys):
    assert report_error(ValueError("no such\n  file")) == 2
    assert capsys.readouterr().err == "error: no such file\n"


def test_under_torchrun_it_is_in_its_report_alone(file, capsys):
    assert report_error("no such file") == 2
    assert capsys.readouterr().err == ""
    report = report_of_torchrun(file, 2)
    assert report.count("traceback : error: no such file") == 1
    assert "exitcode  : 2" in report


def test_before_a_restart_there_is_no_report(file, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for count, line in (("0", "error: no such file\n"), ("1", "")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        report_error("no such file")
        assert capsys.readouterr().err == line
    assert "error: no such file" in report_of_torchrun(file, 2)


def test_a_file_that_cannot_be_written_loses_nothing(file, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file.parent / "no" / "error.json"))
    report_error("no such file")
    assert capsys.readouterr().err == "error: no such file\n"


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_PROCID"])
def test_other_processes_leave_the_word_to_the_first_one(variable, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(error_report.time, "sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv(variable, rank)
        report_error("no such file")
    assert capsys.readouterr().err == "error: no such file\nerror (process 1): no such file\n"
    assert waited == [3]


def test_options_that_do_not_exist_are_reported_alike(file, capsys):
    parser = error_report.Parser(prog="tool")
    parser.add_subparsers().add_parser("command").add_argument("--size", type=int)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["command", "--size", "big"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ""
    report = report_of_torchrun(file, 2)
    assert "error: argument --size: invalid int value: 'big'. tool command --help" in report


def test_torchrun_quotes_what_ends_a_process(file):
    code = (
        "from lightning_cp.comm.error_report import quote_uncaught_errors as quote\n"
        "quote(), quote()\n"
        "try:\n    raise ValueError('caught')\n"
        "except ValueError:\n    pass\n"
        "raise ValueError('not caught')"
    )
    ended = run(code)
    assert ended.returncode == 1
    assert ended.stderr.count("ValueError: not caught") == 1
    report = report_of_torchrun(file, 1)
    assert report.count("ValueError: not caught") == 1
    assert "Traceback (most recent call last)" in report
    assert "ValueError: caught" not in report


def test_a_process_ends_with_its_error_whatever_its_threads_do():
    code = (
        "import atexit, sys, threading, time\n"
        "from lightning_cp.comm import error_report\n"
        "threading.Thread(target=time.sleep, args=[100]).start()\n"
        "error_report._PATIENCE = 0.5\n"
        "if sys.argv[1:]:\n    atexit.register(time.sleep, 100)\n"
        "atexit.register(print, 'exit function')\n"
        "print('output', end=' ')\n"
        "error_report.end_process(2)"
    )
    begin = time.monotonic()
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (2, "output exit function\n")
    waiting = subprocess.run([sys.executable, "-c", code, "wait"], timeout=90, check=False)
    assert waiting.returncode == 2
    assert time.monotonic() - begin < 90


def test_success_ends_a_process_as_always():
    with pytest.raises(SystemExit) as stopped:
        error_report.end_process(0)
    assert stopped.value.code == 0
