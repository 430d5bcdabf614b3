# SPDX-License-Identifier: Apache-2.0
"""`make bench`: attention on 2 CPU ranks compared with the ideal, half the time of one process.

One thread per rank. The ideal is plain SDPA on the full sequence in one process, divided by the
number of ranks, timed in the same run while the other rank is idle. No other library runs context
parallelism on a CPU, so the table has none.
"""

import platform
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import scaled_dot_product_attention

from lightning_cp import ContextParallel, Mask, attention
from lightning_cp.data.shard import shard

RANKS, REPEATS = 2, 7
HEADS, KV_HEADS, DIM = 8, 2, 64
LENGTHS = (1024, 4096)


def timed(call: Callable[[], Any]) -> float:
    """Return the median time of a call in milliseconds, after two warm-up calls."""
    times = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[2:])


def draw(length: int) -> list[Tensor]:
    """Draw queries, keys and values of full sequences, the same on each rank."""
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def full(length: int) -> float:
    """Return the time of plain SDPA on full sequences, forward and backward."""
    q, k, v = (x.requires_grad_() for x in draw(length))

    def call() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(torch.ones_like(out))

    return timed(call)


def sharded(length: int, mask: Mask, **options: Any) -> float:
    """Return the time of the slower rank's shard, forward and backward."""
    cp = ContextParallel(dist.group.WORLD, **options)
    batch = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
    with cp.step(batch):
        bound = cp.mask(causal=mask.causal, window=mask.window)
        layout = bound.step.layout  # type: ignore[union-attr]
    q, k, v = (shard(x, 2, layout=layout, rank=cp.cp_rank).requires_grad_() for x in draw(length))

    def call() -> None:
        out = attention(q, k, v, mask=bound)
        out.backward(torch.ones_like(out))
        dist.barrier()

    return timed(call)


def run_rank(rank: int, rendezvous: str) -> None:
    """Run all cases as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    lines = []
    for length in LENGTHS:
        alone = full(length) if rank == 0 else 0.0
        dist.barrier()
        lines.append(f"| {length} | causal | one process, plain SDPA | {alone:.1f} | |")
        ideal = alone / RANKS
        for algorithm in ("gather", "ring"):
            for layout in ("zigzag", "contiguous"):
                spent = sharded(length, Mask(causal=True), algorithm=algorithm, layout=layout)
                lines.append(
                    f"| {length} | causal | {RANKS} ranks, {algorithm}, {layout} | {spent:.1f} "
                    f"| {ideal / spent:.2f} |"
                )
        spent = sharded(length, Mask(causal=True, window=256), algorithm="ring")
        lines.append(f"| {length} | window 256 | {RANKS} ranks, ring, zigzag | {spent:.1f} | |")
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


def main() -> None:
    """Print a table."""
    print(
        f"torch {torch.__version__}, {platform.machine()}, {RANKS} ranks of one thread each; ",
        end="",
    )
    print(
        f"{HEADS} query and {KV_HEADS} key heads of {DIM}, float32, forward + backward, medians.\n"
    )
    print("| tokens | mask | how | ms | share of the ideal |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"file://{folder}/rendezvous",)
        start_processes(run_rank, arguments, nprocs=RANKS)


if __name__ == "__main__":
    main()
