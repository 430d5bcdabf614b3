"""Runs of Lightning's features: on one device with a plain Trainer, and on context ranks.

Each case of `CASES` is a run and what is expected of it on ranks: ``works`` (all that it returns
equals one device's), ``differs`` (a check says how) or ``refused`` (a message). The page
docs/lightning-features.md has a row for each feature and names its case.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import callbacks as cb
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

from lightning_cp import token_mean
from tests import doors
from tests.lightning.jobs import elastic_environment, full

LENGTH = 23  # odd: every layout pads it
VOCAB = 31


class Rows(Dataset):
    """Samples with a label for every token: Lightning's means over batches are token means."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (num_rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH)}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Backbone(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return x


class Module(pl.LightningModule):
    """A small language model, written as for one device."""

    def __init__(self, lr: float = 0.1, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.backbone = Backbone()
        self.head = nn.Linear(16, VOCAB)
        self.double()
        self.lr, self.batch_size = lr, batch_size
        self.accuracy = torchmetrics.MeanMetric()
        self.seen: list[float] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.backbone(batch["input_ids"], batch["position_ids"]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = token_mean(self(batch), batch["labels"])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch)
        self.log("val_loss", token_mean(logits, batch["labels"]))
        known = batch["labels"] != -100
        self.accuracy((logits.argmax(-1) == batch["labels"])[known].double())
        self.log("val_accuracy", self.accuracy)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", token_mean(self(batch), batch["labels"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"logits": self(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(8), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Rows(4, seed=1), batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()


def alone() -> bool:
    """Return whether this is the run on one device."""
    return not dist.is_initialized()


def build_trainer(path: Path, **options: Any) -> pl.Trainer:
    """Build a quiet trainer: a plain one, or one over all processes of the pool."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "accelerator": "cpu",
        "default_root_dir": path,
        "use_distributed_sampler": False,  # Lightning would shuffle the samples on ranks
    }
    if alone():
        quiet |= {"devices": 1, "strategy": "auto"}
    else:
        quiet |= {"devices": dist.get_world_size(), "strategy": doors.strategy()}  # noqa: TID251
    return pl.Trainer(**{**quiet, **options})


def results(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return the results of a run: weights, metrics, steps and epochs."""
    return {
        "weights": {n: full(p.detach()).clone() for n, p in module.named_parameters()},
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "losses": list(getattr(module, "seen", [])),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def approx(x: float) -> Any:
    """Compare within rounding."""
    return pytest.approx(x, rel=1e-9)


Act = Callable[[Path], Any]
Verdict = Literal["works", "differs", "refused"]


@dataclass
class Case:
    """A run, and the expected result on ranks.

    Args:
        act: runs, and returns what is compared with one device.
        verdict: what the page says.
        says: a part of the error, if the run raises.
        check: for ``differs``: takes what a rank found and what one device found, and the number
            of ranks.
        needs: packages that must be installed.
        quick: belongs to the default run of the tests.
        sizes: on how many ranks it is run.
        rel: how far numbers may be from one device's.
    """

    act: Act
    verdict: Verdict = "works"
    says: str = ""
    check: Callable[[Any, Any, int], None] | None = None
    needs: tuple[str, ...] = ()
    quick: bool = False
    sizes: tuple[int, ...] = (2,)
    rel: float = 1e-9


CASES: dict[str, Case] = {}


def case(name: str, **expected: Any) -> Callable[[Act], Act]:
    """Register a function as a case."""

    def register(act: Act) -> Act:
        assert name not in CASES, name
        CASES[name] = Case(act, **expected)
        return act

    return register


def run(name: str, path: Path) -> Any:
    """Run a case here; an error is returned as its text."""
    from tests.lightning import more_habits  # noqa: F401  # registers its cases

    environment = dict(os.environ)
    torch.manual_seed(0)
    try:
        if alone():
            return CASES[name].act(path)
        with elastic_environment():
            return CASES[name].act(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for key in set(os.environ) - set(environment):
            del os.environ[key]
        os.environ.update(environment)


def fit(
    path: Path, module: pl.LightningModule | None = None, *, also: Any = None, **options: Any
) -> dict[str, Any]:
    """Fit, and return the results."""
    module = Module() if module is None else module
    trainer = build_trainer(path, **options)
    trainer.fit(module)
    found = results(trainer, module)
    return found | ({} if also is None else {"also": also(trainer, module)})


@contextmanager
def variables(**added: Any) -> Iterator[None]:
    before = dict(os.environ)
    for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in added.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def place() -> tuple[int, int]:
    return (0, 1) if alone() else (dist.get_rank(), dist.get_world_size())  # noqa: TID251


# ------------------------------------------------------------------------------- callbacks


class Writer(cb.BasePredictionWriter):
    def __init__(self, path: Path, interval: str) -> None:
        super().__init__(interval)
        self.path = path

    def write_on_batch_end(
        self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
    ):
        path = self.path / f"batch_{trainer.global_rank}_{batch_idx}.pt"
        torch.save({"logits": prediction["logits"], "at": batch_indices, "batch": batch}, path)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        logits = [prediction["logits"] for prediction in predictions]
        path = self.path / f"epoch_{trainer.global_rank}.pt"
        torch.save({"logits": logits, "at": batch_indices}, path)


def write_predictions(path: Path, interval: str) -> Any:
    path.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(path, callbacks=[Writer(path, interval)])
    returned = trainer.predict(Module(), return_predictions=interval == "epoch")
    rank = trainer.global_rank
    names = sorted(path.glob(f"epoch_{rank}.pt" if interval == "epoch" else f"batch_{rank}_*.pt"))
    return {"written": [torch.load(name) for name in names], "returned": returned}


@case("BasePredictionWriter", sizes=(2, 3))
def _(path):
    return {kind: write_predictions(path, kind) for kind in ("batch", "epoch")}


class Thaw(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class Trainable(Module):
    """Passes only trainable parameters to the optimizer, as finetuning callbacks require."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


@case("BaseFinetuning")
def _(path):
    return fit(path, Trainable(), callbacks=[Thaw()], max_epochs=3)


@case("BackboneFinetuning")
def _(path):
    finetune = cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    return fit(path, Trainable(), callbacks=[finetune], max_epochs=4)


@case(
    "BatchSizeFinder",
    verdict="refused",
    says="The Batch size finder is not supported with distributed strategies.",
)
def _(path):
    finder = cb.BatchSizeFinder(mode="power", steps_per_trial=1, init_val=1, max_trials=3)
    return fit(path, callbacks=[finder], also=lambda t, m: m.batch_size)


class Recorder(cb.Callback):
    """Records the arguments of hooks."""

    def __init__(self):
        self.calls = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.calls.append(("start", {k: v.clone() for k, v in batch.items()}))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls.append(("end", float(outputs["loss"]), {k: v.clone() for k, v in batch.items()}))

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ):
        self.calls.append(("val", outputs, {k: v.clone() for k, v in batch.items()}))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [full(p.grad).square().sum() for p in pl_module.parameters()]
        self.calls.append(("norm", float(torch.stack(grads).sum().sqrt())))

    def state_dict(self):
        return {"num_calls": len(self.calls)}


@case("Callback", sizes=(2, 3))
def _(path):
    recorder = Recorder()
    return fit(path, callbacks=[recorder], also=lambda t, m: recorder.calls)


class Own(cb.Checkpoint):
    """A checkpoint callback of a user."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(
            Path(trainer.default_root_dir) / f"own_{trainer.current_epoch}.ckpt"
        )


def resume(path: Path, ckpt: Any, **options: Any) -> Any:
    module = Module()
    trainer = build_trainer(path, max_epochs=3, **options)
    trainer.fit(module, ckpt_path=ckpt)
    return results(trainer, module)


@case("Checkpoint")
def _(path):
    first = fit(path, callbacks=[Own()], enable_checkpointing=True)
    return first, resume(path, path / "own_0.ckpt")


@case("DeviceStatsMonitor", needs=("psutil",))
def _(path):
    logger = pl.loggers.CSVLogger(path)
    monitor = cb.DeviceStatsMonitor(cpu_stats=True)
    return fit(path, callbacks=[monitor], logger=logger, log_every_n_steps=1)


@case("EarlyStopping")
def _(path):
    module = Module(lr=3.0)
    stop = cb.EarlyStopping("val_loss", patience=1, check_finite=True)
    return fit(
        path,
        module,
        callbacks=[stop],
        max_epochs=9,
        also=lambda t, m: (stop.stopped_epoch, float(stop.best_score)),
    )


@case("GradientAccumulationScheduler")
def _(path):
    return fit(path, callbacks=[cb.GradientAccumulationScheduler({0: 2, 1: 4})], max_epochs=3)


@case("LambdaCallback")
def _(path):
    calls = []
    spy = cb.LambdaCallback(on_train_batch_end=lambda t, m, o, b, i: calls.append(float(o["loss"])))
    return fit(path, callbacks=[spy], also=lambda t, m: calls)


@case("LearningRateFinder")
def _(path):
    finder = cb.LearningRateFinder(num_training_steps=8)
    return fit(
        path,
        callbacks=[finder],
        max_epochs=3,
        also=lambda t, m: (m.lr, finder.optimal_lr.results),
    )


@case("LearningRateMonitor")
def _(path):
    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    monitor = cb.LearningRateMonitor(log_momentum=True)
    logger = pl.loggers.CSVLogger(path)
    return fit(
        path,
        Scheduled(),
        callbacks=[monitor],
        logger=logger,
        log_every_n_steps=1,
        also=lambda t, m: monitor.lrs,
    )


@case("ModelCheckpoint", sizes=(2, 3))
def _(path):
    keep = cb.ModelCheckpoint(
        path / "kept",
        monitor="val_loss",
        save_top_k=1,
        save_last=True,
        filename="{epoch}-{val_loss:.4f}",
    )
    first = fit(
        path,
        callbacks=[keep],
        enable_checkpointing=True,
        also=lambda t, m: (
            Path(keep.best_model_path).name,
            float(keep.best_model_score),
            sorted(p.name for p in (path / "kept").iterdir()),
        ),
    )
    again = cb.ModelCheckpoint(path / "kept", save_last=True)
    return first, resume(path, "last", callbacks=[again], enable_checkpointing=True)


@case("ModelCheckpoint every step")
def _(path):
    keep = cb.ModelCheckpoint(
        path / "kept",
        monitor="train_loss_step",
        save_top_k=2,
        every_n_train_steps=3,
        save_weights_only=True,
    )
    return fit(
        path,
        callbacks=[keep],
        enable_checkpointing=True,
        also=lambda t, m: sorted(p.name for p in (path / "kept").iterdir()),
    )


def prune(path: Path, **options: Any) -> Any:
    module = Module()
    parts = [(module.head, "weight"), (module.backbone.blocks[0].qkv, "weight")]
    pruning = cb.ModelPruning("l1_unstructured", parameters_to_prune=parts, amount=0.5)
    strategy = {} if alone() else {"strategy": doors.strategy(**options)}
    return fit(path, module, callbacks=[pruning], **strategy)


@case("ModelPruning", verdict="refused", says="Prune the full weights after training", quick=True)
def _(path):
    return [prune(path, parameter_sharding=kind) for kind in ("full", "none")]


@case("ModelSummary")
def _(path):
    counted = []

    class Counting(cb.ModelSummary):
        @staticmethod
        def summarize(summary_data, total_parameters, trainable_parameters, *args, **options):
            counted.append((total_parameters, trainable_parameters))

    def read(trainer, module):
        return {"rank 0": counted} if trainer.is_global_zero else {}

    return fit(path, callbacks=[Counting(max_depth=2)], enable_model_summary=True, also=read)


@case("OnExceptionCheckpoint")
def _(path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    keep = cb.OnExceptionCheckpoint(path / "kept")
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(path, Failing(), callbacks=[keep], enable_checkpointing=True)
    return resume(path, path / "kept" / "on_exception.ckpt")


class Bar(cb.ProgressBar):
    def __init__(self):
        super().__init__()
        self.shown = []

    def disable(self):
        """Do nothing on ranks other than 0, where Lightning calls this."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        shown = self.get_metrics(trainer, pl_module)
        self.shown.append({k: float(v) for k, v in shown.items() if k != "v_num"})


@case("ProgressBar")
def _(path):
    bar = Bar()
    return fit(path, callbacks=[bar], enable_progress_bar=True, also=lambda t, m: bar.shown)


@case("RichModelSummary", needs=("rich",))
def _(path):
    return fit(path, callbacks=[cb.RichModelSummary()], enable_model_summary=True)


@case("RichProgressBar", needs=("rich",))
def _(path):
    return fit(path, callbacks=[cb.RichProgressBar()], enable_progress_bar=True)


@case("TQDMProgressBar")
def _(path):
    return fit(path, callbacks=[cb.TQDMProgressBar(refresh_rate=1)], enable_progress_bar=True)


@case("StochasticWeightAveraging")
def _(path):
    swa = cb.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
    return fit(path, callbacks=[swa], max_epochs=4)


@case("WeightAveraging")
def _(path):
    return fit(path, callbacks=[cb.WeightAveraging()])


@case("EMAWeightAveraging")
def _(path):
    return fit(path, callbacks=[cb.EMAWeightAveraging(decay=0.9)])


@case("SpikeDetection")
def _(path):
    spikes = cb.SpikeDetection(warmup=2, window=2, exclude_batches_path=path / "skip.json")
    return fit(path, callbacks=[spikes])


def counted_twice(found: Any, exact: Any, size: int) -> None:
    """The rate of a device is right; that of the job is multiplied by the context ranks."""
    assert found["losses"] == [approx(x) for x in exact["losses"]]
    if "rank 0" in found["also"]:
        mine, ours = found["also"]["rank 0"], exact["also"]["rank 0"]
        for name in ("batches", "samples", "lengths"):
            assert mine[f"train/{name}"] == ours[f"train/{name}"]
        rate = mine["train/items_per_sec"] / mine["train/device/items_per_sec"]
        assert rate == approx(size)


@case("ThroughputMonitor", verdict="differs", check=counted_twice)
def _(path):
    logger = Memory()
    monitor = cb.ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch["input_ids"]),
        length_fn=lambda batch: batch["input_ids"].numel(),
        window_size=4,
    )

    def figures(trainer, module):
        kept = [row[1] for row in logger.kept if isinstance(row, tuple)]
        rates = [row for row in kept if "train/device/items_per_sec" in row]
        return {"rank 0": rates[-1]} if trainer.is_global_zero else {}

    return fit(
        path, callbacks=[monitor], logger=logger, log_every_n_steps=1, max_epochs=3, also=figures
    )


@case("Timer")
def _(path):
    timer = cb.Timer(duration="00:00:30:00", interval="step")
    return fit(path, callbacks=[timer], also=lambda t, m: timer.time_elapsed("train") > 0)


@case("Timer stops")
def _(path):
    timer = cb.Timer(duration={"seconds": 0}, interval="step")
    return fit(path, callbacks=[timer], max_epochs=3)


# ------------------------------------------------------------------------------- loggers


class Memory(pl.loggers.Logger):
    """A logger of a user: stores everything."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.name, self.version = "memory", 0

    name = version = None

    @pl.utilities.rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.kept.append((step, dict(metrics)))

    @pl.utilities.rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        self.kept.append(dict(params))


def fit_with(path: Path, logger: Any, read: Callable[[], Any]) -> Any:
    """Fit with a logger, and return its records, on rank 0."""
    module = Module()
    trainer = build_trainer(path, logger=logger, log_every_n_steps=1)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    logger.log_hyperparams({"more": 1})
    logger.finalize("success")
    found = results(trainer, module)
    return found | ({"rank 0": read()} if trainer.is_global_zero else {})


def read_csv(path: Path) -> Any:
    import csv

    (file,) = path.rglob("metrics.csv")
    rows = list(csv.DictReader(file.open()))
    (params,) = path.rglob("hparams.yaml")
    return [{k: float(v) for k, v in row.items() if v} for row in rows], params.read_text()


@case("CSVLogger", sizes=(2, 3))
def _(path):
    logger = pl.loggers.CSVLogger(path)
    return fit_with(path, logger, lambda: read_csv(path))


@case("Logger")
def _(path):
    logger = Memory()
    return fit_with(path, logger, lambda: logger.kept)


@case("several loggers")
def _(path):
    memory, files = Memory(), pl.loggers.CSVLogger(path)
    return fit(
        path,
        logger=[memory, files],
        log_every_n_steps=1,
        also=lambda t, m: {"rank 0": memory.kept} if t.is_global_zero else {},
    )


def read_events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in sorted({file.parent for file in path.rglob("events.out.*")}):
        events = EventAccumulator(str(folder))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found[tag] = [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]
    return found


@case("TensorBoardLogger", needs=("tensorboard",))
def _(path):
    logger = pl.loggers.TensorBoardLogger(path)
    return fit_with(path, logger, lambda: read_events(path))


class Traced(Module):
    """Its forward takes tensors, as tracing wants."""

    def __init__(self):
        super().__init__()
        row = Rows(1)[0]
        self.example_input_array = row["input_ids"][None], row["position_ids"][None]

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            return super().forward(input_ids)
        return super().forward({"input_ids": input_ids, "position_ids": position_ids})


@case(
    "TensorBoardLogger log_graph",
    needs=("tensorboard",),
    verdict="refused",
    says="TensorBoardLogger(log_graph=True)",
)
def _(path):
    return fit(path, Traced(), logger=pl.loggers.TensorBoardLogger(path, log_graph=True))


@case("WandbLogger", needs=("wandb",))
def _(path):
    path.mkdir(parents=True, exist_ok=True)
    logger = pl.loggers.WandbLogger(save_dir=path, offline=True, project="p", log_model=False)

    def read():
        summary = dict(logger.experiment.summary)
        return {k: float(v) for k, v in summary.items() if not k.startswith("_")}

    return fit_with(path, logger, read)


@case("WandbLogger watch", needs=("wandb",), verdict="refused", says="WandbLogger.watch")
def _(path):
    path.mkdir(parents=True, exist_ok=True)
    logger = pl.loggers.WandbLogger(save_dir=path, offline=True, project="p")
    module, trainer = Module(), build_trainer(path, logger=logger)
    logger.watch(module, log="all", log_freq=1)
    trainer.fit(module)


class Hooking(cb.Callback):
    """Sets a hook on rank 0, before weights are sharded or after."""

    def __init__(self, when: str) -> None:
        self.when = when

    @staticmethod
    def _look(part, *_):
        part.weight.abs().max()

    def _hook(self, trainer, pl_module):
        if trainer.is_global_zero:
            pl_module.head.register_forward_hook(self._look)

    def setup(self, trainer, pl_module, stage):
        if self.when == "setup":
            self._hook(trainer, pl_module)

    def on_fit_start(self, trainer, pl_module):
        if self.when == "on_fit_start":
            self._hook(trainer, pl_module)


@case("hooks on rank 0", verdict="refused", says="different numbers of hooks", quick=True)
def _(path):
    return fit(path, callbacks=[Hooking("setup")])


@case("hooks on rank 0, set later", verdict="refused", says="different numbers of hooks")
def _(path):
    return fit(path, callbacks=[Hooking("on_fit_start")])


@case("MLFlowLogger", needs=("mlflow",))
def _(path):
    path.mkdir(parents=True, exist_ok=True)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    logger = pl.loggers.MLFlowLogger(tracking_uri=f"file:{path}/runs")

    def read():
        history = logger.experiment.get_metric_history(logger.run_id, "train_loss_step")
        return [(point.step, point.value) for point in history]

    return fit_with(path, logger, read)


@case("CometLogger", needs=("comet_ml",))
def _(path):
    path.mkdir(parents=True, exist_ok=True)
    logger = pl.loggers.CometLogger(online=False, offline_directory=str(path))
    return fit_with(path, logger, lambda: None)


# ------------------------------------------------------------------------------- plugins


@case("Precision")
def _(path):
    return fit(path, plugins=[pl.plugins.Precision()])


def near(rel: float) -> Callable[[Any, Any, int], None]:
    """Compare losses within the rounding of a lower precision."""

    def check(found: Any, exact: Any, size: int) -> None:
        assert len(found["losses"]) == len(exact["losses"])
        for x, y in zip(found["losses"], exact["losses"], strict=True):
            assert abs(x - y) <= rel * abs(y), (x, y)
        for name, value in exact["metrics"].items():
            if "loss" in name:
                assert abs(found["metrics"][name] - value) <= rel * abs(value), name

    return check


@case("HalfPrecision", check=near(0.02))
def _(path):
    return fit(path, Module().float(), precision="bf16-true")


@case("HalfPrecision 16-true", check=near(0.01))
def _(path):
    return fit(path, Module().float(), precision="16-true")


@case("MixedPrecision", check=near(0.01))
def _(path):
    return fit(path, Module().float(), precision="bf16-mixed")


@case("MixedPrecision 16-mixed", verdict="refused", says="16-mixed")
def _(path):
    return fit(path, precision="16-mixed")


@case("DoublePrecision", verdict="refused", says="64-true")
def _(path):
    return fit(path, precision="64-true")


@case("FSDPPrecision", check=near(0.01))
def _(path):
    from lightning.pytorch.plugins import FSDPPrecision

    return fit(path, Module().float(), plugins=[FSDPPrecision("bf16-mixed")])


@case("DeepSpeedPrecision", verdict="refused", says="belongs to DeepSpeedStrategy")
def _(path):
    from lightning.pytorch.plugins import DeepSpeedPrecision

    return fit(path, plugins=[DeepSpeedPrecision("bf16-true")])


@case("XLAPrecision", verdict="refused", says="torch_xla")
def _(path):
    from lightning.pytorch.plugins import XLAPrecision

    return fit(path, plugins=[XLAPrecision("32-true")])


@case("XLACheckpointIO", verdict="refused", says="torch_xla")
def _(path):
    return fit(path, plugins=[pl.plugins.XLACheckpointIO()])


@case("TorchSyncBatchNorm")
def _(path):
    return fit(path, plugins=[pl.plugins.TorchSyncBatchNorm()])


@case("LayerSync")
def _(path):
    class Nothing(pl.plugins.LayerSync):
        def apply(self, model):
            return model

        def revert(self, model):
            return model

    return fit(path, plugins=[Nothing()])


def save_through(path: Path, io: Any, distributed: bool = True) -> Any:
    options: dict[str, Any] = {"plugins": [io], "enable_checkpointing": True}
    if not alone() and not distributed:
        options["strategy"] = doors.strategy(save_distributed_checkpoint=False)
    keep = cb.ModelCheckpoint(path / "kept", save_last=True)
    first = fit(path, callbacks=[keep], **options)
    return first, resume(path, path / "kept" / "last.ckpt")


class OwnIO(pl.plugins.TorchCheckpointIO):
    """A CheckpointIO of a user."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        checkpoint["stamp"] = "own"
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        found = super().load_checkpoint(path, map_location, weights_only)
        assert found["stamp"] == "own"
        return found


@case("TorchCheckpointIO")
def _(path):
    return save_through(path, pl.plugins.TorchCheckpointIO())


@case("TorchCheckpointIO one file")
def _(path):
    return save_through(path, pl.plugins.TorchCheckpointIO(), distributed=False)


@case("CheckpointIO")
def _(path):
    return save_through(path, OwnIO())


@case("CheckpointIO one file")
def _(path):
    return save_through(path, OwnIO(), distributed=False)


@case("AsyncCheckpointIO")
def _(path):
    return save_through(path, pl.plugins.AsyncCheckpointIO())


@case("AsyncCheckpointIO one file")
def _(path):
    return save_through(path, pl.plugins.AsyncCheckpointIO(), distributed=False)


def profiled(profiler: Any, path: Path) -> Any:
    def read(trainer, module):
        return bool(trainer.profiler.summary()) if trainer.is_global_zero else True

    return fit(path, profiler=profiler, also=read)


@case("SimpleProfiler")
def _(path):
    return profiled("simple", path)


@case("AdvancedProfiler")
def _(path):
    return profiled("advanced", path)


@case("PyTorchProfiler")
def _(path):
    return profiled("pytorch", path)


@case("PassThroughProfiler")
def _(path):
    return fit(path, profiler=pl.profilers.PassThroughProfiler())


@case("Profiler")
def _(path):
    class OwnProfiler(pl.profilers.Profiler):
        def start(self, action_name):
            pass

        def stop(self, action_name):
            pass

    return fit(path, profiler=OwnProfiler(dirpath=path, filename="own"))


@case("XLAProfiler", verdict="refused", says="torch_xla")
def _(path):
    return fit(path, profiler=pl.profilers.XLAProfiler())


# ------------------------------------------------------------------------------- environments


def fit_in(path: Path, environment: Any) -> Any:
    """Fit in a cluster environment; on ranks, return its properties too."""
    return fit(path, plugins=[] if alone() else [environment()])


@case("TorchElasticEnvironment")
def _(path):
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    return fit_in(path, TorchElasticEnvironment)


@case("LightningEnvironment")
def _(path):
    from lightning.pytorch.plugins.environments import LightningEnvironment

    rank, _ = place()
    with variables(LOCAL_RANK=rank, NODE_RANK=0):
        return fit_in(path, LightningEnvironment)


@case("SLURMEnvironment")
def _(path):
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    rank, size = place()
    with variables(
        SLURM_NTASKS=size,
        SLURM_NTASKS_PER_NODE=size,
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID=0,
        SLURM_JOB_NAME="train",
        SLURM_NODELIST="localhost",
        SLURM_JOB_ID=1,
    ):
        return fit_in(path, SLURMEnvironment)


@case("LSFEnvironment")
def _(path):
    from lightning.pytorch.plugins.environments import LSFEnvironment

    rank, size = place()
    path.mkdir(parents=True, exist_ok=True)
    hosts = path / f"hosts {rank}"  # ranks would truncate what others read
    import socket

    hosts.write_text("\n".join(["batch"] + [socket.gethostname()] * size))
    with variables(
        LSB_JOBID=1,
        LSB_DJOB_RANKFILE=hosts,
        JSM_NAMESPACE_SIZE=size,
        JSM_NAMESPACE_RANK=rank,
        JSM_NAMESPACE_LOCAL_RANK=rank,
    ):
        return fit_in(path, LSFEnvironment)


@case("KubeflowEnvironment")
def _(path):
    from lightning.pytorch.plugins.environments import KubeflowEnvironment

    rank, size = place()
    with variables(
        KUBERNETES_PORT="tcp://127.0.0.1:443",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=1,
        WORLD_SIZE=size,
        RANK=rank,
    ):
        return fit_in(path, KubeflowEnvironment)


@case("XLAEnvironment", verdict="refused", says="torch_xla")
def _(path):
    from lightning.pytorch.plugins.environments import XLAEnvironment

    return fit(path, plugins=[XLAEnvironment()])


@case("ClusterEnvironment")
def _(path):
    from lightning.pytorch.plugins.environments import ClusterEnvironment

    rank, size = place()

    class OwnCluster(ClusterEnvironment):
        creates_processes_externally = True
        main_address, main_port = "127.0.0.1", 1

        @staticmethod
        def detect():
            return True

        def world_size(self):
            return size

        def set_world_size(self, size):
            pass

        def global_rank(self):
            return rank

        def set_global_rank(self, rank):
            pass

        def local_rank(self):
            return rank

        def node_rank(self):
            return 0

    return fit_in(path, OwnCluster)


# ------------------------------------------------------------------------------- tuner


@case("Tuner.lr_find")
def _(path):
    from lightning.pytorch.tuner import Tuner

    module = Module()
    trainer = build_trainer(path, max_epochs=3)
    found = Tuner(trainer).lr_find(module, num_training=8, max_lr=0.5)
    return found.results, found.suggestion(skip_begin=1, skip_end=1), module.lr


@case(
    "Tuner.scale_batch_size",
    verdict="refused",
    says="Tuning the batch size is currently not supported with distributed strategies.",
)
def _(path):
    from lightning.pytorch.tuner import Tuner

    module = Module()
    return Tuner(build_trainer(path)).scale_batch_size(
        module, mode="power", max_trials=2, init_val=1
    )


# ------------------------------------------------------------------------------- flags


def flag(name: str, *, module: Any = None, also: Any = None, options: Any, **expected: Any) -> None:
    """Register a run that only sets a flag, or several."""

    def act(path: Path) -> Any:
        given = options() if callable(options) else options
        return fit(path, None if module is None else module(), also=also, **given)

    assert name not in CASES, name
    CASES[name] = Case(act, **expected)


flag("accelerator", options={"accelerator": "cpu"})
flag("devices", options=lambda: {"devices": place()[1]})
flag("num_nodes", options={"num_nodes": 1})
flag("logger=True", options={"logger": True})
flag("callbacks", options=lambda: {"callbacks": cb.Callback()})
flag("fast_dev_run", options={"fast_dev_run": 2})
flag("fast_dev_run=True", options={"fast_dev_run": True})
flag("max_epochs", options={"max_epochs": 1})
flag(
    "min_epochs",
    options={
        "max_epochs": 3,
        "min_epochs": 2,
    },
)
flag("max_steps", options={"max_epochs": -1, "max_steps": 5})
flag("min_steps", options={"max_epochs": 3, "min_steps": 9})
flag("max_time", options={"max_epochs": 2, "max_time": {"minutes": 30}})
flag("limit_train_batches", options={"limit_train_batches": 3})
flag("limit_train_batches=0.5", options={"limit_train_batches": 0.5})
flag("limit_val_batches", options={"limit_val_batches": 1})
flag("overfit_batches", options={"overfit_batches": 1})
flag("overfit_batches=0.5", options={"overfit_batches": 0.5})
flag(
    "val_check_interval",
    options={"val_check_interval": 3, "accumulate_grad_batches": 2},
)
flag("val_check_interval=0.5", options={"val_check_interval": 0.5, "accumulate_grad_batches": 2})
flag(
    "val_check_interval over epochs",
    options={
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "accumulate_grad_batches": 2,
    },
)
flag("check_val_every_n_epoch", options={"check_val_every_n_epoch": 2, "max_epochs": 3})
flag("num_sanity_val_steps", options={"num_sanity_val_steps": -1})
flag("num_sanity_val_steps=0", options={"num_sanity_val_steps": 0})
flag("log_every_n_steps", options={"log_every_n_steps": 3, "logger": True})
flag("enable_checkpointing", options={"enable_checkpointing": True})
flag("enable_progress_bar", options={"enable_progress_bar": True})
flag("enable_model_summary", options={"enable_model_summary": True})
flag("accumulate_grad_batches", options={"accumulate_grad_batches": 2})
flag("gradient_clip_val", options={"gradient_clip_val": 0.1}, sizes=(2, 3))
flag(
    "gradient_clip_algorithm",
    options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    sizes=(2, 3),
)
flag("benchmark", options={"benchmark": True})
flag("inference_mode", options={"inference_mode": False})
flag("inference_mode=True", options={"inference_mode": True})
flag("detect_anomaly", options={"detect_anomaly": True})
flag("sync_batchnorm", options={"sync_batchnorm": True})
flag("reload_dataloaders_every_n_epochs", options={"reload_dataloaders_every_n_epochs": 1})
flag("enable_autolog_hparams", options={"enable_autolog_hparams": False, "logger": True})
flag("default_root_dir", options={})
flag("model_registry", options={"model_registry": None})
flag("profiler", options={"profiler": None})
flag("plugins", options=lambda: {"plugins": [pl.plugins.Precision()]})
flag("precision", options={"precision": "32-true"})


def short_window(found: Any, exact: Any, size: int) -> None:
    """The first window of 3 is the same; the last one, of 1, is a mean of its tokens here."""
    assert found["losses"][:4] == [approx(x) for x in exact["losses"][:4]]
    assert abs(found["losses"][-1] - exact["losses"][-1]) > 1e-6


flag(
    "accumulate_grad_batches, short last window",
    options={"accumulate_grad_batches": 3},
    verdict="differs",
    check=short_window,
)


def shuffled(found: Any, exact: Any, size: int) -> None:
    """On ranks, Lightning's sampler shuffles training samples, also those of an ordered loader."""
    assert found["order"] != exact["order"]
    assert sorted(found["order"]) == sorted(exact["order"])
    assert found["ordered"] == exact["order"]


def order_of(path: Path, **options: Any) -> list[int]:
    recorder = Recorder()
    fit(path, callbacks=[recorder], max_epochs=1, **options)
    return [
        int(x)
        for kind, *rest in recorder.calls
        if kind == "start"
        for x in rest[0]["input_ids"][:, :3].sum(1)
    ]


@case("use_distributed_sampler", verdict="differs", check=shuffled)
def _(path):
    return {
        "order": order_of(path, use_distributed_sampler=True),
        "ordered": order_of(path, use_distributed_sampler=False),
    }


@case("deterministic")
def _(path):
    try:
        return fit(path, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@case("limit_test_batches")
def _(path):
    return build_trainer(path, limit_test_batches=1).test(Module(), verbose=False)


@case("limit_predict_batches")
def _(path):
    return build_trainer(path, limit_predict_batches=1).predict(Module())


@case("barebones")
def _(path):
    module = Module()
    quiet = {
        "enable_checkpointing": None,
        "logger": None,
        "enable_progress_bar": None,
        "enable_model_summary": None,
    }
    trainer = build_trainer(path, barebones=True, **quiet)
    trainer.fit(module)
    return results(trainer, module)


@case("strategy")
def _(path):
    options = {} if alone() else {"strategy": "context_parallel"}
    return fit(path, **options)
