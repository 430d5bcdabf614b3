"""Break the code in small ways, one after the other, and see which tests notice.

    python -m tools.mutants --check                       # does each mutant fit the source?
    python -m tools.mutants --results mutants.jsonl       # again: continues
    python -m tools.mutants --results mutants.jsonl --survivors       # against all tests
    python -m tools.mutants --results mutants.jsonl --write benchmarks/results/mutants_202611.md

Each mutant is put into a copy of the tree, and its tests run there until one fails. They also run
in an unchanged copy: a test that fails anyway notices nothing. The exit code is 1 if a mutant
survives, cannot be run, or was noticed by a test that fails anyway.
"""

import argparse
import datetime
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tools.mutants.source import ROOT, file_of, mutated, problems
from tools.mutants.table import MUTANTS, RETIRED, SURVIVED, Mutant

MARKS = "not slow and not gpu"
CHUNK = 12
"""Tests that run together in an unchanged copy."""

Result = dict[str, Any]


def copy_tree(target: Path) -> None:
    """Copy the files that git knows or would add, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(copy: Path, arguments: list[str], limit: float) -> tuple[str, str, float]:
    """Return ``killed``, ``survived`` or ``error``, what says so, and the seconds."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", MARKS, "-q"]
    command += ["--no-header", "--tb=line", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "error", f"no end within {limit:.0f} s: see --limit", time.monotonic() - begin
    seconds = time.monotonic() - begin
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if process.returncode == 0:
        return "survived", "", seconds
    if process.returncode < 0:  # by a signal
        failed = failed or [f"tests that ended with {process.returncode}"]
    if process.returncode < 2 and failed:
        return "killed", "\n".join(dict.fromkeys(failed)), seconds
    return "error", " | ".join(output.strip().splitlines()[-3:]), seconds


class Run:
    """The mutants of one call, and where their results go."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.commit = commit()
        self.results = read(args.results)
        self.copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def is_known(
        self, name: str, mutant: Mutant | None, tests: tuple[str, ...], scope: str
    ) -> bool:
        """Return whether there is a result that still holds."""
        found = self.results.get((name, scope))
        if (
            found is None
            or found["status"] == "error"
            or found["digest"] != digest_of(mutant, tests)
        ):
            return False
        files = {test.partition("::")[0] for test in tests}
        return not any(matters(file, files) for file in changed_since(found["commit"]))

    def one(self, name: str, mutant: Mutant | None, tests: tuple[str, ...], scope: str) -> None:
        """Run some tests in a copy with a mutant, or without one."""
        copy = self.copies.get()
        try:
            arguments = list(tests) if mutant is None else ["-x", *tests]
            if scope == "all":
                arguments = ["-x", "-n", "2", "--dist", "worksteal"]
            if mutant is not None:
                (copy / file_of(mutant)).write_text(mutated(mutant))
            limit = self.args.limit if scope == "listed" else 20 * self.args.limit
            status, by, seconds = run_tests(copy, arguments, limit)
            if mutant is not None:
                shutil.copy2(ROOT / file_of(mutant), copy / file_of(mutant))
        finally:
            self.copies.put(copy)
        result = {
            "mutant": name,
            "scope": scope,
            "status": status,
            "by": by,
            "seconds": round(seconds, 1),
            "commit": self.commit,
            "digest": digest_of(mutant, tests),
        }
        self.results[name, scope] = result
        if self.args.results:
            with self.args.results.open("a") as stream:
                stream.write(json.dumps(result) + "\n")
        sys.stdout.write(f"{status:9} {seconds:6.1f} s  {name}  {by}\n")
        sys.stdout.flush()

    def run(
        self, tasks: list[tuple[str, Mutant | None, tuple[str, ...], str]], workers: int
    ) -> None:
        """Run what has no result yet."""
        due = [task for task in tasks if not self.is_known(*task)]
        if not due:
            return
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            for number in range(workers):
                copy = Path(folder, str(number))
                copy_tree(copy)
                self.copies.put(copy)
            with ThreadPoolExecutor(workers) as pool:
                for future in [pool.submit(self.one, *task) for task in due]:
                    future.result()
            self.copies = queue.SimpleQueue()


def digest_of(mutant: Mutant | None, tests: tuple[str, ...]) -> str:
    content = repr((mutant and (mutant.where, mutant.old, mutant.new), tests))
    return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()


def commit() -> str:
    """Return the commit; with a mark if files differ from it."""
    run = ["git", "describe", "--always", "--abbrev=8", "--dirty", "--exclude=*"]
    return subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@cache
def changed_since(commit: str) -> tuple[str, ...]:
    """Return the files that differ from a commit; all that matter where that is not known."""
    diff = subprocess.run(
        ["git", "diff", "--name-only", commit], cwd=ROOT, capture_output=True, text=True
    )
    return tuple(diff.stdout.split()) if diff.returncode == 0 else ("pyproject.toml",)


def matters(file: str, tests: set[str]) -> bool:
    """Return whether what some tests notice may depend on a file; no such test imports a tool."""
    if file.startswith("tests/"):
        return file in tests or not Path(file).name.startswith("test_")
    return file == "pyproject.toml" or file.startswith(("lightning_cp/", "hf_patches/", "recipes/"))


def read(file: Path | None) -> dict[tuple[str, str], Result]:
    """Return the latest result of each mutant, by its name and which tests ran."""
    if file is None or not file.exists():
        return {}
    results = map(json.loads, file.read_text().splitlines())
    return {(result["mutant"], result["scope"]): result for result in results}


def unchanged(mutants: list[Mutant]) -> list[tuple[str, None, tuple[str, ...], str]]:
    """Return what runs without a mutant: all tests that are listed."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    chunks = [tuple(tests[at : at + CHUNK]) for at in range(0, len(tests), CHUNK)]
    return [(f"(unchanged) {part[0]} ...", None, part, "unchanged") for part in chunks]


def summary(run: Run, mutants: list[Mutant]) -> tuple[list[str], bool]:
    """Return lines on what survived, and whether all is well."""
    failing = [
        test
        for (_, scope), result in run.results.items()
        if scope == "unchanged"
        for test in result["by"].splitlines()
    ]
    lines, counts = [], {"killed": 0, "survived": 0, "error": 0, "not run": 0}
    for mutant in mutants:
        result = run.results.get((mutant.name, "listed"))
        everything = run.results.get((mutant.name, "all"))
        status = "not run" if result is None else result["status"]
        if status == "killed" and set(result["by"].splitlines()) & set(failing):
            status = "error"
        if status == "survived" and everything is not None and everything["status"] == "killed":
            lines.append(f"{mutant.name}: only noticed by {everything['by']}")
            status = "killed"
        counts[status] += 1
        if status != "killed":
            lines.append(f"{mutant.name}: {status}. {mutant.reason}")
    lines += [f"fails without a mutant: {test}" for test in failing]
    lines.append(", ".join(f"{number} {status}" for status, number in counts.items()))
    return lines, counts["killed"] == len(mutants) and not failing


def table(run: Run) -> str:
    """Return the results as a page."""
    lines, _ = summary(run, list(MUTANTS))
    seconds = sum(r["seconds"] for r in run.results.values() if r["scope"] == "listed")
    page = [
        "# Mutants",
        "",
        "Made by `python -m tools.mutants --results FILE --write ...`; do not edit. "
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, which other jobs share. A mutant is "
        "a small fault in the code (`tools/mutants/table.py`); its tests run until one fails.",
        "",
        *(f"- {line}" for line in lines),
        f"- {seconds / 60:.0f} minutes of one core for the listed tests",
        f"- {len(SURVIVED)} survived at df0532d, and are noticed by tests that were written since: "
        + ", ".join(SURVIVED),
        *(f"- retired: {name} ({why})" for name, why in RETIRED.items()),
        "",
        "| mutant | where | what | noticed by | s | commit |",
        "|---|---|---|---|---|---|",
    ]
    for mutant in MUTANTS:
        result = run.results.get((mutant.name, "listed"))
        everything = run.results.get((mutant.name, "all"))
        if result is None:
            continue
        by = (
            result["by"].splitlines()[0].replace("::", " ").replace("tests/", "")
            if result["by"]
            else ""
        )
        if result["status"] != "killed":
            by = f"**{result['status']}**"
            if everything is not None:
                by += f"; of all tests: {everything['by'] or 'none'}"
        cells = (mutant.name, f"`{mutant.where}`", mutant.reason, by.replace("|", "/"))
        page.append(f"| {' | '.join(cells)} | {result['seconds']:.0f} | {result['commit'][:8]} |")
    return "\n".join(page) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants")
    parser.add_argument("--check", action="store_true", help="only see whether mutants fit")
    parser.add_argument("--results", type=Path, help="keep results here, and continue")
    parser.add_argument("--only", action="append", help="mutants with this in their name or place")
    parser.add_argument("--survivors", action="store_true", help="run them against all tests")
    parser.add_argument("--workers", type=int, default=2, help="mutants at the same time")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one mutant")
    parser.add_argument("--write", type=Path, help="write the table to this file, run nothing")
    args = parser.parse_args()
    wrong = problems()
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    if wrong or args.check:
        sys.stdout.write(f"{len(MUTANTS)} mutants, {len(wrong)} problems\n")
        return int(bool(wrong))
    run = Run(args)
    only = args.only or [""]
    mutants = [m for m in MUTANTS if any(text in f"{m.name} {m.where}" for text in only)]
    if args.write:
        if args.results is None:
            parser.error("--write needs --results")
        args.write.write_text(table(run))
        return 0
    if args.survivors:
        left = [
            m
            for m in mutants
            if run.results.get((m.name, "listed"), {}).get("status") == "survived"
        ]
        run.run([(m.name, m, m.tests, "all") for m in left], 1)
    else:
        tasks = [(m.name, m, m.tests, "listed") for m in mutants]
        run.run([*tasks, *unchanged(mutants)], args.workers)
    lines, is_well = summary(run, mutants)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(not is_well)


if __name__ == "__main__":
    raise SystemExit(main())
