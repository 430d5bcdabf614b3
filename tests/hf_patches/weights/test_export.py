"""`export`: a checkpoint of the strategy becomes a folder for from_pretrained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_patches.command import main
from hf_patches.weights import weight_files
from hf_patches.weights.export import export
from lightning_cp.adapters import describe_models
from lightning_cp.checkpoint import model_state, save_folder
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.parity import zoo

IDS = torch.arange(10, 50).view(2, 20)


@pytest.fixture(autouse=True)
def _verbosity():
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


class Module(LightningModule):
    """A user's module, which remembers where its model came from."""

    def __init__(self, name, path=None):
        super().__init__()
        self.save_hyperparameters()
        self.model = zoo.build_model(name)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def write_base(folder, name, tokenizer=True, **options):
    """Write what a model has beside its weights."""
    config = zoo.build_config(name, **options)
    config.save_pretrained(folder)
    if tokenizer:
        (folder / "tokenizer.json").write_text('{"a": 1}')
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
        (folder / "notes.txt").write_text("mine")
    return folder


def save(module, path, *, folder=False, **rest):
    """Write a checkpoint as the strategy does, without a run."""
    rest = {"pytorch-lightning_version": "2.6", **rest}
    if folder:
        save_folder({"state_dict": model_state(module, full=False)}, rest, path)
    else:
        torch.save({"state_dict": module.state_dict(), **rest}, path)
    return path


def logits(model, **given):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **given).logits


def holder(**parts):
    return nn.ModuleDict(parts)


# ---------------------------------------------------------------- from a run


def train(path, base, options):
    with elastic_environment():
        module = Module("llama", base)
        trainer = build_trainer(strategy=doors.strategy(**options), max_steps=2)
        batch = {"input_ids": IDS, "labels": IDS}
        trainer.fit(module, DataLoader([batch, batch], batch_size=None))
        trainer.save_checkpoint(path)
        return {name: full(p.detach()) for name, p in module.model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "file"])
def test_a_trained_model_comes_out_as_it_was(ranks, tmp_path, kind):
    base, path = write_base(tmp_path / "base", "llama"), tmp_path / "last.ckpt"
    options = {"save_distributed_checkpoint": kind == "folder"}
    weights = ranks(2).run(train, str(path), str(base), options)[0]
    assert path.is_dir() == (kind == "folder")
    module = Module.load_from_checkpoint(path)
    assert all(torch.equal(p, weights[name]) for name, p in module.model.named_parameters())
    # The hyperparameters name the base.
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    trained = zoo.build_model("llama")
    assert not torch.equal(trained.lm_head.weight, weights["lm_head.weight"])
    trained.load_state_dict(weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(logits(loaded), logits(trained))
    written = {file.name for file in (tmp_path / "out").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert written == {"config.json", "generation_config.json", "model.safetensors"} | copied
    assert loaded.generation_config.temperature == 0.5


# ---------------------------------------------------------------- from what a module may hold


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        pytest.param(
            name,
            folder,
            id=f"{name}-{'folder' if folder else 'file'}",
            marks=() if folder == (number % 2 == 0) else pytest.mark.slow,
        )
        for number, name in enumerate(["gemma2", "mixtral", "gpt2", "diffllama"])
        for folder in (True, False)
    ],
)
def test_ties_experts_and_other_names_come_out_right(tmp_path, name, folder):
    model = zoo.build_model(name)
    base = write_base(tmp_path / "base", name, tokenizer=False)
    extra = nn.Linear(3, 3)
    module = holder(inner=holder(lm=model), metric=extra)
    path = save(module, tmp_path / "last.ckpt", folder=folder)
    export(path, tmp_path / "out", base=base, max_shard_size="100KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(loaded) is type(model)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    model.save_pretrained(tmp_path / "stock", max_shard_size="100KB")
    assert_same_weights(tmp_path / "out", tmp_path / "stock")


def read_weights(folder):
    """Read all files, and the names of those that the index names."""
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    return weights, index["metadata"], set(index["weight_map"])


def assert_same_weights(folder, stock):
    (weights, totals, names), (expected, totals_of_stock, _) = map(read_weights, (folder, stock))
    assert (totals, names, weights.keys()) == (totals_of_stock, expected.keys(), expected.keys())
    for name, weight in expected.items():
        assert weights[name].dtype == weight.dtype, name
        assert torch.equal(weights[name], weight), name


def test_conversions_that_combine_layers_have_all_of_them(tmp_path, monkeypatch):
    # As if each weight were a layer: this model's files combine several of them. Models whose
    # layers are combined are too large for a test.
    monkeypatch.setattr(weight_files, "layer_of", lambda name: name)
    model = zoo.build_model("hrm_text")
    base = write_base(tmp_path / "base", "hrm_text", tokenizer=False)
    path = save(holder(model=model), tmp_path / "last.ckpt", folder=True)
    export(path, tmp_path / "out", base=base, max_shard_size="100KB")
    model.save_pretrained(tmp_path / "stock", max_shard_size="100KB")
    assert_same_weights(tmp_path / "out", tmp_path / "stock")


_MEASURE = """
import re, sys
from pathlib import Path
from hf_patches.weights.export import export

def peak():  # not ru_maxrss, which a process inherits from the one that starts it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

checkpoint, out, base = map(Path, sys.argv[1:])
before = peak()
export(checkpoint, out, base=base, max_shard_size="20MB")
print((peak() - before) * 1024)
"""


@pytest.mark.slow
def test_the_weights_are_never_all_in_memory(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=8000)
    config.save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM(config)
    total = sum(p.nbytes for p in model.parameters())
    path = save(holder(model=model), tmp_path / "last.ckpt", folder=True)
    args = [sys.executable, "-c", _MEASURE, path, tmp_path / "out", tmp_path / "base"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    used = subprocess.run(args, env=env, capture_output=True, check=True, text=True).stdout
    assert total > 200e6
    assert int(used.split()[-1]) < total / 2


def test_precision_is_that_of_the_checkpoint(tmp_path):
    model = zoo.build_model("llama", dtype=torch.bfloat16)
    base = write_base(tmp_path / "base", "llama")
    path = save(holder(model=model), tmp_path / "last.ckpt")
    export(path, tmp_path / "out", base=base)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("folder", [True, False])
def test_changed_bytes_are_refused(tmp_path, capsys, folder):
    base = write_base(tmp_path / "base", "llama")
    path = save(holder(m=zoo.build_model("llama")), tmp_path / "a", folder=folder)
    file = path / "__0_0.distcp" if folder else path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["export", str(path), str(tmp_path / "out"), "--base", str(base)]) == 2
    assert "does not have the checksum" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_heads_are_told_by_their_weights(tmp_path):
    base = write_base(tmp_path / "base", "llama")
    score = zoo.build_model("llama", head="sequence")
    score.config.save_pretrained(base)
    path = save(holder(model=score), tmp_path / "score.ckpt")
    export(path, tmp_path / "score", base=base)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "score")
    assert torch.equal(loaded.score.weight, score.score.weight)
    # A model without a head, and the user's own head beside it.
    body = zoo.build_model("llama").model
    path = save(holder(model=body, head=nn.Linear(64, 3)), tmp_path / "body.ckpt")
    model = export(path, tmp_path / "body", base=base)
    assert type(model).__name__ == "LlamaModel"
    loaded = AutoModel.from_pretrained(tmp_path / "body")
    assert torch.equal(loaded.norm.weight, body.norm.weight)


def test_compiled_models_and_checkpointed_layers_have_marks_in_their_names(tmp_path):
    model = zoo.build_model("llama")
    state = {f"model._orig_mod.{name}": x for name, x in model.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    base = write_base(tmp_path / "base", "llama")
    export(tmp_path / "last.ckpt", tmp_path / "out", base=base)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_of_several_models_one_is_named(tmp_path):
    student, teacher = zoo.build_model("llama"), zoo.build_model("llama", seed=1)
    base = write_base(tmp_path / "base", "llama")
    path = save(holder(student=student, teacher=teacher), tmp_path / "last.ckpt")
    with pytest.raises(
        ValueError, match=r"several LlamaForCausalLM models, with the prefixes '(stu|tea)"
    ):
        export(path, tmp_path / "out", base=base)
    export(path, tmp_path / "out", base=base, prefix="teacher")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, teacher.lm_head.weight)


# ---------------------------------------------------------------- what cannot be exported


def test_another_config_is_refused_with_what_differs(tmp_path):
    base = write_base(tmp_path / "base", "llama")
    config = zoo.build_config("llama")
    config.vocab_size = 128
    config.save_pretrained(base)
    path = save(holder(model=zoo.build_model("llama")), tmp_path / "last.ckpt")
    with pytest.raises(
        ValueError,
        match=r"The closest is LlamaForCausalLM with the prefix 'model.': Error\(s\) in loading "
        r"state_dict for LlamaForCausalLM: size mismatch for model.embed_tokens.weight: copying a "
        r"param with shape torch.Size\(\[97, 64\]\) from checkpoint, the shape in current model is "
        r"torch.Size\(\[128, 64\]\). .* Give the config.json of the training run: --base PATH",
    ):
        export(path, tmp_path / "out", base=base)
    with pytest.raises(
        ValueError, match=r"prefix 'elsewhere.': .* Missing key\(s\) in state_dict: \"model.embed"
    ):
        export(path, tmp_path / "out", base=base, prefix="elsewhere")
    assert not (tmp_path / "out").exists()


def test_a_config_of_no_known_class_must_name_one(tmp_path):
    model = zoo.build_model("musicgen")
    path = save(holder(model=model), tmp_path / "last.ckpt")
    model.config.architectures = None
    model.config.save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError,
        match=r"is a MusicgenDecoderConfig \(model type 'musicgen_decoder'\), which belongs to no "
        r"class of models that can be exported. Name the class in its config.json: \"arch",
    ):
        export(path, tmp_path / "out", base=tmp_path / "base")
    model.config.architectures = ["MusicgenForCausalLM"]
    model.config.save_pretrained(tmp_path / "base")
    export(path, tmp_path / "out", base=tmp_path / "base")
    loaded = type(model).from_pretrained(tmp_path / "out")
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def adapted(seed=0, **options):
    torch.manual_seed(seed + 3)
    given = {"r": 4, "lora_alpha": 20, "target_modules": ["q_proj"], "init_lora_weights": False}
    return get_peft_model(zoo.build_model("llama"), LoraConfig(**{**given, **options}))


def write_adapted(tmp_path, model, *, alone=False, noted=True, **rest):
    """Write a checkpoint as a run of the strategy would; return it, and its base."""
    module = holder(model=model)
    if noted:
        rest |= describe_models(module)
    path = save(module, tmp_path / "last.ckpt", **rest)
    if alone:  # as the recipes do, and users with strict_loading=False
        loaded = torch.load(path, weights_only=True)  # the notes are plain values
        state = loaded["state_dict"]
        loaded["state_dict"] = {n: x for n, x in state.items() if "lora_" in n or "to_save" in n}
        torch.save(loaded, path)
    return path, write_base(tmp_path / "base", "llama")


@pytest.mark.parametrize("alone", [False, True], ids=["with its model", "alone"])
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"], "use_rslora": True}])
def test_adapters_are_exported_alone(tmp_path, alone, options):
    trained = adapted(**options)
    path, base = write_adapted(tmp_path, trained, alone=alone)
    assert main(["export", str(path), str(tmp_path / "out"), "--base", str(base)]) == 0
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= written
    assert "model.safetensors" not in written
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["lora_alpha"]) == (str(base), 20)
    loaded = PeftModel.from_pretrained(zoo.build_model("llama"), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(trained))


def test_adapters_that_are_exported_are_merged_by_peft(tmp_path, capsys):
    trained = adapted()
    expected = logits(trained)
    path, base = write_adapted(tmp_path, trained)
    args = ["export", str(path), str(tmp_path / "out"), "--base", str(base)]
    for merge in ("--merge", "--merge=yes"):
        with pytest.raises(SystemExit, match="2"):
            main([*args, merge])
        error = capsys.readouterr().err
        assert "error: --merge is gone: PEFT merges what export writes: PeftModel.from_pr" in error
        assert len(error.splitlines()) == 1
    assert main(args) == 0
    loaded = PeftModel.from_pretrained(zoo.build_model("llama"), tmp_path / "out")
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(logits(merged), expected)


def test_adapters_that_are_not_all_there_are_refused(tmp_path):
    path, base = write_adapted(tmp_path, adapted(), alone=True)
    loaded = torch.load(path, weights_only=True)
    *_, last = loaded["state_dict"]
    del loaded["state_dict"][last]
    torch.save(loaded, path)
    with pytest.raises(ValueError, match=r"Missing key\(s\) in .*layers.1.self_attn.q_proj.lora_B"):
        export(path, tmp_path / "out", base=base)
    other = adapted(r=2)
    path, base = write_adapted(tmp_path, other, alone=True, noted=False)
    adapted().peft_config["default"].save_pretrained(tmp_path / "config")
    with pytest.raises(ValueError, match=r"size mismatch for .*lora_A.*--base PATH"):
        export(path, tmp_path / "out", base=base, adapter_config=tmp_path / "config")


def test_adapters_of_which_nothing_is_noted_need_their_config(tmp_path):
    trained = adapted()
    path, base = write_adapted(tmp_path, trained, noted=False)
    with pytest.raises(ValueError, match=r"holds a PEFT adapter .*lora_alpha.*--adapter-config"):
        export(path, tmp_path / "out", base=base)
    with pytest.raises(FileNotFoundError, match="no adapter_config.json in"):
        export(path, tmp_path / "out", base=base, adapter_config=base)
    trained.peft_config["default"].save_pretrained(tmp_path / "config")
    export(path, tmp_path / "out", base=base, adapter_config=tmp_path / "config")
    loaded = PeftModel.from_pretrained(zoo.build_model("llama"), tmp_path / "out")
    assert torch.equal(logits(loaded), logits(trained))


def test_options_for_adapters_are_refused_without_any(tmp_path):
    path = save(holder(model=zoo.build_model("llama")), tmp_path / "last.ckpt")
    base = write_base(tmp_path / "base", "llama")
    with pytest.raises(ValueError, match="holds no PEFT adapter"):
        export(path, tmp_path / "out", base=base, adapter_config=base)


def test_the_base_must_be_known(tmp_path):
    path = save(holder(model=zoo.build_model("llama")), tmp_path / "last.ckpt", folder=True)
    with pytest.raises(ValueError, match=r"name no folder with a config.json. .*--base PATH"):
        export(path, tmp_path / "out")
    bases = {name: str(write_base(tmp_path / name, "llama")) for name in ("a", "b")}
    path = save(
        holder(model=zoo.build_model("llama")), tmp_path / "two.ckpt", hyper_parameters=bases
    )
    with pytest.raises(ValueError, match=r"hyperparameters name .*/a, .*/b\. "):
        export(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "There is no checkpoint file"),
        ("empty", "is not a checkpoint: `.metadata` is missing"),
        ("weights", "is not a Lightning checkpoint: it has no `state_dict`"),
        ("text", "is not a checkpoint that torch.load can read"),
        ("full", "exists. Remove it, or give another name"),
    ],
)
def test_a_user_error_is_one_line_and_status_2(tmp_path, capsys, name, message):
    (tmp_path / "empty").mkdir()
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights")
    (tmp_path / "text").write_text("hello")
    out = tmp_path / "out"
    if name == "full":
        out.mkdir()
        (out / "something").touch()
    assert main(["export", str(tmp_path / name), str(out), "--base", str(tmp_path)]) == 2
    said, errors = capsys.readouterr()
    assert said == ""
    assert errors.startswith("error: ")
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_a_size_that_is_none_leaves_nothing_behind(tmp_path, capsys):
    base = write_base(tmp_path / "base", "llama")
    path = save(holder(model=zoo.build_model("llama")), tmp_path / "last.ckpt")
    args = ["export", str(path), str(tmp_path / "out"), "--base", str(base)]
    assert main([*args, "--max-shard-size", "large"]) == 2
    assert {file.name for file in tmp_path.iterdir()} == {"base", "last.ckpt"}
    assert len(capsys.readouterr().err.splitlines()) == 1
