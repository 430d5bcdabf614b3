# SPDX-License-Identifier: Apache-2.0
"""Meshes and process groups: which ranks work together, and for what.

Turns requested sizes into a mesh, and a user's 1-D device mesh or process group into `Groups`.
The only module that asks `torch.distributed` for the number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cp.comm.transport import GroupTransport, LoneTransport, Transport, gather
from lightning_cp.config import TENSOR_AXIS, check_size
from lightning_cp.private.groups import (
    delay_exit_for_gloo,
    flatten,
    is_alive,
    num_process_groups,
    set_timeout,
)

T = TypeVar("T")

DATA_AXIS: Final = "data_parallel"
"""Mesh axis along which ranks hold different samples."""
CONTEXT_AXIS: Final = "context_parallel"
"""Mesh axis along which ranks hold different tokens of the same samples."""
SHARD_AXIS: Final = "dp_cp"
"""Data x context as one axis: gradients are averaged and parameters sharded over it."""
HYBRID_AXES: Final = ("replicate", "shard")
"""Data x context as two axes: each index of the first is a copy of the parameters, sharded over the
second."""
ALL_AXIS: Final = "all"
"""All ranks as one axis."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of ranks along each axis.

    Args:
        data: ranks that hold different samples.
        context: ranks that share each sequence.
        ulysses: the size of a Ulysses group, neighbours among the context ranks.
        tensor: ranks that share the weights of each layer.
    """

    data: int
    context: int
    ulysses: int = 1
    tensor: int = 1


ContextSize = int | tuple[int, int] | Literal["auto"]
"""How many ranks share each sequence: a number, or (inside a node, between nodes)."""


def resolve_sizes(
    context: ContextSize,
    data: int | Literal["auto"],
    tensor: int = 1,
    *,
    world_size: int,
    ranks_per_node: int,
) -> Sizes:
    """Turn requested sizes into sizes that use every process.

    ``auto`` for both shares sequences inside a node; different nodes hold different samples.

    Example:
        >>> resolve_sizes("auto", "auto", world_size=16, ranks_per_node=8)
        Sizes(data=2, context=8, ulysses=1, tensor=1)
        >>> resolve_sizes(4, "auto", world_size=16, ranks_per_node=8)
        Sizes(data=4, context=4, ulysses=1, tensor=1)
        >>> resolve_sizes((8, 2), "auto", world_size=32, ranks_per_node=8)
        Sizes(data=2, context=16, ulysses=8, tensor=1)
        >>> resolve_sizes("auto", "auto", 2, world_size=16, ranks_per_node=8)
        Sizes(data=2, context=4, ulysses=1, tensor=2)
    """
    check_size("tensor_parallel_size", tensor)
    if tensor > 1:
        _check_divides("tensor_parallel_size", tensor, world_size)
        sizes = resolve_sizes(
            context,
            data,
            world_size=world_size // tensor,
            ranks_per_node=max(1, ranks_per_node // tensor),
        )
        return replace(sizes, tensor=tensor)
    if isinstance(context, tuple | list):
        inside, between = _pair(context)
        sizes = resolve_sizes(
            inside * between, data, world_size=world_size, ranks_per_node=ranks_per_node
        )
        return replace(sizes, ulysses=inside)
    for name, size in (("context_parallel_size", context), ("data_parallel_size", data)):
        if size != "auto":
            check_size(name, size)
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
            f"context_parallel_size={tuple(sizes)}: give two whole numbers of at least 1, the "
            "number of ranks that share a sequence inside a node, and of such nodes: (8, 4)."
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


class Meshes(NamedTuple):
    """The ranks of a run, as meshes.

    Args:
        axes: (data, context, tensor).
        shard: data x context as one axis.
        ranks: all ranks as one axis.
    """

    axes: DeviceMesh
    shard: DeviceMesh
    ranks: DeviceMesh


def build_mesh(sizes: Sizes, *, device_type: str, timeout: timedelta | None) -> Meshes:
    """Return the mesh (data, context, tensor), and parts of it as one axis.

    Tensor ranks are neighbours, and context ranks next to them, so that they are in one node if
    ranks are numbered node by node.
    """
    mesh = init_device_mesh(
        device_type,
        (sizes.data, sizes.context, sizes.tensor),
        mesh_dim_names=(DATA_AXIS, CONTEXT_AXIS, TENSOR_AXIS),
    )
    shard = flatten(mesh[DATA_AXIS, CONTEXT_AXIS], SHARD_AXIS)
    ranks = shard if sizes.tensor == 1 else flatten(mesh, ALL_AXIS)
    if timeout is not None:
        for axis in (mesh[DATA_AXIS], mesh[CONTEXT_AXIS], mesh[TENSOR_AXIS], shard, ranks):
            set_timeout(axis.get_group(), timeout)
    return Meshes(mesh, shard, ranks)


def resolve_shard_size(
    shard_size: int | Literal["auto"], *, world_size: int, ranks_per_node: int
) -> int:
    """Return the number of ranks over which hybrid sharding shards parameters.

    Example:
        >>> resolve_shard_size("auto", world_size=32, ranks_per_node=8)
        8
    """
    size = ranks_per_node if shard_size == "auto" else shard_size
    check_size("shard_size", size)
    _check_divides("shard_size", size, world_size)
    return size


def build_hybrid_mesh(
    meshes: Meshes, shard_size: int, timeout: timedelta | None
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh (replicate, shard) of hybrid sharding, and the tensor ranks. Collective.

    The ranks that hold the shards of one copy of the parameters are neighbours. FSDP2 shards what
    tensor ranks share only if both meshes are parts of one mesh.

    Args:
        meshes: the ranks of the run.
        shard_size: the number of shards of a copy. If that is all of data x context, there is one
            copy, and parts of ``meshes`` are returned.
        timeout: of the new process groups.
    """
    num_copies = meshes.shard.size() // shard_size
    tensor = meshes.axes[TENSOR_AXIS]
    if num_copies == 1:
        return meshes.shard, tensor
    names = (*HYBRID_AXES, TENSOR_AXIS)
    sizes = (num_copies, shard_size, tensor.size())
    hybrid = init_device_mesh(meshes.axes.device_type, sizes, mesh_dim_names=names)
    if timeout is not None:
        for name in names:
            set_timeout(hybrid[name].get_group(), timeout)
    return hybrid[HYBRID_AXES], hybrid[TENSOR_AXIS]


def gather_objects(mesh: DeviceMesh, value: T) -> list[T]:
    """Return the value of each rank of a 1-D mesh; anything that pickles."""
    values = [value] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank, named by their purpose.

    Args:
        attend: moves keys, values and their gradients; a communicator of its own, so that attention
            never waits for another collective.
        inside: the Ulysses group: neighbouring ranks that exchange tokens for heads. Each of them
            then attends with its peers of other Ulysses groups. A group of one if not used.
        context: all context ranks, for everything else: checks, loss, unshard.
        data: ranks that hold the same positions of other samples; a group of one without such an
            axis.
        compiles: whether kernels can be compiled on the GPUs of all context ranks: they must choose
            the same ones.
        tensor: ranks that hold the same tokens and share the weights of each layer.
    """

    attend: Transport
    inside: Transport
    context: Transport
    data: Transport
    compiles: bool = True
    tensor: Transport = field(default_factory=LoneTransport)

    def sum(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its sum over data x context, and return it."""
        self.context.all_reduce(x)
        self.data.all_reduce(x)
        return x

    def mean(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its mean over data x context, as DDP does with gradients; return it."""
        return self.sum(x).div_(self.context.size * self.data.size)

    def first(self, x: Any) -> Any:
        """Return what the first of the context and tensor ranks has. Collective."""
        for group in (self.context, self.tensor):
            x = group.first(x) if group.size > 1 else x
        return x


def lone_groups() -> Groups:
    """Return the groups of a single process."""
    return Groups(LoneTransport(), LoneTransport(), LoneTransport(), LoneTransport())


# Groups by (ranks, backend, size of a Ulysses group, timeout), to share their communicators. All
# ranks of a context group build them together, so that all of them find them here, or none does.
_built: dict[tuple[object, ...], Groups] = {}


def _is_alive(groups: Groups) -> bool:
    """Return whether no process group of attention has been destroyed."""
    transports = (groups.attend, groups.inside)
    return all(is_alive(x.group) for x in transports if isinstance(x, GroupTransport))


def build_groups(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    data: DeviceMesh | dist.ProcessGroup | None = None,
    tensor: DeviceMesh | dist.ProcessGroup | None = None,
    ulysses_size: int | Literal["all"] | None = None,
    timeout: timedelta | None = None,
    compiles: Callable[[torch.device], bool] | None = None,
) -> Groups:
    """Build the groups of this rank. Every rank of ``mesh`` must call it, in the same order.

    Calls for the same ranks share their communicators until the process groups are destroyed.

    Args:
        mesh: the context ranks; of two axes, the second is the Ulysses group.
        data: ranks that hold other samples.
        tensor: ranks that hold the same tokens.
        ulysses_size: the size of a Ulysses group, or ``all``; None: the mesh's second axis, or 1.
        timeout: of the groups that attention uses.
        compiles: tells whether kernels can be compiled on a GPU.
    """
    one_axis, num_inside = neighbours(mesh, ulysses_size)
    context_group = group_of(one_axis, "mesh")
    data_group = group_of(data, "data")
    data_ranks = LoneTransport() if data_group is None else GroupTransport(data_group)
    tensor_group = group_of(tensor, "tensor")
    tensor_ranks = LoneTransport() if tensor_group is None else GroupTransport(tensor_group)
    context = LoneTransport() if context_group is None else GroupTransport(context_group)
    num_inside = num_inside or context.size
    if num_inside < 1 or context.size % num_inside:
        raise ValueError(
            f"Attention(ulysses_size={num_inside}) does not divide the {context.size} ranks that "
            f"share a sequence. Use one of {_divisors(context.size)}."
        )
    if context_group is None or context.size == 1:
        return Groups(LoneTransport(), LoneTransport(), context, data_ranks, tensor=tensor_ranks)
    ranks = tuple(dist.get_process_group_ranks(context_group))
    key = ranks, dist.get_backend(context_group), num_inside, timeout
    for dead in [built for built, groups in _built.items() if not _is_alive(groups)]:
        del _built[dead]
    if key not in _built:
        _check_group_counts(context)
        start = context.rank - context.rank % num_inside
        inside = ranks[start : start + num_inside]
        between = ranks[context.rank % num_inside :: num_inside]
        attend, swap = (_new_group(part, context_group, timeout) for part in (between, inside))
        _built[key] = Groups(attend, swap, context, data_ranks, _all_compile(context, compiles))
    return replace(_built[key], context=context, data=data_ranks, tensor=tensor_ranks)


def _new_group(
    ranks: Sequence[int], like: dist.ProcessGroup, timeout: timedelta | None
) -> GroupTransport | LoneTransport:
    """Make a communicator that only attention uses."""
    if len(ranks) == 1:
        return LoneTransport()
    group = dist.new_group(
        list(ranks), timeout=timeout, backend=dist.get_backend(like), use_local_synchronization=True
    )
    transport = GroupTransport(group)
    # The first collective of an NCCL group builds the communicator, which all of its ranks must do
    # at once. In attention only those that have something to send would take part.
    dist.all_reduce(torch.ones(1, device=transport.device), group=group)
    return transport


def _all_compile(context: Transport, compiles: Callable[[torch.device], bool] | None) -> bool:
    """Return whether all GPUs compile kernels; a rank that chose another kernel would hang."""
    device = context.device
    if compiles is None or device.type != "cuda":
        return True
    local = torch.tensor([int(compiles(device))], dtype=torch.int64, device=device)
    return bool(gather(local, context).all())


def neighbours(
    mesh: DeviceMesh | dist.ProcessGroup | None, ulysses_size: int | Literal["all"] | None
) -> tuple[DeviceMesh | dist.ProcessGroup | None, int]:
    """Return the ranks as one axis, and the size of a Ulysses group; 0 is all ranks."""
    if not isinstance(mesh, DeviceMesh) or not _has_two_context_axes(mesh):
        return mesh, 0 if ulysses_size == "all" else 1 if ulysses_size is None else ulysses_size
    inside = int(mesh.shape[1])
    if ulysses_size not in (None, inside):
        raise ValueError(
            f"The second axis of the mesh {mesh.mesh_dim_names} is a Ulysses group of {inside} "
            f"ranks, but {ulysses_size} are requested. Give one axis, or choose "
            "algorithm='gather' or 'ring' for the first axis."
        )
    return flatten(mesh, "_".join(mesh.mesh_dim_names or ())), inside


def _has_two_context_axes(mesh: DeviceMesh) -> bool:
    """Return whether both axes of a mesh are context axes by their names; else one is for data."""
    names = mesh.mesh_dim_names or ()
    return len(names) == 2 and all("context" in name or "cp" in name for name in names)


def _check_group_counts(context: Transport) -> None:
    """Raise if ranks would name a new group differently, and wait for each other forever."""
    local = torch.tensor(num_process_groups(), device=context.device)
    counts = gather(local, context).tolist()
    if len(set(counts)) > 1:
        raise RuntimeError(
            "The ranks of the context-parallel group have made different numbers of process groups "
            f"({counts}), so that they cannot make one together. Create ContextParallel before "
            "groups that only some ranks make, or call dist.new_group(...) on all ranks."
        )


def gloo_group(former: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a gloo group of all ranks: a former one, or a new one if there is none. Collective."""
    if former is not None and is_alive(former):
        return former
    delay_exit_for_gloo()
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def group_of(mesh: DeviceMesh | dist.ProcessGroup | None, name: str) -> dist.ProcessGroup | None:
    """Return the process group of the argument ``name``."""
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"ContextParallel({name}=...) got a {type(mesh).__name__}. Give a 1-D DeviceMesh such "
            f'as device_mesh["{CONTEXT_AXIS}"], or a ProcessGroup.'
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"ContextParallel({name}=...) got a mesh with the axes {mesh.mesh_dim_names}, but "
            f'needs exactly one. Choose it by name: device_mesh["{CONTEXT_AXIS}"]. (Two context '
            "axes, between and inside nodes, have 'context' or 'cp' in their names.)"
        )
    return mesh.get_group()
