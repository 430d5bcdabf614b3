# SPDX-License-Identifier: Apache-2.0
"""The report of the demo: two runs compared, as text and as a picture.

Reads the files of Lightning's CSV logger and of `recipes.demo.Recorder`. Without matplotlib the
report has no picture.
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
    """The record of a run.

    Args:
        metrics: values by name and step.
        tokens: of each rank, over the run.
        work: visible pairs of each rank, by layout.
        log: lines of the library's log.
    """

    metrics: Mapping[str, Mapping[int, float]]
    tokens: Sequence[int]
    work: Mapping[str, Sequence[int]]
    log: Sequence[str]

    @property
    def losses(self) -> Mapping[int, float]:
        """The training loss by step."""
        return self.metrics.get("train_loss", {})

    @property
    def verified(self) -> str:
        """The log line of the verification; empty if there was none."""
        return next((line for line in self.log if line.startswith("verified")), "")

    @property
    def by_position(self) -> dict[str, float]:
        """The last validation loss by position in the sequence."""
        losses = {
            name.removeprefix(_BY_POSITION): _last(values)
            for name, values in self.metrics.items()
            if name.startswith(_BY_POSITION)
        }
        return dict(sorted(losses.items(), key=lambda item: int(item[0].split("-")[0])))

    def speed(self) -> str:
        """Return the median and the range of tokens/s, without the first steps, which are slower.

        A wide range means that the machine was busy.
        """
        values = list(self.metrics.get("tokens_per_second", {}).values())
        # Between two measurements the logger repeats the former one.
        later = sorted(x for x in values if x != values[0]) or values
        if not later:
            return "?"
        return f"{later[len(later) // 2]:.0f} ({later[0]:.0f} to {later[-1]:.0f})"

    def memory(self) -> float:
        """Return the largest peak memory of a rank, in GB."""
        return max(self.metrics.get("peak_memory_gb", {}).values(), default=math.nan)


@dataclass(frozen=True)
class Generated:
    """Text that the exported model has generated."""

    model: str
    prompt: str
    text: str
    num_tokens: int


def read_run(folder: Path) -> Run:
    """Read the record of a run of the demo."""
    metrics: dict[str, dict[int, float]] = {}
    with (folder / "log" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    metrics.setdefault(name, {})[int(row["step"])] = float(value)
    balance = json.loads((folder / "balance.json").read_text())
    log = (folder / "library.log").read_text().splitlines()
    return Run(metrics, balance["tokens"], balance["work"], log)


def largest_difference(sharded: Run, single: Run) -> tuple[float, int]:
    """Return the largest difference of two loss curves, and its step, counted from 1.

    NaN if one has no loss, or if their steps differ.

    Example:
        >>> one = Run({"train_loss": {0: 2.0, 1: 1.0}}, [], {}, [])
        >>> other = Run({"train_loss": {0: 2.0, 1: 1.5}}, [], {}, [])
        >>> largest_difference(one, other)
        (0.5, 2)
    """
    if not single.losses or sharded.losses.keys() != single.losses.keys():
        return math.nan, 0
    differences = {s: abs(sharded.losses[s] - single.losses[s]) for s in single.losses}
    # NaN counts as the largest.
    worst = max(differences, key=lambda s: (math.isnan(differences[s]), differences[s]))
    return differences[worst], worst + 1


# ---------------------------------------------------------------- the page


def write_report(
    out: Path,
    *,
    sharded: Run,
    single: Run,
    generated: Generated,
    commands: Mapping[str, float],
    seconds: float,
    tolerance: float,
    length: int,
) -> Path:
    """Write ``report.md`` and its picture.

    Args:
        out: the folder.
        sharded: the run on several ranks.
        single: the run on one process.
        generated: text of the exported model.
        commands: seconds by command.
        seconds: in total.
        tolerance: allowed difference of the curves.
        length: tokens per sequence.
    """
    cp_size = len(sharded.tokens)
    difference, step = largest_difference(sharded, single)
    verdict = "**the same**" if difference <= tolerance else "**NOT the same**"
    parts = [
        f"# Demo: {cp_size} CPU ranks shard every sequence, compared with one process",
        f"{len(single.losses)} steps on sequences of {length} tokens, of which each rank holds "
        f"{length // cp_size}; {seconds:.0f} s on {os.cpu_count()} cores ({_versions()}).",
        f"The loss curves are {verdict}: the largest difference is {difference:.1e}, at step "
        f"{step}; allowed is {tolerance:.0e} (float32 sums in another order round differently, and "
        "training accumulates the difference).",
        draw(out / PICTURE, sharded, single, tolerance),
        "## Before the first step",
        "\n\n".join(sharded.log) or "The log is empty.",
        "## Training loss",
        _table(["step", *_names(cp_size), "difference"], _loss_rows(sharded, single)),
        "## Validation loss by position in the sequence",
        _table(["tokens", *_names(cp_size), "difference"], _position_rows(sharded, single)),
        "## What each rank holds and computes",
        _table(*_balance(sharded)),
        "Work is the number of visible pairs. With `contiguous` each rank would hold consecutive "
        "tokens, and the one with the end of the sequence would compute most of it.",
        "## Speed and memory",
        _table(
            ["", "tokens/s (range)", "peak memory of a process, GB"],
            [
                [name, run.speed(), f"{run.memory():.2f}"]
                for name, run in zip(_names(cp_size), (sharded, single), strict=True)
            ],
        ),
        "Medians. This is not a benchmark: the one process has as many threads as there are ranks, "
        "other programs of the machine count too, and with so small a model the overhead of Python "
        "and PyTorch dominates. The ranks also hold full sequences once, to verify.",
        "## The exported model",
        f"`model/` was loaded by transformers as a `{generated.model}`; after "
        f"`{generated.prompt}` it generated {generated.num_tokens} tokens:",
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


def _loss_rows(sharded: Run, single: Run) -> list[list[str]]:
    """Return table rows of some steps, the first and the last among them."""
    steps = sorted(single.losses.keys() & sharded.losses.keys())
    some = sorted({steps[round(i * (len(steps) - 1) / 6)] for i in range(7)}) if steps else []
    return [[str(step + 1), *_pair(sharded.losses[step], single.losses[step])] for step in some]


def _position_rows(sharded: Run, single: Run) -> list[list[str]]:
    reference = single.by_position
    losses = sharded.by_position.items()
    return [[span, *_pair(loss, reference.get(span, math.nan))] for span, loss in losses]


def _pair(sharded: float, single: float) -> list[str]:
    return [f"{sharded:.6f}", f"{single:.6f}", f"{abs(sharded - single):.1e}"]


def _balance(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of ranks."""
    head = ["rank", "tokens", *(f"work, `{name}`" for name in run.work)]
    columns = [run.tokens, *run.work.values()]
    shares = [[f"{x:,} ({x / max(sum(c), 1):.1%})" for x in c] for c in columns]
    return head, [[str(rank), *row] for rank, row in enumerate(zip(*shares, strict=True))]


def _last(values: Mapping[int, float]) -> float:
    return values[max(values)]


# ---------------------------------------------------------------- the picture


def draw(file: Path, sharded: Run, single: Run, tolerance: float) -> str:
    """Draw both runs; return the line that shows the picture, or why there is none."""
    file.unlink(missing_ok=True)
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return "(No picture: install matplotlib, `pip install -e '.[recipes]'`.)"
    figure: Any = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_losses(axes[0, 0], sharded, single)
    _draw_differences(axes[0, 1], sharded, single, tolerance)
    _draw_positions(axes[1, 0], sharded, single)
    _draw_balance(axes[1, 1], sharded)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
    return f"![two loss curves, loss by position, balance]({file.name})"


def _draw_losses(axis: Any, sharded: Run, single: Run) -> None:
    ours, theirs = _names(len(sharded.tokens))
    for run, name, style in (
        (single, theirs, {"color": _ORANGE, "linewidth": 5, "alpha": 0.6}),
        (sharded, ours, {"color": _BLUE, "linewidth": 1.5}),
    ):
        steps = sorted(run.losses)
        axis.plot([s + 1 for s in steps], [run.losses[s] for s in steps], label=name, **style)
    axis.set(title="training loss", xlabel="step", ylabel=_UNIT)
    axis.legend(frameon=False)


def _draw_differences(axis: Any, sharded: Run, single: Run, tolerance: float) -> None:
    steps = sorted(sharded.losses.keys() & single.losses.keys())
    # A logarithmic axis has no 0; float32 has no smaller difference than this.
    gaps = [max(abs(sharded.losses[s] - single.losses[s]), 1e-7) for s in steps]
    axis.semilogy([s + 1 for s in steps], gaps, ".-", color=_BLUE)
    axis.axhline(tolerance, color=_GREY, linestyle="--", label="allowed")
    highest = 5 * max(tolerance, *gaps)
    axis.set(title="difference of the two curves", xlabel="step", ylim=(5e-8, highest))
    axis.legend(frameon=False)


def _draw_positions(axis: Any, sharded: Run, single: Run) -> None:
    reference = single.by_position
    ours, theirs = _names(len(sharded.tokens))
    spans = list(sharded.by_position)
    values = {
        ours: (_BLUE, list(sharded.by_position.values())),
        theirs: (_ORANGE, [reference.get(span, math.nan) for span in spans]),
    }
    _draw_bars(axis, spans, values)
    axis.set(title="validation loss by position", xlabel="tokens", ylabel=_UNIT)


def _draw_balance(axis: Any, sharded: Run) -> None:
    colors = (_BLUE, _ORANGE, _GREY)
    columns = {"tokens": sharded.tokens}
    columns |= {f"work, {name}": work for name, work in sharded.work.items()}
    values = {
        name: (color, [100 * x / max(sum(column), 1) for x in column])
        for color, (name, column) in zip(colors, columns.items(), strict=False)
    }
    _draw_bars(axis, [f"rank {rank}" for rank in range(len(sharded.tokens))], values)
    axis.set(title="what each rank holds and computes", ylabel="% of all")


def _draw_bars(
    axis: Any, groups: Sequence[str], values: Mapping[str, tuple[str, Sequence[float]]]
) -> None:
    """Draw groups of bars, with one bar per name in each group."""
    width = 0.8 / len(values)
    for number, (name, (color, heights)) in enumerate(values.items()):
        left = [i + (number - (len(values) - 1) / 2) * width for i in range(len(groups))]
        axis.bar(left, heights, width * 0.92, color=color, label=name)
    axis.set_xticks(range(len(groups)), groups)
    tallest = max((x for _, heights in values.values() for x in heights), default=1.0)
    axis.set_ylim(0, 1.2 * tallest)  # room for the names
    axis.legend(frameon=False, loc="upper center", ncols=len(values))
