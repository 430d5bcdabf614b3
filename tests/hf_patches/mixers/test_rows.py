"""Rows for chunked recurrences, and the kernels of models over them: several chunks, documents."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import logsigmoid
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hf_patches.mixers import rows
from hf_patches.mixers.delta_net import delta_rule
from hf_patches.mixers.mamba2 import chunk_scan
from lightning_cp.sequence.token_map import build_token_map
from tests.parity.hf import Double
from tests.ranks import run_threads
from tests.sequence.cases import Case, Threads, cases

HEADS, KEYS, VALUES, CHUNK = 2, 3, 4, 4


@given(cases(max_len=40))
@settings(max_examples=150)
def test_every_token_has_a_place_and_resets_stand_between_documents(case):
    layout = case.build_layout()
    for rank in range(case.cp_size):
        tokens = build_token_map(layout, rank, documents=case.document_ids, padding=case.is_padding)
        length = sum(tokens.lengths)
        x = torch.arange(1.0, case.batch * length + 1).view(case.batch, length)
        step = case.build_step(SimpleNamespace(rank=rank, size=case.cp_size))
        with mock.patch.object(rows, "active", lambda step=step: step):
            found = rows.build_rows(x, CHUNK)
        arranged = found.arrange(x, reset=-1.0)
        assert arranged.shape[0] == len(tokens.held) * case.batch
        assert torch.equal(found.restore(arranged), x)
        assert found.by_range(arranged).shape[:2] == (len(tokens.held), case.batch)
        for held in tokens.held:
            for sample in range(case.batch):
                row = arranged[held.number * case.batch + sample].tolist()
                check_row(case, tokens, held, sample, row, sample * length + held.offset)


def check_row(case, tokens, held, sample, row, offset):
    """Check that a state passes from token to token inside of documents only."""
    of, has_state = min(sample, tokens.num_samples - 1), True
    for place, value in enumerate(row):
        if value == -1.0:
            assert place % CHUNK == CHUNK - 1
            has_state = False
        elif value > 0:
            token = held.tokens.start + int(value) - 1 - offset
            starts = tokens.first[of, token] == token
            if starts and token > held.tokens.start:
                assert not has_state, (case, row)
            if token == held.tokens.start:
                has_state = not starts
            has_state = has_state or bool(tokens.is_real[of, token])


# ---------------------------------------------------------------- kernels


def normal(*shape):
    seed = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=seed, dtype=torch.float64)


def draw_delta(case, channels=()):
    shape = (case.batch, case.length, HEADS)
    query, key, value = (
        normal(*shape, KEYS),
        normal(*shape, KEYS, 1)[..., 0],
        normal(*shape, VALUES),
    )
    return query, key, value, logsigmoid(normal(*shape, *channels)), torch.sigmoid(normal(*shape))


def run_delta(kernel):
    def run(q, k, v, g, beta):
        return kernel(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, chunk_size=64)[0]

    return run


def draw_mamba(case):
    shape = (case.batch, case.length)
    b, c = normal(*shape, 1, KEYS), normal(*shape, 1, KEYS, 1)[..., 0]
    return normal(*shape, HEADS, VALUES), normal(*shape, HEADS), b, c


def run_mamba(kernel):
    def run(x, dt, b, c):
        a, d = -torch.tensor([0.3, 0.05]).double(), torch.tensor([1.0, 0.5]).double()
        bias, limit = torch.tensor([0.1, -0.2]).double(), (0.1, 2.0)
        options = {"D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": limit}
        return kernel(x, dt, a, b, c, 16, **options)

    return run


def ours(fn, stock):
    return lambda *args, **kwargs: fn(stock, *args, **kwargs)


KERNELS = {
    "gated delta net": (draw_delta, run_delta, delta_rule, torch_chunk_gated_delta_rule),
    "Kimi delta attention": (
        lambda case: draw_delta(case, (KEYS,)),
        run_delta,
        delta_rule,
        chunk_kimi_delta_attention,
    ),
    "Mamba-2": (draw_mamba, run_mamba, chunk_scan, mamba2_chunk_scan),
}
CASES = [
    Case(531, 3, "zigzag"),
    Case(531, 2, "contiguous", documents=((64, 1, 63, 1, 200, 128, 74), (300, 231))),
    Case(531, 3, "balanced", documents=((192, -40, 1, 1, 297), (3, 4, 5, 64, 64, 391))),
    Case(300, 2, "zigzag", documents=((170, 130),)),
]


@pytest.fixture(scope="module")
def threads():
    with pytest.MonkeyPatch.context() as patch:
        found = Threads(patch)
        patch.setattr(rows, "active", found.current_step)  # as `Threads` does for other modules
        yield found


def by_document(case, fn, tokens):
    """Call a kernel with each document alone; 0 for tokens of none."""
    samples = []
    for sample in range(case.batch):
        ids = torch.zeros(case.length).long()
        if case.document_ids is not None:
            ids = torch.from_numpy(case.document_ids)[min(sample, len(case.document_ids) - 1)]
        _, sizes = ids.unique_consecutive(return_counts=True)
        parts = zip(*(x[sample : sample + 1].split(sizes.tolist(), 1) for x in tokens), strict=True)
        firsts = (sizes.cumsum(0) - sizes).tolist()
        outs = [fn(*part) * (ids[at] >= 0) for at, part in zip(firsts, parts, strict=True)]
        samples.append(torch.cat(outs, 1))
    return torch.cat(samples)


def gradients(fn, tokens, dout):
    leaves = [x.clone().requires_grad_() for x in tokens]
    with Double():
        out = fn(*leaves)
        found = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), *found]


SLOW = "Kimi delta attention"


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(
            name,
            case,
            marks=pytest.mark.slow if name == SLOW and number < 2 else (),
            id=f"{name}-{case.layout} {case.documents}",
        )
        for name in KERNELS
        for number, case in enumerate(CASES)
    ],
)
def test_outputs_and_gradients_are_those_of_documents_alone(threads, name, case):
    draw, run, fn, stock = KERNELS[name]
    real = torch.ones(case.batch, case.length)
    if case.document_ids is not None:
        real = torch.from_numpy(case.document_ids >= 0).expand(case.batch, -1).double()
    dout = normal(case.batch, case.length, HEADS, VALUES) * real[..., None, None]
    exact = gradients(lambda *x: by_document(case, run(stock), x), draw(case), dout)

    def work(transport):
        threads.enter(case.build_step(transport))
        cut = [case.cut(x, 1, transport.rank) for x in (*draw(case), dout)]
        return gradients(run(ours(fn, stock)), cut[:-1], cut[-1])

    found = run_threads(case.cp_size, work)
    order = case.build_layout().order
    for number, whole in enumerate(exact):
        joined = torch.cat([part[number] for part in found], 1).index_select(1, order)
        joined = joined * real.view(*real.shape, *[1] * (joined.dim() - 2))
        assert (joined - whole).norm() < 1e-9 * whole.norm(), number
