# SPDX-License-Identifier: Apache-2.0
"""The page that the demo leaves: two runs side by side, as text and as a picture.

Reads what Lightning's CSV logger and `recipes.demo.Recorder` wrote; trains nothing. Without
matplotlib there is a page without a picture.
"""

import csv
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

PICTURE: Final = "report.png"
_BY_POSITION: Final = "val_loss_at/"
_UNIT: Final = "nats per byte"
_BLUE, _ORANGE, _GREY = "#0072b2", "#e69f00", "#999999"


@dataclass(frozen=True)
class Run:
    """What a run has written down.

    Args:
        metrics: name to step to value.
        tokens: that each rank held, over the whole run.
        work: by layout, the pairs of tokens that each rank's attention computed, or would have.
        said: lines of the library.
    """

    metrics: Mapping[str, Mapping[int, float]]
    tokens: Sequence[int]
    work: Mapping[str, Sequence[int]]
    said: Sequence[str]

    @property
    def losses(self) -> Mapping[int, float]:
        """The training loss by step."""
        return self.metrics.get("train_loss", {})

    @property
    def verified(self) -> str:
        """What the check before the first step found; empty if there was none."""
        return next((line for line in self.said if line.startswith("verified: ")), "")

    @property
    def by_position(self) -> dict[str, float]:
        """The last validation loss by place in the row, from its start to its end."""
        found = {
            name.removeprefix(_BY_POSITION): _last(values)
            for name, values in self.metrics.items()
            if name.startswith(_BY_POSITION)
        }
        return dict(sorted(found.items(), key=lambda item: int(item[0].split("-")[0])))

    def speed(self) -> str:
        """Return the median of tokens/s and its range, without the first steps, which are slower.

        The range tells how much else the machine had to do.
        """
        values = list(self.metrics.get("tokens_per_second", {}).values())
        # Between two figures the logger repeats the former one.
        later = sorted(x for x in values if x != values[0]) or values
        if not later:
            return "?"
        return f"{later[len(later) // 2]:.0f} ({later[0]:.0f} to {later[-1]:.0f})"

    def memory(self) -> float:
        """Return the GB of the fullest rank."""
        return max(self.metrics.get("peak_memory_gb", {}).values(), default=math.nan)


@dataclass(frozen=True)
class Generated:
    """What the exported model wrote."""

    model: str
    prompt: str
    text: str
    num_tokens: int


def read_run(folder: Path) -> Run:
    """Read what a run of the demo wrote."""
    metrics: dict[str, dict[int, float]] = {}
    with (folder / "log" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    metrics.setdefault(name, {})[int(row["step"])] = float(value)
    balance = json.loads((folder / "balance.json").read_text())
    said = (folder / "said.log").read_text().splitlines()
    return Run(metrics, balance["tokens"], balance["work"], said)


def largest_difference(shared: Run, alone: Run) -> tuple[float, int]:
    """Return the largest difference of two loss curves, and its step, counted from 1.

    NaN if one of them has no loss, or has steps that the other has not.

    Example:
        >>> one = Run({"train_loss": {0: 2.0, 1: 1.0}}, [], {}, [])
        >>> other = Run({"train_loss": {0: 2.0, 1: 1.5}}, [], {}, [])
        >>> largest_difference(one, other)
        (0.5, 2)
    """
    if not alone.losses or shared.losses.keys() != alone.losses.keys():
        return math.nan, 0
    found = {step: abs(shared.losses[step] - alone.losses[step]) for step in alone.losses}
    # NaN compares with nothing; it comes first.
    worst = max(found, key=lambda step: (math.isnan(found[step]), found[step]))
    return found[worst], worst + 1


# ---------------------------------------------------------------- the page


def write_report(
    out: Path,
    *,
    shared: Run,
    alone: Run,
    generated: Generated,
    commands: Mapping[str, float],
    seconds: float,
    tolerance: float,
    length: int,
) -> Path:
    """Write ``report.md`` and its picture.

    Args:
        out: the folder.
        shared: the run whose ranks shared rows.
        alone: the same on one process.
        generated: what the exported model wrote.
        commands: that were run, and their seconds.
        seconds: that everything took.
        tolerance: largest difference of the curves that is allowed.
        length: of a row.
    """
    cp_size = len(shared.tokens)
    difference, step = largest_difference(shared, alone)
    verdict = "**the same**" if difference <= tolerance else "**NOT the same**"
    parts = [
        f"# Demo: {cp_size} CPU ranks share every row, one process does the same alone",
        f"{len(alone.losses)} steps on rows of {length} tokens, of which each rank holds "
        f"{length // cp_size}; {seconds:.0f} s on {os.cpu_count()} cores ({_versions()}).",
        f"The loss curves are {verdict}: the largest difference is {difference:.1e}, at step "
        f"{step}; allowed is {tolerance:.0e} (in float32 sums in another order round differently, "
        "and training carries it on).",
        draw(out / PICTURE, shared, alone, tolerance),
        "## Before the first step",
        "\n\n".join(shared.said) or "Nothing was said.",
        "## Training loss",
        _table(["step", *_names(cp_size), "difference"], _loss_rows(shared, alone)),
        "## Validation loss by position in the row",
        _table(["tokens", *_names(cp_size), "difference"], _position_rows(shared, alone)),
        "## What each rank holds and computes",
        _table(*_balance(shared)),
        "Work is pairs of tokens that see each other. With `contiguous` a rank would hold one run "
        "of tokens, and the one with the end of the row would compute most of it.",
        "## Speed and memory",
        _table(
            ["", "tokens/s (range)", "GB, fullest process"],
            [
                [name, run.speed(), f"{run.memory():.2f}"]
                for name, run in zip(_names(cp_size), (shared, alone), strict=True)
            ],
        ),
        "Medians. This is no measurement of speed: the one process has as many threads as there "
        "are ranks, whatever else runs on the machine counts too, and a model this small is mostly "
        "Python and PyTorch themselves. The ranks also hold whole rows once, to verify.",
        "## The exported model",
        f"`model/` was loaded by plain transformers as a `{generated.model}`; after "
        f"`{generated.prompt}` it wrote {generated.num_tokens} tokens:",
        f"```\n{generated.prompt}{generated.text}\n```",
        "## Commands",
        _table(
            ["command", "seconds"],
            [[f"`{line}`", f"{took:.0f}"] for line, took in commands.items()],
        ),
    ]
    page = out / "report.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    return f"{platform.machine()}, Python {platform.python_version()}, {packages}"


def _names(cp_size: int) -> list[str]:
    return [f"{cp_size} ranks", "one process"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _loss_rows(shared: Run, alone: Run) -> list[list[str]]:
    """Give some of the steps, the first and the last among them."""
    steps = sorted(alone.losses.keys() & shared.losses.keys())
    some = sorted({steps[round(i * (len(steps) - 1) / 6)] for i in range(7)}) if steps else []
    return [[str(step + 1), *_pair(shared.losses[step], alone.losses[step])] for step in some]


def _position_rows(shared: Run, alone: Run) -> list[list[str]]:
    there = alone.by_position
    ours = shared.by_position.items()
    return [[place, *_pair(loss, there.get(place, math.nan))] for place, loss in ours]


def _pair(shared: float, alone: float) -> list[str]:
    return [f"{shared:.6f}", f"{alone:.6f}", f"{abs(shared - alone):.1e}"]


def _balance(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of ranks."""
    head = ["rank", "tokens", *(f"work, `{name}`" for name in run.work)]
    columns = [run.tokens, *run.work.values()]
    shares = [[f"{x:,} ({x / max(sum(c), 1):.1%})" for x in c] for c in columns]
    return head, [[str(rank), *row] for rank, row in enumerate(zip(*shares, strict=True))]


def _last(values: Mapping[int, float]) -> float:
    return values[max(values)]


# ---------------------------------------------------------------- the picture


def draw(file: Path, shared: Run, alone: Run, tolerance: float) -> str:
    """Draw both runs; return the line of the page that shows the picture, or why there is none."""
    file.unlink(missing_ok=True)
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return "(No picture: it needs matplotlib, `pip install -e '.[recipes]'`.)"
    figure: Any = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_losses(axes[0, 0], shared, alone)
    _draw_differences(axes[0, 1], shared, alone, tolerance)
    _draw_positions(axes[1, 0], shared, alone)
    _draw_balance(axes[1, 1], shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
    return f"![two loss curves, loss by position, balance]({file.name})"


def _draw_losses(axis: Any, shared: Run, alone: Run) -> None:
    ours, theirs = _names(len(shared.tokens))
    for run, name, style in (
        (alone, theirs, {"color": _ORANGE, "linewidth": 5, "alpha": 0.6}),
        (shared, ours, {"color": _BLUE, "linewidth": 1.5}),
    ):
        steps = sorted(run.losses)
        axis.plot([s + 1 for s in steps], [run.losses[s] for s in steps], label=name, **style)
    axis.set(title="training loss", xlabel="step", ylabel=_UNIT)
    axis.legend(frameon=False)


def _draw_differences(axis: Any, shared: Run, alone: Run, tolerance: float) -> None:
    steps = sorted(shared.losses.keys() & alone.losses.keys())
    # A difference of 0 has no place on such an axis; float32 has no smaller one than this.
    gaps = [max(abs(shared.losses[s] - alone.losses[s]), 1e-7) for s in steps]
    axis.semilogy([s + 1 for s in steps], gaps, ".-", color=_BLUE)
    axis.axhline(tolerance, color=_GREY, linestyle="--", label="allowed")
    highest = 5 * max(tolerance, *gaps)
    axis.set(title="difference of the two curves", xlabel="step", ylim=(5e-8, highest))
    axis.legend(frameon=False)


def _draw_positions(axis: Any, shared: Run, alone: Run) -> None:
    there = alone.by_position
    ours, theirs = _names(len(shared.tokens))
    places = list(shared.by_position)
    values = {
        ours: (_BLUE, list(shared.by_position.values())),
        theirs: (_ORANGE, [there.get(place, math.nan) for place in places]),
    }
    _draw_bars(axis, places, values)
    axis.set(
        title="validation loss by position in the row", xlabel="tokens", ylabel="nats per byte"
    )


def _draw_balance(axis: Any, shared: Run) -> None:
    colors = (_BLUE, _ORANGE, _GREY)
    columns = {"tokens": shared.tokens}
    columns |= {f"work, {name}": work for name, work in shared.work.items()}
    values = {
        name: (color, [100 * x / max(sum(column), 1) for x in column])
        for color, (name, column) in zip(colors, columns.items(), strict=False)
    }
    _draw_bars(axis, [f"rank {rank}" for rank in range(len(shared.tokens))], values)
    axis.set(title="what each rank holds and computes", ylabel="% of all")


def _draw_bars(
    axis: Any, places: Sequence[str], values: Mapping[str, tuple[str, Sequence[float]]]
) -> None:
    """Draw groups of bars: one group per place, one bar in it per name."""
    width = 0.8 / len(values)
    for number, (name, (color, heights)) in enumerate(values.items()):
        left = [i + (number - (len(values) - 1) / 2) * width for i in range(len(places))]
        axis.bar(left, heights, width * 0.92, color=color, label=name)
    axis.set_xticks(range(len(places)), places)
    tallest = max((x for _, heights in values.values() for x in heights), default=1.0)
    axis.set_ylim(0, 1.2 * tallest)  # room for the names
    axis.legend(frameon=False, loc="upper center", ncols=len(values))
