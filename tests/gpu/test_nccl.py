"""The engine and the step on several NCCL ranks that share one GPU.

Here, and only here, streams and autograd's device threads are real: recomputation runs on another
thread than forward, and communication is asynchronous.
"""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm.transport import GroupTransport
from tests.attn.cases import MASKS, attend_rank, make_case, put_together
from tests.oracle import assert_earned, attend_whole, errors
from tests.parity import test_lifetime, test_refusals
from tests.parity.batches import BATCHES
from tests.parity.sdpa_models import MODELS, SdpaJob, alone, shared_jobs
from tests.parity.steps import Job, rank_steps, whole_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

ALGORITHMS = ["gather", "ring", "ulysses"]
GRID = list(itertools.product(ALGORITHMS, ["zigzag", "contiguous"], MASKS, ["gqa", "mha"]))
# All of it is proved on CPUs; here each choice is tried once with float64, and once with less.
SIZES = [2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def part_of(choices, index, count):
    """Return one of several parts that have all choices between them."""
    return random.Random(0).sample(choices, len(choices))[index::count]


def grid_case(algorithm, layout, mask, heads, dtype, cp_size=1):
    case = make_case(mask, heads=heads, algorithm=algorithm, layout=layout, kernel="reference")
    if algorithm == "ulysses":
        case.algorithm, case.ulysses = "gather", cp_size
    case.inputs = case.inputs.to(dtype)
    return case


def attend_grid(grid, dtype):
    transport = GroupTransport(dist.group.WORLD)
    return [attend_rank(transport, grid_case(*choice, dtype, transport.size)) for choice in grid]


@pytest.mark.parametrize("cp_size", SIZES)
def test_float64_is_exact(nccl, cp_size):
    grid = part_of(GRID, SIZES.index(cp_size), len(SIZES))
    results = nccl(cp_size).run(attend_grid, grid, torch.float64, timeout=300)
    for choice, *parts in zip(grid, *results, strict=True):
        case = grid_case(*choice, torch.float64)
        worst = errors(put_together(parts, case), attend_whole(case.inputs, case.mask))
        assert max(worst.values()) < 1e-10, (choice, worst)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lower_precisions_earn_their_tolerance(nccl, dtype):
    grid = part_of(GRID, DTYPES.index(dtype), len(DTYPES))
    results = nccl(4).run(attend_grid, grid, dtype, timeout=300)
    for choice, *parts in zip(grid, *results, strict=True):
        case = grid_case(*choice, dtype)
        same = attend_whole(case.inputs, case.mask)
        exact = attend_whole(case.inputs.to(torch.float64), case.mask)
        assert_earned(put_together(parts, case), same, exact, dtype)


HOWS = [
    {},
    {"backward_outside": True},
    {"checkpointing": "reentrant"},
    {"checkpointing": "non-reentrant"},
    {"checkpointing": "non-reentrant", "backward_outside": True},
    {"checkpointing": "reentrant", "backward_outside": True, "bound_mask": True},
]


@pytest.fixture(scope="module")
def steps():
    """Return batches and what one device makes of each."""
    names = ["document_ids", "cu_seq_lens", "left_padded", "short", "no_label"]
    rows = {name: BATCHES[name](3) for name in names}
    return rows, {name: whole_step([rows[name]]) for name in names}


WAYS = [
    (2, {"algorithm": "gather"}),
    (2, {"algorithm": "ring"}),
    (2, {"algorithm": "ulysses"}),
    (4, {"algorithm": "gather"}),
    (4, {"algorithm": "ring"}),
    (4, {"algorithm": "gather", "ulysses_size": 2}),
    (4, {"algorithm": "ring", "ulysses_size": 2}),
]


@pytest.mark.parametrize(("cp_size", "options"), WAYS, ids=str)
def test_steps_are_exact_also_when_recomputed(nccl, steps, cp_size, options):
    rows, exact = steps
    part = (WAYS.index((cp_size, options)) + cp_size // 4) % 3
    todo = part_of(list(itertools.product(rows, HOWS)), part, 3)
    jobs = [Job([rows[name]], options, device="cuda", **how) for name, how in todo]
    results = nccl(cp_size).run(rank_steps, jobs, timeout=300)
    for (name, how), *found in zip(todo, *results, strict=True):
        for part in found:
            worst = errors(part, exact[name])
            assert max(worst.values()) < 1e-10, (name, how, worst)


def test_data_parallel_beside_it(nccl):
    rows = [BATCHES["document_ids"](5), BATCHES["right_padded"](6)]
    exact = whole_step(rows)
    for (found,) in nccl(4).run(rank_steps, [Job(rows, device="cuda")], timeout=120):
        assert max(errors(found, exact).values()) < 1e-10


@pytest.mark.parametrize(
    "name", ["length 0", "other values on another rank", "two sequence lengths"]
)
def test_all_ranks_refuse_a_bad_batch(nccl, name):
    batches, options, pattern = test_refusals.STEP_CASES[name]
    for message in nccl(2).run(test_refusals.step_message, batches, options, timeout=60):
        assert test_refusals.re.search(pattern, message), message


@pytest.mark.parametrize(
    "where",
    [
        "attention, no step, reentrant",
        "attention, another step, reentrant",
        "loss, no step, reentrant",
    ],
)
def test_recompute_outside_its_step_is_refused(nccl, where):
    for said in nccl(2).run(test_lifetime.recompute_elsewhere, where, "cuda", timeout=60):
        assert "use_reentrant=False" in said


@pytest.mark.parametrize("cp_size", [2, 4])
def test_models_that_call_sdpa_are_exact_also_when_recomputed(nccl, cp_size):
    choices = list(itertools.product(MODELS, ALGORITHMS, ["zigzag", "contiguous"], [False, True]))
    jobs = [SdpaJob(*choice, device="cuda") for choice in part_of(choices, cp_size // 4, 2)]
    if cp_size == 2:
        jobs += [SdpaJob(kind, compiled="whole", device="cuda") for kind in MODELS]
    exact = {kind: alone(kind) for kind in MODELS}
    for found in nccl(cp_size).run(shared_jobs, jobs, timeout=300):
        for job, part in zip(jobs, found, strict=True):
            worst = errors(part, exact[job.kind])
            assert max(worst.values()) < 1e-10, (job, worst)
