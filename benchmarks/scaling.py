# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.scaling [--measured FILE ...]`: how cost grows with tokens and ranks.

Plots the cost model (`lightning_cp.attn.cost`, docs/cost-model.md) from 8k to 1M tokens and from
1 to 64 ranks, together with measurements of `attention_gpu`, from its JSON lines.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cp.attn.cost import (
    CallSize,
    Estimate,
    ExchangeChoice,
    ExchangeName,
    choose_exchange,
    default_memory_budget,
    estimate,
)
from lightning_cp.attn.hardware import FREE, H200, Links

RESULTS = Path(__file__).parent / "results"
LENGTHS = tuple(1 << n for n in range(13, 21))
SIZES = tuple(1 << n for n in range(7))


def llama(seq_len: int, cp_size: int) -> CallSize:
    """Return the problem of causal attention in an 8B Llama."""
    return CallSize(seq_len, cp_size, num_heads=32, num_kv_heads=8, head_dim=128)


def chosen(
    problem: CallSize, links: Links, algorithms: tuple[ExchangeName, ...] = ("gather", "ring")
) -> tuple[ExchangeChoice, Estimate]:
    """Return the choice of the model, and its estimated cost."""
    budget = default_memory_budget(problem, links=links, algorithms=algorithms)
    choice = choose_exchange(problem, memory_budget=budget, links=links, algorithms=algorithms)
    groups = (choice.num_groups_forward, choice.num_groups_backward)
    return choice, estimate(choice.algorithm, problem, groups=groups, links=links)


def share(problem: CallSize, time: float) -> float:
    """Return the share of the ideal: the full sequence on one rank / ranks / time."""
    full = estimate("gather", llama(problem.seq_len, 1)).time
    return full / problem.cp_size / time


@dataclass(frozen=True)
class Point:
    """A measured time."""

    seq_len: int
    cp_size: int
    algorithm: str
    ms: float
    full_ms: float

    @property
    def share(self) -> float:
        """Return the share of the ideal."""
        return self.full_ms / self.cp_size / self.ms


def read_lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the measurements of our attention by `attention_gpu`, in the order of the files."""
    for path in paths:
        for line in path.read_text().splitlines():
            one: dict[str, Any] = json.loads(line)
            if one.get("what") == "attention":
                yield one


def read_points(paths: Iterable[Path], *, linked: bool) -> list[Point]:
    """Read causal cases from JSON lines of `attention_gpu`; the last line of a case counts.

    Full sequences become points of one rank. Cases with a memory budget are omitted.

    Args:
        paths: the files.
        linked: whether links took time.
    """
    points: dict[object, Point] = {}
    for one in read_lines(paths):
        name = str(one["case"])
        if name.startswith(("causal-", "gather-", "ring-")) and one.get("memory") is None:
            spent = one["linked_ms"] if linked else one["ms"]
            algorithm = str(one["how"]).split(",")[0]
            seq_len, cp_size, full = one["seq_len"], one["cp_size"], one["whole_ms"]
            points[name, cp_size] = Point(seq_len, cp_size, algorithm, spent, full)
            points["full", seq_len] = Point(seq_len, 1, "gather", full, full)
    return list(points.values())


class Compared(NamedTuple):
    """A measured case and its estimate by the model, in milliseconds.

    Args:
        case: its name.
        how: its algorithm and head groups.
        kernels: estimated GPU time, with launches queued ahead and links that take no time.
        kernels_measured: the same, measured.
        linked: estimated time with links and host.
        linked_measured: the same, measured.
    """

    case: str
    how: str
    kernels: float
    kernels_measured: float
    linked: float
    linked_measured: float

    @property
    def line(self) -> str:
        """Return a line of the table."""
        parts = [f"| {self.case} | {self.how} "]
        for estimated, measured in (
            (self.kernels, self.kernels_measured),
            (self.linked, self.linked_measured),
        ):
            parts.append(f"| {estimated:.2f} | {measured:.2f} | {estimated / measured - 1:+.0%} ")
        return "".join(parts) + "|"


def compare(paths: Iterable[Path]) -> list[Compared]:
    """Compare causal cases of `attention_gpu` with the model; the last line of a case counts."""
    forward, backward = (replace(x, host_us=0.0) for x in (H200.forward, H200.backward))
    ahead = replace(H200, forward=forward, backward=backward)
    compared: dict[str, Compared] = {}
    for one in read_lines(paths):
        groups = re.search(r"groups (\d+) / (\d+)", one["how"])
        if groups is None:
            continue
        alone = "ulysses" in one["how"] and " x " not in one["how"]
        size = one["cp_size"] if alone else one["ulysses_size"]
        problem = replace(llama(one["seq_len"], one["cp_size"]), ulysses_size=size)
        links = Links(inside_gbs=one["link_gbs"], ranks_per_node=one["cp_size"])
        name: ExchangeName = "ring" if "ring" in one["how"] else "gather"
        counts = (int(groups[1]), int(groups[2]))
        kernels = estimate(name, problem, groups=counts, chip=ahead)
        linked = estimate(name, problem, groups=counts, links=links)
        compared[one["case"]] = Compared(
            one["case"],
            one["how"].rpartition(",")[0],
            1e3 * kernels.time,
            one["ahead_ms"],
            1e3 * linked.time,
            one["linked_ms"],
        )
    return list(compared.values())


def table(links: Links) -> list[str]:
    """Return the model's estimates as lines of a table."""
    lines = ["| tokens | ranks | chosen | ms | share of the ideal | extra memory, GiB |"]
    lines.append("|---|---|---|---|---|---|")
    for seq_len in LENGTHS[::2] + LENGTHS[-1:]:
        for cp_size in (1, 8, 64):
            problem = llama(seq_len, cp_size)
            choice, cost = chosen(problem, links)
            groups = f"{choice.num_groups_forward} / {choice.num_groups_backward}"
            lines.append(
                f"| {seq_len >> 10}k | {cp_size} | {choice.algorithm}, groups {groups} "
                f"| {1e3 * cost.time:.2f} | {share(problem, cost.time):.2f} "
                f"| {cost.memory / 2**30:.2f} |"
            )
    return lines


def draw(points: Sequence[Point], links: Links, path: Path) -> None:
    """Plot time and share of the ideal against tokens, and memory against ranks."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(
            "benchmarks.scaling plots with matplotlib: pip install matplotlib, or "
            "pass --no-plot to print the table only."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    for cp_size in SIZES:
        problems = [llama(seq_len, cp_size) for seq_len in LENGTHS]
        costs = [chosen(problem, links)[1] for problem in problems]
        (line,) = left.plot(LENGTHS, [1e3 * c.time for c in costs], label=f"{cp_size} ranks")
        if cp_size > 1:
            shares = [share(p, c.time) for p, c in zip(problems, costs, strict=True)]
            middle.plot(LENGTHS, shares, color=line.get_color())
        for point in points:
            if point.cp_size == cp_size:
                mark = "s" if point.algorithm == "ring" else "o"
                look = {"color": line.get_color(), "markeredgecolor": "black", "zorder": 3}
                left.plot(point.seq_len, point.ms, mark, **look)
                middle.plot(point.seq_len, point.share, mark, **look)
    for seq_len in (1 << 15, 1 << 17, 1 << 20):
        for algorithm, style in (("gather", "-"), ("ring", "--")):
            sizes = SIZES[1:]
            costs = [
                estimate(algorithm, llama(seq_len, n), groups=(2, 2), links=links)  # type: ignore[arg-type]
                for n in sizes
            ]
            color = f"C{(1 << 15, 1 << 17, 1 << 20).index(seq_len)}"
            label = f"{seq_len >> 10}k, {algorithm}, 2 groups"
            right.plot(sizes, [c.memory / 2**30 for c in costs], style, color=color, label=label)
    left.set(xlabel="tokens", ylabel="ms, forward + backward", title="time of one rank's attention")
    middle.set(xlabel="tokens", ylabel="(full sequence / ranks) / time", title="share of the ideal")
    right.set(xlabel="ranks", ylabel="GiB in addition to q, k, v", title="extra memory")
    for axis, scale in ((left, "log"), (middle, "linear"), (right, "log")):
        axis.set_xscale("log", base=2)
        axis.set_yscale(scale)
        axis.grid(alpha=0.3)
    for axis in (left, middle):
        axis.set_xticks(LENGTHS, [f"{n >> 10}k" for n in LENGTHS])
    middle.set_ylim(0, 1.25)
    middle.axhline(1.0, color="gray", linewidth=0.8)
    left.legend()
    right.legend(fontsize="small")
    note = "; dots (gather) and squares (ring): measured" if points else ""
    figure.suptitle(f"Causal, 32 query and 8 key heads of 128, bf16, H200: the cost model{note}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and save the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--measured", nargs="*", type=Path, default=sorted(RESULTS.glob("attention_gpu*.jsonl"))
    )
    parser.add_argument("--picture", type=Path, default=RESULTS / "scaling_h200.png")
    parser.add_argument("--free-links", action="store_true", help="links that take no time")
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args(arguments)
    links = FREE if args.free_links else Links()
    print(f"{H200}\n{links}")
    print("memory: 6 x the queries of a rank, at least 800 MiB; more if that saves 8%\n")
    print("\n".join(table(links)))
    if compared := compare(args.measured):
        print("\n| case | how | GPU, model | measured | error | linked, model | measured | error |")
        print("|---" * 8 + "|")
        print("\n".join(one.line for one in compared))
    if not args.no_plot:
        points = read_points(args.measured, linked=not args.free_links)
        draw(points, links, args.picture)
        print(f"\n{args.picture}")


if __name__ == "__main__":
    main()
