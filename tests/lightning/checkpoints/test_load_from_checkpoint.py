"""`load_from_checkpoint` and `ckpt_path="best"` on the folders that the strategy writes."""

import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from torch import nn

from lightning_cp.lightning.registry import read_folders, undo_read_folders
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


class Hyper(Module):
    """Keeps its arguments in the checkpoint, and something that is no plain data."""

    def __init__(self, lr=0.3, where=None, adapter=False):
        super().__init__(lr=lr)
        self.save_hyperparameters()
        if adapter:
            self.adapter = nn.Linear(3, 3)
        self.heard = None

    def on_load_checkpoint(self, checkpoint):
        self.heard = checkpoint["epoch"], "state_dict" in checkpoint


class Data(LightningDataModule):
    """Has arguments and a state of its own."""

    def __init__(self, num_rows=2, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.position = 0

    def train_dataloader(self):
        return loader(PackedRows(self.hparams.num_rows, self.hparams.seed), 1)

    def val_dataloader(self):
        return loader(PackedRows(2, 1), 1)

    test_dataloader = val_dataloader

    def state_dict(self):
        return {"position": 7}

    def load_state_dict(self, state):
        self.position = state["position"]


def fit_and_load(folder, sharding):
    """Train, keep the best, load it on all ranks; return what was loaded and what it should be."""
    with elastic_environment():
        keep = ModelCheckpoint(
            folder, monitor="val_loss", mode="min", save_top_k=1, save_last=True, filename="best"
        )
        trainer = build_trainer(
            strategy=doors.strategy(parameter_sharding=sharding, verify_steps=False),
            max_epochs=2,
            callbacks=[keep],
            enable_checkpointing=True,
        )
        module = Hyper(lr=0.25, where=Path("here") if sharding == "none" else None)
        data = Data(num_rows=4)
        trainer.fit(module, datamodule=data)
        best = trainer.checkpoint_callback.best_model_path
        assert Path(best).is_dir()
        trusting = {"weights_only": False if sharding == "none" else None}
        trusting |= {"verbose": False}
        tested = trainer.test(ckpt_path="best", datamodule=data, **trusting)
        validated = trainer.validate(module, ckpt_path="last", datamodule=data, **trusting)
        scores = [tested[0]["val_loss"], validated[0]["val_loss"]]
        trusting.pop("verbose")
        weights = {n: full(p.detach()).clone() for n, p in module.named_parameters()}
        loaded = Hyper.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, **trusting)
        assert not any(hasattr(p, "full_tensor") for p in loaded.parameters())
        found = {n: p.detach() for n, p in loaded.named_parameters()}
        hyper = dict(loaded.hparams), loaded.lr, loaded.heard
        return best, scores, float(keep.best_model_score), weights, found, hyper


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    return ranks(2).run(fit_and_load, str(tmp_path_factory.mktemp("full")), "full")


@pytest.mark.slow
def test_all_ranks_of_a_job_load_whole_weights(trained):
    for _, scores, best_score, weights, found, hyper in trained:
        assert scores[0] == pytest.approx(best_score, abs=1e-6)
        assert scores[1] == pytest.approx(best_score, abs=1e-6)  # it is a copy of the best
        assert weights.keys() == found.keys()
        for name, value in weights.items():
            assert torch.equal(value, found[name]), name
        assert hyper[:2] == ({"lr": 0.25, "where": None, "adapter": False}, 0.25)
        assert hyper[2] in [(0, True), (1, True)]


def test_a_process_without_a_group_loads(trained):
    best, weights = trained[0][0], trained[0][3]
    locations = (None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage)
    for path, location in ((best, locations[0]), *((Path(best), x) for x in locations[1:])):
        module = Hyper.load_from_checkpoint(path, map_location=location, lr=0.1)
        assert module.lr == 0.1
        for name, value in module.named_parameters():
            assert torch.equal(value, weights[name]), name
    assert next(iter(saving.pl_load(best, "meta")["state_dict"].values())).is_meta
    data = Data.load_from_checkpoint(best, seed=3)
    assert (data.hparams.num_rows, data.hparams.seed, data.position) == (4, 3, 7)


def test_strict_is_honoured(trained):
    best, weights = trained[0][0], trained[0][3]
    with pytest.raises(RuntimeError, match="Missing key.*adapter"):
        Hyper.load_from_checkpoint(best, adapter=True)
    with pytest.warns(UserWarning, match="not in the checkpoint.*adapter"):
        module = Hyper.load_from_checkpoint(best, adapter=True, strict=False)
    assert torch.equal(module.model.head.weight, weights["model.head.weight"])


def test_damaged_and_unfinished_folders_are_named(trained, tmp_path):
    folder = shutil.copytree(trained[0][0], tmp_path / "copy.ckpt")
    content = bytearray((folder / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "__1_0.distcp").write_bytes(content)
    with pytest.raises(ValueError, match="`__1_0.distcp` does not have the checksum"):
        Hyper.load_from_checkpoint(folder)
    (folder / "meta.pt").unlink()
    with pytest.raises(ValueError, match="`meta.pt` is missing"):
        Hyper.load_from_checkpoint(folder)
    folder.rename(tmp_path / ".other.ckpt.replaced")
    with pytest.raises(FileNotFoundError):
        Hyper.load_from_checkpoint(tmp_path / "nowhere.ckpt")


@pytest.mark.slow
def test_weights_only_is_honoured(ranks, tmp_path):
    results = ranks(2).run(fit_and_load, str(tmp_path), "none")
    for _, _, _, weights, found, hyper in results:
        assert hyper[0]["where"] == Path("here")
        assert all(torch.equal(value, found[name]) for name, value in weights.items())
    best = results[0][0]
    with pytest.raises(pickle.UnpicklingError, match="`weights_only=False` .*load_from_checkpoint"):
        Hyper.load_from_checkpoint(best)
    assert Hyper.load_from_checkpoint(best, weights_only=False).hparams.where == Path("here")


def test_lightning_gets_its_own_function_back(trained):
    ours = saving.pl_load
    undo_read_folders(saving)
    try:
        assert saving.pl_load is not ours
        with pytest.raises(IsADirectoryError):
            Hyper.load_from_checkpoint(trained[0][0])
        undo_read_folders(saving)
    finally:
        read_folders(saving)
    read_folders(saving)
    assert saving.pl_load.__wrapped__ is ours.__wrapped__
    Hyper.load_from_checkpoint(trained[0][0])


class Layer(nn.Linear):
    """An argument of a module that only the command line can build again."""


class FromCommandLine(Module):
    def __init__(self, layer: nn.Module, lr: float = 0.3):
        super().__init__(lr=lr)
        self.layer = layer
        self.save_hyperparameters()


def fit_from_command_line(path):
    from lightning.pytorch.cli import LightningCLI

    with elastic_environment():
        layer = {"class_path": f"{__name__}.Layer", "init_args": {"in_features": 3}}
        layer["init_args"]["out_features"] = 5
        config = {"model": {"layer": layer, "lr": 0.2}}
        cli = LightningCLI(FromCommandLine, run=False, args=config, save_config_callback=None)
        trainer = build_trainer(strategy=doors.strategy(), max_steps=1)
        trainer.fit(cli.model, loader(PackedRows(4), 1))
        trainer.save_checkpoint(path)
        return full(cli.model.layer.weight.detach())


@pytest.mark.slow
def test_what_the_command_line_has_built_is_built_again(ranks, tmp_path):
    pytest.importorskip("jsonargparse")
    path = str(tmp_path / "a.ckpt")
    for weight in ranks(2).run(fit_from_command_line, path):
        module = FromCommandLine.load_from_checkpoint(path)
        assert type(module.layer) is Layer
        assert module.lr == 0.2
        assert torch.equal(module.layer.weight, weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import lightning.pytorch as pl\nimport lightning_cp",
        "import lightning_cp\nimport lightning as L",
    ],
)
def test_a_fresh_process_needs_both_imports_only(trained, first):
    script = f"""
    {first.splitlines()[0]}
    {first.splitlines()[1]}
    import torch, torchmetrics
    from lightning.pytorch import LightningModule
    from tests.tiny import TinyLM

    class Mine(LightningModule):
        def __init__(self, lr):
            super().__init__()
            self.model, self.accuracy, self.lr = TinyLM(), torchmetrics.MeanMetric(), lr

    module = Mine.load_from_checkpoint({trained[0][0]!r})
    print(module.lr, float(module.model.head.weight.detach().double().sum()))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    total = trained[0][3]["model.head.weight"].double().sum()
    assert [float(x) for x in said] == [0.25, pytest.approx(float(total), rel=1e-12)]
