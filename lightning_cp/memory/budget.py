# SPDX-License-Identifier: Apache-2.0
"""How much host memory each rank may take for offloading, and whether the host has it.

All ranks gather what they ask for and what their host has, and decide alike.
"""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import gather
from lightning_cp.config import Memory
from lightning_cp.data.outputs import digest

SHARE: Final = 0.8
"""The part of the available host memory that ``offload='all'`` may take: data loaders need some."""

_GIB: Final = 2**30
_UNKNOWN: Final = 2**62


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rank may take, the same on all ranks.

    Args:
        host_bytes: host memory for tensors that leave the device.
        device_bytes: tensors that stay on the device before others leave it.
        is_complete: whether a tensor that does not fit is an error, instead of staying there.
    """

    host_bytes: int
    device_bytes: int = 0
    is_complete: bool = False


def resolve_budget(memory: Memory, groups: Groups) -> Budget | None:
    """Return the budget of a rank, None without offloading. Collective; raises on all ranks."""
    wanted = memory.offload_bytes
    if wanted == 0:
        return None
    hosts = _gather_hosts(-1 if wanted is None else wanted, groups)
    device_bytes = int(memory.offload_after * _GIB)
    if wanted is None:
        share = min(int(SHARE * available) // num for num, _, available in hosts)
        return Budget(share, device_bytes, is_complete=True)
    for num_ranks, total, available in hosts:
        if total > available:
            fits = available / num_ranks / _GIB
            raise ValueError(
                f"memory=Memory(offload={memory.offload}) takes {total / _GIB:.2f} GiB of host "
                f"memory on a host with {num_ranks} ranks, of which {available / _GIB:.2f} GiB are "
                f"available. Give offload={int(fits * 100) / 100} or less; what exceeds it stays "
                "on the GPU."
            )
    return Budget(wanted, device_bytes)


def _gather_hosts(wanted: int, groups: Groups) -> list[tuple[int, int, int]]:
    """Return for each host: its ranks, the bytes that they ask for, and the bytes that it has."""
    available = available_bytes()
    state = [_host_id(), wanted, _UNKNOWN if available is None else available]
    x: Tensor = torch.tensor(state, device=groups.context.device)
    states = gather(gather(gather(x, groups.tensor), groups.context), groups.data)
    ranks = states.view(-1, 3).tolist()
    hosts = []
    for host in sorted({row[0] for row in ranks}):
        rows = [row for row in ranks if row[0] == host]
        hosts.append((len(rows), sum(row[1] for row in rows), min(row[2] for row in rows)))
    return hosts


def _host_id() -> int:
    """Return a number of this machine; containers on it share the memory, and the number."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return digest(boot.read_text() if boot.exists() else socket.gethostname())


def available_bytes() -> int | None:
    """Return the host memory that is free or can be freed, also within the container's limit.

    None where the system does not say.
    """
    counts = [_meminfo(Path("/proc/meminfo")), _cgroup(Path("/sys/fs/cgroup"))]
    known = [count for count in counts if count is not None]
    return min(known) if known else None


def _meminfo(file: Path) -> int | None:
    if not file.exists():
        return None
    lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def _cgroup(folder: Path) -> int | None:
    """Return what the memory limit of a container (cgroup v2) leaves."""
    limit, used, stat = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.exists() and used.exists() and stat.exists()):
        return None
    if limit.read_text().strip() == "max":
        return None
    counts = dict(line.split() for line in stat.read_text().splitlines())
    cached = int(counts.get("inactive_file", 0))
    return max(0, int(limit.read_text()) - int(used.read_text()) + cached)
