"""Trains on two ranks until one of them fails: `python fault.py OUT kill --rank 1`.

With `--ray`, Ray Train starts the ranks, in a Ray of its own that ends with the command.
"""

import argparse
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy
from tests.lightning.jobs import Module, PackedRows
from tests.lightning.scripts.start import FAULT

NUM_MICROBATCHES, EPOCHS = 4, 2
SAVE_EVERY = 2
FAULT_STEP = 5
"""Step at whose begin the fault happens, after the checkpoint that ends the first epoch."""

WORDS = "the disk of this rank is broken"
FAULTS = (
    *("kill", "stop", "sleep", "term", "differ", "raise"),
    *("forward", "backward", "optimizer", "loader", "callback"),
    *("uneven", "full", "corrupt"),
)


class FaultyModule(Module):
    """The tiny model, with a fault on one rank."""

    def __init__(self, fault: str, rank: int, seconds: float, out: Path, once: bool) -> None:
        super().__init__()
        self.fault, self.rank, self.seconds, self.out, self.once = fault, rank, seconds, out, once

    def is_due(self, fault: str) -> bool:
        """Return whether this fault happens now, and say so in a file."""
        due = self.trainer.global_step >= FAULT_STEP and self.global_rank == self.rank
        if fault != self.fault or not due or (self.once and (self.out / FAULT).exists()):
            return False
        (self.out / FAULT).touch()
        return True

    def fail_if_due(self, fault: str) -> None:
        if self.is_due(fault):
            raise RuntimeError(WORDS)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.fault == "term":  # so many steps that there is one to stop after
            time.sleep(0.1)
        self.fail_if_due("raise")
        if self.is_due("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.is_due("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.is_due("sleep"):
            time.sleep(self.seconds)
        elif self.is_due("differ"):
            return {**batch, "input_ids": batch["input_ids"].flip(0)}
        elif self.trainer.global_step == FAULT_STEP and self.is_due("term"):
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.is_due("full"):
            fill(self.out / "checkpoints" / "filler")
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail_if_due("forward")
        loss = super().training_step(batch, batch_idx)
        if loss.requires_grad:  # not in the trial run
            loss.register_hook(lambda _: self.fail_if_due("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.fail_if_due("optimizer")


class FaultyRows(PackedRows):
    """The samples, which one rank cannot read in the second epoch."""

    def __init__(self, module: FaultyModule, num_rows: int) -> None:
        super().__init__(num_rows)
        self.module = module

    def __getitem__(self, index: int) -> Any:
        if index >= 4:
            self.module.fail_if_due("loader")
        return super().__getitem__(index)


class FaultyCallback(Callback):
    """Fails between two steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.fail_if_due("callback")


def fill(file: Path) -> None:
    """Fill the disk of a file."""
    with file.open("wb", buffering=0) as out:
        try:
            while out.write(bytes(1 << 16)):
                pass
        except OSError:
            return


def flip_a_byte(folder: Path) -> None:
    """Change one byte in the middle of the largest file."""
    file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--heartbeat", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="the fault happens once")
    parser.add_argument("--ray", action="store_true")
    options = vars(parser.parse_args())
    if options.pop("ray"):
        train_by_ray(options)
    else:
        train(**options)


def train_by_ray(options: dict[str, Any]) -> None:
    """Train on two workers of Ray Train."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # Not the default folder: all of it ends with the job, and paths of sockets must be short.
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=str(options["out"].parent / "ray"))
    TorchTrainer(
        train_on_worker,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(options["out"].parent / "storage")),
    ).fit()


def train_on_worker(options: dict[str, Any]) -> None:
    from ray.train.lightning import RayLightningEnvironment

    train(**options, plugins=[RayLightningEnvironment()])


def train(
    out: Path,
    fault: str,
    rank: int,
    *,
    timeout: float = 300,
    heartbeat: float = 60,
    seconds: float = 0,
    num_nodes: int = 1,
    resume: bool = False,
    plugins: list[Any] | None = None,
) -> None:
    """Train on two ranks with a checkpoint every other step, until the fault."""

    def build_trainer(**options: Any) -> Trainer:
        save = ModelCheckpoint(
            dirpath=out / "checkpoints",
            filename="{step}",
            every_n_train_steps=SAVE_EVERY,
            save_top_k=-1,
            save_last=resume,
        )
        return Trainer(
            strategy=ContextParallelStrategy(
                1 if fault == "uneven" else 2,
                timeout=timedelta(seconds=timeout),
                heartbeat_timeout=timedelta(seconds=heartbeat),
            ),
            accelerator="cpu",
            devices=2 // num_nodes,
            num_nodes=num_nodes,
            use_distributed_sampler=False,  # it would shuffle; all ranks share all rows
            logger=False,
            callbacks=[FaultyCallback(), save],
            plugins=plugins,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    module = FaultyModule(fault, rank, seconds, out, resume)
    rows = FaultyRows(module, 2 * NUM_MICROBATCHES)
    if fault in ("uneven", "corrupt"):  # at a second run, for which there is a checkpoint
        trainer = build_trainer(max_epochs=1)
        trainer.fit(module, DataLoader(rows, batch_size=2))
        if trainer.is_global_zero:
            if fault == "corrupt":
                flip_a_byte(out / "checkpoints" / f"step={NUM_MICROBATCHES}.ckpt")
            (out / FAULT).touch()
        trainer.strategy.barrier()
        if fault == "uneven":
            rows = PackedRows(2 * (NUM_MICROBATCHES + trainer.global_rank))
    trainer = build_trainer(max_epochs=1000 if fault == "term" else EPOCHS)
    (out / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
    last = str(out / "checkpoints" / f"step={NUM_MICROBATCHES}.ckpt")
    path = last if fault in ("uneven", "corrupt") else "last" if resume else None
    trainer.fit(module, DataLoader(rows, batch_size=2), ckpt_path=path)
    if resume:
        (out / f"done{trainer.global_rank}").write_text(f"{trainer.global_step} {module.losses}")


if __name__ == "__main__":
    main()
