# SPDX-License-Identifier: Apache-2.0
"""Tensors that a checkpointed region saves for backward, moved to host memory and back in time.

An `OffloadGroup` holds what one region saves: its inputs, and attention results. When the second
region after it begins, it is copied to the host on a side stream, and when the third begins, its
device memory is freed: so the last two regions, whose backward comes at once, are never moved. When
backward reaches a region, the one before it is copied back.

Device memory is taken and freed on the stream that computes, which waits for the copies: nothing is
left to the allocator's guess. The graph owns what is saved; the store has weak references only.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_cp.memory.arena import Arena, HostBlock, aligned
from lightning_cp.memory.budget import Budget
from lightning_cp.private.modes import plain_functions, without_dispatch_modes
from lightning_cp.private.modules import tensor_version
from lightning_cp.step.step import PerStep, Step

SMALL_BYTES: Final = 2**20
"""Smaller tensors stay on the device: a copy of them takes longer to start than to run."""

_NUM_RECENT: Final = 3  # the region that runs, the one before it, and one that is being copied

Mark = torch.cuda.Event | None
"""A point in the work of a stream; None where copies are made at once."""


class _Lane:
    """Copies in one direction, on a side stream of a GPU; elsewhere at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor, *after: Mark) -> Mark:
        """Start a copy when the work before some marks is done; return the mark of its end."""
        if self.stream is None:
            target.copy_(source)
            return None
        for mark in after:
            self.wait(mark)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return _record(self.stream)

    def wait(self, mark: Mark) -> None:
        """Let later copies wait for a mark."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)

    def hold(self, x: Tensor, mark: Mark) -> None:
        """Keep the memory of a tensor that nobody refers to any more until its copy is done."""
        if self.stream is None or mark is None:
            return
        if not mark.query():  # type: ignore[no-untyped-call]
            x.record_stream(self.stream)


class _Lanes(NamedTuple):
    """Both directions of a device."""

    device: torch.device
    out: _Lane
    back: _Lane

    def mark(self) -> Mark:
        """Return a mark of the work that this thread has submitted so far."""
        if self.device.type != "cuda":
            return None
        return _record(torch.cuda.current_stream(self.device))

    def wait(self, mark: Mark) -> None:
        """Let the work that this thread submits from now on wait for a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    mark: torch.cuda.Event = stream.record_event()
    return mark


@cache
def lanes_of(device: torch.device) -> _Lanes:
    """Return the lanes of a device, made once: each stream has a memory pool of its own."""
    return _Lanes(device, _Lane(device), _Lane(device))


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide what we compute from modes: selective checkpointing, say, counts operators."""
    with plain_functions(), without_dispatch_modes(), torch.no_grad():
        yield


class Saved:
    """A tensor that was saved for backward, on its device; see `OffloadGroup.save`.

    Args:
        x: the tensor; its graph is not kept.
    """

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x.detach()
        self._probe = self._x
        self._version = tensor_version(self._x)

    @property
    def is_unchanged(self) -> bool:
        """Return whether nobody has changed the tensor in place since."""
        return tensor_version(self._probe) == self._version

    def get(self) -> Tensor:
        """Return the tensor, on its device."""
        assert self._x is not None  # noqa: S101
        return self._x

    def get_unchanged(self) -> Tensor:
        """Return the tensor; raise torch's error if it was changed in place."""
        if not self.is_unchanged:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: an input of a checkpointed region is at version "
                f"{tensor_version(self._probe)}; expected version {self._version} instead. Change "
                "a copy of it: x = x.clone()."
            )
        return self.get()


class _Moved(Saved):
    """A tensor that may be in host memory.

    Args:
        x: a tensor without gaps, see `_is_movable`.
        parcel: what its region saves.
    """

    def __init__(self, x: Tensor, parcel: "OffloadGroup") -> None:
        super().__init__(x)
        self.stays = False
        self.num_bytes = aligned(x.nbytes)
        self.resident_bytes = 0  # those of them that count as staying on the device
        self._parcel, self._store = parcel, parcel.store
        self._lanes = lanes_of(x.device)
        self._shape, self._stride, self._dtype = x.shape, x.stride(), x.dtype
        self._block: HostBlock | None = None
        self._sent: Mark = None
        self._arrived: Mark = None
        self._is_copy = False  # whether the tensor on the device came from the host

    def is_same(self, x: Tensor) -> bool:
        """Return whether a tensor is this one."""
        mine = self._x
        return mine is not None and mine.data_ptr() == x.data_ptr() and mine.shape == x.shape

    def send(self, ready: Mark) -> None:
        """Start the copy to the host, if there is room for it."""
        assert self._x is not None  # noqa: S101
        if self.stays or self._block is not None:
            return
        self._block = self._store.take(self._x)
        if self._block is not None:
            self._sent = self._lanes.out.copy(self._host(), _flat(self._x), ready)

    def leave(self) -> None:
        """Free the device memory of a tensor that was sent."""
        if self._block is None or self._x is None or self.stays:
            return
        self._lanes.wait(self._sent)
        self._probe = _without_memory(self._x)
        self._x = None

    def fetch(self) -> None:
        """Start the copy to the device, unless the tensor is there."""
        if self._x is not None:
            return
        flat = torch.empty(self._shape.numel(), dtype=self._dtype, device=self._lanes.device)
        # Work that was submitted before may still use that memory.
        ready = self._lanes.mark()
        self._arrived = self._lanes.back.copy(flat, self._host(), ready, self._sent)
        self._x, self._is_copy = flat.as_strided(self._shape, self._stride), True

    def get(self) -> Tensor:
        """Return the tensor, and start to fetch what the region before has saved."""
        with _unseen():
            if self._x is None:
                self._parcel.fetch()
            self._parcel.fetch_previous()
            x = super().get()
            if self._is_copy:  # another backward fetches it again
                self._lanes.wait(self._arrived)
                self._x, self._is_copy = None, False
            return x

    def _host(self) -> Tensor:
        assert self._block is not None  # noqa: S101
        num_bytes = self._shape.numel() * self._dtype.itemsize
        return self._block.memory[:num_bytes].view(self._dtype)

    def __del__(self) -> None:
        if self._x is not None:
            lane, mark = self._lanes.out, self._sent
            if self._is_copy:
                lane, mark = self._lanes.back, self._arrived
            lane.hold(self._x, mark)
        # Only noted: the garbage collector may call this in the middle of anything.
        block, arrived, lanes = self._block, self._arrived, self._lanes
        self._store.returned.append(_Returned(block, arrived, lanes, self.resident_bytes))


class _Returned(NamedTuple):
    """What a tensor that died had: a block, the end of the last copy from it, resident bytes."""

    block: HostBlock | None
    arrived: Mark
    lanes: _Lanes
    resident: int


class OffloadGroup:
    """What one region saves for backward.

    Args:
        store: where it goes.
    """

    def __init__(self, store: "Store") -> None:
        self.store = store
        self.previous: weakref.ref[OffloadGroup] | None = None
        self._moved: list[weakref.ref[_Moved]] = []
        self._ready: Mark = None

    def save(self, x: Tensor) -> Saved:
        """Save a tensor, to be moved with the others of the region if that is worth it."""
        with _unseen():
            if not _is_movable(x):
                return Saved(x)
            if not self._moved:
                self.store.begin(self)
            saved = _Moved(x, self)
            for other in self.store.recent():
                for same in (item for item in other.items() if item.is_same(x)):
                    same.stays = saved.stays = True  # other regions hold it on the device anyway
            self._moved.append(weakref.ref(saved))
            self._ready = lanes_of(x.device).mark()
            return saved

    def saving_inputs(self) -> AbstractContextManager[object]:
        """Return a context in which autograd saves tensors here: the inputs of the region.

        Inside its forward, activation checkpointing has hooks of its own.
        """
        if not torch.is_grad_enabled():
            return nullcontext()
        return saved_tensors_hooks(self._pack, Saved.get_unchanged)

    def _pack(self, x: Tensor) -> Saved:
        """Save a hidden state here; parameters and what has no gradient stay where they are."""
        if x.requires_grad and not isinstance(x, nn.Parameter):
            return self.save(x)
        return Saved(x)

    def items(self) -> Iterator[_Moved]:
        """Yield the tensors that are alive."""
        for ref in self._moved:
            item = ref()
            if item is not None:
                yield item

    def send(self) -> None:
        """Start to copy the region's tensors to the host."""
        for item in self.store.without_resident(self.items()):
            item.send(self._ready)

    def leave(self) -> None:
        """Free the device memory of what was sent."""
        for item in self.items():
            item.leave()

    def fetch(self) -> None:
        """Start to copy to the device what is not there."""
        for item in self.items():
            item.fetch()

    def fetch_previous(self) -> None:
        """Start to fetch the region before, whose backward comes next."""
        parcel = None if self.previous is None else self.previous()
        if parcel is not None:
            parcel.fetch()


class Store:
    """The offloaded tensors of one `ContextParallel`, and the host memory that they are in.

    Args:
        budget: how much of what.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.arena = Arena(budget.host_bytes)
        self.returned: deque[_Returned] = deque()
        self._resident_bytes = 0
        self._recent: deque[weakref.ref[OffloadGroup]] = deque(maxlen=_NUM_RECENT)

    @property
    def used_bytes(self) -> int:
        """Return the host memory of tensors that are alive."""
        self._collect()
        return self.arena.used_bytes

    def recent(self) -> Iterator[OffloadGroup]:
        """Yield the newest parcels that are alive, oldest first."""
        for ref in tuple(self._recent):
            parcel = ref()
            if parcel is not None:
                yield parcel

    def begin(self, parcel: OffloadGroup) -> None:
        """Note that a region begins to save tensors, and move those of earlier ones."""
        self._collect()
        recent = [ref() for ref in self._recent]
        if len(recent) == _NUM_RECENT and recent[0] is not None:
            recent[0].leave()
        if len(recent) >= 2 and (waiting := recent[-2]) is not None:
            waiting.send()
        parcel.previous = self._recent[-1] if self._recent else None
        self._recent.append(weakref.ref(parcel))

    def without_resident(self, items: Iterator[_Moved]) -> list[_Moved]:
        """Return the tensors of a region that must go; none while there is room on the device."""
        going = [item for item in items if not item.stays]
        total = sum(item.num_bytes for item in going)
        if self._resident_bytes + total > self.budget.device_bytes:
            return going
        for item in going:
            item.stays, item.resident_bytes = True, item.num_bytes
        self._resident_bytes += total
        return []

    def take(self, x: Tensor) -> HostBlock | None:
        """Return host memory for a tensor; None if the budget leaves no room."""
        block = self.arena.take(x.nbytes, pinned=x.device.type == "cuda")
        if block is None and self.budget.is_complete:
            raise MemoryError(
                f"memory=Memory(offload='all'): {x.nbytes / 2**30:.2f} GiB more of checkpoints do "
                "not fit into this rank's share of the host memory, "
                f"{self.budget.host_bytes / 2**30:.2f} GiB. Give the GiB that it may take, "
                "offload=100, and the rest stays on the GPU; or use fewer tokens per rank, or "
                "keep_attention='none'."
            )
        return block

    def close(self) -> None:
        """Return host memory that no graph needs to the system."""
        self._collect()
        self.arena.trim()

    def _collect(self) -> None:
        """Take back what tensors that died had."""
        while self.returned:
            block, arrived, lanes, resident = self.returned.popleft()
            self._resident_bytes -= resident
            if block is not None:
                lanes.out.wait(arrived)  # its next use is a copy to the host
                self.arena.give(block)


_stores = PerStep[Store]()


def attach(store: Store | None, step: Step) -> None:
    """Let the regions of a step save into a store."""
    if store is not None:
        _stores.put(step, store)


def store_of(step: Step) -> Store | None:
    """Return the store of a step; None without offloading."""
    return _stores.get(step)


def _is_movable(x: Tensor) -> bool:
    """Return whether a copy of the memory gives the same tensor back, and is worth it."""
    return (
        type(x) is Tensor
        and x.layout == torch.strided
        and x.device.type in ("cpu", "cuda")
        and x.nbytes >= SMALL_BYTES
        and not (x.is_conj() or x.is_neg())
        and x.data_ptr() % 16 == 0  # kernels choose by it, and a copy is aligned
        and _is_dense(x)
    )


def _is_dense(x: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(x: Tensor) -> Tensor:
    """Return the memory of a dense tensor, [numel]."""
    return x.as_strided((x.numel(),), (1,))


def _without_memory(x: Tensor) -> Tensor:
    """Return a tensor with the version counter of another one, and no memory."""
    probe = x.detach()
    probe.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return probe
