"""Losses of samples, computed from full sequences: on ranks as on one device, or refused."""

import re

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cp import ContextParallelCallback, sample_mean, token_mean
from tests import doors
from tests.lightning import features
from tests.lightning.features import Rows, alone, results
from tests.lightning.jobs import build_trainer, elastic_environment

pytestmark = pytest.mark.ranks

KINDS = ("contrastive", "sample means", "both", "parts", "manual")


class Uneven(Rows):
    """Rows with other numbers of labels each."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        labels = row["labels"].clone()
        labels[: 3 + index % 5] = -100
        return {**row, "labels": labels}


class Pair(Rows):
    """A question and a longer answer."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {"question": {k: x[:9] for k, x in row.items()}, "answer": row}


def contrast(a, b):
    """Return InfoNCE of each sample of ``a``: its partner in ``b`` among all."""
    a, b = normalize(a, dim=1), normalize(b, dim=1)
    return cross_entropy(a @ b.mT / 0.1, torch.arange(len(a)), reduction="none")


class Module(features.Module):
    """Losses selected by ``kind``; on one device, the mean over what would be data ranks."""

    def __init__(self, kind, num_parts=1):
        super().__init__(lr=0.1)
        self.kind, self.num_parts = kind, num_parts
        self.automatic_optimization = kind != "manual"

    @property
    def cp(self):
        return None if alone() else self.trainer.strategy.context_parallel

    def pooled(self, batch):
        hidden = self.backbone(batch["input_ids"], batch["position_ids"])
        return hidden.mean(1) if alone() else self.cp.pool(hidden, "mean")

    def sample_losses(self, batch):
        logits, labels = self(batch), batch["labels"]
        if not alone():
            logits, labels = self.cp.unshard(logits, 1), self.cp.unshard(labels, 1)
        each = cross_entropy(logits.mT, labels, reduction="none")
        return each.sum(1) / (labels != -100).sum(1)

    def over_parts(self, *embeddings):
        """Return the mean over samples; negatives are those of one data rank."""
        parts = [[x[i :: self.num_parts] for x in embeddings] for i in range(self.num_parts)]
        loss = torch.cat([contrast(*part) for part in parts]).mean()
        return sample_mean(loss)  # a scalar; outside of a step it is returned unchanged

    def loss(self, batch):
        if self.kind == "parts" and alone():
            return self.over_parts(*(self.pooled(batch[x]) for x in ("question", "answer")))
        if self.kind == "parts":
            with self.cp.step(batch["question"]) as question:
                asked = self.pooled(question)
            with self.cp.step(batch["answer"]) as answer:
                answered = self.pooled(answer)
            return self.over_parts(asked, answered)
        if self.kind in ("sample means", "manual"):
            return sample_mean(self.sample_losses(batch))
        x = self.pooled(batch)
        loss = self.over_parts(x, x.roll(1, 1) + 0.1)
        return loss + token_mean(self(batch), batch["labels"]) if self.kind == "both" else loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen.append(float(loss.detach()))
        if self.kind != "manual":
            return loss
        window = None if alone() else self.trainer.strategy.gradient_window
        self.manual_backward(loss / 2 if window is None else loss * window.weigh())
        if batch_idx % 2:
            if window is not None:
                window.finish(self.parameters())
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def validation_step(self, batch, batch_idx):
        if self.kind != "parts":
            self.log("val_loss", sample_mean(self.sample_losses(batch)))


def build_loader(rows, batch_size, dp_size):
    if alone():
        return DataLoader(rows, batch_size=batch_size)
    cp_size = torch.distributed.get_world_size() // dp_size  # noqa: TID251
    at = torch.distributed.get_rank() // cp_size
    sampler = DistributedSampler(rows, dp_size, at, shuffle=False)
    return DataLoader(rows, batch_size=batch_size // dp_size, sampler=sampler)


def fit(kind, dp_size, rows=None, **options):
    """Train on a window of two batches; validate, the last batch with fewer samples."""
    module = Module(kind, dp_size if alone() else 1)
    rows = rows or (Pair if kind == "parts" else Rows if kind == "both" else Uneven)(8)
    options |= {"max_epochs": 1, "num_sanity_val_steps": 0}
    options |= {} if kind == "manual" else {"accumulate_grad_batches": 2}
    if alone():
        trainer = features.build_trainer(None, **options)
    else:
        dims = {"question": None, "answer": None} if kind == "parts" else None
        # Compared with one device for one data rank: by the callback, or by trial runs.
        is_verified = kind in ("both", "parts") and dp_size == 1
        verify = [ContextParallelCallback(verify_first_batch=True)] if is_verified else []
        strategy = doors.strategy(
            data_parallel_size=dp_size,
            sequence_dims=dims,
            verify_steps=dp_size == 1 and not verify,
        )
        trainer = build_trainer(strategy=strategy, callbacks=verify, **options)
    trainer.fit(module, build_loader(rows, 4, dp_size), build_loader(Uneven(6, 1), 4, dp_size))
    return {**results(trainer, module), "losses": module.seen[-2:]}


def fit_on_ranks(jobs):
    with elastic_environment():
        return [fit(*job) for job in jobs]


@pytest.mark.parametrize(
    ("num_ranks", "dp_size", "kinds"),
    [
        (2, 1, ("both", "parts")),
        pytest.param(4, 2, ("contrastive",), marks=pytest.mark.slow),
        *(pytest.param(n, 1, KINDS, marks=pytest.mark.slow) for n in (2, 3)),
        *(pytest.param(n, 2, KINDS[:3], marks=pytest.mark.slow) for n in (2, 4)),
    ],
)
def test_losses_of_samples_train_as_on_one_device(ranks, num_ranks, dp_size, kinds):
    jobs = [(kind, dp_size) for kind in kinds]
    exact = [fit(*job) for job in jobs]
    for found in ranks(num_ranks).run(fit_on_ranks, jobs):
        for kind, one, expected in zip(kinds, found, exact, strict=True):
            assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9), kind
            assert one["metrics"] == pytest.approx(expected["metrics"], rel=1e-9), kind
            for name, weight in expected["weights"].items():
                torch.testing.assert_close(one["weights"][name], weight, rtol=1e-9, atol=1e-11)


class Wrong(Module):
    """Gives `sample_mean` what it cannot be right for, or nothing of ours."""

    def loss(self, batch):
        hidden = self.backbone(batch["input_ids"], batch["position_ids"])
        local = hidden.mean((1, 2)).square()
        if self.kind == "local, later" and self.trainer.global_step < 3:
            return sample_mean(self.cp.pool(hidden, "mean").mean(1).square())
        if self.kind.startswith("local"):
            return sample_mean(local)
        if self.kind == "of ranks":
            number = local.detach().clone()
            torch.distributed.all_reduce(number)
            return sample_mean(local - local.detach() + number)
        return self.cp.pool(hidden, "mean").square().mean()


EXPECTED = {
    "local": r"sample_mean\(\) got \[.*\] of shape \(2,\) on rank . of the 2 context ranks, and "
    r"other losses on another rank: .* Compute them from full sequences, .* cp.pool\(x, 'mean'\)",
    "local, later": "computed different values since the last comparison; one of: a loss given to "
    r"sample_mean\(\)",
    "of ranks": r"training_step\(\) gave sample_mean\(\) losses of mean: .* on full sequences",
    "not declared": r"sample_mean\(losses\) from lightning_cp for losses of samples, which each ",
}


def refusals(kinds, dp_size):
    found = []
    for kind in kinds:
        options = {"data_parallel_size": dp_size}
        if kind == "local, later":
            options |= {"check_batches": 1, "verify_steps": False}
        with elastic_environment():
            trainer = build_trainer(strategy=doors.strategy(**options), max_epochs=1)
            try:
                trainer.fit(Wrong(kind), build_loader(Rows(12 * dp_size), 2 * dp_size, dp_size))
            except ValueError as error:
                found.append(str(error))
            else:
                found.append("trained")
    return found


@pytest.mark.parametrize(
    ("dp_size", "kinds"),
    [
        (1, list(EXPECTED)),
        (2, ["local", "local, later"]),
    ],
)
@pytest.mark.slow
def test_a_loss_of_local_tokens_is_refused_on_all_ranks(ranks, dp_size, kinds):
    for found in ranks(2 * dp_size).run(refusals, kinds, dp_size):
        for kind, message in zip(kinds, found, strict=True):
            assert re.search(EXPECTED[kind], message, re.DOTALL), message


def accumulate_both():
    with elastic_environment():
        try:
            fit("both", 1, Uneven(8))
        except RuntimeError as error:
            return str(error)
        return "trained"


def test_means_whose_counts_do_not_grow_alike_are_not_accumulated(ranks):
    for message in ranks(2).run(accumulate_both):
        assert "two means over different numbers of tokens or samples" in message
