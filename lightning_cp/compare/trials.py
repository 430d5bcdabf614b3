# SPDX-License-Identifier: Apache-2.0
"""Trial runs: a step runs sharded and as one device would, and what it yields is compared.

A trial run classifies every value that a step returns, logs or adds to a metric: one value per
token along a dim, or the same value on all context ranks. A value that is neither raises on all
ranks; so does one that a hook of the user has changed from what it is on one device. How a step
runs is up to its `StepCall`: a LightningModule's and a Trainer's have their own.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_cp.adapters import output_dims
from lightning_cp.comm.collective_errors import any_rank, from_all, gather_texts
from lightning_cp.comm.transport import Transport, gather
from lightning_cp.compare.restore import NotRestoredError
from lightning_cp.compare.verify import MIXING, distances, relative, truncate_batch
from lightning_cp.data import batch as batches
from lightning_cp.data import outputs
from lightning_cp.data.consistency import find_differing
from lightning_cp.data.media_names import media_names
from lightning_cp.data.outputs import OutputLeaf
from lightning_cp.data.shard import token_dim, unshard_value
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import active_step
from lightning_cp.step.step import Opened, Step

Kind = int | Literal["same"]
"""The dim along which a value holds tokens, or ``same`` for one value on all context ranks."""

LONGEST_MEDIA = 16384
"""Tokens of a batch with media that each rank runs in full, where it cannot be truncated."""

# Largest error of a gradient, relative to its norm, that rounding explains in float32 and float64.
# Lower precisions are not compared: few tokens and the choices of a router differ by half and more.
_GRADIENT = 2e-3

# Equal computations of a number on several ranks may differ by atomic additions alone.
_ULPS = 8


class Finding(NamedTuple):
    """The result of a trial run for one value.

    Args:
        kind: what the value is.
        is_uniform: whether it was 0 or all its elements were equal, as many computations give.
    """

    kind: Kind
    is_uniform: bool


@dataclass(frozen=True)
class Value:
    """One value of a run.

    Args:
        leaf: the value, and its sequence dim if that is known.
        source: where it comes from, for errors: ``logged 'val_loss'``.
        reduction: how ranks combine their parts of it; empty if it is not in parts.
        is_global: whether it is known to be a mean over the tokens of all ranks.
        is_loss: whether it is a mean over tokens, whose rounding errors mostly cancel; and must be
            the same number on all context ranks.
        floor: a difference that is rounding, whatever the value: of sums that nearly cancel.
    """

    leaf: OutputLeaf
    source: str
    reduction: str = ""
    is_global: bool = False
    is_loss: bool = False
    floor: float = 0.0


@dataclass(frozen=True)
class StepRun:
    """A step that has run.

    Args:
        values: what it has returned, logged and added to metrics, by name.
        step: the step that was open; None if models open their own steps inside.
        gradients: of all parameters by name, averaged over the context ranks; empty if unknown.
        kept: numbers that it has kept, by their places. Some may be its own: a time, for example.
    """

    values: dict[str, Value]
    step: Opened | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, float] = field(default_factory=dict)

    def describe(self) -> str:
        """Return where the values come from, for errors."""
        return ", ".join(value.source for value in self.values.values()) or "nothing"


class StepCall(Protocol):
    """A step that can run on any batch, and leaves nothing changed."""

    @property
    def stage(self) -> str:
        """Return the name of the step, such as ``validation_step``."""

    @property
    def skip(self) -> str:
        """Return the argument that omits trial runs, for errors."""

    def precision(self) -> torch.dtype:
        """Return the lowest precision in which the step computes."""

    may_draw: bool
    """Whether random numbers may enter what it returns; in evaluation mode once this is False."""

    leaves_out: bool
    """Whether values that differ from seed to seed are left out: measurements of one process."""

    def run(self, batch: Any, *, alone: bool, seed: int = 0) -> StepRun:
        """Run the step on a full batch: sharded, or ``alone``, as one device would.

        Random numbers are those of the step that follows, or of another seed.
        """

    def cure(self, value: Value) -> str:
        """Return how to make a value that differs, for errors."""

    def report_kept(self, wrong: Mapping[str, tuple[float, float]]) -> str:
        """Return the error for numbers that the step has kept, and those of one device.

        Empty if they are no reason to raise.
        """


class TrialRuns:
    """Runs steps sharded and on full sequences, and classifies their values.

    Args:
        cp: how sequences are sharded.
        max_len: the length to which sequences are truncated.
        data: the data ranks that take part in each other's runs, since they hold shards of the
            same parameters or would wait for a rank that raises.
    """

    def __init__(
        self, cp: ContextParallel, *, max_len: int, data: Sequence[Transport] = ()
    ) -> None:
        self._cp = cp
        self._max_len = max_len
        self._data = list(data)
        self.is_running = False

    def run(self, call: StepCall, batch: Any, step: Opened) -> list[dict[str, Finding]]:
        """Run a step on parts of a batch, and compare. Collective.

        Args:
            call: the step.
            batch: the full batch.
            step: the step that is open for the batch.

        Returns:
            For each part that the step accepts, the finding for each value by name.
        """
        with active_step.paused():
            parts = self._cp.checks.checked(
                batch, lambda _: self._trial_batches(batch, step), training=False, values=True
            )
            results, failure = self.compare_runs(call, self.equal_number(parts))
            # Truncation may cut off placeholders of media.
            is_cut = failure is not None and not results and bool(media_names(batch))
            if self.any_rank(is_cut)[0] and not self.any_rank(self._is_too_long(step))[0]:
                results, failure = self.compare_runs(call, [batch])
            if failure is not None and not results:
                raise failure
            return results

    def any_data_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on any data rank that takes part in this rank's runs."""
        return any_rank([flag], *self._data)[0]

    def any_rank(self, *flags: bool) -> list[bool]:
        """Return which flags are set on any rank that takes part in this rank's runs."""
        return any_rank(flags, self._cp.groups.context, *self._data)

    def _everywhere(self, flags: Iterable[bool]) -> list[bool]:
        """Return which flags are set on all context ranks."""
        missing = [not flag for flag in flags]
        return [not x for x in any_rank(missing, self._cp.groups.context)] if missing else []

    # ---------------------------------------------------------------- batches to run on

    def _trial_batches(self, batch: Any, step: Opened) -> list[Any]:
        """Return short batches like this one.

        They are padded by sharding if the batch is. Two of them, and one with padding of its own if
        the batch has some. None for a long batch that is handed over, which cannot be truncated.
        One with media stays as it is where data ranks take part: a model may refuse what is left
        of one data rank's batch, amid a run in which the others wait for it. None if it is long.
        """
        if any(group.size > 1 for group in self._data) and media_names(batch):
            return [] if self._is_too_long(step) else [batch] * 2
        if not isinstance(step, Step):
            return [batch] * 2 if step.seq_len <= self._max_len else []
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

    def _is_too_long(self, step: Opened) -> bool:
        """Return whether the batch is too long for each rank to run all of it."""
        return step.seq_len > max(self._max_len, LONGEST_MEDIA)

    def equal_number(self, parts: list[Any]) -> list[Any]:
        """Return equally many parts on all data ranks; none if one rank has none. Collective."""
        is_none, is_three = self.any_rank(not parts, len(parts) > 2)
        return [] if is_none else [*parts, *parts[:1]][: 3 if is_three else 2]

    # ---------------------------------------------------------------- comparing two runs

    def compare_runs(
        self, call: StepCall, parts: Sequence[Any]
    ) -> tuple[list[dict[str, Finding]], Exception | None]:
        """Return the findings of each part that the step accepts, and the last error of others.

        Collective: all ranks have equally many parts.
        """
        failure: Exception | None = None
        results: list[dict[str, Finding]] = []
        settled: set[str] | None = None
        for part in parts:
            # Full sequences first: all ranks compute the same there, so that an error is raised by
            # all of them. A step that does not accept shorter sequences is run on the next part.
            is_first = not results and (call.may_draw or call.leaves_out)
            runs, problem = self._run_alone(call, part, 2 if is_first else 1)
            failure = problem or failure
            if not runs:
                continue
            if is_first and call.leaves_out:
                names = _settled(runs[0], runs[1], call.precision())
                settled = set.intersection(*from_all(names))
            sharded = self._run(call, part, alone=False)
            results.append(
                self._compare(call, part, _only(sharded, settled), _only(runs[0], settled))
            )
        return results, failure

    def _run_alone(
        self, call: StepCall, part: Any, num_seeds: int
    ) -> tuple[list[StepRun], Exception | None]:
        """Return runs on full sequences, each with a seed of its own; none if a rank raises.

        Modules of dropout are switched off; functions are by evaluation mode alone, which hides
        what only training does.
        """
        runs, problem = list[StepRun](), None
        try:
            runs = [self._run(call, part, alone=True, seed=seed) for seed in range(num_seeds)]
        except NotRestoredError:
            raise
        except Exception as error:  # noqa: BLE001  raised by the caller if no part is accepted
            problem = error
        is_drawn = call.may_draw and len(runs) > 1 and _is_drawn(call, *runs)
        failed, is_drawn = self.any_rank(problem is not None, is_drawn)
        if failed:
            return [], problem or RuntimeError("It raised on another rank.")
        if is_drawn:
            call.may_draw = False
            return self._run_alone(call, part, 2 if call.leaves_out else 1)
        return runs, None

    def _run(self, call: StepCall, part: Any, *, alone: bool, seed: int = 0) -> StepRun:
        self.is_running = True
        try:
            return call.run(part, alone=alone, seed=seed)
        except Exception as error:
            error.add_note(
                f"This error was raised by the trial run of {call.stage}(), which compares it with "
                f"a run on full sequences. {call.skip} skips it."
            )
            raise
        finally:
            self.is_running = False

    def _find_kept(self, call: StepCall, part: Any, sharded: StepRun, full: StepRun) -> str:
        """Return what is wrong with a number that the step has kept; empty if nothing is.

        Collective. Numbers that one device would not keep again, or that it does not keep at all,
        are none of this.
        """
        precision = call.precision()

        def differ(run: StepRun, names: Iterable[str]) -> list[str]:
            return [
                name
                for name in names
                if name not in run.kept
                or not outputs.is_close(run.kept[name], full.kept[name], precision)
            ]

        common = sharded.kept.keys() & full.kept.keys()
        suspects = differ(sharded, (x for x in common if sharded.kept[x] != full.kept[x]))
        message = ""
        if self.any_rank(bool(suspects))[0]:
            own = differ(self._run(call, part, alone=True), suspects)
            wrong = {
                name: (sharded.kept[name], full.kept[name])
                for name in sorted(suspects)
                if name not in own
            }
            message = call.report_kept(wrong) if wrong else ""
        if any_rank([bool(message)], self._cp.groups.context)[0]:
            return message or f"{call.stage}() kept a wrong number on another rank; see its error."
        return ""

    def _compare(
        self, call: StepCall, part: Any, sharded: StepRun, full: StepRun
    ) -> dict[str, Finding]:
        """Classify each value; raise for those that one device would not compute."""
        names, group = list(sharded.values), self._cp.groups.context
        kept = self._find_kept(call, part, sharded, full)  # on all ranks, whatever else is wrong
        if find_differing(names, group) or names != list(full.values):
            message = (
                f"{call.stage}() returns and logs other values on full sequences "
                f"({full.describe()}) than on the tokens of this rank ({sharded.describe()}), or "
                "the ranks differ. Return and log the same values for all batches."
            )
            kinds = dict[str, Kind]()
        else:
            kinds = self._find_kinds(call, sharded, full)
            wrong = [name for name in names if name not in kinds]
            if wrong:
                message = self._explain(call, sharded, full, wrong)
            else:
                message = self._explain_gradients(call, sharded, full) or kept
        # Data ranks that take part would wait for this one.
        if self.any_data_rank(bool(message)):
            raise ValueError(
                message
                or f"The trial run of {call.stage}() failed on another data rank; see its error."
            )
        return {
            name: Finding(kind, outputs.is_uniform(full.values[name].leaf.value))
            for name, kind in kinds.items()
        }

    def _find_kinds(self, call: StepCall, sharded: StepRun, full: StepRun) -> dict[str, Kind]:
        """Return the kind of each value that is right; the same on all ranks."""
        kinds: dict[str, Kind] = {}
        step, precision = sharded.step, call.precision()
        pairs = {name: (value, full.values[name]) for name, value in sharded.values.items()}
        dims = {
            name: None if step is None else token_dim(value.leaf, step)
            for name, (value, _) in pairs.items()
        }
        # Collectives, which all ranks call whatever they find.
        combined = {name: self._combine(value) for name, value in sharded.values.items()}
        shared = {
            name: not value.is_loss or self._is_shared(value.leaf.value)
            for name, value in sharded.values.items()
        }
        same = self._everywhere(
            dims[name] is None
            and shared[name]
            and outputs.is_close(
                combined[name],
                other.leaf.value,
                precision,
                is_loss=value.is_loss,
                floor=value.floor,
            )
            for name, (value, other) in pairs.items()
        )
        forms = [outputs.form(value.leaf) for value, _ in pairs.values()]
        others = {*find_differing(forms, self._cp.groups.context)}
        alike = [index not in others for index in range(len(forms))]
        for (name, (value, other)), is_same, is_alike in zip(
            pairs.items(), same, alike, strict=True
        ):
            if is_same:
                kinds[name] = "same"
            elif is_alike and not value.reduction and step is not None:
                local, expected = value.leaf.value, other.leaf.value
                for dim in _candidate_dims(local, expected, dims[name], step):
                    unsharded = unshard_value(local, dim, step)
                    if self._everywhere([outputs.is_close(unsharded, expected, precision)])[0]:
                        kinds[name] = dim
                        break
        return kinds

    def _combine(self, value: Value) -> Any:
        """Return a value after its reduction over the context ranks."""
        x = outputs.as_tensor(value.leaf.value)
        if not value.reduction or x is None:
            return value.leaf.value
        group = self._cp.groups.context
        gathered = gather(x.double().to(group.device).contiguous(), group)
        if value.reduction == "sum":
            return gathered.sum(0)
        return gathered.amin(0) if value.reduction == "min" else gathered.amax(0)

    def _is_shared(self, value: Any) -> bool:
        """Return whether all context ranks have computed the same number."""
        x, group = outputs.as_tensor(value), self._cp.groups.context
        if x is None or x.numel() != 1:
            return True
        eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
        gathered = gather(x.detach().double().reshape(1).to(group.device), group)
        low, high = gathered.aminmax()
        return bool((high - low <= _ULPS * eps * high.abs()) | gathered.isnan().all())

    def _explain(self, call: StepCall, sharded: StepRun, full: StepRun, wrong: list[str]) -> str:
        value, other = sharded.values[wrong[0]], full.values[wrong[0]]
        step = sharded.step
        mine = outputs.describe(self._combine(value))
        texts = gather_texts(mine, self._cp.groups.context)[:4]
        by_rank = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
        more = f" ({len(wrong) - 1} more values differ.)" if len(wrong) > 1 else ""
        length = f" of {step.layout.seq_len} tokens" if isinstance(step, Step) else ""
        fix = call.cure(value)
        if value.is_global:
            padding = "" if step is None else batches.describe_filled(step)
            fix = f"Context parallelism changes the results of this model. {padding}{MIXING}"
        return (
            f"{call.stage}() {value.source}: {by_rank} of the {self._cp.cp_size} context ranks, "
            f"but {outputs.describe(other.leaf.value)} on full sequences{length}.{more} {fix} If "
            f"both are right and differ for another reason: {call.skip}."
        )

    def _explain_gradients(self, call: StepCall, sharded: StepRun, full: StepRun) -> str:
        """Return what is wrong with the gradients; empty if nothing is. Collective."""
        if not full.gradients:
            return ""
        # TensorFloat-32 rounds as bfloat16 does, or little less.
        is_low = torch.get_float32_matmul_precision() != "highest"
        if is_low or call.precision() in (torch.float16, torch.bfloat16):
            return ""
        measured = distances(sharded.gradients, full.gradients, self._cp.groups.context)
        if not bool(measured[1].isfinite().all()):
            return ""
        errors = dict(zip(full.gradients, relative(*measured, floor=1e-2).tolist(), strict=True))
        name, worst = max(errors.items(), key=lambda item: (item[1] != item[1], item[1]))
        if worst <= _GRADIENT:
            return ""
        total = float(relative(*(x.norm() for x in measured)))
        return (
            f"{call.stage}() has the loss of one device, but other gradients: that of `{name}` "
            f"differs by {worst:.1e} of its norm, all of them by {total:.1e}. Code that runs in "
            "backward sees this rank's tokens: a hook on a module, tensor or parameter that "
            "changes gradients by their norm or mean, or an autograd function. Change gradients "
            "by constants, or those of parameters after backward, where they are averaged. If "
            f"both are right and differ for another reason: {call.skip}."
        )


def _settled(run: StepRun, other: StepRun, precision: torch.dtype) -> set[str]:
    """Return the names of values that are the same with two seeds; ``gradients`` if these are."""
    names = {
        name
        for name, value in run.values.items()
        if name in other.values
        and outputs.is_close(other.values[name].leaf.value, value.leaf.value, precision)
    }
    difference, norm = (x.norm() for x in distances(other.gradients, run.gradients))
    is_low = precision in (torch.float16, torch.bfloat16)
    return names | ({"gradients"} if is_low or not difference > 1e-4 * norm else set())


def _is_drawn(call: StepCall, run: StepRun, other: StepRun) -> bool:
    """Return whether random numbers enter what a step returns, or its gradients."""
    names = {*run.values, *other.values, "gradients"} - _settled(run, other, call.precision())
    return any(not call.leaves_out or name.startswith(("output", "gradients")) for name in names)


def _only(run: StepRun, settled: set[str] | None) -> StepRun:
    """Return a run without values that differ from seed to seed; all of it if none is left out."""
    if settled is None:
        return run
    values = {name: x for name, x in run.values.items() if name in settled}
    return replace(run, values=values, gradients=run.gradients if "gradients" in settled else {})


def is_in_turn(number: int) -> bool:
    """Return whether a step is compared, by its number: 1, 3, 10, 30, 100 and so on.

    Code of users may change with the number of steps.

    Example:
        >>> [number for number in range(400) if is_in_turn(number)]
        [1, 3, 10, 30, 100, 300]
    """
    while number > 0 and number % 10 == 0:
        number //= 10
    return number in (1, 3)


def copied(batch: Any) -> Any:
    """Return a copy of a batch, which a step may change; what cannot be copied stays the same."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # noqa: BLE001  whatever objects raise
        if isinstance(batch, dict):
            return {name: copied(value) for name, value in batch.items()}
        return batch


def returned_leaves(output: Any, *, training: bool) -> Iterator[OutputLeaf]:
    """Yield the values that a step returned, without the loss of training (see loss_policy)."""
    for leaf in outputs.leaves(output, output_dims):
        if not (training and leaf.path in ("", "['loss']")):
            yield leaf


def _candidate_dims(local: Any, full: Any, known: int | None, step: Opened) -> list[int]:
    """Return the dims along which a value may hold tokens: those that only sharding shortens."""
    a, b = outputs.as_tensor(local), outputs.as_tensor(full)
    if a is None or b is None or a.dim() != b.dim() or not isinstance(step, Step):
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
