# SPDX-License-Identifier: Apache-2.0
"""Activation memory: what a training step keeps, and what recomputing one layer takes."""

from lightning_cp.memory.activation_checkpointing import checkpoint_layers
from lightning_cp.memory.tiles import tile_modules

__all__ = ["checkpoint_layers", "tile_modules"]
