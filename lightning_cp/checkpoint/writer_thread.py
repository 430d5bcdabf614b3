# SPDX-License-Identifier: Apache-2.0
"""A thread that writes checkpoints, and seldom delays the main thread, which launches kernels.

Only one thread runs Python code at a time.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.filesystem import FileSystemWriter

SWITCH_INTERVAL: Final = 5e-4
"""Seconds after which a thread hands over to another one; 5e-3 by default."""


@contextmanager
def yielding() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Run Python code inside, in another thread than the main one.

    The main thread may have to wait for `SWITCH_INTERVAL` after each kernel that it launches. The
    garbage collector does not run: the objects of a save are so many, and live so long, that it
    would visit all objects of the process, which takes 0.3 s with transformers. These are settings
    of the whole process, and are restored.

    Yields:
        A context manager, inside of which the garbage collector runs, but does not visit objects
        that existed before: for writing files, which may take minutes.
    """
    interval, is_enabled = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(min(interval, SWITCH_INTERVAL))
    gc.disable()
    try:
        # Objects that the user has frozen would be released too.
        yield _collecting if is_enabled and not gc.get_freeze_count() else nullcontext
    finally:
        sys.setswitchinterval(interval)
        if is_enabled:
            gc.enable()


@contextmanager
def _collecting() -> Iterator[None]:
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.unfreeze()


class HostWriter(FileSystemWriter):
    """Writes tensors that are in host memory, and does not wait for the GPU.

    Args:
        folder: where.
        around: the context manager of `yielding`.
    """

    def __init__(self, folder: Path, around: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self._around = around

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the files."""
        with self._around():
            return super().write_data(plan, planner)
