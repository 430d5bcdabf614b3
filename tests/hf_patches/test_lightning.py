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


class Batches(Dataset):
    """One packed batch for each step, each with other tokens."""

    def __init__(self, num_steps):
        generator = torch.Generator().manual_seed(3)
        pattern = build_batch(Job("llama", "packed"), zoo.VOCAB_SIZE, 1)
        self.batches = []
        for _ in range(num_steps):
            order = torch.randperm(zoo.VOCAB_SIZE - 5, generator=generator) + 5
            ids = order[pattern["input_ids"] - 5]
            labels = torch.where(pattern["labels"] == -100, -100, ids)
            self.batches.append({**pattern, "input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.batches)

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


def train(name, lora, options, num_steps):
    with elastic_environment():
        module = Module(name, lora)
        trainer = build_trainer(
            strategy=doors.strategy(**options),
            max_epochs=1,
            gradient_clip_val=1.0,
            callbacks=[ContextParallelCallback(verify_first_batch=True)],
        )
        trainer.fit(module, DataLoader(Batches(num_steps), batch_size=None))
        weights = {n: full(p.detach()) for n, p in module.model.named_parameters()}
        return module.losses[-num_steps:], weights  # the first may have been verified


def train_alone(name, lora, num_steps):
    """Train the stock model, with each document in a row of its own.

    Return its losses, its weights, and the loss of the first batch after training.
    """
    model = build(name, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    losses = []
    batches = [unpack(batch, 1) for batch in Batches(num_steps).batches]
    for batch in batches:
        loss = model(**batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return losses, weights, float(model(**batches[0]).loss.detach())


KEEP = {"keep_attention": "all"}
MEMORY = {**KEEP, "activation_checkpointing": True, "offload": "all", "tile": 8}


@pytest.mark.parametrize(
    ("name", "lora", "options", "num_steps"),
    [
        ("llama", False, MEMORY, 2),
        *(
            (*run, 30)
            for run in (
                ("llama", False, {}),
                ("llama", False, MEMORY),
                ("gpt_oss", True, MEMORY),
                ("llama", True, {**MEMORY, "compile": "layers"}),
                ("llama", True, {}),
                ("gpt_oss", True, {}),
                ("gpt_oss", False, {}),
                ("llama", False, KEEP),
                ("llama", True, {**KEEP, "algorithm": "ulysses"}),
                ("gpt_oss", True, KEEP),
            )
        ),
    ],
)
@pytest.mark.slow
def test_training_equals_that_of_one_process(ranks, name, lora, options, num_steps):
    exact_losses, exact, last = train_alone(name, lora, num_steps)
    assert last < exact_losses[0]
    for losses, weights in ranks(2).run(train, name, lora, options, num_steps):
        assert losses == pytest.approx(exact_losses, abs=1e-4)
        assert max(float((weights[n] - exact[n]).abs().max()) for n in exact) < 1e-4
