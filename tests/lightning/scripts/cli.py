"""A LightningCLI script of a user who has never heard of lightning_cp: it comes by class path.

`python cli.py OUT fit --trainer.strategy=lightning_cp.ContextParallelStrategy ...`
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

STEPS = 4


class Rows(Dataset):
    """Rows whose labels are shifted already, some of them missing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 31, (2 * STEPS, 21), generator=generator)
        self.labels = functional.pad(self.tokens[:, 1:], (0, 1), value=-100)
        for row, labels in enumerate(self.labels):
            labels[: 2 * row] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Model(LightningModule):
    """One layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(31, 32)
        self.qkv = nn.Linear(32, 96)
        self.head = nn.Linear(32, 31)
        self.double()
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = 8 * self.embed(batch["input_ids"])
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + mixed.transpose(1, 2).flatten(2))
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), batch_size=2)


def main() -> None:
    out, *args = sys.argv[1:]
    clean = "lightning_cp" not in sys.modules
    cli = LightningCLI(Model, args=args, save_config_callback=None)
    from tests.lightning.scripts.report import write_report

    write_report(cli.trainer, Path(out), losses=cli.model.losses, clean=clean)


if __name__ == "__main__":
    main()
