"""What a LightningModule does beside its steps: values of hooks, new parameters, other weights."""

from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests import doors
from tests.lightning.jobs import (
    Module,
    PackedRows,
    build_trainer,
    elastic_environment,
    full,
    loader,
)

pytestmark = pytest.mark.ranks


class Hooked(Module):
    """Logs a value of this rank in one hook."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def note(self, hook):
        value = float(self.global_rank)
        self.log("same", 1.0)
        self.log("measured", value, rank_zero_only=True)
        self.log("added", value, reduce_fx="sum", sync_dist=True)
        if hook == self.hook:
            self.log("own", value)

    def on_after_backward(self):
        self.note("on_after_backward")

    def on_train_batch_end(self, *_):
        self.note("on_train_batch_end")

    def on_train_epoch_end(self):
        self.note("on_train_epoch_end")

    def on_validation_epoch_end(self):
        self.note("on_validation_epoch_end")


HOOKS = ("on_after_backward", "on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end")


class Late(Module):
    """Makes parameters after the strategy has placed its own, other ones on each rank."""

    def __init__(self, *, assigned=True):
        super().__init__(dtype=torch.float64)
        self.assigned = assigned

    def new(self, value):
        shift = 1e-3 * self.global_rank if self.trainer.world_size > 1 else 0.0
        return nn.Parameter(torch.tensor([value + shift], dtype=torch.float64))

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.later = self.new(1.25)
            self.trainer.optimizers[0].add_param_group({"params": [self.later]})

    def logits(self, batch):
        out = super().logits(batch) * (self.late if self.assigned else self.held[0])
        return out * self.later if hasattr(self, "later") else out

    def configure_optimizers(self):
        late = self.new(0.5)
        if self.assigned:
            self.late = late
            return super().configure_optimizers()
        self.held = [late]
        return torch.optim.SGD([*self.parameters(), late], lr=self.lr)


def fit(module, trainer):
    trainer.fit(module, loader(PackedRows(3), 1), loader(PackedRows(1), 1))
    return {name: full(p.detach()).clone() for name, p in module.named_parameters()}


def run_edges(shardings):
    options = {"max_epochs": 1, "num_sanity_val_steps": 0}
    found = {}
    with elastic_environment():
        for hook in HOOKS:
            strategy = doors.strategy(verify=False)
            with pytest.raises(ValueError, match=rf"'own' in {hook}\(\)"):
                fit(Hooked(hook), build_trainer(strategy=strategy, **options))
        for sharding in shardings:

            def train(module, sharding=sharding):
                verify = sharding == "full"
                strategy = doors.strategy(parameter_sharding=sharding, verify_steps=verify)
                return fit(module, build_trainer(strategy=strategy, **options))

            module = Late()
            found[sharding] = train(module)
            # After the run, too: each rank keeps its part of full weights.
            module.load_state_dict({name: 2 * x for name, x in found[sharding].items()})
            for name, p in module.named_parameters():
                assert torch.equal(full(p.detach()), 2 * found[sharding][name])
            with pytest.raises(ValueError, match=r"shape \(1,\) that is no parameter of the mod"):
                train(Late(assigned=False))
    return found


@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_hooks_and_late_parameters_are_as_on_one_device(ranks, sharding):
    exact = ranks(1).run(run_alone)[0]
    for found in ranks(2).run(run_edges, [sharding]):
        for weights in found.values():
            assert weights.keys() == exact.keys()
            for name, expected in exact.items():
                torch.testing.assert_close(weights[name], expected, rtol=1e-10, atol=1e-12)


def run_alone():
    with elastic_environment():
        return fit(Late(), build_trainer(strategy=doors.strategy(), max_epochs=1))


class Recomputed(Module):
    """Blocks are recomputed in backward, which stops in the middle of them."""

    def logits(self, batch):
        positions = self.trainer.strategy.context_parallel.position_ids()
        recompute = partial(checkpoint, use_reentrant=False)
        return self.model(batch["input_ids"], positions, checkpoint=recompute)


def run_recomputed():
    with elastic_environment():
        module = Recomputed()
        trainer = build_trainer(strategy=doors.strategy(), max_steps=2)
        trainer.fit(module, DataLoader(PackedRows(4), batch_size=2))
        return module.losses


def test_a_trial_run_leaves_hooks_of_recomputed_layers_alone(ranks):
    first, second = ranks(2).run(run_recomputed)
    assert len(first) == 2
    assert first == second


class InTraining(Module):
    """Does something in training only: in evaluation mode, a trial run would not see it."""

    def __init__(self, name, since=0):
        super().__init__()
        self.name, self.since, self.taken = name, since, 0

    def logits(self, batch):
        out = super().logits(batch)
        if not self.training or self.trainer.current_epoch < self.since:
            return out
        if self.name == "mean":
            return out * (1 + out.std())
        if self.name == "log":
            self.log("tokens", float(batch["input_ids"].numel()))
        if self.name == "dropout":
            return nn.functional.dropout(out, 1e-3, training=self.training)
        return out

    def training_step(self, batch, batch_idx):
        if self.name == "path":
            assert self.training
            assert self.trainer.logger.save_dir
        if self.name == "batch":
            self.taken += batch["names"].pop()
            assert batch["names"] == [1]
        return super().training_step(batch, batch_idx)


class Named(PackedRows):
    """Rows with an object, which a step takes parts of."""

    def collate(self, rows):
        return {**torch.utils.data.default_collate(rows), "names": [1, 2]}


def run_in_training(folder):
    problems = {}
    for name, since in (
        *(("mean", 0), ("log", 0), ("mean", 1), ("dropout", 0), ("path", 0), ("batch", 0)),
    ):
        with elastic_environment():
            module, rows = InTraining(name, since), Named(4)
            trainer = build_trainer(
                strategy=doors.strategy(), max_epochs=2, logger=CSVLogger(folder)
            )
            try:
                trainer.fit(module, DataLoader(rows, batch_size=2, collate_fn=rows.collate))
                problems[name, since] = module.taken
            except ValueError as error:
                problems[name, since] = str(error), trainer.current_epoch
    return problems


@pytest.mark.slow
def test_what_only_training_does_is_compared(ranks, tmp_path):
    """Also where it begins with the second epoch; dropout by a function is left out."""
    for found in ranks(2).run(run_in_training, tmp_path):
        for since in (0, 1):
            text, epoch = found["mean", since]
            assert "verify=False" in text
            assert epoch == since
        text, _ = found["log", 0]
        assert "logged 'tokens'" in text
        assert (found["dropout", 0], found["path", 0], found["batch", 0]) == (0, 0, 8)


def run_validated_amid():
    found = []
    for verify in (True, False):
        with elastic_environment():
            trainer = build_trainer(
                strategy=doors.strategy(verify_steps=verify),
                max_epochs=1,
                accumulate_grad_batches=2,
                val_check_interval=1,
                num_sanity_val_steps=0,
            )
            found.append(fit(Module(), trainer))
    return found


@pytest.mark.slow
def test_a_trial_run_of_validation_keeps_gradients_that_are_accumulated(ranks):
    for tried, plain in ranks(2).run(run_validated_amid):
        for name, expected in plain.items():
            assert torch.equal(tried[name], expected), name


class WrongOnOne(Module):
    """Logs a number of local tokens where a data rank has the first rows."""

    def logits(self, batch):
        is_wrong = self.trainer.global_rank < 2
        self.log("tokens", float(batch["input_ids"].numel()) if is_wrong else 1.0)
        return super().logits(batch)


def run_wrong_on_one():
    with elastic_environment():
        trainer = build_trainer(strategy=doors.strategy(context_parallel_size=2), max_steps=1)
        try:
            trainer.fit(WrongOnOne(), loader(PackedRows(4), 1))
        except ValueError as error:
            return str(error)


def test_what_is_wrong_on_one_data_rank_is_raised_by_all(ranks):
    first, second, *others = ranks(4).run(run_wrong_on_one)
    assert "logged 'tokens'" in first
    assert "logged 'tokens'" in second
    assert all("failed on another data rank" in text for text in others)
