"""Evaluation steps as people write them, drawn at random, and run on one device or on ranks.

A step takes a tensor of the model or the batch, does a few things to it, pools or reduces it, and
returns or logs it. Some know of context parallelism and use its helpers; most do not, and what they
compute from one rank's tokens must be refused, or happen to be right.
"""

import random
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import token_mean
from lightning_cp.loss.means import global_mean
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment

# The local length of a sequence on two ranks: sizes are ambiguous.
WIDTH, LENGTH = 32, 64

SOURCES = ("logits", "hidden", "labels", "input_ids", "mask", "correct", "score", "loss_by_token")
CHANGES = ("argmax", "softmax", "square", "centred", "cumsum", "flip", "shift", "select", "none")
POOLS = ("mean", "sum", "max", "first", "last", "last real", "masked mean", "flatten", "none")
HELPERS = ("unshard", "pool first", "pool last", "pool mean", "none", "none", "none")
SHAPES = ("tensor", "dict", "list", "tuple", "numpy", "numbers", "text", "half", "beside logits")
SCALARS = ("mean", "sum", "max", "std", "count", "length", "item")
LOGS = ("mean", "synced mean", "sum", "synced sum", "synced max", "step", "dict")
METRICS = ("mean", "sum", "max", "cat", "perplexity", "shifted perplexity", "weighted", "returned")
LOSSES = ("model", "token_mean", "global_mean", "cross_entropy", "shifted cross_entropy", "exp")


@dataclass(frozen=True)
class Case:
    """One drawn step; the same for the same seed."""

    seed: int

    def draw(self) -> dict[str, str]:
        """Return the choices that the step is made of."""
        rng = random.Random(self.seed)
        kinds = ("returned", "returned", "logged", "metric", "loss")
        choices = {
            "kind": kinds[self.seed % len(kinds)],
            "source": SOURCES,
            "change": CHANGES,
            "helper": HELPERS,
            "pool": POOLS,
            "shape": SHAPES,
            "scalar": SCALARS,
            "log": LOGS,
            "metric": METRICS,
            "loss": LOSSES,
            "stage": ("predict", "predict", "validate") if self.seed % 5 < 2 else ("validate",),
        }
        return {
            name: value if isinstance(value, str) else rng.choice(value)
            for name, value in choices.items()
        }


class Drawn(pl.LightningModule):
    """A small language model whose evaluation step was drawn."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=WIDTH,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config).double()
        self.drawn = case.draw()
        self.metrics = torch.nn.ModuleDict(
            {
                "mean": torchmetrics.MeanMetric(),
                "sum": torchmetrics.SumMetric(),
                "max": torchmetrics.MaxMetric(),
                "cat": torchmetrics.CatMetric(),
                "perplexity": Perplexity(ignore_index=-100),
            }
        ).double()
        self.seen: list[Any] = []

    @property
    def cp(self) -> Any:
        """Return context parallelism, None on one device."""
        return getattr(self.trainer.strategy, "context_parallel", None)

    def shifted(self, labels: Tensor) -> Tensor:
        """Return the labels of next tokens, as the helper gives them."""
        if self.cp is not None:
            return self.cp.shift_labels(labels)
        return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)

    def run(self, batch: dict[str, Tensor]) -> Any:
        d = self.drawn
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
        out = self.model(**inputs, output_hidden_states=True)
        if d["kind"] == "loss":
            return self.log_loss(out, batch)
        x = self.source(out, batch)
        if d["kind"] == "metric":
            return self.update_metric(x, out, batch)
        x = self.change(x)
        x = self.help(x)
        x = self.pool(x, batch)
        if d["kind"] == "logged":
            return self.log_scalar(x)
        return self.shape(x, out)

    def source(self, out: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        return {
            "logits": lambda: out.logits,
            "hidden": lambda: out.hidden_states[-1],
            "labels": lambda: labels,
            "input_ids": lambda: batch["input_ids"],
            "mask": lambda: batch["attention_mask"],
            "correct": lambda: (out.logits.argmax(-1) == self.shifted(labels)).double(),
            "score": lambda: log_softmax(out.logits, -1).amax(-1),
            "loss_by_token": lambda: cross_entropy(
                out.logits.mT, self.shifted(labels), reduction="none"
            ),
        }[self.drawn["source"]]()

    def change(self, x: Tensor) -> Tensor:
        kind = self.drawn["change"]
        if kind == "argmax":
            return x.argmax(-1) if x.dim() == 3 else x
        if kind == "softmax":
            return x.double().softmax(-1)
        if kind == "square":
            return x * x
        if kind == "centred":
            return x - x.double().mean()
        if kind == "cumsum":
            return x.cumsum(1)
        if kind == "flip":
            return x.flip(1)
        if kind == "shift":
            return x[:, 1:]
        if kind == "select":
            return x[x > 0]
        return x

    def help(self, x: Tensor) -> Tensor:
        kind, whole = self.drawn["helper"], x.dim() >= 2
        if kind == "none" or not whole:
            return x
        if kind == "unshard":
            return x if self.cp is None else self.cp.unshard(x, 1)
        how = kind.removeprefix("pool ")
        if self.cp is not None:
            return self.cp.pool(x.double(), how)
        real = self.batch["attention_mask"].double()
        place = torch.arange(real.shape[1]).double()
        if x.shape[1] != len(place):  # truncated by the step: raises on ranks
            return x.double().mean(1)
        if how == "mean":
            weights = real / real.sum(1, keepdim=True)
        else:
            at = torch.where(real > 0, place, torch.nan)
            chosen = at.nan_to_num(1e9).amin(1) if how == "first" else at.nan_to_num(-1).amax(1)
            weights = (place == chosen[:, None]).double()
        return torch.einsum("bs...,bs->b...", x.double(), weights)

    def pool(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        kind, mask = self.drawn["pool"], batch["attention_mask"]
        if x.dim() < 2 or kind == "none":
            return x
        if kind in ("mean", "sum"):
            return getattr(x.double(), kind)(1)
        if kind == "max":
            return x.amax(1)
        if kind == "first":
            return x[:, 0]
        if kind == "last":
            return x[:, -1]
        if kind == "flatten":
            return x.flatten(0, 1)
        if x.shape[1] != mask.shape[1]:
            return x.double().mean(1)
        if kind == "last real":
            last = (mask.sum(1) - 1).clamp(min=0)
            return x[torch.arange(len(x)), last]
        weights = mask.double().view(*mask.shape, *[1] * (x.dim() - 2))
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1)

    def shape(self, x: Tensor, out: Any) -> Any:
        kind = self.drawn["shape"]
        return {
            "tensor": lambda: x,
            "dict": lambda: {"x": x, "name": "a"},
            "list": lambda: [x, 1],
            "tuple": lambda: (x, None, "b"),
            "numpy": lambda: x.numpy(),
            "numbers": lambda: x.flatten()[:8].tolist(),
            "text": lambda: [str(round(float(v), 6)) for v in x.flatten()[:4]],
            "half": lambda: x[: len(x) // 2 + 1],
            "beside logits": lambda: {"logits": out.logits, "x": x},
        }[kind]()

    def scalar(self, x: Tensor) -> Any:
        kind, x = self.drawn["scalar"], x.double()
        if x.numel() == 0:
            return 0.0
        return {
            "mean": lambda: x.mean(),
            "sum": lambda: x.sum(),
            "max": lambda: x.max(),
            "std": lambda: x.std(correction=0),
            "count": lambda: (x > 0).sum().double(),
            "length": lambda: float(x.numel()),
            "item": lambda: x.mean().item(),
        }[kind]()

    def log_scalar(self, x: Tensor) -> None:
        value, kind = self.scalar(x), self.drawn["log"]
        if kind == "dict":
            self.log_dict({"a": value, "b": value})
        elif kind == "step":
            self.log("a", value, on_step=True, on_epoch=True)
        elif kind in ("mean", "synced mean"):
            self.log("a", value, sync_dist=kind != "mean")
        else:
            reduce = kind.removeprefix("synced ")
            self.log("a", value, reduce_fx=reduce, sync_dist=kind != reduce)

    def update_metric(self, x: Tensor, out: Any, batch: dict[str, Tensor]) -> None:
        kind, labels = self.drawn["metric"], batch["labels"]
        if kind in ("perplexity", "shifted perplexity"):
            name = "perplexity"
            if kind == name:
                self.metrics[name](out.logits, self.shifted(labels))
            else:
                self.metrics[name](out.logits[:, :-1], labels[:, 1:])
        elif kind == "weighted":
            name = "mean"
            weights = (labels != -100).double()
            y = x.double() if x.dim() == 2 else x.double().mean(-1)
            self.metrics[name].update(y, weights)
        elif kind == "returned":
            name = "mean"
            value = self.metrics[name](x.double())
            self.log("value", value)
        else:
            name = kind
            real = batch["attention_mask"].bool()
            self.metrics[name].update(x.double()[real])
        if name != "cat":
            self.log("metric", self.metrics[name])
        else:
            self.log("metric", self.metrics["mean"]) if self.metrics["mean"].update_called else None

    def log_loss(self, out: Any, batch: dict[str, Tensor]) -> Any:
        kind, labels, logits = self.drawn["loss"], batch["labels"], out.logits
        shifted = self.shifted(labels)
        valid = shifted != -100
        each = cross_entropy(logits.mT, shifted, reduction="none")
        loss = {
            "model": lambda: out.loss,
            "token_mean": lambda: token_mean(logits, labels),
            "global_mean": lambda: global_mean(each.sum(), valid.sum()),
            "cross_entropy": lambda: cross_entropy(logits.mT, shifted),
            "shifted cross_entropy": lambda: cross_entropy(logits[:, :-1].mT, labels[:, 1:]),
            "exp": lambda: out.loss.exp(),
        }[kind]()
        self.log("loss", loss)
        return {"loss": loss} if self.drawn["shape"] == "dict" else loss

    def on_predict_batch_start(self, batch: Any, *_: Any) -> None:
        self.batch = batch

    on_validation_batch_start = on_predict_batch_start

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.run(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.run(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)


def build_batches() -> list[dict[str, Tensor]]:
    """Return batches without padding, padded on the right, on the left, and of an odd length."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length, left, right in ((LENGTH, 0, 0), (LENGTH, 0, 11), (LENGTH, 7, 0), (45, 0, 3)):
        tokens = torch.randint(1, WIDTH, (3, length), generator=generator)
        mask = torch.ones_like(tokens)
        for row in range(1, 3):
            mask[row, length - right * row :] = 0
            mask[row, : left * row] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:, : length // 3] = -100
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return batches


def _plain(x: Any) -> Any:
    """Return a copy that pickles."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, list | tuple) else x


def one(batch: dict[str, Tensor]) -> DataLoader:
    """Return a loader of one ready batch."""
    return DataLoader([batch], batch_size=None)


def run_case(case: Case, trainer: pl.Trainer) -> list[Any]:
    """Return the outputs of the steps, batch by batch, until one raises."""
    module, found = Drawn(case), []
    for batch in build_batches():
        try:
            if module.drawn["stage"] == "predict" and module.drawn["kind"] == "returned":
                found.append(_plain(trainer.predict(module, one(batch))))
            else:
                module.seen.clear()
                (logged,) = trainer.validate(module, one(batch), verbose=False)
                found.append(_plain([module.seen, dict(sorted(logged.items()))]))
        except (ValueError, TypeError) as error:
            found.append(f"refused: {error}")
            break
    return found


def run_on_ranks(seeds: list[int]) -> dict[int, list[Any]]:
    """Run cases on the ranks of the pool."""
    results = {}
    for seed in seeds:
        with elastic_environment():
            trainer = build_trainer(strategy=doors.strategy())
            results[seed] = run_case(Case(seed), trainer)
    return results


def run_on_one_device(seeds: list[int]) -> dict[int, list[Any]]:
    """Run the same cases without context parallelism."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    results = {}
    for seed in seeds:
        trainer = pl.Trainer(accelerator="cpu", devices=1, **quiet)
        results[seed] = run_case(Case(seed), trainer)
    return results
