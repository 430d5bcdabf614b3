# SPDX-License-Identifier: Apache-2.0
"""Folders of shards: where they are, and how a new one takes the place of an old one."""

import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from lightning_cp.checkpoint.checksums import CHECKSUMS, sum_files, write_checksums
from lightning_cp.checkpoint.state import take_shards
from lightning_cp.comm.collective_errors import from_all, from_rank_0, rank, together

META = "meta.pt"
"""What a checkpoint holds besides shards."""
UNSHARDED = (".metadata", META)
"""The files that every rank reads whole."""


def find_folder(folder: Path) -> Path:
    """Return where the checkpoint ``folder`` is.

    A save that was killed between its two renames has left the former checkpoint, whole, under
    another name.
    """
    aside = aside_of(folder)
    return aside if not os.path.lexists(folder) and os.path.lexists(aside) else folder


def is_checkpoint_folder(path: Path) -> bool:
    """Say whether ``path`` is a checkpoint of shards, ours or Lightning's."""
    path = find_folder(path)
    return (path / ".metadata").is_file() and (path / META).is_file()


def save_folder(state: Mapping[str, Any], meta: Mapping[str, Any], folder: Path) -> None:
    """Save shards and the rest of a checkpoint as a folder. Collective.

    Everything is written beside ``folder`` and put in its place by a rename at the end: a process
    that is killed at any moment leaves the former checkpoint or the new one (see `find_folder`).
    A failure of one rank is raised on all, and the former checkpoint stays.

    Args:
        state: ``state_dict``, ``optimizer_0``, ``optimizer_1``, ... from `sharded_state`.
        meta: everything else; rank 0's is saved, but for DTensors, of which each rank saves its
            part.
        folder: on a file system that all ranks share; rank 0's path counts.
    """
    folder = from_rank_0(folder)
    failure = f"{folder} was not saved; what was there before is untouched."
    first = rank() == 0
    meta, shards = take_shards(dict(meta))
    state = {**state, **({"rest": shards} if shards else {})}
    temporary = from_rank_0(together(lambda: _prepare(folder) if first else folder, failure))
    try:
        together(lambda: _write_shards(state, temporary), failure)
        own = together(lambda: sum_files(sorted(temporary.glob(f"__{rank()}_*"))), failure)
        sums = {name: entry for part in from_all(own) for name, entry in part.items()}
        together(lambda: _write_meta(meta, sums, temporary) if first else None, failure)
        together(lambda: _put_in_place(temporary, folder) if first else None, failure)
    finally:
        if first:
            remove(temporary)


def aside_of(folder: Path) -> Path:
    """Return where the former checkpoint lies while a new one takes its name."""
    return folder.with_name(f".{folder.name}.replaced")


@contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Let a file take the name of a checkpoint folder, which is removed once the file is there."""
    check_replaceable(path)
    if path.is_dir():
        os.rename(path, aside_of(path))
    yield
    remove(aside_of(path))


def check_replaceable(path: Path) -> None:
    """Refuse to replace a folder that holds something else than a checkpoint."""
    held = [part.name for part in path.iterdir()] if path.is_dir() else []
    # One that was cut short, by a run without our care, may be replaced too.
    if held and not any(
        name in (*UNSHARDED, CHECKSUMS) or name.endswith(".distcp") for name in held
    ):
        raise IsADirectoryError(
            f"The checkpoint path exists and is a directory: {path}. It is no checkpoint that a "
            "new one could replace. Use another name."
        )


def remove(path: Path) -> None:
    """Remove a folder as far as possible, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _prepare(folder: Path) -> Path:
    """Clear what killed saves have left, and return a new folder to write in."""
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and without the suffix .ckpt: ModelCheckpoint must not take it for a checkpoint.
    stem = f".{folder.name}.saving-"
    for path in list(folder.parent.iterdir()):
        if path.name.startswith(stem):
            remove(path)
    if find_folder(folder) != folder:
        aside_of(folder).rename(folder)
    remove(aside_of(folder))
    temporary = folder.with_name(stem + uuid.uuid4().hex[:8])
    temporary.mkdir()
    return temporary


def _write_shards(state: Mapping[str, Any], temporary: Path) -> None:
    """Write each rank's shards. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ")  # we know when there is no group
        state_dict_saver.save(dict(state), storage_writer=FileSystemWriter(temporary))


def _write_meta(meta: Mapping[str, Any], sums: Mapping[str, Any], temporary: Path) -> None:
    """Write what is not sharded, once all shards are there, and the checksums of all files."""
    read_metadata(temporary, [".metadata"])
    save_file(meta, temporary / META)
    write_checksums(temporary, {**sum_files([temporary / n for n in UNSHARDED]), **sums})


def save_file(value: Mapping[str, Any], file: Path) -> None:
    """Save a value, down to the disk."""
    with file.open("wb") as stream:
        torch.save(dict(value), stream)
        stream.flush()
        os.fsync(stream.fileno())


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give a finished checkpoint its name, and remove the one that had it."""
    aside = aside_of(folder)
    if os.path.lexists(folder):
        os.rename(folder, aside)
    try:
        os.rename(temporary, folder)
    except OSError:
        if os.path.lexists(aside):
            os.rename(aside, folder)
        raise
    remove(aside)


def read_metadata(folder: Path, needed: Sequence[str] = UNSHARDED) -> Metadata:
    """Return what DCP knows about a folder, having checked that all of it is there."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no checkpoint folder {folder}.")
    if missing := [name for name in needed if not (folder / name).is_file()]:
        kind = "was not saved to its end" if list(folder.glob("*.distcp")) else "is no checkpoint"
        raise ValueError(f"{folder} {kind}: `{missing[0]}` is missing. Use another checkpoint.")
    metadata = FileSystemReader(folder).read_metadata()
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for info in metadata.storage_data.values():
        if sizes.get(info.relative_path, -1) < info.offset + info.length:
            raise ValueError(
                f"{folder} is incomplete: `{info.relative_path}` is missing or cut short. Use "
                "another checkpoint, and save to a file system that all ranks share."
            )
    return metadata
