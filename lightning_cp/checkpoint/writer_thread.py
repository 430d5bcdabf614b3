# SPDX-License-Identifier: Apache-2.0
"""A thread that writes checkpoints, and seldom delays the main thread, which launches kernels.

Only one thread runs Python code at a time.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Final

from torch.distributed.checkpoint.filesystem import FileSystemWriter

SWITCH_INTERVAL: Final = 5e-4
"""Seconds after which a thread hands over to another one; 5e-3 by default."""


class _Settings:
    """Settings of the whole process: changed by the first thread, restored by the last one."""

    def __init__(self) -> None:
        self.lock, self.num_threads = Lock(), 0
        self.interval, self.is_enabled, self.is_frozen = 0.0, False, False

    def enter(self) -> None:
        with self.lock:
            self.num_threads += 1
            if self.num_threads == 1:
                self.interval, self.is_enabled = sys.getswitchinterval(), gc.isenabled()
                sys.setswitchinterval(min(self.interval, SWITCH_INTERVAL))
                gc.disable()

    def collect(self) -> None:
        with self.lock:
            # Objects that the user has frozen would be released too.
            if self.is_enabled and not self.is_frozen and not gc.get_freeze_count():
                self.is_frozen = True
                gc.freeze()
                gc.enable()

    def leave(self) -> None:
        with self.lock:
            self.num_threads -= 1
            if self.num_threads == 0:
                self.restore()

    def restore(self) -> None:
        if abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 2e-6:  # not the user's
            sys.setswitchinterval(self.interval)
        if self.is_frozen:
            gc.unfreeze()
        if self.is_enabled:
            gc.enable()
        self.is_frozen = False

    def restore_in_child(self) -> None:
        """Restore them in a process that was forked meanwhile, such as a worker of a loader."""
        if self.num_threads:
            self.restore()
        self.lock, self.num_threads = Lock(), 0


_settings = _Settings()
os.register_at_fork(after_in_child=_settings.restore_in_child)


@contextmanager
def yielding() -> Iterator[Callable[[], None]]:
    """Run Python code inside, in another thread than the main one.

    The main thread may have to wait for `SWITCH_INTERVAL` after each kernel that it launches. The
    garbage collector does not run: the objects of a save are so many, and live so long, that it
    would visit all objects of the process, which takes 0.3 s with transformers. These are settings
    of the whole process, and are restored.

    Yields:
        A function to call before files are written, which may take minutes: from then on the
        garbage collector runs, but does not visit objects that existed before.
    """
    _settings.enter()
    try:
        yield _settings.collect
    finally:
        _settings.leave()


class HostWriter(FileSystemWriter):
    """Writes tensors that are in host memory, and does not wait for the GPU.

    Args:
        folder: where.
        before: the function of `yielding`.
    """

    def __init__(self, folder: Path, before: Callable[[], None]) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self._before = before

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the files."""
        self._before()
        return super().write_data(plan, planner)
