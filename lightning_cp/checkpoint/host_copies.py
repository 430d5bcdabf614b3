# SPDX-License-Identifier: Apache-2.0
"""Copies of a state in host memory, made while the GPU goes on."""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_cp.checkpoint.state import map_tensors
from lightning_cp.memory.arena import Arena, Block, aligned
from lightning_cp.torch_private import taken_apart


@dataclass(frozen=True)
class _Later:
    """A tensor of a state, whose copy is built when it is complete."""

    build: Callable[[], Tensor]


class HostCopies:
    """Host memory for the tensors of a state: pinned once, and used for each copy of the state.

    From a GPU, tensors are copied on a stream of their own while the caller's stream goes on. It
    may change them at once: they are cloned on the GPU first, in half of the memory that is free.
    The clones are returned to torch's allocator, which waits for the copies when memory runs out.
    The caller's stream waits for the tensors that are not cloned.
    """

    def __init__(self) -> None:
        self._arena = Arena(limit=sys.maxsize)
        self._block: Block | None = None
        self._stream: torch.cuda.Stream | None = None
        self._wait: Callable[[], None] = _do_nothing

    @torch.no_grad()
    def copy(self, state: Any) -> Callable[[], Any]:
        """Copy a nested state; the former copy is overwritten.

        Returns:
            A function that waits, and returns the copy; another thread may call it.
        """
        self._wait()  # for a copy that nobody has waited for, since the save failed
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
            copies[key] = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
        self._wait = self._copy_all([(x, copies[k]) for k, x in found.items()], is_cuda=is_cuda)
        found.clear()
        wait = self._wait

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
        """Copy each first tensor to the second one; return a function that waits."""
        if not is_cuda:
            for x, host in pairs:
                host.copy_(x)
            return _do_nothing
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side, current, room = self._stream, torch.cuda.current_stream(), free_bytes() // 2
        cloned, others = [], []
        for x, host in pairs:
            clone = _clone(x) if x.device.type == "cuda" and x.nbytes <= room else None
            if clone is None:
                others.append((x, host))
            else:
                room -= x.nbytes
                cloned.append((clone, host))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for x, host in others:
                host.copy_(x, non_blocking=True)
            if others:
                current.wait_stream(side)
            for x, host in cloned:
                host.copy_(x, non_blocking=True)
                x.record_stream(side)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        return copied.synchronize


def free_bytes() -> int:
    """Return the memory of the current GPU that torch can allocate."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _clone(x: Tensor) -> Tensor | None:
    """Return a copy on the same GPU; None if there is no such piece of memory."""
    try:
        return x.clone()
    except torch.OutOfMemoryError:
        return None


def _do_nothing() -> None:
    pass
