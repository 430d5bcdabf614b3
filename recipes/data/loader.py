# SPDX-License-Identifier: Apache-2.0
"""Loaders that each data rank reads for itself, and that go on where a checkpoint was written.

They are no torch DataLoaders, on purpose: Lightning puts its own sampler into those, and rows would
be split twice. Inside they use one, for its workers. Which batch comes next is counted when it is
handed out, so what workers have prefetched is neither lost nor counted.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_cp.step import IGNORED_LABEL

Batch = dict[str, Tensor]
NO_ROW = -1
"""The number of a row that only fills a batch up: it has no labels, and belongs to no cell."""


class Rows(Protocol):
    """Rows by their number: tensors of one row, under the keys of a batch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Batch: ...


def find_data_rank(trainer: Trainer | None) -> tuple[int, int]:
    """Return which rows are this process's: its place among those that read different ones.

    Ranks that share rows have the same place. A strategy that does not tell is asked for what
    Lightning's own sampler would get: the global rank, for strategies without other axes.
    """
    if trainer is None:
        return 0, 1
    strategy: Any = trainer.strategy
    if hasattr(strategy, "data_parallel_rank"):
        return int(strategy.data_parallel_rank), int(strategy.data_parallel_size)
    told = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return int(told["rank"]), int(told["num_replicas"])


def count_pending(trainer: Trainer | None) -> int:
    """Return how many batches Lightning has taken and not finished yet.

    None between two batches. One inside a step, where a checkpoint is written after an exception:
    the step will be repeated. And one that is fetched ahead where a loader has no length.
    """
    if trainer is None:
        return 0
    loop: Any = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress.current
    ahead = getattr(loop._data_fetcher, "batches", [])
    return int(progress.ready - progress.processed) + len(ahead)


def plan_training(
    num_rows: int, batch_size: int, *, rank: int, size: int, seed: int | None, epoch: int
) -> NDArray[np.int64]:
    """Return the rows of each batch of a data rank, [batches, batch_size].

    The order depends on seed and epoch alone. A global batch of ``size * batch_size`` rows holds
    the same rows however many ranks share it; what does not fill one is left out of this epoch.

    Args:
        num_rows: of the whole data set.
        batch_size: rows per data rank.
        rank: the data rank.
        size: how many there are.
        seed: None keeps the rows in order.
        epoch: which one.
    """
    num_batches = num_rows // (size * batch_size)
    order = np.arange(num_rows)
    if seed is not None:
        order = np.random.default_rng([seed, epoch]).permutation(num_rows)
    kept = order[: num_batches * size * batch_size]
    return kept.reshape(num_batches, size, batch_size)[:, rank]


def plan_evaluation(num_rows: int, batch_size: int, *, rank: int, size: int) -> list[list[int]]:
    """Return the rows of each batch of a data rank: every row once, as many batches on all ranks.

    Ranks that are short of a row get `NO_ROW`: those that hold parts of each other's weights must
    take the same number of steps.
    """
    per_rank = -(-num_rows // size)
    mine = [i if i < num_rows else NO_ROW for i in range(rank, per_rank * size, size)]
    return [mine[start : start + batch_size] for start in range(0, per_rank, batch_size)]


class ResumableLoader:
    """Hands out batches epoch by epoch, and says in a checkpoint which one comes next.

    Lightning's fit loop saves and loads the state of a loader that has one; the data modules do so
    too, since the loop forgets it where an epoch has just ended.

    Args:
        identity: numbers that the order of batches depends on. In the middle of an epoch they must
            be those of the checkpoint.
        epoch_len: how many batches an epoch takes; None: as many as there are.
        num_pending: says how many of the batches handed out are not finished yet.
    """

    def __init__(
        self,
        *,
        identity: Mapping[str, int],
        epoch_len: int | None,
        num_pending: Callable[[], int] = lambda: 0,
    ) -> None:
        self._identity = dict(identity)
        self._epoch_len = epoch_len
        self._num_pending = num_pending
        self._next = (0, 0)  # epoch, batch
        self._handed_out: deque[tuple[int, int]] = deque(maxlen=8)
        self._resumed = False

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        # Lightning calls iter() more often than it iterates: nothing may happen before next().
        epoch, batch = self._next
        if (batch and not self._resumed) or batch == self._epoch_len:
            epoch, batch = epoch + 1, 0
        for content in self._batches(epoch, batch):
            self._handed_out.append((epoch, batch))
            batch += 1
            # Lightning does not ask on after the last batch, so an epoch ends with that one.
            ended = batch == self._epoch_len
            self._next = (epoch + 1, 0) if ended else (epoch, batch)
            self._resumed = False
            yield content
            if ended:
                return
        self._next = (epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """Return where the first batch lies that is not finished."""
        pending = min(self._num_pending(), len(self._handed_out))
        epoch, batch = self._handed_out[-pending] if pending else self._next
        return {"epoch": epoch, "batch": batch, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a checkpoint was written."""
        if state["batch"]:
            for name, mine in self._identity.items():
                if state.get(name, mine) != mine:
                    raise ValueError(
                        f"The checkpoint was written in the middle of an epoch with {name}="
                        f"{state[name]}, but here it is {mine}: the rest of the epoch would be "
                        "other rows. Make them agree (global_batch_size is data ranks x "
                        "batch_size), or resume from a checkpoint at the end of an epoch."
                    )
        self._next = (state["epoch"], state["batch"])
        self._handed_out.clear()
        self._resumed = True


class RowLoader(ResumableLoader):
    """Batches of rows that can be read in any order.

    Args:
        rows: what is read.
        plan: the numbers of the rows of each batch, for an epoch.
        identity: as in `ResumableLoader`.
        epoch_len: as in `ResumableLoader`.
        num_pending: as in `ResumableLoader`.
        num_workers: processes that read ahead.
    """

    def __init__(
        self,
        rows: Rows,
        plan: Callable[[int], Any],
        *,
        identity: Mapping[str, int] | None = None,
        epoch_len: int | None = None,
        num_pending: Callable[[], int] = lambda: 0,
        num_workers: int = 0,
    ) -> None:
        self._length = len(plan(0))
        stop = self._length if epoch_len is None else min(epoch_len, self._length)
        super().__init__(identity=identity or {}, epoch_len=stop, num_pending=num_pending)
        self._rows = _FilledRows(rows)
        self._plan = plan
        self._num_workers = num_workers

    def __len__(self) -> int:
        return self._length

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        batches = [[int(row) for row in batch] for batch in self._plan(epoch)[start:]]
        return iter(_torch_loader(self._rows, self._num_workers, batch_sampler=batches))


class StreamLoader(ResumableLoader):
    """Batches of rows that come one after the other.

    Every data rank reads the whole stream and keeps its rows of each global batch. That costs the
    others' tokenising, and gives what cannot be had otherwise: the rows of any number of ranks are
    the same, and all ranks get equally many batches, though nobody knows how many there are. To
    resume, what was seen is read again and dropped.

    Args:
        stream: starts the stream from its beginning.
        batch_size: rows per data rank.
        rank: the data rank.
        size: how many there are.
        identity: as in `ResumableLoader`.
        epoch_len: as in `ResumableLoader`.
        num_pending: as in `ResumableLoader`.
        num_workers: 0, or anything else for one process that reads ahead.
    """

    def __init__(
        self,
        stream: Callable[[], Iterable[Mapping[str, Any]]],
        batch_size: int,
        *,
        rank: int,
        size: int,
        identity: Mapping[str, int] | None = None,
        epoch_len: int | None = None,
        num_pending: Callable[[], int] = lambda: 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(identity=identity or {}, epoch_len=epoch_len, num_pending=num_pending)
        self._stream, self._batch_size, self._rank, self._size = stream, batch_size, rank, size
        self._num_workers = min(num_workers, 1)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        part = _StreamPart(self._stream, self._batch_size, self._rank, self._size, start)
        return iter(_torch_loader(part, self._num_workers, batch_size=None))


def _torch_loader(data: Dataset[Any], num_workers: int, **options: Any) -> DataLoader[Any]:
    # With a generator of its own the loader leaves torch's global one alone, and so does resuming.
    return DataLoader(
        data,
        num_workers=num_workers,
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
        **options,
    )


class _FilledRows(Dataset[Batch]):
    """Rows, and a row without labels for those that only fill up."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, index: int) -> Batch:
        if index != NO_ROW:
            return self._rows[index]
        row = dict(self._rows[0])
        row["labels"] = torch.full_like(row["labels"], IGNORED_LABEL)
        if "cell" in row:
            row["cell"] = torch.full_like(row["cell"], NO_ROW)
        return row


class _StreamPart(IterableDataset[Batch]):
    """What one data rank keeps of a stream, from a batch on."""

    def __init__(
        self,
        stream: Callable[[], Iterable[Mapping[str, Any]]],
        batch_size: int,
        rank: int,
        size: int,
        start: int,
    ) -> None:
        self._stream, self._batch_size, self._start = stream, batch_size, start
        self._rank, self._size = rank, size

    def __iter__(self) -> Iterator[Batch]:
        rows = iter(self._stream())
        global_size = self._batch_size * self._size
        for number in count():
            group = list(islice(rows, global_size))
            if len(group) < global_size:
                if not number:
                    raise ValueError(
                        f"The stream gave {len(group)} rows, but a global batch takes "
                        f"{global_size}: {self._size} data ranks x batch_size={self._batch_size}. "
                        "Use a smaller batch_size or seq_len, or more text."
                    )
                return
            if number >= self._start:
                own = group[self._rank * self._batch_size :][: self._batch_size]
                yield default_collate([as_tensors(row) for row in own])


def as_tensors(row: Mapping[str, Any]) -> Batch:
    """Return a row of arrays as int64 tensors."""
    return {key: torch.as_tensor(np.asarray(value, np.int64)) for key, value in row.items()}
