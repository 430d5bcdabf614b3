"""The same on gloo processes, inside steps: every layout, and layers together in a model."""

import random
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid, silu
from torch.utils.checkpoint import checkpoint

from lightning_cp import Mask, attention
from lightning_cp.loss.means import global_mean
from lightning_cp.sequence import causal_conv1d, document_starts, initial_states, split_ranges
from tests import doors
from tests.sequence import test_conv, test_recurrence
from tests.sequence.cases import LAYOUTS, Case, convolve, recur

pytestmark = pytest.mark.ranks

# Padding follows its document, as in batches: elsewhere, a batch gives it to the one before it.
SHAPES = [
    {"length": 29},
    {"length": 5},
    {"length": 2, "batch": 1},
    {"length": 31, "documents": ((5, 1, 1, 1, 9, 14), (31,))},
    {"length": 23, "documents": ((1,) * 23, (22, 1))},
    {"length": 24, "documents": ((10, 14), (3, 21)), "padding": ((8, 9, 23), (22, 23))},
    {"length": 27, "padding": ((), tuple(range(13)))},
    {"length": 27, "padding": (tuple(range(9, 27)), (26,))},
    {"length": 22, "documents": ((4, -3, 15), (20, -2))},
]


def batch_of(case):
    batch = {"input_ids": torch.arange(case.batch * case.length).view(case.batch, case.length)}
    if case.documents is not None:
        batch["document_ids"] = torch.from_numpy(case.document_ids)
    if case.padding is not None:
        batch["attention_mask"] = torch.from_numpy(~case.is_padding).long()
    return batch


def run_cases(cases):
    """Return the results of convolutions and recurrences of each case."""
    results = []
    for case in cases:
        cp = doors.parallel(dist.group.WORLD, layout=case.layout)
        with cp.step(batch_of(case)):
            full, weight, bias, dout = test_conv.draw(case, 4)
            x = case.cut(full, 2, cp.cp_rank).requires_grad_()
            leaves = [x, weight.requires_grad_(), bias.requires_grad_()]
            out = causal_conv1d(*leaves)
            found = [test_conv.gradients(out, case.cut(dout, 2, cp.cp_rank), *leaves)]
            kinds = ("vectors", "matrices")
            found += [test_recurrence.run_shard(case, kind, cp.cp_rank) for kind in kinds]
        results.append(found)
    return results


@pytest.mark.parametrize(
    ("cp_size", "shapes"),
    [(3, SHAPES[1::2]), *(pytest.param(n, SHAPES, marks=pytest.mark.slow) for n in (2, 3, 4))],
    ids=lambda value: value if isinstance(value, int) else len(value),
)
def test_layers_are_exact_in_all_layouts(ranks, cp_size, shapes):
    cases = [Case(cp_size=cp_size, layout=name, **shape) for name in LAYOUTS for shape in shapes]
    by_case = zip(*ranks(cp_size).run(run_cases, cases), strict=True)
    for case, found in zip(cases, by_case, strict=True):
        conv, vectors, matrices = zip(*found, strict=True)
        x, weight, bias, dout = test_conv.draw(case, 4)
        leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
        exact = test_conv.gradients(convolve(case, *leaves), dout, *leaves)
        test_conv.check(case, conv, exact)
        test_recurrence.check(case, vectors, test_recurrence.expected(case, "vectors"))
        test_recurrence.check(case, matrices, test_recurrence.expected(case, "matrices"))


class Hybrid(nn.Module):
    """A layer with a convolution, a linear recurrence and attention, as hybrids have them."""

    def __init__(self, dim):
        super().__init__()
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.conv = nn.Conv1d(dim, dim, 4, groups=dim)

    def forward(self, hidden):
        x, gate, value = self.project(hidden).chunk(3, -1)
        weight = self.conv.weight.squeeze(1)
        x = silu(causal_conv1d(x.transpose(1, 2), weight, self.conv.bias)).transpose(1, 2)
        x = self.recur(torch.exp(logsigmoid(gate)), x)
        q, v = x[:, None], value[:, None]
        return hidden + self.out(attention(q, q, v, mask=Mask(causal=True))[:, 0])

    def recur(self, decays, inputs):
        starts = document_starts(inputs)
        parts = list(zip(*map(split_ranges, (starts, decays, inputs)), strict=True))
        zero = torch.zeros_like(inputs[:, 0])
        alone = torch.stack([recur(*part, torch.mul, zero)[:, -1] for part in parts])
        initial = initial_states(torch.stack([part[1].prod(1) for part in parts]), alone)
        states = [
            recur(*part, torch.mul, state) for part, state in zip(parts, initial, strict=True)
        ]
        return torch.cat(states, 1)


def train(batch, layout, recompute, num_steps):
    """Return losses and gradients of a few steps under context parallelism, and on one rank."""
    cp = doors.parallel(dist.group.WORLD, layout=layout)
    torch.manual_seed(0)
    embed, layers = nn.Embedding(64, 6).double(), [Hybrid(6).double() for _ in range(3)]
    weights = [p for module in (embed, *layers) for p in module.parameters()]
    call = partial(checkpoint, use_reentrant=False) if recompute else nn.Module.__call__
    delays = random.Random(cp.cp_rank)

    def run(local):
        hidden = embed(local["input_ids"])
        for layer in layers:
            time.sleep(delays.random() * 0.01)
            hidden = call(layer, hidden)
        real = cp.token_mask()
        loss = global_mean((hidden.pow(2).sum(-1) * real).sum(), real.sum())
        return loss, torch.autograd.grad(loss, weights)

    with cp.reference(batch) as full:
        exact = run(full)
    for _ in range(num_steps):
        with cp.step(batch) as local:
            loss, grads = run(local)
    grads = [grad.contiguous() for grad in grads]  # those of convolutions may have other strides
    for grad in grads:
        cp.groups.context.all_reduce(grad)
    return (
        abs(float(loss - exact[0])),
        max(
            float((a / cp.cp_size - b).abs().max() / b.abs().max())
            for a, b in zip(grads, exact[1], strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("cp_size", "recompute"),
    [
        (2, True),
        (2, False),
        (3, False),
        (3, True),
    ],
)
@pytest.mark.slow
def test_a_hybrid_trains_as_on_one_rank(ranks, cp_size, recompute):
    shape = {"length": 37, "documents": ((9, 1, 27), (37,)), "padding": ((35, 36), (30, 34, 36))}
    batch = batch_of(Case(cp_size=cp_size, **shape))
    batch["input_ids"] = batch["input_ids"] % 64
    for layout in LAYOUTS:
        for errors in ranks(cp_size).run(train, batch, layout, recompute, 2):
            assert max(errors) < 1e-9, (layout, errors)
