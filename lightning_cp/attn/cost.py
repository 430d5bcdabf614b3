# SPDX-License-Identifier: Apache-2.0
"""Cost model of one attention call: time and memory of each algorithm and number of head groups.

Pure arithmetic on global shapes, the same on every rank: it queries no device and needs no
communication (docs/cost-model.md says how well it predicts). `choose_exchange` takes the fastest
candidate that fits into memory. Bytes and seconds, unless a name says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from lightning_cp.attn.hardware import FREE, H200, Chip, Links

ExchangeName = Literal["gather", "ring"]
Kind = Literal["causal", "full"]

# Sums over blocks are in float32.
_SUM_BYTES = 4
# Bytes that a merge of two parts reads and writes per number: the sum twice, the part once.
_MERGE_BYTES = 10
# The model is right within a few percent: a later candidate must be faster by more than this.
_TIE = 0.05
# More memory than the smallest budget is used if less would be slower by this share: a tenth, less
# the error of the model.
_MIN_GAIN = 0.08


@dataclass(frozen=True)
class CallSize:
    """One attention call, as all ranks see it.

    Args:
        seq_len: tokens of a sequence.
        cp_size: ranks that share it.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: of queries and keys.
        value_dim: of values; ``head_dim`` when 0.
        itemsize: bytes of a number.
        batch_size: samples.
        kind: of the mask.
        ulysses_size: ranks of a Ulysses group.
        wire_itemsize: bytes of a gradient in a reduce-scatter.

    Example:
        >>> CallSize(seq_len=32768, cp_size=8, num_heads=32, num_kv_heads=8, head_dim=128).local_len
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
        """Return the bytes of the keys and values of ``num_tokens`` tokens, all heads."""
        numbers = self.batch_size * num_tokens * self.num_kv_heads * 2 * self.mean_dim
        return numbers * (self.itemsize if itemsize is None else itemsize)

    def between_groups(self) -> "CallSize":
        """Return the problem between Ulysses groups, after tokens are exchanged for heads."""
        size = self.ulysses_size
        return replace(
            self,
            cp_size=self.cp_size // size,
            num_heads=-(-self.num_heads // size),
            num_kv_heads=-(-self.num_kv_heads // size),
            ulysses_size=1,
        )


class TileShape(NamedTuple):
    """One kernel call: numbers of queries and keys, and the mask between them."""

    queries: float
    keys: float
    kind: Kind


class Cost(NamedTuple):
    """Time of a pass, and its peak memory beyond its inputs."""

    time: float
    memory: float


class Estimate(NamedTuple):
    """Both passes of one candidate."""

    forward: Cost
    backward: Cost

    @property
    def time(self) -> float:
        """Return the time of both."""
        return self.forward.time + self.backward.time

    @property
    def memory(self) -> float:
        """Return the peak memory of both."""
        return max(self.forward.memory, self.backward.memory)


def kernel_time(
    problem: CallSize, tile: TileShape, num_heads: float, chip: Chip, *, backward: bool
) -> float:
    """Return the time of one kernel call.

    A fixed part, and operations at the chip's rate as far as its cores are busy: a call has a block
    of threads for each tile of queries (forward) or keys (backward) and each head, and cores that
    get one block less than others wait.

    Example:
        >>> problem = CallSize(32768, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> tile = TileShape(4096, 2048, "full")
        >>> f"{1e3 * kernel_time(problem, tile, 32, H200, backward=False):.2f} ms"
        '0.24 ms'
    """
    speed = chip.backward if backward else chip.forward
    pairs = tile.queries * tile.keys
    rate = speed.full_tflops
    if tile.kind == "causal":
        pairs = pairs / 2 + speed.diagonal * tile.queries
        rate = speed.causal_tflops
    flops = speed.flops * pairs * num_heads * problem.mean_dim * problem.batch_size
    num_tokens = tile.keys if backward else tile.queries
    blocks = max(1.0, problem.batch_size * num_heads * -(-num_tokens // chip.tile))
    busy = blocks / (-(-blocks // chip.num_cores) * chip.num_cores)
    return speed.fixed_us / 1e6 + flops / (rate * 1e12 * busy)


def gather_tiles(problem: CallSize) -> tuple[TileShape, ...]:
    """Return the kernel calls of one head group: those of a rank in the middle, with zigzag."""
    local_len, cp_size = problem.local_len, problem.cp_size
    if problem.kind == "full":
        return (TileShape(local_len, problem.seq_len, "full"),)
    if cp_size == 1:
        return (TileShape(local_len, local_len, "causal"),)
    chunk, rank = local_len / 2, cp_size // 2
    before = (rank * chunk, (2 * cp_size - 1 - rank) * chunk)
    return tuple(
        tile
        for keys in before
        for tile in (TileShape(chunk, keys, "full"), TileShape(chunk, chunk, "causal"))
    )


def ring_tiles(problem: CallSize) -> tuple[TileShape, ...]:
    """Return the kernel call of each stage: local keys, then those of every other rank."""
    length, others = problem.local_len, problem.cp_size - 1
    if problem.kind == "full":
        return (TileShape(length, length, "full"),) * (others + 1)
    earlier = (TileShape(length, length / 2, "full"),) * (problem.cp_size // 2)
    later = (TileShape(length / 2, length, "full"),) * (others - problem.cp_size // 2)
    return (TileShape(length, length, "causal"), *earlier, *later)


def compute_times(
    tiles: Sequence[TileShape], problem: CallSize, num_groups: int, chip: Chip, *, backward: bool
) -> list[float]:
    """Return the time of each kernel call of one head group, with its share of the merges."""
    heads = problem.num_heads / num_groups
    times = [kernel_time(problem, tile, heads, chip, backward=backward) for tile in tiles]
    if len(tiles) == 1:
        return times
    # The first part of a query is used as it is, each further one is merged.
    num_merged = max(0.0, sum(tile.queries for tile in tiles) - problem.local_len)
    merged = num_merged * heads * problem.mean_dim * problem.batch_size * _MERGE_BYTES
    merge = merged / (chip.memory_gbs * 1e9) / len(tiles)
    return [time + merge for time in times]


def estimate_gather(
    problem: CallSize, groups: tuple[int, int], chip: Chip, links: Links, *, stride: int = 1
) -> Estimate:
    """Estimate a gather: all keys of a head group at once, while the next group is sent.

    Args:
        problem: the call.
        groups: head groups, forward and backward.
        chip: the GPU.
        links: between ranks.
        stride: difference in rank between neighbours of the group.
    """
    passes = []
    size = problem.cp_size
    for backward, num_groups in enumerate(groups):
        tiles = gather_tiles(problem)
        computed = compute_times(tiles, problem, num_groups, chip, backward=bool(backward))
        keys = problem.key_bytes(problem.seq_len) / num_groups if size > 1 else 0.0
        sums = problem.key_bytes(problem.seq_len, _SUM_BYTES) / num_groups if size > 1 else 0.0
        wire = sums * problem.wire_itemsize / _SUM_BYTES
        lowered = wire if problem.wire_itemsize < _SUM_BYTES else 0.0
        fetch = links.collective(keys * (size - 1) / size, size, stride)
        scatter = links.collective(wire * (size - 1) / size, size, stride) if backward else 0.0
        # Keys are used as they arrive; their gradients are written once more, to be sent, and read
        # and written again to lower their precision.
        copied = keys + sums if backward else 0.0
        copied += sums + wire if backward and lowered else 0.0
        compute = sum(computed) + copied / (chip.memory_gbs * 1e9)
        # Local tokens are computed while the first keys arrive, in backward while the last
        # gradients are sent.
        local = sum(
            time for time, tile in zip(computed, tiles, strict=True) if tile.kind == "causal"
        )
        local = min(local, compute) if size > 1 else 0.0
        exposed = fetch + max(0.0, scatter - local) if backward else max(0.0, fetch - local)
        time = exposed
        for group in range(num_groups):
            traffic = (fetch if group < num_groups - 1 else 0.0) + (scatter if group else 0.0)
            time += links.together(compute, traffic)
        speed = chip.backward if backward else chip.forward
        time = max(time, num_groups * len(tiles) * speed.host_us / 1e6)
        # Also the local share of the gather, for this group and the next.
        memory = keys * (2 if num_groups > 1 else 1) * (1 + 1 / size)
        memory += _results(problem, num_groups, is_merged=size > 1, backward=bool(backward))
        if backward:
            # Gradients of kernels are in memory together with their workspace, then with their sum.
            workspace = max(_workspace(problem, tile, num_groups) for tile in tiles)
            memory += keys + max(workspace, sums + lowered)
        passes.append(Cost(time, memory))
    return Estimate(*passes)


def estimate_ring(
    problem: CallSize, groups: tuple[int, int], chip: Chip, links: Links, *, stride: int = 1
) -> Estimate:
    """Estimate a ring: keys of one rank at a time, while the next are sent; arguments as above."""
    passes = []
    tiles = ring_tiles(problem)
    for backward, num_groups in enumerate(groups):
        computed = compute_times(tiles, problem, num_groups, chip, backward=bool(backward))
        is_sharded = problem.cp_size > 1
        keys = problem.key_bytes(problem.local_len) / num_groups if is_sharded else 0.0
        sums = 0.0
        if is_sharded:
            sums = problem.key_bytes(problem.local_len, _SUM_BYTES) / num_groups
        fetch = links.message(keys, problem.cp_size, stride)
        scatter = fetch if backward else 0.0
        time = 0.0
        for stage, compute in enumerate(computed):
            traffic = (fetch if stage < len(computed) - 1 else 0.0) + (
                scatter if stage > 1 else 0.0
            )
            time += links.together(compute, traffic)
        speed = chip.backward if backward else chip.forward
        time = num_groups * max(time, len(tiles) * speed.host_us / 1e6)
        # The last gradients: meanwhile, local tokens of the last of several groups are computed.
        time += scatter if num_groups == 1 else max(0.0, scatter - computed[0])
        # Gradients are sent in the precision of the keys, and summed by their owner.
        memory = 2 * keys
        memory += _results(problem, num_groups, is_merged=is_sharded, backward=bool(backward))
        if backward:
            workspace = max(_workspace(problem, tile, num_groups) for tile in tiles)
            memory += sums + 3 * keys + workspace
        passes.append(Cost(time, memory))
    return Estimate(*passes)


def _results(problem: CallSize, num_groups: int, *, is_merged: bool, backward: bool) -> float:
    """Return the bytes of results and of partial results, equal for all algorithms."""
    queries, shard = problem.query_bytes, problem.key_bytes(problem.local_len)
    parts = queries / num_groups * (2 if is_merged else 1)
    # Backward needs the output, too.
    return 2 * queries + shard + parts if backward else queries + parts


def _workspace(problem: CallSize, tile: TileShape, num_groups: int) -> float:
    """Return the bytes that a kernel allocates in backward.

    The gradient of its queries in float32; and, if several query heads share a key head, those of
    its keys for each query head, before they are added up.
    """
    gqa_ratio = problem.num_heads / problem.num_kv_heads
    queries = problem.query_bytes * tile.queries / problem.local_len * _SUM_BYTES / problem.itemsize
    keys = problem.key_bytes(tile.keys) * gqa_ratio if gqa_ratio > 1 else 0.0
    return (queries + keys) / num_groups


def estimate(
    algorithm: ExchangeName,
    problem: CallSize,
    *,
    groups: tuple[int, int] = (1, 1),
    chip: Chip = H200,
    links: Links = FREE,
) -> Estimate:
    """Estimate one attention call, forward and backward.

    With ``problem.ulysses_size`` > 1, Ulysses groups exchange tokens for heads first, and keys are
    exchanged between groups. A single group of all ranks is Ulysses alone.

    Args:
        algorithm: how keys are exchanged.
        problem: the call.
        groups: head groups, forward and backward.
        chip: the GPU.
        links: between ranks.

    Example:
        >>> problem = CallSize(32768, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> ring, gather = (estimate(name, problem).time for name in ("ring", "gather"))
        >>> f"{1e3 * ring:.1f} ms, {1e3 * gather:.1f} ms"
        '8.1 ms, 7.5 ms'
    """
    size = problem.ulysses_size
    inner = problem.between_groups() if size > 1 else problem
    estimator = estimate_gather if algorithm == "gather" else estimate_ring
    passes = estimator(inner, groups, chip, links, stride=size)
    if size == 1:
        return passes
    # Queries, keys and values are sent and the output returns; in backward dout is sent, and the
    # gradients of the three return. Every number is copied before and after it is sent.
    exchanged = 2 * problem.query_bytes + problem.key_bytes(problem.local_len)
    exchange = links.message(exchanged * (size - 1) / size, size, 1)
    time = exchange + 4 * exchanged / (chip.memory_gbs * 1e9)
    buffers = exchanged + problem.query_bytes
    return Estimate(*(Cost(cost.time + time, cost.memory + buffers) for cost in passes))


@dataclass(frozen=True, slots=True)
class ExchangeChoice:
    """How keys are exchanged.

    Args:
        algorithm: ``gather`` or ``ring``.
        num_groups_forward: head groups in forward.
        num_groups_backward: head groups in backward.
        time: of both passes.
        fits: whether it stays within the budget.
    """

    algorithm: ExchangeName
    num_groups_forward: int
    num_groups_backward: int
    time: float = 0.0
    fits: bool = True


def default_memory_budget(
    problem: CallSize,
    *,
    links: Links | None = None,
    algorithms: Sequence[ExchangeName] = ("gather", "ring"),
) -> float:
    """Return the memory budget in bytes when the user sets none.

    Six times the bytes of the queries (a layer has more activations of that size) and at least 800
    MiB: kernels of short sequences are slow in head groups. It is doubled, up to 4 GiB, only if
    that saves nearly a tenth of the time: over several nodes a ring uses one network card, a gather
    those of all ranks.

    Args:
        problem: the call.
        links: between ranks.
        algorithms: those to choose among.

    Example:
        >>> problem = CallSize(262144, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> default_memory_budget(problem) / problem.query_bytes
        6.0
    """
    budgets = [max(6 * problem.query_bytes, 800.0 * 2**20)]
    largest = max(budgets[0], H200.spare_bytes)
    while budgets[-1] < largest:
        budgets.append(min(2 * budgets[-1], largest))
    choices = [
        choose_exchange(problem, memory_budget=budget, links=links, algorithms=algorithms)
        for budget in budgets
    ]
    max_time = (1 + _MIN_GAIN) * choices[-1].time
    for budget, choice in zip(budgets, choices, strict=True):
        if choice.fits and choice.time <= max_time:
            return budget
    return largest


@lru_cache(maxsize=256)
def choose_exchange(
    problem: CallSize,
    *,
    memory_budget: float,
    links: Links | None = None,
    algorithms: Sequence[ExchangeName] = ("gather", "ring"),
) -> ExchangeChoice:
    """Choose the fastest candidate that fits into memory; if none fits, the smallest.

    Forward and backward have separate numbers of head groups. Of algorithms whose times differ by
    less than the error of the model, the first in ``algorithms`` wins.

    Args:
        problem: the call.
        memory_budget: bytes that the call may allocate beyond its inputs and its output.
        links: between ranks.
        algorithms: those to choose among.

    Example:
        >>> problem = CallSize(32768, 8, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> choice = choose_exchange(problem, memory_budget=4e9)
        >>> choice.algorithm, choice.num_groups_forward, choice.num_groups_backward
        ('gather', 1, 1)
    """
    links = Links() if links is None else links
    candidates = []
    for name in algorithms:
        estimates = _by_groups(name, problem, links)
        num_forward, forward = _best([(n, x.forward) for n, x in estimates], memory_budget)
        num_backward, backward = _best([(n, x.backward) for n, x in estimates], memory_budget)
        cost = Cost(forward.time + backward.time, max(forward.memory, backward.memory))
        fits = cost.memory <= memory_budget
        candidates.append((cost, ExchangeChoice(name, num_forward, num_backward, cost.time, fits)))
    best = min((cost for cost, _ in candidates), key=lambda cost: _rank(cost, memory_budget))
    return next(choice for cost, choice in candidates if _is_near(cost, best, memory_budget))


@lru_cache(maxsize=128)
def _by_groups(
    name: ExchangeName, problem: CallSize, links: Links
) -> tuple[tuple[int, Estimate], ...]:
    """Estimate an algorithm with every number of head groups that the heads allow."""
    heads = problem.between_groups().num_kv_heads
    counts = [n for n in range(1, heads + 1) if heads % n == 0]
    return tuple((n, estimate(name, problem, groups=(n, n), links=links)) for n in counts)


def _best(costs: list[tuple[int, Cost]], budget: float) -> tuple[int, Cost]:
    return min(costs, key=lambda each: _rank(each[1], budget))


def _rank(cost: Cost, budget: float) -> tuple[bool, float]:
    """Sort what fits by time, then what does not by memory."""
    fits = cost.memory <= budget
    return not fits, cost.time if fits else cost.memory


def _is_near(cost: Cost, best: Cost, budget: float) -> bool:
    """Return whether a cost is the best one, or equally fast within the error of the model."""
    fits = cost.memory <= budget and cost.time <= best.time * (1 + _TIE)
    return cost == best or (fits and best.memory <= budget)
