# SPDX-License-Identifier: Apache-2.0
"""What a step holds: layout, documents, padding, this rank's position ids, and process groups.

Attention, loss and unshard read it; they add what they computed for it and which losses there were.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torch import Tensor

from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import GradientWire, Transport
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import BoolArray, IntArray

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
        raise not_sharded()


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


def not_sharded() -> RuntimeError:
    """Return the error of a call that needs a sharded batch."""
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
