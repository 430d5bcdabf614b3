"""Which kernel ``auto`` takes on a GPU: dense masks by the list, all others by FlexAttention."""

import logging
from dataclasses import replace

import pytest
import torch

from lightning_cp.attn import choose
from lightning_cp.attn.blockwise.kernels.base import Request, Scores
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel
from lightning_cp.attn.choose import CallSpec, choose_kernel, is_dense, prefers_flex
from lightning_cp.attn.cost import CallSize
from lightning_cp.attn.plan import QueryShard
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from tests import doors
from tests.attn.cases import MASKS, say_again

CUDNN, REFERENCE = CudnnKernel(), ReferenceKernel()
GPU = Request(torch.device("cuda"), torch.bfloat16, Scores(1.0), head_dim=128)
FLOAT32 = replace(GPU, dtype=torch.float32)
DENSE, MASKED = Mask(causal=True), Mask(causal=True, window=9)


class Compiler:
    """Stands in for torch's, and notes for what it is asked."""

    def __init__(self):
        self.works, self.asked = True, []

    def can_compile(self, *args):
        self.asked.append(args)
        return self.works


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(choose, "can_compile", compiler.can_compile)
    monkeypatch.setattr(choose.triton_ops, "can_start", lambda device: True)
    return compiler


def build_spec(mask, request=GPU, *, seq_len=8192, cp_size=8, rank=0, dims=(128, 128), **others):
    layout = build_layout("zigzag", seq_len=seq_len, cp_size=cp_size)
    problem = CallSize(seq_len, cp_size, 2, 2, head_dim=dims[0], value_dim=dims[1])
    bounds = mask.bounds(seq_len, padded_len=layout.padded_len)
    settings = {"has_bias": False, "config": doors.config(algorithm="gather")} | others
    return CallSpec(bounds, QueryShard(layout, rank), 2, request, problem, **settings)


@pytest.mark.parametrize(
    ("listed", "spec", "preferred"),
    [
        # What the dense kernels are good at.
        (CUDNN, build_spec(DENSE), False),
        # What they leave to the reference: a mask, a bias, what they refuse (softcap, head dims).
        (CUDNN, build_spec(MASKED), True),
        (CUDNN, build_spec(DENSE, has_bias=True), True),
        (REFERENCE, build_spec(DENSE), True),
        (REFERENCE, build_spec(MASKED, replace(GPU, dtype=torch.float16)), True),
        # float32 where sequences are long; float64 is to be exact.
        (REFERENCE, build_spec(DENSE, FLOAT32, seq_len=4096), True),
        (REFERENCE, build_spec(MASKED, FLOAT32, seq_len=4095), False),
        (REFERENCE, build_spec(MASKED, replace(GPU, dtype=torch.float64)), False),
        # What FlexAttention does not compile.
        (CUDNN, build_spec(MASKED, seq_len=252, cp_size=2), False),
        (CUDNN, build_spec(MASKED, seq_len=253, cp_size=2), True),
        (CUDNN, build_spec(MASKED, dims=(128, 8)), False),
        (REFERENCE, build_spec(MASKED, replace(GPU, device=torch.device("cpu"))), False),
        (REFERENCE, build_spec(MASKED, replace(GPU, device=torch.device("mps"))), False),
    ],
)
def test_auto_takes_flex_where_dense_kernels_are_bad(listed, spec, preferred, compiler):
    assert prefers_flex(spec, listed) == preferred
    compiler.works = False
    assert not prefers_flex(spec, listed)


def test_the_compiler_is_asked_last_and_for_what_is_needed(compiler):
    """Asking may import it, and needs a GPU."""
    prefers_flex(build_spec(DENSE), CUDNN)
    assert compiler.asked == []
    prefers_flex(build_spec(MASKED), CUDNN)
    assert compiler.asked == [(GPU.device, torch.bfloat16)]


@pytest.mark.parametrize("name", MASKS)
def test_only_causal_and_whole_masks_are_dense(name):
    layout = build_layout("zigzag", seq_len=37, cp_size=3)
    bounds = MASKS[name](2, 37).bounds(37, padded_len=layout.padded_len)
    assert layout.padded_len > 37
    assert is_dense(bounds, 37) == (name in ("causal", "bidirectional"))


@pytest.mark.parametrize(
    ("mask", "dense"),
    [
        (Mask(causal=True, window=37), True),
        (Mask(causal=True, window=36), False),
        (Mask(window=37), True),
        (Mask(causal=True, chunk=40), True),
        (Mask(causal=True, documents=torch.full((2, 37), 3)), True),
        (Mask(causal=True, documents=torch.arange(37).expand(2, -1) // 36), False),
        (Mask(padding=torch.arange(37).expand(2, -1) == 20), False),
        (Mask(causal=True, padding=torch.arange(37) == 36), False),
        (Mask(causal=True, padding=torch.zeros(37).bool()), True),
        (Mask(causal=True, spans=torch.zeros(37).long()), True),
    ],
)
def test_masks_are_dense_by_what_they_hide_not_by_what_they_say(mask, dense):
    assert is_dense(mask.bounds(37, padded_len=40), 37) == dense


@pytest.mark.parametrize(
    ("kernel", "algorithm", "taken"),
    [
        ("auto", "gather", True),
        ("auto", "ring", False),
        ("flex", "gather", True),
        ("cudnn", "gather", False),
        ("reference", "gather", False),
    ],
)
def test_a_named_kernel_is_taken_and_ring_never_takes_flex(
    monkeypatch, caplog, compiler, kernel, algorithm, taken
):
    monkeypatch.setattr(choose, "select_kernel", lambda name, request: CUDNN)
    say_again(choose)
    config = doors.config(algorithm=algorithm, kernel=kernel)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert (choose_kernel(build_spec(MASKED, config=config)) is None) == taken
    warnings = [line for line in caplog.messages if "algorithm=gather would use" in line]
    assert len(warnings) == (algorithm == "ring")  # once
    say_again(choose)


@pytest.mark.parametrize("seq_len", [252, 253, 509])
def test_the_choice_is_the_same_on_all_ranks(compiler, seq_len):
    """It decides what is sent: it depends on the layout, not on the tensors of a rank."""
    specs = [build_spec(MASKED, seq_len=seq_len, cp_size=2, rank=rank) for rank in range(2)]
    first, second = (prefers_flex(spec, CUDNN) for spec in specs)
    assert first == second == (seq_len > 252)


def test_both_roads_have_one_memory_budget():
    auto = doors.config()
    dense, masked = (build_spec(mask, seq_len=1 << 17, config=auto) for mask in (DENSE, MASKED))
    assert dense.memory_budget == masked.memory_budget == 800 * 2**20
    limited = doors.config(attention_memory=0.25)
    assert build_spec(DENSE, config=limited).memory_budget == 2**28
