"""What a run tells about itself."""

import logging
import math
import time

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_cp import ContextParallelCallback, ContextParallelStrategy
from lightning_cp.attn import choose
from tests.lightning.jobs import (
    LENGTH,
    VOCAB,
    ManualModule,
    Module,
    PackedRows,
    build_trainer,
    elastic_environment,
    loader,
)
from tests.parity.steps import build_model, whole_loss

pytestmark = pytest.mark.ranks

EDGES = [11, 17]


class HandWritten(nn.Module):
    """Attention that nobody can see."""

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
    """Fit with the callback, and return what it logged and said."""
    choose._log_choice.cache_clear()  # each choice is said once in a process, and others ran here
    said = []

    class Listening(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, handler = logging.getLogger("lightning_cp"), Listening()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with elastic_environment():
            module, options = module_class(*arguments), dict(options)
            strategy = {"data_parallel_size": dp_size, **options.pop("strategy", {})}
            callback = ContextParallelCallback(**options)
            trainer = build_trainer(
                strategy=ContextParallelStrategy(**strategy),
                max_epochs=1,
                callbacks=[callback],
            )
            try:
                trainer.fit(
                    module, loader(PackedRows(8), dp_size), loader(PackedRows(6, seed=1), dp_size)
                )
            except (RuntimeError, ValueError) as error:
                return str(error), said
            kept = callback.state_dict()
            return {k: float(v) for k, v in trainer.callback_metrics.items()}, said, kept
    finally:
        logger.removeHandler(handler)


class Frozen(Module):
    """Does not learn: validation is that of the first weights."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(("dp_size", "cp_size"), [(1, 2), (2, 2)])
def test_figures_are_those_of_the_whole_job(ranks, dp_size, cp_size):
    options = {"verify_first_batch": True, "verify_max_len": 12, "position_edges": EDGES}
    found = ranks(dp_size * cp_size).run(run, Frozen, dp_size, {**options, "every_n_steps": 2})
    model, rows = build_model(torch.float32), PackedRows(6, seed=1)
    with torch.no_grad():
        total, count = whole_loss(model, rows.rows(0, 6))
    for rank, (metrics, said, kept) in enumerate(found):
        assert metrics["val_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        per_device = metrics["tokens_per_second"] / metrics["tokens_per_second_per_device"]
        assert per_device == pytest.approx(dp_size * cp_size, rel=1e-3)
        assert metrics["peak_memory_gb"] > 0.01
        assert 1 <= metrics["work_imbalance"] < cp_size
        assert kept == {"verified": True}
        lines = [line for line in said if line.startswith(("context parallelism:", "verified:"))]
        assert len(lines) == (2 if rank == 0 else 0)
    line = found[0][1][0]
    for part in (f"{dp_size} data x {cp_size} context ranks", "layout zigzag (auto", "kernel cpu"):
        assert part in line, line
    assert any("layout=balanced" in line for line in found[0][1])  # what documents made of it


def test_the_loss_by_position_is_that_of_whole_rows(ranks):
    options = {"position_edges": EDGES}
    model, rows = build_model(torch.float32), PackedRows(6, seed=1)
    sums = {name: [0.0, 0] for name in ("0-11", "11-17", "17-")}
    for row in range(6):
        given = rows.rows(row, row + 1)
        for place in range(LENGTH - 1):
            alone = given.batch["labels"].clone()
            keep = alone[0, place + 1].clone()
            alone.fill_(-100)
            alone[0, place + 1] = keep
            given.batch["labels"] = alone
            with torch.no_grad():
                total, count = whole_loss(model, given)
            given = rows.rows(row, row + 1)
            name = "0-11" if place < 11 else "11-17" if place < 17 else "17-"
            sums[name] = [sums[name][0] + float(total), sums[name][1] + int(count)]
    for metrics, *_ in ranks(2).run(run, Frozen, 1, options):
        for name, (total, count) in sums.items():
            assert metrics[f"val_loss_at/{name}"] == pytest.approx(total / count, rel=1e-5)


def run_counting():
    """Return the tokens of four steps, from the speed at which they would have taken 100 s."""
    with elastic_environment():
        callback = ContextParallelCallback(every_n_steps=100)
        trainer = build_trainer(
            strategy=ContextParallelStrategy(), max_epochs=1, callbacks=[callback]
        )
        trainer.fit(Module(), loader(PackedRows(8), 1))
        callback._since = time.perf_counter() - 100
        return 100 * callback._figures(trainer.strategy)["tokens_per_second"]


def test_tokens_are_not_counted_once_per_rank(ranks):
    for tokens in ranks(2).run(run_counting):
        assert tokens == pytest.approx(4 * 2 * LENGTH, rel=0.05)


def test_a_model_that_is_not_exact_is_stopped_before_training(ranks):
    options = {"verify_first_batch": True, "verify_max_len": 12}
    first = {**options, "strategy": {"verify_steps": False}}
    for said, _ in ranks(2).run(run, HandModule, 1, first):
        assert "Context parallelism changes the numbers of this model" in said
        assert "model.tokens.weight" in said
    for said, _ in ranks(2).run(run, HandModule, 1, options):  # in the sanity check already
        assert "Context parallelism changes the numbers of this model" in said
        assert "validation_step() logged 'val_loss'" in said


def test_manual_steps_are_not_verified_by_running_them(ranks):
    options = {"verify_first_batch": True}
    for said, _ in ranks(2).run(run_manual, options):
        assert "cannot be verified: it would train" in said


def run_manual(options):
    return run(Manual, 1, options)


class Manual(ManualModule):
    def __init__(self):
        super().__init__(accumulate=1, clip=None)


def test_other_strategies_are_refused():
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
        ({"position_edges": [9, 5]}, r"position_edges=\[9, 5\] must rise"),
        ({"position_edges": [0, 5]}, "must rise, and begin above 0"),
        ({"every_n_steps": 0}, "must be at least 1"),
        ({"verify_max_len": 0}, "must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ContextParallelCallback(**options)


def test_perplexity_is_not_the_mean_of_means():
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1] * 5, [1, -100, -100, -100, -100]])
    whole = cross_entropy(logits.flatten(0, 1), labels.flatten())
    means = [cross_entropy(logits[i], labels[i]) for i in range(2)]
    assert not torch.isclose(whole, sum(means) / 2)
