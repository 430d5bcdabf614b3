# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.trainer_gpu [--ranks N ...] [--tokens N]`: what `shard_in_forward` costs.

Training steps of a small Llama in a loop: inside of `cp.step`, and with full sequences given to
the model (`shard_in_forward`), in turn. On one rank, and on NCCL ranks that share one GPU: there
links are slow, so that the times say what is added, not how fast either is. On one rank also a
step of transformers' Trainer, stock and under `context_parallel`.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import Manager
from torch.multiprocessing.spawn import spawn
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback
from transformers.training_args import TrainingArguments

from benchmarks.host_gpu import TINY, Shape
from benchmarks.measure import Records, describe, share_gpu, synchronize
from hf_patches import context_parallel, enable, shard_in_forward
from lightning_cp import ContextParallel

WAYS: Final = ("cp.step", "shard_in_forward")
ROUNDS: Final = 7
STEPS: Final = 3


def build_model(shape: Shape, device: torch.device) -> Any:
    """Return a model to train, in bf16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = LlamaForCausalLM(shape.config())
    return model.to(device, dtype).train()


def build_step(
    way: str, shape: Shape, batch: dict[str, Tensor], cp: ContextParallel
) -> Callable[[], object]:
    """Return a training step: forward, backward and the optimizer."""
    model = build_model(shape, batch["input_ids"].device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if way == "shard_in_forward":
        shard_in_forward(model, cp)
    else:
        enable(model)

    def run() -> None:
        if way == "shard_in_forward":
            model(**batch, use_cache=False).loss.backward()
        else:
            with cp.step(batch) as local:
                model(**local, use_cache=False).loss.backward()
        optimizer.step()  # gradients are not averaged: both loops would do the same
        optimizer.zero_grad()

    return run


def time_loops(
    rank: int, ranks: int, shape: Shape, tokens: int, kind: str, folder: str, results: Any
) -> None:
    """Time steps of both loops in turn, and put the median of each into ``results``."""
    if kind == "cuda" and ranks > 1:
        share_gpu(rank)
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    backend = "nccl" if kind == "cuda" else "gloo"
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)
    if kind == "cuda":
        torch.cuda.set_device(device)
    cp = ContextParallel(init_device_mesh(kind, (ranks,), mesh_dim_names=("cp",)))
    ids = torch.randint(shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids.to(device), "labels": ids.to(device)}
    steps = {way: build_step(way, shape, batch, cp) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(ROUNDS + 1):
        for way, step in steps.items():
            synchronize(device)
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            synchronize(device)
            if index:  # the first round warms up
                times[way].append(1e3 * (time.perf_counter() - begun) / STEPS)
    if rank == 0:
        results.update({way: median(values) for way, values in times.items()})
    dist.barrier()
    dist.destroy_process_group()


class Clock(TrainerCallback):
    """Times the steps after the warm-up."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device, self._begun, self.ms = shape, device, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin after the warm-up, end after the last step."""
        if state.global_step == self._shape.warmup:
            synchronize(self._device)
            self._begun = time.perf_counter()
        elif state.global_step == self._shape.warmup + self._shape.steps:
            synchronize(self._device)
            self.ms = 1e3 * (time.perf_counter() - self._begun) / self._shape.steps


def time_trainer(shape: Shape, tokens: int, device: torch.device, *, is_ours: bool) -> float:
    """Return the time of a step of a Trainer, in milliseconds."""
    ids = torch.randint(shape.vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    num_steps = shape.warmup + shape.steps
    clock = Clock(shape, device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            max_steps=num_steps,
            logging_steps=num_steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
        )
        trainer = Trainer(
            build_model(shape, device),
            arguments,
            train_dataset=[{"input_ids": ids, "labels": ids}] * num_steps,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        if is_ours:
            context_parallel(trainer, size=1)
        trainer.train()
    return clock.ms


def run(ranks: Sequence[int], tokens: int, shape: Shape, kind: str, out: Path | None) -> None:
    """Print the table, line by line."""
    warnings.simplefilter("ignore")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    where = describe(device)
    records = Records(out, "trainer_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
    print(f"{shape}; bf16 on a GPU; {tokens:,} tokens in all; median of {ROUNDS} rounds in turn.\n")
    print("| ranks | step | ms | compared with |\n|---|---|---|---|", flush=True)

    def add(count: int, times: dict[str, float]) -> None:
        first = next(iter(times))
        for way, ms in times.items():
            against = "" if way == first else f"{ms / times[first]:.3f} of {first}"
            print(f"| {count} | {way} | {ms:.2f} | {against} |", flush=True)
            records.add(what="trainer", ranks=count, tokens=tokens, way=way, ms=ms)

    for count in ranks:
        with tempfile.TemporaryDirectory() as folder, Manager() as manager:
            results = manager.dict()
            arguments = (count, shape, tokens, kind, folder, results)
            spawn(time_loops, arguments, nprocs=count)
            add(count, {way: results[way] for way in WAYS})
    if 1 in ranks:
        trainers = {
            name: time_trainer(shape, tokens, device, is_ours=is_ours)
            for name, is_ours in (("stock Trainer", False), ("context_parallel", True))
        }
        add(1, trainers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="a small model, on CPU ranks")
    args = parser.parse_args(arguments)
    tokens = args.tokens or (64 if args.tiny else 16384)
    shape, kind = (TINY, "cpu") if args.tiny else (Shape(), "cuda")
    run(args.ranks, tokens, shape, kind, args.out)


if __name__ == "__main__":
    main()
