"""Runs of transformers' Trainer under context parallelism: models x batches x settings.

A covering selection: every pair of values of two settings is in a row, not every combination.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from tests.hf_patches.trainers.trainer_jobs import Job, differences, train

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SETTINGS = {
    "model": ("llama", "gemma3_text", "gpt_oss", "qwen3_moe:aux", "qwen3_next", "bamba"),
    # Rows with padding, documents by position ids or by document ids, an iterable dataset
    "batch": ("right", "left", "flattened", "document_ids", "stream"),
    "ranks": ((2, 2), (3, 3), (4, 2)),  # processes, context ranks
    "accumulation": (3, 1),
    "weights": ("replicated", "fsdp"),
    "trained": ("full", "lora"),
    "memory": ("kept", "checkpointing"),
}
# Stock models that do not keep documents apart which position ids describe: recurrences go on, and
# eager attention of gpt-oss sees them all.
_LEAKS = ("gpt_oss", "qwen3_next", "bamba")


def covering(settings):
    """Return rows, each with one value per setting, that hold every pair of values."""
    names = list(settings)

    def pairs(row):
        return set(itertools.combinations(zip(names, row, strict=True), 2))

    every = {row: pairs(row) for row in itertools.product(*settings.values())}
    missing = set().union(*every.values())
    rows, used = [], Counter()
    while missing:  # of rows that add as many pairs, the one whose values are rarest
        rows.append(
            max(every, key=lambda row: (len(every[row] & missing), -sum(used[x] for x in row)))
        )
        missing -= every[rows[-1]]
        used.update(rows[-1])
    return [dict(zip(names, row, strict=True)) for row in rows]


ROWS = covering(SETTINGS)


def test_every_pair_of_settings_is_in_a_row():
    for (first, values), (second, others) in itertools.combinations(SETTINGS.items(), 2):
        found = {(row[first], row[second]) for row in ROWS}
        assert found == set(itertools.product(values, others))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_a_run_is_that_of_fewer_processes(ranks, row):
    num_ranks, size = row["ranks"]
    flags = [row["batch"], row["weights"], row["trained"], row["memory"]]
    flags += ["every_batch"] * (row["accumulation"] == 1)
    job = Job(size=size, flags=tuple(flags), model=row["model"])
    reference = replace(job, size=0)
    # Stock models do not know document_ids: the reference has a row for each document.
    is_leaking = row["batch"] == "flattened" and row["model"] in _LEAKS
    is_alone = row["batch"] == "document_ids" or is_leaking
    if is_alone:
        extra = ("even", "no_predictions")
        job = replace(job, flags=(*flags, *extra))
        alone = ["right" if flag in ("document_ids", "flattened") else flag for flag in flags]
        reference = replace(reference, flags=(*alone, *extra))
    exact = ranks(num_ranks // size).run(train, reference)[0]
    found = ranks(num_ranks).run(train, job)[0]
    if is_alone:  # padding is counted too
        found.counts = exact.counts = ()
        for run in (found, exact):
            for entry in run.log:
                entry.pop("num_input_tokens_seen", None)
    largest = differences(found, exact)
    assert {name: x for name, x in largest.items() if not x < 2e-6} == {}
    assert max(entry["grad_norm"] for entry in exact.log if "grad_norm" in entry) > 0.1
    if row["batch"] != "stream":
        assert "eval_loss" in largest
