# SPDX-License-Identifier: Apache-2.0
"""What one step knows, and the one variable that says which step is active.

A `Step` holds values only: who owns what, the row's documents and padding, this rank's position
ids, the groups. Attention, loss and unshard read it; they add nothing but what they worked out and
which losses were computed.
"""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_cp.collectives import GradientWire, Transport
from lightning_cp.compat import in_backward
from lightning_cp.layout import Layout
from lightning_cp.mask import BoolArray, Bounds, IntArray, Mask
from lightning_cp.mesh import Groups

IGNORED_LABEL: Final = -100
"""The label of a token that counts for no loss."""

_uids = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class LossMark:
    """A loss of a step that is a mean over the tokens of all ranks.

    Args:
        value: the loss, detached.
        num_tokens: over how many tokens of all ranks it is the mean.
        by_position: [2, buckets], sums and numbers of this rank's tokens by their place in the row;
            None where nobody has asked.
    """

    value: Tensor
    num_tokens: Tensor
    by_position: Tensor | None = None


class Gpu(NamedTuple):
    """What the GPUs of all ranks that share a row can do: what travels depends on it.

    Args:
        capability: the least compute capability.
        compiles: whether kernels can be compiled on all of them.
    """

    capability: tuple[int, int]
    compiles: bool


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
        training: whether the loss is averaged over the data axis too.
        algorithm: how keys travel: ``auto`` or a name.
        kernel: what computes a block: ``auto`` or a name.
        attention_memory: GiB that attention may take on a GPU beside what it is given; None to
            leave it open.
        gradient_wire: how precise gradients of keys and values are that collectives add up.
        gpu: what the GPUs of all ranks can do; None where nobody asked.
        has_position_ids: whether the batch brought them, or we counted.
        is_checked: whether the ranks compare what they hold in this step.
        is_stock: on whole rows, with models as they are without us: what others are compared with.
        position_edges: where buckets of positions begin, for losses by position; () for none.
    """

    layout: Layout
    groups: Groups
    batch_size: int
    documents: IntArray | None
    padding: BoolArray | None
    position_ids: Tensor
    training: bool
    algorithm: str
    kernel: str
    attention_memory: float | None = None
    gradient_wire: GradientWire = "float32"
    gpu: Gpu | None = None
    has_position_ids: bool = False
    is_checked: bool = False
    is_stock: bool = False
    position_edges: tuple[int, ...] = ()
    uid: int = field(default_factory=lambda: next(_uids))
    # What attention worked out for a mask, by the mask's key; layers share it.
    cache: dict[object, Any] = field(default_factory=dict, repr=False)
    # What the step gave to its user, by name; several tensors of a batch may have the same.
    yielded: dict[str | None, list[Any]] = field(default_factory=dict, repr=False)
    # Those of them that are cut, each with its dim.
    cut: list[tuple[Tensor, int]] = field(default_factory=list, repr=False)
    # What token_mean() computed in this step. A step without any has a loss that we did not make.
    losses: list[LossMark] = field(default_factory=list, repr=False)
    # The losses of the step that handed its batch over, of which this one works on a part. Not that
    # step itself: FSDP2 goes through what modules return, masks with their steps too, and must not
    # go in a circle.
    outer_losses: list[LossMark] | None = field(default=None, repr=False)

    @property
    def cp_rank(self) -> int:
        """Return this rank's place among those that share the row."""
        return self.groups.context.rank

    @property
    def cp_size(self) -> int:
        """Return how many ranks share the row."""
        return self.layout.cp_size

    @property
    def held_len(self) -> int:
        """Return how many tokens per row this rank's tensors have."""
        return self.layout.held_len(self.cp_rank)

    def note_loss(self, mark: LossMark) -> None:
        """Keep what token_mean() computed, also for the step that this one is a part of."""
        self.losses.append(mark)
        if self.outer_losses is not None:
            self.outer_losses.append(mark)

    def learn(self, held_len: int) -> None:
        """Hear how many tokens an attention call has, before it is looked at."""

    @property
    def loss_groups(self) -> tuple[Transport, ...]:
        """Return the groups over which the loss is one mean.

        In training also the data axis, whose ranks take the same number of steps. In evaluation
        their loaders may be uneven, and waiting for a rank that has finished would be for ever.
        """
        groups = self.groups
        return (groups.context, groups.data) if self.training else (groups.context,)

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
            # The tensors stay with it: the key holds their ids, which must not be reused.
            self.cache[key] = (bounds, mask.tensors())
        found: Bounds = self.cache[key][0]
        return found

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the rows have, padding left out."""
        padding = 0 if self.padding is None else int(self.padding.sum())
        return self.batch_size * self.layout.seq_len - padding

    def work_by_rank(self) -> list[int]:
        """Return how many pairs each rank's tokens see, over the masks that attention has met."""
        met = [self.layout.work(kept[0]) for key, kept in self.cache.items() if _is_bounds(key)]
        work = [sum(one[rank] for one in met) for rank in range(self.cp_size)]
        size = self.groups.inside.size  # neighbours that swap tokens for heads share their work
        groups = [work[at : at + size] for at in range(0, self.cp_size, size)]
        return [sum(group) // size for group in groups for _ in group]


class _NoRows:
    """Stands for the layout of a step that has no rows of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_cut()


@dataclass(frozen=True, eq=False)
class HandedOver(Step):
    """A batch that was handed over whole: its user opens a step for each part of it.

    It keeps the losses of those steps. Nothing that needs rows works in it: see `current`.
    """

    parts: list[Step] = field(default_factory=list, repr=False)

    @property
    def cp_size(self) -> int:
        """Return how many ranks share the rows of its parts."""
        return self.groups.context.size

    @property
    def num_tokens(self) -> int:
        """Return how many tokens its parts have, padding left out."""
        return sum(part.num_tokens for part in self.parts)

    def work_by_rank(self) -> list[int]:
        """Return how many pairs each rank's tokens see, over all parts."""
        works = [part.work_by_rank() for part in self.parts]
        return [sum(work[rank] for work in works) for rank in range(self.cp_size)]


def hand_over(groups: Groups, **options: Any) -> HandedOver:
    """Build the step of a batch that is not cut."""
    none: Any = _NoRows()
    return HandedOver(
        layout=none,
        groups=groups,
        batch_size=0,
        documents=None,
        padding=None,
        position_ids=none,
        **options,
    )


def _not_cut() -> RuntimeError:
    return RuntimeError(
        "Attention, a loss or a helper of the step was called on a batch that was handed over "
        "whole, as sequence_dims says: each rank would work on all of it by itself. Open a step "
        "for each part: `with cp.step(batch['a']) as a:`, with cp = "
        "self.trainer.strategy.context_parallel; or `with cp.paused():` for whole rows."
    )


def _is_bounds(key: object) -> bool:
    return isinstance(key, tuple) and key[:1] == ("bounds",)


@dataclass(frozen=True, eq=False)
class StepMask(Mask):
    """A mask that carries its step: attention needs no active step where it is used."""

    step: Step | None = None


class _Paused:
    """Stands for: context parallelism is off, on purpose."""


PAUSED: Final = _Paused()

# A module variable, not a ContextVar: with activation checkpointing, attention runs again on
# autograd's device threads, which do not inherit the caller's context.
_current: Step | _Paused | None = None
_ever_active = False


def current() -> Step | None:
    """Return the active step; None when there is none, or when it is paused.

    Whoever asks needs rows: a batch that was handed over whole has none, and is refused.
    """
    if isinstance(_current, HandedOver):
        raise _not_cut()
    return _current if isinstance(_current, Step) else None


def opened() -> Step | None:
    """Return the active step, also one that handed its batch over; None as in `current`."""
    return _current if isinstance(_current, Step) else None


def is_paused() -> bool:
    """Say whether context parallelism is off, on purpose."""
    return _current is PAUSED


# How many declarations say that attention calls are left alone; each step begins with none.
_num_unsharded = 0


class activate:
    """Make ``step`` the one that attention and loss see, and restore the former on exit.

    A class, since checkpointing enters the same one again when a graph is kept for a second
    backward.

    Args:
        step: the step, or `PAUSED`.
        num_unsharded: how many declarations of unsharded attention hold from the start.
    """

    def __init__(self, step: Step | _Paused, *, num_unsharded: int = 0) -> None:
        self._state: tuple[Step | _Paused | None, int] = step, num_unsharded
        self._previous: list[tuple[Step | _Paused | None, int]] = []

    def __enter__(self) -> None:
        global _current, _num_unsharded, _ever_active
        self._previous.append((_current, _num_unsharded))
        (_current, _num_unsharded), _ever_active = self._state, True

    def __exit__(self, *_: object) -> None:
        global _current, _num_unsharded
        _current, _num_unsharded = self._previous.pop()


def declare_unsharded(change: int) -> None:
    """Enter (1) or leave (-1) a place whose attention calls are left alone."""
    global _num_unsharded
    _num_unsharded += change


def num_unsharded() -> int:
    """Return in how many such places we are."""
    return _num_unsharded


@contextmanager
def paused() -> Iterator[None]:
    """Switch context parallelism off: whole rows, on this rank alone."""
    global _current
    previous, _current = _current, PAUSED
    try:
        yield
    finally:
        _current = previous


@contextmanager
def outside() -> Iterator[None]:
    """Leave the active step for a while, as if none had been opened."""
    global _current, _num_unsharded
    previous = _current, _num_unsharded
    _current, _num_unsharded = None, 0
    try:
        yield
    finally:
        _current, _num_unsharded = previous


_CURE = "Use checkpoint(..., use_reentrant=False)"


def check_recompute(step: Step | None) -> None:
    """Refuse to run again in backward what first ran in a step that has ended.

    Activation checkpointing would run it on this rank's tokens alone, or under the documents of
    another batch, and nobody would notice.

    Args:
        step: the active step, which the caller is about to use.
    """
    if not in_backward():
        return
    if step is None and _current is None and _ever_active:
        raise RuntimeError(
            "Attention or loss runs again in backward (activation checkpointing), but its step has "
            f"ended. {_CURE}, or take the mask from cp.mask(...), which carries its step, or call "
            "backward inside `with cp.step(...)`. For whole rows use `with cp.paused():`."
        )
    if step is not None and _backward_of not in (None, step.uid):
        raise _recomputed_elsewhere()


def check_recomputable(name: str, step: Step) -> None:
    """Refuse torch's attention under reentrant checkpointing: recomputed, nobody would route it.

    Args:
        name: the function that was called.
        step: the active step.
    """
    if torch.is_grad_enabled() or not step.training:
        return
    module = sys.modules.get("torch.utils.checkpoint")
    frame = sys._getframe() if module is not None else None
    while frame is not None and module is not None:
        if frame.f_code is module.CheckpointFunction.forward.__code__:
            raise RuntimeError(
                f"{name}() was called under reentrant activation checkpointing inside a step. "
                "Recomputed in backward it would see only this rank's tokens. Use "
                "checkpoint(..., use_reentrant=False)."
            )
        frame = frame.f_back


def check_lengths(name: str, query: Tensor, key: Tensor, step: Step) -> None:
    """Refuse queries or keys that are not this rank's tokens.

    Args:
        name: the function that was called.
        query: [..., tokens, head dim].
        key: [..., tokens, head dim].
        step: the active step.
    """
    local_len = step.held_len
    if query.shape[-2] == key.shape[-2] == local_len:
        return
    tokens = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
    held = f"whose ranks hold {local_len} tokens each ({step.layout.seq_len} in all)"
    if query.shape[-2] == local_len:
        raise ValueError(
            f"{name}() got {tokens} inside a step {held}. If the keys are the same on every rank "
            "(cross-attention), say so: `with cp.unsharded():` around the call, or "
            "cp.unsharded(module) once."
        )
    raise ValueError(
        f"{name}() got {tokens} inside a step {held}. Feed the model what cp.step(...) yields. "
        "Whole rows (generate(), a second model) go under `with cp.paused():`; a module that "
        "attends over something else than the sequence is declared with cp.unsharded(module)."
    )


def check_mark(mark: Tensor, uid: int) -> None:
    """Refuse a backward whose saved tensors were recomputed under another step.

    Checkpointing replaces saved tensors by recomputed ones: ``mark`` is the step of the recompute,
    ``uid`` that of the forward.
    """
    if int(mark) != uid:
        raise _recomputed_elsewhere()


def _recomputed_elsewhere() -> RuntimeError:
    return RuntimeError(
        "Attention or loss was recomputed under another step than the one it first ran in "
        f"(activation checkpointing, and backward inside or after a later step). {_CURE}."
    )


# The step whose loss backward came through last. A reentrant recompute keeps no trace of the step
# that it first ran in; this tells when it cannot be the active one.
_backward_of: int | None = None


def refuse_second_derivative() -> None:
    """Refuse a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Context-parallel attention has no second derivative: call backward() or "
            "autograd.grad() without create_graph=True."
        )


def enter_backward_of(uid: int) -> None:
    """Note that backward is going through the loss of a step."""
    global _backward_of
    _backward_of = uid


def forget_backward() -> None:
    """Start anew: a step was opened."""
    global _backward_of
    _backward_of = None
