"""What users do with parameters in a step: tied weights, parts, penalties, norms of gradients.

The reference is the same module under a plain Trainer on one device.
"""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_cp import token_mean
from tests.lightning.jobs import build_strategy, build_trainer, elastic_environment, full

pytestmark = pytest.mark.ranks

VOCAB, DIM = 37, 12


class Rows(Dataset):
    """Rows of an odd length; some have few labels."""

    def __init__(self, length=19):
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, VOCAB, (4, length), generator=generator)
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


# ---------------------------------------------------------------- submodules called directly


class Parts(Base):
    """Calls all submodules but not the model, a block first."""

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
    """Calls the head again, after the full model."""

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
        logits += torch.arange(VOCAB, device=ids.device) * 0.1 * positions[..., None]
        logits.mul_(1.5)
        return logits


# ---------------------------------------------------------------- terms over parameters


class Penalty(Base):
    """L2, L1 and norms of parameters, frozen ones too, before and after the model runs."""

    def prepare(self):
        self.model.body.blocks[0].out.requires_grad_(False)
        self.model.body.positions.requires_grad_(False)

    def logits(self, ids, positions):
        self.before = sum(p.abs().sum() for p in self.parameters())
        return self.model(ids, positions)

    def loss(self, logits, batch):
        square = sum(p.pow(2).sum() for p in self.model.parameters())
        norms = torch.stack([p.norm() for p in self.parameters() if p.ndim > 1]).sum()
        mean = token_mean(logits, batch["labels"])
        return mean + 0.01 * square + 0.001 * (self.before + norms)


class PenaltyOfBlocks(Base):
    """A term over the parameters of one block, through the model's own part."""

    def loss(self, logits, batch):
        block = self.model.body.blocks[1]
        term = torch.linalg.vector_norm(block.qkv.weight) + (block.out.weight**4).mean()
        return token_mean(logits, batch["labels"]) + 0.1 * term


# ---------------------------------------------------------------- norms of gradients


class Norms(Base):
    """Norms of gradients and weights, as users log them."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def log(self, name, value, **options):
        self.note(self.model.body.blocks[0].qkv.weight.norm())  # resharded, if within the step
        super().log(name, value, **options)

    def on_after_backward(self):
        self.note(self.model.head.weight.grad.norm(), self.model.head.weight.norm())

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(grads)
        squares = sum(p.grad.data.norm(2).item() ** 2 for p in self.parameters())
        largest = max(g.abs().max() for g in grads)
        finite = all(torch.isfinite(g).all() for g in grads)
        self.note(*norms.values(), total, squares, largest, float(finite))
        self.log("total", total)
        self.log("one", self.model.head.weight.grad.norm(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self):
        self.note(*(self.trainer.callback_metrics[name] for name in ("total", "one_epoch")))

    def note(self, *values):
        assert not any(hasattr(value, "full_tensor") for value in values)
        self.seen += [float(value) for value in values]


class ManualNorms(Norms):
    """The same by manual optimization, clipped."""

    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        grads = [p.grad for p in self.parameters()]
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1), grads[0].norm())
        optimizer.step()
        optimizer.zero_grad()


JOBS = {
    job.__name__: job
    for job in (
        TiedChildren,
        TiedBlocks,
        Parts,
        Hidden,
        After,
        Recomputed,
        InPlace,
        Penalty,
        PenaltyOfBlocks,
        Norms,
        ManualNorms,
    )
}


def run(names, sharding):
    """Return the losses and weights of several jobs after two steps."""
    found = {}
    for name in names:
        module = JOBS[name]()
        trainer_options = {"max_epochs": 1, "strategy": "auto", "devices": 1}
        if sharding is None:
            build_trainer(**trainer_options).fit(module, DataLoader(Rows(), batch_size=2))
        else:
            with elastic_environment():
                # Trial runs: of parts called directly, a tied weight, terms over parameters.
                verify = name in ("Hidden", "TiedChildren", "Penalty")
                strategy = build_strategy(parameter_sharding=sharding, verify_steps=verify)
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


TERMS = ["Penalty", "PenaltyOfBlocks", "Norms", "ManualNorms"]
PARAMETERS = [name for name in JOBS if name not in TERMS]
GRID = [(2, "full")]
WIDER = [pytest.param(*x, marks=pytest.mark.slow) for x in [(3, "full"), (2, "none"), (3, "none")]]


@pytest.mark.parametrize(("num_ranks", "sharding"), GRID + WIDER)
@pytest.mark.slow
def test_tied_weights_and_parts_train_as_on_one_device(ranks, num_ranks, sharding):
    check(ranks, PARAMETERS, num_ranks, sharding)


@pytest.mark.parametrize("name", ["ManualNorms", pytest.param("Penalty", marks=pytest.mark.slow)])
def test_terms_over_parameters_and_norms_of_gradients_are_whole(ranks, name):
    check(ranks, [name], 2, "full")


@pytest.mark.parametrize(("num_ranks", "sharding"), GRID + WIDER)
@pytest.mark.slow
def test_other_terms_and_norms_are_whole(ranks, num_ranks, sharding):
    check(ranks, TERMS, num_ranks, sharding)


class Mixed(Base):
    """A parameter without its module."""

    def logits(self, ids, positions):
        x = F.one_hot(ids % DIM, DIM).double()
        return F.linear(x, self.model.head.weight) + self.model(ids, positions)


class Between(Base):
    """A term over gathered parameters between two calls, which backward gives back too early."""

    def logits(self, ids, positions):
        logits = self.model(ids, positions)
        self.term = sum(p.pow(2).sum() for p in self.parameters())
        return logits + self.model.head(logits[..., :DIM])

    def loss(self, logits, batch):
        return token_mean(logits, batch["labels"]) + 0.1 * self.term


class TooLate(Between):
    """The same with an operation whose backward needs no value, so that torch does not raise."""

    def logits(self, ids, positions):
        x = self.model.head(F.one_hot(ids % DIM, DIM).double())
        self.term = sum(p.sum() for p in self.parameters())
        return self.model.head(x[..., :DIM].detach().requires_grad_())


class Listed(Between):
    """The same in a list, where a use is only noticed by its gradient, after backward."""

    def logits(self, ids, positions):
        x = self.model.head(F.one_hot(ids % DIM, DIM).double())
        self.term = torch.cat([self.model.head.bias] * 2).sum()
        return self.model.head(x[..., :DIM].detach().requires_grad_())


def run_refused():
    found = {}
    for job in (Mixed, Between, TooLate, Listed):
        with elastic_environment():
            trainer = build_trainer(strategy=build_strategy(), max_steps=1)
            try:
                trainer.fit(job(), DataLoader(Rows(), batch_size=2))
            except RuntimeError as error:
                found[job.__name__] = str(error)
    return found


def test_parameters_that_would_not_get_their_gradient_are_refused_by_all_ranks(ranks):
    for said in ranks(2).run(run_refused):
        assert "linear() got a sharded parameter" in said["Mixed"]
        for name in ("Between", "TooLate", "Listed"):
            assert "used directly between two calls of the module" in said[name]
