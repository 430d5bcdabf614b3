"""The search for the fastest mesh, and what the script prints of it."""

from math import prod

import pytest

from benchmarks import cluster_plan
from benchmarks.cluster_plan import NODES, Workload, plan_meshes
from lightning_cp.attn.hardware import Links
from lightning_cp.planner import KNOWN, Setup
from lightning_cp.planner.memory import plan_memory

LLAMA = Workload(KNOWN["llama-8b"], 2**17, 4)


def meshes(workload, num_gpus, links=None):
    return plan_meshes(workload, num_gpus, links=links or Links(), checkpointing="full")


def test_the_search_lists_all_meshes_that_fit_by_speed():
    plans = meshes(LLAMA, 16)
    assert len({(plan.sizes, plan.setup.ulysses_size) for plan in plans}) == len(plans)
    assert {plan.sizes[3] for plan in plans} == {1, 2, 4, 8}
    rates = [plan.tokens_per_second for plan in plans]
    assert rates == sorted(rates, reverse=True)
    for plan in plans:
        assert prod(plan.sizes) == 16
        assert plan.sizes[0] * plan.sizes[1] * plan.num_batches == 4
        assert NODES.fits(plan.memory)
        assert 0 < sum(plan.exposed.values()) < plan.seconds
        update = plan.time.seconds["optimizer"]
        step = plan.num_batches * (plan.time.step - update) + update
        assert plan.tokens_per_second == pytest.approx(4 * 2**17 / step)
    # What was left out does not fit.
    sizes = {plan.sizes for plan in plans}
    for context, tensor in ((1, 8), (2, 4), (4, 2), (8, 1)):
        setup = Setup(2**17, 16, cp_size=context, tp_size=tensor, precision="bf16-policy")
        fits = NODES.fits(plan_memory(LLAMA.model, setup))
        assert ((1, 16 // context // tensor, context, tensor) in sizes) == fits


def test_models_that_tensor_ranks_cannot_divide_have_one():
    plans = meshes(Workload(KNOWN["qwen3-30b-a3b"], 2**15, 16), 16)
    assert {plan.sizes[3] for plan in plans} == {1}


def test_slow_hops_make_copies():
    workload = Workload(KNOWN["llama-8b"], 2**17, 32)
    assert meshes(workload, 512)[0].sizes[0] == 1
    assert meshes(workload, 512, Links(hop_us=10))[0].sizes[0] > 1


def test_the_meshes_of_an_own_run_are_told_as_computed(capsys):
    sizes = ["--model", "llama-70b", "--length", "512k", "--sequences", "8", "--gpus", "8", "64"]
    cluster_plan.main([*sizes, "--no-plot"])
    out = capsys.readouterr().out
    assert out.startswith("computed, not measured")
    # 8 GPUs do not hold it.
    assert [line.split(" | ")[1] for line in out.splitlines() if "llama-70b" in line] == ["64"]
    assert "| 1 x 2 x 32 x 1, Ulysses 8 | keep |" in out  # as in results/cluster_plan_202611.md


def test_a_picture_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    cluster_plan.main(["--model", "llama-8b", "--gpus", "8", "16", "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().out
