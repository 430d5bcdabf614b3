# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.balance`: how evenly layouts share the work of packed rows, in integers.

No GPU and no ranks: a layout and a mask say how many (query, key) pairs each rank computes, how
many ranges it holds, and how many keys travel.
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
class Rows:
    """Rows of documents whose lengths are spread evenly over the orders of magnitude."""

    seq_len: int
    cp_size: int
    shortest: int
    longest: int
    window: int | None
    num_samples: int

    def __str__(self) -> str:
        """Name them for the table."""
        documents = f"documents {self.shortest >> 10}k-{self.longest >> 10}k"
        if self.shortest >= self.seq_len:
            documents = "one document"
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.seq_len} over {self.cp_size}: {documents}{window}"

    def draw(self, seed: int) -> IntArray:
        """Draw the document ids of one row."""
        random, ids = np.random.default_rng(seed), np.empty(0, np.int64)
        while len(ids) < self.seq_len:
            size = int(np.exp(random.uniform(np.log(self.shortest), np.log(self.longest + 1))))
            ids = np.append(ids, np.full(size, len(ids)))
        return ids[None, : self.seq_len]

    def bounds(self, documents: IntArray) -> Bounds:
        """Work the mask out."""
        return Mask(causal=True, window=self.window).bounds(self.seq_len, documents=documents)

    def lay_out(self, name: str, bounds: Bounds) -> Layout:
        """Lay the row out."""
        return build_layout(name, seq_len=self.seq_len, cp_size=self.cp_size, bounds=lambda: bounds)


CASES = (
    Rows(1 << 17, 8, 1 << 10, 1 << 14, None, 10),
    Rows(1 << 17, 8, 1 << 14, 1 << 16, None, 10),
    Rows(1 << 17, 8, 1 << 10, 1 << 14, 4096, 10),
    Rows(1 << 17, 8, 1 << 14, 1 << 16, 4096, 10),
    Rows(1 << 17, 8, 1 << 17, 1 << 17, None, 1),
    Rows(1 << 17, 8, 1 << 17, 1 << 17, 16384, 1),
    Rows(1 << 20, 64, 1 << 10, 1 << 14, None, 3),
    Rows(1 << 20, 64, 1 << 14, 1 << 18, None, 3),
)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the least CPU time of a call in milliseconds, and what it returned."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        found = call()
        times.append(1e3 * (time.process_time() - start))
    return min(times), found


def num_travelling(layout: Layout, bounds: Bounds) -> float:
    """Return how often a token's keys are sent to another rank, on average."""
    sent = 0
    for rank in range(layout.cp_size):
        plan = build_plan("ring", layout=layout, bounds=bounds, rank=rank, num_kv_heads=1)
        sent += sum(stage.num_tokens_sent for stage in plan.stages)
    return sent / layout.seq_len


def compare(rows: Rows) -> list[str]:
    """Return a line of the table for each layout."""
    worst: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in LAYOUTS}
    for seed in range(rows.num_samples):
        bounds = rows.bounds(rows.draw(seed))
        for name in LAYOUTS:
            layout = rows.lay_out(name, bounds)
            work = layout.work(bounds)
            worst[name].append(max(work) * len(work) / sum(work))
            found[name].append((sum(map(len, layout.owned)), num_travelling(layout, bounds)))
    return [
        f"| {rows} | {name} | {mean(worst[name]):.3f} | {max(worst[name]):.3f} | "
        f"{mean(n for n, _ in found[name]):.1f} | {mean(sent for _, sent in found[name]):.2f} |"
        for name in LAYOUTS
    ]


def spent(rows: Rows) -> str:
    """Return what it costs to lay one row out, and to plan one call."""
    documents = rows.draw(0)
    reading, bounds = timed(lambda: rows.bounds(documents))
    balancing, layout = timed(lambda: rows.lay_out("balanced", bounds))
    plan = partial(build_plan, layout=layout, bounds=bounds, rank=0, num_kv_heads=8)
    plans = [timed(partial(plan, name))[0] for name in ("gather", "ring")]
    return f"| {rows} | {reading:.1f} | {balancing:.1f} | {plans[0]:.1f} | {plans[1]:.1f} |"


def main() -> None:
    """Print two tables."""
    print(f"numpy {np.__version__}, Python {platform.python_version()}, {platform.machine()}.\n")
    print("| rows | layout | work, max / mean | worst row | ranges | sent per token |")
    print("|---|---|---|---|---|---|")
    for rows in CASES:
        print("\n".join(compare(rows)), flush=True)
    print(f"\nMilliseconds of one core, the least of {REPEATS}:\n")
    print("| rows | bounds of the mask | balanced layout | plan, gather | plan, ring |")
    print("|---|---|---|---|---|")
    for rows in (CASES[0], CASES[1], CASES[-2], CASES[-1]):
        print(spent(rows), flush=True)


if __name__ == "__main__":
    main()
