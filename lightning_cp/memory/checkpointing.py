# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of the blocks of any model: only their inputs are kept for backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.fsdp.sharding import find_blocks


class Handle:
    """The checkpointed blocks of a model, until `remove()`."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []
        self.num_blocks = 0
        """Blocks of models that do not checkpoint their layers themselves."""

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

    def _switch(self, layer: nn.Module, *, on: bool) -> None:
        """Switch the checkpointing of a layer of transformers, and of layers inside it."""
        for part in filter(_has_switch, layer.modules()):
            self._undos.append(partial(setattr, part, _FLAG, getattr(part, _FLAG)))
            setattr(part, _FLAG, on)

    def _wrap(self, block: nn.Module) -> None:
        override = block.__dict__.get("forward")
        forward = block.forward
        block.forward = partial(_forward, block, forward)
        self._undos.append(partial(_unwrap, block, override))
        self.num_blocks += 1


_FLAG: Final = "gradient_checkpointing"


def checkpoint_layers(
    model: nn.Module,
    *,
    num_layers: int | None = None,
    shard_modules: Sequence[str] | None = None,
) -> Handle:
    """Recompute the layers of a model in backward, instead of keeping their activations.

    Models of transformers checkpoint their layers themselves; of others, the blocks are
    checkpointed that `shard_parameters` shards as one unit. Both with ``use_reentrant=False``.

    Args:
        model: a model, or a LightningModule that holds some.
        num_layers: recompute only so many layers, the first ones: the others take more memory and
            less time. The last ones are those whose memory is free again before any other layer
            is recomputed.
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
    blocks = _blocks_outside(model, own, shard_modules)
    if num_layers is not None:
        layers = [*switched_layers(model), *blocks]
        if not 1 <= num_layers <= len(layers):
            raise ValueError(
                f"activation_checkpointing={num_layers}: {type(model).__name__} has {len(layers)} "
                "layers that can be checkpointed one by one. Give 1 or more and at most as many, "
                "or True for all."
            )
    for outermost in _outermost(own):  # they reach all models inside them
        handle._enable(outermost)
    if num_layers is not None:
        chosen = {id(layer) for layer in layers[:num_layers]}
        for layer in switched_layers(model):
            handle._switch(layer, on=id(layer) in chosen)
        blocks = [block for block in blocks if id(block) in chosen]
    for block in blocks:
        handle._wrap(block)
    if not own and not blocks:
        raise ValueError(
            f"activation_checkpointing: no layers were found in {type(model).__name__}. Name them "
            "with shard_modules=['MyBlock'], or put them into an nn.ModuleList."
        )
    return handle


def switched_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that models of transformers checkpoint, in their order."""
    models = _outermost([m for m in model.modules() if _checkpoints_itself(m)])
    return _outermost([layer for m in models for layer in m.modules() if _has_switch(layer)])


def _has_switch(module: nn.Module) -> bool:
    """Return whether a module is such a layer: its class declares the switch.

    Models and encoders around layers have an attribute of that name, without effect.
    """
    return hasattr(type(module), _FLAG)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inside = {id(part) for m in modules for part in m.modules() if part is not m}
    return [m for m in modules if id(m) not in inside]


def _blocks_outside(
    model: nn.Module, own: Sequence[nn.Module], shard_modules: Sequence[str] | None
) -> list[nn.Module]:
    """Return the blocks of a model that are not parts of models that checkpoint themselves."""
    covered = {id(part) for m in own for part in m.modules()}
    return [block for block in find_blocks(model, shard_modules) if id(block) not in covered]


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
