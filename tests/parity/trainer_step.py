"""One step of transformers' Trainer on the ranks of a pool: forward, loss and backward."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_patches.enable import inner_model
from hf_patches.model.forward import MARK
from lightning_cp.step.step import IGNORED_LABEL
from tests import doors


def trainer_step(model: PreTrainedModel, batch: dict[str, Tensor], options: Any) -> Tensor:
    """Return the loss of a step; the gradients are those of this rank."""
    from transformers import Trainer, TrainingArguments

    from hf_patches import context_parallel

    with processes(), tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, report_to=[], disable_tqdm=True, max_grad_norm=0.0
        )
        trainer = Trainer(model, arguments)
        context_parallel(
            trainer, size=dist.group.WORLD.size(), **doors.grouped({"check_batches": 0, **options})
        )
        if inner_model(model).__dict__[MARK].head == "next token":
            # Trainers count it where the name of a class does not say that its loss shifts labels.
            batch = {**batch, "labels": batch["labels"].clone()}
            batch["labels"][:, 0] = IGNORED_LABEL
        trainer.current_gradient_accumulation_steps = 1
        # The number that a trainer's loop passes on; ours counts it otherwise.
        num_items = trainer._get_num_items_in_batch([batch], arguments.device)
        return trainer.training_step(model, dict(batch), num_items)


def forget_processes() -> None:
    """Let accelerate look for its processes again."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()  # accelerate has no public way to do so


@contextmanager
def processes(*, use_cpu: bool = True) -> Iterator[None]:
    """Let accelerate find the process group of the tests, and forget it afterwards.

    Ranks on a GPU share one.
    """
    before = dict(os.environ)
    world, rank = str(dist.group.WORLD.size()), str(dist.get_rank())
    os.environ |= {"ACCELERATE_USE_CPU": str(use_cpu), "TOKENIZERS_PARALLELISM": "false"}
    if dist.group.WORLD.size() > 1:
        os.environ |= {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank if use_cpu else "0"}
        os.environ |= {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    try:
        yield
    finally:
        forget_processes()
        os.environ.clear()
        os.environ.update(before)
