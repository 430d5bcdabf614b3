# SPDX-License-Identifier: Apache-2.0
"""Copies of a state in host memory, from which a thread writes while training goes on.

Knows tensors and host memory; nothing of files. torch's `DefaultStager` is not used, see
docs/decisions.md: its memory is shared with forked workers, and pinned for each save in torch 2.11.
"""

import operator
import sys
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from typing_extensions import override

from lightning_cp.checkpoint.blocks import as_blocks
from lightning_cp.checkpoint.state import map_tensors
from lightning_cp.memory.arena import Arena, HostBlock, aligned
from lightning_cp.private.modules import taken_apart


class HostStager(AsyncStager):
    """Host memory for the tensors of a state: pinned once, and used for each copy of the state.

    Attributes:
        together: runs a function on all ranks, and raises on all of them if it fails on one: the
            others would write, and wait for the one that does not.
    """

    def __init__(self) -> None:
        self.together: Callable[[Callable[[], Any]], Any] = operator.call
        self._block: HostBlock | None = None

    @override
    def stage(self, state_dict: Any) -> Any:
        """Copy a nested state; the former copy is overwritten, and must not be in use.

        The copy is complete when this returns. It comes after what the caller's streams have been
        given to do, such as a step of an optimizer.
        """
        return self.together(lambda: as_blocks(self._copy(state_dict)))

    @override
    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has waited."""

    @override
    def close(self) -> None:
        """Free the memory once nothing uses the copy."""
        self._block = None

    @torch.no_grad()
    def _copy(self, state: Any) -> Any:
        tensors: dict[Any, Tensor] = {}
        copies: dict[Any, Tensor] = {}

        def place(x: Tensor) -> Callable[[], Tensor]:
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg())
            tensors.setdefault(key, x)  # tied weights have several names
            return lambda: copies[key]

        parts: deque[Callable[[], Any]] = deque()
        map_tensors(lambda x: parts.append(taken_apart(x, place)), state)
        starts = list(accumulate((aligned(x.nbytes) for x in tensors.values()), initial=0))
        devices = {x.device for x in tensors.values() if x.is_cuda}
        memory = self._take(starts.pop(), pinned=bool(devices))
        for (key, x), start in zip(tensors.items(), starts, strict=True):
            host = memory[start : start + x.nbytes]
            host.copy_(_bytes(x), non_blocking=True)
            copies[key] = _with_own_storage(host, x.dtype).view(x.shape)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return map_tensors(lambda _: parts.popleft()(), state, deepcopy)

    def _take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Return host memory, that of the former copy if it is large enough."""
        block = self._block
        if block is None or block.num_bytes < num_bytes or block.is_pinned != pinned:
            self._block = block = None  # freed before there is more
            try:
                block = Arena(limit=sys.maxsize).take(max(num_bytes, 1), pinned=pinned)
            except (MemoryError, OSError) as error:
                raise MemoryError(
                    f"checkpoints=Checkpoints(asynchronous=True) copies {num_bytes / 2**30:.2f} "
                    "GiB of each rank to host memory, which could not be allocated. Leave it out."
                ) from error
            assert block is not None  # noqa: S101  the arena has no limit
            self._block = block
        return block.memory


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor: torch copies no others of types of less than a byte."""
    x = x.resolve_conj().resolve_neg().contiguous()
    # `view(-1)` keeps the stride of a dim of one element, which then cannot be viewed as bytes.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _with_own_storage(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as a tensor with a storage of just these: torch's writer clones other views."""
    return (
        torch.from_numpy(memory.numpy()).view(dtype) if len(memory) else torch.empty(0, dtype=dtype)
    )
