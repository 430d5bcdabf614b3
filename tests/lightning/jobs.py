"""Lightning runs on ranks, and the same training in plain torch on one process."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_cp import ContextParallelStrategy, token_mean
from lightning_cp.checkpoint.blocks import full_tensor
from tests import doors
from tests.parity.steps import Rows, build_model, whole_loss

LENGTH = 23  # odd: every layout pads it
VOCAB = 61


class PackedRows(Dataset):
    """Samples of three documents, one of a single token; some have few labels."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (num_rows, LENGTH), generator=generator)
        self.labels = self.tokens.clone()
        cut = torch.randint(2, LENGTH, (num_rows,), generator=generator)
        for row in range(num_rows):
            self.labels[row, : cut[row]] = -100
        first = torch.randint(3, LENGTH - 4, (num_rows, 1), generator=generator)
        place = torch.arange(LENGTH).expand(num_rows, -1)
        self.documents = (place >= first).long() + (place >= first + 1).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens[index],
            "labels": self.labels[index],
            "document_ids": self.documents[index],
        }

    def rows(self, start: int, stop: int) -> Rows:
        """Return samples in the format of the reference."""
        documents = self.documents[start:stop]
        place = torch.arange(LENGTH).expand(len(documents), -1)
        new = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0))
        return Rows(
            {"input_ids": self.tokens[start:stop], "labels": self.labels[start:stop]},
            documents=documents,
            positions=place - (place * new).cummax(1).values,
        )


class Module(LightningModule):
    """The tiny model as a user would write it."""

    def __init__(self, *, lr: float = 0.3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = build_model(dtype)
        self.accuracy = torchmetrics.MeanMetric()
        self.lr = lr
        self.losses: list[float] = []
        self.val_losses: list[float] = []
        self.grad_norms: list[float] = []

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        positions = self.trainer.strategy.context_parallel.position_ids()
        return self.model(batch["input_ids"], positions)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = token_mean(self.logits(batch), batch["labels"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # Callbacks and hooks must see the gradient of the full window, before it is clipped.
        grads = full_together([p.grad for p in self.parameters() if p.grad is not None])
        squares = [grad.double().square().sum() for grad in grads]
        self.grad_norms.append(float(torch.stack(squares).sum().sqrt()))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.logits(batch)
        loss = token_mean(logits, batch["labels"])
        self.log("val_loss", loss)
        # A metric over this rank's tokens: its states are reduced over the ranks.
        known = batch["labels"] != -100
        self.accuracy(logits.argmax(-1)[known] % 2, known[known].float())
        self.log("val_metric", self.accuracy)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        whole = self.trainer.strategy.context_parallel.unshard(batch["input_ids"], 1)
        return {"logits": self.logits(batch), "rows": whole.float().mean(1)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ManualModule(Module):
    """The same with manual optimization: weights, accumulates and clips explicitly."""

    def __init__(self, *, accumulate: int, clip: float | None, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False
        self.accumulate, self.clip = accumulate, clip

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        window = self.trainer.strategy.gradient_window
        self.manual_backward(loss * window.weigh())
        last = batch_idx + 1 == self.trainer.num_training_batches
        if (batch_idx + 1) % self.accumulate and not last:
            return
        optimizer = self.optimizers()
        window.finish(self.parameters())
        if self.clip is not None:
            self.clip_gradients(
                optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm"
            )
        optimizer.step()
        optimizer.zero_grad()


def full(x: Tensor) -> Tensor:
    """Return the full tensor of a sharded one."""
    return full_tensor(x) if isinstance(x, DTensor) else x


def full_together(tensors: list[Tensor]) -> list[Tensor]:
    """Return the full tensors of sharded ones; in one message, if dim 0 is sharded by one axis."""
    kinds = {(getattr(x, "placements", None), x.dtype) for x in tensors}
    if kinds != {((Shard(0),), tensors[0].dtype)}:
        return [full(x) for x in tensors]
    group = tensors[0].device_mesh.get_group()
    # Ranks hold equal numbers of rows, the last ones fewer or none.
    rows = [-(-len(x) // group.size()) for x in tensors]
    locals_ = [x.to_local() for x in tensors]
    padded = [
        torch.cat([x, x.new_zeros(n - len(x), *x.shape[1:])]).flatten()
        for x, n in zip(locals_, rows, strict=True)
    ]
    mine = torch.cat(padded)
    found = mine.new_empty(group.size(), len(mine))
    dist.all_gather_into_tensor(found.view(-1), mine, group=group)
    parts = found.split([len(x) for x in padded], dim=1)
    return [
        part.reshape(-1, *x.shape[1:])[: len(x)] for part, x in zip(parts, tensors, strict=True)
    ]


@dataclass
class Fit:
    """One training run."""

    dp_size: int = 1
    accumulate: int = 1
    manual: bool = False
    num_microbatches: int = 5  # per epoch
    epochs: int = 2
    clip: float | None = 0.5
    clip_by: str = "norm"
    precision: str = "32-true"
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


def on_gpu() -> bool:
    """Return whether the processes of the pool use a GPU."""
    return dist.is_initialized() and "nccl" in dist.get_backend()


@contextmanager
def elastic_environment() -> Iterator[None]:
    """Set the environment variables of a process that torchrun has started."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())  # noqa: TID251
    # Ranks that share a GPU appear as nodes with one GPU each.
    nodes = on_gpu()
    added = {
        "RANK": rank,
        "LOCAL_RANK": "0" if nodes else rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": "1" if nodes else size,
        "GROUP_RANK": rank if nodes else "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "test",
    }
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def logged_lines() -> Iterator[list[str]]:
    """Yield the lines that the library logs meanwhile."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("lightning_cp"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def build_strategy(**options: Any) -> ContextParallelStrategy:
    """Build a strategy in which by default all processes of the pool are context ranks."""
    if on_gpu():  # the default is the processes of a node
        dp_size = options.get("data_parallel_size", 1)
        options.setdefault("context_parallel_size", dist.get_world_size() // dp_size)  # noqa: TID251
    return doors.strategy(**options)


def build_trainer(**options: Any) -> Trainer:
    """Build a quiet trainer over all processes of the pool."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    size = dist.get_world_size()  # noqa: TID251
    quiet |= {"accelerator": "cpu", "devices": size, "use_distributed_sampler": False}
    if on_gpu():
        quiet |= {"accelerator": "gpu", "devices": 1, "num_nodes": size}
    return Trainer(**{**quiet, **options})


def loader(rows: Dataset, dp_size: int) -> DataLoader:
    """Return a loader of two samples per microbatch, over all data ranks, in order."""
    cp_size = dist.get_world_size() // dp_size  # noqa: TID251
    sampler = DistributedSampler(rows, dp_size, dist.get_rank() // cp_size, shuffle=False)
    return DataLoader(rows, batch_size=2 // dp_size, sampler=sampler)


def run_fit(fit: Fit) -> dict[str, Any]:
    """Train on the ranks of the pool, and return the results of this rank."""
    with elastic_environment():
        rows, val_rows = PackedRows(2 * fit.num_microbatches), PackedRows(6, seed=1)
        options: dict[str, Any] = {"dtype": fit.dtype}
        if fit.manual:
            module: Module = ManualModule(accumulate=fit.accumulate, clip=fit.clip, **options)
        else:
            module = Module(**options)
        automatic = {
            "accumulate_grad_batches": fit.accumulate,
            "gradient_clip_val": fit.clip,
            "gradient_clip_algorithm": fit.clip_by,
        }
        trainer = build_trainer(
            strategy=doors.strategy(data_parallel_size=fit.dp_size, **fit.strategy),
            max_epochs=fit.epochs,
            precision=fit.precision,
            **({} if fit.manual else automatic),
            **fit.trainer,
        )
        trainer.fit(module, loader(rows, fit.dp_size), loader(val_rows, fit.dp_size))
        names, parameters = zip(*module.model.named_parameters(), strict=True)
        weights = [p.detach() for p in parameters]
        return {
            "losses": module.losses,
            "grad_norms": module.grad_norms,
            "weights": dict(zip(names, full_together(weights), strict=True)),
            "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        }


def run_alone(fit: Fit) -> dict[str, Any]:
    """Train in plain torch, on one process with the full global batch."""
    model = build_model(fit.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows, val_rows = PackedRows(2 * fit.num_microbatches), PackedRows(6, seed=1)
    losses, norms, epoch_loss = [], [], 0.0
    for _ in range(fit.epochs):
        totals, num_tokens = 0.0, 0
        for start in range(0, fit.num_microbatches, fit.accumulate):
            window = range(start, min(start + fit.accumulate, fit.num_microbatches))
            parts = [whole_loss(model, rows.rows(2 * i, 2 * i + 2)) for i in window]
            losses += [float(total.detach() / count.clamp(min=1)) for total, count in parts]
            totals += sum(float(total.detach()) for total, _ in parts)
            num_tokens += sum(int(count) for _, count in parts)
            count = sum(int(count) for _, count in parts)
            (sum(total for total, _ in parts) / count).backward()
            squares = [p.grad.double().square().sum() for p in model.parameters()]
            norms.append(float(torch.stack(squares).sum().sqrt()))
            if fit.clip is not None and fit.clip_by == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), fit.clip)
            elif fit.clip is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), fit.clip)
            optimizer.step()
            optimizer.zero_grad()
        epoch_loss = totals / num_tokens
    with torch.no_grad():
        total, count = whole_loss(model, val_rows.rows(0, 6))
    return {
        "losses": losses,
        "grad_norms": norms,
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "metrics": {"train_loss_epoch": epoch_loss, "val_loss": float(total / count)},
    }


def worst(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences of losses, gradient norms, weights and metrics."""

    def far(a: list[float], b: list[float]) -> float:
        assert len(a) == len(b), f"{len(a)} values instead of {len(b)}"
        return max(abs(x - y) for x, y in zip(a, b, strict=True))

    weights = exact["weights"]
    metrics = exact["metrics"]
    return {
        "losses": far(found["losses"], exact["losses"]),
        "grad_norms": far(found["grad_norms"], exact["grad_norms"]),
        "weights": max(float((found["weights"][n] - weights[n]).abs().max()) for n in weights),
        "metrics": max(abs(found["metrics"][n] - metrics[n]) for n in metrics),
    }
