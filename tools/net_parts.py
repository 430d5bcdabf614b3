"""The parts of the net: the command that runs each, and the files on which its result depends."""

import sys
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
# Targets set up .venv; here it is the environment that runs this command. `make test` would set it
# up all the same: it calls make, which hands --assume-old to nobody.
MAKE = f"make --assume-old=.venv/.installed-dev BIN={BIN}"

NEVER = ":!lightning_cp/torch_api/prototype.py :!lightning_cp/__main__.py"
"""What tests alone run."""
NO_LIGHTNING = f":!lightning_cp/lightning :!lightning_cp/planner {NEVER}"
NO_ATTENTION = f":!lightning_cp/attn :!lightning_cp/sequence {NEVER}"
RANKS = "constraints.txt benchmarks/measure.py tests/doors.py tests/ranks.py tests/strategies.py "
RANKS += "tests/torch_names.py"
FITS = "tests/lightning/jobs.py tests/oracle.py tests/tiny.py"
SIDE_BY_SIDE = f"{RANKS} tools/side_by_side.py"
# Of tests/parity what is no test.
PARITY = "tests/parity/[!t]* tests/parity/tr*"


@dataclass(frozen=True)
class Part:
    """A part of the net.

    Args:
        command: by which it is run; `{python}`, `{results}` and `{lightning_tests}` are filled in.
        covers: what its result depends on, as pathspecs of git: files, folders, and with `:!` what
            is left out. Conservative: all that it imports, but for what it imports and never runs.
        minutes: on two cores.
    """

    name: str
    command: str
    covers: str
    minutes: int


PARTS = (
    Part("test", f"{MAKE} lint pytest", ". :!benchmarks/results/net.jsonl", 15),
    # The fast tests read the other pages: what they find does not need the slow ones.
    Part(
        "test-all",
        f"{MAKE} test-all",
        "lightning_cp hf_patches recipes benchmarks/*.py examples tests :!tests/gpu tools "
        "README.md docs/evaluation.md docs/flex.md docs/from-torch.md docs/hugging-face.md "
        "docs/lightning.md docs/loops.md Makefile constraints.txt "
        "pyproject.toml",
        130,
    ),
    Part(
        "parity",
        "{python} -m tools.parity --results {results}",
        f"lightning_cp {NO_LIGHTNING} hf_patches {PARITY} {SIDE_BY_SIDE} "
        "tools/parity.py tools/media_report.py tools/support_table.py",
        90,
    ),
    Part(
        "media",
        "{python} -m tools.media_report",
        f"lightning_cp {NO_LIGHTNING} hf_patches {PARITY} {SIDE_BY_SIDE} "
        "tools/media_report.py tools/support_table.py",
        30,
    ),
    Part(
        "cells",
        "{python} -m tools.cells --results {results}",
        f"lightning_cp :!lightning_cp/attn/flex {NEVER} hf_patches :!hf_patches/trainer* "
        f":!hf_patches/mixers {SIDE_BY_SIDE} {FITS} tests/lightning/mesh_runs.py "
        "tests/parity/steps.py tools/cells.py",
        60,
    ),
    # How ranks end: a step is as good as any other, and its numbers are compared elsewhere.
    Part(
        "faults",
        "{python} -m tools.faults --results {results}",
        f"lightning_cp {NO_ATTENTION} {RANKS} {FITS} "
        "tests/lightning/scripts tests/parity/steps.py tools/faults",
        60,
    ),
    Part(
        "scripts",
        "{python} -m tools.user_scripts --results {results}",
        f"lightning_cp {NEVER} hf_patches :!hf_patches/mixers {PARITY} {SIDE_BY_SIDE} {FITS} "
        "tests/hf_patches/trainers/trainer_jobs.py tools/user_scripts",
        20,
    ),
    Part(
        "mutants",
        "{python} -m tools.mutants --results {results}",
        "lightning_cp hf_patches recipes tests :!tests/gpu :!tests/tools tools/mutants "
        "constraints.txt pyproject.toml",
        30,
    ),
    Part(
        "golden",
        "{python} -m tools.golden compare {results}",
        f"lightning_cp {NEVER} hf_patches :!hf_patches/trainer* :!hf_patches/mixers {PARITY} "
        f"{RANKS} {FITS} tests/attn/cases.py tests/attn/flex/cases.py "
        "tests/parity/test_chunked_loss.py tests/parity/test_flex.py tools/golden.py",
        20,
    ),
    Part(
        "gpu",
        "{python} -m tests.gpu",
        "lightning_cp hf_patches benchmarks/*.py :(glob)tests/*.py tests/gpu tests/attn "
        "tests/hf_patches/test_compiled.py tests/lightning tests/parity tests/scripts "
        "constraints.txt pyproject.toml",
        10,
    ),
    Part(
        "conformance",
        "{python} -m tools.conformance {lightning_tests}",
        f"lightning_cp {NO_ATTENTION} constraints.txt tools/conformance",
        15,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
