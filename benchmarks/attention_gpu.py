# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.attention_gpu [--only NAME ... | --scaling]`: ranks on one GPU.

One GPU emulates ranks of N, one after the other, in real steps (`emulate.py`): forward and backward
of `attention()`, compared with the full sequence on its best kernel divided by N, and with torch's
own context_parallel. Links take no time, except in the column with their exposed share.
"""

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.balance import CASES as PACKED
from benchmarks.balance import PackedSequences
from benchmarks.emulate import emulated_parallel
from benchmarks.measure import (
    Records,
    ahead_time,
    describe,
    host_time,
    peak_memory,
    prime_memory,
    timed,
)
from benchmarks.scaling import chosen, llama
from lightning_cp import Attention, ContextParallel, Mask, attention
from lightning_cp.attn.api import calls_of
from lightning_cp.attn.blockwise.function import BlockwiseCall
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel
from lightning_cp.attn.choose import name_algorithm
from lightning_cp.attn.cost import ExchangeName
from lightning_cp.attn.hardware import Links
from lightning_cp.attn.ulysses import UlyssesCall
from lightning_cp.step.active_step import current
from lightning_cp.step.step import Step

cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
flash_forward = torch.ops.aten._flash_attention_forward.default
flash_backward = torch.ops.aten._flash_attention_backward.default


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        name: for ``--only``.
        seq_len: tokens of the sequence.
        cp_size: number of context ranks.
        algorithm: how keys reach the queries.
        ulysses_size: size of a Ulysses group.
        memory: memory budget of attention, as a multiple of a rank's queries; None for the default.
        window: of the mask.
        softcap: of the scores.
        sinks: whether each head has a sink.
        documents: how a packed sequence is drawn.
        full_kernels: kernels for the full sequence, of which the fastest counts; none if it takes
            too long.
        link_gbs: gigabytes per second that a rank receives, if not the machine's.
        has_peer: whether torch's own is timed, too.
    """

    name: str
    seq_len: int
    cp_size: int = 8
    algorithm: str = "auto"
    ulysses_size: int = 1
    memory: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    documents: PackedSequences | None = None
    full_kernels: tuple[str, ...] = ("cudnn",)
    link_gbs: float | None = None
    has_peer: bool = False

    @property
    def mask(self) -> Mask:
        """Return the mask, without documents."""
        return Mask(causal=True, window=self.window)

    @property
    def full_key(self) -> object:
        """Return a key of the case's full sequence."""
        return (
            self.seq_len,
            self.window,
            self.softcap,
            self.sinks,
            self.documents,
            self.full_kernels,
        )

    def ranks(self, *, quick: bool) -> Sequence[int]:
        """Return the emulated ranks: all of them if their visible pairs are irregular."""
        if quick:
            return (self.cp_size // 2,)
        if self.documents is not None:
            return range(self.cp_size)
        return sorted({0, self.cp_size // 2, self.cp_size - 1})

    def shrunk(self) -> "Case":
        """Return a small version, to test the script without a GPU."""
        window = None if self.window is None else 16
        documents = None
        if self.documents is not None:
            documents = replace(self.documents, seq_len=256, shortest=8, longest=64)
        full_kernels = ("here",) if self.full_kernels else ()
        return replace(
            self, seq_len=256, window=window, documents=documents, full_kernels=full_kernels
        )


CASES = (
    Case("causal-32k", 1 << 15, has_peer=True),
    Case("causal-128k", 1 << 17, has_peer=True),
    Case("ring-32k", 1 << 15, algorithm="ring"),
    Case("ring-32k-small", 1 << 15, algorithm="ring", memory=6),
    Case("ring-128k", 1 << 17, algorithm="ring"),
    Case("documents-1k-16k", 1 << 17, documents=PACKED[0], full_kernels=("flex",)),
    Case("documents-16k-64k", 1 << 17, documents=PACKED[1], full_kernels=("flex",)),
    Case("window-4096", 1 << 17, window=4096, full_kernels=("flash-window", "flex")),
    Case("sinks-window-128", 1 << 15, window=128, sinks=True, full_kernels=("flex",)),
    Case("softcap-50", 1 << 15, softcap=50.0, full_kernels=("flex",)),
    Case("ulysses-32k", 1 << 15, algorithm="ulysses"),
    Case("two-axes-32k", 1 << 15, ulysses_size=4),
    Case("causal-32000", 32_000),
    Case("causal-130000", 130_000),
)


# Tokens and ranks of causal sequences; a full one of 512k takes 15 s.
GRID = {
    1 << 13: (2, 8),
    1 << 15: (2, 4, 16),
    1 << 16: (8,),
    1 << 17: (2, 16, 64),
    1 << 18: (8, 64),
    1 << 19: (64,),
    1 << 20: (64,),
}
_LONGEST_FULL = 1 << 18
# Algorithms that the model estimates slower than the best by more than this are not measured.
_COMPARED = 1.4


def grid() -> tuple[Case, ...]:
    """Return cases that show how cost grows, with the links that the cost model assumes.

    Each with the algorithm of `auto`, and with the other one where that may be as fast.
    """
    cases, links = [], Links()
    gbs = {"gather": links.collective_gbs, "ring": links.message_gbs}
    for seq_len, sizes in GRID.items():
        for cp_size in sizes:
            problem, name = llama(seq_len, cp_size), f"{seq_len >> 10}k-of-{cp_size}"
            choice, cost = chosen(problem, links)
            full_kernels = ("cudnn",) if seq_len <= _LONGEST_FULL else ()
            case = Case(f"causal-{name}", seq_len, cp_size, full_kernels=full_kernels)
            cases.append(replace(case, link_gbs=gbs[choice.algorithm](cp_size)))
            other: ExchangeName = "gather" if choice.algorithm == "ring" else "ring"
            if chosen(problem, links, (other,))[1].time <= _COMPARED * cost.time:
                named = replace(case, name=f"{other}-{name}", algorithm=other)
                cases.append(replace(named, link_gbs=gbs[other](cp_size)))
    return tuple(cases)


@dataclass(frozen=True)
class Machine:
    """Device and shapes of a run."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    kernel: str = "auto"
    link_gbs: float = 400.0
    repeats: int = 15
    quick: bool = False


@dataclass(frozen=True)
class Measured:
    """Result of one rank: milliseconds, peak bytes, visible pairs and algorithm."""

    rank: int
    ms: float
    ahead_ms: float
    host_ms: float
    peak: int
    query_bytes: int
    result_bytes: int
    pairs: int
    how: str


@dataclass
class Inputs:
    """Tensors of one attention call, and the call."""

    machine: Machine
    case: Case
    length: int
    leaves: list[Tensor] = field(init=False)
    sinks: Tensor | None = field(init=False, default=None)
    dout: Tensor = field(init=False)

    def __post_init__(self) -> None:
        m = self.machine
        torch.manual_seed(0)
        self.leaves = [
            torch.randn(1, heads, self.length, m.dim, device=m.device, dtype=m.dtype)
            for heads in (m.heads, m.kv_heads, m.kv_heads)
        ]
        self.dout = torch.randn_like(self.leaves[0])
        if self.case.sinks:
            self.sinks = torch.randn(m.heads, device=m.device, dtype=m.dtype)
        for x in self.wanted:
            x.requires_grad_()

    @property
    def wanted(self) -> list[Tensor]:
        """Return the tensors that get a gradient."""
        return self.leaves if self.sinks is None else [*self.leaves, self.sinks]

    def forward(self) -> Tensor:
        """Compute attention in the active step."""
        q, k, v = self.leaves
        case = self.case
        return attention(q, k, v, mask=case.mask, softcap=case.softcap, sinks=self.sinks)

    def both(self) -> tuple[Tensor, ...]:
        """Compute forward and backward."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.wanted, self.dout)


@contextmanager
def stepped(cp: ContextParallel, case: Case, device: torch.device) -> Iterator[Step]:
    """Open a step for the case's sequence."""
    batch = {"input_ids": torch.zeros(1, case.seq_len, dtype=torch.long, device=device)}
    if case.documents is not None:
        batch["document_ids"] = torch.from_numpy(case.documents.draw(0)).to(device)
    with cp.step(batch):
        step = current()
        assert step is not None  # noqa: S101  opened above
        yield step


@contextmanager
def emulated_rank(
    case: Case, rank: int, machine: Machine, link_gbs: float | None = None
) -> Iterator[tuple[ContextParallel, Step, Inputs]]:
    """Open a step as one rank."""
    device = machine.device
    memory = None
    if case.memory is not None:
        size = case.seq_len // case.cp_size * machine.heads * machine.dim * machine.dtype.itemsize
        memory = case.memory * size / 2**30
    cp = emulated_parallel(
        rank,
        case.cp_size,
        ulysses_size=case.ulysses_size,
        link_gbs=link_gbs,
        fill=device.type != "cuda",
        algorithm=case.algorithm,  # type: ignore[arg-type]
        kernel=machine.kernel,  # type: ignore[arg-type]
        attention_memory=memory,
    )
    with stepped(cp, case, device) as step:
        yield cp, step, Inputs(machine, case, step.tensor_len)


def describe_call(step: Step) -> str:
    """Return the algorithm of the attention call of a step, with its numbers of head groups."""
    (built,) = calls_of(step)
    call = built.call if isinstance(built, UlyssesCall) else built
    if not isinstance(call, BlockwiseCall):
        return name_algorithm("gather", step.groups)
    passes = (call.plan.stages, call.plan.backward_stages)
    forward, backward = (len({stage.heads for stage in stages}) for stages in passes)
    return f"{name_algorithm(call.plan.algorithm, step.groups)}, groups {forward} / {backward}"


def measure_rank(case: Case, rank: int, machine: Machine) -> Measured:
    """Measure one rank; links take no time."""
    device = machine.device
    with emulated_rank(case, rank, machine) as (_, step, inputs):
        return Measured(
            rank=rank,
            ms=timed(inputs.both, device, repeats=machine.repeats),
            ahead_ms=ahead_time(inputs.both, device),
            host_ms=host_time(inputs.forward, device),
            peak=peak_memory(inputs.both, device),
            query_bytes=inputs.leaves[0].nbytes,
            result_bytes=inputs.dout.nbytes + sum(x.nbytes for x in inputs.wanted),
            pairs=step.work_by_rank()[rank],
            how=f"{describe_call(step)}, {step.layout.name}",
        )


def full_by_ours(case: Case, machine: Machine, kernel: str) -> float:
    """Return the time of the full sequence on one rank, with one of our kernels."""
    cp = ContextParallel(None, attention=Attention(kernel))  # type: ignore[arg-type]
    with stepped(cp, case, machine.device):
        inputs = Inputs(machine, case, case.seq_len)
        return timed(inputs.both, machine.device, repeats=machine.repeats)


def full_by_cudnn(case: Case, machine: Machine) -> float:
    """Return the time of the full causal sequence with cuDNN's ops."""
    inputs = Inputs(machine, case, case.seq_len)
    q, k, v = (x.detach() for x in inputs.leaves)
    scale = machine.dim**-0.5

    def call() -> object:
        out, lse, _, _, max_q, max_k, seed, offset, _ = cudnn_forward(
            q, k, v, None, True, 0.0, True, False, scale=scale
        )
        return cudnn_backward(
            inputs.dout,
            q,
            k,
            v,
            out,
            lse,
            seed,
            offset,
            None,
            None,
            None,
            max_q,
            max_k,
            0.0,
            True,
            scale=scale,
        )

    return timed(call, machine.device, repeats=machine.repeats)


def full_by_flash_window(case: Case, machine: Machine) -> float:
    """Return the time of the full sequence with a window, with FA2's ops."""
    inputs = Inputs(machine, case, case.seq_len)
    q, k, v = (x.detach().transpose(1, 2) for x in inputs.leaves)
    dout = inputs.dout.transpose(1, 2)
    assert case.window is not None  # noqa: S101  only cases with a window list this kernel
    lengths = (None, None, case.seq_len, case.seq_len, 0.0, False)
    options = {
        "scale": machine.dim**-0.5,
        "window_size_left": case.window - 1,
        "window_size_right": 0,
    }

    def call() -> object:
        out, lse, rng, unused, _ = flash_forward(q, k, v, *lengths, False, **options)
        return flash_backward(dout, q, k, v, out, lse, *lengths, rng, unused, **options)

    return timed(call, machine.device, repeats=machine.repeats)


FULL_KERNELS: dict[str, Callable[[Case, Machine], float]] = {
    "cudnn": full_by_cudnn,
    "flash-window": full_by_flash_window,
    "flex": lambda case, machine: full_by_ours(case, machine, "flex"),
    "here": lambda case, machine: full_by_ours(case, machine, "auto"),
}


def best_full(case: Case, machine: Machine) -> tuple[float, str]:
    """Return the minimal time of the full sequence, and its kernel."""
    times = []
    for name in case.full_kernels:
        try:
            times.append((FULL_KERNELS[name](case, machine), name))
        except Exception as error:  # noqa: BLE001  continue with the next kernel
            print(f"<!-- full sequence, {name}: {_short(error)} -->", flush=True)
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
    return min(times, default=(float("nan"), "none"))


def _short(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"


HEADER = (
    "| case | how | full, ms | ideal, ms | slowest rank, ms | share of the ideal "
    "| host ahead, ms | share | TFLOP/s | extra memory, x queries | without results "
    "| host, one forward, ms | exposed by links |\n" + "|---" * 13 + "|"
)


def run_case(
    case: Case, machine: Machine, full_times: dict[object, tuple[float, str]], records: Records
) -> None:
    """Measure a case and print its line."""
    prime_memory(machine.device, 2**33)
    if case.full_key not in full_times:
        full_times[case.full_key] = best_full(case, machine)
        prime_memory(machine.device, 2**33)
    full, kernel = full_times[case.full_key]
    ranks = [measure_rank(case, rank, machine) for rank in case.ranks(quick=machine.quick)]
    slowest = max(ranks, key=lambda one: one.ms)
    ahead = max(one.ahead_ms for one in ranks)
    largest = max(ranks, key=lambda one: one.peak)
    link_gbs = case.link_gbs or machine.link_gbs
    with emulated_rank(case, slowest.rank, machine, link_gbs) as (_, _, inputs):
        linked_ms = timed(inputs.both, machine.device, repeats=machine.repeats)
    ideal = full / case.cp_size
    tflops = 14 * slowest.pairs * machine.heads * machine.dim / slowest.ms / 1e9
    extra = largest.peak / largest.query_bytes
    without = extra - largest.result_bytes / largest.query_bytes
    exposed = max(0.0, (linked_ms - slowest.ms) / linked_ms)
    print(
        f"| {case.name} | {slowest.how} | {full:.2f} ({kernel}) | {ideal:.2f} | {slowest.ms:.2f} "
        f"(rank {slowest.rank}) | {ideal / slowest.ms:.2f} | {ahead:.2f} | {ideal / ahead:.2f} "
        f"| {tflops:.0f} | {extra:.1f} | {without:.1f} | {slowest.host_ms:.2f} | {exposed:.0%} |",
        flush=True,
    )
    records.add(
        what="attention",
        case=case.name,
        seq_len=case.seq_len,
        cp_size=case.cp_size,
        algorithm=case.algorithm,
        ulysses_size=case.ulysses_size,
        memory=case.memory,
        how=slowest.how,
        whole_ms=full,
        whole_kernel=kernel,
        ms=slowest.ms,
        share=ideal / slowest.ms,
        ahead_ms=ahead,
        ahead_share=ideal / ahead,
        tflops=tflops,
        extra=extra,
        without_results=without,
        host_ms=slowest.host_ms,
        link_gbs=link_gbs,
        linked_ms=linked_ms,
        exposed=exposed,
        ranks=[asdict(one) for one in ranks],
    )


def run_peer(case: Case, machine: Machine, full: float, records: Records) -> None:
    """Time torch's context_parallel in a separate process, and print its lines."""
    command = [sys.executable, "-m", "benchmarks.peer_torch", "--seq-len", str(case.seq_len)]
    command += ["--cp-size", str(case.cp_size), "--repeats", str(min(7, machine.repeats))]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
        lines, errors = ended.stdout, ended.stderr
    except subprocess.TimeoutExpired as error:
        lines, errors = _text(error.stdout), "timed out after 180 s"
    results = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    if not results:
        reason = errors.strip().splitlines()[-1:] or ["no output"]
        print(f"<!-- torch context_parallel: {reason[0][:300]} -->", flush=True)
    for one in results:
        how = f"torch context_parallel, {one['backend']}, {one['method']}"
        if one["error"]:
            print(f"| {case.name} | {how}: {one['error']} |||||||||||", flush=True)
            continue
        how += "" if one["gqa"] else ", key heads repeated"
        ideal = full / case.cp_size
        extra, without = one["extra"], one["extra"] - one["kept"]
        print(
            f"| {case.name} | {how} | | {ideal:.2f} | {one['ms']:.2f} | {ideal / one['ms']:.2f} "
            f"| | | | {extra:.1f} | {without:.1f} | {one['host_ms']:.2f} | |",
            flush=True,
        )
        records.add(
            what="peer",
            case=case.name,
            seq_len=case.seq_len,
            cp_size=case.cp_size,
            share=ideal / one["ms"],
            **one,
        )


def _text(output: str | bytes | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def run(cases: Sequence[Case], machine: Machine, out: Path | None, *, peers: bool = True) -> None:
    """Print the table, line by line."""
    where = describe(machine.device)
    records = Records(out, "attention_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
    print(
        f"{str(machine.dtype).removeprefix('torch.')}, {machine.heads} query and "
        f"{machine.kv_heads} key heads of {machine.dim}, batch 1, forward + backward, medians; "
        f"kernel={machine.kernel}; links of {machine.link_gbs:.0f} GB/s in the last column.\n"
    )
    print(HEADER, flush=True)
    full_times: dict[object, tuple[float, str]] = {}
    for case in cases:
        try:
            run_case(case, machine, full_times, records)
        except Exception as error:  # noqa: BLE001  continue with the next case
            print(f"| {case.name} | failed: {_short(error)} |||||||||||", flush=True)
            records.add(what="failure", case=case.name, error=_short(error))
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
        if peers and case.has_peer:
            run_peer(case, machine, full_times.get(case.full_key, (float("nan"), ""))[0], records)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = {case.name: case for case in (*CASES, *grid())}
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="one rank, few repeats, no peer")
    parser.add_argument(
        "--scaling", action="store_true", help="other lengths and ranks, with few repeats"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--kernel", default="auto", help="kernel of the ranks")
    parser.add_argument("--algorithm", default=None, help="algorithm of all cases")
    parser.add_argument("--link-gbs", type=float, default=400.0)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="short sequences, on a CPU")
    parser.add_argument("--verbose", action="store_true", help="log algorithms and kernels")
    args = parser.parse_args(arguments)
    if args.verbose:
        logging.basicConfig(level=logging.INFO)
    cases = [known[name] for name in args.only or ()] or list(grid() if args.scaling else CASES)
    args.quick |= args.scaling
    if args.algorithm is not None:
        cases = [replace(case, algorithm=args.algorithm) for case in cases]
    repeats = 3 if args.quick or args.tiny else 15
    common: dict[str, Any] = {
        "kernel": args.kernel,
        "link_gbs": args.link_gbs,
        "repeats": repeats,
        "quick": args.quick,
    }
    if args.tiny:
        torch.set_num_threads(1)
        small = Machine(torch.device("cpu"), torch.float32, 16, 8, 8, **common)
        run([case.shrunk() for case in cases], small, args.out, peers=False)
        return
    machine = Machine(torch.device("cuda", torch.cuda.current_device()), **common)
    # In training, shapes repeat with every layer and get cuDNN plans then; here at once.
    with patch.object(CudnnKernel, "grain", 1):
        run(cases, machine, args.out, peers=not (args.quick or args.no_peer))


if __name__ == "__main__":
    main()
