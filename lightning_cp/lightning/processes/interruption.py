# SPDX-License-Identifier: Apache-2.0
"""Errors and SIGTERM of one rank reach all ranks; a SIGTERM saves a checkpoint after the step.

Lightning's own handler of SIGTERM calls a collective wherever the signal finds the process, which
deadlocks unless all ranks get the signal at once. Knows Lightning; `comm/watchdog.py` does the
rest.
"""

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_cp.comm.watchdog import Watchdog
from lightning_cp.lightning import private

EXIT_CODE: Final = 143
"""Of a process that a SIGTERM has ended: 128 + 15, by convention. Lightning's would be 0."""

_logger = logging.getLogger(__name__)


def attach(trainer: Trainer, watchdog: Watchdog) -> Callable[[], None]:
    """Let errors and SIGTERM of this rank reach all; return what undoes it."""
    reporter, interruption = _Reporter(watchdog), _Interruption(trainer, watchdog)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(0, reporter)  # before those that save on an exception, and may wait there
    patches = private.answer_sigterm(trainer, interruption.on_sigterm, interruption.agree)
    stop_listening = _listen(interruption) if _is_in_thread_of_ray(trainer) else None

    def undo() -> None:
        if stop_listening is not None:
            stop_listening()
        if reporter in callbacks:
            callbacks.remove(reporter)
        for patch in patches:
            patch.remove()

    return undo


def _is_in_thread_of_ray(trainer: Trainer) -> bool:
    """Return whether `fit` runs in a thread of a worker of Ray, which ends at once by SIGTERM."""
    environment: Any = getattr(trainer.strategy, "cluster_environment", None)
    kinds = {kind.__name__ for kind in type(environment).__mro__}
    is_thread = threading.current_thread() is not threading.main_thread()
    is_fit = trainer.state.fn == TrainerFn.FITTING
    return is_fit and is_thread and "RayLightningEnvironment" in kinds


def _listen(interruption: "_Interruption") -> Callable[[], None]:
    """Let SIGTERM reach the interruption from a thread; return what undoes it.

    Only the main thread may install handlers in Python, but any thread those of `faulthandler`,
    which write a traceback to a file: here to a pipe, from which a thread learns of the signal.
    """
    source, sink = os.pipe()
    os.set_blocking(sink, False)  # a handler must not wait for a reader
    faulthandler.register(signal.SIGTERM, file=sink, all_threads=False, chain=False)

    def read() -> None:
        is_first = True
        while os.read(source, 1 << 16):
            if is_first:
                interruption.on_sigterm(signal.SIGTERM, None)
            is_first = False

    thread = threading.Thread(target=read, name="lightning_cp SIGTERM", daemon=True)
    thread.start()

    def undo() -> None:
        faulthandler.unregister(signal.SIGTERM)  # the handler before it counts again
        os.close(sink)
        thread.join()
        os.close(source)

    return undo


class _Reporter(Callback):
    """Reports an error before other callbacks see it."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report the error, unless all ranks have agreed on it."""
        if not (isinstance(exception, SIGTERMException) and trainer.received_sigterm):
            self._watchdog.report(exception)


class _Interruption:
    """What a SIGTERM does, in place of Lightning's methods."""

    def __init__(self, trainer: Trainer, watchdog: Watchdog) -> None:
        self._trainer, self._watchdog = trainer, watchdog

    def on_sigterm(self, signum: int, frame: object) -> None:
        """Ask all ranks to stop after the step; outside of training there is nothing to save."""
        _logger.warning("rank %d has received SIGTERM", self._trainer.global_rank)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._watchdog.ask_to_stop()
        else:
            raise SIGTERMException(EXIT_CODE)

    def agree(self) -> None:
        """Save and raise on all ranks if one was asked to stop. Called before each batch."""
        strategy = self._trainer.strategy
        is_asked = torch.tensor([self._watchdog.is_asked_to_stop and self._is_between_steps()])
        is_asked = is_asked.to(strategy.root_device, torch.uint8)
        dist.broadcast(is_asked, src=0)  # as Lightning does: one rank decides at which batch
        if not is_asked.item():
            return
        private.note_sigterm(self._trainer)
        self._save()
        raise SIGTERMException(EXIT_CODE)

    def _is_between_steps(self) -> bool:
        """Return whether no gradients are accumulated, which a checkpoint would not hold."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return batches % self._trainer.accumulate_grad_batches == 0

    def _save(self) -> None:
        saver: Any = self._trainer.checkpoint_callback
        is_trial = self._trainer.fast_dev_run  # type: ignore[attr-defined]  # set by a connector
        if saver is None or is_trial:
            _logger.warning("SIGTERM: nothing is saved, as the Trainer has no ModelCheckpoint.")
            return
        folder = Path(getattr(saver, "dirpath", None) or self._trainer.default_root_dir)
        path = folder / "last.ckpt"
        self._trainer.save_checkpoint(path)
        wait: Callable[[], None] = getattr(
            self._trainer.strategy, "wait_for_checkpoint", lambda: None
        )
        wait()
        if self._trainer.is_global_zero:
            _logger.warning("SIGTERM: step %d is saved in %s", self._trainer.global_step, path)
