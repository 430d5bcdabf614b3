# SPDX-License-Identifier: Apache-2.0
"""Which ranks work together, and for what.

Turns what a user has (a 1-D device mesh, a process group, or nothing) into groups named by use.
The only module that asks `torch.distributed` how many ranks there are.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.collectives import GroupTransport, LoneTransport, Transport
from lightning_cp.compat import num_process_groups

DATA_AXIS: Final = "data_parallel"
"""Mesh axis along which ranks hold different rows."""
CONTEXT_AXIS: Final = "context_parallel"
"""Mesh axis along which ranks hold different tokens of the same rows."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank, named by what they are for.

    Args:
        attend: moves keys, values and their gradients; a communicator of its own, used by nothing
            else, so that attention never waits behind another collective.
        context: the same ranks, for everything else that they do together: checks, loss, unshard.
        data: ranks that hold the same tokens of other rows; alone where there is no such axis.
    """

    attend: Transport
    context: Transport
    data: Transport


def build_groups(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    data: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> Groups:
    """Build the groups of this rank. Every rank of ``mesh`` must call it, in the same order."""
    context_group = _group(mesh, "mesh")
    data_group = _group(data, "data")
    beside = LoneTransport() if data_group is None else GroupTransport(data_group)
    if context_group is None:
        return Groups(LoneTransport(), LoneTransport(), beside)
    context = GroupTransport(context_group)
    if context.size == 1:
        return Groups(LoneTransport(), context, beside)
    _check_group_counts(context)
    attend = dist.new_group(
        dist.get_process_group_ranks(context_group),
        timeout=timeout,
        backend=dist.get_backend(context_group),
        use_local_synchronization=True,
    )
    # The first collective of an NCCL group builds the communicator, which all of its ranks must do
    # at once. In attention only those that have something to send would take part.
    warm = torch.ones(1, device=context.device)
    dist.all_reduce(warm, group=attend)
    return Groups(GroupTransport(attend), context, beside)


def _check_group_counts(context: Transport) -> None:
    """Refuse to make a group where its ranks would look for it under different names, and wait."""
    mine = torch.tensor([num_process_groups()], device=context.device)
    counts = mine.new_empty(context.size, 1)
    context.all_gather(counts, mine)()
    found = counts.flatten().tolist()
    if len(set(found)) > 1:
        raise RuntimeError(
            "The ranks of the context-parallel group have made different numbers of process groups "
            f"({found}), so that they cannot make one together. Create ContextParallel before "
            "groups that only some ranks make, or call dist.new_group(...) on all ranks."
        )


def _group(given: DeviceMesh | dist.ProcessGroup | None, name: str) -> dist.ProcessGroup | None:
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if not isinstance(given, DeviceMesh):
        raise TypeError(
            f"ContextParallel({name}=...) got a {type(given).__name__}. Give a 1-D DeviceMesh such "
            f'as device_mesh["{CONTEXT_AXIS}"], or a ProcessGroup.'
        )
    if given.ndim != 1:
        raise ValueError(
            f"ContextParallel({name}=...) got a mesh with the axes {given.mesh_dim_names}, but "
            f'needs exactly one. Choose it by name: device_mesh["{CONTEXT_AXIS}"].'
        )
    return given.get_group()
