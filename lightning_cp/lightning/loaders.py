# SPDX-License-Identifier: Apache-2.0
"""Data loaders: workers seeded by data rank, equal numbers of batches on all ranks."""

from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from lightning_cp.comm.mesh import gather_objects


def seed_workers(dataloader: DataLoader[Any], data_rank: int) -> None:
    """Seed workers by data rank: those of context ranks must draw the same numbers."""
    if dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)


def check_dataloader(dataloader: DataLoader[Any], mesh: DeviceMesh, data_size: int) -> None:
    """Raise on all ranks if they have loaders of different lengths. Collective."""
    length = len(dataloader) if hasattr(dataloader.dataset, "__len__") else -1
    batch_size = getattr(dataloader.batch_sampler, "batch_size", dataloader.batch_size)
    check_num_batches(length, mesh, product=f" = {data_size} * {batch_size}")


def check_num_batches(num_batches: float, mesh: DeviceMesh, *, product: str = "") -> None:
    """Raise on all ranks if their numbers of batches differ. Collective.

    Args:
        num_batches: the number of this rank.
        mesh: all ranks, as one axis.
        product: the numbers of the rule, for the error: `` = 2 * 4``.
    """
    numbers = sorted(set(gather_objects(mesh, num_batches)))
    if len(numbers) > 1:
        raise ValueError(
            f"The ranks have loaders of different lengths ({numbers} batches), but must take the "
            "same number of steps, since they hold shards of the same parameters or reduce "
            "gradients together. Make the number of samples a multiple of data_parallel_size * "
            f"batch_size{product}, or use data_parallel_size=1 (for evaluation also "
            "parameter_sharding='none')."
        )
