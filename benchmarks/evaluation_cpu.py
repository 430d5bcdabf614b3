# SPDX-License-Identifier: Apache-2.0
"""Wall time of validation and prediction steps on CPU ranks: `torchrun --nproc-per-node 2 -m ...`.

Prints the median of the steps after the first, and the first, which includes the trial run on full
sequences. It uses options that every version has, so that versions can be compared with it.
"""

import platform
import time
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import ContextParallelStrategy

LENGTH, STEPS, VOCABULARY = 2048, 24, 2048


class Module(LightningModule):
    """A small Llama that logs a loss, a function of it, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
        self.model = LlamaForCausalLM(config)
        self.score = MeanMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log a loss, its exponential and the mean of the best scores."""
        out = self.model(**batch)
        self.log_dict({"val_loss": out.loss, "perplexity": out.loss.exp()})
        self.score.update(out.logits.amax(-1))
        self.log("score", self.score)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the most likely next token of each token."""
        return {"tokens": self.model(batch["input_ids"]).logits.argmax(-1)}


class Clock(Callback):
    """A callback that times each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def _start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._since)

    on_validation_batch_start = _start  # type: ignore[assignment]
    on_predict_batch_start = _start  # type: ignore[assignment]
    on_validation_batch_end = _stop  # type: ignore[assignment]
    on_predict_batch_end = _stop  # type: ignore[assignment]


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    tokens = torch.randint(
        0, VOCABULARY, (STEPS, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    samples: Any = [{"input_ids": sample, "labels": sample} for sample in tokens]
    loader: DataLoader[Any] = DataLoader(samples)
    module, lines = Module(), []
    for name in ("validation_step", "predict_step"):
        clock = Clock()
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ContextParallelStrategy(),
            callbacks=[clock],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        if name == "validation_step":
            trainer.validate(module, loader, verbose=False)
        else:
            trainer.predict(module, loader)
        first, *others = clock.seconds
        lines.append(f"| {name} | {1e3 * median(others):.1f} | {1e3 * first:.0f} |")
    if trainer.is_global_zero:
        print(f"torch {torch.__version__}, {platform.machine()}, 2 ranks, {LENGTH} tokens")
        print("| step | ms, median | ms, first |\n|---|---|---|")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
