"""Attention with branches on gloo ranks, in all algorithms, against a table of visible pairs."""

from functools import cache

import pytest
import torch

from lightning_cp import Mask, attention
from tests.oracle import errors
from tests.parity.steps import average_, build_cp

pytestmark = pytest.mark.ranks

# Per sample: documents of (beginning, branch, branch, ...), and a document of none at the end.
SIZES = ([(9, 5, 7), (0, 4, 1, 3), (6,), (2, 3)], [(1, 20, 2), (11, 1, 1)])
LENGTH = 53
OPTIONS = [
    {"algorithm": "gather"},
    {"algorithm": "ring"},
    {"algorithm": "ulysses"},
    {"algorithm": "ring", "layout": "contiguous"},
    {"algorithm": "gather", "layout": "balanced", "kernel": "flex"},
    {"algorithm": "gather", "layout": "zigzag", "kernel": "reference"},
]


def build_batch():
    """Return the ids of documents and branches, and padding at the end of the second sample."""
    documents, branches = torch.full((2, LENGTH), -1), torch.full((2, LENGTH), -1)
    name = 0
    for row, sizes in enumerate(SIZES):
        at = 0
        for number, (begin, *parts) in enumerate(sizes):
            documents[row, at : at + begin + sum(parts)] = number
            at += begin
            for part in parts:
                branches[row, at : at + part] = name
                at, name = at + part, name + 1
    mask = torch.ones(2, LENGTH).long()
    mask[1, 34:] = 0
    return {
        "input_ids": torch.zeros(2, LENGTH).long(),
        "document_ids": documents,
        "branch_ids": branches,
        "attention_mask": mask,
    }


def draw():
    generator = torch.Generator().manual_seed(2)
    shapes = {"q": (2, 4, LENGTH, 8), "k": (2, 2, LENGTH, 8), "v": (2, 2, LENGTH, 6)}
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    tensors["sinks"] = torch.randn(4, generator=generator, dtype=torch.float64)
    return {name: x.requires_grad_() for name, x in tensors.items()}


def weigh(out, keep):
    """Return a number in which each output of a real token has another weight."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return (out * weights * keep[:, None, :, None]).sum()


@cache
def expected():
    tensors, batch = draw(), build_batch()
    documents, branches = batch["document_ids"], batch["branch_ids"]
    same = (documents[:, :, None] == documents[:, None]) & (documents[:, None] != -1)
    seen = same & torch.ones(LENGTH, LENGTH).bool().tril()
    seen &= (branches[:, None] == -1) | (branches[:, :, None] == branches[:, None])
    seen &= (batch["attention_mask"] == 1)[:, None]
    k, v = (tensors[name].repeat_interleave(2, 1) for name in "kv")
    scores = (tensors["q"] @ k.mT * 8**-0.5).masked_fill(~seen[:, None], -torch.inf)
    sinks = tensors["sinks"][:, None, None].expand(2, 4, LENGTH, 1)
    out = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1] @ v
    keep = (batch["attention_mask"] == 1) & (documents != -1)
    weigh(out, keep).backward()
    found = {name: x.grad for name, x in tensors.items()}
    return {"out": out.detach() * keep[:, None, :, None], **found}


class Holder(torch.nn.Module):
    """Tensors whose gradients are averaged like those of parameters."""

    def __init__(self):
        super().__init__()
        for name, x in draw().items():
            self.register_parameter(name, torch.nn.Parameter(x.detach()))


def run_job(options):
    cp, _ = build_cp("cpu", 1, **options)
    model, batch = Holder(), build_batch()
    keep = (batch["attention_mask"] == 1) & (batch["document_ids"] != -1)
    whole = {name: getattr(model, name) for name in "qkv"}
    with cp.step({**batch, **whole}, sequence_dims=dict.fromkeys("qkv", 2)) as local:
        out = attention(
            local["q"], local["k"], local["v"], mask=Mask(causal=True), sinks=model.sinks
        )
        full = cp.unshard(out, 2)
    weigh(full, keep).backward()
    average_(model)
    found = {name: x.grad for name, x in model.named_parameters()}
    return {"out": full.detach() * keep[:, None, :, None], **found}


def run_jobs(jobs):
    return [run_job(options) for options in jobs]


@pytest.mark.parametrize("cp_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_branches_in_all_algorithms(ranks, cp_size):
    for found in ranks(cp_size).run(run_jobs, OPTIONS):
        for result, options in zip(found, OPTIONS, strict=True):
            worst = errors(result, expected())
            assert max(worst.values()) < 1e-12, (options, worst)
