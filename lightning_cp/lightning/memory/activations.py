# SPDX-License-Identifier: Apache-2.0
"""What the strategy does to layers: activation checkpointing, tiles, compiled forwards."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import NoneType
from typing import Any, Final

import torch
from torch import nn

from lightning_cp.config import Memory
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.memory import checkpoint_layers, tile_modules
from lightning_cp.memory.tiles import TileTokens
from lightning_cp.patch import Patch, replace_method
from lightning_cp.private.compiler import exact_backend
from lightning_cp.private.functions import copy_function


def still_to_do(memory: Memory, earlier: Memory) -> Memory:
    """Return what is to be done to layers besides what was done while ``auto`` was undecided."""
    return Memory(
        memory.activation_checkpointing if earlier.activation_checkpointing == "auto" else False,
        tile=memory.tile if earlier.tile == "auto" else False,
    )


def prepare_layers(
    model: nn.Module, memory: Memory, shard_modules: Sequence[str] | None, *, training: bool
) -> list[Callable[[], None]]:
    """Compile, checkpoint and tile the layers of a model, before it is sharded.

    ``auto`` is decided later: nothing is done before.

    Args:
        model: of a run.
        memory: what to do.
        shard_modules: what blocks are, see `shard_parameters`.
        training: whether there is a backward. Otherwise layers are compiled only.

    Returns:
        What restores it, in the order in which it was prepared.
    """
    undos: list[Callable[[], None]] = []
    if memory.compile is not None:  # inside checkpoints
        undos += _compile(model, shard_modules)
    if memory.is_checkpointing and training:
        number = memory.num_layers
        checkpointed = checkpoint_layers(model, num_layers=number, shard_modules=shard_modules)
        undos.append(checkpointed.remove)
    if memory.tile and memory.tile != "auto" and training:
        tokens: TileTokens = "auto" if memory.tile is True else memory.tile
        undos.append(tile_modules(model, tile_tokens=tokens).remove)
    return undos


BACKEND: Final = "inductor"
"""What torch.compile makes of a layer."""


def _compile(model: nn.Module, shard_modules: Sequence[str] | None) -> list[Callable[[], None]]:
    """Compile the forwards of the blocks of a model; return what restores them.

    Not by `nn.Module.compile`, whose graphs include hooks: those of FSDP2 and of checkpointing stay
    outside, in whichever order they are added.
    """
    blocks = find_blocks(model, shard_modules)
    if not blocks:
        raise ValueError(
            f"memory=Memory(compile='layers'): no layers were found in {type(model).__name__}. "
            "Name them with parameters=Parameters(shard_modules=['MyBlock']), or put them into an "
            "nn.ModuleList."
        )
    return [
        replace_method(block, "forward", partial(_call_compiled, _kind(block))).remove
        for block in blocks
    ]


def _kind(block: nn.Module) -> str:
    """Return what layers that share compiled code have in common: their modules and switches.

    A graph break depends on them (a window, experts). Layers with a break and layers without would
    take each other's graphs, forward others than the recomputation, and checkpointing would raise.
    """
    parts = []
    for name, module in block.named_modules():
        switches = {
            key: x
            for key, x in vars(module).items()
            if isinstance(x, str | bool | NoneType) and key[0] != "_" and key != "training"
        }
        parts.append(f"{name} {type(module).__module__}.{type(module).__qualname__} {switches}")
    return "\n".join(parts)


_CHECKPOINT: Final = "_gradient_checkpointing_func"


def _call_compiled(
    kind: str, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    compiled = _compiled(kind, BACKEND)
    checkpoint: Callable[..., Any] | None = vars(block).get(_CHECKPOINT)
    # Layers of transformers checkpoint in `__call__`, around this; from 5.23 on in their forward.
    is_around = type(block).__call__ is not nn.Module.__call__
    if checkpoint is None or is_around or not (block.gradient_checkpointing and block.training):
        return compiled(forward, *args, **kwargs)
    with Patch(block, _CHECKPOINT, lambda call, *x: checkpoint(partial(compiled, call), *x)):
        return forward(*args, **kwargs)


@lru_cache(maxsize=256)
def _compiled(kind: str, backend: Any) -> Callable[..., Any]:
    """Return code for a kind of layer: torch.compile gives up on code after 8 compilations."""
    call: Callable[..., Any] = torch.compile(copy_function(_call), backend=exact_backend(backend))
    return call


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)
