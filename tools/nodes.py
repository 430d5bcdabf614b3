# SPDX-License-Identifier: Apache-2.0
"""Nodes as network namespaces: `recipes/launch/several_nodes.sh` on several, on one machine.

    python -m tools.nodes --cases train sharding resume faults members names --write FILE

Each node has an address, a host name and an /etc/hosts of its own, and a link to a common switch,
whose rate can be limited or which can be cut. Processes, disks and clocks are the machine's. Needs
root, `ip` and `tc` (iproute2), and a kernel with veth, bridge and tbf. Everything that was made is
removed at the end, also after an error or Ctrl-C.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Self

import yaml
from lightning.pytorch import Callback

ROOT = Path(__file__).parents[1]
LAPTOP = ROOT / "recipes" / "configs" / "laptop.yaml"
LAUNCH = ROOT / "recipes" / "launch" / "several_nodes.sh"
WAIT_AFTER_FAULT = 120
MARK = "LIGHTNING_CP_TEST_NODES"


def missing() -> str | None:
    """Say what this machine lacks, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc", "unshare"):
        if shutil.which(command) is None:
            return f"the command {command} is not installed (iproute2, util-linux)"
    try:
        with Nodes(1, rate="100mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses: {' '.join(error.cmd)}: {error.stderr.strip()}"


# ---------------------------------------------------------------- nodes


Hosts = Callable[[int, list[str]], list[str]]
"""The lines of /etc/hosts about the nodes, as a node sees them, of its index and all addresses."""


class Nodes:
    """Namespaces that share a switch.

    Args:
        count: nodes: `node0` at 10.77.0.1, `node1` at 10.77.0.2, ...
        rate: of each link and direction, as `tc` writes it (100mbit); None for no limit.
        hosts: by default all names with their addresses, as a name server would give them.
        names: other host names.
    """

    def __init__(
        self,
        count: int,
        *,
        rate: str | None = None,
        hosts: Hosts | None = None,
        names: list[str] | None = None,
    ) -> None:
        self._tag = f"lcp{os.getpid()}"
        self.addresses = [f"10.77.0.{node + 1}" for node in range(count)]
        self.names = names or [f"node{node}" for node in range(count)]
        self._rate = rate
        self._hosts = hosts or (
            lambda _, addresses: [f"{a} {self.names[i]}" for i, a in enumerate(addresses)]
        )
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:  # links and addresses go with them
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        self._made.clear()

    def space(self, node: int) -> str:
        """Return the namespace of a node."""
        return f"{self._tag}n{node}"

    def command(self, node: int, command: list[str]) -> list[str]:
        """Return the command line that runs a command on a node, under its host name."""
        renamed = ["sh", "-c", f'hostname {self.names[node]} && exec "$@"', "sh", *command]
        return ["ip", "netns", "exec", self.space(node), "unshare", "--uts", *renamed]

    def cut(self, node: int) -> None:
        """Take down the switch's end of a node's link: packets vanish, sockets stay open."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "down")

    @property
    def _switch(self) -> str:
        return f"{self._tag}s"

    def _build(self) -> None:
        self._add(self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for node, address in enumerate(self.addresses):
            space, port = self.space(node), f"port{node}"
            self._add(space)
            folder = Path("/etc/netns") / space  # `ip netns exec` mounts its files over /etc
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *self._hosts(node, self.addresses)]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            link = ["eth0", "netns", space, "type", "veth", "peer", "name", port]
            _run("ip", "link", "add", *link, "netns", self._switch)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for name in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", name, "up")
            for where, end in ((space, "eth0"), (self._switch, port)):
                if self._rate is not None:
                    bucket = ["rate", self._rate, "burst", "256kb", "latency", "100ms"]
                    _run("tc", "-n", where, "qdisc", "add", "dev", end, "root", "tbf", *bucket)

    def _add(self, name: str) -> None:
        self._made.append(name)
        _run("ip", "netns", "add", name)


def _run(*command: str) -> str:
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return found.stdout


# ---------------------------------------------------------------- jobs


class Meter(Callback):
    """Writes time, loss and the bytes that the node has sent and received, after each step.

    Args:
        folder: for one file per rank.
        pause: seconds between steps, so that a run lasts.
        stop: step after which the run ends; the schedule of the learning rate goes by `max_steps`.
    """

    def __init__(self, folder: str, pause: float = 0.0, stop: int | None = None) -> None:
        self._folder, self._pause, self._stop = Path(folder), pause, stop

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: object) -> None:
        counters = Path("/sys/class/net/eth0/statistics")
        bytes_ = {
            name: int((counters / name).read_text()) if counters.exists() else 0
            for name in ("tx_bytes", "rx_bytes")
        }
        row = {
            "step": trainer.global_step,
            "time": time.time(),
            "loss": float(outputs["loss"]),
            "node": trainer.strategy.node_rank,
            "host": socket.gethostname(),
            "size": trainer.world_size,
            **bytes_,
        }
        with (self._folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        time.sleep(self._pause)
        if trainer.global_step == self._stop:
            trainer.should_stop = True


@dataclass
class Outcome:
    """How a job ended.

    Args:
        rows: what `Meter` has written, by rank.
        codes: exit code of each node's command; None for one that had to be killed.
        texts: what each node printed.
        gone: after a fault, for each watched node: seconds until its ranks were gone, and until its
            torchrun was; None for what had to be killed.
    """

    rows: list[list[dict[str, Any]]]
    codes: list[int | None]
    texts: list[str]
    gone: list[tuple[float | None, float | None]] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Return the losses of rank 0."""
        return [row["loss"] for row in self.rows[0]]

    def seconds(self, first: int = 2) -> float:
        """Return the median time of a step, without the first ones."""
        times = [row["time"] for row in self.rows[0]]
        steps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.median(steps[first - 1 :])

    def sent(self, first: int = 2) -> float:
        """Return the megabytes per step that the busiest node has sent."""
        most = 0.0
        for rows in self.rows:
            begin, end = rows[first - 1], rows[-1]
            steps = end["step"] - begin["step"]
            most = max(most, (end["tx_bytes"] - begin["tx_bytes"]) / steps / 1e6)
        return most


class Job:
    """One run of the launch script on each node.

    Args:
        nodes: where.
        devices: processes per node.
        folder: shared by all nodes, as a network file system would be.
        config: the file.
        environment: variables of a node.
        first: nodes that start at once; others when they `join`.
        number: of nodes, as torchrun is told.
    """

    def __init__(
        self,
        nodes: Nodes,
        devices: int,
        folder: Path,
        config: Path,
        *options: str,
        host: str = "node0",
        environment: Callable[[int], dict[str, str]] = lambda _: {},
        first: Iterable[int] | None = None,
        number: str | None = None,
    ) -> None:
        self._nodes, self._folder = nodes, folder
        self._count, self._world = len(nodes.names), len(nodes.names) * devices
        self._mark = uuid.uuid4().hex
        self._meter = folder / f"meter-{self._mark[:8]}"
        self._meter.mkdir(parents=True)
        _set_meter(config, self._meter)
        self._logs = [self._meter / f"node{node}.txt" for node in range(self._count)]
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        number = number or str(self._count)
        self._command = [str(LAUNCH), number, str(devices), host, str(config), *options]
        self._environment = environment
        try:
            for node in range(self._count) if first is None else first:
                self.join(node)
        except BaseException:
            self.end()
            raise

    def join(self, node: int) -> None:
        """Start the command on a node."""
        more = self._environment(node)
        ours = {
            MARK: f"{self._mark}-{node}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        with self._logs[node].open("wb") as log:
            self._started[node] = subprocess.Popen(
                self._nodes.command(node, self._command),
                cwd=ROOT,
                env=os.environ | ours | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, limit: float = 600) -> Outcome:
        """Wait until all nodes are done."""
        end = time.time() + limit
        while any(self._runs(node) for node in range(self._count)):
            if time.time() > end:
                text = "\n".join(self._texts())
                self.end()
                raise RuntimeError(f"still running after {limit} s:\n{text}")
            time.sleep(0.2)
        return self._outcome()

    def wait_for_step(self, step: int, limit: float = 300) -> None:
        """Wait until rank 0 has finished a step."""
        self._wait_until(
            lambda: bool(self._rows(0)) and self._rows(0)[-1]["step"] >= step,
            f"step {step} was not reached",
            limit,
        )

    @property
    def step(self) -> int:
        """Return the last step that rank 0 has finished."""
        return int(self._rows(0)[-1]["step"])

    def wait_for_size(self, size: int, limit: float = 300) -> float:
        """Wait for steps on this number of ranks from now on; return the seconds."""
        begin = time.time()

        def is_reached() -> bool:
            last = self._rows(0)[-1:]
            return bool(last) and last[0]["size"] == size and last[0]["time"] > begin

        self._wait_until(is_reached, f"no step on {size} ranks", limit)
        return time.time() - begin

    def _wait_until(self, is_reached: Callable[[], bool], problem: str, limit: float) -> None:
        end = time.time() + limit
        while not is_reached():
            if time.time() > end or not self._runs(0):
                text = "\n".join(self._texts())
                self.end()
                raise RuntimeError(f"{problem}:\n{text}")
            time.sleep(0.1)

    def kill(self, node: int) -> None:
        """Send SIGKILL to all processes of a node."""
        while found := self.processes(node):
            for pid in found:
                _kill(pid)

    def terminate(self, node: int) -> None:
        """Send SIGTERM to a node's torchrun."""
        self._started[node].send_signal(signal.SIGTERM)

    def watch(self, nodes: Iterable[int], limit: float = WAIT_AFTER_FAULT) -> Outcome:
        """After a fault, wait until the processes of these nodes are gone; kill what is left."""
        begin, watched = time.time(), list(nodes)
        ranks: dict[int, float | None] = dict.fromkeys(watched)
        torchrun: dict[int, float | None] = dict.fromkeys(watched)
        while time.time() - begin < limit and None in (*ranks.values(), *torchrun.values()):
            for node in watched:
                now = time.time() - begin
                if torchrun[node] is None and self._started[node].poll() is not None:
                    torchrun[node] = now
                if ranks[node] is None and not self.processes(node, ranks=True):
                    ranks[node] = now
            time.sleep(0.1)
        self.end()
        outcome = self._outcome()
        outcome.gone = [(ranks[node], torchrun[node]) for node in watched]
        return outcome

    def _runs(self, node: int) -> bool:
        """Return whether something runs on a node; a process has no environment while it starts."""
        command = self._started.get(node)
        return (command is not None and command.poll() is None) or bool(self.processes(node))

    def processes(self, node: int, *, ranks: bool = False) -> list[int]:
        """Return the processes of a node, however deep; with `ranks`, not its torchrun."""
        mark = f"{MARK}={self._mark}-{node}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if not folder.name.isdigit():
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # gone meanwhile
                continue
            is_rank = any(variable.startswith(b"LOCAL_RANK=") for variable in variables)
            if mark in variables and (is_rank or not ranks):
                found.append(int(folder.name))
        return found

    def end(self) -> None:
        """Kill what is left."""
        for node in range(self._count):
            self.kill(node)

    def _outcome(self) -> Outcome:
        codes = [process.wait() for process in self._started.values()]
        known = [None if code == -signal.SIGKILL else code for code in codes]
        return Outcome([self._rows(r) for r in range(self._world)], known, self._texts())

    def _rows(self, rank: int) -> list[dict[str, Any]]:
        file = self._meter / f"rank{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _texts(self) -> list[str]:
        return [log.read_text(errors="replace") if log.exists() else "" for log in self._logs]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def running(*args: Any, **kwargs: Any) -> Iterator[Job]:
    """Start a job, and leave nothing of it."""
    job = Job(*args, **kwargs)
    try:
        yield job
    finally:
        job.end()


def write_config(
    folder: Path,
    *,
    batch_size: int,
    steps: int,
    save_every: int = 0,
    hidden: int = 128,
    pause: float = 0.0,
    stop: int | None = None,
    **strategy: Any,
) -> Path:
    """Write the laptop's config with short sequences and without validation."""
    config = yaml.safe_load(LAPTOP.read_text())
    if hidden != 128:
        config["model"]["config"] = {"hidden_size": hidden, "intermediate_size": 3 * hidden}
    config["data"]["init_args"] |= {
        "seq_len": 256,
        "max_documents": 10,
        "batch_size": batch_size,
        "cache_dir": str(Path(tempfile.gettempdir()) / "nodes-cache"),
    }
    config["monitor"]["verify_first_batch"] = False
    config["trainer"]["strategy"]["init_args"] = strategy
    meter = {"folder": "", "pause": pause, "stop": stop}
    callbacks = [{"class_path": "tools.nodes.Meter", "init_args": meter}]
    if save_every:
        saver = {"dirpath": str(folder / "checkpoints"), "every_n_train_steps": save_every}
        callbacks += [
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {**saver, "save_top_k": 0, "save_last": True},
            }
        ]
    config["trainer"] |= {
        "max_steps": steps,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "check_val_every_n_epoch": 1,
        "default_root_dir": str(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(save_every),
        "callbacks": callbacks,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"config-{uuid.uuid4().hex[:8]}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def _set_meter(config: Path, folder: Path) -> None:
    content = yaml.safe_load(config.read_text())
    content["trainer"]["callbacks"][0]["init_args"]["folder"] = str(folder)
    config.write_text(yaml.safe_dump(content))


# ---------------------------------------------------------------- cases


Table = tuple[str, list[str], list[list[str]]]
"""A title with a sentence, the header, the rows."""


def one_process(
    folder: Path,
    *,
    steps: int,
    batch_size: int = 8,
    hidden: int = 128,
    stop: int | None = None,
) -> list[float]:
    """Return the losses of the same training in one process: no namespace, no launcher."""
    config = write_config(
        folder / "alone",
        batch_size=batch_size,
        steps=steps,
        hidden=hidden,
        stop=stop,
        context_parallel_size=1,
    )
    meter = folder / "alone" / "meter"
    meter.mkdir()
    _set_meter(config, meter)
    command = [sys.executable, "-m", "recipes", "fit", "--config", str(config)]
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--trainer.devices=1"],
        cwd=ROOT,
        env=os.environ | more,
        check=False,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(run.stdout + run.stderr)
    rows = (meter / "rank0.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def differ(found: list[float], exact: list[float]) -> float:
    """Return the largest relative difference of losses."""
    if len(found) != len(exact):
        raise RuntimeError(f"{len(found)} losses instead of {len(exact)}")
    return max(abs(a - b) / b for a, b in zip(found, exact, strict=True))


def check(outcome: Outcome) -> Outcome:
    """Raise unless every node ended well."""
    if set(outcome.codes) != {0}:
        raise RuntimeError(f"exit codes {outcome.codes}:\n" + "\n".join(outcome.texts))
    return outcome


def train(folder: Path, counts: list[int], samples: int = 8) -> Table:
    """Train with context ranks inside a node and over nodes; compare losses with one process."""
    steps = 6
    exact = one_process(folder, steps=steps, batch_size=samples)
    rows = []
    for count in counts:
        for devices, context in ((2, 2), (2, 2 * count), (1, count)):
            say(f"train: {count} nodes x {devices}, context {context}")
            data = count * devices // context
            config = write_config(
                folder / f"train{count}{devices}{context}",
                batch_size=samples // data,
                steps=steps,
                context_parallel_size=context,
            )
            with (
                Nodes(count) as nodes,
                running(nodes, devices, folder, config) as job,
            ):
                outcome = check(job.wait())
            placed = "inside a node" if context <= devices else "over nodes"
            rows.append(
                [
                    f"{count} x {devices}",
                    f"{data} x {context}, {placed}",
                    f"{differ(outcome.losses, exact):.1e}",
                    f"{outcome.sent():.1f}",
                    f"{outcome.seconds():.2f}",
                ]
            )
    title = (
        f"**Training.** {steps} steps, no limit on links. Losses of one process: "
        f"{exact[0]:.4f} to {exact[-1]:.4f}."
    )
    header = [
        "nodes x processes",
        "data x context ranks",
        "largest difference of a loss, relative",
        "MB that a node sends per step",
        "s per step",
    ]
    return title, header, rows


def planned(hidden: int, count: int, devices: int, sharding: str) -> float:
    """Return the megabytes of parameters and gradients that enter a node per step, by plan.

    With `full`, a ring over all ranks enters each node once, with the bytes of one rank. With
    `hybrid`, each rank has a ring of its own over the nodes.
    """
    from hf_patches import model_shape
    from lightning_cp.planner.setup import Setup
    from lightning_cp.planner.time import plan_time
    from recipes.weights import tiny_config

    config = tiny_config()
    config.hidden_size, config.intermediate_size = hidden, 3 * hidden
    ranks = count * devices

    def wire(**given: Any) -> float:
        setup = Setup(256, ranks, cp_size=devices, checkpointing="none", **given)
        plan = plan_time(model_shape(config), setup).wire
        return (plan["parameters"] + plan["gradients"]) / 1e6

    if sharding == "full":
        return wire(sharding="full")
    inside = Setup(256, devices, cp_size=devices, checkpointing="none", sharding="full")
    within = plan_time(model_shape(config), inside).wire
    total = wire(sharding="hybrid", shard_size=devices)
    return devices * (total - (within["parameters"] + within["gradients"]) / 1e6)


def sharding(folder: Path, counts: list[int], hidden: int = 256) -> Table:
    """Time full and hybrid sharding on limited links."""
    rows, devices, steps = [], 2, 8
    for count in counts:
        rates = (None, "1gbit", "100mbit") if count == 2 else ("100mbit",)
        for rate in rates:
            for kind in ("full", "hybrid"):
                say(f"sharding: {count} nodes, {rate}, {kind}")
                config = write_config(
                    folder / f"sharding{count}{rate}{kind}",
                    batch_size=2,
                    steps=steps,
                    hidden=hidden,
                    context_parallel_size=2,
                    parameters=kind,
                )
                with (
                    Nodes(count, rate=rate) as nodes,
                    running(nodes, devices, folder, config) as job,
                ):
                    outcome = check(job.wait())
                plan = planned(hidden, count, devices, kind)
                megabits = {None: None, "1gbit": 1000, "100mbit": 100}[rate]
                rows.append(
                    [
                        f"{count} x {devices}",
                        rate or "none",
                        kind,
                        f"{plan:.1f}",
                        f"{outcome.sent():.1f}",
                        "" if megabits is None else f"{8 * plan / megabits:.2f}",
                        f"{outcome.seconds():.2f}",
                    ]
                )
    title = (
        f"**Sharding of parameters on a limited link.** Width {hidden}, float32, context ranks "
        f"inside a node, median of {steps - 2} steps."
    )
    header = [
        "nodes x processes",
        "limit",
        "`parameters`",
        "MB of parameters and gradients into a node, by plan",
        "MB that a node sends, measured",
        "s that the planned bytes take",
        "s per step, measured",
    ]
    return title, header, rows


def resume(folder: Path, counts: list[int]) -> Table:
    """Continue a run on other numbers of nodes; compare with one process that never stopped."""
    rows, start = [], folder / "resume"
    exact = one_process(folder / "whole", steps=8)
    most = max(counts)
    route = [(2, 2, 2), (most, 1, most), (1, 2, 1)]
    for number, (count, devices, context) in enumerate(route):
        say(f"resume: {count} nodes x {devices}, context {context}")
        first, last = [(0, 3), (3, 6), (6, 8)][number]
        config = write_config(
            start,
            batch_size=8 * context // (count * devices),
            steps=last,
            save_every=3,
            context_parallel_size=context,
        )
        with Nodes(count) as nodes, running(nodes, devices, folder, config) as job:
            outcome = check(job.wait())
        difference = differ(outcome.losses, exact[first:last])
        placed = f"{count * devices // context} x {context}"
        rows.append([f"{count} x {devices}", placed, f"{first + 1} to {last}", f"{difference:.1e}"])
    title = "**Another number of nodes.** One run, each row continues the checkpoint of the last."
    header = [
        "nodes x processes",
        "data x context ranks",
        "steps",
        "largest difference of a loss, relative",
    ]
    return title, header, rows


def faults(folder: Path, counts: list[int]) -> Table:
    """Kill a node or cut its link in the middle of training; see how the others end."""
    rows = []
    cases: list[tuple[str, int, str | None]] = [
        ("all processes of node1 killed", 1, None),
        ("all processes of node0 killed, where nodes connect", 0, None),
        ("link of node1 cut", 1, None),
        ("link of node1 cut, `timeout: 0:00:30`", 1, "0:00:30"),
        ("SIGTERM to torchrun on node1, as for a drained pod", 1, None),
    ]
    for count in counts:
        devices = 2 if count == 2 else 1
        for what, node, timeout in cases if count == 2 else (cases[0], cases[3], cases[4]):
            say(f"faults: {count} nodes, {what}")
            more = {} if timeout is None else {"timeout": timeout}
            config = write_config(
                folder / f"faults{count}",
                batch_size=2,
                steps=100_000,
                context_parallel_size=2,
                **more,
            )
            with (
                Nodes(count) as nodes,
                running(nodes, devices, folder, config) as job,
            ):
                job.wait_for_step(5)
                watched = list(range(count))
                if "killed" in what:
                    job.kill(node)
                    watched.remove(node)
                elif "SIGTERM" in what:
                    job.terminate(node)
                else:
                    nodes.cut(node)
                outcome = job.watch(watched)
            left = f"not within {WAIT_AFTER_FAULT}"
            for other, gone in zip(watched, outcome.gone, strict=True):
                seconds = [left if each is None else f"{each:.1f}" for each in gone]
                rows.append(
                    [
                        f"{count} x {devices}",
                        what,
                        f"node{other}",
                        *seconds,
                        first_error(outcome.texts[other]),
                    ]
                )
    title = "**Faults**, after step 5, with pairs of context ranks."
    header = [
        "nodes x processes",
        "fault",
        "on",
        "s until its ranks are gone",
        "s until torchrun is",
        "first error there",
    ]
    return title, header, rows


def members(folder: Path, counts: list[int]) -> Table:
    """Kill a node; another one, of another name and address, comes later by the same command."""
    rows, steps = [], 100_000
    for number in ("2", "1:2"):
        say(f"members: {number} nodes")
        config = write_config(
            folder / number,
            batch_size=8,
            steps=steps,
            save_every=5,
            pause=0.3,
            data_parallel_size=1,
        )
        seconds: list[tuple[str, float]] = []
        with (
            Nodes(3, names=["node0", "node1", "another"]) as nodes,
            running(
                nodes,
                1,
                folder,
                config,
                first=(0, 1),
                number=number,
                environment=lambda _: {"PET_MAX_RESTARTS": "3"},
            ) as job,
        ):
            job.wait_for_step(20)
            job.kill(1)
            if number == "1:2":
                seconds.append(("node1 is killed: node0 trains alone", job.wait_for_size(1)))
            else:
                time.sleep(30)  # node0 waits for a second node
            job.join(2)
            seconds.append(("`another` is started: node0 and it train", job.wait_for_size(2)))
            job.wait_for_step(max(job.step, 20) + 5)
            (job.kill if number == "2" else job.terminate)(0)
            outcome = job.watch([2])
        losses = {
            row["step"]: row["loss"] for row in outcome.rows[0]
        }  # of a repeated step the last
        exact = one_process(folder / f"alone{number[0]}", steps=steps, stop=max(losses))
        found = f"{differ([losses[step] for step in sorted(losses)], exact):.1e}"
        rows += [[number, what, f"{time_:.0f}", f"{max(losses)}", found] for what, time_ in seconds]
        what = "node0 is killed" if number == "2" else "SIGTERM to torchrun on node0"
        gone = [" and ".join("never" if t is None else f"{t:.0f}" for t in outcome.gone[0])]
        rows.append([number, f"{what}: ranks and torchrun of `another` are gone", *gone, "", ""])
        say(f"{rows}, rank 0 on {outcome.rows[0][-1]['host']}, {first_error(outcome.texts[2])}")
    title = (
        "**Nodes that come and go.** Nodes of one process, `PET_MAX_RESTARTS=3`, "
        "`data_parallel_size: 1`, a checkpoint every 5 steps, 0.3 s of pause after each step. "
        "After step 20 node1 is killed; `another`, at another address, is started by the same "
        "command (30 s later where NODES is 2). Losses of all steps are compared with one process."
    )
    header = ["NODES", "event", "s", "steps in all", "largest difference of a loss, relative"]
    return title, header, rows


def names(folder: Path, counts: list[int]) -> Table:
    """Try nodes whose names do not resolve as they should."""
    rows: list[list[str]] = []

    def debian(node: int, addresses: list[str]) -> list[str]:
        """Every name resolves, but a node's own to its loopback, as Debian's installer writes."""
        others = [f"{a} node{i}" for i, a in enumerate(addresses) if i != node]
        return [f"127.0.1.1 node{node}", *others]

    def own(node: int, addresses: list[str]) -> list[str]:
        return [f"{addresses[node]} node{node}"]

    def none(node: int, addresses: list[str]) -> list[str]:
        return []

    interface, local, server = "GLOO_SOCKET_IFNAME", "PET_LOCAL_ADDR", "PET_RDZV_CONF"
    name, address = "node0", "10.77.0.1"
    cases: list[tuple[str, Hosts, str, list[str]]] = [
        ("a node's own name is 127.0.1.1, as Debian sets it", debian, name, []),
        ("the same", debian, name, [interface]),
        ("the same", debian, address, [interface]),
        ("only a node's own name resolves", own, address, []),
        ("the same", own, address, [local]),
        ("no name resolves", none, address, [local, interface]),
        ("the same", none, address, [local, interface, server]),
    ]
    for what, hosts, host, given in cases:
        say(f"names: {what}, HOST {host}, {given}")
        config = write_config(
            folder / "names", batch_size=2, steps=3, context_parallel_size=2, timeout="0:00:30"
        )
        with Nodes(2, hosts=hosts) as nodes:
            values = [
                {interface: "eth0", local: nodes.addresses[node], server: f"is_host={1 - node}"}
                for node in range(2)
            ]
            variables = [{key: each[key] for key in given} for each in values]
            begin = time.time()
            with running(
                nodes, 1, folder, config, host=host, environment=variables.__getitem__
            ) as job:
                outcome = job.watch(range(2), limit=150)
            took = time.time() - begin
        texts = "\n".join(outcome.texts)
        ended = "trains" if outcome.codes == [0, 0] else first_error(texts)
        shown = ", ".join(f"`{key}`" for key in given) or "none"
        rows.append([what, f"`{host}`", shown, ended, f"{took:.0f}" if took < 150 else "over 150"])
    title = (
        "**Names.** 2 nodes of one process, `timeout: 0:00:30`. `PET_RDZV_CONF` is `is_host=1` on "
        "the node that HOST names and `is_host=0` on the other."
    )
    return title, ["/etc/hosts of the nodes", "HOST", "variables set", "outcome", "s in all"], rows


def first_error(text: str) -> str:
    """Return the first line that names an error, shortened."""
    for line in text.splitlines():
        found = re.sub(r"^\[\w+\]:\s*", "", line.strip())
        if re.match(r"([\w.]+(Error|error|Exception)|error): ", found) and "frame #" not in found:
            found = re.sub(r"\[/[^\]]*/gloo/([^\]]*)\]", r"[gloo/\1]", found)
            return found[:150].replace("|", "\\|")
    return "none"


# ---------------------------------------------------------------- report


CASES: dict[str, Callable[..., Table]] = {
    "train": train,
    "sharding": sharding,
    "resume": resume,
    "faults": faults,
    "members": members,
    "names": names,
}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)  # noqa: T201


def as_markdown(table: Table) -> str:
    title, header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--write", type=Path, help="Markdown file; the tables are printed too")
    args = parser.parse_args()
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)  # noqa: T201
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` blocks clean up
    import lightning
    import torch

    parts = [
        "# Nodes as network namespaces",
        f"`python -m tools.nodes --nodes {' '.join(map(str, args.nodes))} --cases "
        f"{' '.join(args.cases)}`, {date.today():%B %Y}: {os.cpu_count()} cores, Linux "
        f"{platform.release().split('-')[0]}, torch {torch.__version__}, Lightning "
        f"{lightning.__version__}, gloo. The model of recipes/configs/laptop.yaml, 256 tokens.",
    ]
    with tempfile.TemporaryDirectory(prefix="nodes-") as name:
        for case in args.cases:
            parts.append(as_markdown(CASES[case](Path(name) / case, args.nodes)))
            print(parts[-1], flush=True)  # noqa: T201
            if args.write is not None:
                args.write.write_text("\n\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
