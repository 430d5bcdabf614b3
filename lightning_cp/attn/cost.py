# SPDX-License-Identifier: Apache-2.0
"""What one attention call costs, by a written model: time and memory of each way keys can travel.

Pure arithmetic on global shapes, the same on every rank: no device is asked and no rank waits for
another. Numbers of a chip are measured ones (docs/cost-model.md says how well they predict).
`choose` takes the fastest way that fits into memory. Bytes and seconds, unless a name says else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

TravelName = Literal["gather", "ring"]
Kind = Literal["causal", "full", "masked"]

# Sums over blocks are kept in float32.
_SUM_BYTES = 4
# What a merge of two parts reads and writes per number: the sum twice, the part once.
_MERGE_BYTES = 10
# The model is right to some percent: a way that is named later must be faster by more than this.
_TIE = 0.05
# More memory than the least budget is taken where less of it would take longer by this share: a
# tenth, less what the model may be wrong by.
_WORTH = 0.08


@dataclass(frozen=True, slots=True)
class Pass:
    """How fast dense kernels compute one pass, forward or backward.

    Args:
        full_tflops: rate on rectangles that are wholly visible.
        causal_tflops: rate on causal squares.
        diagonal: keys per query of a causal square that are computed beside the visible ones.
        fixed_us: what each call takes, however small.
        host_us: what each call takes on the host, with all that belongs to it.
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
    """What a GPU can do.

    Args:
        forward: of its fastest dense kernel.
        backward: likewise.
        flex_share: speed of compiled FlexAttention, as a share of the dense kernel's.
        num_cores: blocks of threads that run at once.
        tile: tokens of a block of threads.
        memory_gbs: bandwidth of its memory, as far as simple kernels reach it.
        spare_bytes: of its memory, that attention may take for a while if that saves time.
    """

    forward: Pass
    backward: Pass
    flex_share: float
    num_cores: int
    tile: int
    memory_gbs: float
    spare_bytes: float


H200 = Chip(
    forward=Pass(695, 575, 16, fixed_us=34, host_us=200, flops=4),
    backward=Pass(535, 540, 630, fixed_us=22, host_us=600, flops=10),
    flex_share=0.72,
    num_cores=132,
    tile=128,
    memory_gbs=4000,
    spare_bytes=4 * 2**30,
)
"""cuDNN on an H200: fitted to 14 kernel times and 12 splits of a gather, all within 8%."""

A100 = Chip(
    forward=Pass(190, 180, 64, fixed_us=40, host_us=200, flops=4),
    backward=Pass(160, 150, 256, fixed_us=40, host_us=600, flops=10),
    flex_share=0.9,
    num_cores=108,
    tile=128,
    memory_gbs=1400,
    spare_bytes=2 * 2**30,
)
"""FA2 on an A100, from its public numbers, not measured here: stands for chips that are unknown."""


def chip_of(capability: tuple[int, int]) -> Chip:
    """Return what stands for a GPU of a compute capability: Hopper and newer, or older."""
    return H200 if capability >= (9, 0) else A100


@dataclass(frozen=True, slots=True)
class Links:
    """How fast ranks reach each other.

    Args:
        inside_gbs: gigabytes per second that a rank receives from its node.
        between_gbs: likewise from other nodes, by a rank's own network card.
        ranks_per_node: how many ranks a node has.
        latency_us: what each exchange takes, however small.
        slowdown: time that kernels lose to an exchange beside them, as a share of its own: it takes
            cores, bandwidth and power from them.
    """

    inside_gbs: float = 400.0
    between_gbs: float = 45.0
    ranks_per_node: int = 8
    latency_us: float = 15.0
    slowdown: float = 0.1

    def collective(self, num_bytes: float, group_size: int, stride: int) -> float:
        """Return the time in which every rank of a group receives so many bytes of all others.

        The ranks of a node take turns at the border, so that all of their network cards are busy.
        """
        if group_size == 1:
            return 0.0
        return self._time(num_bytes, self.collective_gbs(group_size, stride))

    def collective_gbs(self, group_size: int, stride: int = 1) -> float:
        """Return how many gigabytes per second a rank receives then."""
        if not self._spans(group_size, stride):
            return self.inside_gbs
        sharing = max(1, self.ranks_per_node // stride)
        return min(self.inside_gbs, self.between_gbs * sharing)

    def message(self, num_bytes: float, group_size: int, stride: int) -> float:
        """Return the time in which every rank receives so many bytes of one other rank."""
        if group_size == 1:
            return 0.0
        return self._time(num_bytes, self.message_gbs(group_size, stride))

    def message_gbs(self, group_size: int, stride: int = 1) -> float:
        """Return how many gigabytes per second a rank receives then."""
        return self.between_gbs if self._spans(group_size, stride) else self.inside_gbs

    def together(self, compute: float, traffic: float) -> float:
        """Return the time of kernels and of exchanges beside them."""
        return max(compute + self.slowdown * traffic, traffic)

    def _spans(self, group_size: int, stride: int) -> bool:
        return group_size * stride > self.ranks_per_node

    def _time(self, num_bytes: float, gbs: float) -> float:
        return num_bytes / gbs / 1e9 + self.latency_us / 1e6


FREE = Links(float("inf"), float("inf"), latency_us=0.0)
"""Links that take no time, for comparison with what one GPU alone can measure."""


@dataclass(frozen=True)
class Problem:
    """One attention call, as all ranks see it.

    Args:
        seq_len: tokens in a row.
        cp_size: ranks that share it.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: of queries and keys.
        value_dim: of values; ``head_dim`` when 0.
        itemsize: bytes of a number.
        batch_size: rows.
        kind: ``causal`` and ``full`` are computed by dense kernels, ``masked`` by FlexAttention.
        work: visible pairs as a share of all; only ``masked`` asks for it.
        reach: keys that a rank's queries see, as a share of the row's.
        ulysses_size: neighbours that swap tokens for heads first.
        wire_itemsize: bytes of a gradient while a collective adds it up.

    Example:
        >>> Problem(seq_len=32768, cp_size=8, num_heads=32, num_kv_heads=8, head_dim=128).local_len
        4096
    """

    seq_len: int
    cp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0
    itemsize: int = 2
    batch_size: int = 1
    kind: Kind = "causal"
    work: float = 0.5
    reach: float = 1.0
    ulysses_size: int = 1
    wire_itemsize: int = _SUM_BYTES

    @cached_property
    def local_len(self) -> int:
        """Return the tokens of a rank."""
        return -(-self.seq_len // self.cp_size)

    @cached_property
    def mean_dim(self) -> float:
        """Return the mean of both head dims: scores need one of them, outputs the other."""
        return (self.head_dim + (self.value_dim or self.head_dim)) / 2

    @cached_property
    def query_bytes(self) -> float:
        """Return the bytes of a rank's queries."""
        tokens = self.batch_size * self.local_len
        return tokens * self.num_heads * self.head_dim * self.itemsize

    def key_bytes(self, num_tokens: float, itemsize: int | None = None) -> float:
        """Return the bytes of the keys and values of so many tokens, all heads."""
        numbers = self.batch_size * num_tokens * self.num_kv_heads * 2 * self.mean_dim
        return numbers * (self.itemsize if itemsize is None else itemsize)

    def swapped(self) -> "Problem":
        """Return what is left between neighbourhoods, once tokens were swapped for heads."""
        size = self.ulysses_size
        return replace(
            self,
            cp_size=self.cp_size // size,
            num_heads=-(-self.num_heads // size),
            num_kv_heads=-(-self.num_kv_heads // size),
            ulysses_size=1,
        )


class Tile(NamedTuple):
    """One kernel call: how many queries meet how many keys, and which of them are visible."""

    queries: float
    keys: float
    kind: Kind


class Cost(NamedTuple):
    """Time of a pass, and the most memory that it needs beside what it is given."""

    time: float
    memory: float


class Estimate(NamedTuple):
    """Both passes of one way."""

    forward: Cost
    backward: Cost

    @property
    def time(self) -> float:
        """Return the time of both."""
        return self.forward.time + self.backward.time

    @property
    def memory(self) -> float:
        """Return what the larger one needs."""
        return max(self.forward.memory, self.backward.memory)


def kernel_time(
    problem: Problem, tile: Tile, num_heads: float, chip: Chip, *, backward: bool
) -> float:
    """Return the time of one kernel call.

    A fixed part, and operations at the chip's rate as far as its cores have work: a call has a
    block of threads for each tile of queries (forward) or keys (backward) and each head, and cores
    that get one block less than others wait.

    Example:
        >>> problem = Problem(32768, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> tile = Tile(4096, 2048, "full")
        >>> f"{1e3 * kernel_time(problem, tile, 32, H200, backward=False):.2f} ms"
        '0.24 ms'
    """
    speed = chip.backward if backward else chip.forward
    pairs = tile.queries * tile.keys
    rate = speed.full_tflops
    if tile.kind == "causal":
        pairs = pairs / 2 + speed.diagonal * tile.queries
        rate = speed.causal_tflops
    elif tile.kind == "masked":
        # All keys are given, and the kernel passes over what is hidden.
        pairs *= problem.work
        rate = speed.causal_tflops * chip.flex_share
    flops = speed.flops * pairs * num_heads * problem.mean_dim * problem.batch_size
    rows = tile.keys if backward else tile.queries
    blocks = max(1.0, problem.batch_size * num_heads * -(-rows // chip.tile))
    busy = blocks / (-(-blocks // chip.num_cores) * chip.num_cores)
    return speed.fixed_us / 1e6 + flops / (rate * 1e12 * busy)


def gather_tiles(problem: Problem) -> tuple[Tile, ...]:
    """Return the calls of one group of heads: those of a rank in the middle, under zigzag."""
    local_len, cp_size = problem.local_len, problem.cp_size
    if problem.kind != "causal":
        return (Tile(local_len, problem.seq_len, problem.kind),)
    if cp_size == 1:
        return (Tile(local_len, local_len, "causal"),)
    chunk, rank = local_len / 2, cp_size // 2
    before = (rank * chunk, (2 * cp_size - 1 - rank) * chunk)
    return tuple(
        tile
        for keys in before
        for tile in (Tile(chunk, keys, "full"), Tile(chunk, chunk, "causal"))
    )


def ring_tiles(problem: Problem) -> tuple[Tile, ...]:
    """Return the call of each stage: the own keys, then those of every other rank."""
    length, others = problem.local_len, problem.cp_size - 1
    if problem.kind != "causal":
        return (Tile(length, length, problem.kind),) * (others + 1)
    earlier = (Tile(length, length / 2, "full"),) * (problem.cp_size // 2)
    later = (Tile(length / 2, length, "full"),) * (others - problem.cp_size // 2)
    return (Tile(length, length, "causal"), *earlier, *later)


def compute_times(
    tiles: Sequence[Tile], problem: Problem, num_groups: int, chip: Chip, *, backward: bool
) -> list[float]:
    """Return the time of each call of one group of heads, with its share of the merges."""
    heads = problem.num_heads / num_groups
    times = [kernel_time(problem, tile, heads, chip, backward=backward) for tile in tiles]
    if len(tiles) == 1:
        return times
    # The first part of a query is taken as it is, each further one is merged.
    rows = max(0.0, sum(tile.queries for tile in tiles) - problem.local_len)
    merged = rows * heads * problem.mean_dim * problem.batch_size * _MERGE_BYTES
    merge = merged / (chip.memory_gbs * 1e9) / len(tiles)
    return [time + merge for time in times]


def estimate_gather(
    problem: Problem, groups: tuple[int, int], chip: Chip, links: Links, *, stride: int = 1
) -> Estimate:
    """Estimate: all keys of a group of heads at once, the next group's on their way.

    Args:
        problem: what is computed.
        groups: groups of heads, forward and backward.
        chip: the GPU.
        links: between ranks.
        stride: how far apart in rank neighbours of the group are.
    """
    passes = []
    size = problem.cp_size
    row = problem.seq_len * (problem.reach if size > 1 else 1.0)
    for backward, num_groups in enumerate(groups):
        tiles = gather_tiles(problem)
        computed = compute_times(tiles, problem, num_groups, chip, backward=bool(backward))
        keys = problem.key_bytes(row) / num_groups if size > 1 else 0.0
        sums = problem.key_bytes(row, _SUM_BYTES) / num_groups if size > 1 else 0.0
        wire = sums * problem.wire_itemsize / _SUM_BYTES
        lowered = wire if problem.wire_itemsize < _SUM_BYTES else 0.0
        fetch = links.collective(keys * (size - 1) / size, size, stride)
        give = links.collective(wire * (size - 1) / size, size, stride) if backward else 0.0
        # Keys are used as they arrive; their gradients are written once more, to be sent, and read
        # and written again to be lowered.
        copied = keys + sums if backward else 0.0
        copied += sums + wire if backward and lowered else 0.0
        compute = sum(computed) + copied / (chip.memory_gbs * 1e9)
        # A rank's own tokens are computed while the first keys arrive, in backward while the last
        # gradients leave.
        own = sum(time for time, tile in zip(computed, tiles, strict=True) if tile.kind == "causal")
        own = min(own, compute) if size > 1 else 0.0
        exposed = fetch + max(0.0, give - own) if backward else max(0.0, fetch - own)
        time = exposed
        for group in range(num_groups):
            traffic = (fetch if group < num_groups - 1 else 0.0) + (give if group else 0.0)
            time += links.together(compute, traffic)
        speed = chip.backward if backward else chip.forward
        time = max(time, num_groups * len(tiles) * speed.host_us / 1e6)
        # Also what a rank sends itself, for this group and the next.
        held = keys * (2 if num_groups > 1 else 1) * (1 + 1 / size)
        held += _results(problem, num_groups, is_merged=size > 1, backward=bool(backward))
        if backward:
            # What kernels find is kept beside their workspace, and then beside its sum.
            work = max(_workspace(problem, tile, num_groups) for tile in tiles)
            held += keys + max(work, sums + lowered)
        passes.append(Cost(time, held))
    return Estimate(*passes)


def estimate_ring(
    problem: Problem, groups: tuple[int, int], chip: Chip, links: Links, *, stride: int = 1
) -> Estimate:
    """Estimate: keys of one rank at a time, the next one's on their way; arguments as above."""
    passes = []
    tiles = ring_tiles(problem)
    for backward, num_groups in enumerate(groups):
        computed = compute_times(tiles, problem, num_groups, chip, backward=bool(backward))
        travels = problem.cp_size > 1
        keys = problem.key_bytes(problem.local_len) / num_groups if travels else 0.0
        sums = problem.key_bytes(problem.local_len, _SUM_BYTES) / num_groups if travels else 0.0
        fetch = links.message(keys * problem.reach, problem.cp_size, stride)
        give = links.message(keys * problem.reach, problem.cp_size, stride) if backward else 0.0
        time = 0.0
        for stage, compute in enumerate(computed):
            traffic = (fetch if stage < len(computed) - 1 else 0.0) + (give if stage > 1 else 0.0)
            time += links.together(compute, traffic)
        speed = chip.backward if backward else chip.forward
        time = num_groups * max(time, len(tiles) * speed.host_us / 1e6)
        # The last gradients: the own tokens of the last of several groups are computed meanwhile.
        time += give if num_groups == 1 else max(0.0, give - computed[0])
        # Gradients travel in the precision of the keys, and are summed by their owner.
        held = 2 * keys + _results(problem, num_groups, is_merged=travels, backward=bool(backward))
        if backward:
            work = max(_workspace(problem, tile, num_groups) for tile in tiles)
            held += sums + 3 * keys + work
        passes.append(Cost(time, held))
    return Estimate(*passes)


def _results(problem: Problem, num_groups: int, *, is_merged: bool, backward: bool) -> float:
    """Return the bytes of results and of parts of them, which all ways have alike."""
    queries, shard = problem.query_bytes, problem.key_bytes(problem.local_len)
    parts = queries / num_groups * (2 if is_merged else 1)
    # Backward keeps the output, too.
    return 2 * queries + shard + parts if backward else queries + parts


def _workspace(problem: Problem, tile: Tile, num_groups: int) -> float:
    """Return the bytes that backward of a call takes for itself.

    The gradient of its queries in float32; and, where several query heads share a key head, those
    of its keys for each query head, before they are added up.
    """
    sharing = problem.num_heads / problem.num_kv_heads
    queries = problem.query_bytes * tile.queries / problem.local_len * _SUM_BYTES / problem.itemsize
    keys = problem.key_bytes(tile.keys) * sharing if sharing > 1 else 0.0
    return (queries + keys) / num_groups


def estimate(
    algorithm: TravelName,
    problem: Problem,
    *,
    groups: tuple[int, int] = (1, 1),
    chip: Chip = H200,
    links: Links = FREE,
) -> Estimate:
    """Estimate one attention call, forward and backward.

    With ``problem.ulysses_size`` neighbours swap tokens for heads first, and keys travel by the
    algorithm between neighbourhoods. All ranks being neighbours is Ulysses alone.

    Args:
        algorithm: how keys travel.
        problem: what is computed.
        groups: groups of heads, forward and backward.
        chip: the GPU.
        links: between ranks.

    Example:
        >>> problem = Problem(32768, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> ring, gather = (estimate(name, problem).time for name in ("ring", "gather"))
        >>> f"{1e3 * ring:.1f} ms, {1e3 * gather:.1f} ms"
        '8.1 ms, 7.5 ms'
    """
    size = problem.ulysses_size
    inner = problem.swapped() if size > 1 else problem
    way = estimate_gather if algorithm == "gather" else estimate_ring
    found = way(inner, groups, chip, links, stride=size)
    if size == 1:
        return found
    # Queries, keys, values go to heads and the output comes back; in backward dout goes, and the
    # gradients of the three come back. Every number is copied before and after it travels.
    shard = problem.key_bytes(problem.local_len)
    swapped = 2 * problem.query_bytes + shard
    crossing = links.message(swapped * (size - 1) / size, size, 1)
    time = crossing + 4 * swapped / (chip.memory_gbs * 1e9)
    wires = swapped + problem.query_bytes
    return Estimate(*(Cost(cost.time + time, cost.memory + wires) for cost in found))


@dataclass(frozen=True, slots=True)
class Choice:
    """How keys travel.

    Args:
        algorithm: ``gather`` or ``ring``.
        num_groups_forward: groups of key/value heads in forward.
        num_groups_backward: likewise in backward.
        reason: in words.
        time: of both passes.
        fits: whether it stays within the budget.
    """

    algorithm: TravelName
    num_groups_forward: int
    num_groups_backward: int
    reason: str
    time: float = 0.0
    fits: bool = True


class _Way(NamedTuple):
    """One pass of one algorithm in so many groups."""

    num_groups: int
    cost: Cost


def memory_budget(
    problem: Problem,
    *,
    chip: Chip = H200,
    links: Links | None = None,
    algorithms: Sequence[TravelName] = ("gather", "ring"),
) -> float:
    """Return the bytes that attention may take beside what it is given, if nobody says.

    A few times what a layer holds for each of its activations, of which it has more; short rows
    may take what hardly counts on a GPU, for their kernels are slow in groups. It is doubled, up to
    what a chip can spare, only as far as that saves nearly a tenth of the time: over several nodes
    a ring has one network card, a gather those of all ranks.

    Args:
        problem: what is computed.
        chip: the GPU.
        links: between ranks.
        algorithms: those to choose among.

    Example:
        >>> problem = Problem(262144, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> memory_budget(problem) / problem.query_bytes
        6.0
    """
    budgets = [max(6 * problem.query_bytes, 800.0 * 2**20)]
    most = max(budgets[0], chip.spare_bytes)
    while budgets[-1] < most:
        budgets.append(min(2 * budgets[-1], most))
    each = [
        choose(problem, memory_budget=budget, chip=chip, links=links, algorithms=algorithms)
        for budget in budgets
    ]
    enough = (1 + _WORTH) * each[-1].time
    found = zip(budgets, each, strict=True)
    return next((budget for budget, one in found if one.fits and one.time <= enough), most)


@lru_cache(maxsize=256)
def choose(
    problem: Problem,
    *,
    memory_budget: float,
    chip: Chip = H200,
    links: Links | None = None,
    algorithms: Sequence[TravelName] = ("gather", "ring"),
) -> Choice:
    """Choose the fastest way that fits into memory; where none fits, the smallest.

    Forward and backward are split by themselves. Of algorithms whose times differ by less than the
    model is wrong, the one that is named first wins. FlexAttention has no ring.

    Args:
        problem: what is computed.
        memory_budget: bytes that attention may take beside what it is given.
        chip: the GPU.
        links: between ranks.
        algorithms: those to choose among.

    Example:
        >>> problem = Problem(32768, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> choice = choose(problem, memory_budget=4e9)
        >>> choice.algorithm, choice.num_groups_forward, choice.num_groups_backward
        ('gather', 1, 1)
    """
    links = Links() if links is None else links
    names = [name for name in algorithms if name == "gather" or problem.kind != "masked"]
    found: list[tuple[TravelName, _Way, _Way]] = []
    for name in names:
        each = _by_groups(name, problem, chip, links)
        forward = _best([_Way(n, both.forward) for n, both in each], memory_budget)
        backward = _best([_Way(n, both.backward) for n, both in each], memory_budget)
        found.append((name, forward, backward))
    best = min((_joined(way) for way in found), key=lambda cost: _rank(cost, memory_budget))
    name, forward, backward = way = next(
        way for way in found if _is_near(_joined(way), best, memory_budget)
    )
    reason, cost = _explain(found, name, memory_budget), _joined(way)
    groups = forward.num_groups, backward.num_groups
    return Choice(name, *groups, reason, cost.time, fits=cost.memory <= memory_budget)


@lru_cache(maxsize=128)
def _by_groups(
    name: TravelName, problem: Problem, chip: Chip, links: Links
) -> tuple[tuple[int, Estimate], ...]:
    """Estimate a way in every number of groups that the heads allow."""
    heads = problem.swapped().num_kv_heads
    counts = (n for n in range(1, heads + 1) if heads % n == 0)
    ways = ((n, estimate(name, problem, groups=(n, n), chip=chip, links=links)) for n in counts)
    return tuple(ways)


def _best(ways: list[_Way], budget: float) -> _Way:
    return min(ways, key=lambda way: _rank(way.cost, budget))


def _joined(way: tuple[TravelName, _Way, _Way]) -> Cost:
    _, forward, backward = way
    return Cost(
        forward.cost.time + backward.cost.time, max(forward.cost.memory, backward.cost.memory)
    )


def _rank(cost: Cost, budget: float) -> tuple[bool, float]:
    """Sort by time what fits, behind it by memory what does not."""
    fits = cost.memory <= budget
    return not fits, cost.time if fits else cost.memory


def _is_near(cost: Cost, best: Cost, budget: float) -> bool:
    """Say whether a cost is the best one, or takes as long as far as the model can tell."""
    fits = cost.memory <= budget and cost.time <= best.time * (1 + _TIE)
    return cost == best or (fits and best.memory <= budget)


def _explain(found: list[tuple[TravelName, _Way, _Way]], chosen: TravelName, budget: float) -> str:
    lines = []
    for way in sorted(found, key=lambda way: way[0] != chosen):
        name, forward, backward = way
        cost = _joined(way)
        fits = "" if cost.memory <= budget else f", over the budget of {budget / 2**30:.2f}"
        lines.append(
            f"{name} in {forward.num_groups} and {backward.num_groups} groups of heads: "
            f"{1e3 * cost.time:.1f} ms, {cost.memory / 2**30:.2f} GiB{fits}"
        )
    return "; ".join(lines)
