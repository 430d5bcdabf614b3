# ruff: noqa: T201
"""`python3 -m tests.gpu [--workers N] [PATH ...]`: all GPU tests, in processes that share the GPU.

One after the other they take half an hour, most of it compiling and starting ranks. Each process
runs some tests that follow each other in a file, for these share their ranks. The logs of those
that failed, or did not end, stay in $OUT or the current folder. Kernels of all processes run side
by side where NVIDIA's multi-process service is there; by turns they take a third longer.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from threading import Lock

NUM_WORKERS = 9
# Whole models beside their stock runs: more of them at once do not fit into the GPU's memory.
LARGE, NUM_LARGE_WORKERS = "test_hf", 3
NUM_PARTS = {
    "test_flex": 6,
    "test_habits": 4,
    "test_hf": 5,
    "test_kernels": 3,
    "test_lightning": 6,
    "test_meshes": 4,
    "test_nccl": 5,
}
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-m",
    "gpu",
    "-v",
    "--durations=6",
    "--no-header",
    "-p",
    "no:cacheprovider",
)


@contextmanager
def side_by_side() -> Iterator[None]:
    """Let all processes share one context of the GPU, if they can."""
    control = shutil.which("nvidia-cuda-mps-control")
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    if control is None or any(name in os.environ for name in names):
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shared = os.environ | dict.fromkeys(names, folder)
        subprocess.run([control, "-d"], env=shared, check=False, timeout=30)
        try_it = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
        try:
            subprocess.run(try_it, env=shared, capture_output=True, check=True, timeout=60)
            os.environ |= dict.fromkeys(names, folder)
        except subprocess.SubprocessError:
            print("The multi-process service does not work here: processes take turns.", flush=True)
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
            # One process's wrong access, or its end amid a transfer of NCCL, ends all others too.
            # Only this log says which process it was.
            server = Path(folder) / "server.log"
            if server.exists() and "fatal GPU error" in server.read_text(errors="replace"):
                print("The multi-process service ended all processes; see server.log.", flush=True)
                shutil.copy(server, Path(os.environ.get("OUT", ".")))
            # Not by waiting for clients: a test that was killed may have left some.
            subprocess.run([control], input=b"quit -t 5\n", env=shared, check=False, timeout=30)


def collect(paths: list[str]) -> list[list[str]]:
    """Return the names of the tests, in parts."""
    command = [*PYTEST, "--collect-only", "-qq", *paths]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
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
    file, _, first = names[0].partition("::")
    start = time.monotonic()
    log = Path(os.environ.get("OUT", ".")) / f"{Path(file).stem}-{time.monotonic_ns()}.log"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # references are computed on CPUs, beside others'
    with log.open("w") as output:
        done = subprocess.run([*PYTEST, *names], stdout=output, stderr=output, env=env, check=False)
    lines = log.read_text().strip().splitlines()
    said = lines[-1:]
    passed = done.returncode == 0 and not any("skipped" in line for line in said)
    said += [line for line in lines if line.startswith(("FAILED", "ERROR")) or "s call  " in line]
    if passed:
        log.unlink()
    return passed, f"{file} from {first}: {time.monotonic() - start:.0f} s: " + "\n    ".join(said)


def main() -> None:
    """Run them all; those that take longest first, since nothing waits for them then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", default=["tests/gpu"], metavar="PATH")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, metavar="N")
    args = parser.parse_args()
    start = time.monotonic()
    parts = collect(args.paths)
    total = sum(len(names) for names in parts)
    order = [
        "test_lightning",
        "test_flex",
        "test_offload",
        "test_compile",
        "test_nccl",
        "test_kernels",
    ]
    parts.sort(key=lambda names: ([*(n in names[0] for n in order), True]).index(True))
    large = deque(names for names in parts if LARGE in names[0])
    others = deque(names for names in parts if LARGE not in names[0])
    lock = Lock()

    def work(*queues: deque[list[str]]) -> int:
        num_passed = 0
        while True:
            with lock:
                names = next((queue.popleft() for queue in queues if queue), None)
            if names is None:
                return num_passed
            passed, said = run(names)
            num_passed += len(names) if passed else 0
            print(said, flush=True)

    with side_by_side(), ThreadPoolExecutor(args.workers) as pool:
        first = [pool.submit(work, large, others) for _ in range(NUM_LARGE_WORKERS)]
        rest = [pool.submit(work, others) for _ in range(args.workers - NUM_LARGE_WORKERS)]
    all_passed = sum(done.result() for done in first + rest) == total
    print(f"{total} tests {'passed' if all_passed else 'ran'} in {time.monotonic() - start:.0f} s")
    sys.exit(not all_passed)


if __name__ == "__main__":
    main()
