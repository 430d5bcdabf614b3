# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models: folders of shards, single files, weights only.

A folder holds `.metadata`, one `__{rank}_0.distcp` per rank and `meta.pt`, as Lightning's
distributed checkpoints do. A file is what a plain Trainer on one device writes. Both load on any
number of ranks. This package depends on torch only; the strategy calls it to save and load.
"""

from lightning_cp.checkpoint.background import BackgroundSaver
from lightning_cp.checkpoint.consolidate import consolidate, read_whole
from lightning_cp.checkpoint.folder import (
    aside_of,
    find_folder,
    is_checkpoint_folder,
    replacing,
    save_folder,
)
from lightning_cp.checkpoint.load import load_file, load_folder, load_weights
from lightning_cp.checkpoint.state import (
    gather_shards,
    gather_state,
    is_whole,
    model_state,
    optimizer_state,
)
from lightning_cp.comm.collective_errors import meet, together

__all__ = [
    "BackgroundSaver",
    "aside_of",
    "consolidate",
    "find_folder",
    "gather_shards",
    "gather_state",
    "is_checkpoint_folder",
    "is_whole",
    "load_file",
    "load_folder",
    "load_weights",
    "meet",
    "model_state",
    "optimizer_state",
    "read_whole",
    "replacing",
    "save_folder",
    "together",
]
