"""What fits, the report and the command."""

import json
import re
from dataclasses import replace

import pytest

from lightning_cp.planner import KNOWN, Setup, plan_run
from lightning_cp.planner.format_plan import format_plan, parse_tokens
from lightning_cp.planner.memory import plan_memory
from lightning_cp.planner.plan_run import Capacity, fewest_checkpointed, longest_sequence
from recipes.command import main
from tests.parity.zoo import build_config

SIZES = ["--length", "128k", "--gpus", "8"]


def test_the_longest_sequence_fits_and_a_longer_one_does_not():
    model, setup, capacity = KNOWN["llama-8b"], Setup(8192, 8), Capacity(80e9, 1e12)
    longest = longest_sequence(model, setup, capacity)
    assert capacity.fits(plan_memory(model, Setup(longest, 8)))
    assert not capacity.fits(plan_memory(model, Setup(longest + longest // 100, 8)))


@pytest.mark.parametrize("checkpointing", ["none", "full", "keep"])
def test_as_few_layers_are_recomputed_as_fit(checkpointing):
    model, capacity = KNOWN["llama-8b"], Capacity(80e9, 1e12)
    setup = Setup(2**17, 8, precision="bf16-true", checkpointing=checkpointing)
    fewest = fewest_checkpointed(model, setup, capacity)
    kind = "keep" if checkpointing == "keep" else "full"
    assert 1 < fewest < 31
    for number, fits in ((fewest, True), (fewest - 1, False)):
        one = replace(setup, checkpointing=kind, checkpointed_layers=number)
        assert capacity.fits(plan_memory(model, one)) == fits
    assert fewest_checkpointed(model, setup, Capacity(1e12, 1e12)) == 0
    moved = replace(setup, checkpointing=kind, offload="all")
    assert 0 < fewest_checkpointed(model, moved, capacity) <= fewest


def test_what_never_fits_is_said():
    plan = plan_run("llama-70b", seq_len=2**17, num_gpus=1, gpu_memory=24)
    assert (plan.fits, plan.longest, plan.fewest) == (False, 0, None)
    told = format_plan(plan)
    assert "DOES NOT FIT" in told
    assert "layers that fit: it does not fit with all 80" in told


@pytest.mark.slow
def test_plans_go_to_1024_gpus():
    assert plan_run("llama-8b", seq_len=2**24, num_gpus=1024).fits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len=0: give an integer of at least 1"),
        ({"num_gpus": 2048}, "plans go up to 1024 GPUs"),
        ({"cp_size": 3}, "cp_size=3 does not divide num_gpus=8"),
        ({"ulysses_size": 3}, "ulysses_size=3 does not divide the 8 context ranks"),
        ({"seq_len": 4}, "seq_len=4 is less than the 8 ranks"),
        ({"sharding": "hybrid", "shard_size": 3}, "shard_size=3 does not divide num_gpus=8"),
        ({"sharding": "none", "parameter_offload": True}, "sharding='none' has none"),
        ({"lora_rank": -1}, "lora_rank=-1: give 0 or more"),
        ({"documents": (4, 0)}, "lengths of documents are integers"),
        ({"offload": "checkpoints"}, "offload='checkpoints' is unknown. Use one of 'none', 'all'"),
        ({"offload": "all", "checkpointing": "none"}, "there are none. Give"),
        ({"precision": "fp8"}, "fp8"),
        ({"gpu_memory": 0}, "gpu_memory=0: give GB"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_run("llama-8b", **({"seq_len": 8192, "num_gpus": 8} | options))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no known model 'llama-9b'. Choose one of llama-8b"):
        plan_run("llama-9b", seq_len=8192, num_gpus=8)


@pytest.mark.parametrize("text", ["", "k", "1.3", "many", "-1", "0", "1e99", "nan"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="is not a number of tokens. Give an integer"):
        parse_tokens(text)


def test_the_command_prints_a_plan(capsys):
    assert main(["plan", "--model", "llama-8b", *SIZES, "--gpu-memory", "141"]) == 0
    out = capsys.readouterr().out
    for text in (
        "FITS",
        "checkpoints",
        "gathered parameters",
        "longest sequence",
        "of 989 TFLOP/s",
    ):
        assert text in out
    assert max(map(len, out.splitlines())) < 130


def test_as_few_layers_are_checkpointed_as_fit(capsys):
    args = ["plan", "--model", "llama-8b", "--length", "128k", "--gpus", "8", "--gpu-memory", "80"]
    args += ["--precision", "bf16-true", "--checkpointing", "keep"]
    assert main(args) == 0
    fewest = int(re.search(r"recomputed layers that fit: (\d+) of 32", capsys.readouterr().out)[1])
    assert 1 < fewest < 31
    assert main([*args, "--checkpointed-layers", str(fewest)]) == 0
    out = capsys.readouterr().out
    for text in (
        f"checkpointing keep of {fewest} layers",
        "saved activations",
    ):
        assert text in out
    assert main([*args, "--checkpointed-layers", str(fewest - 1)]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert main([*args, "--checkpointed-layers", "33"]) == 2
    assert "the model has 32 layers" in capsys.readouterr().err


def test_a_run_that_does_not_fit_is_status_1(capsys):
    assert main(["plan", "--model", "llama-70b", *SIZES, "--gpu-memory", "40"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_command_reads_a_config(tmp_path, capsys):
    build_config("qwen3_moe").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", "--model", str(path), "--length", "4k", "--gpus", "2"]) == 0
        assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "auto"], "--mesh is gone: this command plans one run."),
        (["--mesh=auto", "--seq", "4"], "--mesh is gone: this command plans one run."),
        (["--sequences", "4"], "gone: this command plans one run. `python -m benchmarks.cluster"),
        (["--plot", "plan.png"], "--plot is gone: this command plans one run."),
        (["--chip", "a100"], "--chip is gone: seconds are those of an H200"),
        (["--chip"], "--chip is gone: seconds are those of an H200"),
    ],
)
def test_options_that_are_gone_name_what_to_use(args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *SIZES, "--model", "llama-8b", *args])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "llama-9b"], "neither a file or folder nor a known model"),
        (["--model", "llama-8b", "--length", "long"], "'long' is not a number of tokens"),
        (["--model", "llama-8b", "--gpus", "0"], "num_gpus=0"),
        (["--model", "llama-8b", "--gpus", "9", "--context-parallel-size", "2"], "divisor"),
        (["--model", "llama-8b", "--document-lengths", "4k,x"], "'x' is not a number"),
    ],
)
def test_user_errors_are_one_line_and_status_2(args, message, capsys):
    assert main(["plan", *SIZES, *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [({"model_type": "no_such_model"}, "could not be read"), ({"model_type": "vit"}, "'vit'")],
)
def test_configs_that_transformers_cannot_build_are_refused(config, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", *SIZES, "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
