# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.cluster_plan`: steps on 8 to 1,024 GPUs, on the mesh that is fastest.

Computed by the planner (`lightning_cp.planner`, docs/planning.md), not measured: prints a table of
seconds per step and of waiting for other ranks, and draws it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cp.attn.hardware import Links
from lightning_cp.planner import MeshPlan, plan_meshes
from lightning_cp.planner.time import TENSOR

RESULTS = Path(__file__).parent / "results"
SIZES = tuple(1 << n for n in range(3, 11))
TOKENS = 1 << 22
"""Of a step: all meshes train the same way, so that seconds can be compared."""
COLORS = {"keys and values": "#0072b2", "parameters": "#e69f00", TENSOR: "#d55e00"}


class Workload(NamedTuple):
    """A model and a length."""

    model: str
    seq_len: int

    @property
    def label(self) -> str:
        """Return its name."""
        tokens = f"{self.seq_len >> 20}M" if self.seq_len >= 1 << 20 else f"{self.seq_len >> 10}k"
        return f"{self.model}, {tokens} tokens"


WORKLOADS = (
    Workload("llama-8b", 1 << 17),
    Workload("llama-8b", 1 << 20),
    Workload("llama-70b", 1 << 19),
)


class Row(NamedTuple):
    """The fastest mesh of a number of GPUs, and the fastest with tensor ranks, if any fits."""

    workload: Workload
    best: MeshPlan
    tensor: MeshPlan | None


def search(workload: Workload, num_gpus: int, links: Links) -> Row | None:
    """Return the fastest meshes; None if nothing fits, also without kept attention."""
    for checkpointing in ("keep", "full"):
        try:
            plans = plan_meshes(
                workload.model,
                seq_len=workload.seq_len,
                num_gpus=num_gpus,
                num_sequences=TOKENS // workload.seq_len,
                links=links,
                precision="bf16-policy",
                checkpointing=checkpointing,
            )
        except ValueError as error:
            if "No mesh" not in str(error):
                raise
            continue
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
            "benchmarks.cluster_plan draws with matplotlib: pip install 'lightning-cp[recipes]', "
            "or pass --no-plot to print the table only."
        ) from error
    figure = Figure(figsize=(18, 9), layout="constrained")
    FigureCanvasAgg(figure)
    for (above, below), workload in zip(
        figure.subplots(2, len(WORKLOADS)).T, WORKLOADS, strict=True
    ):
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
        "COMPUTED by lightning-cp plan, not measured: H200, 8 per node, 45 GB/s per card, all "
        f"weights, steps of {TOKENS >> 20}M tokens on the fastest mesh"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", nargs="*", type=int, default=SIZES)
    parser.add_argument("--between", type=float, default=45.0, help="GB/s of a card (45)")
    parser.add_argument("--hop", type=float, default=0.0, help="us per rank of a collective (0)")
    parser.add_argument("--picture", type=Path, default=RESULTS / "cluster_plan.png")
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args(arguments)
    links = Links(between_gbs=args.between, hop_us=args.hop)
    print(f"computed, not measured: steps of {TOKENS:,} tokens, bf16-policy, {links}\n")
    found = [search(workload, size, links) for workload in WORKLOADS for size in args.gpus]
    rows = [row for row in found if row is not None]
    print("\n".join(table(rows)))
    if not args.no_plot:
        draw(rows, args.picture)
        print(f"\n{args.picture}")


if __name__ == "__main__":
    main()
