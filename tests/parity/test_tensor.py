"""Tensor and expert parallelism of each model type, by the plans of transformers."""

import re
from pathlib import Path

import pytest
import torch

from hf_patches.weights.tensor_parallel import EXACT, EXPERTS
from tests.parity import hf, zoo
from tests.parity.distributed import compare_loaded

# Latent attention, fused weights, sinks, experts, heads that are norms, mixers.


# With the loss that balances experts.
BALANCED = {n for n in zoo.VARIANTS if n.endswith(":aux")}


def dtype_of(name: str) -> torch.dtype:
    """Return float64 for the balance loss, except where a weight of the router is float32."""
    return torch.float64 if name in BALANCED - {"ernie4_5_moe:aux"} else torch.float32


def check(name: str, found: hf.Found) -> None:
    is_double = dtype_of(name) == torch.float64
    assert found.loss == pytest.approx(found.exact_loss, rel=1e-14 if is_double else 1e-6)
    errors = {n: e for n, e in found.errors.items() if not zoo.is_idle(name, n)}
    worst = max(errors, key=errors.get)
    assert errors[worst] < (1e-13 if is_double else 2e-5), worst


def with_balance_loss(types: frozenset[str]) -> list[str]:
    return sorted(name for name in BALANCED if name.partition(":")[0] in types)


@zoo.needs_transformers("5.21")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt_oss", ("packed",)),
        *(
            pytest.param(name, ("plain", "packed"), marks=pytest.mark.slow)
            for name in [*sorted(EXACT), *with_balance_loss(EXACT)]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_ranks_that_share_weights_compute_the_gradients_of_one_process(ranks, name, kinds):
    jobs = [hf.Job(name, kind, dtype=dtype_of(name), tensor=2) for kind in kinds]
    for job, found in zip(jobs, ranks(4).run(hf.compare_all, jobs)[0], strict=True):
        assert not isinstance(found, str), found
        check(job.name, found)


SIZES = [
    {"fsdp_size": 4, "ep_size": 2},
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
]


def test_the_docs_list_the_types_that_are_accepted():
    page = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text()
    tensor, experts = page.partition("## Which models")[2].split("**`ep_size`")
    assert set(re.findall(r"`(\w+)`[,\s]", tensor.partition(":**")[2])) == EXACT
    assert set(re.findall(r"`([\w-]+)`[,\s]", experts.partition(":")[2])) == EXPERTS


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_experts_on_their_ranks_have_the_gradients_of_one_process(ranks, tmp_path, name):
    hf.build_model(name).save_pretrained(tmp_path)
    for sizes in SIZES:
        if "tp_size" not in sizes or name in EXACT:
            check(name, ranks(4).run(compare_loaded, name, str(tmp_path), sizes)[0])


@zoo.needs_transformers("5.21")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("qwen3_moe:aux", slice(3, None)),
        *(
            pytest.param(name, slice(None), marks=pytest.mark.slow)
            for name in with_balance_loss(EXPERTS)
        ),
    ],
    ids=str,
)
def test_the_balance_loss_of_experts_on_their_ranks_is_that_of_one_process(
    ranks, tmp_path, name, places
):
    dtype = dtype_of(name)
    hf.build_model(name, dtype=dtype).save_pretrained(tmp_path)
    for sizes, data in list(zip(SIZES, (1, 2, 1, 2), strict=True))[places]:
        if "tp_size" not in sizes or name.partition(":")[0] in EXACT:
            arguments = name, str(tmp_path), sizes, data, "packed", dtype
            check(name, ranks(4).run(compare_loaded, *arguments)[0])
