"""What users do with parameters in a step: tied weights, parts, penalties, norms of gradients.

The reference is the same module under a plain Trainer on one device.
"""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_cp import ContextParallelStrategy, token_mean
from tests.lightning.jobs import build_trainer, elastic_environment, full

pytestmark = pytest.mark.ranks

VOCAB, DIM = 37, 12


class Rows(Dataset):
    """Rows of an odd length; some have few labels."""

    def __init__(self, length=19):
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, VOCAB, (6, length), generator=generator)
        self.labels = self.tokens.clone()
        self.labels[::2, : length - 4] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {
            "input_ids": self.tokens[index],
            "labels": self.labels[index],
            "position_ids": torch.arange(self.tokens.shape[1]),
        }


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, position_ids):
        return self.head(self.body(input_ids, position_ids))


class Base(LightningModule):
    """Trains a net; subclasses compute other logits or losses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.model = Net()
        self.prepare()
        self.double()
        self.seen = []

    def prepare(self):
        pass

    def logits(self, ids, positions):
        return self.model(ids, positions)

    def training_step(self, batch, batch_idx):
        logits = self.logits(batch["input_ids"], batch["position_ids"])
        loss = self.loss(logits, batch)
        self.seen.append(float(loss.detach()))
        return loss

    def loss(self, logits, batch):
        return token_mean(logits, batch["labels"])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.3, momentum=0.9)


# ---------------------------------------------------------------- tied weights


class TiedChildren(Base):
    """Three children of the LightningModule, two of which share a weight."""

    def prepare(self):
        self.model = Body()
        self.head = nn.Linear(DIM, VOCAB)
        self.other = nn.Linear(VOCAB, VOCAB)
        self.head.weight = self.model.tokens.weight

    def logits(self, ids, positions):
        return self.other(self.head(self.model(ids, positions)))


class TiedBlocks(Base):
    """Weights shared by two blocks, and by a block and the root."""

    def prepare(self):
        first, second = self.model.body.blocks
        second.qkv.weight = first.qkv.weight
        first.norm.weight = self.model.body.norm.weight


# ---------------------------------------------------------------- parts called by themselves


class Parts(Base):
    """Everything but the model itself is called, a block first of all."""

    def logits(self, ids, positions):
        body = self.model.body
        x = body.blocks[0](F.one_hot(ids % DIM, DIM).double())
        x = x + body.tokens(ids) + body.positions(positions)
        return self.model.head(body.norm(x + body.blocks[1](x)))


class Hidden(Base):
    """The inner model for hidden states, then its head; and all of it once more."""

    def logits(self, ids, positions):
        hidden = self.model.body(ids, positions)
        return self.model.head(hidden) + 0.5 * self.model(ids.flip(0), positions)


class After(Base):
    """The head again, after the whole model."""

    def logits(self, ids, positions):
        logits = self.model(ids, positions)
        return logits + self.model.head(logits[..., :DIM])


class Recomputed(Base):
    """A part that is recomputed in backward."""

    def logits(self, ids, positions):
        hidden = checkpoint(self.model.body, ids, positions, use_reentrant=False)
        return self.model.head(hidden)


class InPlace(Base):
    """An operation in place on what a unit has returned, which is a view."""

    def logits(self, ids, positions):
        logits = self.model(ids, positions)
        logits += torch.arange(VOCAB) * 0.1 * positions[..., None]
        logits.mul_(1.5)
        return logits


JOBS = {job.__name__: job for job in (TiedChildren, TiedBlocks, Parts, Hidden, After, InPlace)}
JOBS["Recomputed"] = Recomputed


def run(names, sharding):
    """Return the losses and weights of several jobs after three steps."""
    found = {}
    for name in names:
        module = JOBS[name]()
        trainer_options = {"max_epochs": 1, "strategy": "auto", "devices": 1}
        if sharding is None:
            build_trainer(**trainer_options).fit(module, DataLoader(Rows(), batch_size=2))
        else:
            with elastic_environment():
                strategy = ContextParallelStrategy(parameter_sharding=sharding)
                trainer = build_trainer(strategy=strategy, max_epochs=1)
                trainer.fit(module, DataLoader(Rows(), batch_size=2))
        weights = {n: full(p.detach()) for n, p in module.named_parameters()}
        found[name] = module.seen, weights
    return found


def check(ranks, names, num_ranks, sharding):
    exact = ranks(1).run(run, names, None)[0]
    for found in ranks(num_ranks).run(run, names, sharding):
        for name, (seen, weights) in exact.items():
            assert found[name][0] == pytest.approx(seen, abs=1e-12), name
            assert found[name][1].keys() == weights.keys()
            for key, weight in weights.items():
                torch.testing.assert_close(
                    found[name][1][key], weight, atol=1e-11, rtol=1e-9, msg=f"{name} {key}"
                )


GRID = [(2, "full"), (3, "none")]
WIDER = [pytest.param(*x, marks=pytest.mark.slow) for x in [(3, "full"), (2, "none")]]


@pytest.mark.parametrize(("num_ranks", "sharding"), GRID + WIDER)
def test_tied_weights_and_parts_train_as_on_one_device(ranks, num_ranks, sharding):
    check(ranks, list(JOBS), num_ranks, sharding)
