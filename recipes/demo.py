# SPDX-License-Identifier: Apache-2.0
"""`make demo`: two CPU ranks train on sharded sequences; one process trains on full sequences.

Runs the commands that a user would run, prints them, and writes `demo/report.md` (`report.py`). No
download: the model is small and random, the text is Python's standard library. Exit status 1 if a
command fails, including the verification of the first batch, or if the two loss curves differ.
"""

import argparse
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_cp import Mask
from lightning_cp.geometry.layout import build_layout
from recipes.report import Generated, Run, largest_difference, read_run, write_report

RANKS: Final = 2
TOLERANCE: Final = 1e-4
PROMPT: Final = "def __init__(self"
LAPTOP: Final = Path(__file__).parent / "configs" / "laptop.yaml"


# ---------------------------------------------------------------- callbacks and configs


class Recorder(Callback):
    """Records the tokens and visible pairs of each rank, and the library's log.

    Args:
        folder: of ``balance.json`` and ``library.log``.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._log: logging.Handler | None = None
        self._tokens: list[int] = []
        self._work: dict[str, list[int]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the library's log to a file, on rank 0."""
        if not trainer.is_global_zero or self._log is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = logging.FileHandler(self._folder / "library.log", mode="w")
        logging.getLogger("lightning_cp").addHandler(self._log)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count tokens and visible pairs, also those of a contiguous layout."""
        strategy: Any = trainer.strategy
        step = strategy.last_step
        layout = step.layout
        contiguous = build_layout("contiguous", seq_len=layout.seq_len, cp_size=layout.cp_size)
        self._tokens = _add(self._tokens, [step.batch_size * layout.local_len] * layout.cp_size)
        for name, work in (
            (layout.name, step.work_by_rank()),
            ("contiguous", contiguous.work(step.bounds(Mask(causal=True)))),
        ):
            self._work[name] = _add(self._work.get(name, []), work)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the counts, on rank 0."""
        if self._log is None:
            return
        logging.getLogger("lightning_cp").removeHandler(self._log)
        self._log.close()
        self._log = None
        balance = {"tokens": self._tokens, "work": self._work}
        (self._folder / "balance.json").write_text(json.dumps(balance))


def _add(total: list[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(total or [0] * len(more), more, strict=True)]


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
    recorder = {"class_path": "recipes.demo.Recorder", "init_args": {"folder": str(folder)}}
    bar = {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"}  # in one line
    callbacks[:0] = [bar, recorder]
    return config


# ---------------------------------------------------------------- the demo


class Commands:
    """Runs commands, prints them, and records their times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, title: str, *args: str, num_threads: int = 1) -> None:
        """Run ``python ARGS``; exit if it fails.

        Args:
            title: a short description.
            args: of the interpreter.
            num_threads: of each process.
        """
        command = shlex.join(["python", *args])
        print(f"\n== {title}\n$ {command}", flush=True)
        start = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run([sys.executable, *args], check=False, env=environment)
        if done.returncode:
            sys.exit(_fail(f"`{command}` ended with status {done.returncode}; see above."))
        self.seconds[command] = time.monotonic() - start


def generate(folder: Path) -> Generated:
    """Generate some tokens with the exported model, with transformers only."""
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
    prompt_len = prompt["input_ids"].shape[1]
    return Generated(
        model=type(model).__name__,
        prompt=PROMPT,
        text=tokenizer.decode(ids[0, prompt_len:]),
        num_tokens=ids.shape[1] - prompt_len,
    )


def run_demo(out: Path, *, steps: int, length: int) -> int:
    """Train twice, export, generate, report; return the exit status."""
    start = time.monotonic()
    print(
        f"A small Llama learns Python's standard library, byte by byte: {steps} steps on sequences "
        f"of {length} tokens.\nEach of {RANKS} CPU ranks holds {length // RANKS} tokens of every "
        "sequence; then one process does the same on full sequences."
    )
    _clean(out)
    commands = Commands()
    configs = {}
    for cp_size in (RANKS, 1):
        configs[cp_size] = out / f"cp{cp_size}.yaml"
        built = build_config(out, cp_size=cp_size, steps=steps, length=length)
        configs[cp_size].write_text(yaml.safe_dump(built, sort_keys=False))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    fit = ("-m", "recipes", "fit", "--config")
    commands.run(
        f"{RANKS} ranks shard every sequence; first they verify a step against the stock model",
        *(*torchrun, *fit, str(configs[RANKS])),
    )
    commands.run(
        "one process, full sequences, for comparison", *fit, str(configs[1]), num_threads=RANKS
    )
    model = out / "model"
    commands.run(
        "the checkpoint is exported to a Hugging Face folder",
        *("-m", "hf_patches", "export"),
        *(str(out / f"cp{RANKS}" / "checkpoints" / "last.ckpt"), str(model)),
    )
    print("\n== transformers loads the folder and generates", flush=True)
    generated = generate(model)
    print(f"{generated.prompt!r} -> {generated.text!r}")
    sharded, single = read_run(out / f"cp{RANKS}"), read_run(out / "cp1")
    seconds = time.monotonic() - start
    report = write_report(
        out,
        sharded=sharded,
        single=single,
        generated=generated,
        commands=commands.seconds,
        seconds=seconds,
        tolerance=TOLERANCE,
        length=length,
    )
    return _conclude(report, sharded, single, seconds)


def _clean(out: Path) -> None:
    """Remove the output of a former demo, except packed samples."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (f"cp{RANKS}", "cp1", "model"):
        shutil.rmtree(out / name, ignore_errors=True)


def _conclude(report: Path, sharded: Run, single: Run, seconds: float) -> int:
    """Print the result; return the exit status."""
    difference, step = largest_difference(sharded, single)
    print(
        f"\nLargest difference of the two loss curves: {difference:.1e}, at step {step} of "
        f"{len(single.losses)}.\nReport: {report}  ({seconds:.0f} s)"
    )
    if not sharded.verified:
        return _fail("The log of the ranks does not report that the first batch was verified.")
    if not difference <= TOLERANCE:  # so that NaN fails too
        return _fail(f"The loss curves differ by more than {TOLERANCE}.")
    return 0


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
