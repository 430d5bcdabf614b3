# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models: folders of shards, single files, weights alone.

A folder holds `.metadata`, one `__{rank}_0.distcp` per rank and `meta.pt`, as Lightning's
distributed checkpoints do. A file is what a plain Trainer on one device writes. Both load on any
number of ranks. This package knows torch only; the strategy tells it when to save and load.
"""

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
    full_state,
    gather_shards,
    gather_state,
    is_whole,
    model_state,
    optimizer_state,
    sharded_state,
)
from lightning_cp.comm.collective_errors import meet, together

__all__ = [
    "aside_of",
    "consolidate",
    "find_folder",
    "full_state",
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
    "sharded_state",
    "together",
]
