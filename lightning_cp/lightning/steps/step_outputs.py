# SPDX-License-Identifier: Apache-2.0
"""What a step returns, predicts and logs: unsharded, equal on all ranks, as on one device.

A value may leave a step if it holds one value per token (then full sequences are returned), if it
is a mean over the tokens of all ranks, or if all context ranks hold the same value and a trial run
has shown that one device would compute it too. Any other value raises on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from lightning_cp.compare.trials import Finding, Kind, TrialRuns, returned_leaves
from lightning_cp.data import outputs
from lightning_cp.data.consistency import CURE, compare_values, find_differing
from lightning_cp.data.shard import token_dim, unshard_value
from lightning_cp.lightning.steps.logs import Logged, loss_of
from lightning_cp.lightning.steps.trial_run import ModuleCall
from lightning_cp.parallel import ContextParallel
from lightning_cp.step.step import Opened, Step

_Padding = tuple[bool, ...]
"""Whether sharding pads a batch, and whether it has padding of its own at the start, at the end.

A step may be right for one and wrong for the other.
"""

_Key = tuple[str, _Padding, str]
"""A stage, the padding of a batch, and the name of a value."""

MAX_TRIALS: Final = 8
"""After so many trial runs, a value that is 0 or uniform in all of them is accepted."""


@dataclass
class Evidence:
    """What trial runs have shown about one value.

    Args:
        kind: what the value is; None until a trial run has produced it.
        is_open: whether it was 0 or uniform in all trial runs, as many computations give.
        num_trials: trial runs that left it open, or that did not produce it.
    """

    kind: Kind | None = None
    is_open: bool = False
    num_trials: int = 0

    @property
    def is_settled(self) -> bool:
        """Return whether no further trial run is needed."""
        return self.kind is not None and not self.is_open

    def add(self, finding: Finding) -> None:
        """Add the result of a trial run."""
        if not finding.is_uniform:
            self.is_open = False
        elif self.kind is None:
            self.is_open, self.num_trials = True, 0
        self.kind = finding.kind

    def count_trial(self) -> None:
        """Count a trial run that did not settle the value; give up after the last one."""
        self.num_trials += 1
        if self.num_trials >= MAX_TRIALS:
            self.kind = "same" if self.kind is None else self.kind
            self.is_open = False


class _Output(NamedTuple):
    """A value that must be the same on all context ranks.

    Args:
        key: its name among the values of the step.
        source: where it comes from, for errors: ``logged 'val_loss'``.
        value: the value.
    """

    key: str
    source: str
    value: Any


class StepOutputs:
    """Checks the values that leave the steps of a LightningModule, and unshards sequences.

    Args:
        cp: how sequences are sharded, and whether steps are verified.
        lockstep: whether data ranks take part in each other's runs, since they hold shards of the
            same parameters.
    """

    def __init__(self, cp: ContextParallel, *, lockstep: bool = True) -> None:
        self._cp = cp
        max_len = cp.config.verify.max_len
        self.trials = TrialRuns(cp, max_len=max_len, data=[cp.groups.data] if lockstep else [])
        self._evidence: dict[_Key, Evidence] = {}
        self._verified: set[tuple[str, _Padding, object]] = set()

    @property
    def is_on(self) -> bool:
        """Return whether steps are compared with one device."""
        return self._cp.config.verify.steps and self._cp.cp_size > 1

    @property
    def is_verifying(self) -> bool:
        """Return whether a trial run is in progress."""
        return self.trials.is_running

    def is_due(self, stage: str, step: Opened, loader: object = 0) -> bool:
        """Return whether no trial run was made on a batch of this stage, padding and loader."""
        return self.is_on and (stage, _padding_of(step), loader) not in self._verified

    def verify(self, call: ModuleCall, batch: Any, step: Opened, loader: object = 0) -> None:
        """Make a trial run; raise if sharding changes a value. Collective.

        Args:
            call: the step.
            batch: the full batch.
            step: the step that is open for the batch.
            loader: the index of its loader.
        """
        padding = _padding_of(step)
        for findings in self.trials.run(call, batch, step):
            for name, finding in findings.items():
                self._evidence.setdefault((call.stage, padding, name), Evidence()).add(finding)
        for (stage, *_), evidence in self._evidence.items():
            if stage == call.stage and evidence.is_open:
                evidence.count_trial()
        self._verified.add((call.stage, padding, loader))

    def release(
        self,
        call: ModuleCall,
        output: Any,
        logs: list[Logged],
        step: Opened,
        *,
        batch: Any,
        may_verify: bool = True,
        deferred: bool = False,
    ) -> Any:
        """Return the output of a step, unsharded; raise if context ranks differ. Collective.

        Args:
            call: the step, for values that no trial run has produced.
            output: what it returned.
            logs: what it logged.
            step: the step in which it ran.
            batch: the full batch.
            may_verify: make a trial run for a value that is new.
            deferred: compare together with the next batch, without waiting for other ranks.
        """
        cp = self._cp
        if cp.cp_size == 1:
            return output
        tokens, others = self._sort(call, output, logs, step)
        if deferred:
            for other in others:
                cp.checks.released.add(other.source, other.value, cp.groups.context.device)
        else:
            keys = _keys_to_settle(call.stage, step, others, logs)
            is_new = self._cp.config.verify.steps and not all(self._is_settled(key) for key in keys)
            differing, is_new = compare_values(
                [other.value for other in others], cp.groups.context, is_new
            )
            if may_verify and self.trials.any_data_rank(is_new):
                self.verify(call, batch, step)
                for key in keys:
                    evidence = self._evidence.setdefault(key, Evidence())
                    if evidence.kind is None:
                        evidence.count_trial()
                tokens, others = self._sort(call, output, logs, step)
                differing = find_differing([other.value for other in others], cp.groups.context)
            if differing:
                _, source, value = others[differing[0]] if others else ("", "returned", None)
                raise ValueError(
                    f"{call.stage}() {source}: {outputs.describe(value)} on rank {step.cp_rank} of "
                    f"the {step.cp_size} context ranks, and another value on another rank. It is "
                    f"computed from the tokens of one rank. {CURE}"
                )
        if call.is_training:  # as large as the activations of the model, and rarely used
            return output
        full = {path: unshard_value(x, dim, step) for path, (dim, x) in tokens.items()}
        return outputs.rebuild(output, full)

    def _sort(
        self, call: ModuleCall, output: Any, logs: list[Logged], step: Opened
    ) -> tuple[dict[str, tuple[int, Any]], list[_Output]]:
        """Return the values per token, by path, with their dim; and those that ranks must share."""
        tokens, others = {}, []
        for leaf in returned_leaves(output, training=call.is_training):
            key = f"output{leaf.path}"
            dim = token_dim(leaf, step)
            kind = self._find_kind(call.stage, _padding_of(step), key) if dim is None else dim
            if isinstance(kind, int):
                tokens[leaf.path] = kind, leaf.value
            elif loss_of(leaf.value, step) is None:
                others.append(_Output(key, f"returned {key}", leaf.value))
        others += [
            _Output(f"log {log.name}", f"logged {log.name!r}", log.value)
            for log in logs
            if not log.is_global and not log.reduction
        ]
        return tokens, others

    def _find_kind(self, stage: str, padding: _Padding, name: str) -> Kind | None:
        """Return the kind of a value for batches with this padding, or else for other batches."""
        same = self._evidence.get((stage, padding, name), Evidence()).kind
        if same is not None:
            return same
        others = (
            x.kind for (at, _, key), x in self._evidence.items() if (at, key) == (stage, name)
        )
        return next((kind for kind in others if kind is not None), None)

    def _is_settled(self, key: _Key) -> bool:
        return key in self._evidence and self._evidence[key].is_settled


def _keys_to_settle(
    stage: str, step: Opened, others: Sequence[_Output], logs: Sequence[Logged]
) -> list[_Key]:
    """Return the keys of the values that only a trial run can show to be right."""
    names = [other.key for other in others] + [f"log {log.name}" for log in logs if log.reduction]
    return [(stage, _padding_of(step), name) for name in names]


def _padding_of(step: Opened) -> _Padding:
    if not isinstance(step, Step):
        return ()
    is_extended = step.layout.padded_len > step.layout.seq_len
    if step.padding is None:
        return (is_extended,)
    return is_extended, bool(step.padding[:, 0].any()), bool(step.padding[:, -1].any())
