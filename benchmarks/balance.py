# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.balance`: how evenly layouts distribute packed sequences.

Without GPU and ranks: layout and mask give the (query, key) pairs that each rank computes, the
ranges that it holds, and the keys that are sent.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TypeVar

import numpy as np

from lightning_cp.attn.plan import build_plan
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import IntArray

T = TypeVar("T")
LAYOUTS = ("contiguous", "zigzag", "balanced")
REPEATS = 5


@dataclass(frozen=True)
class PackedSequences:
    """Packed sequences of documents whose lengths are log-uniformly distributed."""

    seq_len: int
    cp_size: int
    shortest: int
    longest: int
    window: int | None
    num_sequences: int

    def __str__(self) -> str:
        """Return the name in the table."""
        documents = f"documents {self.shortest >> 10}k-{self.longest >> 10}k"
        if self.shortest >= self.seq_len:
            documents = "one document"
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.seq_len} over {self.cp_size}: {documents}{window}"

    def draw(self, seed: int) -> IntArray:
        """Draw the document ids of one sequence."""
        random, ids = np.random.default_rng(seed), np.empty(0, np.int64)
        while len(ids) < self.seq_len:
            size = int(np.exp(random.uniform(np.log(self.shortest), np.log(self.longest + 1))))
            ids = np.append(ids, np.full(size, len(ids)))
        return ids[None, : self.seq_len]

    def bounds(self, documents: IntArray) -> Bounds:
        """Return the bounds of the mask."""
        return Mask(causal=True, window=self.window).bounds(self.seq_len, documents=documents)

    def layout(self, name: str, bounds: Bounds) -> Layout:
        """Build a layout."""
        return build_layout(name, seq_len=self.seq_len, cp_size=self.cp_size, bounds=lambda: bounds)


CASES = (
    PackedSequences(1 << 17, 8, 1 << 10, 1 << 14, None, 10),
    PackedSequences(1 << 17, 8, 1 << 14, 1 << 16, None, 10),
    PackedSequences(1 << 17, 8, 1 << 10, 1 << 14, 4096, 10),
    PackedSequences(1 << 17, 8, 1 << 14, 1 << 16, 4096, 10),
    PackedSequences(1 << 17, 8, 1 << 17, 1 << 17, None, 1),
    PackedSequences(1 << 17, 8, 1 << 17, 1 << 17, 16384, 1),
    PackedSequences(1 << 20, 64, 1 << 10, 1 << 14, None, 3),
    PackedSequences(1 << 20, 64, 1 << 14, 1 << 18, None, 3),
)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the minimal CPU time of a call in milliseconds, and its result."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        result = call()
        times.append(1e3 * (time.process_time() - start))
    return min(times), result


def sent_per_token(layout: Layout, bounds: Bounds) -> float:
    """Return how often a token's keys are sent to another rank, on average."""
    sent = 0
    for rank in range(layout.cp_size):
        plan = build_plan("ring", layout=layout, bounds=bounds, rank=rank, num_kv_heads=1)
        sent += sum(stage.num_tokens_sent for stage in plan.stages)
    return sent / layout.seq_len


def compare(sequences: PackedSequences) -> list[str]:
    """Return one line of the table per layout."""
    worst: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    sizes: dict[str, list[tuple[int, float]]] = {name: [] for name in LAYOUTS}
    for seed in range(sequences.num_sequences):
        bounds = sequences.bounds(sequences.draw(seed))
        for name in LAYOUTS:
            layout = sequences.layout(name, bounds)
            work = layout.work(bounds)
            worst[name].append(max(work) * len(work) / sum(work))
            sizes[name].append((sum(map(len, layout.owned)), sent_per_token(layout, bounds)))
    return [
        f"| {sequences} | {name} | {mean(worst[name]):.3f} | {max(worst[name]):.3f} | "
        f"{mean(n for n, _ in sizes[name]):.1f} | {mean(sent for _, sent in sizes[name]):.2f} |"
        for name in LAYOUTS
    ]


def spent(sequences: PackedSequences) -> str:
    """Return the time to build a layout for one sequence, and to plan one call."""
    documents = sequences.draw(0)
    bounds_ms, bounds = timed(lambda: sequences.bounds(documents))
    layout_ms, layout = timed(lambda: sequences.layout("balanced", bounds))
    plan = partial(build_plan, layout=layout, bounds=bounds, rank=0, num_kv_heads=8)
    plans = [timed(partial(plan, name))[0] for name in ("gather", "ring")]
    return f"| {sequences} | {bounds_ms:.1f} | {layout_ms:.1f} | {plans[0]:.1f} | {plans[1]:.1f} |"


def main() -> None:
    """Print two tables."""
    print(f"numpy {np.__version__}, Python {platform.python_version()}, {platform.machine()}.\n")
    print("| sequences | layout | pairs, max / mean | worst sequence | ranges | sent per token |")
    print("|---|---|---|---|---|---|")
    for sequences in CASES:
        print("\n".join(compare(sequences)), flush=True)
    print(f"\nMilliseconds of one core, minimum of {REPEATS}:\n")
    print("| sequences | bounds of the mask | balanced layout | plan, gather | plan, ring |")
    print("|---|---|---|---|---|")
    for sequences in (CASES[0], CASES[1], CASES[-2], CASES[-1]):
        print(spent(sequences), flush=True)


if __name__ == "__main__":
    main()
