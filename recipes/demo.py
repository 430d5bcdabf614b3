# SPDX-License-Identifier: Apache-2.0
"""`make demo`: two CPU ranks train on sharded sequences; one process trains on full sequences.

Runs the commands that a user would run, prints them, and writes `demo/report.md`. No download: the
model is small and random, the text is Python's standard library. Exit status 1 if a command fails,
including the verification of the first batch, or if the two loss curves differ.
"""

import argparse
import csv
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from recipes.report import table

RANKS: Final = 2
TOLERANCE: Final = 1e-4
PROMPT: Final = "def __init__(self"
_BY_POSITION: Final = "val_loss_at/"
LAPTOP: Final = Path(__file__).parent / "configs" / "laptop.yaml"


Metrics = Mapping[str, Mapping[int, float]]
"""Values of a run by name and step."""


def build_config(out: Path, *, cp_size: int, steps: int, length: int) -> dict[str, Any]:
    """Return the laptop config for a run of the demo; the two runs differ in the ranks only."""
    folder = out / f"cp{cp_size}"
    config: dict[str, Any] = yaml.safe_load(LAPTOP.read_text())
    config["seed_everything"] = 0
    config["model"] |= {"warmup_steps": max(1, min(10, steps // 4))}
    config["data"]["init_args"] |= {"seq_len": length, "cache_dir": str(out / "samples")}
    config["monitor"] |= {
        "verify_first_batch": cp_size > 1,
        "verify_max_len": length,
        "every_n_steps": max(1, min(5, steps // 3)),
        "position_edges": [length // 8, length // 4, length // 2],
    }
    config["trainer"]["strategy"]["init_args"] |= {"context_parallel_size": cp_size}
    config["trainer"] |= {
        "devices": cp_size,
        "max_steps": steps,
        "limit_train_batches": steps,
        "val_check_interval": steps,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(folder), "name": "", "version": "log"},
        },
    }
    (saver,) = callbacks = config["trainer"]["callbacks"]
    checkpoints = str(folder / "checkpoints")
    saver["init_args"] |= {"dirpath": checkpoints, "every_n_train_steps": steps}
    bar = {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}  # in one line
    callbacks.insert(0, bar)
    return config


def run(title: str, *args: str, num_threads: int = 1) -> None:
    """Print and run ``python ARGS``; exit if it fails.

    Args:
        title: a short description.
        args: of the interpreter.
        num_threads: of each process.
    """
    command = shlex.join(["python", *args])
    print(f"\n== {title}\n$ {command}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run([sys.executable, *args], check=False, env=environment)
    if done.returncode:
        sys.exit(_fail(f"`{command}` ended with status {done.returncode}; see above."))


def generate(folder: Path) -> str:
    """Continue the prompt with the exported model, with transformers only."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    set_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    # Sampled: the most likely byte of Python's sources is always a space.
    ids = model.generate(
        **prompt,
        max_new_tokens=60,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.pad_token_id,
    )
    return str(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :]))


def read_metrics(folder: Path) -> Metrics:
    """Read what Lightning's CSV logger has written; the last value of a step counts."""
    metrics: dict[str, dict[int, float]] = {}
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    metrics.setdefault(name, {})[int(row["step"])] = float(value)
    return metrics


def largest_difference(
    sharded: Mapping[int, float], single: Mapping[int, float]
) -> tuple[float, int]:
    """Return the largest difference of two loss curves, and its step, counted from 1.

    NaN if one has no loss, or if their steps differ.

    Example:
        >>> largest_difference({0: 2.0, 1: 1.0}, {0: 2.0, 1: 1.5})
        (0.5, 2)
    """
    steps = sorted({*sharded, *single})
    gaps = [abs(sharded.get(step, math.nan) - single.get(step, math.nan)) for step in steps]
    # NaN counts as the largest.
    worst = max(range(len(gaps)), key=lambda i: (math.isnan(gaps[i]), gaps[i]), default=None)
    return (math.nan, 0) if worst is None else (gaps[worst], steps[worst] + 1)


def write_report(page: Path, sharded: Metrics, single: Metrics, *, text: str) -> str:
    """Write the numbers of both runs, and return the line that compares them.

    Args:
        page: the file.
        sharded: metrics of the run on several ranks.
        single: of the run on one process.
        text: that the exported model has generated.
    """
    losses, others = sharded["train_loss"], single["train_loss"]
    difference, step = largest_difference(losses, others)
    verdict = (
        f"Largest difference of the two loss curves: {difference:.1e}, at step {step} of "
        f"{len(others)}."
    )
    # Seven of them, with the first and the last.
    some = sorted({round(i * (len(others) - 1) / 6) for i in range(7)})
    places = [name for name in single if name.startswith(_BY_POSITION)]
    places.sort(key=lambda name: int(name.removeprefix(_BY_POSITION).partition("-")[0]))
    here, there = ({name: list(x[name].values())[-1] for name in places} for x in (sharded, single))
    parts = [
        f"# Demo: {RANKS} CPU ranks shard every sequence, compared with one process",
        f"{verdict} Allowed is {TOLERANCE:.0e}: float32 sums in another order round differently, "
        "and training accumulates the difference.",
        "## Training loss",
        _side_by_side("step", ((str(i + 1), losses.get(i, math.nan), others[i]) for i in some)),
        "## Validation loss by position in the sequence",
        _side_by_side(
            "tokens", ((x.removeprefix(_BY_POSITION), here[x], there[x]) for x in places)
        ),
        "## The exported model",
        f"`model/` was loaded by transformers, and continued `{PROMPT}`:",
        f"```\n{PROMPT}{text}\n```",
    ]
    page.write_text("\n\n".join(parts) + "\n")
    return verdict


def _side_by_side(name: str, rows: Iterable[tuple[str, float, float]]) -> str:
    cells = ([x, f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}"] for x, a, b in rows)
    return table([name, f"{RANKS} ranks", "one process", "difference"], cells)


def run_demo(out: Path, *, steps: int, length: int) -> int:
    """Train twice, export, generate, report; return the exit status."""
    start = time.monotonic()
    print(
        f"A small Llama learns Python's standard library, byte by byte: {steps} steps on sequences "
        f"of {length} tokens.\nEach of {RANKS} CPU ranks holds {length // RANKS} tokens of every "
        "sequence; then one process does the same on full sequences."
    )
    _clean(out)
    configs = {}
    for cp_size in (RANKS, 1):
        configs[cp_size] = out / f"cp{cp_size}.yaml"
        built = build_config(out, cp_size=cp_size, steps=steps, length=length)
        configs[cp_size].write_text(yaml.safe_dump(built, sort_keys=False))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    fit = ("-m", "recipes", "fit", "--config")
    run(
        f"{RANKS} ranks shard every sequence; first they verify a step against the stock model",
        *(*torchrun, *fit, str(configs[RANKS])),
    )
    run("one process, full sequences, for comparison", *fit, str(configs[1]), num_threads=RANKS)
    model = out / "model"
    run(
        "the checkpoint is exported to a Hugging Face folder",
        *("-m", "lightning_cp", "export"),
        *(str(out / f"cp{RANKS}" / "checkpoints" / "last.ckpt"), str(model)),
    )
    print("\n== transformers loads the folder and generates", flush=True)
    text = generate(model)
    print(f"{PROMPT!r} -> {text!r}")
    sharded, single = (read_metrics(out / f"cp{cp_size}" / "log") for cp_size in (RANKS, 1))
    page = out / "report.md"
    verdict = write_report(page, sharded, single, text=text)
    print(f"\n{verdict}\nReport: {page}  ({time.monotonic() - start:.0f} s)")
    difference, _ = largest_difference(sharded["train_loss"], single["train_loss"])
    if not difference <= TOLERANCE:  # so that NaN fails too
        return _fail(f"The loss curves differ by more than {TOLERANCE}.")
    return 0


def _clean(out: Path) -> None:
    """Remove the output of a former demo, except packed samples."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (f"cp{RANKS}", "cp1", "model"):
        shutil.rmtree(out / name, ignore_errors=True)


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 1


def _at_least(least: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give an integer of at least {least}")
        return int(text)

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if all numbers agree."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.demo",
        description="Train on two CPU ranks that shard sequences, and compare with one process.",
    )
    parser.add_argument("--steps", type=_at_least(2), default=60, help="(60)")
    parser.add_argument(
        "--length", type=_at_least(64), default=2048, help="tokens per sequence (2048)"
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder to write (demo)")
    args = parser.parse_args(argv)
    return run_demo(args.out, steps=args.steps, length=args.length)


if __name__ == "__main__":
    raise SystemExit(main())
