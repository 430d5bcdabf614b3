"""Cases of `tests/attn/blockwise/test_function.py` on real gloo processes."""

import itertools

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm.transport import GroupTransport
from tests.attn.cases import HEADS, MASKS, attend_rank, make_case, put_together
from tests.oracle import assert_earned, attend_whole, errors

pytestmark = pytest.mark.ranks

ALGORITHMS = ["gather", "ring", "ulysses"]
LAYOUTS = ["zigzag", "contiguous", "balanced"]
GRID = list(itertools.product(ALGORITHMS, LAYOUTS, MASKS, HEADS))
SOME = GRID[::13]  # twice each algorithm with each layout; masks and heads take turns


def grid_case(algorithm, layout, mask, heads, dtype, cp_size=1):
    case = make_case(mask, heads=heads, algorithm=algorithm, layout=layout)
    if algorithm == "ulysses":
        case.algorithm, case.ulysses = "gather", cp_size
    case.inputs = case.inputs.to(dtype)
    return case


def attend_grid(choices, dtype):
    transport = GroupTransport(dist.group.WORLD)
    return [attend_rank(transport, grid_case(*choice, dtype, transport.size)) for choice in choices]


@pytest.mark.parametrize(
    ("cp_size", "choices"),
    [(3, SOME), *(pytest.param(size, GRID, marks=pytest.mark.slow) for size in (1, 2, 3, 4))],
    ids=lambda value: str(value) if isinstance(value, int) else str(len(value)),
)
def test_float64_is_exact(ranks, cp_size, choices):
    results = ranks(cp_size).run(attend_grid, choices, torch.float64)
    for choice, *parts in zip(choices, *results, strict=True):
        case = grid_case(*choice, torch.float64)
        worst = errors(put_together(parts, case), attend_whole(case.inputs, case.mask))
        assert max(worst.values()) < 1e-10, (choice, worst)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions_earn_their_tolerance(ranks, dtype):
    results = ranks(3).run(attend_grid, GRID, dtype)
    for choice, *parts in zip(GRID, *results, strict=True):
        case = grid_case(*choice, dtype)
        same = attend_whole(case.inputs, case.mask)
        exact = attend_whole(case.inputs.to(torch.float64), case.mask)
        assert_earned(put_together(parts, case), same, exact, dtype)


def attend_on_wire(dtype):
    transport = GroupTransport(dist.group.WORLD)
    case = grid_case("gather", "zigzag", "causal", "gqa", dtype)
    case.gradient_wire = "model"
    return attend_rank(transport, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gradients_may_be_added_up_in_the_models_precision(ranks, dtype):
    case = grid_case("gather", "zigzag", "causal", "gqa", dtype)
    found = put_together(ranks(3).run(attend_on_wire, dtype), case)
    exact = attend_whole(case.inputs.to(torch.float64), case.mask)
    ours, theirs = errors(found, exact), errors(attend_whole(case.inputs, case.mask), exact)
    for name in exact:
        assert ours[name] <= 3 * theirs[name] + 4 * torch.finfo(dtype).eps, name
