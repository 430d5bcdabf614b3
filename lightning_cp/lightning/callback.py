# SPDX-License-Identifier: Apache-2.0
"""The callback that logs speed, memory, balance and perplexity, and verifies the first batch.

Reads public properties of the strategy; computes nothing that training uses.
"""

import logging
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_cp.patch import Patch

_logger = logging.getLogger("lightning_cp")


class ContextParallelCallback(Callback):
    """Logs speed, memory and balance of a run under `ContextParallelStrategy`.

    In the progress bar and the logger: ``tokens_per_second`` (of the job; a sequence that several
    ranks share counts once), ``tokens_per_second_per_device``, ``peak_memory_gb`` (the maximum over
    ranks) and ``work_imbalance`` (visible pairs of the busiest rank over the mean; 1.0 is ideal).
    Validation adds ``val_perplexity``.

    Args:
        verify_first_batch: before training, run the first batch under context parallelism and on
            full sequences, compare loss and every gradient, and raise if they differ.
        verify_max_len: the length to which sequences are truncated for it, so that one rank can
            hold them.
        every_n_steps: the interval in steps between two measurements.
        position_edges: also log the validation loss by position in the sequence: ``[1024, 4096]``
            defines three buckets.

    Example:
        >>> callback = ContextParallelCallback(verify_first_batch=True, position_edges=[1024, 8192])
    """

    def __init__(
        self,
        verify_first_batch: bool = False,
        verify_max_len: int = 2048,
        every_n_steps: int = 10,
        position_edges: list[int] | None = None,
    ) -> None:
        if verify_max_len < 1 or every_n_steps < 1:
            raise ValueError(
                f"verify_max_len={verify_max_len} and every_n_steps={every_n_steps}: both must be "
                "at least 1."
            )
        edges = list(position_edges or [])
        if edges != sorted(set(edges)) or any(edge < 1 for edge in edges):
            raise ValueError(
                f"position_edges={edges} must be positive and strictly increasing: [1024, 4096] "
                "defines the buckets 0-1024, 1024-4096 and 4096-."
            )
        self.verify_first_batch = verify_first_batch
        self.verify_max_len = verify_max_len
        self.every_n_steps = every_n_steps
        self.position_edges = tuple(edges)
        self._verified = False
        self._num_tokens = 0
        self._start_time = 0.0
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._by_position: Tensor | None = None
        self._recording: Patch | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise for other strategies."""
        if not hasattr(trainer.strategy, "context_parallel"):
            raise ValueError(
                f"ContextParallelCallback requires ContextParallelStrategy, but this Trainer has a "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy="
                "ContextParallelStrategy(...)), or remove the callback."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the mesh and the options in one line."""
        _log(_strategy(trainer).describe())

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Verify the first batch before the first step; start the clock."""
        if self.verify_first_batch and not self._verified:
            report = _strategy(trainer).verify(batch, max_len=self.verify_max_len)
            _log(f"verified: {report.summary()}")
            self._verified = True
        if self._start_time == 0.0:
            self._start_time = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count tokens; every ``every_n_steps`` steps, log measurements."""
        strategy = _strategy(trainer)
        self._num_tokens += strategy.last_step.num_tokens
        if (batch_idx + 1) % self.every_n_steps:
            return
        logger = bool(trainer.loggers)
        for name, value in self._measure(strategy).items():
            pl_module.log(name, value, prog_bar=True, logger=logger, on_step=True, on_epoch=False)
        self._num_tokens, self._start_time = 0, time.perf_counter()

    def _measure(self, strategy: Any) -> dict[str, float]:
        device = strategy.root_device
        count = torch.tensor(float(self._num_tokens), dtype=torch.float64, device=device)
        # All context ranks have counted the same sequences.
        num_tokens = float(strategy.reduce(count, reduce_op="sum")) / strategy.context_parallel_size
        own = [time.perf_counter() - self._start_time, _peak_memory(device)]
        largest = torch.tensor(own, dtype=torch.float64, device=device).clamp(min=1e-9)
        seconds, memory = strategy.reduce(largest, reduce_op="max").tolist()
        measurements = {
            "tokens_per_second": num_tokens / seconds,
            "tokens_per_second_per_device": num_tokens / seconds / strategy.world_size,
            "peak_memory_gb": memory / 1e9,
        }
        work = strategy.last_step.work_by_rank()
        if sum(work):
            measurements["work_imbalance"] = max(work) * len(work) / sum(work)
        return measurements

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the sums."""
        self._loss, self._by_position = torch.zeros(2, dtype=torch.float64), None
        self._stop_recording()  # of an epoch that an error has ended
        if self.position_edges:
            parallel = _strategy(trainer).context_parallel
            self._recording = parallel.record_positions(self.position_edges)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the loss of a batch."""
        marks = [mark for mark in _strategy(trainer).last_step.losses if mark.unit == "tokens"]
        for mark in marks[:1]:
            count = mark.num_tokens.double()
            part = torch.stack([mark.value.double() * count, count])
            self._loss = self._loss.to(part.device) + part
            if mark.by_position is not None:
                sums = self._by_position
                self._by_position = mark.by_position if sums is None else sums + mark.by_position

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log perplexity, and the loss by position, over all tokens of all ranks."""
        self._stop_recording()
        if trainer.sanity_checking:
            return
        total, count = _reduce_sum(trainer, self._loss)
        if float(count):
            pl_module.log("val_perplexity", torch.exp(total / count), sync_dist=True)
        if not self.position_edges:
            return
        empty = torch.zeros(2, len(self.position_edges) + 1, dtype=torch.float64)
        sums = empty if self._by_position is None else self._by_position
        names = _bucket_names(self.position_edges)
        for name, (total, count) in zip(names, _reduce_sum(trainer, sums).T, strict=True):
            if float(count):
                pl_module.log(f"val_loss_at/{name}", total / count, sync_dist=True)

    def _stop_recording(self) -> None:
        if self._recording is not None:
            self._recording.remove()
        self._recording = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return whether the model was verified: a resumed run does not verify it again."""
        return {"verified": self._verified}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore whether the model was verified."""
        self._verified = bool(state_dict.get("verified", False))


def _strategy(trainer: Trainer) -> Any:
    return trainer.strategy


def _reduce_sum(trainer: Trainer, x: Tensor) -> Tensor:
    strategy = _strategy(trainer)
    total: Tensor = strategy.reduce(x.to(strategy.root_device).clone(), reduce_op="sum")
    return total


@rank_zero_only
def _log(text: str) -> None:
    _logger.info(text)


def _bucket_names(edges: Sequence[int]) -> list[str]:
    """Name the buckets between edges.

    Example:
        >>> _bucket_names([8, 64])
        ['0-8', '8-64', '64-']
    """
    starts = [0, *edges]
    return [f"{start}-{stop}" for start, stop in zip(starts, [*edges, ""], strict=True)]


def _peak_memory(device: torch.device) -> float:
    """Return the peak memory of this rank in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
