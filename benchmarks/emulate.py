# SPDX-License-Identifier: Apache-2.0
"""One process plays rank r of N: a real step, a transport with nobody at its other end.

What a group would cost the GPU that computes is kept: a call waits for what it sends, runs on a
stream of its own for as long as the bytes take over a link, and whoever needs the result waits for
that stream. What the other ranks send is made up, so results are of the right shape and no more.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_cp import ContextParallel
from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import LoneTransport, Message, Transport, nothing

T = TypeVar("T")


class EmulatedTransport:
    """A group of which only one rank exists, on a CPU or a GPU.

    On a GPU each transport has one stream, as an NCCL communicator has: its calls run one after the
    other, beside what is computed.

    Args:
        rank: who we are.
        size: of how many.
        link_gbs: gigabytes that a rank receives per second, while it sends as many; None for links
            that take no time; without ``fill`` nothing is moved then, the own part neither.
        fill: whether what other ranks would send becomes a copy of what this one sends. Costs
            memory bandwidth beside the computation; without, the memory is left as it is, only
            this rank's own part being right.
        device: where small tensors of callers who have the choice lie.
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
        """Receive what was sent, as far as it reaches, and zeros beyond."""
        if not sends and not receives:
            return nothing

        def work() -> None:
            for peer, into in receives if self.fill else ():
                sent = next((x for to, x in sends if to == peer), None)
                sent = sends[0][1] if sent is None and sends else sent
                _copy_prefix(into.view(-1), None if sent is None else sent.view(-1))

        tensors = [x for _, x in (*sends, *receives)]
        # Both ways at once: the link is busy for the longer one.
        moved = max(sum(x.nbytes for _, x in part) for part in (sends, receives))
        return self._start(work, tensors, moved)

    def all_gather(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Fill the own row, and the others with the same."""
        rows = out.view(self.size, *x.shape)

        def work() -> None:
            if self.fill:
                rows.copy_(x.expand_as(rows))
            else:
                rows[self.rank].copy_(x)

        return self._start(work, [out, x], (self.size - 1) * x.nbytes)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Callable[[], None]:
        """Take the own row: the others' gradients are taken for 0."""

        def work() -> None:
            out.view(-1).copy_(x.view(self.size, -1)[self.rank])

        return self._start(work, [out, x], x.nbytes - x.nbytes // self.size)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Receive the own part, and for the others' what was sent to them."""

        def work() -> None:
            parts = zip(out.split(list(out_sizes)), x.split(list(sizes)), strict=True)
            for peer, (into, sent) in enumerate(parts):
                if self.fill or peer == self.rank:
                    _copy_prefix(into, sent)

        own = out_sizes[self.rank] * out.element_size()
        return self._start(work, [out, x], out.nbytes - own)

    def all_reduce(self, x: Tensor) -> None:
        """Sum over ranks that all have the same."""
        self._start(lambda: x.mul_(self.size), [x], 2 * (x.nbytes - x.nbytes // self.size))()

    def first(self, x: T) -> T:
        """Return ``x``."""
        return x

    def _start(
        self, work: Callable[[], object], tensors: list[Tensor], num_bytes: int
    ) -> Callable[[], None]:
        """Do ``work`` and let the link be busy; return what waits for both."""
        self.num_calls += 1
        self.num_bytes += num_bytes
        device = tensors[0].device
        if device.type != "cuda":
            work()
            return nothing
        if self.link_gbs is None and not self.fill:
            return nothing  # nothing moves, nobody waits: not even the host pays
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # of normal priority, as torch gives NCCL
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            work()
            if self.link_gbs is not None:
                torch.cuda._sleep(int(num_bytes / self.link_gbs * cycles_per_ns(device)))
            done = self._stream.record_event()

        def wait() -> None:
            torch.cuda.current_stream(device).wait_event(done)
            tensors.clear()  # until here, or their memory would be given to somebody else

        return wait


def _copy_prefix(into: Tensor, sent: Tensor | None) -> None:
    """Copy as much as there is; the rest is 0."""
    size = 0 if sent is None else min(sent.numel(), into.numel())
    if sent is not None:
        into[:size].copy_(sent[:size])
    into[size:].zero_()


@lru_cache(maxsize=8)
def cycles_per_ns(device: torch.device) -> float:
    """Measure how fast the clock goes by which the GPU sleeps.

    It is the clock of the chip, which goes slower under load: a link is then slower by as much.
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
    """Return the groups of rank ``rank`` of ``size``, as `mesh.build_groups` would make them.

    Args:
        rank: who we are.
        size: how many share a row.
        ulysses_size: how many neighbours swap tokens for heads.
        link_gbs: of both groups that attention uses.
        fill: likewise. Checks and losses always get copies of what this rank has.
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
    **options: Any,
) -> ContextParallel:
    """Return a `ContextParallel` that is rank ``rank`` of ``size``; its steps are real ones.

    ``options`` are those of `ContextParallel`. With ``algorithm="ulysses"`` all ranks swap tokens
    for heads.
    """
    inside = size if options.get("algorithm") == "ulysses" else ulysses_size
    groups = emulated_groups(rank, size, ulysses_size=inside, link_gbs=link_gbs, fill=fill)
    return ContextParallel(groups, **options)


def attention_transports(cp: ContextParallel) -> list[EmulatedTransport]:
    """Return the transports that attention uses, for their counts."""
    both = (cp.groups.attend, cp.groups.inside)
    return [x for x in both if isinstance(x, EmulatedTransport)]
