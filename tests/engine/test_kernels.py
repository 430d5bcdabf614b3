import pytest
import torch

from lightning_cp.collectives import LoneTransport
from lightning_cp.engine.kernels.base import Request, Scores
from lightning_cp.engine.kernels.select import select_kernel
from lightning_cp.engine.merge import NEVER
from tests.engine.cases import (
    KERNELS,
    MASKS,
    Case,
    attend_rank,
    build_call,
    make_case,
    put_together,
)
from tests.oracle import assert_earned, attend_whole, errors, make_inputs

CPU = torch.device("cpu")


def run_alone(case):
    return put_together([attend_rank(LoneTransport(), case)], case)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tile_size", [4, 16])
def test_kernels_agree_with_the_oracle_however_they_are_tiled(kernel, mask, tile_size, monkeypatch):
    monkeypatch.setattr(type(KERNELS[kernel]), "tile_size", tile_size)
    case = make_case(mask, kernel=kernel)
    found = run_alone(case)
    assert max(errors(found, attend_whole(case.inputs, case.mask)).values()) < 1e-13


@pytest.mark.parametrize("dims", [(8, 8), (8, 3), (5, 17), (1, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_head_dims_of_keys_and_values_may_differ(kernel, dims):
    inputs = make_inputs(batch=1, heads=(2, 1), length=21, dims=dims, sinks=False, seed=3)
    case = Case(MASKS["window"](1, 21), inputs, kernel=kernel, scale=-0.7)
    found = run_alone(case)
    exact = attend_whole(inputs, case.mask, scale=-0.7)
    assert max(errors(found, exact).values()) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_lower_precisions_earn_their_tolerance(kernel, mask, dtype, monkeypatch):
    monkeypatch.setattr(type(KERNELS[kernel]), "tile_size", 16)
    case = make_case(mask, kernel=kernel, length=61)
    case.inputs = case.inputs.to(dtype)
    found = run_alone(case)
    same = attend_whole(case.inputs, case.mask)
    exact = attend_whole(case.inputs.to(torch.float64), case.mask)
    assert_earned(found, same, exact, dtype)
    assert found["out"].dtype == dtype


@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_that_see_nothing_return_zero_and_never(kernel):
    case = make_case("left padding", kernel=kernel)
    call = build_call(case, LoneTransport())
    block = call.plan.stages[0].block
    inputs = case.inputs
    out, lse = KERNELS[kernel].forward(
        inputs.q[:, :, block.rows], inputs.k, inputs.v, None, block, call.scores
    )
    empty = lse == NEVER
    first = block.rows.start
    for row in (0, 1):
        width = int(case.mask.padding[row].sum())
        assert empty[row].sum(-1).tolist() == [max(0, width - first)] * 4
    assert not out[empty].any()


@pytest.mark.parametrize(
    ("request_", "chosen"),
    [
        (Request(CPU, torch.float32, Scores(1.0)), "cpu"),
        (Request(CPU, torch.float32, Scores(1.0, softcap=30.0)), "reference"),
        (Request(torch.device("meta"), torch.float32, Scores(1.0)), "reference"),
    ],
)
def test_auto_takes_the_first_kernel_that_can(request_, chosen):
    assert select_kernel("auto", request_).name == chosen


def test_a_named_kernel_that_cannot_is_refused():
    request = Request(CPU, torch.float32, Scores(1.0, softcap=30.0))
    with pytest.raises(
        ValueError,
        match=r"kernel='cpu' cannot compute this attention: it has no softcap \(asked: 30.0\). "
        r"Use kernel='auto', or 'reference'",
    ):
        select_kernel("cpu", request)
    with pytest.raises(ValueError, match="it runs on the CPU, and the tensors are on meta"):
        select_kernel("cpu", Request(torch.device("meta"), torch.float32, Scores(1.0)))


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel='magic' is unknown. Use one of 'auto', 'cpu'"):
        select_kernel("magic", Request(CPU, torch.float32, Scores(1.0)))
