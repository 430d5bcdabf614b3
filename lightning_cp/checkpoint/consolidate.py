# SPDX-License-Identifier: Apache-2.0
"""A folder of shards becomes the single file of a plain Trainer."""

import os
import uuid
from pathlib import Path

from lightning_cp.checkpoint.folder import META, find_folder, save_file
from lightning_cp.checkpoint.source import blank, load_pickle, nest, open_folder
from lightning_cp.checkpoint.state import renamed


def consolidate(folder: str | Path, out: str | Path, *, overwrite: bool = False) -> None:
    """Turn a checkpoint folder into the single file of a plain Trainer.

    The file resumes on one device and loads with ``load_from_checkpoint``. No process group is
    needed; the whole checkpoint must fit into memory.

    Args:
        folder: a checkpoint that you trust: it holds pickles.
        out: the file to write.
        overwrite: replace ``out`` if it exists.
    """
    folder, out = Path(folder), Path(out)
    if out.is_dir() or (out.exists() and not overwrite):
        cure = "Give the name of a file." if out.is_dir() else "Remove it, or allow overwriting."
        raise FileExistsError(f"{out} exists already. {cure}")
    folder = find_folder(folder)
    source = open_folder(folder)
    meta = load_pickle(folder / META, weights_only=False)
    nested = nest(source.read({keys: blank(form) for keys, form in source.forms.items()}))
    states = []
    for index, groups in enumerate(source.groups):
        ids = iter(range(sum(len(group["params"]) for group in groups)))
        numbers = [[next(ids) for _ in group["params"]] for group in groups]
        saved = {"state": nested[f"optimizer_{index}"].get("state", {}), "param_groups": groups}
        states.append(renamed(saved, numbers))
    checkpoint = {**meta, "state_dict": nested["state_dict"]}
    if states or "lr_schedulers" in meta:  # save_weights_only=True leaves both out
        checkpoint["optimizer_states"] = states
    temporary = out.with_name(f".{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        save_file(checkpoint, temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
