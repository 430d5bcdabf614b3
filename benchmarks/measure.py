# SPDX-License-Identifier: Apache-2.0
"""Time, memory and host time of calls: by GPU events, or by the host's clock on a CPU."""

import datetime
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

LONGEST, MOST, FEWEST = 0.8, 15, 3
"""Seconds of a measurement, and the maximal and minimal number of repeats."""

CALLS_PER_EVENT = 4
"""Calls that are timed together on a GPU."""


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def share_gpu(rank: int) -> None:
    """Let NCCL connect ranks that share one GPU: it refuses two, unless each is another host."""
    names = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
    os.environ |= dict.fromkeys(names, "1") | {"NCCL_HOSTID": f"host{rank}"}
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def timed(call: Callable[[], object], device: torch.device, *, repeats: int = MOST) -> float:
    """Return the median time of a call in milliseconds, after two warm-up calls."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    once = time.perf_counter() - start
    if once > 10 * LONGEST:
        return 1e3 * once
    if once > LONGEST:  # launches take no share of it
        return median(_once(call, device, num_calls=1) for _ in range(2))
    repeats = min(repeats, max(FEWEST, int(LONGEST / max(once * (CALLS_PER_EVENT + 1), 1e-6))))
    return median(_once(call, device) for _ in range(repeats))


def _once(
    call: Callable[[], object], device: torch.device, *, num_calls: int = CALLS_PER_EVENT
) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if num_calls > 1:  # calls follow each other, as layers do: the host may run ahead of the device
        call()
    start.record()
    for _ in range(num_calls):
        call()
    stop.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(stop)) / num_calls


def ahead_time(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Return the median GPU time of a call whose launches are queued ahead, gaps included.

    As in a model whose other layers keep the GPU busy. On a CPU, the plain time.
    """
    if device.type != "cuda":
        return timed(call, device, repeats=repeats)
    call()
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(CALLS_PER_EVENT):
        call()
    host = time.perf_counter() - begun  # an upper limit: the host waits when the queue is full
    torch.cuda.synchronize(device)
    repeats = min(repeats, max(1, int(LONGEST / (time.perf_counter() - begun))))
    cycles = int(2e9 * min(host * 1.5 + 0.002, 0.25))
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(CALLS_PER_EVENT):
            call()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(float(start.elapsed_time(stop)) / CALLS_PER_EVENT)
    return median(times)


def host_time(call: Callable[[], object], device: torch.device, *, repeats: int = 7) -> float:
    """Return the host time of a call in milliseconds, with an idle device."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        result = call()
        times.append(1e3 * (time.perf_counter() - start))
        del result
    synchronize(device)
    return median(times)


def kernel_times(call: Callable[[], object], device: torch.device) -> dict[str, tuple[float, int]]:
    """Return milliseconds and number of calls of each GPU kernel of a call; empty on a CPU."""
    if device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        call()
        torch.cuda.synchronize(device)
    return {
        event.key: (float(event.self_device_time_total) / 1e3, event.count)
        for event in profiled.key_averages()
    }


KERNELS = {
    "attention, forward": r"sdpa.*fprop|flash_fprop|flash_fwd|triton_tem.*flex(?!.*backward)",
    "attention, backward": r"sdpa.*bprop|flash_bprop|flash_bwd|triton_tem.*backward",
    "matrix products": r"gemm|nvjet|xmma|cutlass|splitK",
    "compiled": r"^triton_",
    "copies between device and host": r"^Memcpy (DtoH|HtoD)",
    "copies": r"^Memcpy|^Memset|copy|CatArray",
    "reductions": r"reduce|softmax|Softmax|norm",
    "elementwise": r"elementwise",
}
"""What a kernel does, by its name: the first pattern that is found."""


def print_profile(kernels: dict[str, tuple[float, int]], *, num_kernels: int = 20) -> None:
    """Print the time of all kernels by kind, and the longest ones."""
    total = max(sum(ms for ms, _ in kernels.values()), 1e-9)
    kinds = dict.fromkeys((*KERNELS, "other"), 0.0)
    for name, (ms, _) in kernels.items():
        kind = next((kind for kind, it in KERNELS.items() if re.search(it, name)), "other")
        kinds[kind] += ms
    print("\n| kernels | ms | share |\n|---|---|---|")
    for kind, ms in kinds.items():
        print(f"| {kind} | {ms:.1f} | {ms / total:.3f} |")
    print("\n| kernel | ms | calls |\n|---|---|---|")
    for name, (ms, count) in sorted(kernels.items(), key=lambda x: -x[1][0])[:num_kernels]:
        print(f"| {name[:120]} | {ms:.1f} | {count} |")
    print(flush=True)


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes that a call allocates; 0 on a CPU."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def prime_memory(device: torch.device, num_bytes: int) -> None:
    """Fill the memory that is allocated next with random values: emulated transfers do not."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    size = min(num_bytes, free // 2) // 2
    torch.randn(size, dtype=torch.bfloat16, device=device)


def describe(device: torch.device) -> dict[str, str]:
    """Return device, versions, date and commit of a measurement."""
    is_gpu = device.type == "cuda"
    info = {
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }
    if is_gpu:
        info["cudnn"] = str(torch.backends.cudnn.version())
    return info


def _commit() -> str:
    """Return the commit, if known, with ``-dirty`` if files have changed."""
    folder = str(Path(__file__).parent)
    command = ("git", "-C", folder, "describe", "--always", "--dirty", "--exclude=*")
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


class Records:
    """JSON lines in a file; nothing is written without a folder.

    Args:
        folder: folder of the file, created if it does not exist.
        name: name of the file, without suffix.
        where: values that are the same in all lines.
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
