# SPDX-License-Identifier: Apache-2.0
"""Loaders that select the samples of a data rank, and resume where a checkpoint was written.

They are not torch DataLoaders: Lightning replaces the sampler of those, and samples would be
distributed twice. Inside they use one, for its workers. The next batch is counted when one is
yielded, so batches that workers read ahead are neither lost nor counted.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from recipes.data.packing import IGNORED_LABEL

Batch = dict[str, Tensor]
NO_SAMPLE = -1
"""The index of a sample that only fills up a batch: it has no labels, and no cell."""


class Samples(Protocol):
    """Samples by index, each with the keys of a batch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Batch: ...


def find_data_rank(trainer: Trainer | None) -> tuple[int, int]:
    """Return the data rank of this process and the number of data ranks.

    Context ranks have the same data rank. For a strategy without one, they are those of Lightning's
    sampler: the global rank, for strategies without other axes.
    """
    if trainer is None:
        return 0, 1
    strategy: Any = trainer.strategy
    if hasattr(strategy, "data_parallel_rank"):
        return int(strategy.data_parallel_rank), int(strategy.data_parallel_size)
    sampler = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return int(sampler["rank"]), int(sampler["num_replicas"])


def count_pending(trainer: Trainer | None) -> int:
    """Return the number of batches that Lightning has fetched and not finished.

    0 between two batches. 1 inside a step, where a checkpoint is written after an exception: the
    step will be repeated.
    """
    if trainer is None:
        return 0
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(progress.ready - progress.processed)


def plan_training(
    num_samples: int, batch_size: int, *, rank: int, size: int, seed: int | None, epoch: int
) -> NDArray[np.int64]:
    """Return the samples of each batch of a data rank, [batches, batch_size].

    The order depends on seed and epoch only. A global batch of ``size * batch_size`` samples holds
    the same samples for any number of data ranks; samples that do not fill one are dropped.

    Args:
        num_samples: in the data set.
        batch_size: samples per data rank.
        rank: the data rank.
        size: the number of data ranks.
        seed: None keeps the samples in order.
        epoch: from 0.
    """
    num_batches = num_samples // (size * batch_size)
    order = np.arange(num_samples)
    if seed is not None:
        order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    order = order[: num_batches * size * batch_size]
    return order.reshape(num_batches, size, batch_size)[:, rank]


def plan_evaluation(num_samples: int, batch_size: int, *, rank: int, size: int) -> list[list[int]]:
    """Return the samples of each batch of a data rank: each sample once, equal batch counts.

    Ranks without a sample get `NO_SAMPLE`: ranks that hold shards of the same weights must take the
    same number of steps.
    """
    per_rank = -(-num_samples // size)
    samples = [i if i < num_samples else NO_SAMPLE for i in range(rank, per_rank * size, size)]
    return [samples[start : start + batch_size] for start in range(0, per_rank, batch_size)]


class SampleLoader:
    """A loader of samples by index, whose state is the next batch.

    Lightning's fit loop saves and loads the state of a loader that has one; the data modules do so
    too, since the loop loses it at the end of an epoch.

    Args:
        samples: by index.
        plan: returns the indices of the samples of each batch of an epoch.
        identity: numbers that the order of batches depends on. In the middle of an epoch they must
            be those of the checkpoint.
        epoch_len: batches of an epoch; None for all.
        num_pending: returns the number of yielded batches that are not finished, 0 or 1.
        num_workers: processes that read ahead.
        collate: builds a batch of samples, in the workers.
    """

    def __init__(
        self,
        samples: Samples,
        plan: Callable[[int], Any],
        *,
        identity: Mapping[str, int] | None = None,
        epoch_len: int | None = None,
        num_pending: Callable[[], int] = lambda: 0,
        num_workers: int = 0,
        collate: Callable[[list[Batch]], Batch] = default_collate,
    ) -> None:
        self._samples = _FilledSamples(samples)
        self._plan = plan
        self._length = len(plan(0))
        self._stop = self._length if epoch_len is None else min(epoch_len, self._length)
        self._identity = dict(identity or {})
        self._num_pending = num_pending
        self._num_workers = num_workers
        self._collate = collate
        self._current = self._next = (0, 0)  # epoch, batch
        self._resumed = False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        # Lightning calls iter() without iterating: the state may not change before next().
        epoch, start = self._next
        if (start and not self._resumed) or start >= self._stop:
            epoch, start = epoch + 1, 0
        indices = self._plan(epoch)[start : self._stop]
        loader = DataLoader(
            self._samples,
            batch_sampler=[[int(sample) for sample in batch] for batch in indices],
            num_workers=self._num_workers,
            collate_fn=self._collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, so that torch's global one stays as it is
        )
        for number, batch in enumerate(loader, start):
            self._current = (epoch, number)
            # Lightning does not call next() after the last batch, so the epoch ends here.
            ends = number + 1 == self._stop
            self._next = (epoch + 1, 0) if ends else (epoch, number + 1)
            self._resumed = False
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and index of the first unfinished batch."""
        epoch, batch = self._current if self._num_pending() else self._next
        return {"epoch": epoch, "batch": batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where a checkpoint was written."""
        if state["batch"]:
            for name, value in self._identity.items():
                if state.get(name, value) != value:
                    raise ValueError(
                        f"The checkpoint was written in the middle of an epoch with {name}="
                        f"{state[name]}, but here it is {value}: the rest of the epoch would hold "
                        "other samples. Use the same value (global_batch_size is data ranks x "
                        "batch_size), or resume from a checkpoint at the end of an epoch."
                    )
        self._current = self._next = (state["epoch"], state["batch"])
        self._resumed = True


class _FilledSamples(Dataset[Batch]):
    """Samples, and for `NO_SAMPLE` one without labels."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Batch:
        if index != NO_SAMPLE:
            return self._samples[index]
        sample = dict(self._samples[0])
        sample["labels"] = torch.full_like(sample["labels"], IGNORED_LABEL)
        if "cell" in sample:
            sample["cell"] = torch.full_like(sample["cell"], NO_SAMPLE)
        return sample
