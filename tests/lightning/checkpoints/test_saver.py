"""Checkpoints through the strategy: resumed on other ranks, a run goes on as it was."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint import consolidate, load_weights
from lightning_cp.checkpoint.command import main
from tests import doors
from tests.lightning.jobs import (
    Module,
    PackedRows,
    build_trainer,
    elastic_environment,
    full,
    loader,
)
from tests.parity.steps import build_model, whole_loss
from tests.tiny import TinyBlock, TinyLM

pytestmark = pytest.mark.ranks

NUM_ROWS = 4  # two steps of two samples in an epoch


class AdamModule(Module):
    """Adam and a schedule: states that must come back too."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class WithPath(AdamModule):
    """Keeps something in its checkpoint that is no plain data."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["where"] = Path("here")

    def on_load_checkpoint(self, checkpoint):
        self.where = checkpoint["where"]


class StrictAdapter(AdamModule):
    """Has more parameters than the checkpoint."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(4, 4)


class WithAdapter(StrictAdapter):
    """With strict loading."""

    def __init__(self):
        super().__init__()
        self.strict_loading = False


@dataclass
class Run:
    """A run: how, from which checkpoint, and where it saves one at its end."""

    module: type = AdamModule
    dp_size: int = 1
    save: str | None = None
    resume: str | None = None
    epochs: int = 3
    weights_only: bool | None = None
    strategy: dict[str, Any] = field(default_factory=dict)


def run(job):
    """Train, and return the losses, or the error."""
    with elastic_environment():
        module = job.module()
        trainer = build_trainer(
            strategy=doors.strategy(
                data_parallel_size=job.dp_size, verify_steps=False, **job.strategy
            ),
            max_epochs=job.epochs,
        )
        try:
            trainer.fit(
                module,
                loader(PackedRows(NUM_ROWS), job.dp_size),
                ckpt_path=job.resume,
                weights_only=job.weights_only,
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}", None
        if job.save:
            trainer.save_checkpoint(job.save)
        return module.losses, getattr(module, "where", None)


def run_all(jobs):
    return [run(job)[0] for job in jobs]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Train on two ranks without a break; the same for one epoch, saved in several ways."""
    path = tmp_path_factory.mktemp("saved")
    one_file = {"save_distributed_checkpoint": False}
    jobs = [
        Run(),
        Run(save=str(path / "folder.ckpt"), epochs=1),
        Run(save=str(path / "file.ckpt"), epochs=1, strategy=one_file),
        Run(WithPath, save=str(path / "path.ckpt"), epochs=1),
    ]
    losses, *_ = ranks(2).run(run_all, jobs)[0]
    return path, losses


MESHES = {
    "dp 1, cp 1": (1, 1),
    "dp 2, cp 1": (2, 1),
    "dp 2, cp 2": (2, 2),
    "dp 1, cp 3": (1, 3),
    "dp 1, cp 4": (1, 4),
}


GRID = [(mesh, name) for mesh in MESHES for name in ("folder.ckpt", "file.ckpt")]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), GRID)
def test_a_run_resumed_on_other_ranks_goes_on_as_it_was(ranks, saved, mesh, name):
    (path, losses), (dp_size, cp_size) = saved, MESHES[mesh]
    job = Run(dp_size=dp_size, resume=str(path / name))
    for found, _ in ranks(dp_size * cp_size).run(run, job):
        assert len(found) == 4
        assert found == pytest.approx(losses[2:], abs=1e-5)


@pytest.mark.slow
def test_the_comparison_would_see_a_lost_optimizer(ranks, saved, tmp_path):
    path, losses = saved
    file = torch.load(path / "file.ckpt")
    for state in file["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()
    torch.save(file, tmp_path / "lost.ckpt")
    found, _ = ranks(1).run(run, Run(resume=str(tmp_path / "lost.ckpt")))[0]
    assert found != pytest.approx(losses[2:], abs=1e-5)


@pytest.mark.slow
def test_replicated_parameters_resume_from_sharded_ones(ranks, saved):
    path, losses = saved
    job = Run(resume=str(path / "folder.ckpt"), strategy={"parameter_sharding": "none"})
    for found, _ in ranks(2).run(run, job):
        assert found == pytest.approx(losses[2:], abs=1e-5)


@pytest.mark.parametrize("careful", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_only_is_honoured(ranks, saved, careful):
    resume = str(saved[0] / "path.ckpt")
    trusting = Run(WithPath, resume=resume, epochs=2, weights_only=False)
    for losses, where in ranks(2).run(run, trusting):
        assert len(losses) == 2
        assert where == Path("here")
    refused = Run(WithPath, resume=resume, epochs=2, weights_only=careful)
    for said, _ in ranks(2).run(run, refused):
        assert "pass `weights_only=False` to `trainer.fit`" in said


def test_adapters_may_be_missing_from_a_checkpoint_when_that_is_said(ranks, saved):
    resume = str(saved[0] / "folder.ckpt")
    for losses, _ in ranks(2).run(run, Run(WithAdapter, resume=resume, epochs=2)):
        assert losses == pytest.approx(saved[1][2:4], abs=1e-5)
    for said, _ in ranks(2).run(run, Run(StrictAdapter, resume=resume, epochs=2)):
        assert "adapter" in said
        assert "strict_loading=False" in said


class Plain(pl.LightningModule):
    """The same model in plain torch, on full sequences."""

    def __init__(self):
        super().__init__()
        self.model = build_model(torch.float32)
        self.accuracy = torchmetrics.MeanMetric()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_a_folder_becomes_a_file_that_plain_lightning_loads(saved, tmp_path, capsys):
    path, _ = saved
    out = tmp_path / "out.ckpt"
    assert main(["consolidate", str(path / "folder.ckpt"), str(out)]) == 0
    module = Plain.load_from_checkpoint(out)
    expected = torch.load(path / "file.ckpt")["state_dict"]
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert main(["consolidate", str(path / "folder.ckpt"), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_a_consolidated_folder_resumes(ranks, saved, tmp_path):
    path, losses = saved
    consolidate(path / "folder.ckpt", tmp_path / "out.ckpt")
    for found, _ in ranks(2).run(run, Run(resume=str(tmp_path / "out.ckpt"))):
        assert found == pytest.approx(losses[2:], abs=1e-5)


def run_model_checkpoint(folder, distributed):
    """Return what ModelCheckpoint keeps, and the losses of validating its best and its last."""
    with elastic_environment():
        keep = ModelCheckpoint(
            folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"
        )
        strategy = doors.strategy(save_distributed_checkpoint=distributed, verify_steps=False)
        trainer = build_trainer(
            strategy=strategy, max_epochs=3, callbacks=[keep], enable_checkpointing=True
        )
        module, rows = AdamModule(), loader(PackedRows(2, seed=1), 1)
        trainer.fit(module, loader(PackedRows(NUM_ROWS), 1), rows)
        validated = {
            name: trainer.validate(module, rows, ckpt_path=path, verbose=False)[0]["val_loss"]
            for name, path in (("best", keep.best_model_path), ("last", keep.last_model_path))
        }
        scores = {path: float(score) for path, score in keep.best_k_models.items()}
        # Lightning copies the last checkpoint that it has saved, which need not be the last epoch.
        expected = {"best": min(scores.values()), "last": scores[max(scores)]}
        return sorted(p.name for p in Path(folder).iterdir()), validated, expected


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.slow
def test_model_checkpoint_keeps_the_best_and_the_last(ranks, tmp_path, distributed):
    job = run_model_checkpoint, str(tmp_path), distributed
    for kept, validated, expected in ranks(2).run(*job):
        assert len(kept) == 3, kept
        assert "last.ckpt" in kept
        assert validated == pytest.approx(expected, abs=1e-6)


class OnMeta(Module):
    """Builds on the meta device, loads weights into what it holds of them."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.lr, self.losses, self.grad_norms = 0.3, [], []

    def configure_model(self):
        with torch.device("meta"):
            torch.manual_seed(5)
            self.model = WithReset()


class WithReset(TinyLM):
    """The tiny model; parameters of its blocks can be initialised again."""


def run_meta(source):
    """Build on meta, load, train one step; return the loss and whether all ranks agree."""
    with elastic_environment():
        TinyBlock.reset_parameters = lambda self: nn.init.normal_(self.sinks)
        module = OnMeta()
        trainer = build_trainer(
            strategy=doors.strategy(verify_steps=False),
            max_steps=1,
            callbacks=[LoadAtStart(source)],
        )
        trainer.fit(module, loader(PackedRows(4), 1))
        return module.losses, module.finite


class LoadAtStart(pl.Callback):
    def __init__(self, source):
        self.source = source

    def on_fit_start(self, trainer, module):
        module.finite = all(bool(full(p).isfinite().all()) for p in module.parameters())
        if self.source:
            load_weights(module.model, Path(self.source))


def test_a_model_on_the_meta_device_is_filled_and_loaded_by_parts(ranks, tmp_path):
    model = build_model(torch.float32)
    save_file({n: p.detach() for n, p in model.named_parameters()}, tmp_path / "m.safetensors")
    total, count = whole_loss(model, PackedRows(4).rows(0, 2))
    for losses, finite in ranks(2).run(run_meta, str(tmp_path / "m.safetensors")):
        assert finite
        assert losses == pytest.approx([float((total / count).detach())], abs=1e-5)
    for losses, finite in ranks(2).run(run_meta, None):
        assert finite
        assert 2 < losses[0] < 10
