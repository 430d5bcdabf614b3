# SPDX-License-Identifier: Apache-2.0
"""Checks of how a job is launched: devices, precision, placement of ranks on nodes."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.comm.mesh import Sizes, gather_objects
from lightning_cp.config import check_size

MIN_HEARTBEAT_TIMEOUT: Final = timedelta(seconds=5)
PRECISIONS: Final = ("32-true", "bf16-mixed", "bf16-true", "16-true")


def device_of(local_rank: int, devices: Sequence[torch.device]) -> torch.device:
    """Return the device of a process of a node; raise if it has none."""
    if local_rank >= len(devices):
        raise ValueError(
            f"Process {local_rank} of this node has no device: the launcher started more processes "
            f"than Trainer(devices={len(devices)}) has devices. Set devices to the number of "
            "processes per node (torchrun --nproc-per-node)."
        )
    return devices[local_rank]


def check_world_size(world_size: int, num_devices: int, num_nodes: int) -> None:
    """Raise if a launcher has started other processes than the Trainer was told."""
    expected = num_nodes * num_devices
    if world_size != expected:
        raise ValueError(
            f"The launcher started {world_size} processes, but Trainer(devices={num_devices}, "
            f"num_nodes={num_nodes}) requires {expected}. Start {expected} processes, or change "
            "devices and num_nodes."
        )


def check_precision(precision: object, strategy: str) -> None:
    """Raise for a precision that the strategy does not support."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"Trainer(precision={precision!r}) is not supported by {strategy}. Use one of "
            f"{', '.join(PRECISIONS)}."
        )


def check_tensor_parallel_size(size: int | Literal["auto"], sharding: str) -> int:
    """Return the number of tensor ranks; raise if parameters would be replicated."""
    if size == "auto":
        return 1
    check_size("tensor_parallel_size", size)
    if size > 1 and sharding == "none":
        raise ValueError(
            f"tensor_parallel_size={size} needs FSDP2, which reduces gradients over data x context "
            "only, but parameters='none' replicates them. Use 'full', or "
            "Parameters(sharding='hybrid', shard_size=1)."
        )
    return size


def check_heartbeat_timeout(limit: timedelta) -> None:
    """Raise for a limit that a busy machine exceeds without a fault."""
    if not isinstance(limit, timedelta):
        raise TypeError(
            f"heartbeat_timeout={limit!r}: give a datetime.timedelta(seconds=...), "
            f"{MIN_HEARTBEAT_TIMEOUT} or more."
        )
    if limit < MIN_HEARTBEAT_TIMEOUT:
        raise ValueError(
            f"heartbeat_timeout={limit} is too short: a rank on a busy machine would be taken for "
            f"dead. Use at least {MIN_HEARTBEAT_TIMEOUT}."
        )


def warn_if_spread(sizes: Sizes, mesh: DeviceMesh, *, node_rank: int, ranks_per_node: int) -> None:
    """Warn if context ranks run on several nodes although one node could hold them. Collective.

    Args:
        sizes: the sizes of the axes.
        mesh: all ranks, as one axis.
        node_rank: the node of this rank.
        ranks_per_node: the number of ranks on each node.
    """
    hosts = gather_objects(mesh, f"{socket.gethostname()} (node {node_rank})")
    size = (sizes.ulysses if sizes.ulysses > 1 else sizes.context) * sizes.tensor
    groups = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    spread = [sorted(set(group)) for group in groups if len(set(group)) > 1]
    if not spread or size > ranks_per_node:
        return
    fix = (
        "Number ranks in blocks, node by node (SLURM: --distribution=block)."
        if ranks_per_node % size == 0
        else f"Use a context_parallel_size that divides the {ranks_per_node} devices of a node."
    )
    rank_zero_warn(
        f"In {len(spread)} of {len(groups)} groups, the {size} context ranks run on several hosts: "
        f"{', '.join(spread[0])}. Attention then communicates over the network. {fix}"
    )
