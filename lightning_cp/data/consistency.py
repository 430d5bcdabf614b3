# SPDX-License-Identifier: Apache-2.0
"""Checks that context ranks hold the same batch, loss and logged values.

Ranks gather a few integers that describe what they hold; whatever is wrong on one rank is raised
on all of them, so that no rank waits for another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from lightning_cp.comm.collective_errors import any_rank, gather_texts
from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import Transport, gather
from lightning_cp.data.media_names import MEDIA, media_of
from lightning_cp.data.outputs import OutputLeaf, checksum, checksums, digest, form
from lightning_cp.step.leaves import Flat, flatten

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A description of a batch that ranks compare.

    Args:
        text: names, shapes and dtypes.
        shapes: a digest of the text.
        contents: a checksum of the values; 0 where they are not compared.
    """

    text: str = ""
    shapes: int = 0
    contents: int = 0


def build_fingerprint(flat: Flat, *, values: bool) -> Fingerprint:
    """Describe a batch in two integers."""
    # Sorted: the order of keys does not matter.
    leaves = sorted(flat.tensors, key=lambda leaf: leaf.path)
    text = ", ".join(
        f"{x.path} {tuple(x.value.shape)} {str(x.value.dtype).removeprefix('torch.')}"
        for x in leaves
    )
    contents = 0
    for x in leaves if values else ():
        contents = (contents * 31 + int(checksum(x.value, x.value.device))) % (1 << 56)
    return Fingerprint(text, digest(text), contents)


class Released:
    """Values that have left steps, and that the context ranks have not compared yet.

    They are compared together with the next batch: nothing waits for them before.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._digest: Tensor | None = None

    def add(self, name: str, value: Any, device: torch.device) -> None:
        """Add a value; ranks must add the same ones, in the same order."""
        number = checksum(value, device)
        self._digest = number if self._digest is None else self._digest * 31 + number
        self.names.append(name)

    def take(self, device: torch.device) -> tuple[Tensor, list[str]]:
        """Return a digest of the values, int64 [1], and their names; forget them."""
        total, names = self._digest, self.names
        self._digest, self.names = None, []
        none = torch.zeros(1, dtype=torch.int64, device=device)
        return (none if total is None else total.reshape(1) + len(names)), names


class BatchChecks:
    """What one `ContextParallel` compares between ranks, and how often.

    Args:
        groups: the ranks that compare.
        num_batches: for how many batches contents are compared, in training and in evaluation.
    """

    def __init__(self, groups: Groups, num_batches: int) -> None:
        self.released = Released()
        self.uneven_media: list[str] = []
        """Media of the last batch that some data ranks hold and others do not."""
        self._groups = groups
        self._num_batches = num_batches
        self._counts = {True: 0, False: 0}  # in training, in evaluation

    def count_batch(self, training: bool) -> bool:
        """Count a batch, and return whether the ranks compare its contents."""
        self._counts[training] += 1
        return self._counts[training] <= self._num_batches

    def checked(self, batch: Any, build: Callable[[Flat], T], *, training: bool, values: bool) -> T:
        """Return what a function makes of a batch; what it raises on one rank is raised on all.

        Collective. The other arguments are those of `check_batch`.
        """
        problem, flat = None, Flat()
        try:
            flat = flatten(batch)
            built = build(flat)
        except Exception as error:  # noqa: BLE001  raised below, on all ranks
            problem = error
        self.check_batch(flat, problem, training=training, values=values)
        return built

    def check_batch(
        self, flat: Flat, problem: Exception | None, *, training: bool, values: bool
    ) -> None:
        """Raise on all ranks if one refuses its batch, or if context ranks differ. Collective.

        Args:
            flat: the full batch.
            problem: why this rank refuses it, if it does.
            training: whether the data ranks take part.
            values: whether to compare contents too.
        """
        context, tensor, fingerprint = self._groups.context, self._groups.tensor, Fingerprint()
        try:
            if problem is None and context.size * tensor.size > 1:
                fingerprint = build_fingerprint(flat, values=values)
        except Exception as error:  # noqa: BLE001  raised below, on all ranks
            problem = error
        problem = compare_batches(fingerprint, problem, context, self.released)
        problem = compare_batches(fingerprint, problem, tensor, axis="tensor")
        if training and self._groups.data.size > 1:
            failed = self.compare_media(flat, problem)
            # That group would not take part in the loss, and this one would wait for it.
            if failed and problem is None:
                problem = ValueError(
                    "Another context-parallel group of this job (other samples of the data axis) "
                    "refused its batch; see the errors of its ranks."
                )
        if problem is not None:
            raise problem

    def compare_media(self, flat: Flat, problem: Exception | None = None) -> bool:
        """Find media that some data ranks hold and others do not. Collective over data ranks.

        Args:
            flat: the full batch.
            problem: why this rank refuses it, if it does.

        Returns:
            Whether a data rank refuses its batch.
        """
        held = media_of(flat) if problem is None else set()
        flags = [flag for name in MEDIA for flag in (name in held, name not in held)]
        failed, *flags = any_rank([problem is not None, *flags], self._groups.data)
        pairs = zip(MEDIA, flags[::2], flags[1::2], strict=True)
        self.uneven_media = [name for name, some, others in pairs if some and others]
        return failed

    def check_loss(self, loss: Tensor) -> None:
        """Raise if ranks disagree about a loss, while batches are still compared. Collective."""
        if self._counts[True] > self._num_batches:
            return
        extremes = loss.detach().double().reshape(1).to(self._groups.context.device)
        for group in (self._groups.context, self._groups.data):
            extremes = torch.stack(gather(extremes, group).nan_to_num().aminmax())
        lowest, highest = extremes.tolist()
        if lowest != highest:
            raise ValueError(
                f"The loss is not the same on all ranks, but between {lowest} and {highest}: a "
                "part of it is computed from this rank's tokens only. Use token_mean() for cross "
                "entropy, global_mean(total, count) from lightning_cp.loss for other terms, and "
                "sample_mean(losses) for losses of samples."
            )

    def check_released(self) -> None:
        """Raise on all ranks if values that left former steps differ. Collective."""
        context = self._groups.context
        total, names = self.released.take(context.device)
        totals = gather(total, context)
        if bool((totals != totals[0]).any()):
            raise _differing(names)


def compare_batches(
    fingerprint: Fingerprint,
    problem: Exception | None,
    context: Transport,
    released: Released | None = None,
    *,
    axis: str = "context",
) -> Exception | None:
    """Return the error that all ranks of a group must raise: one refuses its batch, or they differ.

    Args:
        fingerprint: this rank's batch.
        problem: why this rank refuses it, if it does.
        context: the ranks that must hold the same batch.
        released: values that have left former steps.
        axis: the name of the ranks.
    """
    total, names = (released or Released()).take(context.device)
    if context.size == 1:  # nothing to compare: the host must not wait for the device
        return problem
    numbers = [int(problem is not None), fingerprint.shapes, fingerprint.contents]
    state = torch.cat([torch.tensor(numbers, device=context.device), total])
    states = gather(state, context).tolist()
    if any(values != states[0][3] for *_, values in states):
        return _differing(names)
    refused = next((rank for rank, (failed, *_) in enumerate(states) if failed), None)
    if refused is not None:
        text = gather_texts(str(problem or ""), context)[refused]
        return problem or ValueError(
            f"Rank {refused} of the {axis}-parallel group refused its batch: {text}"
        )
    odd = next((rank for rank, values in enumerate(states) if values != states[0]), None)
    if odd is None:
        return None
    what = "shapes" if states[odd][1] != states[0][1] else "values"
    return ValueError(
        f"All ranks of a {axis}-parallel group must hold the same batch, but rank {odd} and rank "
        f"0 differ in their {what}; this is rank {context.rank}, with {fingerprint.text}. Usual "
        "causes: a sampler or an iterable data set that is split by the global rank instead of the "
        "data-parallel rank, shuffling or augmentation without a common seed, worker seeds that "
        "depend on the global rank."
    )


def find_differing(values: Sequence[Any], context: Transport) -> list[int]:
    """Return the indices of values that the ranks disagree about. Collective.

    Ranks may hold different numbers of values: then all of them differ.
    """
    return compare_values(values, context)[0]


def compare_values(
    values: Sequence[Any], context: Transport, flag: bool = False
) -> tuple[list[int], bool]:
    """Return what `find_differing` returns, and whether any rank has set the flag. Collective."""
    if context.size == 1:
        return [], flag
    device = context.device
    forms = digest("\n".join(form(OutputLeaf("", x)) for x in values))
    sums = checksums(values, device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number in sums:
        total = total * 31 + number
    state = torch.stack([torch.tensor(x, device=device) for x in (forms, int(flag))] + [total])
    states = gather(state, context).tolist()
    any_flag = any(flagged for _, flagged, _ in states)
    if any(other != forms for other, _, _ in states):
        return list(range(len(values))), any_flag
    if all(other == states[0][2] for *_, other in states):
        return [], any_flag
    each = gather(sums, context)
    differs = (each != each[0]).any(0).tolist()
    return [index for index, differ in enumerate(differs) if differ], any_flag


def _differing(names: Sequence[str]) -> ValueError:
    """Return the error for values of former steps that differ between ranks."""
    listed = ", ".join(dict.fromkeys(names)) or "nothing on this rank"
    return ValueError(
        "The ranks of a context-parallel group computed different values since the last "
        f"comparison; one of: {listed}. A value that is computed from the tokens of one rank is "
        f"not what one device would compute. {CURE}"
    )


CURE: Final = (
    "Compute it from full sequences, which are the same on every rank:\n"
    "    cp = self.trainer.strategy.context_parallel\n"
    "    x = cp.unshard(x, 1)  # [batch, tokens, ...]; one token or the mean: cp.pool(x, 'last')\n"
    "or over the tokens of all ranks: token_mean(logits, labels) from lightning_cp or "
    "global_mean(total, count) from lightning_cp.loss. For a metric, update it with this rank's "
    "tokens and log the object with on_step=False, on_epoch=True (or build it with "
    "dist_sync_on_step=True); targets of the next token are cp.shift_labels(labels), with the "
    "logits unchanged. Log a measurement of one process (time, memory) with rank_zero_only=True."
)
"""How to make a value that may leave a step."""
