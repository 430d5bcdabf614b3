"""Models that call SDPA, or stock torch modules, under a step: loss and every gradient."""

import itertools

import pytest

from tests.oracle import errors
from tests.parity.sdpa_models import MODELS, SdpaJob, alone, shared_jobs

pytestmark = pytest.mark.ranks


def check(ranks, cp_size, jobs, timeout=120):
    exact = {kind: alone(kind) for kind in {job.kind for job in jobs}}
    for found in ranks(cp_size).run(shared_jobs, jobs, timeout=timeout):
        for job, part in zip(jobs, found, strict=True):
            assert set(part) == set(exact[job.kind])
            worst = errors(part, exact[job.kind])
            assert max(worst.values()) < 1e-10, (job, worst)


ALL = list(
    itertools.product(
        MODELS, ["gather", "ring", "ulysses"], ["zigzag", "contiguous"], [False, True]
    )
)
# Each model by each algorithm, every other one recomputed.
SOME = [choice for number, choice in enumerate(ALL) if number % 8 in (0, 7)]


@pytest.mark.parametrize(
    ("cp_size", "choices"),
    [(2, SOME), *(pytest.param(size, ALL, marks=pytest.mark.slow) for size in (1, 2, 3, 4))],
    ids=lambda value: str(value) if isinstance(value, int) else str(len(value)),
)
def test_models_are_exact(ranks, cp_size, choices):
    check(ranks, cp_size, [SdpaJob(*choice) for choice in choices])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["whole", "layers"])
def test_compiled_models_are_exact(ranks, compiled):
    jobs = [SdpaJob(kind, compiled=compiled) for kind in MODELS]
    check(ranks, 2, jobs)


@pytest.mark.slow
def test_models_compiled_to_machine_code_are_exact(ranks):
    jobs = [SdpaJob(kind, compiled="layers", backend="inductor") for kind in MODELS]
    check(ranks, 2, jobs, timeout=580)


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_compiled_models_are_exact_on_all_roads(ranks, cp_size):
    choices = itertools.product(
        MODELS, ["gather", "ring"], ["zigzag", "contiguous"], [False, True], ["whole", "layers"]
    )
    check(ranks, cp_size, [SdpaJob(*choice) for choice in choices], timeout=900)
