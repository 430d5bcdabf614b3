"""SWA and EMA of sharded weights: the averages of one device, also across a checkpoint."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core import saving
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy, token_mean
from lightning_cp.checkpoint import consolidate
from lightning_cp.lightning.model.averaging import averages_of
from tests.lightning.jobs import (
    PackedRows,
    build_strategy,
    build_trainer,
    elastic_environment,
    full,
)
from tests.parity.steps import build_model

pytestmark = pytest.mark.ranks


class Net(LightningModule):
    """The tiny model, with a buffer that changes; runs under any strategy."""

    def __init__(self, dtype=torch.float64, schedule=False):
        super().__init__()
        self.model = build_model(dtype)
        self.model.register_buffer("seen", torch.zeros(3, dtype=dtype))
        self.schedule = schedule

    def logits(self, model, batch):
        ids = batch["input_ids"]
        if isinstance(self.trainer.strategy, ContextParallelStrategy):
            return model(ids, self.trainer.strategy.context_parallel.position_ids())
        return model(ids, torch.arange(ids.shape[1]).expand(len(ids), -1))

    def training_step(self, batch, batch_idx):
        self.model.seen += 1
        return token_mean(self.logits(self.model, batch), batch["labels"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", token_mean(self.logits(self.model, batch), batch["labels"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.8**e)]


class ByHand(Net):
    """Holds an AveragedModel as a submodule and validates with it."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.7))

    def on_train_batch_end(self, *_):
        self.average.update_parameters(self.model)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", token_mean(self.logits(self.average, batch), batch["labels"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)


class OwnEMA(Callback):
    """A common handwritten EMA: a list of clones, swapped for validation."""

    def __init__(self):
        self.shadow, self.backup = None, None

    def on_train_batch_end(self, trainer, pl_module, *_):
        current = [p.detach() for p in pl_module.parameters()]
        if self.shadow is None:
            self.shadow = [p.clone() for p in current]
        for average, p in zip(self.shadow, current, strict=True):
            average.mul_(0.7).add_(p, alpha=0.3)

    def on_validation_start(self, trainer, pl_module):
        if self.shadow is not None:
            self.backup = [p.detach().clone() for p in pl_module.parameters()]
            self.put(pl_module, self.shadow)

    def on_validation_end(self, trainer, pl_module):
        if self.backup is not None:
            self.put(pl_module, self.backup)

    def on_train_end(self, trainer, pl_module):
        self.put(pl_module, self.shadow)

    def put(self, pl_module, values):
        for p, value in zip(pl_module.parameters(), values, strict=True):
            p.data.copy_(value)


class LateCopy(Callback):
    """Copies a part of the model once it is sharded."""

    def on_train_start(self, trainer, pl_module):
        with pytest.raises(RuntimeError, match="not attached to a"):
            _ = deepcopy(pl_module).trainer
        self.average = AveragedModel(pl_module.model)
        if any(isinstance(p, DTensor) for p in pl_module.parameters()):
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
                self.average(torch.zeros(1, 4).long(), torch.zeros(1, 4).long())

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.average.update_parameters(pl_module.model)

    def on_train_end(self, trainer, pl_module):
        for p, value in zip(pl_module.parameters(), self.average.module.parameters(), strict=True):
            p.data.copy_(value.data)


class EveryEpoch(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


def swa(**options):
    return StochasticWeightAveraging(
        swa_lrs=0.005, swa_epoch_start=1, annealing_epochs=2, **options
    )


CALLBACKS = {
    "swa": swa,
    "average": WeightAveraging,
    "every epoch": EveryEpoch,
    "no buffers": partial(WeightAveraging, use_buffers=False),
    "ema": partial(EMAWeightAveraging, decay=0.7),
    "late ema": partial(EMAWeightAveraging, decay=0.7, update_starting_at_step=3),
    "many at once": partial(WeightAveraging, multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "own": OwnEMA,
    "late copy": LateCopy,
    "by hand": None,
}


@dataclass
class Run:
    """A run: which callback, for how long, from and to which checkpoint."""

    average: str
    epochs: int = 3
    save: str | None = None
    resume: str | None = None
    schedule: bool = False
    twice: bool = False
    precision: str = "32-true"
    dtype: torch.dtype = torch.float64
    strategy: dict[str, Any] = field(default_factory=dict)


def run(job):
    """Train; return the weights at the end, the validated losses, and the last rate."""
    build = CALLBACKS[job.average]
    module = ByHand() if build is None else Net(job.dtype, job.schedule)
    losses = []

    class Listen(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics["val_loss"]))

    keep = [ModelCheckpoint(job.save, save_top_k=-1, filename="{epoch}")] if job.save else []
    options = {
        "enable_checkpointing": bool(keep),
        "max_epochs": job.epochs,
        "callbacks": [*([build()] if build else []), *keep, Listen()],
        "precision": job.precision,
        "num_sanity_val_steps": 1,
    }
    train = DataLoader(PackedRows(4), batch_size=2, shuffle=False, collate_fn=collate)
    val = DataLoader(PackedRows(2, seed=1), batch_size=2, collate_fn=collate)
    if dist.is_initialized():
        with elastic_environment():
            trainer = build_trainer(
                strategy=build_strategy(verify_steps=False, **job.strategy), **options
            )
            return finish(job, trainer, module, train, val, losses)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", devices=1, **options, **dict.fromkeys(quiet, False))
    return finish(job, trainer, module, train, val, losses)


def collate(rows):
    """Leave documents out: a plain run does not know them."""
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def finish(job, trainer, module, train, val, losses):
    number = len(trainer.callbacks)
    trainer.fit(module, train, val, ckpt_path=job.resume)
    if job.twice:  # what is sharded already is copied by the callbacks
        trainer.validate(module, val, verbose=False)
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, train, val)
    assert len(trainer.callbacks) == number
    assert "__deepcopy__" not in vars(module)
    weights = {name: full(x.detach()).clone() for name, x in module.state_dict().items()}
    return weights, losses, trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0


def same(result, exact, tolerance=1e-12):
    assert result[0].keys() == exact[0].keys()
    for name, value in exact[0].items():
        assert torch.allclose(result[0][name], value, rtol=0, atol=tolerance), name
    assert result[1] == pytest.approx(exact[1], abs=tolerance)
    assert result[2] == pytest.approx(exact[2], rel=1e-12)


def check(ranks, size, job, **changes):
    exact = run(job)
    for result in ranks(size).run(run, replace(job, **changes)):
        same(result, exact)


QUICK = ["ema"]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CALLBACKS]
)
def test_averages_are_those_of_one_device(ranks, name):
    check(ranks, 2, Run(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_averages_on_three_ranks(ranks, name, sharding):
    check(ranks, 3, Run(name), strategy={"parameter_sharding": sharding})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swa", "average", "ema", "many at once"])
def test_averages_of_replicated_weights(ranks, name):
    check(ranks, 2, Run(name), strategy={"parameter_sharding": "none"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swa", "ema"])
def test_a_module_that_is_sharded_already_is_averaged_again(ranks, name):
    check(ranks, 2, Run(name, twice=True))


def resumed(job, exact):
    """Leave out the losses of the first epoch and of sanity checks."""
    weights, losses, rate = exact
    return weights, losses[-(job.epochs - 1) :], rate


FORMS = {"folder": {}, "file": {"save_distributed_checkpoint": False}}
RESUMES = [
    (name, form, where)
    for name in ("ema", "average", "swa")
    for form in ("folder", "file", "plain", "consolidated")
    for where in (2, 3, "none", "plain")
    if (form, where) not in [("folder", "plain"), ("plain", "plain")]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "where"), RESUMES)
def test_a_resumed_run_averages_on(ranks, tmp_path, name, form, where):
    job = Run(name, schedule=name == "swa")
    exact = run(replace(job, save=str(tmp_path / "plain")))
    path = tmp_path / "plain" / "epoch=0.ckpt"
    if form != "plain":
        path = tmp_path / "ranks" / "epoch=0.ckpt"
        training = replace(job, save=str(path.parent), strategy=FORMS.get(form, {}), epochs=1)
        ranks(2).run(run, training)
    if form == "consolidated":
        consolidate(path, tmp_path / "one.ckpt")
        path = tmp_path / "one.ckpt"
    resuming = replace(job, resume=str(path))
    if where == "plain":
        same(resumed(job, run(resuming)), resumed(job, exact))
        return
    strategy = {"parameter_sharding": "none"} if where == "none" else {}
    for result in ranks(2 if where == "none" else where).run(
        run, replace(resuming, strategy=strategy)
    ):
        same(resumed(job, result), resumed(job, exact))


@pytest.mark.slow
def test_checkpoints_hold_the_averaged_weights(ranks, tmp_path):
    run(Run("ema", save=str(tmp_path / "plain")))
    ranks(2).run(run, Run("ema", save=str(tmp_path / "ranks")))
    exact = Net.load_from_checkpoint(tmp_path / "plain" / "epoch=1.ckpt").state_dict()
    result = Net.load_from_checkpoint(tmp_path / "ranks" / "epoch=1.ckpt").state_dict()
    whole = saving.pl_load(tmp_path / "ranks" / "epoch=1.ckpt")["current_model_state"]
    for name, value in exact.items():
        assert torch.allclose(result[name], value, rtol=0, atol=1e-12), name
        assert whole[name].shape == value.shape
    assert not torch.equal(whole["model.head.weight"], result["model.head.weight"])


class Record(Callback):
    """Averages the full parameters after each step, in float32."""

    def __init__(self, average):
        self.average, self.by_hand = average, None

    def on_train_batch_end(self, trainer, pl_module, *_):
        current = [full(p.detach()) for p in pl_module.parameters()]
        assert all(p.dtype == torch.bfloat16 for p in pl_module.parameters())
        if self.by_hand is None:
            self.by_hand = [p.float() for p in current]
        else:
            pairs = zip(self.by_hand, current, strict=True)
            self.by_hand = [0.7 * average + (1 - 0.7) * p for average, p in pairs]
        (model,) = averages_of(self.average)
        averages = list(model.parameters())
        self.same = [full(a.detach()).equal(b) for a, b in zip(averages, self.by_hand, strict=True)]
        self.dtypes = {a.dtype for a in averages}


def run_bf16():
    with elastic_environment():
        average = EMAWeightAveraging(decay=0.7)
        record = Record(average)
        trainer = build_trainer(
            strategy=build_strategy(verify_steps=False),
            precision="bf16-true",
            max_epochs=2,
            callbacks=[average, record],
        )
        module = Net(torch.float32)
        trainer.fit(module, DataLoader(PackedRows(4), batch_size=2, collate_fn=collate))
        return record.same, record.dtypes, {p.dtype for p in module.parameters()}


@pytest.mark.slow
def test_averages_of_bfloat16_weights_are_exact_in_float32(ranks):
    for equal, dtypes, own in ranks(2).run(run_bf16):
        assert all(equal)
        assert dtypes == {torch.float32}  # as on one device: copied before it was cast
        assert own == {torch.bfloat16}


class Late(Net):
    """Builds its model where SWA has copied it already."""

    def __init__(self):
        super().__init__()
        del self.model

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = build_model(torch.float64)


class SharesItself(Late):
    """Shards its model in configure_model(), which WeightAveraging calls."""

    def configure_model(self):
        if not hasattr(self, "model"):
            super().configure_model()
            self.model.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
            fully_shard(self.model, mesh=self.trainer.strategy.shard_mesh)


def run_late(module, name):
    with elastic_environment():
        trainer = build_trainer(
            strategy=build_strategy(), max_epochs=2, callbacks=[CALLBACKS[name]()]
        )
        data = DataLoader(PackedRows(4), batch_size=2, collate_fn=collate)
        try:
            trainer.fit(module(), data)
        except ValueError as error:
            return str(error)
        return {n: full(p.detach()) for n, p in trainer.model.named_parameters()}


def test_a_model_that_was_copied_too_early_is_refused(ranks):
    for message in ranks(2).run(run_late, Late, "swa"):
        assert "StochasticWeightAveraging has copied the LightningModule in its setup()" in message
        assert "use WeightAveraging" in message


@pytest.mark.slow
def test_what_configure_model_has_sharded_is_averaged(ranks):
    exact = run(Run("ema", epochs=2))[0]
    for result in ranks(2).run(run_late, SharesItself, "ema"):
        for name, value in result.items():
            assert torch.allclose(value, exact[name], rtol=0, atol=1e-12), name


def load_whole(state):
    with elastic_environment():
        trainer = build_trainer(
            strategy=build_strategy(verify_steps=False), max_steps=1, callbacks=[LoadAtStart(state)]
        )
        trainer.fit(Net(), DataLoader(PackedRows(4), batch_size=2, collate_fn=collate))
        return trainer.callbacks[0].weights


class LoadAtStart(Callback):
    def __init__(self, state):
        self.state = state

    def on_train_start(self, trainer, pl_module):
        pl_module.load_state_dict(self.state)
        self.weights = {n: full(x.detach()).clone() for n, x in pl_module.state_dict().items()}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sharded_module_loads_a_whole_state_dict(ranks, size):
    state = {n: torch.randn_like(x) for n, x in Net().state_dict().items()}
    for result in ranks(size).run(load_whole, state):
        assert all(torch.equal(result[name], value) for name, value in state.items())
