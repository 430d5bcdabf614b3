# ruff: noqa: T201
"""`python3 -m tests.gpu [PATH ...]`: all GPU tests, in several processes that share the GPU.

One after the other they take half an hour, most of it compiling and starting ranks. Each process
runs some tests that follow each other in a file, for these share their ranks.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

NUM_WORKERS = 8
NUM_PARTS = {"test_flex": 6, "test_hf": 7, "test_kernels": 3, "test_lightning": 4, "test_nccl": 5}
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-m",
    "gpu",
    "-q",
    "--no-header",
    "-p",
    "no:cacheprovider",
)


def collect(paths: list[str]) -> list[list[str]]:
    """Return the names of the tests, in parts."""
    found = subprocess.run(
        [*PYTEST, "--collect-only", *paths], capture_output=True, text=True, check=False
    )
    names = [line for line in found.stdout.splitlines() if "::" in line]
    if not names:
        sys.exit(found.stdout + found.stderr)
    parts = []
    for file, tests in groupby(names, key=lambda name: name.split("::")[0]):
        listed = list(tests)
        count = min(len(listed), NUM_PARTS.get(Path(file).stem, 1))
        edges = [len(listed) * n // count for n in range(count + 1)]
        parts += [listed[edges[n] : edges[n + 1]] for n in range(count)]
    return parts


def run(names: list[str]) -> tuple[bool, str]:
    """Run some tests; return whether they passed, and what pytest said at its end."""
    start = time.monotonic()
    done = subprocess.run([*PYTEST, *names], capture_output=True, text=True, check=False)
    passed = done.returncode == 0
    file, _, first = names[0].partition("::")
    lines = (done.stdout + done.stderr).strip().splitlines()
    said = "\n".join(lines[-1:] if passed else lines[-80:])
    took = time.monotonic() - start
    return passed, f"{file} from {first}: {took:.0f} s: {said}"


def main() -> None:
    """Run them all; the longest files first, since nothing waits for them then."""
    start = time.monotonic()
    parts = sorted(collect(sys.argv[1:] or ["tests/gpu"]), key=lambda names: "kernels" in names[0])
    all_passed = True
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        for passed, said in pool.map(run, parts):
            all_passed &= passed
            print(said, flush=True)
    number = sum(len(names) for names in parts)
    print(f"{number} tests {'passed' if all_passed else 'ran'} in {time.monotonic() - start:.0f} s")
    sys.exit(not all_passed)


if __name__ == "__main__":
    main()
