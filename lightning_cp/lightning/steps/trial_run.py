# SPDX-License-Identifier: Apache-2.0
"""How a step of a LightningModule runs for a comparison: its values, and nothing else.

Nothing that the step changes in the module stays changed, and nothing is logged. The comparison is
in `lightning_cp.compare.trials`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_cp.comm.transport import GroupTransport, Transport
from lightning_cp.compare.restore import user_hooks
from lightning_cp.compare.trials import StepRun, Value, copied, returned_leaves
from lightning_cp.compare.verify import Weights, take_gradients, without_trace
from lightning_cp.data import outputs
from lightning_cp.data.consistency import CURE
from lightning_cp.data.media_names import media_names
from lightning_cp.data.outputs import OutputLeaf
from lightning_cp.fsdp.gathering import check_reduced, find_units
from lightning_cp.lightning.steps.logs import Logged, loss_of, recorded_logs
from lightning_cp.lightning.steps.loss_policy import take_loss
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import active_step
from lightning_cp.step.step import Opened

_METRIC_FIX: Final = (
    "The states of a metric are reduced over all ranks: update it with the tokens of this rank "
    "that cp.token_mask() marks as not padding (cp is self.trainer.strategy.context_parallel), "
    "against cp.shift_labels(labels) for the next token, with unsliced logits. A metric that is "
    "updated with the same value on every rank counts it once per rank: in setup(), "
    "self.metric.process_group = self.trainer.strategy.data_parallel_group."
)


@dataclass(eq=False)
class ModuleCall:
    """A step of a LightningModule that can be called on any batch.

    Args:
        stage: the name of the step, such as ``validation_step``.
        module: the LightningModule.
        step_fn: calls the step on what `ContextParallel.step` yields.
        precision: returns the lowest precision in which the step computes.
        cp: opens steps.
    """

    stage: str
    module: nn.Module
    step_fn: Callable[[Mapping[str, Any]], Any]
    precision: Callable[[], torch.dtype]
    cp: ContextParallel
    skip: str = "ContextParallelStrategy(verify=False)"
    may_draw: bool = field(init=False)
    leaves_out: bool = False

    def __post_init__(self) -> None:
        self.may_draw = self.is_training

    @property
    def is_training(self) -> bool:
        """Return whether this is a training step."""
        return self.stage == "training_step"

    def cure(self, value: Value) -> str:
        """Return how to make a value that differs, for errors."""
        return _METRIC_FIX if value.source.startswith("updated ") else CURE

    def report_kept(self, wrong: Mapping[str, tuple[float, float]]) -> str:
        """Return the error for numbers that the step has kept, and those of one device."""
        name, (value, expected) = next(iter(wrong.items()))
        more = f" ({len(wrong) - 1} more differ.)" if len(wrong) > 1 else ""
        return (
            f"{self.stage}() kept {name}: {value:.6g} on this rank, but {expected:.6g} on full "
            f"sequences.{more} {CURE} If both are right and differ for another reason: {self.skip}."
        )

    def run(self, batch: Any, *, alone: bool, seed: int = 0) -> StepRun:
        """Run the step, collect its values, and undo what it changes."""
        module = self.module
        prepared = without_trace(
            module,
            *_around(module),
            trains=self.is_training,
            evaluates=not self.may_draw,
            seed=seed,
        )
        with (
            prepared as (reached, weights),
            _without_loggers(module),
            torch.set_grad_enabled(self.is_training),
        ):
            metrics = {name: x for name, x in module.named_modules() if isinstance(x, Metric)}
            for metric in metrics.values():
                metric.reset()
            if user_hooks(module):  # what they keep may be used by the next step
                self._run_once(batch, weights, alone=alone)
            step, output, logs = self._run_once(batch, weights, alone=alone)
            context = None if alone else step.groups.context
            # Towers of media share their work between ranks in a way of their own.
            is_compared = self.is_training and not media_names(batch)
            gradients = take_gradients(module, context) if is_compared else {}
            values = self._values(output, logs, step)
            for name, metric_value in _metric_values(metrics, step.groups.context).items():
                values[f"metric {name}"] = Value(
                    OutputLeaf("", metric_value), f"updated self.{name}"
                )
            return StepRun(values, step, gradients, reached.numbers(module))

    def _values(self, output: Any, logs: list[Logged], step: Opened) -> dict[str, Value]:
        """Return what the step has returned, logged and computed as a loss, by name."""
        values = {}
        for leaf in returned_leaves(output, training=self.is_training):
            _check_comparable(leaf, self.stage)
            is_loss = loss_of(leaf.value, step) is not None
            name = f"output{leaf.path}"
            values[name] = Value(leaf, f"returned {name}", is_global=is_loss)
        for log in logs:
            leaf, source = OutputLeaf("", log.value), f"logged {log.name!r}"
            values[f"log {log.name}"] = Value(leaf, source, log.reduction, log.is_global)
        # A loss that training returns may not be logged.
        for index, mark in enumerate(step.losses):
            is_global = not mark.is_replicated
            source = "computed a loss" if is_global else "gave sample_mean() losses of mean"
            values[f"loss {index}"] = Value(OutputLeaf("", mark.value), source, is_global=is_global)
        loss = self._loss(output, step)
        if loss is not None:
            leaf = OutputLeaf("", loss.detach())
            values["returned loss"] = Value(leaf, "returned a loss", is_loss=True)
        return values

    def _run_once(
        self, batch: Any, weights: Weights, *, alone: bool
    ) -> tuple[Opened, Any, list[Logged]]:
        """Run the step, and backward if it trains, on gradients of its own."""
        cp, module = self.cp, self.module
        if self.is_training:
            module.zero_grad(set_to_none=True)
        batch = copied(batch)
        opened = (
            cp.reference(batch, training=False, routed=True)
            if alone
            else cp.step(batch, training=False)
        )
        with opened as local:
            step = active_step.opened()
            assert step is not None  # noqa: S101
            with recorded_logs(module, step, training=self.is_training, sync=None) as logs:
                output = self.step_fn(local)
            weights.end_forward()
            loss = self._loss(output, step)
            if loss is not None and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
                check_reduced(find_units(module))
        return step, output, logs

    def _loss(self, output: Any, step: Opened) -> Tensor | None:
        """Return the loss of training; None for others, which are refused or declared."""
        loss = take_loss(output) if self.is_training and step.losses else None
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _around(module: nn.Module) -> Iterator[Any]:
    """Yield what a step may change beside its module: callbacks, data module, learning rates."""
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        yield from trainer.callbacks
        yield from filter(None, [trainer.datamodule])
        yield from (optimizer.param_groups for optimizer in trainer.optimizers)
        yield from (config.scheduler for config in trainer.lr_scheduler_configs)


class _MutedLogger(DummyLogger):
    """Has the paths of a logger, and logs nothing."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    name = property(lambda self: self._logger.name)
    version = property(lambda self: self._logger.version)
    save_dir = property(lambda self: self._logger.save_dir)
    log_dir = property(lambda self: self._logger.log_dir)


@contextmanager
def _without_loggers(module: nn.Module) -> Iterator[None]:
    """Let loggers that a step calls write nothing."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        yield
        return
    loggers, trainer.loggers = trainer.loggers, [_MutedLogger(x) for x in trainer.loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def _check_comparable(leaf: OutputLeaf, stage: str) -> None:
    try:
        outputs.checksum(leaf.value, torch.device("cpu"))
    except TypeError as error:
        raise TypeError(f"{stage}() returned output{leaf.path}: {error}") from error


def _metric_values(metrics: Mapping[str, Any], group: Transport) -> dict[str, Any]:
    """Return the values over all context ranks of the metrics that the step has updated."""
    updated = torch.tensor([int(x.update_called) for x in metrics.values()], device=group.device)
    if metrics:
        group.all_reduce(updated)
    values = {}
    for (name, metric), is_updated in zip(metrics.items(), updated.tolist(), strict=True):
        if not is_updated:
            continue
        if isinstance(group, GroupTransport) and (
            metric.process_group is None or group.covered_by(metric.process_group)
        ):
            metric.process_group = group.group
        else:  # one rank has all tokens, or each rank updates it with the same values
            metric._to_sync = False
        metric._computed = None
        for leaf in outputs.leaves(metric.compute()):
            values[name + leaf.path] = leaf.value
    return values
