# SPDX-License-Identifier: Apache-2.0
"""Which ranks work together, and for what.

Turns sizes that a user asks for into a mesh, and what a user has (a 1-D device mesh, a process
group, or nothing) into groups named by use. The only module that asks `torch.distributed` how many
ranks there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cp.comm.transport import GroupTransport, LoneTransport, Transport
from lightning_cp.torch_private import flatten, num_process_groups, set_timeout

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
        ulysses: how many of those, neighbours, swap tokens for heads.
    """

    data: int
    context: int
    ulysses: int = 1


ContextSize = int | tuple[int, int] | Literal["auto"]
"""How many ranks share a row: a number, or (inside a node, between nodes)."""


def resolve_sizes(
    context: ContextSize,
    data: int | Literal["auto"],
    *,
    world_size: int,
    ranks_per_node: int,
) -> Sizes:
    """Turn what was asked for into sizes that use every process.

    ``auto`` for both shares rows inside a node and puts different rows on different nodes.

    Example:
        >>> resolve_sizes("auto", "auto", world_size=16, ranks_per_node=8)
        Sizes(data=2, context=8, ulysses=1)
        >>> resolve_sizes(4, "auto", world_size=16, ranks_per_node=8)
        Sizes(data=4, context=4, ulysses=1)
        >>> resolve_sizes((8, 2), "auto", world_size=32, ranks_per_node=8)
        Sizes(data=2, context=16, ulysses=8)
    """
    if isinstance(context, tuple | list):
        inside, between = _pair(context)
        sizes = resolve_sizes(
            inside * between, data, world_size=world_size, ranks_per_node=ranks_per_node
        )
        return replace(sizes, ulysses=inside)
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


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    """Check the two sizes of a context-parallel mesh."""
    good = len(sizes) == 2 and all(isinstance(n, int) and n >= 1 for n in sizes)
    if not good:
        raise ValueError(
            f"context_parallel_size={tuple(sizes)}: give two whole numbers of at least 1, how "
            "many ranks share a row inside a node, and how many nodes share it: (8, 4)."
        )
    return sizes[0], sizes[1]


def _check_divides(name: str, size: int, world_size: int) -> None:
    if world_size % size == 0:
        return
    raise ValueError(
        f"{name}={size} does not divide the {world_size} processes of this job. Use one of "
        f"{_divisors(world_size)}, or start {size * -(-world_size // size)} processes."
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


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
        inside: neighbours that first swap tokens for heads (Ulysses); each of them then attends
            with its peers of other neighbourhoods. Alone where nobody does.
        context: all ranks that share rows, for everything else that they do together: checks, loss,
            unshard.
        data: ranks that hold the same tokens of other rows; alone where there is no such axis.
    """

    attend: Transport
    inside: Transport
    context: Transport
    data: Transport


def lone_groups() -> Groups:
    """Return the groups of a process that shares with nobody."""
    return Groups(LoneTransport(), LoneTransport(), LoneTransport(), LoneTransport())


def build_groups(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    data: DeviceMesh | dist.ProcessGroup | None = None,
    ulysses_size: int | Literal["all"] | None = None,
    timeout: timedelta | None = None,
) -> Groups:
    """Build the groups of this rank. Every rank of ``mesh`` must call it, in the same order.

    Args:
        mesh: the ranks that share rows; of two axes the second has the neighbours.
        data: ranks that hold other rows.
        ulysses_size: how many neighbours swap tokens for heads, or ``all``; None: as the mesh says,
            or 1.
        timeout: of the groups that attention uses.
    """
    given, num_inside = neighbours(mesh, ulysses_size)
    context_group = group_of(given, "mesh")
    data_group = group_of(data, "data")
    beside = LoneTransport() if data_group is None else GroupTransport(data_group)
    context = LoneTransport() if context_group is None else GroupTransport(context_group)
    num_inside = num_inside or context.size
    if num_inside < 1 or context.size % num_inside:
        raise ValueError(
            f"ulysses_size={num_inside} does not divide the {context.size} ranks that share a row. "
            f"Use one of {_divisors(context.size)}."
        )
    if context_group is None or context.size == 1:
        return Groups(LoneTransport(), LoneTransport(), context, beside)
    _check_group_counts(context)
    ranks = dist.get_process_group_ranks(context_group)
    start = context.rank - context.rank % num_inside
    inside = ranks[start : start + num_inside]
    between = ranks[context.rank % num_inside :: num_inside]
    attend, swap = (_own_group(part, context_group, timeout) for part in (between, inside))
    return Groups(attend, swap, context, beside)


def _own_group(
    ranks: list[int], like: dist.ProcessGroup, timeout: timedelta | None
) -> GroupTransport | LoneTransport:
    """Make a communicator that only attention uses."""
    if len(ranks) == 1:
        return LoneTransport()
    group = dist.new_group(
        ranks, timeout=timeout, backend=dist.get_backend(like), use_local_synchronization=True
    )
    transport = GroupTransport(group)
    # The first collective of an NCCL group builds the communicator, which all of its ranks must do
    # at once. In attention only those that have something to send would take part.
    dist.all_reduce(torch.ones(1, device=transport.device), group=group)
    return transport


def neighbours(
    mesh: DeviceMesh | dist.ProcessGroup | None, ulysses_size: int | Literal["all"] | None
) -> tuple[DeviceMesh | dist.ProcessGroup | None, int]:
    """Return the ranks as one axis, and how many neighbours swap tokens for heads; 0 is all."""
    if not isinstance(mesh, DeviceMesh) or not _shares_rows_twice(mesh):
        return mesh, 0 if ulysses_size == "all" else 1 if ulysses_size is None else ulysses_size
    inside = int(mesh.shape[1])
    if ulysses_size not in (None, inside):
        raise ValueError(
            f"The mesh {mesh.mesh_dim_names} says that {inside} ranks swap tokens for heads: those "
            f"along its second axis. But {ulysses_size} are asked for. Give one axis, or choose "
            "algorithm='gather' or 'ring' for what keys do along the first."
        )
    return flatten(mesh, "_".join(mesh.mesh_dim_names or ())), inside


def _shares_rows_twice(mesh: DeviceMesh) -> bool:
    """Say whether both axes of a mesh are for sharing rows; given by mistake, one is for data."""
    names = mesh.mesh_dim_names or ()
    return len(names) == 2 and all("context" in name or "cp" in name for name in names)


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


def group_of(given: DeviceMesh | dist.ProcessGroup | None, name: str) -> dist.ProcessGroup | None:
    """Return the process group of what a user gives as argument ``name``."""
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
            f'needs exactly one. Choose it by name: device_mesh["{CONTEXT_AXIS}"]. (Two axes of '
            "ranks that share rows, between and inside nodes, have 'context' or 'cp' in their "
            "names.)"
        )
    return given.get_group()
