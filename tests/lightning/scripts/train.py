"""Trains the tiny model: `python train.py OUT --strategy context_parallel_2`."""

import argparse
import importlib
from pathlib import Path

NUM_MICROBATCHES, EPOCHS, CLIP = 3, 2, 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--strategy", default="", help="a registered name, else the class")
    parser.add_argument("--first", choices=["lightning", "lightning_cp"], default="lightning")
    parser.add_argument("--cp-size", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    args = parser.parse_args()

    importlib.import_module({"lightning": "lightning.pytorch"}.get(args.first, args.first))
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, DistributedSampler

    from lightning_cp import ContextParallelStrategy
    from tests.lightning.jobs import Module, PackedRows
    from tests.lightning.scripts.report import write_report

    strategy = args.strategy or ContextParallelStrategy(context_parallel_size=args.cp_size)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=EPOCHS,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Two rows per step over all data ranks.
    batch_size = max(1, 2 * args.cp_size // (args.devices * args.num_nodes))

    class Ordered(Module):
        """Trains in a known order; Lightning shuffles what it splits itself."""

        def train_dataloader(self) -> DataLoader:
            strategy = self.trainer.strategy
            rows = PackedRows(2 * NUM_MICROBATCHES)
            sampler = DistributedSampler(
                rows, strategy.data_parallel_size, strategy.data_parallel_rank, shuffle=False
            )
            return DataLoader(rows, batch_size, sampler=sampler)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(PackedRows(6, seed=1), batch_size)

    module = Ordered(dtype=torch.float64)
    trainer.fit(module)
    write_report(trainer, args.out, losses=module.losses, grad_norms=module.grad_norms)


if __name__ == "__main__":
    main()
