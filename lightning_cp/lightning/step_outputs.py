# SPDX-License-Identifier: Apache-2.0
"""What a step returns and logs: whole, the same on every rank, and what one device would compute.

A value may leave a step if it is known to hold one value per token (then whole sequences leave), if
it is a mean over the tokens of all ranks, or if the ranks of a group hold the same and a trial run
on whole sequences has shown that one device would. Anything else is an error on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp import active_step
from lightning_cp.comm.transport import GroupTransport, Transport
from lightning_cp.data import batch as batches
from lightning_cp.data import outputs
from lightning_cp.data.consistency import CURE, share_texts
from lightning_cp.data.outputs import Leaf
from lightning_cp.data.structure import flatten
from lightning_cp.lightning.logs import (
    Logged,
    kept_attributes,
    kept_metrics,
    loss_of,
    metrics_of,
    recorded_logs,
)
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import HandedOver, Step
from lightning_cp.verification import MIXING, truncate_batch

Kind = int | Literal["same"]
"""What a value is: of tokens, along this dim, or the same on all ranks of a group."""

_Shape = tuple[bool, ...]
"""Whether ranks' parts of a batch are filled up, and whether it is padded, at which ends.

A step may be right for the one and wrong for the other.
"""

_Key = tuple[str, _Shape, str]
"""A stage, batches that are alike, and the name of a value."""

# After so many batches, a value that is always 0 or all the same is believed to be so.
_TRIES: Final = 8


@dataclass(frozen=True)
class Trial:
    """A step that can be run on any part of a batch.

    Args:
        stage: the name of the step, such as ``validation_step``.
        module: the LightningModule.
        run: calls the step on what `ContextParallel.step` yields.
        precision: says what is the lowest in which it computes.
    """

    stage: str
    module: nn.Module
    run: Callable[[Mapping[str, Any]], Any]
    precision: Callable[[], torch.dtype]

    @property
    def training(self) -> bool:
        """Say whether this is a training step."""
        return self.stage == "training_step"


@dataclass
class _Record:
    """What a trial run returned and logged, and what its metrics came to."""

    step: Step
    entries: dict[str, "_Entry"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Entry:
    """One value of a trial run.

    Args:
        leaf: the value, and what is known of it.
        what: says in an error where it came from.
        reduction: how ranks put their parts of it together; empty if it is not in parts.
        is_global: whether it is known to be a mean over the tokens of all ranks.
    """

    leaf: Leaf
    what: str
    reduction: str = ""
    is_global: bool = False


class StepOutputs:
    """Checks what leaves the steps of a LightningModule, and puts sequences together.

    Args:
        cp: how sequences are shared.
        verify: compare the first batch of each stage with a run on whole sequences.
        max_len: the length to which sequences are cut for it.
        lockstep: whether data ranks take part in each other's runs, since they hold weights of each
            other.
    """

    def __init__(
        self, cp: ContextParallel, *, verify: bool, max_len: int, lockstep: bool = True
    ) -> None:
        self._cp = cp
        self._lockstep = lockstep
        self._verify = verify
        self._max_len = max_len
        self._kinds: dict[_Key, Kind] = {}
        # Values that were 0 or all the same, which shows nothing, and how often they were tried.
        self._open: dict[_Key, int] = {}
        # Values that no trial run has produced, and how often.
        self._missing: dict[_Key, int] = {}
        self._verified: set[tuple[str, _Shape, object]] = set()
        self.is_verifying = False

    # ---------------------------------------------------------------- the trial run

    @property
    def is_on(self) -> bool:
        """Say whether steps are compared with one device."""
        return self._verify and self._cp.cp_size > 1

    def has_tried(self, stage: str) -> bool:
        """Say whether any batch of a stage has been verified."""
        return any(tried == stage for tried, _, _ in self._verified)

    def is_due(self, stage: str, step: Step, loader: object = 0) -> bool:
        """Say whether no batch like this one, of a stage and loader, has been verified."""
        key = stage, _shape_of(step), loader
        return self.is_on and key not in self._verified

    def verify(self, trial: Trial, batch: Any, step: Step, loader: object = 0) -> None:
        """Run a step sharded and on whole sequences; refuse what differs. Collective.

        Nothing that the step changes in the module stays changed, and nothing is logged.

        Args:
            trial: the step.
            batch: the whole batch.
            step: what was opened for the batch.
            loader: which loader it is of.
        """
        cp, parts, problem = self._cp, list[Any](), None
        try:
            parts = self._trial_batches(batch, step)
        except Exception as error:  # noqa: BLE001  raised below, when all ranks know
            problem = error
        with active_step.outside():
            cp.agree(batch, problem, training=False, values=True)
            self._try(trial, self._agreed(parts), _shape_of(step))
        aged = {key: n + 1 if key[0] == trial.stage else n for key, n in self._open.items()}
        self._open = {key: tries for key, tries in aged.items() if tries < _TRIES}
        self._verified.add((trial.stage, _shape_of(step), loader))

    def _try(self, trial: Trial, parts: Sequence[Any], shape: _Shape) -> None:
        """Compare runs of a step on parts of a batch."""
        cp, failure, was_run = self._cp, None, False
        for part in parts:
            # Whole first, for all ranks do the same in it: if it fails, it fails on all of them.
            # A step may not take shorter sequences; then it is tried on the next part.
            problem = None
            try:
                whole = self._record(trial, cp.alone(part, training=False, routed=True))
            except Exception as error:  # noqa: BLE001  raised below if no part is taken
                failure = problem = error
            if self._any_rank(problem is not None)[0]:
                continue
            was_run = True
            found = self._record(trial, cp.step(part, training=False))
            self._compare(trial, shape, found, whole)
        if failure is not None and not was_run:
            raise failure

    def any_data_rank(self, flag: bool) -> bool:
        """Say whether a flag is raised on a data rank that takes part in this rank's runs."""
        return self._any([self._cp.groups.data] if self._lockstep else [], [flag])[0]

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Say which flags are raised on any rank that a trial run needs."""
        groups = self._cp.groups
        return self._any([groups.context, *([groups.data] if self._lockstep else [])], flags)

    def _any(self, groups: Sequence[Transport], flags: Sequence[bool]) -> list[bool]:
        numbers = torch.tensor([int(x) for x in flags], device=self._cp.groups.context.device)
        for group in groups:
            if group.size > 1:
                group.all_reduce(numbers)
        return [number > 0 for number in numbers.tolist()]

    def _agreed(self, parts: list[Any]) -> list[Any]:
        """Return as many parts on all data ranks, which take part in each other's runs. Collective.

        If one has nothing to try, nothing is tried.
        """
        none, three = self._any_rank(not parts, len(parts) > 2)
        return [] if none else [*parts, *parts[:1]][: 3 if three else 2]

    def _trial_batches(self, batch: Any, step: Step) -> list[Any]:
        """Return what the step is tried on: parts of the batch that are like it.

        If ranks cannot share it evenly, they cannot share the parts either. Two parts, and one that
        is padded if the batch is; none of a long batch that is handed over, since it is not cut.
        """
        if isinstance(step, HandedOver):
            tensors = [x.value for x in flatten(batch).values() if isinstance(x.value, Tensor)]
            longest = max((max(x.shape, default=0) for x in tensors), default=0)
            return [batch] * 2 if longest <= self._max_len else []
        cp, layout = self._cp, step.layout
        most = min(self._max_len, layout.seq_len)
        # Short: what is wrong where the parts of ranks meet shows most.
        short = min(most, 16 * cp.cp_size)
        pieces = 2 * cp.cp_size
        rest = 1 if layout.padded_len > layout.seq_len else 0
        lengths = [max(n - (n - rest) % pieces, min(n, pieces)) for n in (short, most)]
        first, second = (truncate_batch(batch, cp=cp, max_len=n) for n in lengths)
        padded = [] if step.padding is None else [batches.pad_samples(first)]
        return [*padded, second, first]

    def _record(self, trial: Trial, opened: AbstractContextManager[dict[str, Any]]) -> _Record:
        """Run a step, note all that it returns and logs, and undo what it has changed."""
        module = trial.module
        self.is_verifying = True
        try:
            with kept_metrics(module), kept_attributes(module), torch.no_grad():
                module.eval()
                return self._run(trial, opened)
        except Exception as error:
            error.add_note(
                f"This happened while {trial.stage}() was compared with a run on whole sequences. "
                "ContextParallelStrategy(verify_steps=False) leaves the comparison out."
            )
            raise
        finally:
            self.is_verifying = False

    def _run(self, trial: Trial, opened: AbstractContextManager[dict[str, Any]]) -> _Record:
        metrics = metrics_of(trial.module)
        for metric in metrics.values():
            metric.reset()
        device = self._cp.groups.context.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), opened as local:
            step = active_step.opened()
            assert step is not None  # noqa: S101
            with recorded_logs(trial.module, step, training=trial.training, sync=None) as logs:
                output = trial.run(local)
        record = _Record(step)
        for leaf in self._returned(output, trial.training):
            self._check_comparable(leaf, trial.stage)
            key = f"output{leaf.path}"
            what = f"returned {leaf.path or 'it'}"
            is_loss = loss_of(leaf.value, step) is not None
            record.entries[key] = _Entry(leaf, what, is_global=is_loss)
        for logged in logs:
            key = f"log {logged.name}"
            record.entries[key] = _Entry(
                Leaf("", logged.value),
                f"logged {logged.name!r}",
                logged.reduction,
                logged.is_global,
            )
        for name, value in self._metric_values(metrics, step).items():
            record.entries[f"metric {name}"] = _Entry(Leaf("", value), f"updated self.{name}")
        return record

    def _metric_values(self, metrics: Mapping[str, Any], step: Step) -> dict[str, Any]:
        """Return what the metrics come to that the step has updated, over the group's ranks."""
        group = step.groups.context
        updated = torch.tensor(
            [int(metric.update_called) for metric in metrics.values()], device=group.device
        )
        if metrics:
            group.all_reduce(updated)
        values = {}
        for (name, metric), used in zip(metrics.items(), updated.tolist(), strict=True):
            if not used:
                continue
            if isinstance(group, GroupTransport) and _covers(metric.process_group, group):
                metric.process_group = group.group
            else:
                metric._to_sync = False
            metric._computed = None
            for leaf in outputs.leaves(metric.compute()):
                values[name + leaf.path] = leaf.value
        return values

    def _returned(self, output: Any, training: bool) -> Iterator[Leaf]:
        """Yield what a step returned, but for the loss of training, which is checked by itself."""
        for leaf in self._cp.output_leaves(output):
            if not (training and leaf.path in ("", "['loss']")):
                yield leaf

    def _check_comparable(self, leaf: Leaf, stage: str) -> None:
        try:
            outputs.checksum(leaf.value, torch.device("cpu"))
        except TypeError as error:
            raise TypeError(f"{stage}() returned output{leaf.path}: {error}") from error

    # ---------------------------------------------------------------- comparing two runs

    def _compare(self, trial: Trial, shape: _Shape, found: _Record, whole: _Record) -> None:
        """Find out what each value is; refuse those that one device would not compute."""
        names = list(found.entries)
        if self._cp.find_differing(list(names)) or names != list(whole.entries):
            ours = ", ".join(entry.what for entry in found.entries.values()) or "nothing"
            theirs = ", ".join(entry.what for entry in whole.entries.values()) or "nothing"
            raise ValueError(
                f"{trial.stage}() returns and logs other values on whole sequences ({theirs}) than "
                f"on this rank's tokens ({ours}), or ranks differ in it. Return and log the same "
                "values whatever the tokens are."
            )
        kinds = self._find_kinds(trial, found, whole)
        wrong = [name for name in names if name not in kinds]
        if wrong:
            raise ValueError(self._explain(trial, found, whole, wrong))
        for name, kind in kinds.items():
            key = trial.stage, shape, name
            if outputs.is_uniform(whole.entries[name].leaf.value):
                if key not in self._kinds:
                    self._open.setdefault(key, 0)
            else:
                self._open.pop(key, None)
            self._kinds[key] = kind

    def _find_kinds(self, trial: Trial, found: _Record, whole: _Record) -> dict[str, Kind]:
        """Return what each value is that is right; the same on all ranks."""
        kinds: dict[str, Kind] = {}
        step, precision = found.step, trial.precision()
        pairs = {name: (entry, whole.entries[name]) for name, entry in found.entries.items()}
        known = {name: self._cp.token_dim(entry.leaf, step) for name, (entry, _) in pairs.items()}
        same = self._everywhere(
            known[name] is None
            and outputs.is_close(self._combined(entry, step), other.leaf.value, precision)
            for name, (entry, other) in pairs.items()
        )
        forms = [outputs.digest(outputs.form(entry.leaf)) for entry, _ in pairs.values()]
        alike = self._everywhere(number == 0 for number in self._spread(forms))
        for (name, (entry, other)), is_same, is_alike in zip(
            pairs.items(), same, alike, strict=True
        ):
            if is_same:
                kinds[name] = "same"
            elif is_alike and not entry.reduction:
                dims = self._candidates(entry.leaf.value, other.leaf.value, known[name], step)
                for dim in dims:
                    rows = self._cp.unshard_value(entry.leaf.value, dim, step)
                    near = outputs.is_close(rows, other.leaf.value, precision)
                    if self._everywhere([near])[0]:
                        kinds[name] = dim
                        break
        return kinds

    def _candidates(self, found: Any, whole: Any, known: int | None, step: Step) -> list[int]:
        """Return the dims along which a value may hold tokens: shorter here than on one device."""
        a, b = outputs.as_tensor(found), outputs.as_tensor(whole)
        if a is None or b is None or a.dim() != b.dim() or isinstance(step, HandedOver):
            return []
        dims = range(a.dim()) if known is None else [known % a.dim()]
        return [
            dim
            for dim in dims
            if a.shape[dim] == step.held_len
            and b.shape[dim] == step.layout.seq_len
            and a.shape[:dim] == b.shape[:dim]
            and a.shape[dim + 1 :] == b.shape[dim + 1 :]
        ]

    def _combined(self, entry: _Entry, step: Step) -> Any:
        """Return what the ranks' parts of a value come to."""
        x = outputs.as_tensor(entry.leaf.value)
        if not entry.reduction or x is None:
            return entry.leaf.value
        group = step.groups.context
        mine = x.double().to(group.device).contiguous()
        every = mine.new_empty(group.size, *mine.shape)
        group.all_gather(every, mine)()
        if entry.reduction == "sum":
            return every.sum(0)
        return every.amin(0) if entry.reduction == "min" else every.amax(0)

    def _everywhere(self, flags: Any) -> list[bool]:
        """Return which flags are true on all ranks of the group."""
        group = self._cp.groups.context
        failed = torch.tensor([int(not flag) for flag in flags], device=group.device)
        if failed.numel():
            group.all_reduce(failed)
        return [number == 0 for number in failed.tolist()]

    def _spread(self, numbers: list[int]) -> list[int]:
        """Return how far each number is from that of the group's first rank."""
        group = self._cp.groups.context
        mine = torch.tensor(numbers, dtype=torch.int64, device=group.device)
        every = mine.new_empty(group.size, len(numbers))
        if numbers:
            group.all_gather(every, mine)()
        return [int(x) for x in (every - every[0]).abs().amax(0)] if numbers else []

    def _explain(self, trial: Trial, found: _Record, whole: _Record, wrong: list[str]) -> str:
        entry, other = found.entries[wrong[0]], whole.entries[wrong[0]]
        mine = outputs.describe(self._combined(entry, found.step))
        ranks = ", ".join(
            f"{text} on rank {rank}"
            for rank, text in enumerate(share_texts(mine, self._cp.groups.context)[:4])
        )
        more = f" ({len(wrong) - 1} more values differ.)" if len(wrong) > 1 else ""
        step, cure = found.step, CURE
        is_one = not isinstance(step, HandedOver)
        length = f" of {step.layout.seq_len} tokens" if is_one else ""
        if entry.is_global:
            cure = f"Context parallelism changes the numbers of this model. {MIXING}"
        elif entry.what.startswith("updated "):
            cure = (
                "The states of a metric are put together over all ranks: update it with the tokens "
                "of this rank that cp.token_mask() says are no padding (cp is "
                "self.trainer.strategy.context_parallel), against cp.shift_labels(labels) for the "
                "next token, with the logits as they are. A metric that is updated with the same "
                "value on every rank counts it once per rank: in setup(), "
                "self.metric.process_group = self.trainer.strategy.data_parallel_group."
            )
        return (
            f"{trial.stage}() {entry.what}: {ranks} of the {step.cp_size} that share the "
            f"sequences, but {outputs.describe(other.leaf.value)} on whole sequences"
            f"{length}.{more} {cure} If the two are right and differ for another reason: "
            "ContextParallelStrategy(verify_steps=False)."
        )

    # ---------------------------------------------------------------- real steps

    def release(
        self,
        trial: Trial,
        output: Any,
        logs: list[Logged],
        step: Step,
        *,
        batch: Any,
        may_verify: bool = True,
        deferred: bool = False,
    ) -> Any:
        """Return what a step returned, whole; refuse what only this rank's tokens say. Collective.

        Args:
            trial: the step, for values that no trial run has seen.
            output: what it returned.
            logs: what it logged.
            step: the step that it ran in.
            batch: the whole batch.
            may_verify: run the step once more where a value is new.
            deferred: compare along with the next batch, so that nothing waits.
        """
        cp = self._cp
        if cp.cp_size == 1:
            return output
        tokens, others = self._sort(trial, output, logs, step)
        if deferred:
            for name, value, _ in others:
                cp.released.add(name, value, cp.groups.context.device)
        else:
            unseen = self._verify and self._has_unseen(trial, others, logs, step)
            differ, unseen = cp.compare([value for _, value, _ in others], unseen)
            if may_verify and self.any_data_rank(unseen):
                self.verify(trial, batch, step)
                self._count_missing(trial.stage, step, others, logs)
                tokens, others = self._sort(trial, output, logs, step)
                differ = cp.find_differing([value for _, value, _ in others])
            if differ:
                name, value = others[differ[0]][:2] if others else ("returned", None)
                raise ValueError(
                    f"{trial.stage}() {name}: {outputs.describe(value)} on rank {step.cp_rank} of "
                    f"the {step.cp_size} that share the sequences, and something else on another. "
                    f"It is computed from the tokens of one rank. {CURE}"
                )
        if trial.training:  # as large as the model's own activations, and rarely looked at
            return output
        whole = {path: cp.unshard_value(x, dim, step) for path, (dim, x) in tokens.items()}
        return outputs.rebuild(output, whole)

    def _count_missing(
        self,
        stage: str,
        step: Step,
        others: list[tuple[str, Any, str]],
        logs: list[Logged],
    ) -> None:
        """Give up trying for a value that trial runs do not produce: ranks compare it only."""
        for key in _keys(others, logs):
            full = stage, _shape_of(step), key
            if full not in self._kinds:
                self._missing[full] = self._missing.get(full, 0) + 1
                if self._missing[full] >= _TRIES:
                    self._kinds[full] = "same"

    def _sort(
        self, trial: Trial, output: Any, logs: list[Logged], step: Step
    ) -> tuple[dict[str, tuple[int, Any]], list[tuple[str, Any, str]]]:
        """Return what is of tokens, by path, with its dim; and what ranks must hold alike."""
        tokens, others = {}, []
        for leaf in self._returned(output, trial.training):
            dim, key = self._cp.token_dim(leaf, step), f"output{leaf.path}"
            kind = self._kind(trial.stage, _shape_of(step), key) if dim is None else dim
            if isinstance(kind, int):
                tokens[leaf.path] = kind, leaf.value
            elif loss_of(leaf.value, step) is None:
                others.append((f"returned {key}", leaf.value, key))
        others += [
            (f"logged {x.name!r}", x.value, f"log {x.name}")
            for x in logs
            if not x.is_global and not x.reduction
        ]
        return tokens, others

    def _kind(self, stage: str, shape: _Shape, name: str) -> Kind | None:
        """Return what a value is, as batches like this one have shown, or else other batches."""
        shapes = (shape, *(other for at, other, _ in self._kinds if at == stage))
        known = (self._kinds.get((stage, other, name)) for other in shapes)
        return next((kind for kind in known if kind is not None), None)

    def _has_unseen(
        self, trial: Trial, others: list[tuple[str, Any, str]], logs: list[Logged], step: Step
    ) -> bool:
        """Say whether a value has come up that no trial run has shown to be right."""
        shape = _shape_of(step)
        keys = [(trial.stage, shape, key) for key in _keys(others, logs)]
        return any(key not in self._kinds or key in self._open for key in keys)


def _keys(others: list[tuple[str, Any, str]], logs: list[Logged]) -> list[str]:
    """Return the names of the values that only a trial run can show to be right."""
    return [key for _, _, key in others] + [f"log {x.name}" for x in logs if x.reduction]


def _shape_of(step: Step) -> _Shape:
    if isinstance(step, HandedOver):
        return ()
    is_filled = step.layout.padded_len > step.layout.seq_len
    if step.padding is None:
        return (is_filled,)
    return is_filled, bool(step.padding[:, 0].any()), bool(step.padding[:, -1].any())


def _covers(asked: dist.ProcessGroup | None, group: GroupTransport) -> bool:
    """Say whether a metric is put together over the ranks that share sequences."""
    return asked is None or group.covered_by(asked)
