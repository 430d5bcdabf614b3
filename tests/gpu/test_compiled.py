"""Compiled layers on NCCL ranks that share one GPU: attention is one operator of their graphs."""

import pytest
import torch

from tests.hf_patches.test_compiled import Case, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

MINUTES = 240
LENGTHS = (512, 700, 512)
CASES = {
    "gather": Case(),
    "ring, recomputed": Case(checkpointing=True, options={"algorithm": "ring"}),
    "kept": Case(checkpointing=True, options={"keep_attention": "all"}),
}


def on_gpu(case, **others):
    return Case(**{**vars(case), "device": "cuda", "dtype": torch.bfloat16, **others})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_graphs_have_the_bits_of_eager_layers(nccl, case):
    for errors, graphs, breaks in nccl(2).run(compare, on_gpu(case), LENGTHS, timeout=MINUTES):
        assert errors == [0.0] * len(LENGTHS)
        assert breaks == 0
        assert graphs <= 3


@pytest.mark.parametrize("documents", [False, True])
def test_generated_code_earns_its_tolerance(nccl, documents):
    """Documents are computed by FlexAttention, outside of graphs."""
    case = on_gpu(Case(), backend="inductor", documents=documents, fullgraph=not documents)
    for errors, *_ in nccl(2).run(compare, case, LENGTHS, timeout=MINUTES):
        assert max(errors) < 0.05


def test_a_rank_that_stops_compiling_pairs_up_with_others(nccl):
    case = on_gpu(Case(), fullgraph=False, gives_up=1)
    for errors, *_ in nccl(2).run(compare, case, LENGTHS, timeout=MINUTES):
        assert errors == [0.0] * len(LENGTHS)
