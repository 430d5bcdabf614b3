"""Hugging Face models whose weights are tied, called in parts, or saved, under the strategy."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForMaskedLM

from lightning_cp import ContextParallelStrategy
from tests.lightning.jobs import build_trainer, elastic_environment, full

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


def train_masked(kinds, sharding):
    found = {}
    for kind in kinds:
        module = Masked(kind)
        if sharding is None:
            trainer = build_trainer(strategy="auto", devices=1, max_epochs=1)
            trainer.fit(module, DataLoader(masked_batches(), batch_size=None))
        else:
            with elastic_environment():
                strategy = ContextParallelStrategy(parameter_sharding=sharding)
                trainer = build_trainer(strategy=strategy, max_epochs=1)
                trainer.fit(module, DataLoader(masked_batches(), batch_size=None))
        weights = {n: full(p.detach()) for n, p in module.model.named_parameters()}
        found[kind] = module.losses, weights
    return found


COMMON, OTHERS = (
    ["bert", "roberta", "modernbert"],
    ["distilbert", "albert", "xlm-roberta", "electra"],
)


@pytest.mark.parametrize(
    ("num_ranks", "sharding", "kinds"),
    [
        (2, "full", COMMON),
        pytest.param(3, "none", COMMON, marks=pytest.mark.slow),
        pytest.param(3, "full", OTHERS, marks=pytest.mark.slow),
        pytest.param(2, "none", OTHERS, marks=pytest.mark.slow),
    ],
)
def test_masked_language_models_train_as_on_one_device(ranks, num_ranks, sharding, kinds):
    exact = ranks(1).run(train_masked, kinds, None)[0]
    for found in ranks(num_ranks).run(train_masked, kinds, sharding):
        for kind, (losses, weights) in exact.items():
            assert found[kind][0] == pytest.approx(losses, abs=1e-6), kind
            for name, weight in weights.items():
                torch.testing.assert_close(
                    found[kind][1][name], weight, atol=1e-6, rtol=1e-6, msg=f"{kind} {name}"
                )
