# SPDX-License-Identifier: Apache-2.0
"""Compare every architecture that is served with the stock model, and write what was found.

    make parity
    python -m tools.parity --names llama,gpt_oss --ranks 2
    python -m tools.parity --write docs/support.md
    python -m tools.parity --results parity.jsonl --write docs/support.md    # in several runs

The exit code is 1 if something differs, or if a model that is not served is let through.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from benchmarks.measure import describe
from hf_patches import enable
from hf_patches.support import ARCHITECTURES, Architecture
from tests.parity import zoo
from tests.parity.hf import KINDS, Job, compare_all
from tests.ranks import RankError
from tools import media_report
from tools.side_by_side import Pools, run_side_by_side
from tools.support_table import BEGIN, END, count_models, support_table

LAYOUTS = ("zigzag", "balanced", "contiguous")
ALGORITHMS = ("gather", "ring", "ulysses")
OPTIONS = [
    (("layout", layout), ("algorithm", algorithm))
    for layout, algorithm in itertools.product(LAYOUTS, ALGORITHMS)
]
HEADS = ("masked", "token", "sequence", "question")
_BY_ROW = ("sequence", "question")  # one answer per row: rows of several documents have none

LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-3
DOUBLE_LIMIT = 1e-9
_TIME_LIMIT = 900.0

# Together they have everything that attention may have.
RECOMPUTED = (
    "llama",
    "llama:dynamic",
    "gpt2",
    "opt",
    "roberta",
    "bart",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "llama4_text",
    "deepseek_v3",
    "diffllama",
    "mixtral:aux",
    "lfm2",
    "qwen3_next",
    "kimi_linear",
    "bamba",
    "minimax",
    "bloom",
    "gpt_neo",
    "xglm",
    "deepseek_v32",
    "glm_moe_dsa",
    "doge",
    "minimax_m3_vl_text",
)

# What leaves a reentrant checkpoint by a side door has no gradient in the stock model either: the
# scores of routers, and keys that later layers share.
_NOT_REENTRANT = ("gemma3n_text", "mixtral:aux")

# Layers that get no mask do not know their step when they are recomputed: this raises.
_WITHOUT_MASK = ("lfm2", "qwen3_next", "kimi_linear", "bamba", "minimax")
# What a served model refuses: by name and kind of batch, a part of the message.
REFUSED_BATCHES = {
    ("cpmant", "packed"): "takes no mask of padding",
    ("minimax_m3_vl_text", "left"): "padding before tokens",
    ("minimax_m3_vl_text:aux", "left"): "padding before tokens",
}

_CHECKPOINTING = {None: "", False: " recomputed", True: " recomputed, reentrant"}
_UNKNOWN = Architecture(refusal="it has not been compared yet")


@dataclass(frozen=True)
class Case:
    """What is compared in one go.

    Args:
        part: of the page.
        name: of the model in the zoo.
        detail: what sets it apart from other cases of this name.
        jobs: by number of ranks.
        loss_limit: on the difference of the losses.
        limit: on the error of each gradient.
    """

    part: str
    name: str
    detail: str
    jobs: dict[int, list[Job]]
    loss_limit: float = LOSS_LIMIT
    limit: float = GRADIENT_LIMIT

    def __str__(self) -> str:
        return f"{self.name} {self.detail}".strip()

    @property
    def key(self) -> tuple[str, ...]:
        """Return what tells this case from others, the ranks included."""
        return (self.part, self.name, self.detail, *map(str, self.jobs))


@dataclass(frozen=True)
class Result:
    """The worst that was found in a case, what is wrong with it, and commit and versions."""

    case: Case
    loss: float
    gradient: float
    parameter: str
    seconds: float
    failures: list[str]
    where: str = ""


@dataclass(frozen=True)
class Refusal:
    """A model that is not served: why, and whether `enable` says so."""

    name: str
    reason: str
    checked: bool
    failure: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.parity")
    parser.add_argument("--names", default="", help="model types or variants; all if left out")
    parser.add_argument("--parts", default="", help=f"of {', '.join(_PARTS)}; all if left out")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument(
        "--results", type=Path, help="JSON lines: cases that are there are not run again"
    )
    given = parser.parse_args()
    names = [name for name in given.names.split(",") if name]
    sizes = [int(size) for size in given.ranks.split(",")]
    parts = given.parts.split(",") if given.parts else list(_PARTS)
    for part in parts:
        if part not in _PARTS:
            parser.error(f"--parts {part}: it is none of {', '.join(_PARTS)}.")
    cases = [case for case in all_cases(sizes) if _is_asked(case.name, names)]
    cases = [case for case in cases if case.part in parts]
    unserved = [pair for pair in unserved_models() if _is_asked(pair[0], names)]
    found = {case.name for case in cases} | {name for name, _ in unserved}
    for name in names:
        if not any(_is_asked(other, [name]) for other in found):
            parser.error(f"{name} is not a model of transformers {transformers.__version__}.")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # of the ranks
    transformers.logging.set_verbosity_error()
    refusals = [refuse(name, head) for name, head in unserved]
    for refusal in refusals:
        if refusal.failure:
            _say(f"{refusal.name}: FAILED\n    {refusal.failure}\n")
    known = load(given.results, cases) if given.results else {}
    rest = [case for case in cases if case.key not in known]
    for result in run(rest, sizes):
        known[result.case.key] = result
        if given.results:
            save(given.results, result)
    results = [known[case.key] for case in cases]
    seconds = sum(result.seconds for result in results)
    summary = summarize(results, refusals, seconds)
    _say(f"\n{summary}\n")
    if given.write:
        text = page(results, refusals, [given.names, given.parts], sizes, summary)
        given.write.write_text(media_report.kept(given.write, text))
    failed = any(result.failures for result in results) or any(r.failure for r in refusals)
    return int(failed)


def _is_asked(name: str, names: list[str]) -> bool:
    return not names or name in names or name.partition(":")[0] in names


# ---------------------------------------------------------------- what is compared


def _known(name: str) -> Architecture:
    return ARCHITECTURES.get(name.partition(":")[0], _UNKNOWN)


def is_served(name: str) -> bool:
    return name not in zoo.UNBUILDABLE and _known(name).is_served


def all_cases(sizes: list[int]) -> list[Case]:
    """Return every case; the architectures with all combinations, the rest with each its turn."""
    cases = []
    for name in filter(is_served, zoo.causal_names()):
        pairs = itertools.product(KINDS, OPTIONS)
        jobs = [Job(name, kind, options=options) for kind, options in pairs]
        cases.append(Case("causal", name, "", dict.fromkeys(sizes, jobs)))
    for turn, name in enumerate(filter(is_served, zoo.VARIANTS)):
        jobs = {size: _spread(name, KINDS, turn + size // 2) for size in sizes}
        cases.append(Case("variant", name, "", jobs))
    pairs = ((head, name) for head in HEADS for name in zoo.head_names(head) if is_served(name))
    for turn, (head, name) in enumerate(pairs):
        kinds = [kind for kind in KINDS if kind != "packed" or head not in _BY_ROW]
        options = {"head": head, "dtype": torch.float64}
        jobs = {size: _spread(name, kinds, turn + size // 2, **options) for size in sizes}
        cases.append(Case("head", name, head, jobs, DOUBLE_LIMIT, DOUBLE_LIMIT))
    for turn, name in enumerate(filter(is_served, zoo.causal_names())):
        jobs = {min(sizes): _spread(name, KINDS, turn, trained_by="trainer")}
        cases.append(Case("trainer", name, "by Trainer", jobs))
    recomputed = [name for name in RECOMPUTED if ":" not in name or name in zoo.VARIANTS]
    for turn, name in enumerate(filter(is_served, recomputed)):
        cases.append(_recomputed(name, turn, sizes))
    return cases


def _recomputed(name: str, turn: int, sizes: list[int]) -> Case:
    ways = (False,) if name in _NOT_REENTRANT + _WITHOUT_MASK else (False, True)
    jobs = {
        size: [
            job
            for i, way in enumerate(ways)
            for job in _spread(name, ("packed", "left"), turn + size // 2 + i, checkpointing=way)
        ]
        for size in sizes
    }
    return Case("recomputed", name, "recomputed", jobs)


def _spread(name: str, kinds: Iterable[str], turn: int, **options) -> list[Job]:
    """Return one job per kind of batch; layouts and algorithms take turns."""
    return [
        Job(name, kind, options=OPTIONS[(turn + i) % len(OPTIONS)], **options)
        for i, kind in enumerate(kinds)
    ]


def run(cases: list[Case], sizes: list[int]) -> Iterator[Result]:
    """Run the cases, and say what each one found."""
    width = max((len(str(case)) for case in cases), default=0)
    _say(f"{len(cases)} cases on {_listed(sizes)} ranks\n\n")
    _say(f"{'':9}  {'name':{width}}  {'loss':>7}  {'gradient':>8}  seconds  worst parameter\n")
    for number, (case, result) in enumerate(run_side_by_side(cases, _run_case, sizes), 1):
        yield result
        _say(
            f"{number:>4}/{len(cases):<4}  {case!s:{width}}  {result.loss:7.1e}  "
            f"{result.gradient:8.1e}  {result.seconds:7.1f}  {result.parameter}\n"
        )
        for failure in result.failures:
            _say(f"    FAILED {failure}\n")


def _run_case(case: Case, pools: Pools) -> Result:
    loss, worst, failures = 0.0, ("", 0.0), []
    start = time.monotonic()
    for size, jobs in case.jobs.items():
        try:
            results = pools[size].run(compare_all, jobs, timeout=_TIME_LIMIT)[0]
        except RankError as error:
            failures.append(f"{size} ranks: {_last(str(error))}")
            continue
        for job, found in zip(jobs, results, strict=True):
            where = f"{size} ranks, {job}{_CHECKPOINTING[job.checkpointing]}: "
            refusal = REFUSED_BATCHES.get((job.name, job.kind))
            if isinstance(found, str) and refusal is not None and refusal in found:
                continue
            if isinstance(found, str):
                failures.append(where + found)
                continue
            if refusal is not None:
                failures.append(f"{where}not refused")
            difference = abs(found.loss - found.exact_loss)
            loss, worst = max(loss, difference, key=_badness), max(worst, found.worst, key=_second)
            if not (difference < case.loss_limit and found.worst[1] < case.limit):
                parameter, error = found.worst
                failures.append(f"{where}loss {difference:.1e}, {parameter} {error:.1e}")
    if failures and not worst[0]:
        loss, worst = math.nan, ("", math.nan)
    seconds = time.monotonic() - start
    return Result(case, loss, worst[1], worst[0], seconds, failures, _where())


@functools.cache
def _where() -> str:
    """Return the commit and the versions that a result is from."""
    commit = describe(torch.device("cpu"))["commit"]
    return (
        f"commit {commit.removesuffix('-dirty')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )


def load(path: Path, cases: list[Case]) -> dict[tuple[str, ...], Result]:
    """Return results of earlier runs, by the key of their case; failures are run again."""
    by_key = {case.key: case for case in cases}
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        values = json.loads(line)
        key = tuple(values.pop("case"))
        if key in by_key and not values["failures"]:
            results[key] = Result(by_key[key], **values)
    return results


def save(path: Path, result: Result) -> None:
    """Add a result to those of earlier runs."""
    values = {name: value for name, value in vars(result).items() if name != "case"}
    with path.open("a") as file:
        file.write(json.dumps({"case": result.case.key, **values}) + "\n")


def _badness(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _second(pair: tuple[str, float]) -> float:
    return _badness(pair[1])


def _last(text: str) -> str:
    """Return the first line of an error, and its last, which says what it was."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))


# ---------------------------------------------------------------- what is refused


def unserved_models() -> list[tuple[str, str]]:
    """Return names that are not served, each with a head to build it with."""
    names = {name: "causal" for name in zoo.causal_names() if not is_served(name)}
    for head in HEADS:
        for name in zoo.head_names(head):
            if not is_served(name):
                names.setdefault(name, head)
    return sorted(names.items())


def refuse(name: str, head: str) -> Refusal:
    """Give `enable` a model that is not served."""
    if name in zoo.UNBUILDABLE:
        return Refusal(name, zoo.UNBUILDABLE[name], checked=False)
    reason = _known(name).refusal
    model = zoo.build_model(name, head=head)
    try:
        enable(model)
    except ValueError as error:
        # A part of a model has a type of its own, which the table need not know.
        said = reason if model.config.model_type in ARCHITECTURES else "is not among the"
        failure = "" if said in str(error) else f"The message does not say why: {error}"
        return Refusal(name, reason, checked=True, failure=failure)
    except Exception as error:
        return Refusal(name, reason, checked=True, failure=f"{type(error).__name__}: {error}")
    return Refusal(name, reason, checked=True, failure="enable() lets it through.")


# ---------------------------------------------------------------- what is written


def summarize(results: list[Result], refusals: list[Refusal], seconds: float) -> str:
    """Return the figures: how many, how exact, how long."""
    lines = []
    for part, title in _PARTS.items():
        of_part = [result for result in results if result.case.part == part]
        if not of_part:
            continue
        exact = [result for result in of_part if not result.failures]
        loss = max((result.loss for result in of_part), key=_badness)
        worst = max(of_part, key=lambda result: _badness(result.gradient))
        lines.append(
            f"{title}: {len(of_part)} compared, {len(exact)} within the limits; worst loss "
            f"difference {loss:.1e}, worst gradient error {worst.gradient:.1e} ({worst.case})."
        )
    checked = [refusal for refusal in refusals if refusal.checked]
    refused = [refusal for refusal in checked if not refusal.failure]
    num_jobs = sum(len(jobs) for result in results for jobs in result.case.jobs.values())
    lines += [
        f"Not supported: {len(checked)}, of which {len(refused)} are refused as expected.",
        f"Not built: {len(refusals) - len(checked)}.",
        f"{num_jobs} comparisons in {seconds / 60:.1f} minutes.",
    ]
    return "\n".join(lines)


_PARTS = {
    "causal": "Causal language models",
    "variant": "Variants",
    "head": "Heads",
    "recomputed": "Activation checkpointing",
    "trainer": "Steps of transformers' Trainer",
}


def page(
    results: list[Result],
    refusals: list[Refusal],
    only: list[str],
    sizes: list[int],
    summary: str,
) -> str:
    """Return the page: what was compared, and one row for each."""
    said = "" if not any(only) else f" Only a part was run: {', '.join(filter(None, only))}."
    parts = {part: [r for r in results if r.case.part == part] for part in _PARTS}
    measured = ["worst loss difference", "worst gradient error"]
    both = ["name", "supported", "features", "caveats", *measured]
    served = [
        [result.case.name, _verdict(result), *_about(result.case.name), *_figures(result)]
        for result in parts["causal"]
    ]
    refused = [
        [r.name, f"FAILED: {r.failure}" if r.failure else _SERVED[r.checked], r.reason]
        for r in refusals
    ]
    plain = {
        part: [[*_split(result.case), _verdict(result), *_figures(result)] for result in of_part]
        for part, of_part in parts.items()
    }
    return "\n".join(
        [
            "# Supported models, and how exact they are",
            "",
            _SUPPORTED,
            count_models(ARCHITECTURES),
            "",
            BEGIN,
            support_table(ARCHITECTURES),
            END,
            "",
            "## How exact",
            "",
            f"Written by `make parity` on {datetime.date.today()}.{said} Results are from:",
            "",
            *(f"- {where}" for where in dict.fromkeys(r.where for r in results)),
            "",
            _PREAMBLE.format(ranks=_listed(sizes)),
            *(f"- {line}" for line in summary.splitlines()),
            "",
            "## Causal language models",
            "",
            *_table(both, served),
            _MORE,
            "## Refused",
            "",
            '`enable()` refused a tiny model of each; "not built": no model of this type can be '
            "built here.",
            "",
            *_table(["name", "supported", "reason"], refused),
            "## Heads",
            "",
            f"In float64, within {DOUBLE_LIMIT:.0e}. Layouts and algorithms take turns over the "
            "kinds of batches; heads with one output per sequence do not take packed ones.",
            "",
            *_table(["name", "head", "supported", *measured], plain["head"]),
            "## Variants",
            "",
            "What a config can change: auxiliary losses of routers, kinds of RoPE, windows, both "
            "directions. Layouts and algorithms take turns over the kinds of batches.",
            "",
            *_table(["name", "variant", "supported", *measured], plain["variant"]),
            "## Activation checkpointing",
            "",
            f"Packed and left-padded sequences, with and without `use_reentrant`; only without it: "
            f"{', '.join(_NOT_REENTRANT)}. There the stock model itself loses the gradient of "
            "auxiliary losses, and of keys that layers share.",
            "",
            *_table(["name", "variant", "supported", *measured], plain["recomputed"]),
            "## Steps of transformers' Trainer",
            "",
            f"`context_parallel(trainer, size={min(sizes)})`, then one `training_step` with "
            "full batches of each kind. Layouts and algorithms take turns.",
            "",
            *_table(["name", "variant", "supported", *measured], plain["trainer"]),
        ]
    )


_SUPPORTED = """\
`hf_patches.enable(model)` makes a model of transformers, plain or with LoRA, run inside steps with
its own masks; in Lightning the strategy calls it ([hugging-face.md](hugging-face.md)). Heads:
causal and masked language models, token and sequence classification, question answering. Inputs are
text; models that take images, video or audio are in [a table of their own](#multimodal-models).
Model types that are not in the table are refused, and so are encoder-decoder models (of `bart` and
similar models the decoder alone runs). The table is written by
`python -m tools.support_table docs/support.md`, the rest of this page by `make parity`.
"""

_MORE = """\
Other runs of the same comparisons, on 17 November 2026:

- All 174 names on 3 ranks, by a step of transformers' Trainer with each kind of batch (696
  comparisons): worst loss difference 1.4e-06, worst gradient error 8.6e-05 (marian).
- 28 names with convolutions, recurrences, indexers or written-out attention on 3 ranks too, with
  every layout and algorithm (1,050 comparisons): worst gradient error 5.1e-05 (mvp).
  minimax_m3_vl_text the same on 2, 3 and 4 ranks: 1.7e-06.
- On 19 November 2026, the seven names that are replicated up to their head, bloom, codegen, falcon,
  gptj, gpt_neox_japanese and mpt with every layout and algorithm on 2, 3 and 4 ranks (1,404
  comparisons): worst gradient error 3.5e-05 (big_bird).
- Of these, one name of each kind: `verify`, validation, predictions and export. 200 steps on 4
  ranks that wait at random: qwen3_next, nemotron_h, lfm2, deepseek_v32. One of each kind on NCCL
  ranks of an H200.
- Two kinds of batches are refused: packed ones by cpmant, left-padded ones by minimax_m3_vl_text.
- Stock deepseek_v4, qwen4_exp, recurrent_gemma, rwkv and xlstm let padding at the start of a
  sequence into their results: compared with padding at the end. Indexers and compressors whose
  scores tie choose by the length of the row: the models have enough heads, and documents that are
  short, so that scores do not tie.
- transformers 5.17: the tests of these layers pass.
"""

_PREAMBLE = f"""\
These are tiny random models (a few layers, 64 channels, 97 words, sequences of 61 tokens) on CPU:
they show that the algebra is correct, not that large models train well, and say nothing about GPU
kernels.

Each model ran on {{ranks}} gloo ranks and was compared with the stock model in one process, with
eager attention (question answering: SDPA) and each packed document as a sequence of its own: the
loss, and the gradient of every parameter, as the norm of the difference over the norm. Sequences
are plain, packed with documents, left-padded and right-padded; layouts zigzag, balanced and
contiguous; algorithms gather, ulysses and ring. In float32, unless stated otherwise, the loss must
be within {LOSS_LIMIT:.0e} and each gradient within {GRADIENT_LIMIT:.0e}. Most of the largest errors
are those of key biases, whose gradient is zero except for rounding.
"""


def _verdict(result: Result) -> str:
    return "FAILED: " + result.failures[0] if result.failures else "yes"


_SERVED = {True: "no", False: "not built"}


def _about(name: str) -> list[str]:
    known = _known(name)
    return [known.features, known.caveat]


def _figures(result: Result) -> list[str]:
    return [f"{result.loss:.1e}", f"{result.gradient:.1e}"]


def _split(case: Case) -> list[str]:
    base, _, variant = case.name.partition(":")
    return [base, case.detail if case.part == "head" else variant]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def _listed(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
