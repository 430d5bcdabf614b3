# SPDX-License-Identifier: Apache-2.0
"""Placing a model: sharded by its user or by us, or replicated with averaged gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.fsdp.gathering import gather_parts, order_gradients
from lightning_cp.fsdp.replication import average_gradients
from lightning_cp.fsdp.sharding import (
    ParameterSharding,
    check_sharding,
    fill_sharded,
    is_sharded,
    prepare_reduction,
    shard_parameters,
)
from lightning_cp.lightning.mixed_precision import MixedPrecision, check_not_sharded


def place_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    sharding: ParameterSharding,
    shard_modules: Sequence[str] | None,
    mixed_precision: MixedPrecision,
    device: torch.device,
    to_device: Callable[[], None],
) -> Callable[[], None] | None:
    """Shard or replicate a model; return what ends the averaging of replicated parameters.

    Args:
        model: the LightningModule.
        mesh: data x context, one axis.
        sharding: see `shard_parameters`; a model that is sharded already stays as it is.
        shard_modules: see `shard_parameters`.
        mixed_precision: whether FSDP2 casts to bfloat16.
        device: device of this rank.
        to_device: moves the model to it.
    """
    check_not_sharded(mixed_precision, model)
    if is_sharded(model):
        check_sharding(model, mesh)
        fill_sharded(model, device)
    else:
        shard_parameters(
            model,
            mesh,
            sharding=sharding,
            shard_modules=shard_modules,
            compute_dtype=torch.bfloat16 if mixed_precision == "fsdp" else None,
            device=device,
        )
    prepare_reduction(model)
    gather_parts(model)
    to_device()
    order_gradients(model)
    return None if is_sharded(model) else average_gradients(model, mesh)
