"""Kernels of transformers over sharded sequences: chunked code that takes and returns a state."""

import pytest
import torch
from torch.nn.functional import logsigmoid, pad
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from lightning_cp.sequence import initial_states, split_ranges
from tests.oracle import errors
from tests.ranks import run_threads
from tests.sequence.cases import LAYOUTS, Case

HEADS, KEYS, VALUES, CHUNK = 2, 4, 3, 8


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def draw_delta(case):
    shape = (case.batch, case.length, HEADS)
    query, key, value = normal(*shape, KEYS), normal(*shape, KEYS + 1), normal(*shape, VALUES)
    return query, key[..., 1:], value, logsigmoid(normal(*shape)), torch.sigmoid(normal(*shape))


def delta_rule(query, key, value, g, beta, state):
    return torch_chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        chunk_size=CHUNK,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def delta_sharded(*tokens):
    parts = list(zip(*map(split_ranges, tokens), strict=True))
    # One call for both: columns of values from a zero state, and columns of the identity without
    # values, which become the decay.
    eye = pad(torch.eye(KEYS), (VALUES, 0)).expand(tokens[0].shape[0], HEADS, -1, -1)
    pairs = torch.stack(
        [delta_rule(q, k, pad(v, (0, KEYS)), g, beta, eye)[1] for q, k, v, g, beta in parts]
    )
    state, decay = pairs.split([VALUES, KEYS], -1)
    initial = initial_states(decay, state, apply=torch.matmul)
    outs = [delta_rule(*part, state)[0] for part, state in zip(parts, initial, strict=True)]
    return torch.cat(outs, 1)


def draw_mamba(case):
    shape = (case.batch, case.length, HEADS)
    b, c = normal(*shape, KEYS), normal(*shape, KEYS + 1)[..., 1:]
    return normal(*shape, VALUES), torch.sigmoid(normal(*shape)), b, c


A = -torch.tensor([0.3, 0.05])


def mamba(x, dt, b, c, state):
    return mamba2_chunk_scan(
        x, dt, A, b, c, CHUNK, D=torch.ones(HEADS), initial_states=state, return_final_states=True
    )


def mamba_sharded(*tokens):
    parts = list(zip(*map(split_ranges, tokens), strict=True))
    state = torch.stack([mamba(*part, None)[1] for part in parts])
    decay = torch.stack([torch.exp((dt * A).sum(1)) for _, dt, _, _ in parts])
    initial = initial_states(decay[..., None, None], state)
    outs = [mamba(*part, state)[0] for part, state in zip(parts, initial, strict=True)]
    return torch.cat(outs, 1)


KERNELS = {
    "gated delta net": (draw_delta, lambda *x: delta_rule(*x, None)[0], delta_sharded),
    "Mamba-2": (draw_mamba, lambda *x: mamba(*x, None)[0], mamba_sharded),
}


@pytest.mark.parametrize(
    "layout", [x if x == "zigzag" else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
@pytest.mark.parametrize("name", KERNELS)
def test_outputs_and_gradients_are_those_of_full_sequences(threads, name, layout):
    draw, whole, sharded = KERNELS[name]
    case = Case(59, 3, layout)
    dout = normal(case.batch, case.length, HEADS, VALUES)

    def gradients(fn, tokens, dout):
        leaves = [x.clone().requires_grad_() for x in tokens]
        out = fn(*leaves)
        return dict(enumerate([out.detach(), *torch.autograd.grad(out, leaves, dout)]))

    exact = gradients(whole, draw(case), dout)

    def work(transport):
        threads.enter(case.build_step(transport))
        cut = [case.cut(x, 1, transport.rank) for x in (*draw(case), dout)]
        return gradients(sharded, cut[:-1], cut[-1])

    found = run_threads(3, work)
    order = case.build_layout().order
    joined = {
        key: torch.cat([part[key] for part in found], 1).index_select(1, order) for key in exact
    }
    worst = errors(joined, exact)
    assert max(worst.values()) < 1e-5, worst
