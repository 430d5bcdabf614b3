# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face's own context parallelism does in each case, and what ours does.

    python -m tools.trainer_table
    python -m tools.trainer_table --write docs/from-trainer.md

replaces the text between the two marks. Every case runs, on two CPU processes: a whole run of the
trainer with `ParallelismConfig(cp_size=2)`, and one with `context_parallel(trainer, size=2)`, each
compared with one process. accelerate shards on GPUs only; here it is patched to do so on CPUs
(`fsdp_on_cpu`). Where a run ends at torch's attention, which has no context parallelism on CPUs,
the table says in another column what the source shows.
"""

import argparse
import datetime
import functools
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch import Tensor
from transformers import DataCollatorWithFlattening

from tests.hf_patches.trainers import trainer_jobs
from tests.hf_patches.trainers.trainer_jobs import (
    Job,
    Run,
    build_trainer,
    differences,
    fsdp_on_cpu,
    train,
)
from tests.parity.trainer_step import processes
from tests.ranks import RankError, RankPool

BEGIN: Final = "<!-- trainer table: begin -->"
END: Final = "<!-- trainer table: end -->"
_PACKAGES: Final = ("torch", "transformers", "accelerate", "trl")
_LIMIT: Final = 2e-6
_TIME_LIMIT: Final = 300.0


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        title: what is tried.
        job: the run; without us, on one process, it is the reference.
        there: more flags of the run with Hugging Face's context parallelism.
        source: what their source shows, where a run on CPUs does not.
        measure: what is run there, instead of the job; called with it on each of two ranks.
        shows: the value whose difference the table gives; all are compared.
    """

    title: str
    job: Job
    there: tuple[str, ...] = ("fsdp",)
    source: str = ""
    measure: Callable[[Job], str] | None = None
    shows: str = "weights"


@dataclass(frozen=True)
class Failure:
    """An error of a run: its message, and where it was raised."""

    kind: str
    message: str
    where: str

    def __str__(self) -> str:
        first = self.message.split(". ")[0].split("\n")[0].strip()
        said = first if len(first) <= 160 else f"{first[:157]}..."
        return f"{self.kind}: {said} (`{self.where}`)"


def attempt(work: Callable[[Job], Any], job: Job) -> Any:
    """Return what ``work(job)`` returns, or its error."""
    warnings.simplefilter("ignore")
    try:
        return work(job)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
        return Failure(type(error).__name__, str(error), where)


# ---------------------------------------------------------------- what is measured there


@contextmanager
def _trainer_there(job: Job) -> Iterator[Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        processes(),
        fsdp_on_cpu("fsdp" in job.flags),
    ):
        yield build_trainer(job, folder)


def _from_all(value: Any) -> list[Any]:
    found = [None] * dist.group.WORLD.size()
    dist.all_gather_object(found, value)
    return found


def _record_lengths(model: Any) -> list[int]:
    """Return a list that gets the number of tokens of each call of a model."""
    lengths: list[int] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        lengths.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[1])

    model.register_forward_pre_hook(record, with_kwargs=True)
    return lengths


def _shard(trainer: Any) -> None:
    """Shard the model as train() does: without an optimizer accelerate refuses to."""
    trainer.create_optimizer()
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model


def train_there(job: Job) -> str:
    """Train; say how many tokens of a batch the model has got on each rank, and what then came."""
    with _trainer_there(job) as trainer:
        lengths = _record_lengths(trainer.model)
        collate, full = trainer.data_collator, []

        def recorded(rows: Any) -> Any:
            batch = collate(rows)
            full.append(batch["input_ids"].shape[1])
            return batch

        trainer.data_collator = recorded
        found = attempt(lambda _: trainer.train() and "runs", job)
        seen = _from_all(lengths[0] if lengths else 0)
    return f"of a batch of {full[0]} tokens the ranks' models got {_listed(seen)}; then {found}"


def evaluate_there(job: Job) -> str:
    """Evaluate; say how many tokens of a batch the model has got on each rank."""
    with _trainer_there(job) as trainer:
        lengths = _record_lengths(trainer.model)
        _shard(trainer)
        longest = max(len(row["input_ids"]) for row in list(trainer.eval_dataset)[:2])
        found = attempt(lambda _: trainer.evaluate() and "it runs", job)
        seen = _from_all(lengths[0] if lengths else 0)
    return f"of a batch of {longest} tokens the ranks' models got {_listed(seen)}; then {found}"


def predict_there(job: Job) -> str:
    """Predict, without labels; say how many rows come out."""
    with _trainer_there(job) as trainer:
        _shard(trainer)
        rows = [{"input_ids": row["input_ids"]} for row in trainer_jobs.token_rows(4, seed=2)]
        trainer.data_collator = lambda rows: {"input_ids": _ids(rows)}
        found = trainer.predict(rows).predictions
    return f"without labels {len(rows)} rows in, {len(found)} out"


def _ids(rows: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([(row["input_ids"] * 40)[:40] for row in rows])


def batches_there(job: Job) -> str:
    """Say whether context ranks get the same batches of a trainer's loader."""
    with _trainer_there(job) as trainer:
        trainer.accelerator.dataloader_config.dispatch_batches = None  # the default
        rows = [{"input_ids": [number] * 8} for number in range(8)]
        trainer.train_dataset = trainer_jobs.Stream(rows)
        trainer.data_collator = lambda rows: {"input_ids": _ids(rows)}
        batches = [batch["input_ids"][:, 0].tolist() for batch in trainer.get_train_dataloader()]
    seen = _from_all(batches)
    if seen[0] == seen[1]:
        return "the same batches"
    return f"**other rows on each context rank**: {_listed(seen)}"


def schedule_there(job: Job) -> str:
    """Step a prepared scheduler once; say how far it has gone."""
    with processes(), fsdp_on_cpu(True):
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=ParallelismConfig(cp_size=2),
        )
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
        optimizer = accelerator.prepare_optimizer(optimizer)
        schedule = accelerator.prepare_scheduler(schedule)
        parameter.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
        steps = round((1 - schedule.get_last_lr()[0]) * 100)
    return f"one step of training is {steps} steps of the schedule"


def sequence_parallel_there(job: Job) -> str:
    """Train with `sp_size`."""
    with processes():
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))
    return "runs"


def hook_error(kind: str) -> str:
    """Say what the hook that drops masks changes, in one process, without anything else."""
    rows = trainer_jobs.token_rows(2)
    batch = (
        DataCollatorWithFlattening()([dict(row) for row in rows])
        if kind == "flattened"
        else trainer_jobs.padded(rows, side="left")
    )
    model = trainer_jobs.tiny()
    with torch.no_grad():
        exact = model(**batch, use_cache=False).loss
        _attach_context_parallel_hooks(model)
        found = model(**batch, use_cache=False).loss
    error = abs(float(found - exact))
    return f"its hook alone, in one process: loss {float(exact):.3f} becomes {float(found):.3f}" * (
        error > _LIMIT
    )


def _listed(values: list[Any]) -> str:
    return " and ".join(map(str, values))


# ---------------------------------------------------------------- cases

_ATTENTION = "reaches torch's ring attention on GPUs"
_PADDED = Job(flags=("multiple",))

CASES: Final = [
    Case("`Trainer`, right padding", _PADDED, source=_ATTENTION),
    Case(
        "DDP",
        _PADDED,
        there=(),
        source="refused on GPUs: `accelerate/state.py` asks for an FSDP plugin",
    ),
    Case("lengths that are no multiple of 4", Job(), measure=train_there),
    Case("left padding", Job(flags=("left", "multiple")), source="padding is seen: hook"),
    Case("flattening collator", Job(flags=("flattened",)), source="one document: hook"),
    Case("packed, `SFTTrainer`", Job("sft", flags=("packed",))),
    Case(
        "sliding window (Gemma 3)",
        Job(flags=("multiple", "sdpa"), model="gemma3_text"),
    ),
    Case("window and sinks (gpt-oss)", Job(flags=("multiple",), model="gpt_oss")),
    Case("eager attention", Job(flags=("multiple",), model="llama")),
    Case(
        "evaluation, `Trainer`",
        _PADDED,
        source="of a smaller last batch `eval_loss` takes rank 0's part "
        "(`Trainer.evaluation_loop`)",
        measure=evaluate_there,
        shows="eval_loss",
    ),
    Case(
        "evaluation, `SFTTrainer`",
        Job("sft"),
        measure=evaluate_there,
        shows="eval_loss",
    ),
    Case(
        "`predict`",
        _PADDED,
        source="with labels `cp_size` times the rows, of parts (transformers#48842)",
        measure=predict_there,
        shows="predictions",
    ),
    Case("`DPOTrainer`", Job("dpo")),
    Case("`KTOTrainer`", Job("kto")),
    Case("`RewardTrainer`", Job("reward"), source="each part of a row is pooled alone"),
    Case("`GRPOTrainer`", Job("grpo")),
    Case("`RLOOTrainer`", Job("rloo")),
    Case("iterable dataset", Job(flags=("stream",)), measure=batches_there),
    Case(
        "schedule in an accelerate loop",
        Job("accelerate"),
        measure=schedule_there,
        shows="learning_rate",
    ),
    Case(
        "`sp_size` (DeepSpeed), any run",
        _PADDED,
        source="GPUs only; evaluation without it; microbatches weigh equally, however many labels "
        "they have (`deepspeed_sp_compute_loss`)",
        measure=sequence_parallel_there,
    ),
]


# ---------------------------------------------------------------- the table


def compared(found: Run, exact: Run, shows: str) -> str:
    largest = differences(found, exact)
    wrong = {name: x for name, x in largest.items() if not x < _LIMIT}
    if wrong:
        return "wrong: " + ", ".join(f"{name} by {x:.0e}" for name, x in wrong.items())
    return f"exact: {shows.replace('_', ' ')} within {largest[shows]:.0e}"


def _told(found: Any, case: Case) -> str:
    if isinstance(found, Run):
        return compared(found, _reference(case.job), case.shows)
    return str(found)


def _on_two(work: Callable[[Job], Any], job: Job) -> Any:
    """Run on two processes that nobody has used before; what rank 0 has found."""
    pool = RankPool(2)
    try:
        return pool.run(attempt, work, job, timeout=_TIME_LIMIT)[0]
    except RankError as error:
        return "ends in: " + str(error).strip().splitlines()[-1]
    finally:
        pool.stop()


@functools.cache
def _reference(job: Job) -> Run:
    pool = RankPool(1)
    try:
        found: Run = pool.run(train, job)[0]
    finally:
        pool.stop()
    return found


@functools.cache
def _here(job: Job) -> Any:
    return _on_two(train, replace(job, size=2))


def _there(case: Case) -> Any:
    job = replace(case.job, flags=(*case.job.flags, "hf_cp", *case.there))
    return _on_two(case.measure or train, job)


def build_row(case: Case) -> list[str]:
    """Run a case, there and here; return the cells."""
    source = case.source
    if source.endswith("hook"):
        kind = "flattened" if "flattened" in case.job.flags else "left"
        source = f"{source.removesuffix(': hook')}; {hook_error(kind)}"
    return [case.title, _told(_there(case), case), source, _told(_here(case.job), case)]


def build_table(rows: list[list[str]]) -> str:
    """Return the table, and what it was made with.

    Example:
        >>> print(build_table([["DDP", "refused | no", "", "exact"]]).splitlines()[-1])
        | DDP | refused \\| no |  | exact |
    """
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    today = datetime.datetime.now(tz=datetime.UTC).strftime("%d %B %Y").lstrip("0")
    head = ["case", "there, 2 CPU processes", "there, by its source", "here, 2 CPU processes"]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * 4, *cells]]
    return "\n".join([f"{today}, {versions}.", "", *lines])


def rewrite(page: str, table: str) -> str:
    """Return a page with ``table`` between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no marks for the table: write {BEGIN} and {END} into it.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    """Run the cases; the exit status is 1 if one of ours is not exact."""
    parser = argparse.ArgumentParser(prog="python -m tools.trainer_table")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page that has both marks")
    parser.add_argument("--cases", default="", help="only those whose title matches this pattern")
    args = parser.parse_args()
    rows = []
    for case in CASES:
        if re.search(args.cases, case.title):
            rows.append(build_row(case))
            sys.stdout.write(" | ".join(rows[-1]) + "\n")
            sys.stdout.flush()
    if args.write:
        args.write.write_text(rewrite(args.write.read_text(), build_table(rows)))
    return int(not all(row[-1].startswith("exact") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
