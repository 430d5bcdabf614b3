# SPDX-License-Identifier: Apache-2.0
"""Where processes report their errors: as a line on stderr, or in torchrun's own report.

When a process fails, torchrun prints a report of some forty lines, below all that processes have
printed. It quotes what the failed process has written to a file, as torch's `record` does. Does not
import torch: some errors are found before.
"""

import argparse
import atexit
import json
import os
import sys
import threading
import time
import traceback
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, NoReturn

from typing_extensions import override

STATUS: Final = 2
"""The exit status after a user error. torchrun itself then exits with 1."""
_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_PATIENCE: Final = 3.0
"""Seconds that a process waits for the first one of its node, which usually reports the same error,
and for its own exit functions."""


def report_error(error: Exception | str) -> int:
    """Report a user error in one line, once per node; return the exit status."""
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID") or 0)
    if local_rank > 0:
        time.sleep(_PATIENCE)  # usually the first process ends, and its launcher ends this one
    where = f" (process {local_rank})" if local_rank > 0 else ""
    line = f"error{where}: {' '.join(str(error).split())}"
    if _is_restarted() or not tell_torchrun(line):
        sys.stderr.write(f"{line}\n")
    return STATUS


def end_process(status: int) -> NoReturn:
    """End this process with an exit status; after an error at once.

    To take apart thousands of modules costs the interpreter 2 s of CPU time, and more where memory
    is scarce; and it joins gloo's threads, which may wait for ranks that are gone. Exit functions
    still run, as long as they need no longer than a few seconds.
    """
    if status == 0:
        raise SystemExit(status)
    limit = threading.Timer(_PATIENCE, os._exit, [status])
    limit.daemon = True
    limit.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Parser(argparse.ArgumentParser):
    """A parser that reports errors as commands do."""

    @override
    def error(self, message: str) -> NoReturn:
        """Report an error and end this process."""
        report = f"{message}. {self.prog} --help describes the options."
        raise SystemExit(report_error(report))


class Removed(argparse.Action):
    """An option that is gone: an error that says what to use instead, which is its ``const``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "nargs": "?"})  # with a value or without

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        """Report the error and end this process."""
        parser.error(f"{self.option_strings[0]} is gone: {self.const}")


def tell_torchrun(text: str) -> bool:
    """Let torchrun quote a text in its report, if this process fails; return whether it will.

    The format is that of torch's `ErrorHandler`, of which torchrun shows the message.
    """
    file = os.environ.get(_FILE)
    if not file:
        return False
    content = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        with open(file, "w", encoding="utf-8") as out:
            json.dump({"message": content}, out)
    except OSError:
        return False
    return True


@lru_cache(maxsize=1)
def quote_uncaught_errors() -> None:
    """Let torchrun quote the traceback of an error that ends this process."""
    if _FILE not in os.environ:
        return
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell_torchrun("".join(traceback.format_exception(error)).rstrip())
        former(kind, error, trace)

    sys.excepthook = hook


def _is_restarted() -> bool:
    """Return whether torchrun starts processes again when this one fails: without a report."""
    count, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}") or 0)
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return count < most
