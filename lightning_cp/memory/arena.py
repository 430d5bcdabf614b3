# SPDX-License-Identifier: Apache-2.0
"""Host memory for tensors that leave a GPU: pinned once, and reused from step to step.

Pinning takes milliseconds per call, and torch rounds pinned tensors up to a power of two (1.125 GiB
take 2): so memory is mapped in a few chunks of any size, which are registered with CUDA. Knows
bytes; nothing about tensors, streams or regions.
"""

import mmap
import os
import weakref
from typing import Final

import torch
from torch import Tensor

ALIGNMENT: Final = 512
"""Blocks start at multiples of it, as in torch's allocator of GPU memory."""

MIN_CHUNK: Final = 256 * 2**20
"""Bytes that an arena asks the system for at least."""


def aligned(num_bytes: int) -> int:
    """Return the bytes that a block of so many bytes takes.

    Example:
        >>> aligned(513)
        1024
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Chunk:
    """One mapping, and its free ranges: sorted, and never adjacent to each other."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes, self.is_pinned = num_bytes, pinned
        self.memory = _map_memory(num_bytes)
        self._free = [(0, num_bytes)]
        if pinned:
            _pin(self.memory)
            address = self.memory.data_ptr()
            # Not at exit: CUDA may have shut down, and the process returns the memory anyway.
            weakref.finalize(self, _unpin, address, self.memory, os.getpid()).atexit = False

    @property
    def is_free(self) -> bool:
        """Return whether no block is taken."""
        return self._free == [(0, self.num_bytes)]

    def take(self, num_bytes: int) -> int | None:
        """Return the start of the first free range that is large enough, and take it."""
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= num_bytes:
                rest = (start + num_bytes, stop)
                self._free[i : i + 1] = [rest] if rest[0] < stop else []
                return start
        return None

    def give(self, start: int, stop: int) -> None:
        """Make a range free again."""
        merged: list[tuple[int, int]] = []
        for range_ in sorted([*self._free, (start, stop)]):
            if merged and merged[-1][1] == range_[0]:
                merged[-1] = (merged[-1][0], range_[1])
            else:
                merged.append(range_)
        self._free = merged


class HostBlock:
    """A piece of host memory, uint8; valid until it is given back, also without its arena."""

    def __init__(self, chunk: _Chunk, start: int, num_bytes: int) -> None:
        self._chunk, self._start, self.num_bytes = chunk, start, num_bytes

    @property
    def is_pinned(self) -> bool:
        """Return whether a GPU can copy while the host goes on."""
        return self._chunk.is_pinned

    @property
    def memory(self) -> Tensor:
        """Return the bytes, [num_bytes]."""
        return self._chunk.memory[self._start : self._start + self.num_bytes]

    def give(self) -> None:
        """Make the memory free again."""
        self._chunk.give(self._start, self._start + self.num_bytes)


class Arena:
    """Host memory in chunks, from which blocks are taken.

    A new chunk is at least a quarter as large as all others together: there are few of them, and
    blocks of other sizes find room in them.

    Args:
        limit: bytes that all chunks may take.

    Example:
        >>> arena = Arena(limit=4096)
        >>> blocks = [arena.take(2000, pinned=False) for _ in range(3)]
        >>> [None if block is None else block.num_bytes for block in blocks]
        [2048, 2048, None]
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // ALIGNMENT * ALIGNMENT
        self._chunks: list[_Chunk] = []
        self.used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the host memory that the arena holds, used or not."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    def take(self, num_bytes: int, *, pinned: bool) -> HostBlock | None:
        """Return a block; None if the limit leaves no room for it."""
        num_bytes = aligned(num_bytes)
        block = self._find(num_bytes, pinned)
        if block is None and self._grow(num_bytes, pinned):
            block = self._find(num_bytes, pinned)
        self.used_bytes += 0 if block is None else num_bytes
        return block

    def give(self, block: HostBlock) -> None:
        """Take a block back; copies that use it must have been ordered before its next use."""
        self.used_bytes -= block.num_bytes
        block.give()

    def trim(self) -> None:
        """Return chunks to the system of which no block is taken."""
        self._chunks = [chunk for chunk in self._chunks if not chunk.is_free]

    def _find(self, num_bytes: int, pinned: bool) -> HostBlock | None:
        for chunk in self._chunks:
            if chunk.is_pinned == pinned and (start := chunk.take(num_bytes)) is not None:
                return HostBlock(chunk, start, num_bytes)
        return None

    def _grow(self, num_bytes: int, pinned: bool) -> bool:
        """Add a chunk with room for a block, if the limit allows."""
        if self.num_bytes + num_bytes > self._limit:
            self.trim()  # free chunks are too small: sizes have changed since
        room = self._limit - self.num_bytes
        if num_bytes > room:
            return False
        wanted = max(MIN_CHUNK, self.num_bytes // 4)
        size = max(1, wanted // num_bytes) * num_bytes
        self._chunks.append(_Chunk(min(size, room), pinned=pinned))
        return True


def _map_memory(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to pin
    # A child of this process would share the pages, and the first write to one moves it away from
    # where the GPU copies to.
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: Tensor) -> None:
    portable = 1
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))
    if code != 0:
        raise MemoryError(
            f"CUDA could not pin {memory.nbytes / 2**30:.2f} GiB of host memory (error {code}): "
            "offloading copies to pinned memory only. Give a lower "
            "memory=Memory(offload=...), or raise the limits "
            "on locked and total memory of this process (ulimit -l, the container's memory)."
        )


def _unpin(address: int, memory: Tensor, process: int) -> None:
    """Undo `_pin`; ``memory`` is held until then."""
    if os.getpid() == process:
        torch.cuda.synchronize()  # copies may still use it
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
