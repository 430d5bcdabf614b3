# SPDX-License-Identifier: Apache-2.0
"""Time, memory and host time of calls, on a GPU by its own clock, on a CPU by the host's."""

import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

LONGEST, MOST, FEWEST = 0.8, 15, 3
"""Seconds that a measurement may take, and between how many and how few repeats."""

IN_A_ROW = 4
"""Calls that are timed together on a GPU."""


def synchronize(device: torch.device) -> None:
    """Wait until a device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device, *, repeats: int = MOST) -> float:
    """Return the median time of a call in milliseconds, after two that do not count."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    once = time.perf_counter() - start
    repeats = min(repeats, max(FEWEST, int(LONGEST / max(once * (IN_A_ROW + 1), 1e-6))))
    return median(_once(call, device) for _ in range(repeats))


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Calls follow each other, as layers do: the host may run ahead of the device, if it can.
    call()
    start.record()
    for _ in range(IN_A_ROW):
        call()
    stop.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(stop)) / IN_A_ROW


def ahead_time(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Return the median time of a call whose host part is done before: the GPU's own, and its gaps.

    So it is in a model whose other layers keep the GPU busy. On a CPU the plain time.
    """
    if device.type != "cuda":
        return timed(call, device, repeats=repeats)
    call()
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(IN_A_ROW):
        call()
    host = time.perf_counter() - begun  # at most: where the queue was full, it waited
    torch.cuda.synchronize(device)
    repeats = min(repeats, max(1, int(LONGEST / (time.perf_counter() - begun))))
    cycles = int(2e9 * min(host * 1.5 + 0.002, 0.25))
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(IN_A_ROW):
            call()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(float(start.elapsed_time(stop)) / IN_A_ROW)
    return median(times)


def host_time(call: Callable[[], object], device: torch.device, *, repeats: int = 7) -> float:
    """Return for how many milliseconds a call keeps the host, the device being idle before."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        kept = call()
        times.append(1e3 * (time.perf_counter() - start))
        del kept
    synchronize(device)
    return median(times)


def busy_time(call: Callable[[], object], device: torch.device) -> float:
    """Return for how many milliseconds a call keeps the GPU, gaps left out; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        call()
        torch.cuda.synchronize(device)
    return float(sum(event.self_device_time_total for event in profiled.key_averages())) / 1e3


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a call holds beside what was there before; 0 on a CPU."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = call()
    torch.cuda.synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def prime_memory(device: torch.device, num_bytes: int) -> None:
    """Let memory that is handed out next hold ordinary numbers: nobody fills it in for us."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    size = min(num_bytes, free // 2) // 2
    torch.randn(size, dtype=torch.bfloat16, device=device)


def describe(device: torch.device) -> dict[str, str]:
    """Return what was measured on, and when."""
    is_gpu = device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }
    if is_gpu:
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _commit() -> str:
    """Return the commit that was measured, where it is known; ``-dirty`` if files had changed."""
    folder = str(Path(__file__).parent)
    command = ("git", "-C", folder, "describe", "--always", "--dirty", "--exclude=*")
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


class Records:
    """JSON lines in a file, and nothing where no folder is given.

    Args:
        folder: where the file goes; made if it is not there.
        name: the file's, without its ending.
        where: what is the same in all lines.
    """

    def __init__(self, folder: Path | None, name: str, where: dict[str, str]) -> None:
        self._where = where
        self._path: Path | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f"{name}.jsonl"

    def add(self, **values: Any) -> None:
        """Write a line."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({**values, **self._where}) + "\n")
