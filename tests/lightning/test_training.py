"""Training through the strategy equals that of one process with the full global batch."""

from dataclasses import replace

import pytest
import torch

from tests.lightning.jobs import Fit, run_alone, run_fit, worst

pytestmark = pytest.mark.ranks

MESHES = {"dp 1, cp 2": (1, 2), "dp 2, cp 2": (2, 2), "dp 1, cp 4": (1, 4), "dp 1, cp 3": (1, 3)}


def check(ranks, world_size, fit, limit, metric_limit=1e-6):
    exact = run_alone(fit)
    for result in ranks(world_size).run(run_fit, fit):
        difference = worst(result, exact)
        if fit.manual:  # clipped by hand before the hook that writes the norm down
            difference.pop("grad_norms")
        assert difference.pop("metrics") < metric_limit, fit
        assert max(difference.values()) < limit, (fit, difference)


GRID = [(m, a, manual) for m in MESHES for a in (1, 2, 4) for manual in (False, True)]
QUICK = {("dp 2, cp 2", 2, False)}  # others of a kind: test_every_way_of_running_is_exact


@pytest.mark.parametrize(
    ("mesh", "accumulate", "manual"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in GRID],
)
def test_four_steps_equal_those_of_one_process(ranks, mesh, accumulate, manual):
    dp_size, cp_size = MESHES[mesh]
    # Two epochs of two steps; the last window of an epoch holds half as many batches.
    num_microbatches = 2 * accumulate - accumulate // 2
    # Trial runs change nothing; one of the short runs goes without.
    strategy = {"verify_steps": dp_size == 1}
    fit = Fit(dp_size, accumulate, manual, num_microbatches=num_microbatches, strategy=strategy)
    check(ranks, dp_size * cp_size, fit, 1e-5)


CASES = {
    "one rank": (1, Fit(accumulate=3)),
    "clipping by value": (2, Fit(clip_by="value", clip=0.01, accumulate=2)),
    "no clipping": (2, Fit(clip=None, accumulate=2)),
    "parameters on every rank": (2, Fit(accumulate=2, strategy={"parameter_sharding": "none"})),
    "the same over data": (
        4,
        Fit(2, 2, strategy={"parameter_sharding": "none", "verify_steps": False}),
    ),
    "gradients reduced once": (2, Fit(accumulate=4, strategy={"reduce_every_microbatch": False})),
    "the same over data x context": (
        4,
        Fit(2, 4, strategy={"reduce_every_microbatch": False}),
    ),
    "blocks by name": (2, Fit(strategy={"shard_modules": ["Linear", "blocks.*"]})),
    "ring, contiguous": (3, Fit(strategy={"algorithm": "ring", "layout": "contiguous"})),
    "ulysses": (3, Fit(strategy={"algorithm": "ulysses"})),
    "ulysses inside, ring between": (
        4,
        Fit(strategy={"context_parallel_size": (2, 2), "algorithm": "ring"}),
    ),
    "balanced": (
        3,
        Fit(strategy={"layout": "balanced", "balance_window": 5}),
    ),
    "batches sent by the first rank": (2, Fit(strategy={"broadcast_batch": True})),
}


FEW = ("parameters on every rank",)


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_every_way_of_running_is_exact(ranks, name):
    world_size, fit = CASES[name]
    fit = replace(fit, dtype=torch.float64, epochs=1)
    check(ranks, world_size, fit, 1e-12, metric_limit=1e-12)
