# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that torch's `async_save` writes, while training goes on.

The tensors are copied to host memory first. The threads of all ranks communicate by a gloo group of
their own: collectives of the main threads come in between, in another order on each rank. Between
two saves the main threads use it too.
"""

import logging
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
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from lightning_cp.checkpoint.folder import (
    complete_folder,
    failure_of,
    join_shards,
    new_folder,
    remove,
    save_bytes,
)
from lightning_cp.checkpoint.staging import HostStager
from lightning_cp.comm.collective_errors import from_rank_0, rank, together
from lightning_cp.comm.mesh import gloo_group

_logger = logging.getLogger(__name__)


class BackgroundSaver:
    """Saves one folder at a time in the background. All ranks call its methods together.

    Args:
        timeout: of the process group; torch's default if None.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._stager = HostStager()
        self._thread: ThreadPoolExecutor | None = None
        self._save: Future[None] | None = None

    def save(self, state: Mapping[str, Any], meta: Mapping[str, Any], folder: Path) -> None:
        """Start to save a folder, see `save_folder`, after the former one is complete.

        What is saved may be changed when this returns: it is in host memory. A failure of the
        former save is raised here, on all ranks.
        """
        self.wait()  # also for the threads' collectives: below, their group is used here
        if dist.is_initialized():
            self._group = gloo_group(self._group, self._timeout)
        folder = from_rank_0(folder, self._group)
        self._stager.together = partial(together, failure=failure_of(folder), group=self._group)
        state, meta = join_shards(state, meta)
        content = self._stager.together(lambda: _to_bytes(meta))
        temporary = new_folder(folder, self._group)
        try:
            upload: Any = async_save(
                state,
                # Nothing to copy ahead: torch's thread would wait for the first GPU.
                storage_writer=FileSystemWriter(temporary, per_thread_copy_ahead=0),
                process_group=self._group,
                async_stager=self._stager,
            )
        except BaseException:
            if rank() == 0:
                remove(temporary)
            raise
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning_cp_checkpoint")
        write_meta = partial(save_bytes, content)
        self._save = self._thread.submit(
            complete_folder, upload.result, write_meta, temporary, folder, self._group
        )

    def after_save(self, action: Callable[[], None]) -> None:
        """Call a function once the save in progress is complete, or now; never if it fails."""
        save = self._save
        if save is None or self._thread is None:
            action()
            return

        def act() -> None:
            save.result()
            try:
                action()
            except Exception:  # on rank 0 alone: the others would not know
                _logger.warning("could not remove a former checkpoint", exc_info=True)

        self._save = self._thread.submit(act)

    def wait(self) -> None:
        """Wait for the save in progress, and raise if it has failed."""
        if save := self._save:
            wait_for([save])  # an interrupt in here leaves it known: its memory is in use
            self._save = None
            save.result()

    def close(self) -> None:
        """Wait, and free the thread and the host memory."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None
            self._stager.close()


def _to_bytes(meta: Mapping[str, Any]) -> bytes:
    """Return what rank 0 will write to a file."""
    stream = BytesIO()
    if rank() == 0:
        torch.save(dict(meta), stream)
    return stream.getvalue()
