# SPDX-License-Identifier: Apache-2.0
"""Attention results that activation checkpointing keeps instead of computing them again.

A region is one call of ``checkpoint(..., use_reentrant=False)``. In forward its attention calls
store their output and what backward needs besides q, k and v; when backward recomputes the region,
they take them, and neither compute nor communicate. A result is found by its call (the same object
for the same mask and shapes in a step) and by how often that call ran in the region before. A
result that is missing is computed: all ranks decide by values that are equal on all ranks, so they
do so together.

A region is held by the graph only: its results are freed when backward has passed it, and when the
graph is dropped. With offloading, results and the region's inputs share a `OffloadGroup`.
"""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from lightning_cp.memory.offload import OffloadGroup, Saved, store_of
from lightning_cp.step.step import Step

T = TypeVar("T")


class Result(NamedTuple, Generic[T]):
    """Output of an attention call, and what its backward needs besides the inputs."""

    out: Saved
    rest: T


class RecomputedRegion:
    """The results of one checkpointed region, and of the regions inside it.

    Args:
        step: the step that the region belongs to.
        parcel: takes what the outermost region saves, if that may be offloaded.
    """

    def __init__(self, step: Step, parcel: OffloadGroup | None = None) -> None:
        self.step = step
        self.parcel = parcel
        self.results: dict[tuple[object, int], Result[object]] = {}
        self.inner: list[RecomputedRegion] = []


class _Pass:
    """One pass through a region: the forward that stores, or a recomputation that reads."""

    def __init__(self, region: RecomputedRegion, *, reads: bool) -> None:
        self.region = region
        self.reads = reads
        self.num_inner = 0
        self._counts: Counter[object] = Counter()

    def next_key(self, call: object) -> tuple[object, int]:
        """Return the key of the next result of a call."""
        self._counts[call] += 1
        return call, self._counts[call]

    def enter_inner(self) -> tuple[RecomputedRegion, bool]:
        """Return the next region inside this one, and whether it has its results already."""
        inner = self.region.inner
        if not self.reads:
            inner.append(RecomputedRegion(self.region.step, self.region.parcel))
        self.num_inner += 1
        if self.num_inner > len(inner):  # a recomputation that is unlike its forward
            return RecomputedRegion(self.region.step), False
        return inner[self.num_inner - 1], self.reads


# A module variable, not a ContextVar: autograd recomputes on threads of its own.
_current: _Pass | None = None


class _RegionContext(AbstractContextManager[None]):
    """Makes a pass through a region the current one; may be entered again (`retain_graph`)."""

    def __init__(
        self, region: RecomputedRegion, *, reads: bool, inputs: OffloadGroup | None = None
    ) -> None:
        self.inputs = inputs
        self._region, self._reads = region, reads
        self._previous: list[_Pass | None] = []

    def __enter__(self) -> None:
        global _current
        self._previous.append(_current)
        _current = _Pass(self._region, reads=self._reads)

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._previous.pop()


def kept_limit(step: Step) -> float:
    """Return the bytes of attention results that a step may keep."""
    limit = step.cache.kept_limit
    if limit is None:
        limit = step.config.memory.kept_bytes
    return inf if limit is None else limit


def region_contexts(
    step: Step,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a region: for its forward, and for its recomputation."""
    if _current is not None and _current.region.step is step:
        region, reads = _current.enter_inner()
        inputs = None  # the region around it recomputes them
    else:
        store = store_of(step)
        inputs = None if store is None else OffloadGroup(store)
        region, reads = RecomputedRegion(step, inputs), False
    return (
        _RegionContext(region, reads=reads, inputs=inputs),
        _RegionContext(region, reads=True),
    )


def saving_inputs(forward: AbstractContextManager[Any]) -> AbstractContextManager[object]:
    """Return a context in which autograd saves the inputs of a region, given its forward's."""
    if isinstance(forward, _RegionContext) and forward.inputs is not None:
        return forward.inputs.saving_inputs()
    return nullcontext()


class Slot(Generic[T]):
    """Where the result of the attention call that runs now is found or stored.

    Args:
        call: the call.
    """

    def __init__(self, call: object) -> None:
        self._pass = _current
        self._key = None if _current is None else _current.next_key(call)

    @property
    def result(self) -> Result[T] | None:
        """Return the result that was stored in forward, if the region is being recomputed."""
        if self._pass is None or self._key is None or not self._pass.reads:
            return None
        return self._pass.region.results.get(self._key)  # type: ignore[return-value]

    def reserve(self, num_bytes: int) -> bool:
        """Return whether a result is to be stored: in forward, within the budget of the step."""
        if self._pass is None or self._pass.reads:
            return False
        step = self._pass.region.step
        if step.cache.kept_bytes + num_bytes > kept_limit(step):
            return False
        step.cache.kept_bytes += num_bytes
        return True

    def save(self, x: Tensor) -> Saved:
        """Return a tensor as the region saves it: without its graph, to be offloaded if it may."""
        assert self._pass is not None  # noqa: S101  reserved
        parcel = self._pass.region.parcel
        return Saved(x) if parcel is None else parcel.save(x)

    def store(self, out: Saved, rest: T) -> None:
        """Keep a result for which memory is reserved."""
        assert self._pass is not None and self._key is not None  # noqa: PT018, S101  reserved
        self._pass.region.results[self._key] = Result(out, rest)
