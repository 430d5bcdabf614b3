# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.cluster_plan`: steps on 8 to 1,024 GPUs, on the mesh that is fastest.

Computed by the planner (`lightning_cp.planner`, docs/planning.md) on every mesh (copies, shards,
context, tensor) that fits, not measured: prints a table of seconds per step and of waiting for
other ranks, and draws it. `--model` and `--length` compare the meshes of your own run.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cp.attn.hardware import Links
from lightning_cp.planner.format_plan import format_tokens, parse_tokens
from lightning_cp.planner.memory import MemoryPlan, plan_memory
from lightning_cp.planner.plan_run import Capacity
from lightning_cp.planner.setup import GPUS_PER_HOST, Setup
from lightning_cp.planner.shapes import KNOWN, ModelShape
from lightning_cp.planner.time import TENSOR, TimePlan, plan_time
from recipes.plan_command import read_model

RESULTS = Path(__file__).parent / "results"
SIZES = tuple(1 << n for n in range(3, 11))
TOKENS = 1 << 22
"""Of a step: all meshes train the same way, so that seconds can be compared."""
NODES = Capacity.of_gb(141.0, 2000.0)
COLORS = {"keys and values": "#0072b2", "parameters": "#e69f00", TENSOR: "#d55e00"}


class Workload(NamedTuple):
    """A model, a length, and the sequences of a step over all ranks."""

    model: ModelShape
    seq_len: int
    num_sequences: int

    @property
    def label(self) -> str:
        """Return its name."""
        return f"{self.model.name}, {format_tokens(self.seq_len)} tokens"


WORKLOADS = tuple(
    Workload(KNOWN[name], seq_len, TOKENS // seq_len)
    for name, seq_len in (("llama-8b", 1 << 17), ("llama-8b", 1 << 20), ("llama-70b", 1 << 19))
)


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A run on one mesh.

    Args:
        setup: the run.
        num_batches: batches of a data rank in a step, one sequence each; their gradients are
            accumulated.
        memory: of a rank.
        time: of one batch and an update.
    """

    setup: Setup
    num_batches: int
    memory: MemoryPlan
    time: TimePlan

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the axes (replicate, shard, context, tensor).

        Parameters are sharded over shard x context, after tensor ranks have divided them.
        """
        setup = self.setup
        shard = setup.num_shards // setup.context_size
        return setup.num_copies, shard, setup.context_size, setup.tp_size

    @property
    def seconds(self) -> float:
        """Return the seconds of a step: all its batches, and one update."""
        update = self.time.seconds["optimizer"]
        return self.num_batches * (self.time.step - update) + update

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens of all ranks per second."""
        return self.setup.seq_len * self.setup.data_size * self.num_batches / self.seconds

    @property
    def exposed(self) -> Mapping[str, float]:
        """Return the seconds of a step in which a rank waits for others, by purpose."""
        return {name: self.num_batches * value for name, value in self.time.exposed.items()}


def plan_meshes(
    workload: Workload, num_gpus: int, *, links: Links, checkpointing: str
) -> list[MeshPlan]:
    """Return the runs on all meshes that fit, the fastest first."""
    model, plans = workload.model, []
    base = Setup(
        workload.seq_len,
        num_gpus,
        cp_size=1,
        precision="bf16-policy",
        checkpointing=checkpointing,  # type: ignore[arg-type]
    )
    for setup in _setups(model, base, workload.num_sequences):
        memory = plan_memory(model, setup, links=links)
        if NODES.fits(memory):
            num_batches = workload.num_sequences // setup.data_size
            time = plan_time(model, setup, links=links)
            plans.append(MeshPlan(setup, num_batches, memory, time))
    return sorted(plans, key=lambda plan: -plan.tokens_per_second)


def _setups(model: ModelShape, base: Setup, num_sequences: int) -> Iterator[Setup]:
    """Yield the run on every mesh; tensor ranks and Ulysses groups are inside a node."""
    for tensor in _divisors(GPUS_PER_HOST):
        if base.num_gpus % tensor or not model.has_parts(tensor):
            continue
        ranks = base.num_gpus // tensor
        for context in _divisors(ranks):
            data = ranks // context
            if context > base.seq_len or num_sequences % data:
                continue
            for copies, inside in product(_divisors(data), _ulysses_sizes(model, context, tensor)):
                yield replace(
                    base,
                    cp_size=context,
                    ulysses_size=inside,
                    tp_size=tensor,
                    sharding="full" if copies == 1 else "hybrid",
                    shard_size=0 if copies == 1 else ranks // copies,
                )


def _ulysses_sizes(model: ModelShape, context: int, tensor: int) -> list[int]:
    """Return 1, and the ranks of a node that share a sequence, if heads divide over them."""
    inside = min(context, GPUS_PER_HOST // tensor)
    heads = [layer.num_kv_heads // tensor for layer in model.layers]
    can_swap = inside > 1 and context % inside == 0 and not any(n % inside for n in heads)
    return [1, inside] if can_swap else [1]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


class Row(NamedTuple):
    """The fastest mesh of a number of GPUs, and the fastest with tensor ranks, if any fits."""

    workload: Workload
    best: MeshPlan
    tensor: MeshPlan | None


def search(workload: Workload, num_gpus: int, links: Links) -> Row | None:
    """Return the fastest meshes; None if nothing fits, also without kept attention."""
    for checkpointing in ("keep", "full"):
        plans = plan_meshes(workload, num_gpus, links=links, checkpointing=checkpointing)
        if plans:
            tensor = next((plan for plan in plans if plan.setup.tp_size > 1), None)
            return Row(workload, plans[0], tensor)
    return None


def mesh_name(plan: MeshPlan) -> str:
    """Return the axes of a mesh, and the Ulysses group if there is one."""
    inside = plan.setup.ulysses_size
    return " x ".join(map(str, plan.sizes)) + (f", Ulysses {inside}" if inside > 1 else "")


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table."""
    lines = [
        "| run | GPUs | copies x shards x context x tensor | attention | GB of a GPU | s per step "
        "| tokens/s | waiting: keys | parameters | all | fastest with tensor ranks, s |",
        "|---" * 11 + "|",
    ]
    for workload, best, tensor in rows:
        waits = [f"{part / best.seconds:.1%}" for part in best.exposed.values()]
        other = f"{mesh_name(tensor)}: {tensor.seconds:.2f}" if tensor else "none fits"
        lines.append(
            f"| {workload.label} | {best.setup.num_gpus} | {mesh_name(best)} "
            f"| {best.setup.checkpointing} | {best.memory.peak / 1e9:.0f} | {best.seconds:.2f} "
            f"| {best.tokens_per_second:,.0f} | {waits[0]} | {waits[1]} "
            f"| {sum(best.exposed.values()) / best.seconds:.1%} | {other} |"
        )
    return lines


def _draw_waits(axis: Any, rows: Sequence[Row]) -> None:
    """Draw the share of a step that is waiting: the fastest mesh, and beside it one with tensor."""
    for place, (_, best, tensor) in enumerate(rows):
        for plan, shift in ((best, -0.2), (tensor, 0.2)):
            if plan is None:
                continue
            bottom = 0.0
            for part, color in zip(plan.exposed.values(), COLORS.values(), strict=True):
                share = 100 * part / plan.seconds
                axis.bar(place + shift, share, width=0.36, bottom=bottom, color=color)
                bottom += share
    names = ["\n".join(map(str, (row.best.setup.num_gpus, *row.best.sizes))) for row in rows]
    axis.set_xticks(range(len(rows)), names)
    axis.set_xlabel("GPUs, copies, shards, context, tensor of the fastest mesh")
    axis.set_ylabel("% of a step waiting; right bar: with tensor ranks")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw seconds per step, and the share of it that is waiting for other ranks."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "benchmarks.cluster_plan draws with matplotlib: pip install matplotlib, "
            "or pass --no-plot to print the table only."
        ) from error
    workloads = list(dict.fromkeys(row.workload for row in rows))
    figure = Figure(figsize=(6 * len(workloads), 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(workloads), squeeze=False).T
    for (above, below), workload in zip(axes, workloads, strict=True):
        chosen = [row for row in rows if row.workload == workload]
        plans = [row.best for row in chosen]
        sizes = [plan.setup.num_gpus for plan in plans]
        above.loglog(sizes, [plan.seconds for plan in plans], "o-", color="black", base=2)
        ideal = [plans[0].seconds * sizes[0] / size for size in sizes]
        above.loglog(sizes, ideal, "--", color="gray", base=2)
        for size, plan in zip(sizes, plans, strict=True):
            told = f" {plan.seconds:,.0f} s" if plan.seconds >= 10 else f" {plan.seconds:.1f} s"
            above.text(size, plan.seconds, told, va="bottom")
        above.set(title=workload.label, ylabel="seconds per step; dashed: ideal", yticks=[])
        above.set_xticks(sizes, [str(size) for size in sizes])
        above.margins(x=0.1)
        _draw_waits(below, chosen)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        "COMPUTED by lightning_cp.planner, not measured: H200, 8 per node, all weights, "
        "steps on the fastest mesh"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", metavar="PATH", help=f"a config, or one of {', '.join(KNOWN)}")
    parser.add_argument("--length", default="128k", help="of a sequence of --model (128k)")
    parser.add_argument("--sequences", type=int, help="of a step of --model (those of 4M tokens)")
    parser.add_argument("--gpus", nargs="*", type=int, default=SIZES)
    parser.add_argument("--between", type=float, default=45.0, help="GB/s of a card (45)")
    parser.add_argument("--hop", type=float, default=0.0, help="us per rank of a collective (0)")
    parser.add_argument("--picture", type=Path, help="with --model: ./cluster_plan.png")
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args(arguments)
    links = Links(between_gbs=args.between, hop_us=args.hop)
    print(f"computed, not measured: all weights, bf16-policy, {links}\n")
    workloads = WORKLOADS
    if args.model:
        length = parse_tokens(args.length)
        number = args.sequences or max(1, TOKENS // length)
        workloads = (Workload(read_model(args.model), length, number),)
    found = [search(workload, size, links) for workload in workloads for size in args.gpus]
    rows = [row for row in found if row is not None]
    print("\n".join(table(rows)))
    if rows and not args.no_plot:
        picture = args.picture or (Path() if args.model else RESULTS) / "cluster_plan.png"
        draw(rows, picture)
        print(f"\n{picture}")


if __name__ == "__main__":
    main()
