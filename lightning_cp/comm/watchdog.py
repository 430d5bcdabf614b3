# SPDX-License-Identifier: Apache-2.0
"""Ends all processes of a job when one of them fails, also while they wait in a collective.

A rank that fails writes its error into a key-value store; a thread on each rank reads it, says so,
and ends its process. Each rank also counts up in the store every second (its heartbeat), and the
rank before it notices if it stops. Knows stores and processes; what is a failure is decided in
`interruption.py` of the strategy.
"""

import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_cp.comm.error_report import tell_torchrun
from lightning_cp.private.groups import default_store

HEARTBEAT_TIMEOUT: Final = timedelta(seconds=60)
"""How long a rank may be silent by default. Its thread needs the interpreter lock for a moment, so
that a call into C that holds the lock all the time counts as silence; no such call takes this long
that we know of."""

POLL: Final = 1.0
"""Seconds between two looks into the store."""

GRACE: Final = 5.0
"""Seconds that a rank has to end by itself, once another has failed: it may raise the same error,
or one of its own collective, with a traceback."""

FAILING_GRACE: Final = 15.0
"""Seconds that a rank that has failed has to end, once another has ended: to write its logs."""

SILENCE: Final = 3.0
"""Seconds without a heartbeat after which a rank is named, if a connection to some rank is lost."""

_MAX_LEN: Final = 2000
_LOST: Final = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|remote process|peer closed|ncclRemoteError"
)

_logger = logging.getLogger(__name__)
_runs = count()


class Watchdog:
    """A thread that ends this process if another rank fails or falls silent.

    The thread that makes it is taken for the one that trains (with Ray not the main thread).

    Args:
        store: a store of all ranks, with a connection of its own.
        rank: of this process.
        size: number of ranks, at least 2.
        heartbeat_timeout: how long another rank may be silent.
    """

    def __init__(self, store: Any, rank: int, size: int, heartbeat_timeout: timedelta) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._limit = heartbeat_timeout.total_seconds()
        self._training_thread = threading.get_ident()
        self._cause: str | None = None
        self._known_since = 0.0
        self._has_failed = False
        self._asks_to_stop = self._is_asked_to_stop = False
        self._polled = self._heard = self._answered = time.monotonic()
        self._is_cut_off = False
        self._beat = -1
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=run, name="lightning_cp watchdog", daemon=True)
            for run in (self._run, self._time_store)
        ]

    @classmethod
    def of_job(cls, rank: int, size: int, heartbeat_timeout: timedelta) -> Self | None:
        """Start a watchdog on all ranks of the job; None if there is one rank. Collective."""
        if size == 1:
            return None
        # A connection of its own: a wait on the group's would block the heartbeat.
        store = default_store().clone()
        store = PrefixStore(f"lightning_cp/watchdog {next(_runs)}", store)
        watchdog = cls(store, rank, size, heartbeat_timeout)
        watchdog.start()
        return watchdog

    def start(self) -> None:
        """Start the thread."""
        self._store.set_timeout(timedelta(seconds=10))
        self._store.set(f"host {self._rank}", socket.gethostname())
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------- for the training thread

    def report(self, error: BaseException) -> None:
        """Tell all ranks why this one fails; the first report counts."""
        self._has_failed = True
        is_lost = isinstance(error, RuntimeError) and _LOST.search(str(error))
        if is_lost:  # now: the launcher may end this process while it looks for the cause
            _logger.error("Rank %d has lost a connection: %s", self._rank, describe(error))

        def publish() -> None:
            try:
                silent = self._find_silent() if is_lost else None
                self._publish(silent or self._named(self._rank, f"failed: {describe(error)}"))
            except RuntimeError as lost:  # of the store
                self._note_cause(_gone(lost))

        _in_time(publish, SILENCE + GRACE)
        if is_lost:
            _logger.error("Rank %d ends. Cause: %s", self._rank, self._cause)

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop after a step; may be called by a signal handler."""
        self._asks_to_stop = True

    @property
    def is_asked_to_stop(self) -> bool:
        """Return whether this rank knows that some rank has asked to stop."""
        return self._asks_to_stop or self._is_asked_to_stop

    def close(self) -> None:
        """Stop the thread, together with the other ranks: one that left early would seem dead."""
        if self._has_failed:  # the store may end with this process: let the others read it
            _in_time(lambda: self._wait_for("informed", self._size, GRACE), 2 * GRACE)
        else:
            with suppress(RuntimeError):  # the store is gone: its rank saw all others leave
                self._store.add("left", 1)
                self._wait_for("left", self._size, None)
        self._closing.set()
        for thread in self._threads:
            thread.join(GRACE)

    def _wait_for(self, key: str, number: int, limit: float | None) -> None:
        begin, pause = time.monotonic(), 0.005
        while self._store.add(key, 0) < number:
            if limit is not None and time.monotonic() - begin > limit:
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _find_silent(self) -> str | None:
        """Return which ranks have no heartbeat, if any; None also if another rank has reported."""
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        before = [self._store.add(f"beat {rank}", 0) for rank in ranks]
        end = time.monotonic() + SILENCE
        while time.monotonic() < end:
            if self._store.check(["cause"]):
                return None
            time.sleep(0.1)
        silent = [r for r, n in zip(ranks, before, strict=True) if self._count(r) == n]
        if not silent:
            return None
        self._store.add("ended", len(silent))
        others = f", and {len(silent) - 1} other ranks" if len(silent) > 1 else ""
        return self._named(silent[0], f"has ended without an error, killed perhaps{others}")

    # ---------------------------------------------------------------- for the thread

    def _run(self) -> None:
        while not self._closing.wait(POLL):
            try:
                self._poll(time.monotonic())
            except RuntimeError as lost:
                self._note_cause(_gone(lost))
            self._end_if_due(time.monotonic())
            self._answered = time.monotonic()

    def _time_store(self) -> None:
        """End this process if the store does not answer: where a link is cut, a call never ends."""
        before = time.monotonic()
        while not self._closing.wait(POLL):
            now = time.monotonic()
            if now - before > 5 * POLL:  # this process was stopped
                self._answered = now
            before = now
            if now - self._answered > self._limit:
                self._is_cut_off = True
                seconds = now - self._answered
                self._note_cause(
                    f"the key-value store of the job has not answered for {seconds:.0f} s: the "
                    "node of rank 0 cannot be reached (heartbeat_timeout)"
                )
                self._end_if_due(now)

    def _poll(self, now: float) -> None:
        if now - self._polled > 5 * POLL:  # this process was stopped, perhaps the others too
            self._heard = now
        self._polled = now
        self._store.add(f"beat {self._rank}", 1)
        if self._asks_to_stop and not self._is_asked_to_stop:
            self._store.set("stop", str(self._rank))
        self._is_asked_to_stop = self._store.check(["stop"])
        if self._cause is None:
            self._listen(now)
        if self._cause is None and self._store.check(["cause"]):
            self._learn(self._store.get("cause").decode(errors="replace"))

    def _listen(self, now: float) -> None:
        """Notice if the next rank has no heartbeat; each watches one, to spare the store."""
        following = (self._rank + 1) % self._size
        beat = self._count(following)
        if beat != self._beat:
            self._beat, self._heard = beat, now
        elif now - self._heard > self._limit:
            self._store.add("ended", 1)
            self._publish(
                self._named(
                    following,
                    f"has had no heartbeat for {now - self._heard:.0f} s: killed, stopped, or its "
                    "node is gone (heartbeat_timeout)",
                )
            )

    def _end_if_due(self, now: float) -> None:
        if self._cause is None or self._closing.is_set():
            return
        waited = now - self._known_since
        if self._has_failed:
            if waited > FAILING_GRACE and self._others_have_ended():
                self.end()
        elif waited > GRACE:
            self.end()

    def _others_have_ended(self) -> bool:
        if self._is_cut_off:
            return True
        try:
            return int(self._store.add("ended", 0)) > 0
        except RuntimeError:
            return True

    def end(self) -> None:
        """End this process; say where it stands, and why."""
        place = where(sys._current_frames().get(self._training_thread))
        message = f"Rank {self._rank} ends at {place}. Cause: {self._cause}"
        _logger.error("%s", message)
        tell_torchrun(message)
        if not self._is_cut_off:
            with suppress(RuntimeError):
                self._store.add("ended", 1)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the training thread may wait in a collective, where no exception reaches it

    # ---------------------------------------------------------------- both

    def _publish(self, cause: str) -> None:
        """Write the cause, unless another rank has written one."""
        written = self._store.compare_set("cause", "", cause[:_MAX_LEN])
        self._learn(written.decode(errors="replace"))

    def _learn(self, cause: str) -> None:
        if self._cause is None:
            self._note_cause(cause)
            self._store.add("informed", 1)

    def _note_cause(self, cause: str) -> None:
        if self._cause is None:
            self._cause, self._known_since = cause, time.monotonic()

    def _named(self, rank: int, what: str) -> str:
        return f"rank {rank} on {self._store.get(f'host {rank}').decode()} {what}"

    def _count(self, rank: int) -> int:
        return int(self._store.add(f"beat {rank}", 0))


def _in_time(action: Callable[[], None], limit: float) -> None:
    """Run an action of the store, and go on if it takes too long."""

    def run() -> None:
        with suppress(RuntimeError):  # the store is gone
            action()

    thread = threading.Thread(target=run, name="lightning_cp watchdog", daemon=True)
    thread.start()
    thread.join(limit)


def describe(error: BaseException) -> str:
    """Return the type, the message and the place of an error, in one line.

    Example:
        >>> describe(ValueError("2 is not 3"))
        'ValueError: 2 is not 3'
    """
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if error.__traceback__ is None else f"{text} (at {where(error.__traceback__)})"


def where(stack: Any) -> str:
    """Return the innermost place of a traceback or frame that is not in an installed package."""
    if stack is None:
        return "an unknown place"
    is_traceback = isinstance(stack, TracebackType)
    frames = traceback.extract_tb(stack) if is_traceback else traceback.extract_stack(stack)
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    frame = (ours or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _gone(error: RuntimeError) -> str:
    return (
        "the key-value store of the job is gone: rank 0, or torchrun on the first node, has ended "
        f"({describe(error)[:200]})"
    )
