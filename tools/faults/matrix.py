"""Faults of one rank, ways to start the ranks, and what must hold in each cell of the table."""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_cp import checkpoint as checkpoints
from tests.lightning.scripts import fault as script
from tests.lightning.scripts.start import FAULT, Job

LIMIT = 30.0
"""Seconds in which all processes must be gone."""

HEARTBEAT = 10.0
"""The heartbeat_timeout of the row with a stopped process; the default would be 60 s."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Args:
        name: what happens, for the table.
        fault: its name in `scripts/fault.py`.
        rank: where it happens.
        cause: pattern of the words that must be in the output.
        options: more options of the script.
    """

    name: str
    fault: str
    rank: int
    cause: str
    options: tuple[object, ...] = ()


# By the watchdog, by Lightning's launcher (which knows a process id, no rank), by torchrun, or by
# the error that Ray Train raises, which has a part for each rank.
RAY = r"\[Rank {rank} Error Snippet\]:((?!Error Snippet)[\s\S])*"
KILLED = (
    r"rank {rank} on \S+ has ended without an error|terminated with code -9|Signal 9 \(SIGKILL\)|"
    rf"{RAY}The actor died unexpectedly"
)
FAILED = (
    rf"rank {{rank}} on \S+ failed: RuntimeError: {script.WORDS} \(at \S+fault.py:|"
    rf"{RAY}\nRuntimeError: {script.WORDS}"
)
# Both lines, in any order: each agent has an output of its own.
STOPPED = r"\A(?=[\s\S]*rank {rank} has received SIGTERM)(?=[\s\S]*is saved in \S+last.ckpt)"
FAULTS = (
    Fault("SIGKILL, rank 0", "kill", 0, rf"{KILLED}|store of the job is gone"),
    Fault("SIGKILL, rank 1", "kill", 1, KILLED),
    Fault("exception in forward", "forward", 1, FAILED),
    Fault("exception in backward", "backward", 1, FAILED),
    Fault("exception in the optimizer's hook", "optimizer", 1, FAILED),
    Fault("exception in the loader", "loader", 1, FAILED),
    Fault("exception in a callback, rank 0", "callback", 0, FAILED),
    Fault(
        "a stopped process (SIGSTOP)",
        "stop",
        1,
        r"rank {rank} on \S+ has had no heartbeat for \d+ s",
        ("--heartbeat", HEARTBEAT),
    ),
    Fault("unequal batches", "differ", 1, "rank 1 and rank 0 differ in their values"),
    Fault("unequal loaders", "uneven", 1, r"loaders of different lengths \(\[4, 5\] batches\)"),
    Fault("SIGTERM, rank 0", "term", 0, STOPPED),
    Fault("SIGTERM, rank 1", "term", 1, STOPPED),
    Fault("disk full at a save", "full", 0, r"No space left on device"),
    Fault("a damaged shard at a resume", "corrupt", 0, r"is damaged|checksum"),
)


def start_two_nodes(job: Job, *args: object) -> None:
    job.start_torchrun("fault.py", *args, "--num-nodes", 2, num_nodes=2, per_node=1)


RAY_TRAIN = "Ray Train"
LAUNCHERS: dict[str, Callable[..., None]] = {
    "script": lambda job, *args: job.start_script("fault.py", *args),
    "torchrun": lambda job, *args: job.start_torchrun("fault.py", *args),
    "two torchrun agents": start_two_nodes,
    RAY_TRAIN: lambda job, *args: job.start_script("fault.py", *args, "--ray"),
}


@dataclass(frozen=True)
class Cell:
    """What was found.

    Args:
        fault: name of the row.
        launcher: name of the column.
        seconds: from the fault until all processes were gone.
        is_named: whether the cause is in the output of the last process at least.
        step: of the last checkpoint that loads; None if there is none.
        problem: what is wrong, "" if nothing is.
    """

    fault: str
    launcher: str
    seconds: float
    is_named: bool
    step: int | None
    problem: str

    def json(self) -> dict[str, Any]:
        return asdict(self)


def run(fault: Fault, launcher: str) -> Cell:
    """Start a job, wait for its fault and its end, and look at what is left."""
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder)) as job:
        (job.out / "checkpoints").mkdir()
        with small_disk(job.out / "checkpoints") if fault.fault == "full" else _nothing():
            args = (fault.fault, "--rank", fault.rank, *fault.options)
            LAUNCHERS[launcher](job, *args)
            seconds = continue_stopped(job, fault.rank) if fault.fault == "stop" else None
            outcome = job.wait(limit=300, fault_limit=100)
            is_named = bool(re.search(fault.cause.format(rank=fault.rank), outcome.text))
            step = last_step(job.out / "checkpoints")
        seconds = outcome.seconds if seconds is None else seconds
        problems = {
            f"not gone within {LIMIT:.0f} s": seconds > LIMIT,
            "no fault happened": not (job.out / FAULT).exists(),
            "exit code 0": 0 in outcome.codes,
            "the cause is not named": not is_named,
            "no checkpoint loads": step is None,
            "the step of SIGTERM is not saved": fault.fault == "term"
            and (step is None or step <= script.FAULT_STEP),
        }
        problem = "; ".join(text for text, holds in problems.items() if holds)
        if problem:
            problem += f"; exit codes {outcome.codes}\n{outcome.text[-3000:]}"
        return Cell(fault.name, launcher, round(seconds, 1), is_named, step, problem)


def last_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint that loads, with correct checksums."""
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        with tempfile.TemporaryDirectory() as out:
            try:
                checkpoints.consolidate(path, Path(out) / "one.ckpt")
            except Exception:
                continue
            state = torch.load(Path(out) / "one.ckpt", weights_only=False)
            return int(state["global_step"])
    return None


def continue_stopped(job: Job, rank: int) -> float:
    """Wait until the other rank is gone, then continue the stopped one; return the seconds."""
    fault = job.out / FAULT
    other = job.out / f"pid{1 - rank}"
    end = time.time() + 300
    while time.time() < end:
        if fault.exists() and other.exists() and not _is_alive(int(other.read_text())):
            break
        time.sleep(0.1)
    seconds = time.time() - fault.stat().st_mtime
    with suppress(ProcessLookupError):
        os.kill(int((job.out / f"pid{rank}").read_text()), signal.SIGCONT)
    return seconds


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of 8 MB, which root may do."""
    options = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
