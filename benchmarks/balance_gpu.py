# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.balance_gpu`: time of each rank's attention on packed sequences, by layout.

One GPU emulates one rank after the other: its queries with the keys that it needs, forward and
backward, by FlexAttention. No bytes are sent. The ideal is the full sequence with the same kernel,
divided by the number of ranks.
"""

import platform
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from benchmarks.balance import CASES, PackedSequences
from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.flex.from_mask import build_flex_call
from lightning_cp.attn.flex.kernel import FlexFunctions, attend_compiled
from lightning_cp.attn.plan import QueryShard
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.geometry.layout import build_layout

HEADS, KEY_HEADS, DIM = 32, 8, 128
REPEATS = 7


def timed(call: Callable[[], object]) -> float:
    """Return the median time of a call in milliseconds."""
    for _ in range(2):
        call()
    times: list[float] = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


def draw(heads: int, length: int) -> Tensor:
    """Return a random tensor that requires a gradient."""
    x = torch.randn(1, heads, length, DIM, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_()


def both_passes(q: Tensor, k: Tensor, v: Tensor, functions: FlexFunctions) -> float:
    """Time attention, forward and backward."""
    dout = torch.randn_like(q)

    def call() -> None:
        out = attend_compiled(q, k, v, functions, scale=None, aux=AuxRequest()).out
        torch.autograd.grad(out, (q, k, v), dout)

    return timed(call)


def compare(sequences: PackedSequences, seed: int) -> list[str]:
    """Return one line of the table per layout."""
    bounds = sequences.bounds(sequences.draw(seed))

    def time_of(place: QueryShard) -> float:
        q = draw(HEADS, place.layout.local_len)
        call = build_flex_call(
            bounds,
            Scores(1.0),
            place,
            LoneTransport(),
            batch=q.shape[0],
            device=q.device,
            num_kv_heads=KEY_HEADS,
            plain=False,
        )
        k, v = (draw(KEY_HEADS, call.keys.buffer_len) for _ in range(2))
        return both_passes(q, k, v, call.functions)

    full = time_of(QueryShard(build_layout("contiguous", seq_len=sequences.seq_len, cp_size=1), 0))
    lines = []
    for name in ("zigzag", "balanced"):
        layout = sequences.layout(name, bounds)
        times = [time_of(QueryShard(layout, rank)) for rank in range(sequences.cp_size)]
        work, ideal = layout.work(bounds), full / sequences.cp_size
        uneven = max(work) * len(work) / sum(work)
        lines.append(
            f"| {sequences} | {name} | {full:.1f} | {ideal:.2f} | {min(times):.2f} | "
            f"{max(times):.2f} | {ideal / max(times):.2f} | {uneven:.3f} |"
        )
    return lines


def main() -> None:
    """Print the table."""
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; bf16, {HEADS} query and {KEY_HEADS} key heads of {DIM}, ms, "
        f"median of {REPEATS}\n"
    )
    print(
        "| sequences | layout | full | full / ranks | fastest rank | slowest rank "
        "| share of the ideal | visible pairs, max / mean |\n|---|---|---|---|---|---|---|---|"
    )
    for sequences in CASES[:4]:
        for line in compare(sequences, seed=0):
            print(line, flush=True)


if __name__ == "__main__":
    main()
