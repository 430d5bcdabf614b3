# SPDX-License-Identifier: Apache-2.0
"""What a run tells about itself: speed, memory, balance, perplexity; and a check before it starts.

Knows Lightning; reads the strategy's public face and computes no numbers that training uses.
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

_logger = logging.getLogger("lightning_cp")


class ContextParallelCallback(Callback):
    """Reports speed, memory and balance of a run under `ContextParallelStrategy`.

    In the progress bar and the logger: ``tokens_per_second`` (of the whole job; a row that several
    ranks share counts once), ``tokens_per_second_per_device``, ``peak_memory_gb`` (of the fullest
    rank) and ``work_imbalance`` (attention of the busiest rank over the mean; 1.0 is perfect).
    Validation adds ``val_perplexity``.

    Args:
        verify_first_batch: before training, run the first batch under context parallelism and on
            whole rows, compare loss and every gradient, and stop if they differ.
        verify_max_len: the length to which rows are cut for it, so that one rank can hold them.
        every_n_steps: how often figures are taken.
        position_edges: also report the validation loss by position in the row: ``[1024, 4096]``
            makes three buckets.

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
                f"verify_max_len={verify_max_len} and every_n_steps={every_n_steps} must be at "
                "least 1."
            )
        edges = list(position_edges or [])
        if edges != sorted(set(edges)) or any(edge < 1 for edge in edges):
            raise ValueError(
                f"position_edges={edges} must rise, and begin above 0: [1024, 4096] makes the "
                "buckets 0-1024, 1024-4096 and beyond."
            )
        self.verify_first_batch = verify_first_batch
        self.verify_max_len = verify_max_len
        self.every_n_steps = every_n_steps
        self.position_edges = tuple(edges)
        self._verified = False
        self._num_tokens = 0
        self._since = 0.0
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._by_position: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other strategies; say what was chosen."""
        if not hasattr(trainer.strategy, "context_parallel"):
            raise ValueError(
                f"ContextParallelCallback reports on ContextParallelStrategy, but this Trainer has "
                f"a {type(trainer.strategy).__name__}. Use Trainer(strategy="
                "ContextParallelStrategy(...)), or leave the callback out."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say in one line who works with whom, and how."""
        _say(_strategy(trainer).describe())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Verify the first batch before anything is trained; start the clock."""
        if self.verify_first_batch and not self._verified:
            report = _strategy(trainer).verify(batch, max_len=self.verify_max_len)
            _say(f"verified: {report.summary()}")
            self._verified = True
        if self._since == 0.0:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count tokens; every few steps, log figures."""
        strategy = _strategy(trainer)
        self._num_tokens += strategy.last_step.num_tokens
        if (batch_idx + 1) % self.every_n_steps:
            return
        logger = bool(trainer.loggers)
        for name, value in self._figures(strategy).items():
            pl_module.log(name, value, prog_bar=True, logger=logger, on_step=True, on_epoch=False)
        self._num_tokens, self._since = 0, time.perf_counter()

    def _figures(self, strategy: Any) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        device = strategy.root_device
        counted = torch.tensor(float(self._num_tokens), dtype=torch.float64, device=device)
        # Each of a group's ranks has counted the same rows.
        tokens = float(strategy.reduce(counted, reduce_op="sum")) / strategy.context_parallel_size
        memory = torch.tensor(_peak_memory(device), dtype=torch.float64, device=device)
        fullest = float(strategy.reduce(memory, reduce_op="max"))
        figures = {
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / seconds / strategy.world_size,
            "peak_memory_gb": fullest / 1e9,
        }
        work = strategy.last_step.work_by_rank()
        if sum(work):
            figures["work_imbalance"] = max(work) * len(work) / sum(work)
        return figures

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start summing."""
        self._loss, self._by_position = torch.zeros(2, dtype=torch.float64), None
        _strategy(trainer).context_parallel.position_edges = self.position_edges

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch's loss."""
        for mark in _strategy(trainer).last_step.losses[:1]:
            count = mark.num_tokens.double()
            part = torch.stack([mark.value.double() * count, count])
            self._loss = self._loss.to(part.device) + part
            if mark.by_position is not None:
                sums = self._by_position
                self._by_position = mark.by_position if sums is None else sums + mark.by_position

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log perplexity, and the loss by position, over all tokens of all ranks."""
        strategy = _strategy(trainer)
        strategy.context_parallel.position_edges = ()
        if trainer.sanity_checking:
            return
        summed, count = self._summed(strategy, self._loss)
        if float(count):
            pl_module.log("val_perplexity", torch.exp(summed / count), sync_dist=True)
        if not self.position_edges:
            return
        empty = torch.zeros(2, len(self.position_edges) + 1, dtype=torch.float64)
        sums = empty if self._by_position is None else self._by_position
        for name, (total, number) in zip(
            _bucket_names(self.position_edges), self._summed(strategy, sums).T, strict=True
        ):
            if float(number):
                pl_module.log(f"val_loss_at/{name}", total / number, sync_dist=True)

    def _summed(self, strategy: Any, x: Tensor) -> Tensor:
        whole: Tensor = strategy.reduce(x.to(strategy.root_device).clone(), reduce_op="sum")
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Remember that the model was verified: a resumed run need not do it again."""
        return {"verified": self._verified}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up where a run left off."""
        self._verified = bool(state_dict.get("verified", False))


def _strategy(trainer: Trainer) -> Any:
    return trainer.strategy


@rank_zero_only
def _say(text: str) -> None:
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
    """Return the most bytes that this rank has held."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
