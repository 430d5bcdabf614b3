"""`verify` passes what is exact, fails what is broken, and leaves no trace."""

import copy
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AttentionMaskInterface, AutoModel, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import hf_patches
import lightning_cp.parallel
from hf_patches.command import main
from hf_patches.enable import enable, is_enabled
from hf_patches.verify_inputs import build_batch, build_model
from hf_patches.weights.export import read_config
from lightning_cp.compare.verify import Report
from tests import doors
from tests.parity import hf, zoo
from tests.parity.broken import BREAKS
from tests.parity.hf import Job

KINDS = ["plain", "packed", "left"]
# Windows, sinks, softcap, experts; each scored otherwise too.
JOBS = [Job("gpt_oss", "packed"), Job("gemma2", "left"), Job("mixtral", "packed")]
JOBS += [Job("llama", head="sequence"), Job("bert", "left", head="masked")]
OTHERS = [Job(name, kind) for name in ("llama", "gpt_oss", "gemma2", "mixtral") for kind in KINDS]
OTHERS += [Job("bert", "packed", head="masked"), Job("bert", head="question")]
OTHERS = [job for job in OTHERS if job not in JOBS]


def given(job, **options):
    """Return a model and a batch, as a user would have them."""
    model = zoo.build_model(job.name, head=job.head, dtype=job.dtype, **options)
    return model, hf.build_batch(job, zoo.VOCAB_SIZE, hf.padding_of(model))


def verify_all(jobs):
    """Verify each job on this rank."""
    reports = []
    for job in jobs:
        model, batch = given(job)
        reports.append(hf_patches.verify(model, batch, cp=hf.build_cp()))
    return reports


# ---------------------------------------------------------------- exact models


@pytest.mark.ranks
@pytest.mark.parametrize(
    "jobs", [JOBS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_exact_models_pass_on_ranks(ranks, jobs):
    first, second = ranks(2).run(verify_all, jobs)
    assert first == second, "ranks disagree about the verdict"
    for job, report in zip(jobs, first, strict=True):
        assert report.passed, f"{job}\n{report}"
        assert report.earned, job
        assert report.cp_size == 2
        assert set(report.errors) == set(report.earned)
        # So sharp that nothing but rounding fits in. Some gradients are zero in theory.
        assert np.median(list(report.earned.values())) < 2e-5, job


def verify_sharded(job):
    mesh = init_device_mesh("cpu", (2,))
    model, batch = given(job)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return hf_patches.verify(model, batch, cp=hf.build_cp()), is_enabled(model)


@pytest.mark.ranks
def test_a_sharded_model_passes_by_the_fixed_tolerance(ranks):
    for report, enabled in ranks(2).run(verify_sharded, Job("gpt_oss", "packed")):
        assert report.passed, report
        assert not report.earned
        assert max(report.errors.values()) < 1e-4
        assert "allowed: fixed for float32" in str(report)
        assert not enabled


def verify_lora(job):
    model, batch = given(job)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(model, config)
    return hf_patches.verify(model, batch, cp=hf.build_cp()), is_enabled(model)


@pytest.mark.ranks
def test_of_a_lora_model_the_adapter_is_compared(ranks):
    for report, enabled in ranks(2).run(verify_lora, Job("llama", "packed")):
        assert report.passed, report
        assert report.earned
        assert len(report.errors) == 2 * 2 * 2  # layers, matrices, A and B
        assert all("lora_" in name for name in report.errors)
        assert not enabled


def verify_on_data_ranks(job):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "context"))
    cp = doors.parallel(mesh["context"], mesh["data"])
    model, batch = given(job)
    if dist.get_rank() == 1:
        batch = {key: x.flip(0) for key, x in batch.items()}
        batch["input_ids"] = batch["input_ids"].roll(1, 1)
    return hf_patches.verify(model, batch, cp=cp)


@pytest.mark.ranks
def test_data_ranks_take_the_rows_of_the_first(ranks):
    first, second = ranks(2).run(verify_on_data_ranks, Job("llama", "packed"))
    assert first == second
    assert first.passed, first


# ---------------------------------------------------------------- broken ones


def _moved_documents():
    open_step = lightning_cp.parallel.open_step

    def moved(*args, **known):
        step, local = open_step(*args, **known)
        if step.is_stock:
            return step, local
        ids = step.documents
        return replace(step, documents=np.concatenate([ids[:, :1], ids[:, :-1]], 1)), local

    return mock.patch.object(lightning_cp.parallel, "open_step", moved)


BROKEN = {what: found for what, found in BREAKS.items() if what != "a document one too long"}
BROKEN["documents one to the right"] = (_moved_documents, Job("llama", "packed"))
QUICK = ("a window one too wide", "labels shifted on each rank")


def verify_broken(what):
    breaking, job = BROKEN[what]
    model, batch = given(job)
    with breaking():
        broken = hf_patches.verify(model, batch, cp=hf.build_cp(), check=False)
    return broken, hf_patches.verify(model, batch, cp=hf.build_cp())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "what", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in BROKEN]
)
def test_what_is_broken_fails_by_far(ranks, what):
    for broken, mended in ranks(2).run(verify_broken, what):
        assert mended.passed, mended
        assert not broken.passed
        name, error = broken.worst(1)[0]
        assert error > 100 * broken.allowed(name)
        assert "FAILED: different results on 2 ranks, sequences of 61 tokens" in str(broken)


class _FailsAlone(LlamaForCausalLM):
    """Cannot hold whole rows on the second rank."""

    def forward(self, input_ids=None, **others):
        if dist.get_rank() == 1 and input_ids.shape[1] == 61:
            raise torch.OutOfMemoryError("no room")
        return super().forward(input_ids=input_ids, **others)


def verify_without_room():
    model, batch = given(Job("llama"))
    model.__class__ = _FailsAlone
    try:
        hf_patches.verify(model, batch, cp=hf.build_cp(), allow_unknown=True)
    except RuntimeError as error:
        return type(error).__name__, str(error), is_enabled(model)


@pytest.mark.ranks
def test_ranks_fail_together(ranks):
    first, second = ranks(2).run(verify_without_room)
    assert first[0] == "RuntimeError"
    assert "Another rank failed on full sequences" in first[1]
    assert "Rank 1 of 2: OutOfMemoryError: no room" in first[1]
    assert second[:2] == ("OutOfMemoryError", "no room")
    assert not first[2]
    assert not second[2]


# ---------------------------------------------------------------- what it leaves behind


def test_verify_leaves_no_trace(cp):
    model, batch = given(Job("gpt2", "left"))
    model.config.resid_pdrop = model.config.embd_pdrop = 0.1
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    model.transformer.h[0].eval()
    whole = {key: x.clone() for key, x in batch.items()}
    flags = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    report = hf_patches.verify(model, batch, cp=cp)
    assert report.passed, report
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert all(torch.equal(x, batch[key]) for key, x in whole.items())
    assert not is_enabled(model)


def test_a_local_mask_function_of_the_user_survives(cp):
    calls = []

    def build(*args, **kwargs):
        calls.append(kwargs["dtype"])
        return AttentionMaskInterface()["eager"](*args, **kwargs)

    model, batch = given(Job("gemma2", "left"))
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = build
    try:
        assert hf_patches.verify(model, batch, cp=cp).passed
        assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is build
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    assert calls
    assert hf_patches.verify(model, batch, cp=cp).passed
    with pytest.raises(KeyError):
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]  # nothing was left there


def test_an_enabled_model_stays_enabled(cp):
    model, batch = given(Job("llama"))
    enable(model)
    assert hf_patches.verify(model, batch, cp=cp).passed
    assert is_enabled(model)


def test_a_model_that_fails_to_run_is_undone(cp):
    model, batch = given(Job("llama"))
    with pytest.raises(ValueError, match="past_key_values or use_cache=True inside a step"):
        hf_patches.verify(model, {**batch, "use_cache": True}, cp=cp)
    assert not is_enabled(model)


def test_attention_on_rows_that_see_nothing_does_not_spoil_the_oracle(cp):
    # "eager" in float64 would be NaN there, and padding would come out of softcaps too.
    for job in (Job("gemma2", "left"), Job("gemma2", "packed"), Job("gpt_oss", "right")):
        model, batch = given(job)
        report = hf_patches.verify(model, batch, cp=cp)
        assert report.earned, job
        assert report.passed, report


def test_the_token_that_sees_nothing_is_not_compared(cp):
    # Before the first token of a padded row: "eager" takes the mean of everything, others zeros.
    model, batch = given(Job("llama", "left"))
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    report = hf_patches.verify(model, batch, cp=cp)
    assert report.passed, report


def test_without_float64_the_tolerance_is_fixed(cp):
    model, batch = given(Job("llama"))
    assert hf_patches.verify(model, batch, cp=cp, oracle=False).tolerance == 1e-3
    assert hf_patches.verify(model, batch, cp=cp, tolerance=0.5).tolerance == 0.5
    nan = dict.fromkeys((n for n, _ in model.named_parameters()), torch.tensor(torch.nan))
    with mock.patch("hf_patches.verify._exact", return_value=(torch.tensor(0.0), nan)):
        report = hf_patches.verify(model, batch, cp=cp)
    assert not report.earned
    assert report.passed


def test_models_of_float64_compute_in_float32_here_and_there(cp):
    for job in (Job("gemma2", "packed", dtype=torch.float64), Job("opt", dtype=torch.float64)):
        model, batch = given(job)
        report = hf_patches.verify(model, batch, cp=cp)
        assert report.passed, report
        assert not report.earned


def test_rows_are_cut(cp):
    model, batch = given(Job("llama", "packed"))
    report = hf_patches.verify(model, batch, cp=cp, max_len=24)
    assert report.num_tokens == 24
    assert report.passed, report


def test_low_precision_earns_its_own_tolerance(cp):
    model, batch = given(Job("llama", "packed", dtype=torch.bfloat16))
    report = hf_patches.verify(model, batch, cp=cp)
    assert report.passed, report
    assert 0.03 < np.median(list(report.earned.values())) < 0.2
    with torch.autocast("cpu", torch.bfloat16):
        model, batch = given(Job("llama", "packed"))
        report = hf_patches.verify(model, batch, cp=cp)
    assert report.precision == "bfloat16"
    assert report.passed, report


def test_a_mixture_in_low_precision_is_told_why_it_may_differ(cp):
    model, batch = given(Job("mixtral", dtype=torch.bfloat16))
    with mock.patch.object(cp, "step", cp.reference):
        report = hf_patches.verify(model, batch, cp=cp, tolerance=-1.0, check=False)
        with pytest.raises(RuntimeError, match="changes the results of this model: loss="):
            hf_patches.verify(model, batch, cp=cp, tolerance=-1.0)
    assert "compare a mixture of experts in float32" in str(report)
    assert "mixture" not in str(hf_patches.verify(model, batch, cp=cp, tolerance=1.0))


def test_a_loss_is_needed(cp):
    model, batch = given(Job("llama"))
    del batch["labels"]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returned no loss.*holds input_ids"):
        hf_patches.verify(model, batch, cp=cp)
    headless = AutoModel.from_config(model.config)
    with pytest.raises(ValueError, match="Give a model with a head"):
        hf_patches.verify(headless, batch, cp=cp)


def test_a_batch_without_a_scored_token_is_refused(cp):
    model, batch = given(Job("llama"))
    batch["labels"][:, 1:] = -100  # the first has nothing before it
    with pytest.raises(ValueError, match="No token of this batch has a label"):
        hf_patches.verify(model, batch, cp=cp)


def test_an_unknown_architecture_is_tried_on_request(cp):
    model, batch = given(Job("llama"))
    model.config.model_type = "unheard_of"
    with pytest.raises(ValueError, match="not among the architectures that are known"):
        hf_patches.verify(model, batch, cp=cp)
    assert hf_patches.verify(model, batch, cp=cp, allow_unknown=True).passed


# ---------------------------------------------------------------- the report


def test_a_report_is_a_table():
    errors = {f"layer.{i}": i * 1e-7 for i in range(8)}
    report = Report(
        4.25, 4.250001, errors, 1e-6, 512, 2, dict.fromkeys(errors, 1e-6) | {"layer.1": 1e-8}
    )
    lines = str(report).splitlines()
    assert lines[0].split() == ["loss,", "full", "sequences", "4.250001"]
    assert lines[4].split() == ["layer.1", "1.0e-07", "1.0e-08"]  # the worst for what is allowed
    assert lines[-2] == "... and 3 more gradients"
    assert lines[-1].startswith("FAILED: different results on 2 ranks, sequences of 512 tokens")
    assert str(replace(report, errors={})).splitlines()[-1].startswith("passed: the same results")


# ---------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Write configs without weights, by name."""
    folder = tmp_path_factory.mktemp("configs")
    for name in ("llama", "reformer", "gpt_oss", "roberta"):
        zoo.build_config(name).save_pretrained(folder / name)
    return folder


@pytest.fixture
def command(capsys):
    """Run a command in this process, and return its status, its output and its errors."""
    verbosity = transformers.logging.get_verbosity()

    def run(*args):
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    yield run
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def test_one_process_verifies_and_says_that_this_is_little(command, configs):
    config = configs / "llama" / "config.json"
    status, said, _ = command("verify", "--model", config, "--length", 40, "--packed")
    assert status == 0
    assert said.startswith("LlamaForCausalLM, random weights, 2 packed sequences\n")
    assert "passed: the same results on 1 rank, sequences of 40 tokens" in said
    assert "This was one process, so nothing was sharded" in said


def test_weights_are_loaded_where_there_are_some(command, tmp_path):
    zoo.build_model("bert", head="masked").save_pretrained(tmp_path / "bert")
    status, said, _ = command(
        "verify", "--model", tmp_path / "bert", "--length", 20, "--padded", "right"
    )
    assert status == 0
    assert said.startswith("BertForMaskedLM, loaded weights, 2 right padded sequences\n")


def test_other_numbers_are_status_1(command, configs):
    with mock.patch("hf_patches.model.attention.api.attend", lambda q, k, v, **_: q):
        status, said, _ = command("verify", "--model", configs / "llama", "--length", 40)
    assert status == 1
    assert "FAILED: different results" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "nowhere"], "There is no nowhere. Give a folder with a config.json"),
        (["--model", "{empty}"], "There is no config.json in"),
        (["--model", "{adapter}"], "It holds a PEFT adapter: give the folder of its base model"),
        (["--model", "{unknown}"], "has model type `unheard_of` but Transformers does not"),
        (["--model", "{invalid}"], "Field 'hidden_size' expected int, got str"),
        (["--model", "{llama}", "--length", "1"], "No token of this batch has a label"),
        (
            ["--model", "{reformer}", "--length", "64"],
            "cannot run under context parallelism: its attention is written",
        ),
        (["--model", "{llama}", "--head", "masked"], "Choose --head from: causal, sequence"),
        (["--model", "{llama}", "--head", "sequence", "--packed"], "'sequence' scores full"),
        (["--model", "{llama}", "--length", "257"], "--length 257 is more than the 256 positions"),
        (["--model", "{roberta}", "--length", "255"], "Give --length 254 or less"),
        (["--model", "{llama}", "--length", "0"], "--length: '0': give an integer of at least"),
        (["--model", "{llama}", "--batch-size", "two"], "'two': give an integer"),
    ],
)
def test_a_user_error_is_one_line_and_status_2(command, configs, tmp_path, args, message):
    places = {name: configs / name for name in ("llama", "reformer", "roberta")}
    for name, file, text in (
        ("empty", "notes.txt", ""),
        ("adapter", "adapter_config.json", "{}"),
        ("unknown", "config.json", '{"model_type": "unheard_of"}'),
        ("invalid", "config.json", '{"model_type": "llama", "hidden_size": "big"}'),
    ):
        places[name] = tmp_path / name
        places[name].mkdir()
        (places[name] / file).write_text(text)
    status, said, errors = command("verify", *(arg.format(**places) for arg in args))
    assert status == 2
    assert said == ""
    assert message in errors
    assert errors.rstrip().splitlines()[-1].count("error: ") == 1
    assert "Traceback" not in errors


def test_a_gpu_for_each_process(command, configs):
    with mock.patch("torch.cuda.device_count", return_value=0):
        status, _, errors = command("verify", "--model", configs / "llama", "--device", "cuda")
    assert status == 2
    assert "Process 0 of this machine has no GPU of its own: there are 0" in errors


def test_random_models_attend_unevenly(configs):
    path = configs / "llama"
    model, made = build_model(path, read_config(path), "causal", dtype=torch.float32, seed=0)
    assert made == "random"
    model.set_attn_implementation("eager")
    ids = torch.arange(10, 60)[None]
    uniform = 1 / torch.arange(1, 51)
    for weights in model(input_ids=ids, output_attentions=True).attentions:
        assert (weights[0].amax(-1)[:, 20:] > 3 * uniform[20:]).float().mean() > 0.9
    drawn = {name: p.detach().std().item() for name, p in model.named_parameters() if p.ndim == 1}
    assert min(drawn.values()) > 0.1


@pytest.mark.parametrize("padded", [None, "left", "right"])
def test_random_batches_hold_what_they_should(configs, padded):
    config = read_config(configs / "llama")
    batch = build_batch(config, "causal", shape=(3, 200), packed=True, padded=padded, seed=1)
    again = build_batch(config, "causal", shape=(3, 200), packed=True, padded=padded, seed=1)
    assert all(torch.equal(x, again[key]) for key, x in batch.items())
    assert not set(batch["input_ids"].unique().tolist()) & {1, 2}  # begin, end
    documents = batch["document_ids"]
    lengths = [row[row >= 0].unique(return_counts=True)[1] for row in documents]
    assert all(len(found) > 2 for found in lengths)
    assert any(1 in found for found in lengths)
    assert len({tuple(found.tolist()) for found in lengths}) == 3
    if padded:
        real = batch["attention_mask"] == 1
        assert len(set(real.sum(1).tolist())) == 3
        assert bool(real[:, -1 if padded == "left" else 0].all())
        assert bool((batch["labels"][~real] == -100).all())


@pytest.mark.parametrize("head", ["sequence", "token", "question"])
def test_other_heads_are_verified(command, configs, head):
    status, said, errors = command(
        "verify", "--model", configs / "llama", "--length", 20, "--padded", "left", "--head", head
    )
    assert status == 0, said + errors


def torchrun(*args):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "lightning_cp", "verify", *map(str, args)]
    folder = Path(__file__).parents[2]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_prints_one_table(configs):
    args = ("--length", 64, "--packed", "--algorithm", "ring")
    done = torchrun("--model", configs / "gpt_oss", *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed: the same results on 2 ranks, sequences of 64 tokens") == 1
    assert done.stdout.count("sequences\n") == 1


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_refuses_in_one_line(configs):
    done = torchrun("--model", configs / "reformer", "--length", 64)
    assert done.returncode != 0
    above, _, cause = done.stderr.partition("Root Cause")
    assert "cannot run under context parallelism" not in above
    (said,) = re.findall(r"exitcode  : 2 .*\n.*\n  traceback : error: (.*)", cause)
    assert "(model type 'reformer') cannot run under context parallelism" in said
