# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of the blocks of any model: only their inputs are kept for backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.fsdp.sharding import find_blocks


class Handle:
    """The checkpointed blocks of a model, until `remove()`."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []
        self.num_blocks = 0

    def remove(self) -> None:
        """Restore the model. Graphs that exist already can still be used for backward."""
        while self._undos:
            self._undos.pop()()

    def _enable(self, model: Any) -> None:
        """Let a model that checkpoints its own layers do so, unless it does already."""
        if not model.is_gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            self._undos.append(model.gradient_checkpointing_disable)

    def _wrap(self, block: nn.Module) -> None:
        override = block.__dict__.get("forward")
        forward = block.forward
        block.forward = partial(_forward, block, forward)
        self._undos.append(partial(_unwrap, block, override))
        self.num_blocks += 1


def checkpoint_layers(model: nn.Module, *, shard_modules: Sequence[str] | None = None) -> Handle:
    """Recompute the layers of a model in backward, instead of keeping their activations.

    Models of transformers checkpoint their layers themselves; of others, the blocks are
    checkpointed that `shard_parameters` shards as one unit. Both with ``use_reentrant=False``.

    Args:
        model: a model, or a LightningModule that holds some.
        shard_modules: class names or name patterns of the blocks, as in `shard_parameters`.

    Returns:
        A handle: ``remove()`` restores the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]))
        >>> handle = checkpoint_layers(model)
        >>> handle.num_blocks
        1
        >>> handle.remove()
    """
    handle = Handle()
    own = [m for m in model.modules() if _checkpoints_itself(m)]
    # The outermost ones: they reach all models inside them.
    inside = {id(part) for m in own for part in m.modules() if part is not m}
    for outermost in (m for m in own if id(m) not in inside):
        handle._enable(outermost)
    covered = {id(part) for m in own for part in m.modules()}
    blocks = [b for b in find_blocks(model, shard_modules) if id(b) not in covered]
    for block in blocks:
        handle._wrap(block)
    if not own and not blocks:
        raise ValueError(
            f"activation_checkpointing: no layers were found in {type(model).__name__}. Name them "
            "with shard_modules=['MyBlock'], or put them into an nn.ModuleList."
        )
    return handle


def _checkpoints_itself(module: nn.Module) -> bool:
    supported = getattr(module, "supports_gradient_checkpointing", False)
    return bool(supported) and hasattr(module, "gradient_checkpointing_enable")


def _forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _unwrap(block: nn.Module, override: Callable[..., Any] | None) -> None:
    del block.forward
    if override is not None:
        block.forward = override
