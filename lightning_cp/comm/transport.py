# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: one small interface, and its two implementations.

The modules above use a `Transport`, never `torch.distributed`, so that one process, a process group
and the threads of a test run the same code. All ranks issue calls in the same order; both sides
know the sizes beforehand.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.private import groups

T = TypeVar("T")
Message = tuple[int, Tensor]
"""A peer's rank in the group, and the contiguous tensor that is sent to it or received from it."""


class Transport(Protocol):
    """A group of ranks. Each call starts a transfer and returns a function that waits for it."""

    @property
    def rank(self) -> int:
        """Return this process's rank in the group."""

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""

    @property
    def device(self) -> torch.device:
        """Return the device of tensors that can be sent."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start sending and receiving, peer to peer; ranks without a message need not call it."""

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start filling ``out`` [size, *x.shape] with every rank's ``x``."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start filling ``out`` with the sum over ranks of their ``x[rank]``; ``x`` [size, ...]."""

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Start sending the r-th part of ``x`` to rank r, and receiving the r-th part of ``out``.

        Both are flat; the sizes of their parts may differ, and may be 0.
        """

    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over the ranks; blocking."""

    def first(self, x: T) -> T:
        """Return the first rank's value on all ranks; anything that pickles."""


class GroupTransport:
    """A transport over a torch process group.

    Args:
        group: the process group; its backend decides the device of tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._global_ranks = dist.get_process_group_ranks(group)

    @property
    def device(self) -> torch.device:
        """Return the current GPU for NCCL, the CPU for gloo."""
        if "nccl" in dist.get_backend(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def covered_by(self, group: dist.ProcessGroup) -> bool:
        """Return whether another group contains all ranks of this one."""
        return set(self._global_ranks) <= set(dist.get_process_group_ranks(group))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start the messages as one batch of point-to-point calls."""
        calls = [
            dist.P2POp(call, x, self._global_ranks[peer], self.group)
            for call, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, x in messages
        ]
        if not calls:
            return nothing
        return _Pending(dist.batch_isend_irecv(calls), [call.tensor for call in calls])

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start an all-gather."""
        if self.size == 1:
            out[0].copy_(x)
            return nothing
        # As bytes: not every backend supports every dtype.
        out_bytes, x_bytes = (t.view(-1).view(torch.uint8) for t in (out, x))
        work = groups.all_gather_single(out_bytes, x_bytes, self.group)
        return _Pending([work], [out, x])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start a reduce-scatter."""
        return _Pending(
            [groups.reduce_scatter_single(out.view(-1), x.view(-1), self.group)], [out, x]
        )

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Start an all-to-all."""
        work = dist.all_to_all_single(
            out, x, list(out_sizes), list(sizes), group=self.group, async_op=True
        )
        return _Pending([work], [out, x])

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the group."""
        if self.size == 1:
            return
        dist.all_reduce(x, group=self.group)

    def first(self, x: T) -> T:
        """Broadcast an object."""
        box = [x]
        dist.broadcast_object_list(box, self._global_ranks[0], self.group)
        return box[0]


class LoneTransport:
    """The transport of a group of one process."""

    rank = 0
    size = 1
    device = torch.device("cpu")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Do nothing: there is no other rank."""
        assert not [*sends, *receives]  # noqa: S101  a plan for one rank has no messages
        return nothing

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Copy."""
        out[0].copy_(x)
        return nothing

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Copy."""
        out.copy_(x[0])
        return nothing

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Copy."""
        out.copy_(x)
        return nothing

    def all_reduce(self, x: Tensor) -> None:
        """Do nothing: ``x`` is the sum."""

    def first(self, x: T) -> T:
        """Return ``x``."""
        return x


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, without waiting for what the device still computes.

    A copy from memory that is not pinned waits for the stream.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def nothing() -> None:
    """Do nothing: the transfer is complete."""


def gather(x: Tensor, transport: Transport) -> Tensor:
    """Return every rank's ``x``, [size, *x.shape]; blocking. For small tensors.

    Example:
        >>> gather(torch.tensor([3]), LoneTransport())
        tensor([[3]])
    """
    values = x.new_empty(transport.size, *x.shape)
    transport.all_gather(values, x)()
    return values


class _Pending:
    """Waits for calls in flight, and keeps their tensors: memory freed earlier would be reused."""

    def __init__(self, works: Sequence[dist.Work | None], tensors: list[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def __call__(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._tensors.clear()
