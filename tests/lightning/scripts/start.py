"""Starts scripts as a user or a cluster would, and sees to it that nothing of them is left."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parents[2]
FAULT = "fault"
"""File that a script touches just before its fault."""

_MARK = "LIGHTNING_CP_TEST_JOB"
# Tests may themselves run under one of these.
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "PL_", "OMPI_", "PMI_")
_RANKS = {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


@dataclass
class Outcome:
    """How a job ended.

    Args:
        codes: exit code of each command that was started.
        text: all that was printed.
        seconds: how long the job took, from its fault on if it had one.
    """

    codes: list[int]
    text: str
    seconds: float


class Job:
    """Commands that belong together, and all processes that they start, however deep.

    Processes are found by a mark in their environment: workers of torchrun have sessions of their
    own, and orphans no parent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def start(self, command: list[str], **environment: object) -> None:
        """Start one command, in the root of the repository and with one thread."""
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(_LAUNCHERS) and key not in _RANKS
        }
        name, value = self._mark.split("=")
        ours = {name: value, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        given = {key: str(value) for key, value in environment.items()}
        with self._log(len(self.started)).open("wb") as log:
            self.started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=inherited | ours | given,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def start_script(self, name: str, *args: object) -> None:
        """Run `python script.py`."""
        self.start(self._script(name, *args))

    def start_torchrun(
        self,
        name: str,
        *args: object,
        num_nodes: int = 1,
        per_node: int = 2,
        restarts: int | None = None,
    ) -> None:
        """Run `torchrun` on two processes per node, all nodes here.

        With restarts, nodes find each other as `recipes/launch/several_nodes.sh` lets them.
        """
        port = str(free_port())
        for node in range(num_nodes):
            launcher = [sys.executable, "-m", "torch.distributed.run"]
            launcher += ["--nnodes", str(num_nodes), "--nproc-per-node", str(per_node)]
            if restarts is None:
                launcher += ["--node-rank", str(node)]
                launcher += ["--master-addr", "127.0.0.1", "--master-port", port]
            else:
                launcher += ["--max-restarts", str(restarts), "--rdzv-id", "job"]
                launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            self.start([*launcher, *self._script(name, *args)[1:]])

    def start_slurm(self, name: str, *args: object, cyclic: bool = False) -> None:
        """Start four tasks on two nodes, as `srun --distribution=block` (or cyclic) would."""
        port, num_nodes, per_node = free_port(), 2, 2
        for node in range(num_nodes):
            for local in range(per_node):
                self.start(
                    self._script(name, *args),
                    SLURM_JOB_ID=4711,
                    SLURM_JOB_NAME="train",
                    SLURM_NTASKS=num_nodes * per_node,
                    SLURM_NTASKS_PER_NODE=per_node,
                    SLURM_NNODES=num_nodes,
                    SLURM_PROCID=local * num_nodes + node if cyclic else node * per_node + local,
                    SLURM_LOCALID=local,
                    SLURM_NODEID=node,
                    SLURM_JOB_NODELIST="localhost,elsewhere",
                    SLURM_NODELIST="localhost,elsewhere",
                    MASTER_PORT=port,
                )

    def start_apart(self, name: str, *args: object) -> None:
        """Start two processes at once, with nobody to watch over them."""
        port = free_port()
        for rank in range(2):
            self.start(
                self._script(name, *args),
                TORCHELASTIC_RUN_ID="none",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                WORLD_SIZE=2,
                LOCAL_WORLD_SIZE=2,
                GROUP_RANK=0,
                RANK=rank,
                LOCAL_RANK=rank,
            )

    def wait(self, *, limit: float = 600, fault_limit: float = 120) -> Outcome:
        """Wait until every process is gone; kill what is left after the limit, and fail."""
        begin = time.time()
        fault = self.out / FAULT
        while self._running():
            since, most = (fault.stat().st_mtime, fault_limit) if fault.exists() else (begin, limit)
            if time.time() - since > most:
                left = self._running()
                self._kill()
                raise AssertionError(f"{left} still ran after {most} s:\n{self.text()}")
            time.sleep(0.1)
        since = fault.stat().st_mtime if fault.exists() else begin
        codes = [process.wait() for process in self.started]
        return Outcome(codes, self.text(), time.time() - since)

    def found(self, world_size: int) -> list[dict[str, Any]]:
        """Return what each rank has written."""
        return [torch.load(self.out / f"rank{rank}.pt") for rank in range(world_size)]

    def _script(self, name: str, *args: object) -> list[str]:
        return [sys.executable, str(SCRIPTS / name), str(self.out), *map(str, args)]

    def _log(self, index: int) -> Path:
        return self.folder / f"log{index}.txt"

    def text(self) -> str:
        logs = (self._log(index) for index in range(len(self.started)))
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def _running(self) -> list[int]:
        started = [process.pid for process in self.started if process.poll() is None]
        return started or self._marked()

    def _marked(self) -> list[int]:
        mark = self._mark.encode()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # gone meanwhile, or not ours
                continue
        return found

    def _kill(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        while marked := self._marked():
            for pid in marked:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
