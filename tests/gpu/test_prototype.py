"""Scripts for torch's prototype, as they are and with another import, on two NCCL ranks.

torch needs a GPU, lengths that divide, and backward inside the context; so all of it is so here.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_cp
from lightning_cp.geometry.mask import Mask
from tests.oracle import assert_earned, attend_whole, errors, make_inputs
from tests.scripts.run import run_alone, run_shared
from tests.torch_names import prototype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

NAMES = ("out", "dq", "dk", "dv")


def whole_inputs():
    given = {"batch": 2, "heads": (8, 4), "length": 1024, "dims": (64, 64), "sinks": False}
    return make_inputs(**given, seed=3).to(torch.bfloat16)


def attend(names, rotate, *, backward_inside=True, buffers_require_grad=False):
    """Do what torch's tutorial and its tests do with their names, or with ours.

    The function is called by its module's name: torch's patch does not see it under another.
    """
    mesh = init_device_mesh("cuda", (dist.group.WORLD.size(),))
    names.set_rotate_method(rotate)
    inputs = whole_inputs().on(torch.device("cuda"))
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    leaves = [x.requires_grad_(buffers_require_grad) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with names.context_parallel(mesh, buffers=[*leaves, dout], buffer_seq_dims=[2] * 4):
            if not buffers_require_grad:
                for x in leaves:
                    x.requires_grad = True
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            slope = dout.clone()
            if backward_inside:
                out.backward(slope)
            if not buffers_require_grad:
                parts = [x.grad for x in leaves]
                grads = names.context_parallel_unshard(mesh, parts, [2] * 3)
                for x in leaves:
                    x.requires_grad, x.grad = False, None
        if not backward_inside:
            out.backward(slope)
        (whole,) = names.context_parallel_unshard(mesh, [out.detach()], [2])
    names.set_rotate_method("allgather")
    if buffers_require_grad:
        grads = [x.grad for x in leaves]
        for grad in grads:
            dist.all_reduce(grad)
    assert torch.equal(q.detach().cpu(), whole_inputs().q)
    return {name: x.cpu() for name, x in zip(NAMES, (whole, *grads), strict=True)}


def attend_both(rotate):
    return (
        attend(prototype(), rotate),
        attend(lightning_cp, rotate),
        attend(
            lightning_cp,
            rotate,
            backward_inside=False,
            buffers_require_grad=True,
        ),
    )


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_attention_is_that_of_torch(nccl, rotate):
    exact = attend_whole(whole_inputs().to(torch.float64), Mask(causal=True))
    for theirs, *ours in nccl(2).run(attend_both, rotate, timeout=300):
        for found in ours:
            assert_earned(found, theirs, exact, torch.bfloat16)


def train_both():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = run_shared("cuda", torch.bfloat16, ours=False)
        return theirs, run_shared("cuda", torch.bfloat16)


def test_a_script_trains_as_with_torch(nccl):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        alone = run_alone("cuda", torch.bfloat16)
    for theirs, ours in nccl(2).run(train_both, timeout=300):
        assert_earned(ours, theirs, alone, torch.bfloat16)
        torch.testing.assert_close(ours["losses"], theirs["losses"], atol=0.01, rtol=0)


def test_a_script_trains_exactly_in_float64(nccl):
    alone = run_alone("cuda", torch.float64, length=96)
    for found in nccl(2).run(train_exactly, timeout=300):
        assert max(errors(found, alone).values()) < 1e-10


def train_exactly():
    return run_shared("cuda", torch.float64, length=96)
