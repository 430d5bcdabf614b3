# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models under context parallelism: `enable(model)` and `verify(model, batch)`.

`context_parallel(trainer, size=8)` is for transformers' Trainer, TRL's trainers and accelerate.
`shard_in_forward(model, cp)` lets a model take full sequences, for loops without steps.
`model_shape(config)` is what `lightning_cp.planner` plans with.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hf_patches.enable import enable
from hf_patches.shard_in_forward import shard_in_forward
from hf_patches.verify import verify
from hf_patches.weights.model_shape import model_shape
from lightning_cp.renamed import missing

if TYPE_CHECKING:
    from hf_patches.trainers.trainer import context_parallel

__all__ = [
    "context_parallel",
    "enable",
    "model_shape",
    "shard_in_forward",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import what only trainers need, which brings transformers' Trainer."""
    if name == "context_parallel":
        return import_module("hf_patches.trainers.trainer").context_parallel
    raise missing("hf_patches", name)
