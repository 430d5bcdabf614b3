# SPDX-License-Identifier: Apache-2.0
"""Run generated scripts with and without us, and say which are equal, refused or different.

    python -m tools.user_scripts --results FILE                   # 15 to 20 minutes on 2 cores
    python -m tools.user_scripts --results FILE --cases probe     # those whose name has this text
    python -m tools.user_scripts --results FILE --write benchmarks/results/user_scripts_202611.md

Scripts whose result at this commit is in FILE are not run again; the page has a column for each
commit in it, and lists the scripts that have changed. The exit code is 1 if a script is different
or broken. To compare a change with df0532d, copy benchmarks/results/user_scripts_202611.jsonl.

- equal: losses, logs, lists that the script prints, and weights after each step are those of one
  process of stock Lightning or transformers.
- refused: all ranks raise an error of ours, and what they did before is equal.
- different: something differs, and nobody says so.
- broken: another error, an error of some ranks only, or a script that hangs.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tests.ranks import RankError, RankPool
from tools.side_by_side import Pools, run_side_by_side
from tools.user_scripts import doors
from tools.user_scripts.doors import Found, Script

SIZES = (1, 2, 3)
RESULTS = ("equal", "different", "broken", "refused")
VALUES, WEIGHTS = 2e-5, 4e-4
"""Limits on the error of a value, relative to it + 0.1, and of a weight, relative to the largest
update: ten times what equal scripts have (2e-6, 4e-5). Wrong ones have 1.6e-4, or 1.4e-3."""

Known = dict[tuple[str, int], dict[str, Any]]
"""Results by commit and number."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.user_scripts")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines")
    parser.add_argument("--cases", default="", help="text in the names of scripts, or a number")
    parser.add_argument("--count", type=int, default=200, help="number of scripts")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a script")
    parser.add_argument("--again", action="store_true", help="run scripts again that are known")
    given = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # of the ranks
    os.environ["OMP_NUM_THREADS"] = "1"
    scripts = [Script.draw(number) for number in range(given.count)]
    scripts = [x for x in scripts if given.cases in str(x)]
    commit, known = find_commit(), load(given.results)
    done = {} if given.again else {number for name, number in known if name == commit}
    rest = [x for x in scripts if x.number not in done]
    started = time.monotonic()
    examined = functools.partial(examine, commit=commit, timeout=given.timeout)
    for _, entry in run_side_by_side(rest, examined, [1, *SIZES], at_least=2):
        known[commit, entry["number"]] = entry
        with given.results.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        outcomes = [f"{size}: {entry['results'][size]['result']}" for size in entry["results"]]
        sys.stdout.write(f"{entry['script']}: {', '.join(outcomes)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(rest)} scripts in {time.monotonic() - started:.0f} s\n")
    if given.write:
        before = given.write.read_text() if given.write.exists() else ""
        given.write.write_text(page(known, before))
    outcomes = [x["result"] for s in scripts for x in known[commit, s.number]["results"].values()]
    return int(any(x in ("different", "broken") for x in outcomes))


def find_commit() -> str:
    """Return the commit that changed the library last, with a plus sign if files differ."""
    library = ["--", "lightning_cp", "hf_patches"]
    command = ["git", "log", "-1", "--format=%h", *library]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    is_changed = subprocess.run(["git", "diff", "--quiet", "HEAD", *library], check=False)
    return commit + "+" * is_changed.returncode


def load(path: Path) -> Known:
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines]
    return {(entry["commit"], entry["number"]): entry for entry in entries}


# ---------------------------------------------------------------- one script


def examine(script: Script, pools: Pools, *, commit: str, timeout: float) -> dict[str, Any]:
    """Run a script without us and on each number of ranks."""
    stock = run(script, pools[1], 0, timeout)[0]
    if stock.error:
        raise AssertionError(f"{script} does not run without us: {stock.error} at {stock.place}")
    results = {}
    for size in SIZES:
        try:
            results[f"{size}"] = compare(stock, run(script, pools[size], size, timeout))
        except RankError as error:
            results[f"{size}"] = {"result": "broken", "detail": f"hangs or dies: {error}"[-400:]}
    return {"commit": commit, "number": script.number, "script": f"{script}", "results": results}


def run(script: Script, pool: RankPool, context_size: int, timeout: float) -> list[Found]:
    found = pool.run(doors.run, script.number, context_size, timeout=timeout)
    if any(x.error and not x.is_ours for x in found) or len({not x.error for x in found}) > 1:
        pool.stop()  # messages that nobody awaits may be under way
    return found


def compare(stock: Found, ranks: list[Found]) -> dict[str, Any]:
    """Say what became of a script on all ranks."""
    errors = [x.error for x in ranks]
    differences = [x for rank in ranks for x in weight_differences(stock, rank)]
    worst = max(differences, default=("nothing", 0.0), key=lambda x: x[1])
    values = value_differences(stock, ranks[0], is_partial=any(errors))
    largest = max(values, default=("nothing", 0.0), key=lambda x: x[1])
    wrong = list({name: f"{name} off by {x:.1e}" for name, x in values if not x <= VALUES}.values())
    wrong += [f"weights off by {x:.1e} {name}" for name, x in differences if not x <= WEIGHTS][:1]
    numbers = {"value": largest[1], "weight": worst[1]}
    first = next((x for x in ranks if x.error), None)
    if first is None:
        result = "different" if wrong else "equal"
        return {"result": result, "detail": "; ".join(wrong), **numbers}
    if not all(x.error and x.is_ours for x in ranks):
        told = sum(bool(x) for x in errors)
        detail = (
            f"{told} of {len(ranks)} ranks: {textwrap.shorten(first.error, 300)} at {first.place}"
        )
        return {"result": "broken", "detail": detail, **numbers}
    result = "different" if wrong else "refused"
    return {
        "result": result,
        "detail": textwrap.shorten("; ".join([*wrong, first.error]), 300),
        **numbers,
    }


def weight_differences(stock: Found, found: Found) -> list[tuple[str, float]]:
    """Return the difference after each step that was made, relative to the largest update."""
    differences = []
    for step, (weights, exact) in enumerate(zip(found.weights, stock.weights, strict=False)):
        if weights.keys() != exact.keys():
            differences.append(("by their names", float("inf")))
            continue
        update = max(float((x - stock.start[name]).abs().max()) for name, x in exact.items())
        far = [(x - exact[name]).abs().max() for name, x in weights.items()]
        differences.append((f"after step {step + 1}", float(torch.stack(far).amax()) / update))
    return differences


def value_differences(stock: Found, found: Found, *, is_partial: bool) -> list[tuple[str, float]]:
    """Return the difference of each value, with the name of its series."""
    differences = []
    for name, exact in stock.values.items():
        values = found.values.get(name, [])
        if len(values) != len(exact) and not is_partial:
            differences.append((f"{name} ({len(values)} values for {len(exact)})", float("inf")))
        pairs = list(zip(values, exact, strict=False))
        differences += [(name, abs(x - y) / (abs(y) + 0.1)) for x, y in pairs]
    return differences


# ---------------------------------------------------------------- the page


def page(known: Known, before: str) -> str:
    """Return the page with a column for each commit; what follows the mark stays."""
    commits = list(dict.fromkeys(commit for commit, _ in known))
    lines = [_HEAD, f"| | ranks | {' | '.join(commits)} |", "|---|---|" + "---|" * len(commits)]
    for door in doors.DOORS:
        for size in map(str, SIZES):
            found: dict[str, list[str]] = {commit: [] for commit in commits}
            for (commit, number), entry in known.items():
                if Script.draw(number).door == door:
                    found[commit].append(entry["results"][size]["result"])
            cells = [
                ", ".join(f"{names.count(x)} {x}" for x in RESULTS if x in names)
                for names in found.values()
            ]
            lines.append(f"| {door} | {size} | {' | '.join(cells)} |")
    for commit in commits:
        for result in RESULTS[1:]:
            title = f"{result.capitalize()} at {commit}"
            lines += ["", f"## {title}", "", *_section(known, commit, result)]
    if len(commits) > 1:
        old, new = commits[0], commits[-1]
        lines += ["", f"## Changed from {old} to {new}", "", *_changes(known, old, new)]
    return "\n".join(lines) + f"\n\n{MARK}{before.partition(MARK)[2]}"


def _section(known: Known, commit: str, result: str) -> Iterator[str]:
    """Yield what the scripts with a result do, part by part."""
    entries = [entry for (name, _), entry in known.items() if name == commit]

    def key(entry: Any) -> tuple[str, str]:
        script = Script.draw(entry["number"])
        return script.door, script.parts[0].name

    for (door, name), group in groupby(sorted(entries, key=key), key):
        found = [(entry, has(entry, result)) for entry in group if has(entry, result)]
        if not found:
            continue
        text = Script.draw(found[0][0]["number"]).parts[0].text
        where = ", ".join(f"{entry['number']:03d} ({'/'.join(sizes)})" for entry, sizes in found)
        entry, sizes = found[0]
        detail = textwrap.shorten(entry["results"][sizes[-1]]["detail"], 200)
        yield f"- **{name}**, {door}, {where}: {text} `{detail.replace('`', ' ')}`"


def has(entry: dict[str, Any], result: str) -> list[str]:
    """Return the numbers of ranks on which a script has a result."""
    return [size for size, found in entry["results"].items() if found["result"] == result]


def _changes(known: Known, old: str, new: str) -> Iterator[str]:
    for number in sorted(n for commit, n in known if commit == old and (new, n) in known):
        entry, other = known[old, number], known[new, number]
        changes = [
            f"{size}: {found['result']}, now {other['results'][size]['result']}"
            for size, found in entry["results"].items()
            if found["result"] != other["results"][size]["result"]
        ]
        if changes:
            yield f"- {entry['script']}: {'; '.join(changes)}"


MARK = "<!-- written by hand from here -->"

_HEAD = """# Scripts as users write them

Written by `python -m tools.user_scripts --results FILE --write PAGE`. 200 scripts, 100 through
Lightning and 100 through transformers' Trainer, on 1, 2 and 3 CPU ranks, in float32, each compared
with one process without us over 3 steps of SGD; 89 under FSDP2.

- equal: losses, logs, lists that the script prints and weights after each step are the same.
- refused: all ranks raise an error of ours, and what they did before is equal.
- different: something differs, and nobody says so.
- broken: another error, an error of some ranks only, or a script that hangs.

In the lists, numbers are those of scripts, with the numbers of ranks in brackets; then what the
script does, and what was found.
"""


if __name__ == "__main__":
    sys.exit(main())
