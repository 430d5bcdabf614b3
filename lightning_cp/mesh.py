# SPDX-License-Identifier: Apache-2.0
"""Which ranks work together, and for what.

Turns sizes that a user asks for into a mesh, and what a user has (a 1-D device mesh, a process
group, or nothing) into groups named by use. The only module that asks `torch.distributed` how many
ranks there are.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cp.collectives import GroupTransport, LoneTransport, Transport
from lightning_cp.compat import flatten, num_process_groups, set_timeout

T = TypeVar("T")

DATA_AXIS: Final = "data_parallel"
"""Mesh axis along which ranks hold different rows."""
CONTEXT_AXIS: Final = "context_parallel"
"""Mesh axis along which ranks hold different tokens of the same rows."""
TENSOR_AXIS: Final = "tensor_parallel"
"""Mesh axis along which ranks would share a layer; of size 1 so far."""
SHARD_AXIS: Final = "dp_cp"
"""Data and context as one axis: all ranks over which gradients are averaged, parameters cut."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks lie along each axis.

    Args:
        data: ranks that hold different rows.
        context: ranks that share a row.
    """

    data: int
    context: int


def resolve_sizes(
    context: int | Literal["auto"],
    data: int | Literal["auto"],
    *,
    world_size: int,
    ranks_per_node: int,
) -> Sizes:
    """Turn what was asked for into sizes that use every process.

    ``auto`` for both shares rows inside a node and puts different rows on different nodes.

    Example:
        >>> resolve_sizes("auto", "auto", world_size=16, ranks_per_node=8)
        Sizes(data=2, context=8)
        >>> resolve_sizes(4, "auto", world_size=16, ranks_per_node=8)
        Sizes(data=4, context=4)
    """
    for name, size in (("context_parallel_size", context), ("data_parallel_size", data)):
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r}: give a whole number of at least 1, or 'auto'.")
    if data == "auto":
        context = ranks_per_node if context == "auto" else context
        _check_divides("context_parallel_size", context, world_size)
        return Sizes(world_size // context, context)
    if context == "auto":
        _check_divides("data_parallel_size", data, world_size)
        return Sizes(data, world_size // data)
    if data * context != world_size:
        raise ValueError(
            f"data_parallel_size={data} times context_parallel_size={context} is {data * context}, "
            f"but this job has {world_size} processes. Leave one of the two 'auto', or start "
            f"{data * context} processes."
        )
    return Sizes(data, context)


def _check_divides(name: str, size: int, world_size: int) -> None:
    if world_size % size == 0:
        return
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    raise ValueError(
        f"{name}={size} does not divide the {world_size} processes of this job. Use one of "
        f"{divisors}, or start {size * -(-world_size // size)} processes."
    )


def build_mesh(
    sizes: Sizes, *, device_type: str, timeout: timedelta | None
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh (data, context, tensor), and data x context as one axis.

    Ranks that share a row are neighbours, so that they lie in one node where nodes are numbered in
    blocks.
    """
    mesh = init_device_mesh(
        device_type,
        (sizes.data, sizes.context, 1),
        mesh_dim_names=(DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS),
    )
    shard_mesh = flatten(mesh[DATA_AXIS, CONTEXT_AXIS], SHARD_AXIS)
    if timeout is not None:
        for one in (mesh[DATA_AXIS], mesh[CONTEXT_AXIS], mesh[TENSOR_AXIS], shard_mesh):
            set_timeout(one.get_group(), timeout)
    return mesh, shard_mesh


def gather_objects(mesh: DeviceMesh, mine: T) -> list[T]:
    """Return what each rank of a 1-D mesh has, given one's own; anything that pickles."""
    every = [mine] * mesh.size()
    dist.all_gather_object(every, mine, group=mesh.get_group())
    return every


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


def lone_groups() -> Groups:
    """Return the groups of a process that shares with nobody."""
    return Groups(LoneTransport(), LoneTransport(), LoneTransport())


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
