# SPDX-License-Identifier: Apache-2.0
"""How bytes move between ranks: one small interface, and its two implementations.

Everything above speaks to a `Transport`, never to `torch.distributed`, so that one process, a real
process group and the threads of a test are the same to it. Calls are issued by all ranks in the
same order; sizes are known beforehand on both sides.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import torch_private
from lightning_cp.options import check_choice

T = TypeVar("T")
Message = tuple[int, Tensor]
"""A peer's rank in the group, and the contiguous tensor that goes to it or comes from it."""

GradientWire = Literal["float32", "model"]
"""In which precision gradients travel that are added up on the way: at least that of the model."""


def check_gradient_wire(name: str) -> None:
    """Refuse a precision that gradients cannot travel in."""
    check_choice("gradient_wire", name, get_args(GradientWire))


class Transport(Protocol):
    """What a group of ranks can do together. Each call returns what waits for it to finish."""

    @property
    def rank(self) -> int:
        """Return this rank's place in the group."""

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""

    @property
    def device(self) -> torch.device:
        """Return where tensors must lie to travel, for callers who have the choice."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Start sending and receiving, peer to peer; peers without a message take no part."""

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start filling ``out`` [size, *x.shape] with every rank's ``x``."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start filling ``out`` with the sum over ranks of their ``x[rank]``; ``x`` [size, ...]."""

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Start sending the r-th part of ``x`` to rank r; the r-th part of ``out`` is what it sent.

        Both are flat; the sizes of their parts may differ, and may be 0.
        """

    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x`` by its sum over the ranks, and wait."""

    def first(self, x: T) -> T:
        """Return what the first rank of the group has; anything that pickles."""


class GroupTransport:
    """A transport over a torch process group.

    Args:
        group: the process group; its backend decides where tensors lie.
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
        """Say whether all ranks of this group are in another one."""
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
        return _Waiting(dist.batch_isend_irecv(calls), [call.tensor for call in calls])

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start an all-gather."""
        # As bytes: not every backend knows every dtype.
        flat, mine = (t.view(-1).view(torch.uint8) for t in (out, x))
        return _Waiting([torch_private.all_gather_single(flat, mine, self.group)], [out, x])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start a reduce-scatter."""
        return _Waiting(
            [torch_private.reduce_scatter_single(out.view(-1), x.view(-1), self.group)], [out, x]
        )

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Start an all-to-all."""
        work = dist.all_to_all_single(
            out, x, list(out_sizes), list(sizes), group=self.group, async_op=True
        )
        return _Waiting([work], [out, x])

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the group."""
        dist.all_reduce(x, group=self.group)

    def first(self, x: T) -> T:
        """Broadcast an object."""
        box = [x]
        dist.broadcast_object_list(box, self._global_ranks[0], self.group)
        return box[0]


class LoneTransport:
    """The transport of one process that shares with nobody."""

    rank = 0
    size = 1
    device = torch.device("cpu")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Do nothing: there is nobody to send to."""
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
        """Leave ``x`` as it is."""

    def first(self, x: T) -> T:
        """Return ``x``."""
        return x


def nothing() -> None:
    """Wait for nothing."""


class _Waiting:
    """Holds the tensors of calls in flight: freed earlier, their memory would be reused."""

    def __init__(self, works: Sequence[dist.Work | None], tensors: list[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def __call__(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._tensors.clear()
