"""`lightning-cp reference`: what it stores is what the stock model computes, and data reads it."""

import contextlib
import io
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from recipes.preference import PairData
from recipes.preference.pairs import REFERENCE
from recipes.preference.reference import main
from recipes.tokens import byte_tokenizer
from recipes.weights import tiny_config

RECORDS = [
    {"prompt": "a prompt, " * (i + 1), "chosen": "yes" * (i + 2), "rejected": "no", "note": f"é{i}"}
    for i in range(3)
]


@pytest.fixture
def given(tmp_path):
    """Return the arguments of the command, without those of the output."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # attention that is not uniform
    model.save_pretrained(tmp_path / "model")
    write(tmp_path / "pairs.jsonl", RECORDS)
    source = ["--model", str(tmp_path / "model"), "--source", str(tmp_path / "pairs.jsonl")]
    return ["reference", *source, "--tokenizer", "bytes", "--device", "cpu"]


def write(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(args):
    """Return the status and what was printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(args)
    return status, out.getvalue() + err.getvalue()


def expected(folder, record):
    """Return the log-probabilities of both completions under the stock model."""
    tokenizer, model = byte_tokenizer(), LlamaForCausalLM.from_pretrained(folder)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompt = begin + tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
    sums = []
    for name in ("chosen", "rejected"):
        answer = tokenizer(record[name], add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].double()
        logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        sums.append(float(logp.gather(1, torch.tensor(answer)[:, None]).sum()))
    return sums


@pytest.mark.ranks
def test_two_ranks_store_what_the_stock_model_computes(ranks, given, tmp_path):
    shared, separate = tmp_path / "shared.jsonl", tmp_path / "separate.jsonl"
    for file, more in ((shared, []), (separate, ["--separate-prompts"])):
        (status, said), _ = ranks(2).run(run, [*given, "--out", str(file), *more])
        assert status == 0, said
        assert "stored: pairs=3, seconds=" in said
        found = [json.loads(line) for line in file.read_text().splitlines()]
        for record, stored in zip(RECORDS, found, strict=True):
            assert {name: stored[name] for name in record} == record
            sums = [stored["ref_chosen_logps"], stored["ref_rejected_logps"]]
            assert sums == pytest.approx(expected(tmp_path / "model", record), rel=1e-5)
    assert not list(tmp_path.glob("*.unfinished"))
    options = {"seq_len": 512, "val_fraction": 0, "cache_dir": str(tmp_path)}
    data = PairData(str(shared), stored_reference=True, **options)
    data.prepare_data()
    data.setup("fit")
    bits = data.train_samples()[0][REFERENCE].to(torch.int32).view(torch.float32)
    first = json.loads(shared.read_text().splitlines()[0])
    assert torch.tensor(first["ref_chosen_logps"]) in bits[bits != 0]


def test_what_cannot_be_stored_is_refused(given, tmp_path):
    out = tmp_path / "stored.jsonl"
    assert run([*given, "--out", str(tmp_path / "stored.csv")]) == (
        2,
        f"error: --out {tmp_path / 'stored.csv'}: give a file that ends with .jsonl.\n",
    )
    status, said = run([*given, "--out", str(out), "--chosen-column", "best"])
    assert status == 2
    assert "has no column 'best'" in said
    assert run([*given, "--out", str(out)])[0] == 0
    status, said = run([*given, "--out", str(out)])
    assert status == 2
    assert "stored.jsonl exists. Give another name, or remove it." in said
    again = [*given, "--source", str(out), "--out", str(tmp_path / "twice.jsonl")]
    status, said = run(again)
    assert status == 2
    assert "has a column ref_chosen_logps or ref_rejected_logps already" in said
    assert not (tmp_path / "twice.jsonl").exists()


def test_a_folder_without_all_weights_is_refused(given, tmp_path):
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    status, said = run([*given, "--out", str(tmp_path / "stored.jsonl")])
    assert status == 2
    assert "lacks weights of a LlamaForCausalLM: model.layers.0.mlp.up_proj.weight" in said
