"""Run Lightning's tests of ModelParallelStrategy against ContextParallelStrategy.

    make conformance LIGHTNING_TESTS=/path/to/pytorch-lightning/tests/tests_pytorch
    python -m tools.conformance /path/to/pytorch-lightning/tests/tests_pytorch -k checkpoint

Needs a checkout of Lightning at the tag of the installed version: its tests are not on PyPI, and
not in this repository. They are copied to a temporary folder, where "cuda" becomes "cpu", and run
one by one, each in separate processes: first with Lightning's strategy, then with ours. A test that
fails with both is not counted. The exit code is 1 if a test fails only with ours.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
_FILES = ("strategies/test_model_parallel.py", "strategies/test_model_parallel_integration.py")
_TO_CPU = (
    (r'torch\.device\("cuda", self\.local_rank\)', 'torch.device("cpu")'),
    (r'"(cuda|gpu)"', '"cpu"'),
)
_TIME_LIMIT = 120.0

_EXCLUDED = {
    "test_setup_device_mesh": "asserts a 2-D mesh; ours has three axes",
    "test_tensor_parallel": "asserts parameters on the tensor axis; ours is of size 1",
    "test_fsdp2_tensor_parallel": "asserts parameters on a 2-D mesh",
}
_BY_DESIGN = {
    "test_validate_device_mesh_dimensions": (
        r"data_parallel_size=\d+ times context_parallel_size=\d+",
        "a ValueError with the fix, instead of a RuntimeError",
    ),
    "test_configure_model_required": (
        r"strategy\.shard_mesh",
        "configure_model() need not be overridden: setup() goes on to shard the model",
    ),
    "test_meta_device_materialization": (
        r"strategy\.shard_mesh",
        "setup() shards the model, but the test starts no processes",
    ),
    "test_save_checkpoint_path_exists": (
        r"Expected 'rmtree' to be called once",
        "the test mocks shutil, but checkpoints are replaced by a rename",
    ),
    "test_load_unknown_checkpoint_type": (
        r"'Mock' object is not iterable",
        "the model is read before the checkpoint, and is a Mock here",
    ),
}
"""Tests that must fail in this way, and why."""


@dataclass(frozen=True, slots=True)
class Test:
    """A test of Lightning: its address, and whether Lightning runs it in separate processes."""

    address: str
    standalone: bool

    @property
    def id(self) -> str:
        return self.address.partition("::")[2]

    @property
    def name(self) -> str:
        return self.id.partition("[")[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a test: passed, failed, skipped, too long, or not run; and the reason."""

    word: str
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance")
    parser.add_argument("tests", type=Path, help="tests/tests_pytorch of a checkout of Lightning")
    parser.add_argument("-k", default="", help="run tests that pytest selects by this")
    parser.add_argument("--time-limit", type=float, default=_TIME_LIMIT, help="seconds per test")
    args = parser.parse_args()
    if not (args.tests / _FILES[0]).is_file():
        parser.error(f"{args.tests / _FILES[0]} does not exist. Use .../tests/tests_pytorch.")
    home = Path(tempfile.mkdtemp(prefix="lightning-conformance-"))
    copy_tests(args.tests, home)
    _write(f"output of each test: {home / 'logs'}\n\n")
    results = []
    for test in collect(home, args.k):
        theirs = run(test, "stock", home, args.time_limit)
        ours = Outcome("excluded", _EXCLUDED.get(test.name, ""))
        if not ours.why:
            ours = judge(test, theirs, run(test, "ours", home, args.time_limit))
        results.append((test, theirs, ours))
        _write(f"{test.id:72}  {theirs.word:9}  {ours.word:9}  {ours.why or theirs.why}\n")
    words = [ours.word for *_, ours in results]
    _write("\n" + ", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words)) + "\n")
    return int("failed" in words or "too long" in words or not words)


def copy_tests(source: Path, home: Path) -> None:
    """Copy the tests and what they import, and replace GPUs by CPUs."""
    package = home / "tests_pytorch"
    for folder in (".", "strategies"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        for name in ("__init__.py", "conftest.py"):
            if (source / folder / name).is_file():
                shutil.copy(source / folder / name, package / folder)
    shutil.copytree(source / "helpers", package / "helpers")
    for name in _FILES:
        text = (source / name).read_text()
        for pattern, replacement in _TO_CPU:
            text = re.sub(pattern, replacement, text)
        (package / name).write_text(text)
    (home / "test_temp").mkdir()  # their package creates it, and then reports it as a leftover
    (home / "logs").mkdir()


def collect(home: Path, select: str) -> list[Test]:
    """Return all tests; pytest collects standalone tests only with an environment variable."""
    tests: dict[str, Test] = {}
    for standalone in (True, False):
        chosen = ["-k", select] if select else []
        command = _command("stock", "--collect-only", *chosen, *_paths())
        done = subprocess.run(
            command, cwd=home, env=_environment(home, standalone), capture_output=True, text=True
        )
        if done.returncode not in (0, 5):  # 5: none
            raise SystemExit(done.stdout + done.stderr)
        lines = [line for line in done.stdout.splitlines() if "::" in line]
        for address in lines:
            tests.setdefault(address, Test(address, standalone))
    return sorted(tests.values(), key=lambda test: test.standalone)


def run(test: Test, strategy: str, home: Path, time_limit: float) -> Outcome:
    """Run one test in separate processes, and kill those that remain."""
    log = home / "logs" / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', test.id)}.{strategy}.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(strategy, test.address),
            cwd=home,
            env=_environment(home, test.standalone),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(time_limit)
            _wait_for_others(process.pid)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    why = next((line[1:].strip() for line in text.splitlines() if line.startswith("E  ")), "")
    if code is None:
        return Outcome("too long", why)
    if code or re.search(r"\b\d+ (failed|error)", text):  # also of a rank that is not the first
        return Outcome("failed", why or f"exit code {code}")
    return Outcome("passed" if re.search(r"\b1 passed", text) else "skipped")


def judge(test: Test, theirs: Outcome, ours: Outcome) -> Outcome:
    """Separate expected failures, and those of Lightning's strategy, from ours."""
    if ours.word in ("passed", "skipped"):
        return ours
    if theirs.word != "passed":
        return Outcome("no base", f"fails with Lightning's strategy: {theirs.why}")
    expected, why = _BY_DESIGN.get(test.name, ("(?!)", ""))
    return Outcome("differs", why) if re.search(expected, ours.why) else ours


def _wait_for_others(group: int, seconds: float = 10.0) -> None:
    """Wait until the other ranks have ended."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.1)


def _paths() -> list[str]:
    return [f"tests_pytorch/{name}" for name in _FILES]


def _command(strategy: str, *arguments: str) -> list[str]:
    pytest = [sys.executable, "-m", "pytest", "-qs", "-o", "console_output_style=classic"]
    plugins = ["-p", "no:cacheprovider", "-p", "tools.conformance.plugin"]
    return [*pytest, *plugins, "--strategy", strategy, *arguments]


def _environment(home: Path, standalone: bool) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), str(home)]),
        # A name that their check for leftover files ignores.
        "PYTHONPYCACHEPREFIX": str(home / "__pycache__"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PL_RUN_STANDALONE_TESTS": str(int(standalone)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
