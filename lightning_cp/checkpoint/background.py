# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that are written by a thread, while training goes on.

The tensors are copied to host memory first. The threads of all ranks communicate by a gloo group of
their own: collectives of the main threads come in between, in another order on each rank.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_cp.checkpoint.folder import failure_of, join_shards, save_bytes, write_folder
from lightning_cp.comm.collective_errors import from_rank_0, rank, together
from lightning_cp.torch_private import is_alive

_logger = logging.getLogger(__name__)


class BackgroundSaver:
    """Saves one folder at a time in the background. All ranks call its methods together.

    Args:
        timeout: of the process group; torch's default if None.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._save: Future[None] | None = None
        self._removals: list[Future[None]] = []

    def save(self, state: Mapping[str, Any], meta: Mapping[str, Any], folder: Path) -> None:
        """Start to save a folder, see `save_folder`, after the former one is complete.

        Returns when all that is saved has been copied to host memory. A failure of the former save
        is raised here, on all ranks.
        """
        self.wait()
        folder = from_rank_0(folder)
        state, meta = join_shards(state, meta)
        staged, content = together(lambda: self._copy(state, meta), failure_of(folder))
        if dist.is_initialized() and (self._group is None or not is_alive(self._group)):
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning_cp_checkpoint")
        write_meta = partial(save_bytes, content)
        self._save = self._thread.submit(write_folder, staged, write_meta, folder, self._group)

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
            except OSError:  # on rank 0 alone: the others would not know
                _logger.warning("could not remove a former checkpoint", exc_info=True)

        self._removals.append(self._thread.submit(act))

    def wait(self) -> None:
        """Wait for the save in progress, and raise if it has failed."""
        futures, self._save, self._removals = [self._save, *self._removals], None, []
        for future in futures:
            if future is not None:
                future.result()

    def close(self) -> None:
        """Wait, and free the thread and the host memory."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._stager is not None:
                self._stager.close()
            self._thread = self._stager = None

    def _copy(
        self, state: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], bytes]:
        """Return copies that training does not change: tensors in host memory, rank 0's meta."""
        if self._stager is None:
            is_pinned = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(is_pinned, False, False, is_pinned))
        staged = self._stager.stage(dict(state))
        assert not isinstance(staged, Future)  # noqa: S101  only with use_async_staging
        stream = BytesIO()
        if rank() == 0:
            torch.save(dict(meta), stream)
        return staged, stream.getvalue()
