# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that are written by a thread, while training goes on.

The tensors are copied to host memory first, or written to a local disk. The threads of all ranks
communicate by a gloo group of their own: collectives of the main threads come in between, in
another order on each rank. Between two saves the main threads use it too: NCCL would make the host
wait for the GPU.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.checkpoint.folder import (
    failure_of,
    flushed,
    join_shards,
    remove,
    save_bytes,
    write_folder,
    write_shards,
)
from lightning_cp.checkpoint.host_copies import HostCopies
from lightning_cp.checkpoint.writer_thread import HostWriter, yielding
from lightning_cp.comm.collective_errors import from_rank_0, rank, together
from lightning_cp.comm.mesh import gloo_group

_logger = logging.getLogger(__name__)


class BackgroundSaver:
    """Saves one folder at a time in the background. All ranks call its methods together.

    Args:
        timeout: of the process group; torch's default if None.
        staging_dir: a folder on a local disk, to which each rank writes its shards instead of
            copying them to host memory; the thread copies them from there.
    """

    def __init__(self, timeout: timedelta | None = None, staging_dir: Path | None = None) -> None:
        self._timeout = timeout
        self._staging_dir = staging_dir
        self._group: dist.ProcessGroup | None = None
        self._copies: HostCopies | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._save: Future[None] | None = None
        self._removals: list[Future[None]] = []

    def save(self, state: Mapping[str, Any], meta: Mapping[str, Any], folder: Path) -> None:
        """Start to save a folder, see `save_folder`, after the former one is complete.

        What is saved may be changed when this returns: it is being copied to host memory, see
        `HostCopies`, or has been written to the local disk. A failure of the former save is raised
        here, on all ranks.
        """
        self.wait()  # also for the thread's collectives: below, its group is used here
        if dist.is_initialized():
            self._group = gloo_group(self._group, self._timeout)
        folder = from_rank_0(folder, self._group)
        everywhere = partial(together, failure=failure_of(folder), group=self._group)
        state, meta = join_shards(state, meta)
        if self._staging_dir is None:
            copy = everywhere(lambda: self._copy(state))
            write = partial(_write_copy, copy)
        else:
            write_own = partial(write_shards, state, group=self._group)
            own = _stage_shards(write_own, self._staging_dir, folder, everywhere)
            write = partial(write_folder, partial(_move_shards, own))
        content = everywhere(lambda: _to_bytes(meta))
        if self._thread is None:
            # A thread's device would be the first one.
            is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device() if is_cuda else None
            self._thread = ThreadPoolExecutor(
                1,
                thread_name_prefix="lightning_cp_checkpoint",
                initializer=partial(torch.cuda.set_device, device) if is_cuda else None,
            )
        write_meta = partial(save_bytes, content)
        self._save = self._thread.submit(write, write_meta, folder, self._group)

    def after_save(self, action: Callable[[], None]) -> None:
        """Call a function once the save in progress is complete, or now; never if it fails."""
        save = self._save
        if save is None or self._thread is None:
            action()
            return

        def act() -> None:
            if save.exception() is not None:
                return
            try:
                action()
            except Exception:  # on rank 0 alone: the others would not know
                _logger.warning("could not remove a former checkpoint", exc_info=True)

        self._removals.append(self._thread.submit(act))

    def wait(self) -> None:
        """Wait for the save in progress, and raise if it has failed."""
        futures = [x for x in (self._save, *self._removals) if x is not None]
        wait_for(futures)  # an interrupt in here leaves them known: their memory is in use
        self._save, self._removals = None, []
        for future in futures:
            future.result()

    def close(self) -> None:
        """Wait, and free the thread and the host memory."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = self._copies = None

    def _copy(self, state: Mapping[str, Any]) -> Callable[[], Any]:
        if self._copies is None:
            self._copies = HostCopies()
        return self._copies.copy(state)


def _write_copy(
    copy: Callable[[], Any],
    write_meta: Callable[[Path], None],
    folder: Path,
    group: dist.ProcessGroup | None,
) -> None:
    """Wait for the copies of all ranks, and write them."""
    with yielding():
        state = together(copy, failure_of(folder), group=group)

    def write(folder: Path, group: dist.ProcessGroup | None) -> None:
        with yielding() as before_writing:
            write_shards(state, folder, group, partial(HostWriter, before=before_writing))

    write_folder(write, write_meta, folder, group)


def _to_bytes(meta: Mapping[str, Any]) -> bytes:
    """Return what rank 0 will write to a file."""
    stream = BytesIO()
    if rank() == 0:
        torch.save(dict(meta), stream)
    return stream.getvalue()


def _stage_shards(
    write: Callable[[Path], None],
    staging_dir: Path,
    folder: Path,
    everywhere: Callable[[Callable[[], None]], None],
) -> Path:
    """Write this rank's shards to a local disk, and return the folder there. Collective.

    Its name has a digest of the checkpoints' folder, into which no two jobs save at once: what is
    there is left from a save of this job that was killed.
    """
    digest = hashlib.sha256(str(folder.parent.absolute()).encode()).hexdigest()[:16]
    stem = f"lightning_cp-{digest}-"
    own = staging_dir / f"{stem}{rank()}"

    def prepare() -> None:
        staging_dir.mkdir(parents=True, exist_ok=True)
        for path in staging_dir.glob(f"{stem}*"):  # ranks of a node share a disk
            remove(path)

    everywhere(prepare)
    try:
        everywhere(lambda: write(own))
    except RuntimeError:
        remove(own)  # the disk may be full
        raise
    return own


def _move_shards(own: Path, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Copy this rank's staged shards to a checkpoint, and flush them; remove them here."""
    del group  # `write_folder` waits for all ranks
    try:
        for file in own.iterdir():
            with file.open("rb") as source, flushed(folder / file.name) as target:
                shutil.copyfileobj(source, target, 16 * 2**20)
    finally:
        remove(own)
