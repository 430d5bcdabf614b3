# SPDX-License-Identifier: Apache-2.0
"""Process groups, and names of collectives that versions of torch call differently."""

import atexit
import time
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


@lru_cache(maxsize=1)
def delay_exit_for_gloo() -> None:
    """Give gloo's threads time to release their tensors before interpreter exit.

    They need the interpreter to do so; once it is gone, they abort a process that has finished
    ("terminate called without an active exception", pytorch/pytorch#190489). Destroying the groups
    ends no thread while a mesh refers to them, and may block where other ranks have failed.
    """
    atexit.register(time.sleep, 0.1)


def all_gather_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start an all-gather into one tensor.

    2.13 renamed ``all_gather_into_tensor`` and made the old name warn; 2.11 has only the old one.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def reduce_scatter_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start a summing reduce-scatter from one tensor; renamed like the all-gather."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def num_process_groups() -> int:
    """Return the number of process groups that this process has created (`c10d._world`).

    A group that only its members create is named by that number: it must be equal on all of them.
    """
    return len(distributed_c10d._world.pg_names)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a group has not been destroyed (`c10d._world`)."""
    return group in distributed_c10d._world.pg_map


def default_store() -> Any:
    """Return the default group's key-value store (`c10d._get_default_store`).

    Ranks exchange messages through it where a collective could hang.
    """
    return distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group (`c10d._set_pg_timeout`): a mesh creates them with the default."""
    distributed_c10d._set_pg_timeout(timeout, group)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return several mesh axes as one, registered in the root mesh (`DeviceMesh._flatten`)."""
    return mesh._flatten(name)
