# SPDX-License-Identifier: Apache-2.0
"""The strategy's options about activations: checkpointing, tiles, compiled layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import NoneType
from typing import Any, Final, Literal, Self, get_args

import torch
from torch import nn

from lightning_cp.config import Options, check_choice
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.memory import checkpoint_layers, tile_modules
from lightning_cp.memory.tiles import TileTokens
from lightning_cp.patch import Patch, replace_method
from lightning_cp.private.compiler import exact_backend
from lightning_cp.private.functions import copy_function

CompileName = Literal["layers"]


@dataclass(frozen=True)
class Activations:
    """What is done to the layers of a model before it is sharded. Checked once, here.

    Args:
        checkpointing: recompute layers in backward; a number: so many, the first ones.
        tile: compute token-wise modules in tiles; the tokens of a tile, or True for a default.
        compile: what is compiled.

    ``auto`` is decided later: nothing is done before.
    """

    checkpointing: bool | int | Literal["auto"] = False
    tile: bool | int | Literal["auto"] = False
    compile: CompileName | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        checkpointing: object = self.checkpointing
        is_given = isinstance(checkpointing, bool) or checkpointing == "auto"
        if not is_given and not (isinstance(checkpointing, int) and checkpointing >= 1):
            raise ValueError(
                f"activation_checkpointing={self.checkpointing!r}: use True, False, 'auto', or a "
                "number of layers, 1 or more. What is kept of attention and what goes to the host: "
                "keep_attention and offload."
            )
        if self.compile is not None:
            check_choice("compile", self.compile, get_args(CompileName))
        tile: object = self.tile
        is_number = isinstance(tile, int) and tile >= 1
        if tile is not False and tile != "auto" and not is_number:
            raise ValueError(
                f"tile={self.tile!r}: give the tokens of a tile, 1 or more, or True for a default, "
                "or 'auto'."
            )

    @property
    def is_checkpointing(self) -> bool:
        """Return whether layers are recomputed, all or some."""
        return self.checkpointing is not False and self.checkpointing != "auto"

    @property
    def is_number(self) -> bool:
        """Return whether a number of layers is recomputed."""
        return self.is_checkpointing and self.checkpointing is not True

    def check(self, options: Options) -> None:
        """Raise for options of attention that need checkpoints, in a run that certainly has none.

        A model may checkpoint its layers by itself: then they are not contradictory.
        """
        if options.offload_after and options.offload_bytes == 0 and options.offload != "auto":
            raise ValueError(
                f"offload_after={options.offload_after} without offload: nothing is moved. Set "
                "offload='all' or a number of GiB, or leave it out."
            )

    def without(self, earlier: Self) -> Self:
        """Return what is to be done besides what was done by other values; nothing compiled."""
        return replace(
            self,
            checkpointing=self.checkpointing if earlier.checkpointing == "auto" else False,
            tile=self.tile if earlier.tile == "auto" else False,
            compile=None,
        )

    def apply(
        self, model: nn.Module, shard_modules: Sequence[str] | None, *, training: bool
    ) -> list[Callable[[], None]]:
        """Prepare a model; return what restores it, in the order in which it was prepared."""
        undos: list[Callable[[], None]] = []
        if self.compile is not None:  # inside checkpoints
            undos += _compile(model, shard_modules)
        if self.is_checkpointing and training:
            number = int(self.checkpointing) if self.is_number else None
            checkpointed = checkpoint_layers(model, num_layers=number, shard_modules=shard_modules)
            undos.append(checkpointed.remove)
        if self.tile and self.tile != "auto" and training:
            tokens: TileTokens = "auto" if self.tile is True else self.tile
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
            f"compile='layers': no layers were found in {type(model).__name__}. Name them with "
            "shard_modules=['MyBlock'], or put them into an nn.ModuleList."
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
