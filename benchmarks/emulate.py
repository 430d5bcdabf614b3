# SPDX-License-Identifier: Apache-2.0
"""Emulation of rank r of N in one process: a real step, and a transport without peers.

The cost for the computing GPU is emulated: a transfer waits for the data that it sends, occupies a
separate stream for the time that the bytes take over a link, and its consumer waits for that
stream. The data of other ranks is made up, so that only the shapes of results are meaningful.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from lightning_cp import Attention, ContextParallel, Memory, Verify
from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import LoneTransport, Message, Transport, nothing
from lightning_cp.config import (
    AlgorithmName,
    Config,
    KeepAttention,
    KernelName,
    LayoutName,
    Offload,
)

T = TypeVar("T")


class EmulatedTransport:
    """A group of which only one rank exists, on a CPU or a GPU.

    On a GPU each transport has one stream, as an NCCL communicator has: its calls run one after the
    other, concurrently with computation.

    Args:
        rank: the emulated rank.
        size: number of ranks.
        link_gbs: gigabytes that a rank receives per second, while it sends as many; None for links
            that take no time: then, without ``fill``, nothing is copied at all.
        fill: whether the data of other ranks becomes a copy of this rank's. Costs memory bandwidth
            during computation; without, only this rank's own part of a result is written.
        device: device of small tensors whose callers leave the choice.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        link_gbs: float | None = None,
        *,
        fill: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rank = rank
        self.size = size
        self.link_gbs = link_gbs
        self.fill = fill
        self.device = torch.device(device)
        self.num_calls = 0
        self.num_bytes = 0
        self._stream: torch.cuda.Stream | None = None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Receive what this rank sent, padded with zeros."""
        if not sends and not receives:
            return nothing

        def work() -> None:
            for peer, into in receives if self.fill else ():
                sent = next((x for to, x in sends if to == peer), None)
                sent = sends[0][1] if sent is None and sends else sent
                _copy_prefix(into.view(-1), None if sent is None else sent.view(-1))

        tensors = [x for _, x in (*sends, *receives)]
        # Links are bidirectional: the longer direction counts.
        moved = max(sum(x.nbytes for _, x in part) for part in (sends, receives))
        return self._start(work, tensors, moved)

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Copy this rank's data to its own part, and to those of the others."""
        parts = out.view(self.size, *x.shape)

        def work() -> None:
            # Not one copy of `x` expanded: such a kernel is four times slower than these.
            for part in parts if self.fill else parts[self.rank : self.rank + 1]:
                part.copy_(x)

        return self._start(work, [out, x], (self.size - 1) * x.nbytes)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Return this rank's part: the other ranks' gradients are 0."""

        def work() -> None:
            out.view(-1).copy_(x.view(self.size, -1)[self.rank])

        return self._start(work, [out, x], x.nbytes - x.nbytes // self.size)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Receive this rank's own part, and for the others' what was sent to them."""

        def work() -> None:
            parts = zip(out.split(list(out_sizes)), x.split(list(sizes)), strict=True)
            for peer, (into, sent) in enumerate(parts):
                if self.fill or peer == self.rank:
                    _copy_prefix(into.view(-1), sent.view(-1))

        own = out_sizes[self.rank] * out.nbytes // max(1, len(out))
        return self._start(work, [out, x], out.nbytes - own)

    def all_reduce(self, x: Tensor) -> None:
        """Sum over ranks that all have the same values."""
        self._start(lambda: x.mul_(self.size), [x], 2 * (x.nbytes - x.nbytes // self.size))()

    def first(self, x: T) -> T:
        """Return ``x``."""
        return x

    def _start(
        self, work: Callable[[], object], tensors: list[Tensor], num_bytes: int
    ) -> Callable[[], None]:
        """Start ``work`` and occupy the link; return a function that waits for both."""
        self.num_calls += 1
        self.num_bytes += num_bytes
        device = tensors[0].device
        if device.type != "cuda":
            work()
            return nothing
        if self.link_gbs is None and not self.fill:
            return nothing  # no copy, no wait, no host time
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # of normal priority, as torch's NCCL streams
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            work()
            if self.link_gbs is not None:
                torch.cuda._sleep(int(num_bytes / self.link_gbs * cycles_per_ns(device)))
            done = self._stream.record_event()

        def wait() -> None:
            torch.cuda.current_stream(device).wait_event(done)
            tensors.clear()  # not before: their memory would be reused

        return wait


def _copy_prefix(into: Tensor, sent: Tensor | None) -> None:
    """Copy as many elements as were sent; the rest is 0."""
    size = 0 if sent is None else min(sent.numel(), into.numel())
    if sent is not None:
        into[:size].copy_(sent[:size])
    into[size:].zero_()


@lru_cache(maxsize=8)
def cycles_per_ns(device: torch.device) -> float:
    """Measure the clock rate of ``torch.cuda._sleep``.

    It is the clock of the chip, which is slower under load: emulated links then are, too.
    """
    cycles, times = 20_000_000, []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        stop.record()
        torch.cuda.synchronize(device)
        times.append(float(start.elapsed_time(stop)))
    return cycles / (1e6 * min(times))


def emulated_groups(
    rank: int,
    size: int,
    *,
    ulysses_size: int = 1,
    link_gbs: float | None = None,
    fill: bool = True,
) -> Groups:
    """Return the groups of rank ``rank`` of ``size``, as `mesh.build_groups` would build them.

    Args:
        rank: the emulated rank.
        size: number of context ranks.
        ulysses_size: size of a Ulysses group.
        link_gbs: of both groups that attention uses.
        fill: of both groups. Checks and losses always get copies of this rank's values.
    """

    def part(rank: int, size: int) -> Transport:
        if size == 1:
            return LoneTransport()
        return EmulatedTransport(rank, size, link_gbs, fill=fill)

    between, inside = divmod(rank, ulysses_size)
    context = EmulatedTransport(rank, size) if size > 1 else LoneTransport()
    return Groups(
        attend=part(between, size // ulysses_size),
        inside=part(inside, ulysses_size),
        context=context,
        data=LoneTransport(),
    )


def emulated_parallel(
    rank: int,
    size: int,
    *,
    ulysses_size: int = 1,
    link_gbs: float | None = None,
    fill: bool = True,
    layout: LayoutName = "auto",
    algorithm: AlgorithmName = "auto",
    kernel: KernelName = "auto",
    attention_memory: float | None = None,
    keep_attention: KeepAttention = "none",
    offload: Offload = "none",
) -> ContextParallel:
    """Return a `ContextParallel` that is rank ``rank`` of ``size``; its steps are real.

    With ``algorithm="ulysses"`` all ranks are one Ulysses group. Batches are not compared.
    """
    config = Config(
        layout=layout,
        algorithm=algorithm,
        attention=Attention(kernel, attention_memory),
        memory=Memory(keep_attention=keep_attention, offload=offload),
        verify=Verify(check_batches=0),
    )
    inside = size if algorithm == "ulysses" else ulysses_size
    groups = emulated_groups(rank, size, ulysses_size=inside, link_gbs=link_gbs, fill=fill)
    return ContextParallel.of(groups, config)


def attention_transports(cp: ContextParallel) -> list[EmulatedTransport]:
    """Return the transports that attention uses, for their counts."""
    both = (cp.groups.attend, cp.groups.inside)
    return [x for x in both if isinstance(x, EmulatedTransport)]
