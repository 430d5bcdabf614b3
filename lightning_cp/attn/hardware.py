# SPDX-License-Identifier: Apache-2.0
"""Speeds of GPUs and of the links between ranks, for the cost model.

Numbers of an H200 were measured, and stand for all GPUs (docs/cost-model.md says how well they
predict).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Pass:
    """Speed of dense kernels in one pass, forward or backward.

    Args:
        full_tflops: rate on full rectangles.
        causal_tflops: rate on causal squares.
        diagonal: keys per query of a causal square that are computed although hidden.
        fixed_us: minimal time of a call.
        host_us: time of a call on the host, with all that belongs to it.
        flops: floating-point operations per visible pair, head and head dim.
    """

    full_tflops: float
    causal_tflops: float
    diagonal: float
    fixed_us: float
    host_us: float
    flops: int


@dataclass(frozen=True, slots=True)
class Chip:
    """Speed and memory of a GPU.

    Args:
        forward: of its fastest dense kernel.
        backward: likewise.
        num_cores: blocks of threads that run at once.
        tile: tokens of a block of threads.
        memory_gbs: memory bandwidth that simple kernels reach.
        spare_bytes: memory that attention may use temporarily if that saves time.
    """

    forward: Pass
    backward: Pass
    num_cores: int
    tile: int
    memory_gbs: float
    spare_bytes: float


H200 = Chip(
    forward=Pass(695, 575, 16, fixed_us=34, host_us=200, flops=4),
    backward=Pass(535, 540, 630, fixed_us=22, host_us=600, flops=10),
    num_cores=132,
    tile=128,
    memory_gbs=4000,
    spare_bytes=4 * 2**30,
)
"""cuDNN on an H200: fitted to 14 kernel times and 12 splits of a gather, all within 8%."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth and latency between ranks.

    Args:
        inside_gbs: gigabytes per second that a rank receives inside its node.
        between_gbs: likewise from other nodes, through one network card per rank.
        ranks_per_node: ranks of a node.
        latency_us: minimal time of an exchange.
        hop_us: more time of a collective for each rank of its group, as in a ring. 0 is what the
            cost model was compared with, on up to 64 ranks; of more, it is not known here.
        slowdown: time that kernels lose to a concurrent exchange, as a share of its time: it takes
            cores, bandwidth and power from them.
    """

    inside_gbs: float = 400.0
    between_gbs: float = 45.0
    ranks_per_node: int = 8
    latency_us: float = 15.0
    slowdown: float = 0.1
    hop_us: float = 0.0

    def beside(self, tp_size: int) -> "Links":
        """Return the links between ranks of the same tensor index, of which a node has fewer.

        Example:
            >>> Links().beside(4).ranks_per_node
            2
        """
        return replace(self, ranks_per_node=max(1, self.ranks_per_node // tp_size))

    def collective(self, num_bytes: float, group_size: int, stride: int) -> float:
        """Return the time in which every rank of a group receives ``num_bytes`` from all others.

        The ranks of a node share the traffic to other nodes, so that all network cards are busy.
        """
        if group_size == 1:
            return 0.0
        hops = self.hop_us * (group_size - 1) / 1e6
        return hops + self._time(num_bytes, self.collective_gbs(group_size, stride))

    def collective_gbs(self, group_size: int, stride: int = 1) -> float:
        """Return the gigabytes per second that a rank receives."""
        if not self._spans(group_size, stride):
            return self.inside_gbs
        sharing = max(1, self.ranks_per_node // stride)
        return min(self.inside_gbs, self.between_gbs * sharing)

    def message(self, num_bytes: float, group_size: int, stride: int) -> float:
        """Return the time in which every rank receives ``num_bytes`` from one other rank."""
        if group_size == 1:
            return 0.0
        return self._time(num_bytes, self.message_gbs(group_size, stride))

    def message_gbs(self, group_size: int, stride: int = 1) -> float:
        """Return the gigabytes per second that a rank receives."""
        return self.between_gbs if self._spans(group_size, stride) else self.inside_gbs

    def together(self, compute: float, traffic: float) -> float:
        """Return the time of kernels and concurrent exchanges."""
        return max(compute + self.slowdown * traffic, traffic)

    def _spans(self, group_size: int, stride: int) -> bool:
        return group_size * stride > self.ranks_per_node

    def _time(self, num_bytes: float, gbs: float) -> float:
        return num_bytes / gbs / 1e9 + self.latency_us / 1e6


FREE = Links(float("inf"), float("inf"), latency_us=0.0)
"""Links that take no time, for comparison with measurements on one GPU."""
