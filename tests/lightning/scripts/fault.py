"""Trains on two ranks until one of them fails: `python fault.py OUT kill --rank 1`."""

import argparse
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy
from tests.lightning.jobs import Module, PackedRows
from tests.lightning.scripts.start import FAULT

NUM_MICROBATCHES, EPOCHS = 4, 2
SAVE_EVERY = 2
FAULT_STEP = 5
"""Step at whose begin the fault happens, after the checkpoint that ends the first epoch."""


class FaultyModule(Module):
    """The tiny model, with a fault on one rank."""

    def __init__(self, fault: str, rank: int, seconds: float, out: Path) -> None:
        super().__init__()
        self.fault, self.rank, self.seconds, self.out = fault, rank, seconds, out

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_step != FAULT_STEP or self.global_rank != self.rank:
            return batch
        (self.out / FAULT).touch()
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "raise":
            raise RuntimeError("the disk of this rank is full")
        elif self.fault == "sleep":
            time.sleep(self.seconds)
        elif self.fault == "differ":
            return {**batch, "input_ids": batch["input_ids"].flip(0)}
        return batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("fault", choices=["kill", "raise", "sleep", "differ"])
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--seconds", type=float, default=0)
    args = parser.parse_args()
    train(args.out, args.fault, args.rank, timeout=args.timeout, seconds=args.seconds)


def train(out: Path, fault: str, rank: int, *, timeout: float = 300, seconds: float = 0) -> None:
    """Train on two ranks with a checkpoint every other step, until the fault."""
    save = ModelCheckpoint(
        dirpath=out / "checkpoints",
        filename="{step}",
        every_n_train_steps=SAVE_EVERY,
        save_top_k=-1,
    )
    trainer = Trainer(
        strategy=ContextParallelStrategy(timeout=timedelta(seconds=timeout)),
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,  # it would shuffle; all ranks share all rows
        logger=False,
        callbacks=[save],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = FaultyModule(fault, rank, seconds, out)
    trainer.fit(module, DataLoader(PackedRows(2 * NUM_MICROBATCHES), batch_size=2))


if __name__ == "__main__":
    main()
