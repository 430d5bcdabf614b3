"""Hugging Face models trained through the strategy: the curves of one process."""

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset

from lightning_cp import ContextParallelCallback
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.parity import zoo
from tests.parity.hf import Job, build_batch, unpack

pytestmark = pytest.mark.ranks

STEPS = 30


class Batches(Dataset):
    """One packed batch for each step, each with other tokens."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        pattern = build_batch(Job("llama", "packed"), zoo.VOCAB_SIZE, 1)
        self.batches = []
        for _ in range(STEPS):
            order = torch.randperm(zoo.VOCAB_SIZE - 5, generator=generator) + 5
            ids = order[pattern["input_ids"] - 5]
            labels = torch.where(pattern["labels"] == -100, -100, ids)
            self.batches.append({**pattern, "input_ids": ids, "labels": labels})

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return self.batches[index]


def build(name, lora):
    model = zoo.build_model(name)
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Module(LightningModule):
    """A user's module: nothing in it knows about context parallelism."""

    def __init__(self, name, lora):
        super().__init__()
        self.model = build(name, lora)
        if not lora:
            self.backbone = self.model.get_decoder()  # a second name for a part of it
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def train(name, lora, options):
    with elastic_environment():
        module = Module(name, lora)
        trainer = build_trainer(
            strategy=doors.strategy(**options),
            max_epochs=1,
            gradient_clip_val=1.0,
            callbacks=[ContextParallelCallback(verify_first_batch=True)],
        )
        trainer.fit(module, DataLoader(Batches(), batch_size=None))
        weights = {n: full(p.detach()) for n, p in module.model.named_parameters()}
        return module.losses[1:] if len(module.losses) > STEPS else module.losses, weights


def train_alone(name, lora):
    """The stock model, each document in a row of its own."""
    model = build(name, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    losses = []
    for batch in Batches().batches:
        loss = model(**unpack(batch, 1)).loss
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


KEEP = {"keep_attention": "all"}
MEMORY = {**KEEP, "activation_checkpointing": True, "offload": "all", "tile": 8}


@pytest.mark.parametrize(
    ("name", "lora", "options"),
    [
        pytest.param("llama", False, {}, marks=pytest.mark.slow),
        ("llama", False, MEMORY),
        pytest.param("gpt_oss", True, MEMORY, marks=pytest.mark.slow),
        pytest.param("llama", True, {**MEMORY, "compile": "layers"}, marks=pytest.mark.slow),
        pytest.param("llama", True, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, {}, marks=pytest.mark.slow),
        pytest.param("llama", False, KEEP, marks=pytest.mark.slow),
        pytest.param("llama", True, {**KEEP, "algorithm": "ulysses"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, KEEP, marks=pytest.mark.slow),
    ],
)
def test_thirty_steps_equal_those_of_one_process(ranks, name, lora, options):
    exact_losses, exact = train_alone(name, lora)
    assert exact_losses[-1] < exact_losses[0]
    for losses, weights in ranks(2).run(train, name, lora, options):
        assert losses[-STEPS:] == pytest.approx(exact_losses, abs=1e-4)
        assert max(float((weights[n] - exact[n]).abs().max()) for n in exact) < 1e-4
