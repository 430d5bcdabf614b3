"""Let each fault happen under each launcher, and write what was found.

    python -m tools.faults --write docs/faults.md
    python -m tools.faults --only "SIGTERM" --launcher script
    python -m tools.faults --results faults.jsonl --write docs/faults.md    # in several runs

CPU ranks on this machine, two per job; "disk full" mounts a small disk, and needs root. The column
of Ray Train needs `pip install 'ray[train]'`, and is left out otherwise. Takes an hour on an idle
machine of 2 cores. The exit code is 1 if something is wrong in a cell.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path

import lightning
import torch

from tools.faults.matrix import FAULTS, HEARTBEAT, LAUNCHERS, LIMIT, RAY_TRAIN, Cell, run

INTRO = """\
# Faults of a run

Made by `python -m tools.faults --write docs/faults.md`; do not edit. {date}, {processors} CPU
cores ({machine}, shared with other jobs), Python {python}, torch {torch}, Lightning {lightning},
Ray {ray}.

Two CPU ranks (gloo) train a tiny model, with a checkpoint every second step; in step 5 one of them
fails. In each cell: the seconds from the fault until all processes are gone (at most
{limit:.0f}), and the step of the last checkpoint, which was loaded afterwards, with its
checksums. The output names the cause, unless the cell says otherwise.

"""
NOTES = f"""
- **two torchrun agents**: as two nodes, on this machine, with one rank each.
- **Ray Train**: two workers of a `TorchTrainer` with `RayLightningEnvironment`, in a Ray that the
  script starts with `ray.init()`. Gone are the workers, the script, and the Ray that it has
  started; a cluster that runs already is yours, and stays. The cause is in the error that
  `TorchTrainer.fit` raises in the script, under `[Rank 1 Error Snippet]`, or in what the workers
  print, which Ray repeats there.
- **SIGKILL**: the rank is named by the watchdog or by Ray, or the process by torchrun or by
  Lightning's launcher, whichever is first; rank 0 also by the store, which ends with it in a
  script.
- **a stopped process**: with `heartbeat_timeout` {HEARTBEAT:.0f} s; 60 s by default. The seconds
  are those until the other rank is gone. A stopped process cannot end: here it was continued then,
  and ended. (torchrun would kill it 30 s after the other; by its code, not measured.)
- **SIGTERM**: after the step in progress all ranks save `last.ckpt` and end with exit code 143;
  with Ray the script ends with 1, and `SIGTERMException: 143` is the error of both workers.
- **unequal loaders**, **a damaged shard**: refused on all ranks when a second `fit` starts.
- **disk full**: a disk of 8 MB that fills up; the save fails on all ranks.
- Not here: GPUs and NCCL, real nodes, a cluster of Ray.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--results", type=Path, help="keep results here, and continue")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--launcher", choices=list(LAUNCHERS), action="append")
    args = parser.parse_args()
    launchers = args.launcher or list(LAUNCHERS)
    if RAY_TRAIN in launchers and importlib.util.find_spec("ray") is None:
        launchers.remove(RAY_TRAIN)
        sys.stderr.write(f"{RAY_TRAIN} is left out: it needs pip install 'ray[train]'\n")
    cells = read(args.results)
    for fault in FAULTS:
        for launcher in launchers:
            if args.only in fault.name and (fault.name, launcher) not in cells:
                cell = run(fault, launcher)
                cells[fault.name, launcher] = cell
                sys.stdout.write(f"{fault.name:36} {launcher:20} {show(cell)} {cell.problem}\n")
                sys.stdout.flush()
                if args.results and not cell.problem:
                    with args.results.open("a") as file:
                        file.write(json.dumps(cell.json()) + "\n")
    if args.write:
        args.write.write_text(table(cells))
    problems = sum(bool(cell.problem) for cell in cells.values())
    sys.stdout.write(f"{len(cells)} cells, {problems} problems\n")
    return int(problems > 0)


def read(file: Path | None) -> dict[tuple[str, str], Cell]:
    if file is None or not file.exists():
        return {}
    found = [Cell(**json.loads(line)) for line in file.read_text().splitlines()]
    return {(cell.fault, cell.launcher): cell for cell in found}


def show(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    if cell.problem:
        return f"**{cell.problem.splitlines()[0]}**"
    return f"{cell.seconds:.0f} s, step {cell.step}"


def table(cells: dict[tuple[str, str], Cell]) -> str:
    """Return the page."""
    intro = INTRO.format(
        date=datetime.date.today().isoformat(),
        processors=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        torch=torch.__version__.partition("+")[0],
        lightning=lightning.__version__,
        ray=importlib.metadata.version("ray") if importlib.util.find_spec("ray") else "missing",
        limit=LIMIT,
    )
    lines = [["one rank meets", *LAUNCHERS], ["---"] * (1 + len(LAUNCHERS))]
    for fault in FAULTS:
        lines.append([fault.name, *(show(cells.get((fault.name, name))) for name in LAUNCHERS)])
    return intro + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n" + NOTES


if __name__ == "__main__":
    sys.exit(main())
