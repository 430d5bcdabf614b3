# SPDX-License-Identifier: Apache-2.0
"""Results as tables and pictures: of pass keys, and of the demo, which compares two runs.

Reads the files of Lightning's CSV logger and of `recipes.demo.Recorder`. Without matplotlib there
is no picture, and the text says so.
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

from pandas import DataFrame, Index, Series  # type: ignore[import-untyped]

PICTURE: Final = "report.png"
_BY_POSITION: Final = "val_loss_at/"
_UNIT: Final = "nats per byte"


# ---------------------------------------------------------------- tables and pictures


def table(frame: DataFrame) -> str:
    """Return a table in Markdown, in which columns stand below each other.

    Example:
        >>> print(table(DataFrame({"loss": [5.25, 4.5]}, Index([1, 100], name="step"))))
        | step | loss |
        | ---- | ---- |
        | 1    | 5.25 |
        | 100  | 4.5  |
    """
    cells = frame.reset_index(names=frame.index.name or "").astype(str)
    columns = [[name, *values] for name, values in cells.items()]
    widths = [max(3, *map(len, column)) for column in columns]
    rows = list(zip(*columns, strict=True))
    rows.insert(1, tuple("-" * width for width in widths))
    padded = ([x.ljust(n) for x, n in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def draw(
    file: Path, *plots: tuple[DataFrame, Mapping[str, Any]], size: tuple[float, float]
) -> bool:
    """Draw one plot, or rows of two; return whether matplotlib is installed.

    Args:
        file: of the picture; a former one is removed.
        plots: what each shows, and options of `DataFrame.plot`; the kind ``map`` colours values
            from 0 to 1.
        size: in inches.
    """
    file.unlink(missing_ok=True)
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return False
    figure: Any = Figure(figsize=size, layout="constrained")
    columns = min(2, len(plots))
    axes = figure.subplots(-(-len(plots) // columns), columns, squeeze=False)
    for (frame, options), axis in zip(plots, axes.flat, strict=False):
        if options["kind"] == "map":
            _draw_map(axis, frame, **options)
        else:
            frame.plot(ax=axis, **options)
            axis.margins(y=0.3)  # room for the names
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return True


def _draw_map(axis: Any, frame: DataFrame, *, kind: str, **labels: str) -> None:
    image = axis.imshow(frame, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axis.set_xticks(range(len(frame.columns)), frame.columns)
    axis.set_yticks(range(len(frame)), frame.index)
    axis.set(**labels)
    axis.figure.colorbar(image)


# ---------------------------------------------------------------- runs of the demo


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
            name.removeprefix(_BY_POSITION): values[max(values)]
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

    def memory(self) -> str:
        """Return the largest peak memory of a rank, in GB."""
        return f"{max(self.metrics.get('peak_memory_gb', {}).values(), default=math.nan):.2f}"


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


def compare(sharded: Mapping[Any, float], single: Mapping[Any, float]) -> DataFrame:
    """Return the values of two runs and their differences; NaN where one has no value.

    Args:
        sharded: of the run on several ranks.
        single: of the run on one process.
    """
    frame = DataFrame({"sharded": Series(sharded), "single": Series(single)}, dtype=float)
    return frame.assign(difference=(frame["sharded"] - frame["single"]).abs())


def largest_difference(sharded: Run, single: Run) -> tuple[float, int]:
    """Return the largest difference of two loss curves, and its step, counted from 1.

    NaN if one has no loss, or if their steps differ.

    Example:
        >>> one = Run({"train_loss": {0: 2.0, 1: 1.0}}, [], {}, [])
        >>> other = Run({"train_loss": {0: 2.0, 1: 1.5}}, [], {}, [])
        >>> largest_difference(one, other)
        (0.5, 2)
    """
    gaps = compare(sharded.losses, single.losses)["difference"]
    if gaps.empty:
        return math.nan, 0
    # NaN counts as the largest.
    worst = gaps.isna().idxmax() if gaps.isna().any() else gaps.idxmax()
    return float(gaps[worst]), int(worst) + 1


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
    names = [f"{len(sharded.tokens)} ranks", "one process"]
    titles = dict(zip(("sharded", "single"), names, strict=True))
    losses = compare(sharded.losses, single.losses).rename_axis("step")
    losses = losses.rename(columns=titles, index=lambda step: step + 1)
    by_position = compare(sharded.by_position, single.by_position).rename_axis("tokens")
    by_position = by_position.rename(columns=titles)
    held = _held(sharded)
    difference, step = largest_difference(sharded, single)
    verdict = "**the same**" if difference <= tolerance else "**NOT the same**"
    costs = {
        "tokens/s (range)": [sharded.speed(), single.speed()],
        "peak memory of a process, GB": [sharded.memory(), single.memory()],
    }
    took = {"seconds": [f"{took:.0f}" for took in commands.values()]}
    parts = [
        f"# Demo: {len(sharded.tokens)} CPU ranks shard every sequence, compared with one process",
        f"{len(single.losses)} steps on sequences of {length} tokens, of which each rank holds "
        f"{length // len(sharded.tokens)}; {seconds:.0f} s on {os.cpu_count()} cores "
        f"({_versions()}).",
        f"The loss curves are {verdict}: the largest difference is {difference:.1e}, at step "
        f"{step}; allowed is {tolerance:.0e} (float32 sums in another order round differently, and "
        "training accumulates the difference).",
        _picture(out, losses, by_position, held, tolerance),
        "## Before the first step",
        "\n\n".join(sharded.log) or "The log is empty.",
        "## Training loss",
        table(_as_text(losses.iloc[_some(len(losses))])),
        "## Validation loss by position in the sequence",
        table(_as_text(by_position)),
        "## What each rank holds and computes",
        table(held.map("{:,}".format) + (held / held.sum()).map(" ({:.1%})".format)),
        "Work is the number of visible pairs. With `contiguous` each rank would hold consecutive "
        "tokens, and the one with the end of the sequence would compute most of it.",
        "## Speed and memory",
        table(DataFrame(costs, names)),
        "Medians. This is not a benchmark: the one process has as many threads as there are ranks, "
        "other programs of the machine count too, and with so small a model the overhead of Python "
        "and PyTorch dominates. The ranks also hold full sequences once, to verify.",
        "## The exported model",
        f"`model/` was loaded by transformers as a `{generated.model}`; after "
        f"`{generated.prompt}` it generated {generated.num_tokens} tokens:",
        f"```\n{generated.prompt}{generated.text}\n```",
        "## Commands",
        table(DataFrame(took, Index([f"`{line}`" for line in commands], name="command"))),
    ]
    page = out / "report.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    return f"{platform.machine()}, Python {platform.python_version()}, {packages}"


def _some(number: int) -> list[int]:
    """Return up to seven of some rows, the first and the last among them."""
    return sorted({round(i * (number - 1) / 6) for i in range(7)} if number else ())


def _as_text(frame: DataFrame) -> DataFrame:
    """Return what `compare` returned, as it stands in tables."""
    text = frame.map("{:.6f}".format)
    return text.assign(difference=frame["difference"].map("{:.1e}".format))


def _held(run: Run) -> DataFrame:
    """Return the tokens and the visible pairs of each rank, by layout."""
    work = {f"work, `{name}`": values for name, values in run.work.items()}
    return DataFrame({"tokens": run.tokens, **work}).rename_axis("rank")


def _picture(
    out: Path, losses: DataFrame, by_position: DataFrame, held: DataFrame, tolerance: float
) -> str:
    """Draw both runs; return the line that shows the picture, or why there is none."""
    lines: dict[str, Any] = {"kind": "line", "style": ["-", "--"]}
    bars: dict[str, Any] = {"kind": "bar", "rot": 0}
    # A logarithmic axis has no 0; float32 has no smaller difference than this.
    gaps = losses[["difference"]].clip(lower=1e-7).assign(allowed=tolerance)
    shares = (100 * held / held.sum()).rename(columns=lambda name: name.replace("`", ""))
    is_drawn = draw(
        out / PICTURE,
        (losses.iloc[:, :2], lines | {"title": "training loss", "ylabel": _UNIT}),
        (gaps, lines | {"title": "difference of the two curves", "logy": True}),
        (by_position.iloc[:, :2], bars | {"title": "validation loss by position", "ylabel": _UNIT}),
        (shares, bars | {"title": "what each rank holds and computes", "ylabel": "% of all"}),
        size=(11, 7.5),
    )
    if not is_drawn:
        return "(No picture: install matplotlib, `pip install -e '.[recipes]'`.)"
    return f"![two loss curves, loss by position, balance]({PICTURE})"
