# SPDX-License-Identifier: Apache-2.0
"""Compare every multimodal model of transformers with the stock model, and write what was found.

    python -m tools.media_report
    python -m tools.media_report --names llava,qwen3_vl --write docs/support.md

The exit code is 1 if something differs, or if a name is neither served nor refused with a reason.
"""

import argparse
import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import Final

import transformers

from hf_patches.support import MULTIMODAL, Architecture
from tests.parity import media_zoo
from tests.parity.media import KINDS, REFUSED_BATCHES, MediaJob, compare_all
from tests.ranks import RankError
from tools.side_by_side import Pools, run_side_by_side
from tools.support_table import features_of

BEGIN: Final = "<!-- multimodal: begin -->"
END: Final = "<!-- multimodal: end -->"
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-3

# Layouts and algorithms take turns.
_OPTIONS = list(
    itertools.product(("zigzag", "contiguous", "balanced"), ("gather", "ring", "ulysses"))
)


def jobs_of(name: str, turn: int, sizes: list[int]) -> dict[int, list[MediaJob]]:
    """Return the comparisons of a model type, by number of ranks: every kind of batch on each."""
    kinds = [kind for kind in KINDS if kind != "packed" or media_zoo.ENTRIES[name].packs]
    if not media_zoo.takes_text(name):
        kinds.remove("text")
    options = itertools.islice(itertools.cycle(_OPTIONS), turn % len(_OPTIONS), None)
    return {
        size: [
            MediaJob(name, kind, options=(("layout", layout), ("algorithm", algorithm)))
            for kind, (layout, algorithm) in zip(kinds, options, strict=False)
        ]
        for size in sizes
    }


def run(case: tuple[int, str], pools: Pools) -> tuple[float, float, list[str], float]:
    """Return the worst difference of losses and error of a gradient, failures, and seconds."""
    (turn, name), start = case, time.monotonic()
    loss, gradient, failures = 0.0, 0.0, []
    for size, jobs in jobs_of(name, turn, sorted(pools)).items():
        try:
            results = pools[size].run(compare_all, jobs, timeout=300)[0]
        except RankError as error:
            failures.append(f"{size} ranks: {str(error).splitlines()[-1]}")
            continue
        for job, found in zip(jobs, results, strict=True):
            refusal = REFUSED_BATCHES.get((name, job.kind))
            if isinstance(found, str):
                if refusal is None or refusal not in found:
                    failures.append(f"{size} ranks, {job}: {found}")
                continue
            difference = abs(found.loss - found.exact_loss)
            loss, gradient = max(loss, difference), max(gradient, found.worst[1])
            if not (difference < LOSS_LIMIT and found.worst[1] < GRADIENT_LIMIT):
                failures.append(f"{size} ranks, {job}: loss {difference:.1e}, {found.worst}")
    return loss, gradient, failures, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.media_report")
    parser.add_argument("--names", default="", help="model types; all if left out")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks")
    parser.add_argument("--write", type=Path, help="the page with the section to write")
    given = parser.parse_args()
    names = [x for x in given.names.split(",") if x] or sorted(media_zoo.names())
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # of the ranks
    transformers.logging.set_verbosity_error()
    sizes = [int(size) for size in given.ranks.split(",")]
    rows, failed, served = {}, False, []
    for turn, name in enumerate(names):
        known = MULTIMODAL.get(name)
        if known is not None and known.is_served:
            served.append((turn, name))
            continue
        reason = "supported with text only" if known is None else known.refusal
        rows[name] = [name, "no", reason, "", ""]
        _say(f"{name:24} refused: {reason}\n")
    for (_, name), found in run_side_by_side(served, run, sizes):
        loss, gradient, failures, seconds = found
        failed |= bool(failures)
        verdict = f"FAILED: {failures[0]}" if failures else "yes"
        features = f"{features_of(MULTIMODAL[name])}; {_shared(MULTIMODAL[name])}"
        rows[name] = [name, verdict, features, f"{loss:.1e}", f"{gradient:.1e}"]
        _say(f"{name:24} {loss:.1e} {gradient:.1e} {seconds:5.1f}s {' | '.join(failures)[:600]}\n")
    table = [rows[name] for name in names]
    exact = sum(row[1] == "yes" for row in table)
    _say(f"{exact} of {len(table)} exact\n")
    if given.write:
        given.write.write_text(rewrite(given.write.read_text(), table, given.ranks))
    return int(failed)


def _shared(known: Architecture) -> str:
    """Return how ranks share the media of a type."""
    unit = known.media.unit if known.media is not None else ""
    names = {"grids": "images and videos", "frames": "images and frames", "items": "items"}
    return f"{names[unit]} shared" if unit else "media on every rank"


_ABOUT = """\
Images, video and audio: {exact} of the {all} names of `AutoModelForImageTextToText` and
`AutoModelForMultimodalLM` ({refused} refused). Written by
`python -m tools.media_report`, transformers {version}: tiny random models on {ranks} ranks,
with items of several tokens, several per sample or none, across the borders of ranks, of uneven
sizes; towers and projectors are compared too. Every kind of batch ran on each number of ranks
(plain, packed, padded before or after the tokens, without media); layouts and algorithms take
turns. Limits as above.
"""


def rewrite(page: str, rows: list[list[str]], ranks: str) -> str:
    """Return a page with the table of multimodal models between its marks."""
    exact = sum(row[1] == "yes" for row in rows)
    about = _ABOUT.format(
        exact=exact,
        all=len(rows),
        refused=sum(row[1] == "no" for row in rows),
        version=transformers.__version__,
        ranks=ranks.replace(",", ", "),
    )
    titles = ["name", "supported", "media and features, or reason", "worst loss difference"]
    titles.append("worst gradient error")
    table = [titles, ["---"] * len(titles), *rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    section = "\n".join([BEGIN, "## Multimodal models", "", about, *lines, END])
    if BEGIN not in page:
        return f"{page.rstrip()}\n\n{section}\n"
    return re.sub(f"{BEGIN}.*{END}", lambda _: section, page, flags=re.DOTALL)


def kept(path: Path, page: str) -> str:
    """Return a new page with the section of multimodal models that the old one has."""
    old = path.read_text() if path.exists() else ""
    found = re.search(f"{BEGIN}.*{END}", old, flags=re.DOTALL)
    return page if found is None else f"{page.rstrip()}\n\n{found.group()}\n"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
