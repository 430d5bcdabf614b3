# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: their location, and how a new one replaces an old one."""

import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from lightning_cp.checkpoint.blocks import as_blocks
from lightning_cp.checkpoint.checksums import CHECKSUMS, sum_files, write_checksums
from lightning_cp.checkpoint.state import take_shards
from lightning_cp.comm.collective_errors import from_all, from_rank_0, rank, together

META = "meta.pt"
"""The file for everything but shards."""
UNSHARDED = (".metadata", META)
"""The files that every rank reads in full."""


def find_folder(folder: Path) -> Path:
    """Return the path of the checkpoint ``folder``.

    A save that was killed between its two renames leaves the previous checkpoint, complete, under
    another name.
    """
    aside = aside_of(folder)
    return aside if not os.path.lexists(folder) and os.path.lexists(aside) else folder


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint of shards, ours or Lightning's."""
    path = find_folder(path)
    return (path / ".metadata").is_file() and (path / META).is_file()


def save_folder(state: Mapping[str, Any], meta: Mapping[str, Any], folder: Path) -> None:
    """Save shards and the rest of a checkpoint as a folder. Collective.

    Everything is written next to ``folder`` and renamed at the end: a process that is killed at any
    time leaves the previous checkpoint or the new one (see `find_folder`). A failure on one rank
    is raised on all ranks, and the previous checkpoint stays.

    Args:
        state: ``state_dict`` from `model_state`, ``optimizer_0``, ``optimizer_1``, ... from
            `optimizer_state`, both with ``full=False``.
        meta: everything else; rank 0's is saved, except DTensors, of which each rank saves its
            shard.
        folder: on a file system that all ranks share; rank 0's path is used.
    """
    state, meta = join_shards(state, meta)
    folder = from_rank_0(folder)
    temporary = new_folder(folder)
    write = partial(write_shards, state, temporary)
    complete_folder(write, partial(save_file, meta), temporary, folder)


def join_shards(
    state: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all shards of a checkpoint, and what is not sharded."""
    rest, shards = take_shards(dict(meta))
    return {**state, **({"rest": shards} if shards else {})}, rest


def failure_of(folder: Path) -> str:
    """Return what to say if a folder cannot be saved."""
    return f"{folder} was not saved; an existing checkpoint is unchanged."


def new_folder(folder: Path, group: dist.ProcessGroup | None = None) -> Path:
    """Return a new folder for what will be a checkpoint. Collective.

    Args:
        folder: the checkpoint, the same path on all ranks.
        group: a group of all ranks; the default one if None.
    """
    first = rank() == 0
    own = together(lambda: _prepare(folder) if first else folder, failure_of(folder), group=group)
    return from_rank_0(own, group)


def complete_folder(
    write: Callable[[], object],
    write_meta: Callable[[Path], None],
    temporary: Path,
    folder: Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint, and put it in place. Collective.

    Args:
        write: writes each rank's shards, or waits until they are written. Collective.
        write_meta: writes what is not sharded to a file, on rank 0.
        temporary: the folder with the shards, from `new_folder`.
        folder: the checkpoint, the same path on all ranks.
        group: a group of all ranks; the default one if None.
    """
    first = rank() == 0
    everywhere = partial(together, failure=failure_of(folder), group=group)
    try:
        everywhere(write)
        rank_sums = everywhere(lambda: sum_files(sorted(temporary.glob(f"__{rank()}_*"))))
        sums = {name: entry for part in from_all(rank_sums, group) for name, entry in part.items()}
        everywhere(lambda: _write_meta(write_meta, sums, temporary) if first else None)
        everywhere(lambda: _put_in_place(temporary, folder) if first else None)
    finally:
        if first:
            remove(temporary)


def aside_of(folder: Path) -> Path:
    """Return the path of the previous checkpoint while a new one is renamed to ``folder``."""
    return folder.with_name(f".{folder.name}.replaced")


@contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Let a file replace a checkpoint folder, which is removed once the file exists."""
    check_replaceable(path)
    if path.is_dir():
        os.rename(path, aside_of(path))
    yield
    remove(aside_of(path))


def check_replaceable(path: Path) -> None:
    """Raise if a folder that is to be replaced is not a checkpoint."""
    files = [part.name for part in path.iterdir()] if path.is_dir() else []
    # An incomplete checkpoint, saved by another library, may be replaced too.
    if files and not any(
        name in (*UNSHARDED, CHECKSUMS) or name.endswith(".distcp") for name in files
    ):
        raise IsADirectoryError(
            f"The checkpoint path exists and is a directory: {path}. It is not a checkpoint, so "
            "that it is not replaced. Use another name."
        )


def remove(path: Path) -> None:
    """Remove a folder as far as possible, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _prepare(folder: Path) -> Path:
    """Remove what killed saves have left, and return a new folder to write to."""
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and without the suffix .ckpt: ModelCheckpoint must not list it as a checkpoint.
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


def write_shards(state: Mapping[str, Any], folder: Path) -> None:
    """Write each rank's shards. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ")
        state_dict_saver.save(as_blocks(state), storage_writer=FileSystemWriter(folder))


def _write_meta(write: Callable[[Path], None], sums: Mapping[str, Any], temporary: Path) -> None:
    """Write what is not sharded, after all shards, and the checksums of all files."""
    read_metadata(temporary, [".metadata"])
    write(temporary / META)
    write_checksums(temporary, {**sum_files([temporary / n for n in UNSHARDED]), **sums})


@contextmanager
def flushed(file: Path) -> Iterator[BinaryIO]:
    """Write a file inside, and flush it to disk at the end."""
    with file.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def save_file(value: Mapping[str, Any], file: Path) -> None:
    """Save a value, and flush it to disk."""
    with flushed(file) as stream:
        torch.save(dict(value), stream)


def save_bytes(content: bytes, file: Path) -> None:
    """Write a file, and flush it to disk."""
    with flushed(file) as stream:
        stream.write(content)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a finished checkpoint to its final name, and remove the previous one."""
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
    """Return DCP's metadata of a folder, after checking that the folder is complete."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no checkpoint folder {folder}.")
    if missing := [name for name in needed if not (folder / name).is_file()]:
        kind = "is incomplete" if list(folder.glob("*.distcp")) else "is not a checkpoint"
        raise ValueError(f"{folder} {kind}: `{missing[0]}` is missing. Use another checkpoint.")
    metadata = FileSystemReader(folder).read_metadata()
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for info in metadata.storage_data.values():
        if sizes.get(info.relative_path, -1) < info.offset + info.length:
            raise ValueError(
                f"{folder} is incomplete: `{info.relative_path}` is missing or truncated. Use "
                "another checkpoint, and save to a file system that all ranks share."
            )
    return metadata
