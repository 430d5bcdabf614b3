"""Hugging Face models whose weights are tied, called in parts, or saved, under the strategy."""

from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from hf_patches.weights.export import export
from lightning_cp import token_mean
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.parity import zoo

pytestmark = pytest.mark.ranks

VOCAB, LENGTH = 67, 21
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "embedding_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "classifier_dropout_prob": 0.0,
}
DISTIL = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}


def masked_model(kind):
    """Build a small masked language model, as it comes: its head tied to its table of words."""
    torch.manual_seed(1)
    options = {**SIZES, **NO_DROPOUT, **(DISTIL if kind == "distilbert" else {})}
    if kind == "modernbert":
        options |= {"reference_compile": False, "global_attn_every_n_layers": 2}
        options |= dict.fromkeys(("bos_token_id", "cls_token_id"), 1)
        options |= dict.fromkeys(("eos_token_id", "sep_token_id"), 2)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def masked_batches():
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        ids = torch.randint(5, VOCAB, (2, LENGTH), generator=generator)
        labels = torch.where(torch.rand(2, LENGTH, generator=generator) < 0.3, ids, -100)
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[1, LENGTH - 5 :] = 0
        ids[1, LENGTH - 5 :], labels[1, LENGTH - 5 :] = 0, -100
        batches.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return batches


class Masked(LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.model, self.losses = masked_model(kind), []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train_masked(kinds, sharding, build=Masked):
    found = {}
    for kind in kinds:
        module = build(kind)
        if sharding is None:
            trainer = build_trainer(strategy="auto", devices=1, max_epochs=1)
            trainer.fit(module, DataLoader(masked_batches(), batch_size=None))
        else:
            with elastic_environment():
                strategy = doors.strategy(parameter_sharding=sharding)
                trainer = build_trainer(strategy=strategy, max_epochs=1)
                trainer.fit(module, DataLoader(masked_batches(), batch_size=None))
        weights = {n: full(p.detach()) for n, p in module.named_parameters()}
        found[kind] = module.losses, weights
    return found


COMMON, OTHERS = (
    ["bert", "roberta", "modernbert"],
    ["distilbert", "albert", "xlm-roberta", "electra"],
)


@pytest.mark.parametrize(
    ("num_ranks", "sharding", "kinds"),
    [
        (2, "full", ["bert"]),
        (2, "full", COMMON[1:]),
        (3, "none", COMMON),
        (3, "full", OTHERS),
        (2, "none", OTHERS),
    ],
)
@pytest.mark.slow
def test_masked_language_models_train_as_on_one_device(ranks, num_ranks, sharding, kinds):
    exact = ranks(1).run(train_masked, kinds, None)[0]
    for found in ranks(num_ranks).run(train_masked, kinds, sharding):
        compare(found, exact)


def compare(found, exact):
    for kind, (losses, weights) in exact.items():
        assert found[kind][0] == pytest.approx(losses, abs=1e-6), kind
        for name, weight in weights.items():
            torch.testing.assert_close(
                found[kind][1][name], weight, atol=1e-6, rtol=1e-6, msg=f"{kind} {name}"
            )


# ---------------------------------------------------------------- parts called by themselves


class Inner(LightningModule):
    """Takes hidden states from the inner model, and scores them by the head or by its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.losses = kind, []
        self.model = masked_model(kind) if kind == "roberta" else zoo.build_model(kind).double()
        torch.manual_seed(2)
        width = self.model.get_input_embeddings().embedding_dim
        self.probe = torch.nn.Linear(width, VOCAB, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        ids, mask, labels = (batch[k] for k in ("input_ids", "attention_mask", "labels"))
        inner = self.model.base_model
        if batch_idx == 1:
            embedded = self.model.get_input_embeddings()(ids)
            hidden = inner(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        else:
            hidden = inner(input_ids=ids, attention_mask=mask).last_hidden_state
        shift = self.kind != "roberta"
        loss = token_mean(self.model.lm_head(hidden), labels, shift=shift)
        loss = loss + token_mean(self.probe(hidden), labels, shift=shift)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train_inner(kinds, sharding):
    return train_masked(kinds, sharding, Inner)


@pytest.mark.parametrize(
    ("num_ranks", "sharding"),
    [pytest.param(*x, marks=pytest.mark.slow) for x in [(2, "full"), (3, "full"), (3, "none")]],
)
def test_an_inner_model_sees_whole_rows(ranks, num_ranks, sharding):
    kinds = ["llama", "roberta"]
    exact = ranks(1).run(train_inner, kinds, None)[0]
    for found in ranks(num_ranks).run(train_inner, kinds, sharding):
        compare(found, exact)


# ---------------------------------------------------------------- saving

IDS = torch.arange(10, 52).view(2, 21)


class Causal(LightningModule):
    """Saves its model where users do: in hooks, and after the run."""

    def __init__(self, lora, folder):
        super().__init__()
        self.model, self.folder, self.lora = zoo.build_model("llama"), Path(folder), lora
        if lora:
            torch.manual_seed(0)
            config = LoraConfig(r=4, lora_alpha=20, target_modules=["q_proj", "v_proj"])
            self.model = get_peft_model(self.model, config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def on_train_end(self):
        self.model.save_pretrained(self.folder / "train_end")

    def on_fit_end(self):
        self.model.save_pretrained(str(self.folder / "fit_end"))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def run_saving(folder, lora, sharding):
    """Return the weights, and what was said where only one rank saves."""
    with elastic_environment():
        module = Causal(lora, folder)
        strategy = doors.strategy(parameter_sharding=sharding)
        trainer = build_trainer(strategy=strategy, max_epochs=1)
        batch = {"input_ids": IDS, "labels": IDS}
        trainer.fit(module, DataLoader([batch, batch], batch_size=None))
        trainer.save_checkpoint(Path(folder) / "last.ckpt")
        module.model.save_pretrained(Path(folder) / "after")
        meetings = import_module("lightning_cp.comm.collective_errors")
        patience, meetings.PATIENCE, said = meetings.PATIENCE, timedelta(seconds=1), ""
        if trainer.is_global_zero:
            try:
                module.model.save_pretrained(Path(folder) / "alone")
            except RuntimeError as error:
                said = str(error)
        dist.barrier()
        meetings.PATIENCE = patience
        weights = {name: full(p.detach()) for name, p in module.model.named_parameters()}
        if lora:
            module.model.merge_and_unload().save_pretrained(Path(folder) / "merged")
        return weights, said


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.slow
def test_adapters_are_saved_whole_on_every_rank_alike(ranks, tmp_path, num_ranks):
    (weights, said), *_ = ranks(num_ranks).run(run_saving, str(tmp_path), True, "full")
    trained = Causal(True, tmp_path).model
    trained.load_state_dict(weights)
    expected = logits(trained)
    for name in ("train_end", "fit_end", "after"):
        assert {f.name for f in (tmp_path / name).iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        loaded = PeftModel.from_pretrained(zoo.build_model("llama"), tmp_path / name)
        assert torch.equal(logits(loaded), expected)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
    base = tmp_path / "base"
    zoo.build_config("llama").save_pretrained(base)
    export(tmp_path / "last.ckpt", tmp_path / "exported", base=base)  # the run has noted the rest
    loaded = PeftModel.from_pretrained(zoo.build_model("llama"), tmp_path / "exported")
    assert torch.equal(logits(loaded), expected)
    assert "was called on rank 0, but for 1 s not on rank 1" in said
    assert "without `if trainer.is_global_zero`" in said
    assert not (tmp_path / "alone").exists()


@pytest.mark.parametrize("sharding", [pytest.param("full", marks=pytest.mark.slow), "none"])
def test_models_are_saved_whole_on_every_rank_alike(ranks, tmp_path, sharding):
    (weights, said), *_ = ranks(2).run(run_saving, str(tmp_path), False, sharding)
    trained = zoo.build_model("llama")
    trained.load_state_dict(weights)
    folders = ["train_end", "fit_end", "after"] + (["alone"] if sharding == "none" else [])
    for name in folders:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager")
        assert torch.equal(logits(loaded), logits(trained))
        assert "lightning_cp" not in (tmp_path / name / "config.json").read_text()
        assert '"LlamaForCausalLM"' in (tmp_path / name / "config.json").read_text()
    if sharding == "full":
        assert "LlamaForCausalLM.save_pretrained() was called on rank 0" in said
        assert not (tmp_path / "alone").exists()
