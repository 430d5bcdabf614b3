# SPDX-License-Identifier: Apache-2.0
"""The strategy's options about activations: checkpointing, tiles, compiled layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from torch import nn

from lightning_cp.memory import checkpoint_layers, compile_layers, tile_modules
from lightning_cp.memory.tiles import TileTokens
from lightning_cp.options import Options, check_choice

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
        if self.is_checkpointing and training:
            number = int(self.checkpointing) if self.is_number else None
            checkpointed = checkpoint_layers(model, num_layers=number, shard_modules=shard_modules)
            undos.append(checkpointed.remove)
        if self.compile is not None:
            undos.append(compile_layers(model, shard_modules=shard_modules).remove)
        # In the end: tiles call compiled modules, not the reverse.
        if self.tile and self.tile != "auto" and training:
            tokens: TileTokens = "auto" if self.tile is True else self.tile
            handle = tile_modules(model, tile_tokens=tokens, shard_modules=shard_modules)
            undos.append(handle.remove)
        return undos
