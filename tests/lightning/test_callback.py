"""The callback: measurements, verification of the first batch, log lines."""

import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_cp import ContextParallelCallback
from lightning_cp.attn import choose
from lightning_cp.lightning import callback as callback_module
from tests import doors
from tests.attn.cases import say_again
from tests.lightning.jobs import (
    LENGTH,
    VOCAB,
    ManualModule,
    Module,
    PackedRows,
    build_trainer,
    elastic_environment,
    loader,
    logged_lines,
)
from tests.parity.steps import build_model, whole_loss

pytestmark = pytest.mark.ranks

EDGES = [11, 17]


class HandWritten(nn.Module):
    """Handwritten attention, which cannot be routed."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        return self.head(torch.softmax(x @ x.mT, -1).tril() @ x)


class HandModule(Module):
    def __init__(self):
        super().__init__()
        self.model = HandWritten()

    def logits(self, batch):
        return self.model(batch["input_ids"])


def run(module_class, dp_size, options, *arguments):
    """Fit with the callback, and return metrics or an error, log lines and the saved state."""
    # Each choice is logged once per process, which has served other tests.
    say_again(choose)
    with elastic_environment(), logged_lines() as lines:
        module, options = module_class(*arguments), dict(options)
        strategy = {"data_parallel_size": dp_size, **options.pop("strategy", {})}
        callback = ContextParallelCallback(**options)
        trainer = build_trainer(
            strategy=doors.strategy(**strategy), max_epochs=1, callbacks=[callback]
        )
        rows, val_rows = loader(PackedRows(8), dp_size), loader(PackedRows(6, seed=1), dp_size)
        try:
            trainer.fit(module, rows, val_rows)
        except (RuntimeError, ValueError) as error:
            return str(error), lines
        state = callback.state_dict()
        return {k: float(v) for k, v in trainer.callback_metrics.items()}, lines, state


class Frozen(Module):
    """Does not learn: validation runs with the initial weights."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(("dp_size", "cp_size"), [(1, 2), (2, 2)])
@pytest.mark.slow
def test_measurements_are_those_of_the_job(ranks, dp_size, cp_size):
    options = {"verify_first_batch": True, "verify_max_len": 12, "position_edges": EDGES}
    options |= {"every_n_steps": 2, "strategy": {"verify_steps": False}}
    results = ranks(dp_size * cp_size).run(run, Frozen, dp_size, options)
    model, rows = build_model(torch.float32), PackedRows(6, seed=1)
    with torch.no_grad():
        total, count = whole_loss(model, rows.rows(0, 6))
    for rank, (metrics, lines, state) in enumerate(results):
        assert metrics["val_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        per_device = metrics["tokens_per_second"] / metrics["tokens_per_second_per_device"]
        assert per_device == pytest.approx(dp_size * cp_size, rel=1e-3)
        assert metrics["peak_memory_gb"] > 0.01
        assert 1 <= metrics["work_imbalance"] < cp_size
        assert state == {"verified": True}
        own = [line for line in lines if line.startswith(("context parallelism:", "verified:"))]
        assert len(own) == (2 if rank == 0 else 0)
    line = results[0][1][0]
    assert line == (
        f"context parallelism: data={dp_size} context={cp_size} device=cpu layout=auto "
        "algorithm=auto kernel=auto parameters=full"
    )
    assert any("layout=balanced" in line for line in results[0][1])  # because of the documents


def test_the_loss_by_position_is_that_of_full_sequences(ranks):
    options = {"position_edges": EDGES, "strategy": {"verify_steps": False}}
    model, rows = build_model(torch.float32), PackedRows(6, seed=1)
    sums = {name: [0.0, 0] for name in ("0-11", "11-17", "17-")}
    for row in range(6):
        sample = rows.rows(row, row + 1)
        for place in range(LENGTH - 1):
            labels = torch.full_like(sample.batch["labels"], -100)
            labels[0, place + 1] = sample.batch["labels"][0, place + 1]
            sample.batch["labels"] = labels
            with torch.no_grad():
                total, count = whole_loss(model, sample)
            sample = rows.rows(row, row + 1)
            name = "0-11" if place < 11 else "11-17" if place < 17 else "17-"
            sums[name] = [sums[name][0] + float(total), sums[name][1] + int(count)]
    for metrics, *_ in ranks(2).run(run, Frozen, 1, options):
        for name, (total, count) in sums.items():
            assert metrics[f"val_loss_at/{name}"] == pytest.approx(total / count, rel=1e-5)


class Clock:
    """Stands for `time`: 100 seconds pass between two looks at it."""

    def __init__(self):
        self.now = 1.0

    def perf_counter(self):
        self.now += 100
        return self.now


def run_counting():
    """Return the tokens of four steps, from the speed at which they have taken 100 s."""
    with elastic_environment(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback_module, "time", Clock())
        callback = ContextParallelCallback(every_n_steps=4)
        strategy = doors.strategy(verify_steps=False)
        trainer = build_trainer(strategy=strategy, max_epochs=1, callbacks=[callback])
        trainer.fit(Module(), loader(PackedRows(8), 1))
        return 100 * float(trainer.callback_metrics["tokens_per_second"])


def test_tokens_are_not_counted_once_per_rank(ranks):
    for tokens in ranks(2).run(run_counting):
        assert tokens == pytest.approx(4 * 2 * LENGTH, rel=1e-6)


def test_a_model_that_is_not_exact_is_stopped_before_training(ranks):
    options = {"verify_first_batch": True, "verify_max_len": 12}
    first = {**options, "strategy": {"verify_steps": False}}
    for message, _ in ranks(2).run(run, HandModule, 1, first):
        assert "Context parallelism changes the results of this model" in message
        assert "model.tokens.weight" in message
    for message, _ in ranks(2).run(run, HandModule, 1, options):  # in the sanity check already
        assert "Context parallelism changes the results of this model" in message
        assert "validation_step() logged 'val_loss'" in message


def test_manual_steps_are_not_verified_by_running_them(ranks):
    options = {"verify_first_batch": True}
    for message, _ in ranks(2).run(run_manual, options):
        assert "cannot be verified: it would train" in message


def run_manual(options):
    return run(Manual, 1, options)


class Manual(ManualModule):
    def __init__(self):
        super().__init__(accumulate=1, clip=None)


def test_other_strategies_raise():
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_steps=1,
        callbacks=[ContextParallelCallback()],
    )
    with pytest.raises(ValueError, match="this Trainer has a SingleDeviceStrategy"):
        trainer.fit(Module(), loader_alone())


def loader_alone():
    return torch.utils.data.DataLoader(PackedRows(2), batch_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_edges": [9, 5]}, r"position_edges=\[9, 5\] must be positive and"),
        ({"position_edges": [0, 5]}, "must be positive and strictly increasing"),
        ({"every_n_steps": 0}, "must be at least 1"),
        ({"verify_max_len": 0}, "must be at least 1"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        ContextParallelCallback(**options)


def test_perplexity_is_not_the_mean_of_means():
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1] * 5, [1, -100, -100, -100, -100]])
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    means = [cross_entropy(logits[i], labels[i]) for i in range(2)]
    assert not torch.isclose(expected, sum(means) / 2)
