"""Which kernel ``auto`` takes on a GPU: dense masks by the list, all others by FlexAttention."""

import logging
from dataclasses import replace

import pytest
import torch

from lightning_cp.attn import api as attention_module
from lightning_cp.attn.blockwise.kernels.base import Request, Scores
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel
from lightning_cp.attn.blockwise.kernels.select import Work, is_dense, prefer_flex
from lightning_cp.attn.flex.mods import Place
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from tests.engine.cases import MASKS

CUDNN, REFERENCE = CudnnKernel(), ReferenceKernel()
GPU = Request(torch.device("cuda"), torch.bfloat16, Scores(1.0), head_dim=128)
FLOAT32 = replace(GPU, dtype=torch.float32)
DENSE = Work(is_dense=True, has_bias=False, row_len=8192, num_queries=1024, min_head_dim=128)
MASKED = replace(DENSE, is_dense=False)


@pytest.mark.parametrize(
    ("listed", "request_", "work", "preferred"),
    [
        # What the dense kernels are good at.
        (CUDNN, GPU, DENSE, False),
        # What they leave to the reference: a mask, a bias, what they refuse (softcap, head dims).
        (CUDNN, GPU, MASKED, True),
        (CUDNN, GPU, replace(DENSE, has_bias=True), True),
        (REFERENCE, GPU, DENSE, True),
        (REFERENCE, replace(GPU, dtype=torch.float16), MASKED, True),
        # float32 where rows are long; float64 is to be exact.
        (REFERENCE, FLOAT32, replace(DENSE, row_len=4096), True),
        (REFERENCE, FLOAT32, replace(MASKED, row_len=4095), False),
        (REFERENCE, replace(GPU, dtype=torch.float64), MASKED, False),
        # What FlexAttention does not compile.
        (CUDNN, GPU, replace(MASKED, num_queries=127), False),
        (CUDNN, GPU, replace(MASKED, num_queries=128), True),
        (CUDNN, GPU, replace(MASKED, min_head_dim=8), False),
        (REFERENCE, replace(GPU, device=torch.device("cpu")), MASKED, False),
        (REFERENCE, replace(GPU, device=torch.device("mps")), MASKED, False),
    ],
)
def test_auto_takes_flex_where_dense_kernels_are_bad(listed, request_, work, preferred):
    found = prefer_flex(listed, request_, work, compiles=lambda device, dtype: True)
    assert found == preferred
    assert not prefer_flex(listed, request_, work, compiles=lambda device, dtype: False)


def test_the_compiler_is_asked_last_and_for_what_is_needed():
    """Asking may import it, and needs a GPU."""
    asked = []

    def compiles(*args):
        asked.append(args)
        return True

    prefer_flex(CUDNN, GPU, DENSE, compiles=compiles)
    assert asked == []
    prefer_flex(CUDNN, GPU, MASKED, compiles=compiles)
    assert asked == [(GPU.device, torch.bfloat16)]


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
    monkeypatch, caplog, kernel, algorithm, taken
):
    monkeypatch.setattr(attention_module, "select_kernel", lambda name, request: CUDNN)
    monkeypatch.setattr(attention_module, "prefer_flex", lambda listed, request, work: True)
    attention_module._say_ring.cache_clear()
    layout = build_layout("zigzag", seq_len=512, cp_size=2)
    bounds = Mask(causal=True, window=9).bounds(512)
    q = torch.zeros(1, 2, 256, 16)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            found = attention_module._takes_flex(
                kernel, algorithm, GPU, bounds, Place(layout, 0), q, q, None
            )
    assert found == taken
    said = [line for line in caplog.messages if "algorithm='gather' would take" in line]
    assert len(said) == (algorithm == "ring")  # once
    attention_module._say_ring.cache_clear()


def test_what_is_asked_is_the_same_on_all_ranks(monkeypatch):
    """It decides what travels: lengths of the layout, not of this rank's tensors."""
    asked = []

    def prefer(listed, request, work):
        asked.append(work)
        return True

    monkeypatch.setattr(attention_module, "select_kernel", lambda name, request: CUDNN)
    monkeypatch.setattr(attention_module, "prefer_flex", prefer)
    layout = build_layout("zigzag", seq_len=509, cp_size=2)
    bounds = Mask(causal=True, window=9).bounds(509, padded_len=layout.padded_len)
    for rank, tensor_len in [(0, 253), (1, 256)]:
        q, v = torch.zeros(1, 2, tensor_len, 32), torch.zeros(1, 2, tensor_len, 16)
        attention_module._takes_flex("auto", "gather", GPU, bounds, Place(layout, rank), q, v, q)
    assert asked[0] == asked[1]
    assert asked[0] == Work(
        is_dense=False, has_bias=True, row_len=509, num_queries=256, min_head_dim=16
    )
