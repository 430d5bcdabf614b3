# SPDX-License-Identifier: Apache-2.0
"""What one step knows, and the one variable that says which step is active.

A `Step` holds values only: who owns what, the row's documents and padding, this rank's position ids
and targets, the groups. Attention, loss and unshard read it; nothing writes to it.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from lightning_cp.compat import in_backward
from lightning_cp.layout import Layout
from lightning_cp.mask import BoolArray, Bounds, IntArray, Mask
from lightning_cp.mesh import Groups

IGNORED_LABEL: Final = -100
"""The label of a token that counts for no loss."""

_uids = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Targets:
    """The labels of a step, and how many tokens count.

    Args:
        labels: this rank's part of the user's labels, as the step yielded it.
        version: the version of that tensor then; a user who edits it in place changes it.
        shifted: int64 [B, L], the label of the next token of the same document.
        num_shifted: 0-dim int64, valid shifted labels of the whole batch, over all ranks that the
            loss is averaged over.
        num_plain: the same for labels that are not shifted.
    """

    labels: Tensor
    version: int
    shifted: Tensor
    num_shifted: Tensor
    num_plain: Tensor

    def are(self, labels: Tensor) -> bool:
        """Say whether ``labels`` are the ones that this was worked out from."""
        return labels is self.labels and labels._version == self.version


@dataclass(frozen=True, eq=False)
class Step:
    """One batch under context parallelism, as this rank sees it.

    Args:
        layout: who owns which position.
        groups: whom this rank works with.
        batch_size: rows in the batch.
        documents: int64 [B, S] on the host, None where each row is one document.
        padding: bool [B, S] on the host, true where the user's batch is padded; None for nowhere.
        position_ids: int64 [B, L], this rank's part.
        targets: the labels, where the batch has some.
        training: whether the loss is averaged over the data axis too.
        algorithm: how keys travel: ``auto`` or a name.
        kernel: what computes a block: ``auto`` or a name.
    """

    layout: Layout
    groups: Groups
    batch_size: int
    documents: IntArray | None
    padding: BoolArray | None
    position_ids: Tensor
    targets: Targets | None
    training: bool
    algorithm: str
    kernel: str
    uid: int = field(default_factory=lambda: next(_uids))
    # What attention worked out for a mask, by the mask's key; layers share it.
    cache: dict[object, Any] = field(default_factory=dict, repr=False)

    @property
    def cp_rank(self) -> int:
        """Return this rank's place among those that share the row."""
        return self.groups.context.rank

    @property
    def cp_size(self) -> int:
        """Return how many ranks share the row."""
        return self.layout.cp_size

    def bounds(self, mask: Mask) -> Bounds:
        """Work a mask out for this step's rows; documents and padding come from the step."""
        key = ("bounds", mask.key())
        if key not in self.cache:
            bounds = mask.bounds(
                self.layout.seq_len,
                padded_len=self.layout.padded_len,
                documents=self.documents,
                padding=self.padding,
            )
            # The mask stays with it: a key may hold the id of a tensor, which must not be reused.
            self.cache[key] = (bounds, mask)
        found: Bounds = self.cache[key][0]
        return found


@dataclass(frozen=True, eq=False)
class StepMask(Mask):
    """A mask that carries its step: attention needs no active step where it is used."""

    step: Step | None = None


class _Paused:
    """Stands for: context parallelism is off, on purpose."""


# A module variable, not a ContextVar: with activation checkpointing, attention runs again on
# autograd's device threads, which do not inherit the caller's context.
_current: Step | _Paused | None = None
_ever_active = False


def current() -> Step | None:
    """Return the active step; None when there is none, or when it is paused."""
    return _current if isinstance(_current, Step) else None


@contextmanager
def activate(step: Step) -> Iterator[None]:
    """Make ``step`` the one that attention and loss see, and restore the former on exit."""
    global _current, _ever_active
    previous, _current, _ever_active = _current, step, True
    try:
        yield
    finally:
        _current = previous


@contextmanager
def paused() -> Iterator[None]:
    """Switch context parallelism off: whole rows, on this rank alone."""
    global _current
    previous, _current = _current, _Paused()
    try:
        yield
    finally:
        _current = previous


def check_recompute() -> None:
    """Refuse attention that is recomputed in backward after its step has ended.

    It would see only this rank's keys, and nobody would notice.
    """
    if _current is None and _ever_active and in_backward():
        raise RuntimeError(
            "Attention runs again in backward (activation checkpointing), but its step has ended. "
            "Use checkpoint(..., use_reentrant=False, context_fn=cp.recompute), or take the mask "
            "from cp.mask(...), which carries its step, or call backward inside `with "
            "cp.step(...)`. For attention on whole rows use `with cp.paused():`."
        )
