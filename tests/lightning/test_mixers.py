"""Fine-tuning of hybrids and indexers through the strategy equals that of one process."""

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from tests.lightning.jobs import build_strategy, build_trainer, elastic_environment, full
from tests.parity import zoo

pytestmark = pytest.mark.ranks

NUM_STEPS, LENGTH = 12, 61
LR = 0.02
TARGETS = {
    "qwen3_next": ["in_proj_qkvz", "q_proj", "out_proj"],
    "nemotron_h": ["in_proj", "q_proj", "down_proj"],
    "lfm2": ["in_proj", "q_proj", "w2"],
    "deepseek_v32": ["q_a_proj", "kv_b_proj", "o_proj"],
    "gpt_neo": ["q_proj", "out_proj", "c_fc"],
}


def build(name, lora):
    # In float32, rounding decides between keys that an indexer gives almost equal scores.
    model = zoo.build_model(name, dtype=torch.float64 if name == "deepseek_v32" else torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not lora:
        return model
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS[name])).to(model.dtype)
    model.enable_input_require_grads()
    return model


def batches():
    """Return batches whose samples end with padding, each with other numbers of tokens."""
    drawn = []
    for step in range(NUM_STEPS):
        batch = zoo.sample_batch("llama", length=LENGTH, seed=step % 6)
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, LENGTH - 5 * (step % 3) :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
        drawn.append(batch)
    return drawn


class Tuned(LightningModule):
    def __init__(self, name, lora):
        super().__init__()
        self.model, self.losses = build(name, lora), []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LR)


def tune(name, lora):
    """Train on the ranks of the pool; return the losses and the trained weights."""
    with elastic_environment():
        module = Tuned(name, lora)
        trainer = build_trainer(
            strategy=build_strategy(verify_steps=False),
            max_epochs=1,
            gradient_clip_val=1.0,
            precision="32-true",
        )
        trainer.fit(module, DataLoader(batches(), batch_size=None))
        trained = {n: p for n, p in module.model.named_parameters() if p.requires_grad}
        return module.losses, {n: full(p.detach()) for n, p in trained.items()}


def tune_alone(name, lora):
    """Train the stock model in plain torch on one process."""
    model = build(name, lora).train()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=LR)
    losses = []
    for batch in batches():
        loss = model(**batch, use_cache=False).loss
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in trained.items()}


CASES = [(name, lora, size) for name in TARGETS for lora in (False, True) for size in (2, 4)]
QUICK = {("lfm2", False, 2)}


@pytest.mark.parametrize(
    ("name", "lora", "size"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_steps_equal_those_of_one_process(ranks, name, lora, size):
    losses, weights = tune_alone(name, lora)
    assert sum(losses[-6:]) < sum(losses[:6])  # of the same six batches
    for found, trained in ranks(size).run(tune, name, lora):
        assert found == pytest.approx(losses, abs=2e-5)
        assert trained.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(trained[key], weight, atol=2e-5, rtol=1e-4, msg=key)
