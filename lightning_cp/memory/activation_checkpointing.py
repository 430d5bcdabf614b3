# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of the blocks of any model: only their inputs are kept for backward.

Which blocks is the user's choice, or that of `lightning/memory/memory_choice.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.patch import Patch, replace_method


class CheckpointedLayers:
    """The checkpointed blocks of a model, until `remove()`."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []
        self.num_blocks = 0
        """Blocks of models that do not checkpoint their layers themselves."""

    def remove(self) -> None:
        """Restore the model. Graphs that exist already can still be used for backward.

        Of several handles of a model, the last one is removed first.
        """
        while self._undos:
            self._undos.pop()()

    def _enable(self, model: Any, layers: Sequence[nn.Module]) -> None:
        """Let a model that checkpoints its own layers do so, unless it does already.

        Args:
            model: of transformers, perhaps inside one of PEFT.
            layers: those that are switched on afterwards. In a model of which a user has enabled
                a part, others are not prepared.
        """
        is_prepared = all(hasattr(layer, "_gradient_checkpointing_func") for layer in layers)
        if model.is_gradient_checkpointing and is_prepared:
            return
        flags = [(part, getattr(part, _FLAG)) for part in model.modules() if hasattr(part, _FLAG)]
        enable = model.gradient_checkpointing_enable
        owner = getattr(enable, "__self__", model)  # inside a model of PEFT
        hooks = getattr(owner, "_require_grads_hooks", None)
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # Only reentrant checkpointing needs embeddings whose output requires gradients. Where they
        # are frozen, backward would visit layers that it does not visit on other data ranks.
        if getattr(owner, "_require_grads_hooks", None) is not hooks:  # those of a user stay
            owner.disable_input_require_grads()
            owner._require_grads_hooks = hooks
        self._undos.append(partial(_restore, flags))

    def _switch(self, layer: nn.Module, *, on: bool) -> None:
        """Switch the checkpointing of a layer of transformers, and of layers inside it."""
        for part in filter(_has_switch, layer.modules()):
            self._undos.append(Patch(part, _FLAG, on).remove)

    def _wrap(self, block: nn.Module) -> None:
        self._undos.append(replace_method(block, "forward", _forward).remove)
        self.num_blocks += 1


_FLAG: Final = "gradient_checkpointing"


def checkpoint_layers(
    model: nn.Module,
    *,
    num_layers: int | None = None,
    shard_modules: Sequence[str] | None = None,
) -> CheckpointedLayers:
    """Recompute the layers of a model in backward, instead of keeping their activations.

    Models of transformers checkpoint their layers themselves; of others, the blocks are
    checkpointed that `shard_parameters` shards as one unit. Both with ``use_reentrant=False``.

    Args:
        model: a model, or a LightningModule that holds some.
        num_layers: recompute only so many layers, the first ones: the others take more memory and
            less time. The last ones are those whose memory is free again before any other layer
            is recomputed. Models and towers of which nothing is trained do not count.
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
    handle = CheckpointedLayers()
    own = [m for m in model.modules() if _checkpoints_itself(m)]
    blocks = _blocks_outside(model, own, shard_modules)
    if num_layers is not None:
        layers = [*switched_layers(model), *blocks]
        if not 1 <= num_layers <= len(layers):
            raise ValueError(
                f"Memory(activation_checkpointing={num_layers}): {type(model).__name__} has "
                f"{len(layers)} layers that can be checkpointed one by one. Give 1 or more and at "
                "most as many, or True for all."
            )
    chosen = [] if num_layers is None else layers[:num_layers]
    for outermost in _outermost(own):  # they reach all models inside them
        inside = set(outermost.modules())
        handle._enable(outermost, [layer for layer in chosen if layer in inside])
    if num_layers is not None:
        for layer in _layers(own):
            handle._switch(layer, on=layer in chosen)
        blocks = [block for block in blocks if block in chosen]
    for block in blocks:
        handle._wrap(block)
    if not own and not blocks:
        raise ValueError(
            f"Activation checkpointing: no layers were found in {type(model).__name__}. Name them, "
            "Parameters(shard_modules=['MyBlock']) of the strategy or checkpoint_layers(model, "
            "shard_modules=['MyBlock']), or put them into an nn.ModuleList."
        )
    return handle


def switched_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that models of transformers checkpoint, in their order.

    Without those of models and towers of which nothing is trained: they save nothing.
    """
    models = [m for m in model.modules() if _checkpoints_itself(m)]
    frozen = [m for m in models if not any(p.requires_grad for p in m.parameters())]
    left_out = set(_layers(frozen))
    return [layer for layer in _layers(models) if layer not in left_out]


def _layers(models: Sequence[nn.Module]) -> list[nn.Module]:
    parts = [part for m in _outermost(models) for part in m.modules()]
    return _outermost([part for part in parts if _has_switch(part)])


def _restore(flags: Sequence[tuple[nn.Module, bool]]) -> None:
    for part, flag in flags:
        setattr(part, _FLAG, flag)


def _has_switch(module: nn.Module) -> bool:
    """Return whether a module is such a layer: its class declares the switch.

    Models and encoders around layers have an attribute of that name, without effect.
    """
    return hasattr(type(module), _FLAG)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inside = {part for m in modules for part in m.modules() if part is not m}
    return [m for m in modules if m not in inside]


def _blocks_outside(
    model: nn.Module, own: Sequence[nn.Module], shard_modules: Sequence[str] | None
) -> list[nn.Module]:
    """Return the blocks of a model that are not parts of models that checkpoint themselves."""
    covered = {part for m in own for part in m.modules()}
    return [block for block in find_blocks(model, shard_modules) if block not in covered]


def _checkpoints_itself(module: nn.Module) -> bool:
    supported = getattr(module, "supports_gradient_checkpointing", False)
    return bool(supported) and hasattr(module, "gradient_checkpointing_enable")


def _forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
