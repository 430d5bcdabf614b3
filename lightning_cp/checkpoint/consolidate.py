# SPDX-License-Identifier: Apache-2.0
"""Consolidation of a checkpoint folder: in memory, or as the single file of a plain Trainer."""

import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_cp.checkpoint.folder import find_folder, save_file
from lightning_cp.checkpoint.source import REST, blank, nest, open_folder, put_values
from lightning_cp.checkpoint.state import map_tensors, renamed

MapLocation = (
    Callable[[UntypedStorage, str], UntypedStorage | None]
    | str
    | torch.device
    | Mapping[str, str]
    | None
)


def read_whole(
    folder: Path, *, map_location: MapLocation = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a checkpoint folder as ``torch.load`` reads a file, without the optimizers' states.

    Not collective: each process that calls it reads and checks the full checkpoint.

    Args:
        folder: the checkpoint.
        map_location: as for ``torch.load``; weights in folders count as saved from the CPU.
        weights_only: as for ``torch.load``, for `meta.pt`. The index of the shards is always a
            pickle: load only folders that you trust.
    """
    source = open_folder(folder, weights_only, map_location=map_location)
    forms = {k: form for k, form in source.forms.items() if k[0] in ("state_dict", REST)}
    values = source.read({keys: blank(form) for keys, form in forms.items()})
    placed = {keys: map_tensors(partial(_placed, map_location), x) for keys, x in values.items()}
    checkpoint = dict(source.rest or {})
    put_values(checkpoint, placed)
    return {**checkpoint, "state_dict": nest(placed).get("state_dict", {})}


def _placed(map_location: MapLocation, x: Tensor) -> Tensor:
    """Return a tensor on the device where ``torch.load`` would have put it."""
    if map_location is None:
        return x
    if callable(map_location):
        storage = map_location(x.untyped_storage(), "cpu")
        return x if storage is None else x.to(storage.device)
    if isinstance(map_location, Mapping):
        return x.to(map_location.get("cpu", "cpu"))
    return x.to(map_location)


def consolidate(folder: str | Path, out: str | Path, *, overwrite: bool = False) -> None:
    """Turn a checkpoint folder into the single file of a plain Trainer.

    The file resumes on one device and loads with ``load_from_checkpoint``. No process group is
    needed; the full checkpoint must fit into memory.

    Args:
        folder: a checkpoint that you trust: it contains pickles.
        out: the file to write.
        overwrite: replace ``out`` if it exists.
    """
    folder, out = Path(folder), Path(out)
    if out.is_dir() or (out.exists() and not overwrite):
        fix = "Pass the name of a file." if out.is_dir() else "Remove it, or allow overwriting."
        raise FileExistsError(f"{out} already exists. {fix}")
    folder = find_folder(folder)
    source = open_folder(folder, weights_only=False)
    meta = dict(source.rest or {})
    values = source.read({keys: blank(form) for keys, form in source.forms.items()})
    put_values(meta, values)
    nested = nest(values)
    states = []
    for index, groups in enumerate(source.groups):
        ids = iter(range(sum(len(group["params"]) for group in groups)))
        numbers = [[next(ids) for _ in group["params"]] for group in groups]
        saved = {"state": nested[f"optimizer_{index}"].get("state", {}), "param_groups": groups}
        states.append(renamed(saved, numbers))
    checkpoint = {**meta, "state_dict": nested["state_dict"]}
    if states or "lr_schedulers" in meta:  # save_weights_only=True omits both
        checkpoint["optimizer_states"] = states
    temporary = out.with_name(f".{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        save_file(checkpoint, temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
