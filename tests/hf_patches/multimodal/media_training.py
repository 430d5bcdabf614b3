"""Models with images, video or audio, trained through the strategy and on one process."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_cp import ContextParallelCallback
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.parity import media_zoo
from tests.parity.hf import Double

# Several items in a sample or none, documents, padding, and batches of text in between.
KINDS = ("plain", "text", "packed", "left", "right")
TOWERS = ("vision_tower", "visual", "audio_tower")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """One training run, in float64.

    Args:
        model: of the zoo.
        dp_size: number of data ranks.
        trained: ``full``, ``frozen towers``, ``lora`` in the decoder, or ``lora everywhere``.
        weights: ``full`` or ``none``: the strategy's ``parameter_sharding``.
        checkpointing: whether layers run again in backward.
        uneven: whether data ranks get batches with and without media in the same step.
        kinds: of batches; an epoch has each of them twice.
        epochs: their number.
        max_len: verify the first batch, truncated to this length; 0 to verify nothing.
        strategy: more options of the strategy.
    """

    model: str
    dp_size: int = 1
    trained: str = "full"
    weights: str = "full"
    checkpointing: bool = False
    uneven: bool = False
    kinds: tuple[str, ...] = KINDS
    epochs: int = 3
    max_len: int = 0
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def num_batches(self) -> int:
        return 2 * len(self.kinds)

    def batches(self, data_rank: int, *, stock: bool) -> list[Batch]:
        """Return the batches of an epoch: as a user gives them, or as the stock model takes them.

        Args:
            data_rank: whose batches.
            stock: for the stock model, to which each document is a sample.
        """
        shift = data_rank if self.uneven else 0
        drawn = (
            _batches(self.model, self.kinds[(i + shift) % len(self.kinds)], 100 * data_rank + i)
            for i in range(self.num_batches)
        )
        return [pair[stock] for pair in drawn]


@lru_cache(maxsize=64)
def _batches(name: str, kind: str, seed: int) -> tuple[Batch, Batch]:
    return media_zoo.build_batches(name, kind, dtype=torch.float64, length=45, seed=seed)


class Batches(Dataset):
    """The batches of an epoch, ready."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


def _recompute() -> tuple[Any, Any]:
    """Return what is active when layers of a region run, and when they run again."""
    return nullcontext(), Double()


def build_model(job: Training) -> nn.Module:
    model: Any = media_zoo.build_model(job.model, dtype=torch.float64)
    if job.trained == "frozen towers":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in TOWERS for part in name.split(".")))
    elif job.trained.startswith("lora"):
        torch.manual_seed(5)
        where = ".*" if job.trained == "lora everywhere" else r".*language_model\..*"
        lora = LoraConfig(
            r=4, target_modules=where + r"\.(q_proj|v_proj|qkv)", init_lora_weights=False
        )
        model = get_peft_model(model, lora)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": _recompute})
    return model.train()


def trained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if p.requires_grad)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay and momentum also move weights that a batch of text does not use."""
    return torch.optim.AdamW(trained_parameters(model), lr=3e-3, weight_decay=0.1)


def _of_model(batch: Batch, *left_out: str) -> Batch:
    return {k: v for k, v in batch.items() if k not in ("document_ids", *left_out)}


class Module(LightningModule):
    """A user's module: nothing in it knows about context parallelism."""

    def __init__(self, job: Training) -> None:
        super().__init__()
        self.model = build_model(job)
        self.losses: list[float] = []

    def loss(self, batch: Batch) -> Tensor:
        with Double():
            return self.model(**_of_model(batch)).loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        with Double():
            return {"logits": self.model(**_of_model(batch, "labels")).logits}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model)


def loader(job: Training) -> DataLoader:
    cp_size = dist.get_world_size() // job.dp_size  # noqa: TID251
    return DataLoader(
        Batches(job.batches(dist.get_rank() // cp_size, stock=False)), batch_size=None
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.detach()) for name, p in model.named_parameters()}


def train(
    job: Training, *, resume: str | None = None, save: str | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on the ranks of the pool; return the losses and the final weights of this rank."""
    with elastic_environment():
        module, trainer = Module(job), fresh_trainer(job)
        trainer.fit(module, loader(job), ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        return module.losses, weights_of(module.model)


def fresh_trainer(job: Training) -> Trainer:
    verified = ContextParallelCallback(verify_first_batch=True, verify_max_len=job.max_len or 1)
    return build_trainer(
        strategy=doors.strategy(
            data_parallel_size=job.dp_size, parameter_sharding=job.weights, **job.strategy
        ),
        max_epochs=job.epochs,
        gradient_clip_val=1.0,
        callbacks=[verified] if job.max_len else [],
    )


def refusal(job: Training, *, validates: bool = False) -> str:
    """Return the error of a training or of a validation, with its notes."""
    try:
        evaluate(job) if validates else train(job)
    except Exception as error:
        return " ".join([str(error), *getattr(error, "__notes__", ())])
    return ""


def evaluate(job: Training) -> tuple[float, list[Tensor]]:
    """Return the validation loss, and the logits that predict() returns for each batch."""
    with elastic_environment():
        module, trainer = Module(job), fresh_trainer(job)
        loss = trainer.validate(module, loader(job), verbose=False)[0]["val_loss"]
        predicted = trainer.predict(module, loader(job))
        return loss, [output["logits"] for output in predicted]


def mean_loss(model: nn.Module, batches: list[Batch]) -> Tensor:
    """Return the mean over the valid tokens of batches, by the stock model."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        number = int((batch["labels"][:, 1:] != -100).sum())
        with Double():
            total = total + model(**batch).loss * number
        count += number
    return total / count


def train_alone(job: Training) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain torch, on one process with the batches of all data ranks."""
    model = build_model(job)
    optimizer = build_optimizer(model)
    losses = []
    for _ in range(job.epochs):
        for batches in zip(*(job.batches(r, stock=True) for r in range(job.dp_size)), strict=True):
            loss = mean_loss(model, batches)
            losses.append(float(loss.detach()))
            loss.backward()
            nn.utils.clip_grad_norm_(trained_parameters(model), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights_of(model)


@torch.no_grad()
def evaluate_alone(job: Training) -> tuple[float, list[Tensor]]:
    """Return what `evaluate` returns, by the stock model on one process."""
    model, batches = build_model(job).eval(), job.batches(0, stock=True)
    with Double():
        logits = [model(**_of_model(batch, "labels")).logits for batch in batches]
    return float(mean_loss(model, batches)), logits


def real_logits(logits: Tensor, batch: Batch) -> Tensor:
    """Return the logits of all tokens but padding, document by document."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return logits[mask == 1]


def differences(found: Any, exact: Any) -> tuple[float, tuple[float, str]]:
    """Return the largest difference of losses, and of weights with a name."""
    assert len(found[0]) == len(exact[0])
    assert found[1].keys() == exact[1].keys()
    losses = max(abs(x - y) for x, y in zip(found[0], exact[0], strict=True))
    return losses, max((float((x - exact[1][n]).abs().max()), n) for n, x in found[1].items())
