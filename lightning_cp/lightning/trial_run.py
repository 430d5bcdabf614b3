# SPDX-License-Identifier: Apache-2.0
"""Trial runs: a step runs once sharded and once on full sequences, and what it yields is compared.

A trial run classifies every value that a step returns, logs or adds to a metric: one value per
token along a dim, or the same value on all context ranks. A value that is neither raises on all
ranks. Nothing that the step changes in the module stays changed, and nothing is logged.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cp import active_step
from lightning_cp.adapters import output_dims
from lightning_cp.comm.collective_errors import any_rank, gather_texts
from lightning_cp.comm.transport import GroupTransport, Transport
from lightning_cp.data import batch as batches
from lightning_cp.data import outputs
from lightning_cp.data.consistency import CURE, find_differing
from lightning_cp.data.media import media_names
from lightning_cp.data.outputs import Leaf
from lightning_cp.data.sharding import token_dim, unshard_value
from lightning_cp.data.structure import flatten
from lightning_cp.lightning.logs import loss_of, recorded_logs
from lightning_cp.lightning.module_state import metrics_of, restored_attributes, restored_metrics
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import Step, UnshardedStep
from lightning_cp.verification import MIXING, truncate_batch

Kind = int | Literal["same"]
"""The dim along which a value holds tokens, or ``same`` for one value on all context ranks."""


class Finding(NamedTuple):
    """The result of a trial run for one value.

    Args:
        kind: what the value is.
        is_uniform: whether it was 0 or all its elements were equal, as many computations give.
    """

    kind: Kind
    is_uniform: bool


@dataclass(frozen=True)
class StepCall:
    """A step of a LightningModule that can be called on any batch.

    Args:
        stage: the name of the step, such as ``validation_step``.
        module: the LightningModule.
        run: calls the step on what `ContextParallel.step` yields.
        precision: returns the lowest precision in which the step computes.
    """

    stage: str
    module: nn.Module
    run: Callable[[Mapping[str, Any]], Any]
    precision: Callable[[], torch.dtype]

    @property
    def is_training(self) -> bool:
        """Return whether this is a training step."""
        return self.stage == "training_step"


@dataclass(frozen=True)
class _Value:
    """One value of a run.

    Args:
        leaf: the value, and its sequence dim if that is known.
        source: where it comes from, for errors: ``logged 'val_loss'``.
        reduction: how ranks combine their parts of it; empty if it is not in parts.
        is_global: whether it is known to be a mean over the tokens of all ranks.
    """

    leaf: Leaf
    source: str
    reduction: str = ""
    is_global: bool = False


@dataclass(frozen=True)
class _Run:
    """A step that has run, and its values by name."""

    step: Step
    values: dict[str, _Value]

    def describe(self) -> str:
        """Return where the values come from, for errors."""
        return ", ".join(value.source for value in self.values.values()) or "nothing"


LONGEST_MEDIA = 16384
"""Tokens of a batch with media that each rank runs in full, where it cannot be truncated."""


class TrialRuns:
    """Runs steps sharded and on full sequences, and classifies their values.

    Args:
        cp: how sequences are sharded.
        max_len: the length to which sequences are truncated.
        lockstep: whether data ranks take part in each other's runs, since they hold shards of the
            same parameters.
    """

    def __init__(self, cp: ContextParallel, *, max_len: int, lockstep: bool) -> None:
        self._cp = cp
        self._max_len = max_len
        self._data = [cp.groups.data] if lockstep else []
        self.is_running = False

    def run(self, call: StepCall, batch: Any, step: Step) -> list[dict[str, Finding]]:
        """Run a step on parts of a batch, and compare. Collective.

        Args:
            call: the step.
            batch: the full batch.
            step: the step that is open for the batch.

        Returns:
            For each part that the step accepts, the finding for each value by name.
        """
        parts, problem = list[Any](), None
        try:
            parts = self._trial_batches(batch, step)
        except Exception as error:  # noqa: BLE001  raised below, on all ranks
            problem = error
        with active_step.outside():
            self._cp.checks.check_batch(batch, problem, training=False, values=True)
            results, failure = self._compare_runs(call, self._equal_number(parts))
            # Truncation may cut off placeholders of media.
            is_cut = failure is not None and not results and bool(media_names(batch))
            if self._any_rank(is_cut)[0] and not self._any_rank(self._is_too_long(step))[0]:
                results, failure = self._compare_runs(call, [batch])
            if failure is not None and not results:
                raise failure
            return results

    def any_data_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on any data rank that takes part in this rank's runs."""
        return any_rank([flag], *self._data)[0]

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Return which flags are set on any rank that takes part in this rank's runs."""
        return any_rank(flags, self._cp.groups.context, *self._data)

    def _everywhere(self, flags: Iterable[bool]) -> list[bool]:
        """Return which flags are set on all context ranks."""
        missing = [not flag for flag in flags]
        return [not x for x in any_rank(missing, self._cp.groups.context)] if missing else []

    # ---------------------------------------------------------------- batches to run on

    def _trial_batches(self, batch: Any, step: Step) -> list[Any]:
        """Return short batches like this one.

        They are padded by sharding if the batch is. Two of them, and one with padding of its own if
        the batch has some. None for a long batch that is handed over, which cannot be truncated.
        One with media stays as it is where data ranks take part: a model may refuse what is left
        of one data rank's batch, amid a run in which the others wait for it. None if it is long.
        """
        if any(group.size > 1 for group in self._data) and media_names(batch):
            return [] if self._is_too_long(step) else [batch] * 2
        if isinstance(step, UnshardedStep):
            tensors = [x.value for x in flatten(batch).values() if isinstance(x.value, Tensor)]
            longest = max((max(x.shape, default=0) for x in tensors), default=0)
            return [batch] * 2 if longest <= self._max_len else []
        cp, layout = self._cp, step.layout
        max_len = min(self._max_len, layout.seq_len)
        # Short: errors at the boundaries of shards show most.
        short_len = min(max_len, 16 * cp.cp_size)
        num_chunks = 2 * cp.cp_size
        rest = 1 if layout.padded_len > layout.seq_len else 0
        lengths = [
            max(n - (n - rest) % num_chunks, min(n, num_chunks)) for n in (short_len, max_len)
        ]
        short, long = (truncate_batch(batch, cp=cp, max_len=n) for n in lengths)
        padded = [] if step.padding is None else [batches.pad_samples(short)]
        return [*padded, long, short]

    def _is_too_long(self, step: Step) -> bool:
        """Return whether every rank should not run the full batch by itself."""
        return step.layout.seq_len > max(self._max_len, LONGEST_MEDIA)

    def _equal_number(self, parts: list[Any]) -> list[Any]:
        """Return equally many parts on all data ranks; none if one rank has none. Collective."""
        is_none, is_three = self._any_rank(not parts, len(parts) > 2)
        return [] if is_none else [*parts, *parts[:1]][: 3 if is_three else 2]

    # ---------------------------------------------------------------- one run

    def _compare_runs(
        self, call: StepCall, parts: Sequence[Any]
    ) -> tuple[list[dict[str, Finding]], Exception | None]:
        """Return the findings of each part that the step accepts, and the last error of others."""
        cp = self._cp
        failure: Exception | None = None
        results: list[dict[str, Finding]] = []
        for part in parts:
            # Full sequences first: all ranks compute the same there, so that an error is raised by
            # all of them. A step that does not accept shorter sequences is run on the next part.
            problem = None
            try:
                full = self._run(call, cp.alone(part, training=False, routed=True))
            except Exception as error:  # noqa: BLE001  raised below if no part is accepted
                failure = problem = error
            if self._any_rank(problem is not None)[0]:
                continue
            sharded = self._run(call, cp.step(part, training=False))
            results.append(self._compare(call, sharded, full))
        return results, failure

    def _run(self, call: StepCall, opened: AbstractContextManager[dict[str, Any]]) -> _Run:
        """Run a step, collect its values, and undo what it changes."""
        module = call.module
        self.is_running = True
        try:
            with restored_metrics(module), restored_attributes(module), torch.no_grad():
                module.eval()
                return self._collect(call, opened)
        except Exception as error:
            error.add_note(
                f"This error was raised by the trial run of {call.stage}(), which compares it with "
                "a run on full sequences. ContextParallelStrategy(verify_steps=False) skips it."
            )
            raise
        finally:
            self.is_running = False

    def _collect(self, call: StepCall, opened: AbstractContextManager[dict[str, Any]]) -> _Run:
        metrics = metrics_of(call.module)
        for metric in metrics.values():
            metric.reset()
        device = self._cp.groups.context.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), opened as local:
            step = active_step.opened()
            assert step is not None  # noqa: S101
            with recorded_logs(call.module, step, training=call.is_training, sync=None) as logs:
                output = call.run(local)
        values = {}
        for leaf in returned_leaves(output, training=call.is_training):
            _check_comparable(leaf, call.stage)
            is_loss = loss_of(leaf.value, step) is not None
            name = f"output{leaf.path}"
            values[name] = _Value(leaf, f"returned {name}", is_global=is_loss)
        for log in logs:
            leaf, source = Leaf("", log.value), f"logged {log.name!r}"
            values[f"log {log.name}"] = _Value(leaf, source, log.reduction, log.is_global)
        # A loss that training returns may not be logged.
        for index, mark in enumerate(step.losses):
            source = "computed a loss"
            if mark.is_replicated:
                source = "gave sample_mean() losses of mean"
            is_global = not mark.is_replicated
            values[f"loss {index}"] = _Value(Leaf("", mark.value), source, is_global=is_global)
        for name, metric_value in _metric_values(metrics, step.groups.context).items():
            values[f"metric {name}"] = _Value(Leaf("", metric_value), f"updated self.{name}")
        return _Run(step, values)

    # ---------------------------------------------------------------- comparing two runs

    def _compare(self, call: StepCall, sharded: _Run, full: _Run) -> dict[str, Finding]:
        """Classify each value; raise for those that one device would not compute."""
        names = list(sharded.values)
        if find_differing(names, self._cp.groups.context) or names != list(full.values):
            raise ValueError(
                f"{call.stage}() returns and logs other values on full sequences "
                f"({full.describe()}) than on the tokens of this rank ({sharded.describe()}), or "
                "the ranks differ. Return and log the same values for all batches."
            )
        kinds = self._find_kinds(call, sharded, full)
        wrong = [name for name in names if name not in kinds]
        if wrong:
            raise ValueError(self._explain(call, sharded, full, wrong))
        return {
            name: Finding(kind, outputs.is_uniform(full.values[name].leaf.value))
            for name, kind in kinds.items()
        }

    def _find_kinds(self, call: StepCall, sharded: _Run, full: _Run) -> dict[str, Kind]:
        """Return the kind of each value that is right; the same on all ranks."""
        kinds: dict[str, Kind] = {}
        step, precision = sharded.step, call.precision()
        pairs = {name: (value, full.values[name]) for name, value in sharded.values.items()}
        dims = {name: token_dim(value.leaf, step) for name, (value, _) in pairs.items()}
        same = self._everywhere(
            dims[name] is None
            and outputs.is_close(self._combine(value, step), other.leaf.value, precision)
            for name, (value, other) in pairs.items()
        )
        forms = [outputs.digest(outputs.form(value.leaf)) for value, _ in pairs.values()]
        alike = self._everywhere(distance == 0 for distance in self._distances(forms))
        for (name, (value, other)), is_same, is_alike in zip(
            pairs.items(), same, alike, strict=True
        ):
            if is_same:
                kinds[name] = "same"
            elif is_alike and not value.reduction:
                local, expected = value.leaf.value, other.leaf.value
                for dim in _candidate_dims(local, expected, dims[name], step):
                    unsharded = unshard_value(local, dim, step)
                    if self._everywhere([outputs.is_close(unsharded, expected, precision)])[0]:
                        kinds[name] = dim
                        break
        return kinds

    def _combine(self, value: _Value, step: Step) -> Any:
        """Return a value after its reduction over the context ranks."""
        x = outputs.as_tensor(value.leaf.value)
        if not value.reduction or x is None:
            return value.leaf.value
        group = step.groups.context
        mine = x.double().to(group.device).contiguous()
        gathered = mine.new_empty(group.size, *mine.shape)
        group.all_gather(gathered, mine)()
        if value.reduction == "sum":
            return gathered.sum(0)
        return gathered.amin(0) if value.reduction == "min" else gathered.amax(0)

    def _distances(self, numbers: list[int]) -> list[int]:
        """Return the largest distance of each number to that of the first context rank."""
        if not numbers:
            return []
        group = self._cp.groups.context
        mine = torch.tensor(numbers, dtype=torch.int64, device=group.device)
        gathered = mine.new_empty(group.size, len(numbers))
        group.all_gather(gathered, mine)()
        return [int(x) for x in (gathered - gathered[0]).abs().amax(0)]

    def _explain(self, call: StepCall, sharded: _Run, full: _Run, wrong: list[str]) -> str:
        value, other = sharded.values[wrong[0]], full.values[wrong[0]]
        step = sharded.step
        mine = outputs.describe(self._combine(value, step))
        texts = gather_texts(mine, self._cp.groups.context)[:4]
        by_rank = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
        more = f" ({len(wrong) - 1} more values differ.)" if len(wrong) > 1 else ""
        length = "" if isinstance(step, UnshardedStep) else f" of {step.layout.seq_len} tokens"
        fix = CURE
        if value.is_global:
            padding = batches.describe_filled(step)
            fix = f"Context parallelism changes the results of this model. {padding}{MIXING}"
        elif value.source.startswith("updated "):
            fix = _METRIC_FIX
        return (
            f"{call.stage}() {value.source}: {by_rank} of the {step.cp_size} context ranks, but "
            f"{outputs.describe(other.leaf.value)} on full sequences{length}.{more} {fix} If both "
            "are right and differ for another reason: ContextParallelStrategy(verify_steps=False)."
        )


_METRIC_FIX = (
    "The states of a metric are reduced over all ranks: update it with the tokens of this rank "
    "that cp.token_mask() marks as not padding (cp is self.trainer.strategy.context_parallel), "
    "against cp.shift_labels(labels) for the next token, with unsliced logits. A metric that is "
    "updated with the same value on every rank counts it once per rank: in setup(), "
    "self.metric.process_group = self.trainer.strategy.data_parallel_group."
)


def returned_leaves(output: Any, *, training: bool) -> Iterator[Leaf]:
    """Yield the values that a step returned, without the loss of training (see loss_policy)."""
    for leaf in outputs.leaves(output, output_dims):
        if not (training and leaf.path in ("", "['loss']")):
            yield leaf


def _check_comparable(leaf: Leaf, stage: str) -> None:
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


def _candidate_dims(local: Any, full: Any, known: int | None, step: Step) -> list[int]:
    """Return the dims along which a value may hold tokens: those that only sharding shortens."""
    a, b = outputs.as_tensor(local), outputs.as_tensor(full)
    if a is None or b is None or a.dim() != b.dim() or isinstance(step, UnshardedStep):
        return []
    dims = range(a.dim()) if known is None else [known % a.dim()]
    return [
        dim
        for dim in dims
        if a.shape[dim] == step.tensor_len
        and b.shape[dim] == step.layout.seq_len
        and a.shape[:dim] == b.shape[:dim]
        and a.shape[dim + 1 :] == b.shape[dim + 1 :]
    ]
