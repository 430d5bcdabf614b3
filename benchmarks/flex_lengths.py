# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.flex_lengths [--only NAME ...]`: what FlexAttention compiles for lengths.

Attention of one rank of 8 on one GPU (`emulate.py`), forward and backward of a few layers, over
batches of random lengths from 1k to 128k tokens, log-uniform: seconds of compiling, the last batch
that compiled, and the time per token beside fixed lengths. From batch 50 on, each random length is
followed by the nearest multiple of 1,024 with documents of the same fractions, twice; the second
time counts, when nothing about it is new. Then the first batches run again in a new process, which
finds torch's cache directories.
"""

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import calculate_time_spent, counters

from benchmarks.emulate import emulated_parallel
from benchmarks.measure import Records, describe, synchronize
from lightning_cp import Mask, attention

SEED = 41
WARM_UP = 50
"""Batches after which nothing is compiled, and from which on times are compared."""

KINDS = ("packed", "windowed")


@dataclass(frozen=True)
class Sizes:
    """Shapes of attention, and lengths of the sequences.

    Args:
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: of queries, keys and values.
        layers: calls of a batch.
        dtype: of the tensors.
        shortest: tokens of the shortest sequence.
        longest: tokens of the longest one.
        step: fixed lengths are its multiples.
        window: keys that a token sees in the windowed case.
        cp_size: ranks, of which one is emulated.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 4
    dtype: torch.dtype = torch.bfloat16
    shortest: int = 1024
    longest: int = 131072
    step: int = 1024
    window: int = 4096
    cp_size: int = 8


@dataclass(frozen=True)
class Batch:
    """One timed batch: tokens of the sequence, seconds, those of compiling, and new graphs."""

    seq_len: int
    seconds: float
    compile_seconds: float
    num_graphs: int


def draw_lengths(sizes: Sizes, num_batches: int) -> list[int]:
    """Return log-uniform lengths."""
    rng = random.Random(SEED)
    ends = math.log(sizes.shortest), math.log(sizes.longest)
    return [round(math.exp(rng.uniform(*ends))) for _ in range(num_batches)]


def draw_documents(seed: int, seq_len: int) -> Tensor:
    """Return document ids [1, S]; documents of a seed take the same fractions of any length."""
    rng, at, starts = random.Random(seed), 0.0, torch.zeros(seq_len, dtype=torch.long)
    while at < 1:
        starts[min(seq_len - 1, int(at * seq_len))] = 1
        at += rng.uniform(0.02, 0.4)
    return starts.cumsum(0)[None]


class Attention:
    """Forward and backward of a batch on an emulated rank."""

    def __init__(self, kind: str, sizes: Sizes, device: torch.device, **options: Any) -> None:
        self._kind, self._sizes, self._device = kind, sizes, device
        self._parallel = emulated_parallel(sizes.cp_size // 2, sizes.cp_size, **options)
        self._mask = Mask(causal=True, window=sizes.window if kind == "windowed" else None)

    def run(self, seq_len: int, seed: int) -> Batch:
        """Time a batch; documents follow from the seed."""
        sizes, device = self._sizes, self._device
        batch = {"inputs_embeds": torch.zeros(1, seq_len, 1, device=device)}
        if self._kind == "packed":
            batch["document_ids"] = draw_documents(seed, seq_len).to(device)
        synchronize(device)
        before, begun = spent(), time.perf_counter()
        with self._parallel.step(batch) as local:
            local_len = local["inputs_embeds"].shape[1]
            # Tokens before heads, as models have them.
            q, k, v = (
                torch.randn(
                    (1, local_len, heads, sizes.head_dim), device=device, dtype=sizes.dtype
                ).requires_grad_()
                for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
            )
            out = q.transpose(1, 2)
            for _ in range(sizes.layers):
                out = attention(out, k.transpose(1, 2), v.transpose(1, 2), mask=self._mask)
            out.backward(torch.ones_like(out))
        synchronize(device)
        seconds = time.perf_counter() - begun
        compiling, graphs = (now - then for now, then in zip(spent(), before, strict=True))
        return Batch(seq_len, seconds, compiling, int(graphs))


def spent() -> tuple[float, float]:
    """Return the seconds that torch has compiled in this process, and its graphs."""
    return calculate_time_spent()["total_wall_time"], counters["stats"]["unique_graphs"]


@dataclass(frozen=True)
class Summary:
    """What random lengths took.

    Args:
        compile_seconds: in torch's compiler.
        excess_seconds: of the batches that compiled: their time beyond that of others of about
            their length.
        num_graphs: compiled forward graphs.
        last_compiled: index of the last batch that compiled; -1 if none did.
        us_per_token: after the warm-up, of random lengths.
        ratio: of that to the time per token of the fixed lengths beside them.
    """

    compile_seconds: float
    excess_seconds: float
    num_graphs: int
    last_compiled: int
    us_per_token: float
    ratio: float


def summarize(drawn: Sequence[Batch], fixed: Sequence[Batch]) -> Summary:
    """Sum up batches; ``fixed`` are those beside the last of ``drawn``."""
    compiled = [at for at, batch in enumerate(drawn) if batch.compile_seconds > 0]
    quick = [batch for batch in drawn if batch.compile_seconds == 0]
    excess = 0.0
    for at in compiled:
        near = [b.seconds for b in quick if 0.7 < b.seq_len / drawn[at].seq_len < 1.4]
        excess += drawn[at].seconds - (median(near) if near else 0.0)
    timed = drawn[len(drawn) - len(fixed) :]

    def per_token(batches: Sequence[Batch]) -> float:
        return sum(b.seconds for b in batches) / max(1, sum(b.seq_len for b in batches))

    return Summary(
        compile_seconds=sum(batch.compile_seconds for batch in drawn),
        excess_seconds=excess,
        num_graphs=sum(batch.num_graphs for batch in drawn),
        last_compiled=compiled[-1] if compiled else -1,
        us_per_token=1e6 * per_token(timed),
        ratio=per_token(timed) / per_token(fixed) if fixed else math.nan,
    )


HEADER = (
    "| rows | process | batches | compiling, s | excess of these batches, s | graphs "
    "| last batch that compiled | us per token | beside fixed lengths |\n" + "|---" * 9 + "|"
)


def run_one(
    kind: str,
    process: str,
    sizes: Sizes,
    device: torch.device,
    records: Records,
    lengths: list[int],
) -> None:
    """Run the batches of one kind, and print a line."""
    work = Attention(kind, sizes, device)
    drawn, fixed = [], []
    for seed, seq_len in enumerate(lengths):
        drawn.append(work.run(seq_len, seed))
        if seed >= WARM_UP:
            nearest = max(1, round(seq_len / sizes.step)) * sizes.step
            fixed.append([work.run(nearest, seed) for _ in range(2)][-1])
    found = summarize(drawn, fixed)
    print(
        f"| {kind} | {process} | {len(drawn)} | {found.compile_seconds:.1f} "
        f"| {found.excess_seconds:.1f} | {found.num_graphs} | {found.last_compiled} "
        f"| {found.us_per_token:.3f} | {found.ratio:.3f} |",
        flush=True,
    )
    batches = [(b.seq_len, round(1e3 * b.seconds, 2), round(b.compile_seconds, 2)) for b in drawn]
    beside = [(b.seq_len, round(1e3 * b.seconds, 2)) for b in fixed]
    records.add(
        what="flex_lengths",
        rows=kind,
        process=process,
        layers=sizes.layers,
        batches=batches,
        beside=beside,
        **asdict(found),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS, metavar="NAME")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--process", choices=("first", "second"), help="of both by default")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="few tokens, on a CPU")
    args = parser.parse_args(arguments)
    if args.process is None:
        given = sys.argv[1:] if arguments is None else arguments
        with tempfile.TemporaryDirectory() as folder:  # nothing was compiled before
            names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
            env = os.environ | {name: f"{folder}/{name}" for name in names}
            for process in ("first", "second"):
                command = [sys.executable, "-m", "benchmarks.flex_lengths", "--process", process]
                subprocess.run([*command, *given], check=True, env=env)
        return
    sizes, device = Sizes(layers=args.layers), torch.device("cpu")
    if args.tiny:
        torch.set_num_threads(1)
        sizes = Sizes(4, 2, 16, 2, torch.float32, 64, 256, 32, 64, 2)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    lengths = draw_lengths(sizes, args.batches)
    where = describe(device)
    records = Records(args.out, "flex_lengths", where)
    if args.process == "second":
        lengths = lengths[:WARM_UP]
    else:
        print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
        print(f"{sizes}; seed {SEED}.\n\n{HEADER}", flush=True)
    for kind in args.only:
        run_one(kind, args.process, sizes, device, records, lengths)


if __name__ == "__main__":
    main()
