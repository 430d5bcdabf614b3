# SPDX-License-Identifier: Apache-2.0
"""Copies of a state in host memory, made while the GPU goes on."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from lightning_cp.checkpoint.state import map_tensors
from lightning_cp.memory.arena import Arena, Block, aligned
from lightning_cp.torch_private import taken_apart

_PIECE_BYTES: Final = 16 * 2**20
"""Bytes that are copied at once: 0.3 ms."""


@dataclass(frozen=True)
class _Later:
    """A tensor of a state, whose copy is built when it is complete."""

    build: Callable[[], Tensor]


class HostCopies:
    """Host memory for the tensors of a state: pinned once, and used for each copy of the state.

    From a GPU, tensors are copied on a stream of their own while the caller's stream goes on. It
    may change them at once: they are cloned on the GPU first, as far as there is room. The caller's
    stream waits for the tensors that are not cloned.

    Clones are copied in pieces, by the thread that waits for them: a GPU makes copies to the host
    in the order in which they were launched, those of all streams, so that each ``.item()`` of the
    caller would wait for all that were launched before.
    """

    def __init__(self) -> None:
        self._arena = Arena(limit=sys.maxsize)
        self._block: Block | None = None
        self._stream: torch.cuda.Stream | None = None
        self._room = Room()

    @torch.no_grad()
    def copy(self, state: Any) -> Callable[[], Any]:
        """Copy a nested state; the former copy is overwritten, and must not be in use.

        Returns:
            A function that waits, and returns the copy; another thread may call it, once.
        """
        if self._stream is not None:
            self._stream.synchronize()  # a copy that nobody has waited for, since its save failed
        found: dict[Any, Tensor] = {}
        copies: dict[Any, Tensor] = {}

        def place(x: Tensor) -> Callable[[], Tensor]:
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg())
            found.setdefault(key, x)  # tied weights have several names
            return lambda: copies[key]

        kept = map_tensors(lambda x: _Later(taken_apart(x, place)), state, deepcopy)
        sizes = [aligned(x.nbytes) for x in found.values()]
        is_cuda = any(x.device.type == "cuda" for x in found.values())
        memory = self._take(sum(sizes), pinned=is_cuda)
        for (key, x), start in zip(found.items(), accumulate(sizes, initial=0), strict=False):
            copies[key] = _with_own_storage(memory[start : start + x.nbytes], x.dtype).view(x.shape)
        wait = self._copy_all([(x, copies[k]) for k, x in found.items()], is_cuda=is_cuda)
        found.clear()

        def finish() -> Any:
            wait()
            return map_tensors(lambda x: x, kept, lambda x: x.build() if type(x) is _Later else x)

        return finish

    def _take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Return host memory, that of the former copy if it is large enough."""
        if self._block is not None and (
            self._block.num_bytes < num_bytes or self._block.is_pinned != pinned
        ):
            self._arena.give(self._block)
            self._arena.trim()
            self._block = None
        if self._block is None:
            try:
                self._block = self._arena.take(max(num_bytes, 1), pinned=pinned)
            except (MemoryError, OSError) as error:
                raise MemoryError(
                    f"async_checkpoint=True copies {num_bytes / 2**30:.2f} GiB of each rank to "
                    "host memory, which could not be allocated. Give "
                    "checkpoint_staging_dir=, a folder on a local disk, or set "
                    "async_checkpoint=False."
                ) from error
        assert self._block is not None  # noqa: S101  the arena has no limit
        return self._block.memory

    def _copy_all(self, pairs: list[tuple[Tensor, Tensor]], *, is_cuda: bool) -> Callable[[], None]:
        """Copy each first tensor to the second one; return a function that does what is left."""
        if not is_cuda:
            for x, host in pairs:
                host.copy_(x)
            return _do_nothing
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side, current = self._stream, torch.cuda.current_stream()
        side.wait_stream(current)
        left = self._room.take(sum(x.nbytes for x, _ in pairs if x.device == side.device))
        cloned: deque[tuple[Tensor, Tensor]] = deque()
        others = []
        for x, host in pairs:
            clone = _clone(x) if x.device == side.device and x.nbytes <= left else None
            if clone is not None:
                left -= x.nbytes
                cloned.append((clone, host))
            elif x.device == side.device:
                others.append((x, host))
            else:
                host.copy_(x)
        with torch.cuda.stream(side):
            for x, host in others:
                host.copy_(x.resolve_conj().resolve_neg(), non_blocking=True)
        if others:
            current.wait_stream(side)
        ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ready.record()  # clones are made, others are copied

        def copy_clones() -> None:
            ready.synchronize()
            with torch.cuda.stream(side):
                _copy_in_pieces(cloned)
            self._room.give()

        return copy_clones


class Room:
    """The memory of a GPU in which a state is cloned: half of what steps have never used.

    Steps may use more later, also while the clones exist: they find the other half.
    """

    def __init__(self) -> None:
        self._peak = 0  # of steps alone
        self._peak_with_clones = 0
        self._num_bytes = 0

    def take(self, num_bytes: int) -> int:
        """Return how many of these bytes may be cloned now."""
        used, reserved, peak = allocated_bytes()
        # Reached while there were clones: at least the rest was a step's.
        is_pure = peak > self._peak_with_clones
        self._peak = max(self._peak, peak if is_pure else peak - self._num_bytes)
        free = free_bytes()
        # Torch still holds what former clones took, which steps do not need.
        unused = min(free + reserved - self._peak, free + self._num_bytes)
        # Without a peak no step has run since the statistics were reset.
        is_known = self._peak > 1.01 * used
        self._num_bytes = min(num_bytes, max(0, unused) // 2) if is_known else 0
        self._peak_with_clones = 0  # unless they are given back, as after an error
        return self._num_bytes

    def give(self) -> None:
        """Note that the clones are gone."""
        self._peak_with_clones = allocated_bytes()[2]


def allocated_bytes() -> tuple[int, int, int]:
    """Return the bytes of the current GPU: in use, held by torch, and in use at the peak."""
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return used, reserved, torch.cuda.max_memory_allocated()


def free_bytes() -> int:
    """Return the memory of the current GPU that torch could still get from the driver."""
    free, total = torch.cuda.mem_get_info()
    limit = int(total * torch.cuda.get_per_process_memory_fraction())
    return min(free, limit - torch.cuda.memory_reserved())


def _copy_in_pieces(pairs: deque[tuple[Tensor, Tensor]]) -> None:
    """Copy each first tensor to the second one, two pieces at a time; remove and free the first."""
    pending: deque[tuple[object, torch.cuda.Event]] = deque()  # keeps tensors while they are copied
    for piece in _pieces(pairs):
        for x, host in piece:
            host.copy_(x, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        pending.append((piece, copied))
        if len(pending) == 2:
            pending[0][1].synchronize()
            pending.popleft()
    for _, copied in pending:
        copied.synchronize()


def _pieces(pairs: deque[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Return parts of tensors, or several tensors, of some 16 MiB each.

    Example:
        >>> x, y = torch.arange(3), torch.arange(5 * 2**20)
        >>> pairs = deque([(x, x.clone()), (y, y.clone())])
        >>> [[a.nbytes for a, _ in piece] for piece in _pieces(pairs)]
        [[24, 16777216], [16777216], [8388608]]
    """
    piece: list[tuple[Tensor, Tensor]] = []
    num_bytes = 0
    while pairs:
        x, host = (tensor.view(-1).view(torch.uint8) for tensor in pairs.popleft())
        for part in zip(torch.split(x, _PIECE_BYTES), torch.split(host, _PIECE_BYTES), strict=True):
            piece.append(part)
            num_bytes += part[0].nbytes
            if num_bytes >= _PIECE_BYTES:
                yield piece
                piece, num_bytes = [], 0
    if piece:
        yield piece


def _with_own_storage(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as a tensor with a storage of just these: torch's writer clones other views."""
    return (
        torch.from_numpy(memory.numpy()).view(dtype) if len(memory) else torch.empty(0, dtype=dtype)
    )


def _clone(x: Tensor) -> Tensor | None:
    """Return a contiguous copy on the same GPU; None if there is no such piece of memory."""
    try:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    except torch.OutOfMemoryError:
        return None


def _do_nothing() -> None:
    pass
