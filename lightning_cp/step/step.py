# SPDX-License-Identifier: Apache-2.0
"""`Step`: one batch under context parallelism: layout, documents, padding, configuration, groups.

Attention, loss and unshard read it; they add cached values and the losses that were computed in it.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, update_wrapper
from typing import Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_cp.comm.mesh import Groups, lone_groups
from lightning_cp.comm.transport import Transport
from lightning_cp.config import Config
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.branches import Branches
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.geometry.mask import NO_DOCUMENT, Mask
from lightning_cp.geometry.ranges import BoolArray, IntArray
from lightning_cp.step.leaves import BatchLeaf

IGNORED_LABEL: Final = -100
"""The label of a token that no loss counts."""

P = ParamSpec("P")
T = TypeVar("T")

_uids = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class LossMark:
    """A loss of a step that is a mean over all ranks.

    Args:
        value: the loss, detached.
        num_tokens: the number of tokens of all ranks over which it is the mean, or of other units.
        by_position: [2, buckets], sums and numbers of this rank's tokens by global position; None
            unless the step has ``position_edges``.
        unit: what it is a mean of: ``tokens``, or a name of the caller.
        is_replicated: whether each context rank has computed all of it, from full sequences.
        node: the number of its node, which autograd counts up; None if it has no gradient.
    """

    value: Tensor
    num_tokens: Tensor
    by_position: Tensor | None = None
    unit: str = "tokens"
    is_replicated: bool = False
    node: int | None = None


class StepCache:
    """What is computed once per step; layers share it. Each part has one writer.

    Not a dataclass, and no dict: FSDP2 walks those in what a module returns, masks with their steps
    too.
    """

    def __init__(self) -> None:
        # Written by `Step.bounds`, by the key of the mask, which holds ids of tensors: kept alive,
        # so that no id is reused.
        self.bounds: dict[object, tuple[Bounds, object]] = {}
        # Bytes of attention results that activation checkpointing has kept so far (`attn.kept`).
        self.kept_bytes = 0
        # What it may keep, if that differs from the configuration (`lightning.memory_plan`).
        self.kept_limit: float | None = None
        # Written by the `PerStep` that is the key.
        self.values: dict[object, dict[Hashable, Any]] = {}


class Yielded(NamedTuple):
    """A value that a step has yielded.

    Args:
        leaf: the value of the full batch.
        local: what the user received.
        version: of a shard when it was yielded; later ones were changed in place.
    """

    leaf: BatchLeaf
    local: Any
    version: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Opened:
    """What ``cp.step(batch)`` has opened: a `Step`, or a `BatchOfParts`.

    Args:
        groups: the ranks that this rank works with.
        config: what the user has set.
        training: whether the loss is averaged over the data axis too.
        is_checked: whether the ranks compare what they hold.
        is_stock: on full sequences, with models of other libraries unchanged: the reference of a
            comparison.
        position_edges: where buckets of global positions begin, for losses by position.
        outer: the batch of which this is a part, if any.
    """

    groups: Groups
    config: Config
    training: bool
    is_checked: bool = False
    is_stock: bool = False
    position_edges: tuple[int, ...] = ()
    outer: "BatchOfParts | None" = field(default=None, repr=False)
    uid: int = field(default_factory=lambda: next(_uids))
    # Means over the tokens, or the samples, of all ranks that were computed in it. Without any, its
    # loss is of unknown kind.
    losses: list[LossMark] = field(default_factory=list, repr=False)
    # Losses that must be the same on all context ranks, which have not compared them yet.
    uncompared: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def steps(self) -> "Sequence[Step]":
        """Return the steps whose tokens it has: itself, or those of the parts opened so far."""
        raise NotImplementedError

    @property
    def seq_len(self) -> int:
        """Return the tokens per sequence, of the longest part."""
        raise NotImplementedError

    @property
    def cp_rank(self) -> int:
        """Return this rank's index among the context ranks."""
        return self.groups.context.rank

    @property
    def cp_size(self) -> int:
        """Return the number of context ranks."""
        return self.groups.context.size

    @property
    def loss_groups(self) -> tuple[Transport, ...]:
        """Return the groups over which the loss is one mean.

        In training also the data axis, whose ranks take the same number of steps. In evaluation
        their loaders may have different lengths, and a rank would wait forever for one that has
        finished.
        """
        groups = self.groups
        return (groups.context, groups.data) if self.training else (groups.context,)

    @property
    def all_losses(self) -> list[LossMark]:
        """Return its losses, and those of the batch that it is a part of."""
        return self.losses if self.outer is None else [*self.losses, *self.outer.losses]

    def note_loss(self, mark: LossMark) -> None:
        """Record a token mean, also in the batch that this is a part of."""
        self.losses.append(mark)
        if self.outer is not None:
            self.outer.losses.append(mark)

    @property
    def num_samples(self) -> int:
        """Return the number of samples of the full batch."""
        return sum(step.batch_size for step in self.steps)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the full batch, without padding."""
        return sum(step.count_tokens() for step in self.steps)

    def work_by_rank(self) -> list[int]:
        """Return each rank's visible pairs, summed over the masks of all attention calls."""
        bounds = [(s.layout, x) for s in self.steps for x, _ in s.cache.bounds.values()]
        works = [layout.work(x) for layout, x in bounds]
        work = [sum(one[rank] for one in works) for rank in range(self.cp_size)]
        size = self.groups.inside.size  # the ranks of a Ulysses group share their work
        groups = [work[at : at + size] for at in range(0, self.cp_size, size)]
        return [sum(group) // size for group in groups for _ in group]


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchOfParts(Opened):
    """A batch that was yielded unsharded: its user opens a step for each part of it.

    It collects the losses of those steps. Nothing that needs a sequence works in it: see
    `active_step.current`.

    Args:
        longest: tokens per sequence of its longest part.
        parts: the steps of the parts that have been opened.
    """

    longest: int
    parts: "list[Step]" = field(default_factory=list, repr=False)

    @property
    def seq_len(self) -> int:
        """Return the tokens per sequence of its longest part."""
        return self.longest

    @property
    def steps(self) -> "Sequence[Step]":
        """Return the steps of its parts that have been opened."""
        return self.parts


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(Opened):
    """One batch under context parallelism, as this rank sees it.

    Args:
        layout: which rank owns which position.
        batch_size: the number of samples.
        documents: int64 [B, S] on the host, None where each sequence is one document.
        padding: bool [B, S] on the host, true where the user's batch is padded; None for nowhere.
        position_ids: int64 [B, L], this rank's shard.
        has_position_ids: whether the batch contains position ids; else they were counted.
        branches: parts of documents that do not see each other; None where there are none.
        yielded: what the user received.
    """

    layout: Layout
    batch_size: int
    documents: IntArray | None
    padding: BoolArray | None
    position_ids: Tensor
    has_position_ids: bool = False
    branches: Branches | None = None
    yielded: list[Yielded] = field(default_factory=list, repr=False)
    cache: StepCache = field(default_factory=StepCache, repr=False)

    @property
    def steps(self) -> "Sequence[Step]":
        """Return this step."""
        return (self,)

    @property
    def seq_len(self) -> int:
        """Return the tokens per sequence."""
        return self.layout.seq_len

    @property
    def cp_size(self) -> int:
        """Return the number of context ranks."""
        return self.layout.cp_size

    def shard_of(self, x: object) -> Yielded | None:
        """Return how a tensor was sharded, if the step has yielded it; None for others."""
        return next((y for y in self.yielded if y.leaf.dim is not None and y.local is x), None)

    def count_tokens(self) -> int:
        """Return the number of tokens, without padding."""
        padding = 0 if self.padding is None else int(self.padding.sum())
        return self.batch_size * self.layout.seq_len - padding

    @cached_property
    def tensor_len(self) -> int:
        """Return the number of tokens per sequence in this rank's tensors."""
        return self.layout.tensor_len(self.cp_rank)

    @property
    def label_runs(self) -> IntArray | None:
        """Return ids of tokens of which each is followed by the next, [B, S]; None for one run.

        Documents; a branch does not go on in the next one. The first goes on from the beginning.
        """
        if self.branches is None:
            return self.documents
        numbers, count = self.branches.numbers.clip(min=0), self.branches.count
        if self.documents is None:
            return numbers
        runs: IntArray = np.where(
            self.documents == NO_DOCUMENT, NO_DOCUMENT, self.documents * count + numbers
        )
        return runs

    def bounds(self, mask: Mask) -> Bounds:
        """Return the bounds of a mask, with the documents and padding of this step."""
        key = mask.key()
        if key not in self.cache.bounds:
            bounds = mask.bounds(
                self.layout.seq_len,
                padded_len=self.layout.padded_len,
                documents=self.documents,
                padding=self.padding,
            )
            self.cache.bounds[key] = bounds, mask.tensors()
        return self.cache.bounds[key][0]


def full_step(seq_len: int) -> Step:
    """Return a step of one rank with full sequences, for an attention call outside of steps."""
    return Step(
        layout=build_layout("contiguous", seq_len=seq_len, cp_size=1),
        groups=_LONE,
        config=_OUTSIDE,
        batch_size=1,
        documents=None,
        padding=None,
        position_ids=_NONE,
        training=True,
        uid=0,
    )


_LONE, _OUTSIDE, _NONE = lone_groups(), Config(algorithm="gather"), torch.empty(0)


def not_sharded() -> RuntimeError:
    """Return the error of a call that needs a sharded batch."""
    return RuntimeError(
        "Attention, a loss or a helper of the step was called on a batch that was not sharded, as "
        "sequence_dims requests: each rank would compute all of it. Open a step for each part: "
        "`with cp.step(batch['a']) as a:`, with cp = self.trainer.strategy.context_parallel; or "
        "`with cp.paused():` for full sequences."
    )


class PerStep(Generic[T]):
    """Values of one type that steps hold for one module, which declares and writes them."""

    def get(self, step: Step, key: Hashable = None) -> T | None:
        """Return the value of a key; None where there is none."""
        values = step.cache.values.get(self)
        return None if values is None else values.get(key)

    def put(self, step: Step, value: T, key: Hashable = None) -> T:
        """Set the value of a key, and return it."""
        step.cache.values.setdefault(self, {})[key] = value
        return value

    def find(self, step: Step, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value of a key, built by the first that asks for it."""
        values = step.cache.values.setdefault(self, {})
        if key not in values:
            values[key] = build()
        stored: T = values[key]
        return stored

    def all(self, step: Step) -> list[T]:
        """Return the values of a step."""
        return list(step.cache.values.get(self, {}).values())


def per_step(build: Callable[Concatenate[Step, P], T]) -> Callable[Concatenate[Step, P], T]:
    """Call a function once per step and arguments. It is the only writer of what it returns.

    Tensors among the arguments count as equal if they are the same object.
    """
    values = PerStep[T]()

    def stored(step: Step, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return values.find(step, (args, *kwargs.items()), lambda: build(step, *args, **kwargs))

    return update_wrapper(stored, build)


class StepReference:
    """Refers to a step, in values that modules take and return.

    Not a dataclass: FSDP2 walks those, and copies them, several times per unit and pass.

    Args:
        step: the step.
    """

    __slots__ = ("mark", "needs_fused", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        # For compiled graphs, see `attn/operator.py`.
        self.mark: Tensor | None = None
        self.needs_fused = False


@dataclass(frozen=True, eq=False)
class StepMask(Mask):
    """A mask that holds its step: attention with it needs no active step."""

    reference: StepReference | None = None

    @property
    def step(self) -> Step | None:
        """Return the step."""
        return None if self.reference is None else self.reference.step
