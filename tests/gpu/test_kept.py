"""Kept attention results on a GPU: same gradients, one forward, no more memory than computed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_cp import Mask, attention
from lightning_cp.attn.blockwise import function
from lightning_cp.attn.flex import from_mask
from tests import doors

pytestmark = pytest.mark.gpu

LENGTH, HEADS, KV_HEADS, DIM, LAYERS = 4096, 8, 2, 64, 3
MASKS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (500, 0)},
    "documents": {"causal": True},
    "sinks": {"causal": True, "window": (127, 0)},
}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.qkv = torch.nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))

    def forward(self, x, mask, has_sinks):
        q, k, v = (
            part.unflatten(-1, (-1, DIM)).transpose(1, 2)
            for part in self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        )
        sinks = self.sinks if has_sinks else None
        return x + self.out(attention(q, k, v, mask=mask, sinks=sinks).transpose(1, 2).flatten(2))


def run(name, keep):
    """Return gradients, attention forwards, and the bytes that a forward leaves allocated."""
    forwards = [0]

    def counted(compute):
        def call(*args, **kwargs):
            forwards[0] += 1
            return compute(*args, **kwargs)

        return call

    patch = pytest.MonkeyPatch()
    patch.setattr(function, "compute_forward", counted(function.compute_forward))
    patch.setattr(from_mask, "attend_compiled", counted(from_mask.attend_compiled))
    torch.manual_seed(0)
    layers = [Layer().to("cuda", torch.bfloat16) for _ in range(LAYERS)]
    cp = doors.parallel(None, keep_attention=keep, check_batches=0)
    batch = {"x": torch.randn(1, LENGTH, HEADS * DIM, device="cuda", dtype=torch.bfloat16)}
    if name == "documents":
        batch["document_ids"] = (torch.arange(LENGTH, device="cuda") // 700)[None]
    for _ in range(2):  # the first step compiles and makes plans
        for layer in layers:
            layer.zero_grad()
        forwards[0] = 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with cp.step(batch, sequence_dims={"x": 1}) as local:
            x = local["x"].requires_grad_()
            mask = Mask(**MASKS[name])
            for layer in layers:
                x = checkpoint(layer, x, mask, name == "sinks", use_reentrant=False)
            torch.cuda.synchronize()
            left = torch.cuda.memory_allocated() - before
            x.square().mean().backward()
    grads = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
    patch.undo()
    return grads, forwards[0], left


def compare(name):
    """Return forwards and bytes of both ways, and the largest difference of a gradient."""
    exact, *plain = run(name, "none")
    found, *kept = run(name, "all")
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
    return plain, kept, max(errors)


@pytest.mark.parametrize("name", MASKS)
def test_kept_results(nccl, name):
    ((plain, kept, error),) = nccl(1).run(compare, name, timeout=240)
    assert (plain[0], kept[0]) == (2 * LAYERS, LAYERS)
    out, lse = LENGTH * HEADS * DIM * 2, LENGTH * HEADS * 4
    expected = LAYERS * ((2 if name == "sinks" else 1) * out + lse)
    assert kept[1] - plain[1] <= 1.05 * expected + 2**16
    assert error < 2e-2
