# SPDX-License-Identifier: Apache-2.0
"""Data loaders: workers seeded by data rank, equal numbers of batches on all ranks."""

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from lightning_cp.comm.mesh import DATA_AXIS, Meshes, gather_objects, gloo_group

_PLAIN: Final = "_lightning_cp_plain_class"
"""Attribute of the class of a loader whose end ranks agree on: its class before."""


def seed_workers(dataloader: DataLoader[Any], data_rank: int) -> None:
    """Seed workers by data rank: those of context ranks must draw the same numbers."""
    if dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)


def check_dataloader(dataloader: DataLoader[Any], mesh: DeviceMesh, data_size: int) -> None:
    """Raise on all ranks if they have loaders of different lengths. Collective."""
    length = len(dataloader) if has_length(dataloader) else -1
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
            "parameters='none')."
        )


def has_length(dataloader: DataLoader[Any]) -> bool:
    """Return whether the number of batches is known before they are loaded."""
    return hasattr(dataloader.dataset, "__len__")


class Agreement:
    """Lets all ranks end at the same batch, or fail at it.

    Args:
        group: all ranks, on CPUs: a collective of GPUs would wait for what they still compute.
        may_stop: whether the batches that only some ranks have are left out, with a warning;
            otherwise they are an error.
    """

    def __init__(self, group: dist.ProcessGroup, *, may_stop: bool) -> None:
        self._group, self._may_stop = group, may_stop

    def iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches as long as all ranks have one. Collective."""
        for index in itertools.count():
            batch = error = None
            has_batch = False
            try:
                batch = next(batches)
                has_batch = True
            except StopIteration:
                pass
            except Exception as caught:  # noqa: BLE001  raised below, once all ranks know of it
                error = caught
            if not self._all_have_one(index, has_batch, error):
                return
            yield batch

    def _all_have_one(self, index: int, has_batch: bool, error: Exception | None) -> bool:
        """Return whether all ranks have a batch; False if none has, or the others are left out."""
        counts = torch.tensor([int(has_batch), int(error is not None)])
        dist.all_reduce(counts, group=self._group)
        num_ready, num_failed = counts.tolist()
        if error is not None:
            raise error
        if num_failed:
            raise RuntimeError(
                f"Batch {index} could not be loaded on {num_failed} of {self._group.size()} ranks; "
                "their errors say why."
            )
        if num_ready in (0, self._group.size()):
            return bool(num_ready)
        text = (
            f"Only {num_ready} of {self._group.size()} ranks have a batch {index}: data ranks have "
            "iterable datasets of different lengths."
        )
        if not self._may_stop:
            raise ValueError(
                f"{text} Results without the others' last batches would be wrong. Give all data "
                "ranks the same number of batches, or use data_parallel_size=1."
            )
        rank_zero_warn(f"{text} The epoch ends for all of them, without the last batches of some.")
        return False


def end_together(dataloader: DataLoader[Any], agreement: Agreement) -> Callable[[], None]:
    """Let all ranks end at the same batch of a loader; return what undoes it.

    Its class is replaced by a subclass: Lightning reads attributes of a DataLoader.
    """
    kind = getattr(type(dataloader), _PLAIN, type(dataloader))

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        return agreement.iterate(kind.__iter__(self))

    dataloader.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate, _PLAIN: kind})

    def undo() -> None:
        dataloader.__class__ = kind

    return undo


class Loaders:
    """Prepares the loaders of all runs of a strategy.

    Args:
        timeout: of the group in which ranks on GPUs agree on the end of a loader.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None

    def prepare(
        self, dataloader: DataLoader[Any], meshes: Meshes, *, sharded: bool, training: bool
    ) -> list[Callable[[], None]]:
        """Seed workers; let a loader end on all ranks together, or raise if it cannot. Collective.

        Args:
            dataloader: the loader of this rank, which is changed.
            meshes: the ranks.
            sharded: whether parameters are: then all ranks take the same number of steps.
            training: whether ranks reduce gradients: likewise.

        Returns:
            Functions that restore the loader.
        """
        data = meshes.axes[DATA_AXIS]
        seed_workers(dataloader, data.get_local_rank())
        if data.size() > 1 and sharded:
            check_dataloader(dataloader, meshes.ranks, data.size())
        may_differ = not sharded and not training
        if has_length(dataloader) or meshes.ranks.size() == 1 or may_differ:
            return []
        agreement = Agreement(self._group_of(meshes.ranks), may_stop=training)
        return [end_together(dataloader, agreement)]

    def _group_of(self, ranks: DeviceMesh) -> dist.ProcessGroup:
        """Return all ranks as a group of CPUs, the same for all loaders. Collective."""
        if ranks.device_type == "cpu":
            return ranks.get_group()
        self._group = gloo_group(self._group, self._timeout)
        return self._group
