"""Steps through the strategy: losses that raise, predictions, checkpointing, precisions."""

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_cp import token_mean
from tests import doors
from tests.lightning.jobs import (
    LENGTH,
    VOCAB,
    Fit,
    Module,
    PackedRows,
    build_trainer,
    elastic_environment,
    full,
    loader,
    run_alone,
    worst,
)
from tests.parity.sdpa_models import DIM, GPTBlock
from tests.parity.steps import build_model, whole_loss

pytestmark = pytest.mark.ranks


class LocalMean(Module):
    """Returns the mean over this rank's labels, shifted by the data set."""

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.logits(batch).flatten(0, 1), batch["labels"].flatten())
        return {"loss": loss, "other": 1}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"] * self.trainer.accumulate_grad_batches))


class ManualLocalMean(LocalMean):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Shifted(PackedRows):
    """Samples whose labels are shifted already; some have few labels."""

    def __init__(self, num_rows):
        super().__init__(num_rows)
        same = self.documents[:, 1:] == self.documents[:, :-1]
        self.labels[:, :-1] = torch.where(same, self.labels[:, 1:], -100)
        self.labels[:, -1] = -100


def run_local_mean(manual, loss):
    with elastic_environment():
        module = ManualLocalMean() if manual else LocalMean()
        options = {} if manual else {"accumulate_grad_batches": 2}
        trainer = build_trainer(
            strategy=doors.strategy(loss=loss, verify_steps=not manual),
            max_epochs=1,
            **options,
        )
        try:
            trainer.fit(module, loader(Shifted(8), 1))
        except ValueError as error:
            return str(error)
        return {n: full(p.detach()) for n, p in module.model.named_parameters()}, module.losses


@pytest.mark.parametrize(
    ("cp_size", "manual"),
    [(2, False), *(pytest.param(3, manual, marks=pytest.mark.slow) for manual in (False, True))],
)
def test_a_local_mean_is_weighed_by_its_labels(ranks, cp_size, manual):
    model, rows = build_model(torch.float32), PackedRows(8)
    losses = []
    for step in range(2):
        parts = [whole_loss(model, rows.rows(2 * i, 2 * i + 2)) for i in (2 * step, 2 * step + 1)]
        losses += [float((total / count).detach()) for total, count in parts]
        # By hand the arithmetic is the user's own: here, a sum of means.
        by_hand = sum(t / c for t, c in parts)
        (by_hand if manual else sum(t for t, _ in parts) / sum(c for _, c in parts)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad
                parameter.grad = None
    for weights, found in ranks(cp_size).run(run_local_mean, manual, "local_mean"):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), atol=1e-5, rtol=0)
        if not manual:
            assert found == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("manual", [False, True])
def test_a_loss_of_unknown_origin_raises(ranks, manual):
    for message in ranks(2).run(run_local_mean, manual, "auto"):
        assert "not known to be a mean over the tokens of all ranks" in message
        assert "loss='local_mean'" in message


def run_predict():
    with elastic_environment():
        module = Module()
        trainer = build_trainer(strategy=doors.strategy(), max_steps=1)
        predictions = trainer.predict(module, loader(PackedRows(4), 1))
        tested = trainer.test(module, loader(PackedRows(4), 1), verbose=False)
        trainer.validate(module, loader(PackedRows(4), 1), verbose=False)
        # Evaluated first, trained after: nothing that was gathered is left over.
        trainer.fit(module, loader(PackedRows(4), 1))
        return [p["logits"] for p in predictions], predictions[0]["rows"].shape, tested[0]


def test_predictions_are_full_sequences(ranks):
    model, rows = build_model(torch.float32), PackedRows(4)
    total, count = whole_loss(model, rows.rows(0, 4))
    for found, other, tested in ranks(2).run(run_predict):
        logits = torch.cat(found)
        assert logits.shape == (4, LENGTH, VOCAB)
        assert other == (2,)  # one number per sample is not changed
        targets = Shifted(4).labels
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert float(loss) == pytest.approx(float((total / count).detach()), abs=1e-5)
        assert tested["val_loss"] == pytest.approx(float(loss), abs=1e-5)


class Transposed(Module):
    def predict_step(self, batch, batch_idx):
        return self.logits(batch).mT


def run_transposed():
    with elastic_environment():
        trainer = build_trainer(strategy=doors.strategy())
        (found,) = trainer.predict(Transposed(), loader(PackedRows(2), 1))
        (logits,) = trainer.predict(Module(), loader(PackedRows(2), 1))
        unverified = build_trainer(strategy=doors.strategy(verify_steps=False))
        try:
            unverified.predict(Transposed(), loader(PackedRows(2), 1))
        except ValueError as error:
            return found, logits["logits"], str(error)


def test_predictions_are_whole_along_whichever_dim_their_tokens_lie(ranks):
    for found, logits, refused in ranks(2).run(run_transposed):
        assert torch.equal(found, logits.mT)
        assert "computed from the tokens of one rank" in refused


class SdpaModule(pl.LightningModule):
    """Stock SDPA under activation checkpointing, without any call of lightning_cp."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(VOCAB, DIM)
        self.blocks = torch.nn.ModuleList(GPTBlock(bool(i)) for i in range(2))
        self.head = torch.nn.Linear(DIM, VOCAB)
        self.double()
        self.reentrant = reentrant

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch["input_ids"])
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return token_mean(self.head(x), batch["labels"])

    def on_before_optimizer_step(self, optimizer):
        self.grads = {n: full(p.grad).clone() for n, p in self.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_sdpa(reentrant):
    with elastic_environment():
        module = SdpaModule(reentrant)
        rows = DataLoader(NoDocuments(4), batch_size=2)
        trainer = build_trainer(strategy=doors.strategy(), max_steps=1, accumulate_grad_batches=2)
        trainer.fit(module, rows)
        return module.grads


class NoDocuments(PackedRows):
    def __getitem__(self, index):
        return {k: v for k, v in super().__getitem__(index).items() if k != "document_ids"}


@pytest.mark.slow
def test_activation_checkpointing_of_stock_attention_is_exact(ranks):
    exact = ranks(1).run(run_sdpa, None)[0]
    for grads in ranks(2).run(run_sdpa, False):
        for name, gradient in exact.items():
            torch.testing.assert_close(grads[name], gradient, atol=1e-12, rtol=1e-10)


def run_precision(precision):
    with elastic_environment():
        module = Module()
        strategy = doors.strategy(verify_steps=precision.startswith("bf16"))
        trainer = build_trainer(strategy=strategy, max_epochs=1, precision=precision)
        trainer.fit(module, loader(PackedRows(4), 1))
        dtypes = {p.dtype for p in module.parameters()}
        return module.losses, dtypes


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        pytest.param("bf16-mixed", torch.float32, marks=pytest.mark.slow),
        ("bf16-true", torch.bfloat16),
        pytest.param("16-true", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_every_precision_trains_like_one_process(ranks, precision, dtype):
    exact = run_alone(Fit(num_microbatches=2, epochs=1, clip=None))["losses"]
    for losses, dtypes in ranks(2).run(run_precision, precision):
        assert dtypes == {dtype}
        assert losses == pytest.approx(exact, rel=1e-5 if precision == "32-true" else 0.03)


class TwoLosses(Module):
    """Two means over different tokens in one step."""

    def training_step(self, batch, batch_idx):
        logits = self.logits(batch)
        fewer = batch["labels"].masked_fill(batch["input_ids"] % 2 == 0, -100)
        return token_mean(logits, batch["labels"]) + token_mean(logits, fewer)


def run_two_losses(accumulate):
    with elastic_environment():
        trainer = build_trainer(
            strategy=doors.strategy(), max_steps=1, accumulate_grad_batches=accumulate
        )
        try:
            trainer.fit(TwoLosses(), loader(PackedRows(8), 1))
        except RuntimeError as error:
            return str(error)
        return "trained"


@pytest.mark.slow
def test_two_losses_over_different_tokens_are_not_accumulated(ranks):
    assert ranks(2).run(run_two_losses, 1) == ["trained", "trained"]
    for message in ranks(2).run(run_two_losses, 2):
        assert "two means over different numbers of tokens or samples" in message


def test_the_difference_that_tests_look_for_is_seen():
    fit = Fit(num_microbatches=4, epochs=1)
    exact = run_alone(fit)
    other = run_alone(Fit(num_microbatches=4, epochs=1, accumulate=2))
    with pytest.raises(AssertionError):
        worst(other, exact)
