"""Where the time of `make test` goes: by phase and by file.

    python -m tools.durations write FOLDER [--write PAGE --title TEXT]

Runs each phase of `make test` once, on a machine that does nothing else, and keeps what pytest and
the clock said in FOLDER; a table is added to PAGE. Times of tests are those of both workers: they
add up to about twice the clock's.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

BIN = Path(sys.executable).parent
NUM_FILES = 40


def phases(folder: Path) -> dict[str, list[str]]:
    """Return the commands of `make test` by phase."""
    pytest = [sys.executable, "-m", "pytest", "-m", "not slow and not gpu"]
    return {
        "ruff check": [f"{BIN}/ruff", "check", "."],
        "ruff format": [f"{BIN}/ruff", "format", "--check", "."],
        "codespell": [f"{BIN}/codespell"],
        "mypy": [f"{BIN}/mypy"],
        "import contracts": [f"{BIN}/lint-imports"],
        "collection, in one process": [*pytest, "--collect-only", "-q"],
        "tests": [*pytest, "-n", "2", "--dist", "worksteal", f"--junitxml={folder}/junit.xml"],
    }


def record(folder: Path) -> None:
    """Run each phase, and write the seconds of the clock and of the processors."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = {}
    for name, command in phases(folder).items():
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with open(folder / "output.txt", "a") as output:
            status = subprocess.run(command, env=environment, stdout=output, stderr=output)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        seconds[name] = [round(time.monotonic() - start, 1), round(cpu, 1), status.returncode]
        print(name, *seconds[name], flush=True)  # noqa: T201
    (folder / "phases.json").write_text(json.dumps(seconds, indent=1))


def table(folder: Path, title: str) -> str:
    """Return the table of a recorded run."""
    seconds = json.loads((folder / "phases.json").read_text())
    cases = list(ElementTree.parse(folder / "junit.xml").iter("testcase"))
    by_file: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for case in cases:
        by_file[case.get("classname", "")] += float(case.get("time", 0))
        numbers[case.get("classname", "")] += 1
    lines = [f"## {title}", "", f"Python {platform.python_version()}, {os.cpu_count()} cores.", ""]
    lines += ["| phase | s | s of processors¹ |", "|---|---|---|"]
    lines += [f"| {name} | {clock:.0f} | {cpu:.0f} |" for name, (clock, cpu, _) in seconds.items()]
    lines += ["", "¹ Without ranks, which a server starts and torch ends.", ""]
    lines += ["| file | tests | s |", "|---|---|---|"]
    shown = by_file.most_common(NUM_FILES)
    lines += [f"| {name.removeprefix('tests.')} | {numbers[name]} | {t:.0f} |" for name, t in shown]
    rest = sum(by_file.values()) - sum(t for _, t in shown)
    lines += [f"| {len(by_file) - len(shown)} others | | {rest:.0f} |"]
    lines += [f"| all | {len(cases)} | {sum(by_file.values()):.0f} |", ""]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.durations", description=__doc__)
    parser.add_argument("action", choices=["write", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path, help="the page to which the table is added")
    parser.add_argument("--title", default="make test")
    given = parser.parse_args()
    if given.action == "write":
        record(given.folder)
    text = table(given.folder, given.title)
    print(text)  # noqa: T201
    if given.write is not None:
        with open(given.write, "a") as page:
            page.write(f"\n{text}")


if __name__ == "__main__":
    main()
