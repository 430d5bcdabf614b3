# SPDX-License-Identifier: Apache-2.0
"""Placing a model: sharded by its user or by us, or replicated with averaged gradients."""

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.comm.mesh import gather_objects
from lightning_cp.comm.transport import Transport
from lightning_cp.config import Parameters, Sharding
from lightning_cp.fsdp.frozen import FrozenWeights
from lightning_cp.fsdp.gathering import gather_parts, order_gradients
from lightning_cp.fsdp.replication import average_gradients
from lightning_cp.fsdp.sharding import (
    broadcast_replicated,
    check_sharding,
    fill_sharded,
    has_copies,
    is_sharded,
    move_unsharded,
    prepare_reduction,
    shard_parameters,
)
from lightning_cp.lightning.model.mixed_precision import check_not_sharded
from lightning_cp.lightning.private import set_device

HYBRID_SHARE: Final = 0.25
"""Share of a device that weights, gradients and moments may take for ``auto`` to be ``hybrid``.

Long sequences need the rest, and hide the all-gathers of ``full`` behind their computation."""


def choose_sharding(
    model: nn.Module, ranks: DeviceMesh, *, ranks_per_node: int, device_bytes: int | None
) -> Sharding:
    """Return what ``parameters="auto"`` is, the same on all ranks. Collective.

    ``hybrid`` on several nodes, if weights, gradients and the moments of AdamW, sharded inside a
    node, take at most `HYBRID_SHARE` of the smallest device. Otherwise ``full``: also on CPUs.

    Args:
        model: the LightningModule.
        ranks: data x context, one axis.
        ranks_per_node: the number of ranks on each node.
        device_bytes: memory of the device of this rank; None for a CPU.
    """
    if is_sharded(model):  # by an earlier run, or by configure_model()
        return "hybrid" if has_copies(model) else "full"
    if ranks_per_node == 1 or ranks.size() == ranks_per_node:
        return "full"
    devices = gather_objects(ranks, device_bytes)
    if None in devices:
        return "full"
    held = sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())
    is_small = held / ranks_per_node <= HYBRID_SHARE * min(x for x in devices if x is not None)
    return "hybrid" if is_small else "full"


def share_random_state(ranks: Transport, device: torch.device) -> None:
    """Let tensor ranks draw the same random numbers: dropout of what each of them has in full.

    Args:
        ranks: the tensor ranks.
        device: device of this rank.
    """
    if ranks.size == 1:
        return
    is_cuda = device.type == "cuda"
    state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if is_cuda else None
    on_cpu, on_cuda = ranks.first(state)
    torch.set_rng_state(on_cpu)
    if on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda, device)


_OFFLOADED: Final = "_lightning_cp_parameter_offload"
"""Attribute of a module that a run has sharded with its shards in host memory."""


def place_model(
    model: nn.Module,
    mesh: DeviceMesh,
    parameters: Parameters,
    *,
    sharding: Sharding,
    tensor: DeviceMesh,
    device: torch.device,
    to_device: Callable[[], None],
) -> Callable[[], None]:
    """Shard or replicate a model; return what ends the averaging of replicated parameters.

    Args:
        model: the LightningModule.
        mesh: data x context, one axis or two; see `shard_parameters`.
        parameters: of the configuration.
        sharding: what is done, see `shard_parameters`; a model that is sharded already stays as it
            is.
        tensor: the ranks that share the weights of each layer.
        device: device of this rank.
        to_device: moves the model to it.
    """
    check_not_sharded(parameters.mixed_precision, model)
    if parameters.offload and is_sharded(model) and _OFFLOADED not in model.__dict__:
        raise ValueError(
            "parameters=Parameters(offload=True) is for modules that the strategy shards, but "
            "configure_model() has sharded the model. Shard nothing there, or leave offload out."
        )
    if is_sharded(model):
        check_sharding(model, mesh)
        fill_sharded(model, device)
        broadcast_replicated(model, device)
        frozen = FrozenWeights()
    else:
        frozen = shard_parameters(
            model,
            mesh,
            sharding=sharding,
            tensor=tensor,
            shard_modules=parameters.shard_modules,
            compute_dtype=torch.bfloat16 if parameters.mixed_precision == "fsdp" else None,
            offload=parameters.offload,
            device=device,
        )
        if parameters.offload:
            model.__dict__[_OFFLOADED] = True
    prepare_reduction(model)
    gather_parts(model)
    to_device()
    frozen.check(model, device)
    order_gradients(model)
    return average_gradients(model, mesh)


def use_offloaded(model: nn.Module, device: torch.device) -> None:
    """Move what is not sharded to the device of this rank; shards stay in host memory."""
    set_device(model, device)
    move_unsharded(model, device)
