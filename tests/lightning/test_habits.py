"""What Lightning users do, run on one rank and on two: the same numbers, or a refusal."""

from dataclasses import dataclass

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelCallback, token_mean
from lightning_cp.loss.means import global_mean
from lightning_cp.step.active_step import current
from tests import doors
from tests.lightning.jobs import Module as Base
from tests.lightning.jobs import (
    PackedRows,
    build_trainer,
    elastic_environment,
    full,
    loader,
)

pytestmark = pytest.mark.ranks


class Module(Base):
    def __init__(self):
        super().__init__(dtype=torch.float64, lr=0.1)


class Manual(Module):
    """Recipes of manual optimization, selected by ``kind``."""

    def __init__(self, kind):
        super().__init__()
        self.automatic_optimization, self.kind = False, kind

    def training_step(self, batch, batch_idx):
        loss = token_mean(self.logits(batch), batch["labels"])
        raw = self.kind == "raw optimizer"
        optimizer = self.optimizers(use_pl_optimizer=not raw)
        if self.kind == "two backwards":
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(0.5 * loss)
        else:
            self.manual_backward(loss / 2)
        if batch_idx % 2:
            if self.kind == "clipped by torch":
                torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


class TwoNetworks(pl.LightningModule):
    """Two optimizers, switched by toggle_optimizer, stepping at different times."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first = nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 61))
        self.double()

    def training_step(self, batch, batch_idx):
        for optimizer, every in zip(self.optimizers(), (1, 2), strict=True):
            self.toggle_optimizer(optimizer)
            loss = token_mean(self.second(self.first(batch["input_ids"])), batch["labels"])
            self.manual_backward(loss)
            if (batch_idx + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.2) for part in (self.first, self.second)]


class Experts(nn.Module):
    """Routes even tokens to one expert, odd ones to another; the third is never used."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(62, 8), nn.Linear(8, 62)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids):
        x, out = self.tokens(input_ids), 0
        for index in range(2):
            chosen = input_ids % 2 == index
            if chosen.any():  # what ranks with other tokens do not do
                out = out + chosen[..., None] * self.experts[index](x)
        return self.head(x + out)


class Routed(Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.model = Experts().double()

    def logits(self, batch):
        return self.model(batch["input_ids"])


class Overridden(Module):
    """Calls the closure without a step on every other batch, as in Lightning's docs."""

    def __init__(self, kind):
        super().__init__()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class HalfAndHalf(PackedRows):
    """Rows whose first half is even and whose second half is odd: each rank needs one expert."""

    def __init__(self, num_rows):
        super().__init__(num_rows)
        odd = torch.arange(self.tokens.shape[1]) >= 12
        self.tokens = self.tokens // 2 * 2 + odd
        self.labels = self.tokens


JOBS = {
    **dict.fromkeys(("divided", "two backwards", "raw optimizer", "clipped by torch"), Manual),
    "two networks": TwoNetworks,
    "experts": Routed,
    "closure without a step": Overridden,
}


def run_jobs(jobs):
    return [run(*job) for job in jobs]


def run(kind, options):
    """Return the weights after four batches."""
    with elastic_environment():
        module = JOBS[kind](kind)
        strategy = doors.strategy(verify_steps=kind == "experts", **options)
        trainer = build_trainer(strategy=strategy, max_epochs=1)
        rows = HalfAndHalf(8) if kind == "experts" else PackedRows(8)
        trainer.fit(module, loader(rows, 1))
        return {name: full(p.detach()) for name, p in module.named_parameters()}


NONE = {"parameter_sharding": "none"}
ALL = [(kind, options) for kind in JOBS for options in ({}, NONE)]


@pytest.mark.slow
def test_two_ranks_train_as_one_does(ranks):
    kinds = list(dict.fromkeys(kind for kind, _ in ALL))
    exact = dict(zip(kinds, ranks(1).run(run_jobs, [(k, {}) for k in kinds])[0], strict=True))
    spread = {"layout": "contiguous"}  # each rank needs one expert
    shared = [(kind, spread | options if kind == "experts" else options) for kind, options in ALL]
    for results in ranks(2).run(run_jobs, shared):
        for (kind, options), found in zip(ALL, results, strict=True):
            for name, weight in exact[kind].items():
                torch.testing.assert_close(
                    found[name], weight, atol=1e-12, rtol=1e-10, msg=f"{kind} {options} {name}"
                )


class Partly(Module):
    """Adds a term of this rank's tokens to a token mean, or returns it instead."""

    kind = "added"

    def training_step(self, batch, batch_idx):
        logits = self.logits(batch)
        loss = token_mean(logits, batch["labels"])
        if self.kind == "added":
            return loss + 0.01 * logits.square().mean()
        labels = batch["labels"].clone()
        labels[:, 0] = 1
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


class Instead(Partly):
    kind = "instead"


class Mixing(Module):
    """Something that runs along the sequence, and is not attention."""

    def __init__(self, what):
        super().__init__()
        self.model = nn.ModuleDict({"tokens": nn.Embedding(61, 8), "what": what})
        self.head = nn.Linear(8, 61)

    def training_step(self, batch, batch_idx):
        x, what = self.model["tokens"](batch["input_ids"]), self.model["what"]
        x = what(x)[0] if isinstance(what, nn.GRU) else what(x.mT).mT
        return token_mean(self.head(x), batch["labels"])


class MixingByHand(Module):
    """Adds the former token, and logs nothing."""

    def training_step(self, batch, batch_idx):
        logits = self.logits(batch)
        return token_mean(logits + logits.roll(1, 1), batch["labels"])


class OwnKey(Module):
    """Counts labels under a key of its own."""

    def training_step(self, batch, batch_idx):
        logits, targets = self.logits(batch), batch["targets"]
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return global_mean(total, (targets != -100).sum())


class OwnKeyRows(PackedRows):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "targets": row.pop("labels")}


class Failing(Module):
    def training_step(self, batch, batch_idx):
        self.logits(batch)
        raise RuntimeError("on purpose")


def fit_message(module, rows=PackedRows, **options):
    with elastic_environment():
        trainer = build_trainer(strategy=doors.strategy(**options), max_steps=1)
        try:
            trainer.fit(module, loader(rows(4), 1))
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "trained"


def run_refusals(names):
    """Return the errors of models that would be wrong."""
    return {name: fit_message(WOULD_BE_WRONG[name]()) for name in names}


def run_after_a_failure():
    """Return the error of a model, what it does when it is right, and that of an unknown key."""
    failing = Failing()
    first = fit_message(failing)
    assert current() is None
    assert "log" not in failing.__dict__
    failing.__class__ = Module
    return {
        "own key": fit_message(OwnKey(), OwnKeyRows, sequence_dims={"targets": 1}),
        "failing": first,
        "again": fit_message(failing),
    }


WOULD_BE_WRONG = {
    "added": Partly,
    "instead": Instead,
    "conv": lambda: Mixing(nn.Conv1d(8, 8, 3, padding=1)),
    "pointwise": lambda: Mixing(nn.Conv1d(8, 8, 1)),
    "recurrence": lambda: Mixing(nn.GRU(8, 8, batch_first=True)),
    "statistics": lambda: Mixing(nn.BatchNorm1d(8)),
    "by hand": MixingByHand,
}
EXPECTED = {
    "added": "returned a loss: ",
    "instead": "returned a loss: ",
    "conv": "conv1d() was called inside a step",
    "pointwise": "trained",
    "recurrence": "gru() was called inside a step",
    "statistics": "batch_norm() was called inside a step",
    "by hand": "training_step() computed a loss: ",
    "own key": ", so that 2 ranks share them evenly, and `targets` is padded with "
    "0: its name does not say what a loss ignores. Call it `labels`, which is padded with -100; "
    "or leave out tokens where cp.token_mask() is false; or pad sequences to a multiple of 4",
    "failing": "on purpose",
    "again": "trained",
}


QUICK = ("added", "conv", "pointwise", "by hand")
OTHERS = [name for name in WOULD_BE_WRONG if name not in QUICK]


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_what_would_train_wrongly_is_refused_by_all_ranks(ranks, names):
    for found in ranks(2).run(run_refusals, names):
        assert found.keys() == set(names)
        for name, message in found.items():
            assert EXPECTED[name] in message, name


def test_a_step_that_failed_is_right_the_next_time(ranks):
    for found in ranks(2).run(run_after_a_failure):
        for name, message in found.items():
            assert EXPECTED[name] in message, name


class Drawing(Module):
    """Draws numbers and counts steps in training."""

    def __init__(self):
        super().__init__()
        self.count = torchmetrics.SumMetric()
        self.drawn = []

    def setup(self, stage):
        # All context ranks count the same step: it is one.
        self.count.process_group = self.trainer.strategy.data_parallel_group

    def training_step(self, batch, batch_idx):
        self.count(1.0)
        self.log("count", self.count, on_step=False, on_epoch=True)
        self.drawn.append((float(torch.rand(())), self.model.training))
        return super().training_step(batch, batch_idx)


def run_verified(verify, verify_steps):
    with elastic_environment():
        torch.manual_seed(7)
        module = Drawing()
        callbacks = [ContextParallelCallback(verify_first_batch=verify)]
        strategy = doors.strategy(verify_steps=verify_steps)
        trainer = build_trainer(strategy=strategy, max_epochs=1, callbacks=callbacks)
        trainer.fit(module, loader(PackedRows(4), 1))
        weights = {name: full(p.detach()) for name, p in module.named_parameters()}
        return weights, module.drawn[-2:], float(trainer.callback_metrics["count"])


def test_verifying_leaves_no_trace(ranks):
    plain = ranks(2).run(run_verified, False, False)
    assert [count for *_, count in plain] == [2.0, 2.0]
    for how in ((False, True), (True, True)):
        for exact, found in zip(plain, ranks(2).run(run_verified, *how), strict=True):
            assert all(torch.equal(exact[0][name], found[0][name]) for name in exact[0])
            assert exact[1:] == found[1:]
            assert all(is_training for _, is_training in found[1])


@dataclass
class Output:
    logits: torch.Tensor
    name: str


class Predicting(Module):
    def predict_step(self, batch, batch_idx):
        strategy = self.trainer.strategy
        whole = strategy.context_parallel.unshard(batch["input_ids"], 1)
        features = whole.double().mean(1, keepdim=True).expand(-1, 12)  # as many as local tokens
        return {"output": Output(self.logits(batch), "x"), "features": features}


class Flat(Module):
    def predict_step(self, batch, batch_idx):
        return self.logits(batch).flatten(0, 1)


def run_predictions():
    with elastic_environment():
        trainer = build_trainer(strategy=doors.strategy())
        (found,) = trainer.predict(Predicting(), loader(PackedRows(2), 1))
        try:
            trainer.predict(Flat(), loader(PackedRows(2), 1))
        except ValueError as error:
            return found, str(error)


def test_predictions_of_all_kinds_are_whole_or_refused(ranks):
    for found, refused in ranks(2).run(run_predictions):
        assert found["output"].logits.shape[:2] == (2, 23)
        assert found["output"].name == "x"
        assert found["features"].shape == (2, 12)  # per sample, though 12 is the local length
        assert "predict_step() returned output" in refused
        assert "cp.unshard(x, 1)" in refused


class Logging(Module):
    def validation_step(self, batch, batch_idx):
        loss = token_mean(self.logits(batch), batch["labels"])
        self.log("positional", loss, True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log_dict({"one": loss, "other": loss.detach()})


def run_logs():
    with elastic_environment():
        strategy = doors.strategy(data_parallel_size=2)
        trainer = build_trainer(strategy=strategy)
        return trainer.validate(Logging(), loader(PackedRows(8), 2), verbose=False)[0]


def test_however_a_loss_is_logged_it_is_the_mean_over_all_tokens(ranks):
    for found in ranks(4).run(run_logs):
        values = {found[name] for name in ("positional", "both_epoch", "one", "other")}
        assert max(values) - min(values) < 1e-12, found


def run_check_after_validation():
    """Validate often, then train on samples that differ between ranks."""
    with elastic_environment():
        strategy = doors.strategy(verify_steps=False)  # a trial run compares always
        trainer = build_trainer(strategy=strategy, max_steps=2)
        module = Module()
        trainer.validate(module, loader(PackedRows(20), 1), verbose=False)
        rank = trainer.strategy.context_parallel_rank
        try:
            trainer.fit(module, DataLoader(PackedRows(4, seed=rank), batch_size=2))
        except ValueError as error:
            return str(error)


def test_evaluation_does_not_use_up_the_check_of_batches(ranks):
    for message in ranks(2).run(run_check_after_validation):
        assert "must hold the same batch" in message


def run_uneven(sharding):
    with elastic_environment():
        strategy = doors.strategy(data_parallel_size=2, parameter_sharding=sharding)
        trainer = build_trainer(strategy=strategy, max_epochs=1)
        rank = torch.distributed.get_rank()
        try:
            trainer.fit(Module(), DataLoader(PackedRows(2 + rank), batch_size=1))
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("sharding", ["full", "none"])
def test_uneven_training_loaders_are_refused(ranks, sharding):
    for message in ranks(2).run(run_uneven, sharding):
        assert "loaders of different lengths ([2, 3] batches)" in message
