# ruff: noqa: T201
"""The parts of the net: what each covers, at which commit it ran last green, and what is due.

    python -m tools.net                              every part
    python -m tools.net --changed-since main         what the changes since a commit make due
    python -m tools.net run parity cells             run parts, and record those that are green
    python -m tools.net run golden --parent main     compare with the numbers of another commit
    python -m tools.net record gpu --commit HEAD --summary "88 passed" --minutes 9

A part is green if nothing that it covers has changed since the commit at which it ran last green;
the exit status is 1 if one is due. Runs are recorded in benchmarks/results/net.jsonl. Where a
command keeps results, they are in build/net, in a folder for what the part covers: the same call
continues a run that was ended. Pages are written from there, by the part's own command with
`--results FILE --write PAGE`.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.net_parts import BY_NAME, PARTS, Part

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/results/net.jsonl"
NUM_SHOWN = 4


def git(*arguments: str) -> list[str]:
    """Return the lines that git says; raise if it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def changed(part: Part, commit: str) -> list[str]:
    """Return the covered files that differ from a commit, those not committed included."""
    covers = part.covers.split()
    new = git("ls-files", "--others", "--exclude-standard", "--", *covers)
    return sorted({*git("diff", "--name-only", "--no-renames", commit, "--", *covers), *new})


def resolve(commit: str) -> str:
    """Return the abbreviated hash of a commit."""
    try:
        return git("rev-parse", "--short=10", "--verify", "--quiet", f"{commit}^{{commit}}")[0]
    except subprocess.CalledProcessError:
        sys.exit(f"{commit} is no commit of this repository.")


def is_ancestor(commit: str) -> bool:
    """Return whether a commit is known and part of the history of this one."""
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def last_green(part: Part) -> tuple[dict[str, Any] | None, str]:
    """Return the last run whose commit is in this history, or None and the reason."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    runs = [run for run in map(json.loads, lines) if run["part"] == part.name]
    for run in reversed(runs):
        if is_ancestor(run["commit"]):
            return run, ""
    if runs:
        return None, f"{runs[-1]['commit']} is no ancestor of HEAD"
    return None, "never recorded"


def describe(part: Part, since: str | None) -> tuple[bool, list[str]]:
    """Return whether a part is due, and lines that say why and what it covers."""
    run, reason = (None, f"since {since}") if since else last_green(part)
    base = since or (run and run["commit"])
    files = changed(part, base) if base else []
    is_due = bool(files) or base is None
    if run:
        minutes, summary = f"{run['minutes']:.0f} min", run["summary"]
        reason = f"green at {run['commit']}, {run['date']}, {minutes}: {summary}"
    lines = [f"{part.name:12} {'due' if is_due else 'green':6} {part.minutes:3} min  {reason}"]
    if files:
        more = f" and {len(files) - NUM_SHOWN} more" if len(files) > NUM_SHOWN else ""
        lines.append(f"    changed: {', '.join(files[:NUM_SHOWN])}{more}")
    return is_due, [*lines, f"    covers: {part.covers}"]


def show(since: str | None) -> int:
    """Print the state of every part; return 1 if one is due."""
    minutes = 0
    for part in PARTS:
        is_due, lines = describe(part, since)
        minutes += part.minutes if is_due else 0
        print(*lines, sep="\n")
    print(f"\ndue: {minutes} minutes on two cores")
    return int(minutes > 0)


def results_of(part: Part) -> Path:
    """Return where the results of a run are kept: the same file for the same covered files."""
    content = "\n".join(git("ls-files", "--stage", "--", *part.covers.split()))
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    return ROOT / "build" / "net" / digest / f"{part.name}.jsonl"


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="net-") as folder:
        git("worktree", "add", "--quiet", "--detach", f"{folder}/tree", commit)
        try:
            yield Path(folder, "tree")
        finally:
            git("worktree", "remove", "--force", f"{folder}/tree")


def execute(command: str, root: Path) -> tuple[int, str]:
    """Run a command in a tree; return its exit status and the last line that it printed."""
    print(f"$ {command}", flush=True)
    process = subprocess.Popen(
        shlex.split(command),
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last = ""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        last = line.strip() or last
    return process.wait(), last


def run_part(part: Part, parent: str | None, lightning_tests: str) -> bool:
    """Run a part at the current commit, and record it if it is green."""
    commit = resolve("HEAD")
    if files := changed(part, commit):
        print(f"{part.name} covers files that differ from {commit}: {', '.join(files)}. Commit.")
        return False
    results, start = results_of(part), time.monotonic()
    results.parent.mkdir(parents=True, exist_ok=True)
    more: dict[str, str] = {}
    if part.name == "golden":
        # Bits depend on the machine: the parent runs here, too, whatever is recorded.
        run, reason = last_green(part)
        if parent is None and run is None:
            sys.exit(f"golden is {reason}: use --parent COMMIT.")
        more["parent"] = resolve(parent or (run or {})["commit"])
        with tree_of(more["parent"]) as tree:
            status, _ = execute(f"{sys.executable} -m tools.golden write {results}", tree)
        if status:
            return False
    fields = {"python": sys.executable, "results": results, "lightning_tests": lightning_tests}
    status, summary = execute(part.command.format(**fields), ROOT)
    files = changed(part, commit)
    if status or files:
        print(f"{part.name}: exit status {status}; changed meanwhile: {', '.join(files) or 'none'}")
        return False
    record(part.name, commit, summary, (time.monotonic() - start) / 60, **more)
    return True


def record(name: str, commit: str, summary: str, minutes: float, **more: str) -> None:
    """Add a green run to the record."""
    machine = f"{platform.node()}, {os.cpu_count()} cores, {platform.machine()}"
    run = {"part": name, "commit": commit, "minutes": round(minutes, 1)}
    run |= {"date": f"{datetime.date.today()}", "machine": machine, "summary": summary}
    with RECORD.open("a") as file:
        file.write(json.dumps(run | more) + "\n")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.net", description=__doc__)
    parser.add_argument("--changed-since", metavar="COMMIT", help="instead of the last green runs")
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run", help="run parts; what they cover must be committed")
    run.add_argument("parts", nargs="+", choices=BY_NAME)
    run.add_argument("--parent", help="golden: the commit with which it is compared")
    run.add_argument("--lightning-tests", default="", help="conformance: tests of Lightning")
    add = commands.add_parser("record", help="record a green run that was made elsewhere")
    add.add_argument("part", choices=BY_NAME)
    add.add_argument("--commit", required=True)
    add.add_argument("--summary", required=True, help="the last line of its output")
    add.add_argument("--minutes", required=True, type=float)
    add.add_argument("--machine", help="by default this one")
    given = parser.parse_args()
    if given.command == "record":
        more = {"machine": given.machine} if given.machine else {}
        record(given.part, resolve(given.commit), given.summary, given.minutes, **more)
        return 0
    if given.command == "run":
        done = [run_part(BY_NAME[x], given.parent, given.lightning_tests) for x in given.parts]
        return int(not all(done))
    return show(given.changed_since and resolve(given.changed_since))


if __name__ == "__main__":
    sys.exit(main())
