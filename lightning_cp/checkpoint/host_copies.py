# SPDX-License-Identifier: Apache-2.0
"""Copies of a state in host memory, made while the GPU goes on."""

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_cp.checkpoint.state import map_tensors
from lightning_cp.memory.arena import Arena, Block, aligned
from lightning_cp.torch_private import inner_tensors, replace_inner


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

    @torch.no_grad()
    def copy(self, state: Any) -> Callable[[], Any]:
        """Copy a nested state; the former copy is overwritten.

        Returns:
            A function that waits, and returns the copy; another thread may call it.
        """
        places: dict[int, tuple[Any, Tensor]] = {}  # by id: tied weights have several names
        unique: dict[Any, Tensor] = {}

        def collect(x: Tensor) -> Tensor:
            for part in inner_tensors(x):
                key = (part.data_ptr(), part.shape, part.stride(), part.dtype, part.device)
                unique.setdefault(key, part)
                places[id(part)] = (key, part)
            return x

        kept = map_tensors(collect, state, deepcopy)
        sizes = [aligned(x.nbytes) for x in unique.values()]
        is_cuda = any(x.device.type == "cuda" for x in unique.values())
        memory = self._take(sum(sizes), pinned=is_cuda)
        copies = {
            key: memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
            for (key, x), start in zip(unique.items(), accumulate(sizes, initial=0), strict=False)
        }
        wait = self._copy_all([(x, copies[key]) for key, x in unique.items()], is_cuda=is_cuda)

        def finish() -> Any:
            wait()
            get_copy = partial(replace_inner, lambda x: copies[places[id(x)][0]])
            return map_tensors(get_copy, kept)

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
            except MemoryError as error:
                raise MemoryError(
                    f"async_checkpoint=True copies {num_bytes / 2**30:.2f} GiB of each rank to "
                    "pinned host memory, which could not be allocated. Give "
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
            if x.device.type == "cuda" and x.nbytes <= room:
                room -= x.nbytes
                cloned.append((x.clone(), host))
            else:
                others.append((x, host))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for x, host in others:
                host.copy_(x, non_blocking=True)
            if others:
                current.wait_stream(side)
            for x, host in cloned:
                host.copy_(x, non_blocking=True)
                x.record_stream(side)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return copied.synchronize


def free_bytes() -> int:
    """Return the memory of the current GPU that torch can allocate."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _do_nothing() -> None:
    pass
