"""The scripts that time GPUs, in small on the CPU: they must run when a GPU is there."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import attention_gpu, scaling
from benchmarks.measure import Records
from lightning_cp.planner import Setup
from lightning_cp.planner.memory import plan_memory
from lightning_cp.planner.shapes import KNOWN


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    attention_gpu.main(["--tiny", "--quick", "--out", str(folder)])
    return folder / "attention_gpu.jsonl"


@pytest.mark.slow
def test_every_case_runs_and_is_written_down(measured):
    lines = [json.loads(line) for line in measured.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["attention"] * len(attention_gpu.CASES)
    assert [line["case"] for line in lines] == [case.name for case in attention_gpu.CASES]
    hows = {line["case"]: line["how"] for line in lines}
    assert hows["ring-32k"] == "ring, groups 1 / 1, zigzag"
    assert hows["documents-1k-16k"].endswith("balanced")
    assert hows["ulysses-32k"].startswith("ulysses")
    assert hows["two-axes-32k"].startswith("ulysses x ")
    for line in lines:
        assert line["ms"] > 0
        assert line["whole_ms"] > 0
        assert line["torch"] == torch.__version__
        assert 0 < line["ranks"][0]["pairs"] <= 32 * 256


@pytest.mark.slow
def test_other_lengths_and_ranks_are_measured_by_links_of_their_own(tmp_path):
    attention_gpu.main(["--tiny", "--scaling", "--out", str(tmp_path)])
    path = tmp_path / "attention_gpu.jsonl"
    lines = {line["case"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert list(lines) == [case.name for case in attention_gpu.grid()]
    assert lines["causal-64k-of-8"]["link_gbs"] == 400
    assert lines["causal-128k-of-16"]["link_gbs"] == 360  # 8 cards of 45
    assert lines["causal-1024k-of-64"]["link_gbs"] == 45  # by ring, each rank has its own
    assert lines["gather-1024k-of-64"]["link_gbs"] == 360
    assert lines["ring-32k-of-4"]["how"].startswith("ring")
    assert "ring-128k-of-64" not in lines  # by the model it takes three times as long
    points = scaling.read_points([path], linked=False)
    assert {point.cp_size for point in points} == {1, 2, 4, 8, 16, 64}
    drawn = {(p.seq_len, p.cp_size) for p in points if p.share == p.share}
    assert (256, 8) in drawn  # shrunk; with a whole row beside it


def test_a_case_that_fails_does_not_stop_the_others(capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(attention_gpu, "measure_rank", fail)
    attention_gpu.main(["--tiny", "--quick", "--only", "causal-32k", "ring-32k"])
    assert capsys.readouterr().out.count("failed: RuntimeError: no such kernel") == 2


@pytest.mark.slow
def test_a_peer_that_cannot_run_says_why(capsys):
    case = attention_gpu.CASES[0].shrunk()
    machine = attention_gpu.Machine(torch.device("cpu"))
    attention_gpu.run_peer(case, machine, 1.0, Records(None, "", {}))
    told = capsys.readouterr().out
    assert "torch context_parallel" in told
    assert "cuda" in told.lower()


@pytest.mark.slow
def test_the_model_is_told_without_a_picture(measured, capsys):
    points = scaling.read_points([measured], linked=True)
    assert {point.algorithm for point in points} == {"gather", "ring"}
    scaling.main(["--no-plot"])
    assert "| 1024k | 64 | " in capsys.readouterr().out


@pytest.mark.slow
def test_measured_points_are_drawn_over_the_model(measured, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "scaling.png"
    scaling.main(["--measured", str(measured), "--picture", str(picture)])
    assert picture.stat().st_size > 10_000


def test_what_auto_takes_is_never_much_slower_than_the_best_measured_way():
    """Causal rows of one length and number of ranks: links that take no time, and real ones."""
    ways: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
    for line in scaling.read_lines(sorted(scaling.RESULTS.glob("attention_gpu*.jsonl"))):
        way = line["case"].split("-")[0]
        is_way = way in {"causal", "gather", "ring", "ulysses", "two"}
        if is_way and line.get("memory") is None:
            ways.setdefault((line["seq_len"], line["cp_size"]), {})[way] = line
    compared = {where: found for where, found in ways.items() if len(found) > 1}
    assert {(1 << 15, 8), (1 << 17, 8), (1 << 18, 64)} <= set(compared)
    for where, found in compared.items():
        for time in ("ms", "linked_ms"):
            best = min(line[time] for line in found.values())
            assert found["causal"][time] <= 1.1 * best, (where, time)


def test_the_model_says_what_was_measured():
    """Up to 16%; with links and the host for rows that keep the GPU busy."""
    compared = scaling.compare(sorted(scaling.RESULTS.glob("attention_gpu*.jsonl")))
    assert len(compared) > 30
    for one in compared:
        assert one.kernels == pytest.approx(one.kernels_measured, rel=0.16), one
        if one.kernels_measured > 12:
            assert one.linked == pytest.approx(one.linked_measured, rel=0.16), one


@pytest.mark.slow
def test_lengths_run(tmp_path):
    from benchmarks import lengths_gpu

    lengths_gpu.main(["--tiny", "--only", "packed", "padded", "--out", str(tmp_path)])
    written = (tmp_path / "lengths_gpu.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [(line["mask"], line["how"]) for line in lines] == [
        (mask, how) for mask in ("packed", "padded") for how in ("random", "150")
    ]
    assert all(line["us_per_token"] > 0 and len(line["steps"]) == 6 for line in lines)


def test_a_slow_step_is_told_from_a_long_sequence():
    from benchmarks.lengths_gpu import Step, summarize

    steps = [Step(1000 * (1 + at % 3), at < 3, 0.1 * (1 + at % 3)) for at in range(12)]
    steps[7] = Step(2222, True, 0.42)  # 200 ms more than its tokens take
    found = summarize(steps)
    assert (found.num_slow, found.last_slow) == (1, 7)
    assert 150 < found.worst_new_ms < 250
    assert abs(found.us_per_token - 100) < 1


@pytest.mark.slow
def test_training_runs(tmp_path):
    from benchmarks import training_gpu

    training_gpu.main(["--tiny", "--out", str(tmp_path)])
    written = (tmp_path / "training_gpu.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert len(lines) == 2 * len(training_gpu.RUNS)
    assert all(line["ms"] > 0 and line["loss"] > 0 for line in lines)


@pytest.mark.slow
def test_layers_of_hybrids_send_as_much_for_any_length(tmp_path):
    from benchmarks import mixers_gpu

    names = [f"{kind} {length}k" for kind in ("gated delta net", "mamba-2") for length in (32, 128)]
    mixers_gpu.main(["--tiny", "--only", *names, "--out", str(tmp_path)])
    written = (tmp_path / "mixers_gpu.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["run"] for line in lines] == names
    sent = {line["run"]: line["bytes_received"] for line in lines}
    for name in ("gated delta net", "mamba-2"):
        assert sent[f"{name} 32k"] == sent[f"{name} 128k"] > 0


@pytest.mark.slow
def test_plans_are_compared_with_steps(tmp_path):
    from benchmarks import plan_gpu

    names = ["llama-8b 256k all", "llama-8b 128k lora"]
    plan_gpu.main(["--tiny", "--only", *names, "--out", str(tmp_path)])
    lines = [json.loads(x) for x in (tmp_path / "plan_gpu.jsonl").read_text().splitlines()]
    assert [line["point"] for line in lines] == names
    assert all(line["ms"] > 0 and line["planned_bytes"] > 0 for line in lines)


def test_weights_that_are_not_sharded_are_planned_in_full():
    from benchmarks.plan_gpu import unsharded_peak

    setup = Setup(seq_len=131072, num_gpus=8, accumulates=False)
    alone = replace(setup, num_gpus=1, seq_len=16384)
    sharded, full = (plan_memory(KNOWN["llama-8b"], one) for one in (setup, alone))
    held = sum(sharded.parts[name] for name in ("weights", "optimizer"))
    assert unsharded_peak(sharded, 8) > sharded.peak + 6.9 * held - 1e9
    del full.moments["loss"]["gradients"]  # freed before the next forward there
    assert unsharded_peak(full, 1) == full.peak - full.parts["other buffers"]


@pytest.mark.slow
def test_host_time_is_measured_for_two_ways(tmp_path):
    from benchmarks import host_gpu

    arguments = ["--only", "plain", "ours-none", "--steps", "3", "--rounds", "2"]
    host_gpu.main(["--tiny", *arguments, "--out", str(tmp_path)])
    lines = [json.loads(x) for x in (tmp_path / "host_gpu.jsonl").read_text().splitlines()]
    assert [line["way"] for line in lines] == ["plain", "ours-none"]
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], rel=1e-2)
    assert all(set(host_gpu.PHASES) <= line["phases"].keys() for line in lines)
    assert [len(line["ratios"]) for line in lines] == [0, 2]


@pytest.mark.slow
def test_the_cost_of_whole_rows_is_printed(capsys):
    from benchmarks import trainer_gpu

    trainer_gpu.main(["--tiny", "--ranks", "1"])
    said = capsys.readouterr().out
    for way in ("shard_in_forward", "context_parallel"):
        assert re.search(rf"\| 1 \| {way} \| [\d.]+ \| [\d.]+ of ", said), said


@pytest.mark.slow
def test_a_rank_computes_a_part_of_a_video(tmp_path):
    from benchmarks import vision_gpu

    vision_gpu.main(["--tiny", "--out", str(tmp_path)])
    written = (tmp_path / "vision_gpu.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["what"] for line in lines] == ["tower", "long", "long"]
    assert not any(isinstance(line.get("spent"), str) for line in lines)


@pytest.mark.slow
def test_the_cost_of_a_save_is_measured_in_both_ways(tmp_path):
    arguments = ["--tiny", "--out", str(tmp_path), "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.checkpoint_gpu", *arguments]
    subprocess.run(command, check=True)  # a Trainer leaves its process group
    lines = [json.loads(x) for x in (tmp_path / "checkpoint_gpu.jsonl").read_text().splitlines()]
    assert [line["way"] for line in lines] == ["blocking", "async"]
    assert all(len(line["saved_ms"]) == len(line["plain_ms"]) > 0 for line in lines)
