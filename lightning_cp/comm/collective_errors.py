# SPDX-License-Identifier: Apache-2.0
"""Errors that all ranks raise together, and the small collectives that this needs.

A rank that raises alone leaves the others waiting in their next collective. Functions that take
transports work on their groups; the others on all processes of the job.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_cp.comm.transport import Transport, gather
from lightning_cp.private.groups import default_store

T = TypeVar("T")

PATIENCE = timedelta(seconds=60)
"""How long ranks wait for each other before something that all of them must call."""

_MESSAGE_BYTES = 2048

_num_meetings = 0


# ---------------------------------------------------------------- ranks of some groups


def any_rank(flags: Sequence[bool], *groups: Transport) -> list[bool]:
    """Return, for each flag, whether it is set on any rank of the groups, one after the other.

    Example:
        >>> from lightning_cp.comm.transport import LoneTransport
        >>> any_rank([True, False], LoneTransport())
        [True, False]
    """
    for group in groups:
        if group.size == 1:
            continue
        counts = torch.tensor([float(flag) for flag in flags], device=group.device)
        group.all_reduce(counts)
        flags = [count > 0 for count in counts.tolist()]
    return list(flags)


def raise_on_all(action: Callable[[], T], failure: str, *groups: Transport) -> T:
    """Run ``action``; what it raises on a rank is raised there, and ``failure`` on the others.

    That names the rank and its error, if it is in the first group.

    Example:
        >>> from lightning_cp.comm.transport import LoneTransport
        >>> raise_on_all(lambda: 1, "It failed on another rank.", LoneTransport())
        1
    """
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  raised below, after all ranks know
        problem = error
    if not any_rank([problem is not None], *groups)[0]:
        return result
    cause = "" if problem is None else f"{type(problem).__name__}: {problem}"
    causes = gather_texts(cause, groups[0]) if groups else []
    if problem is not None:
        raise problem
    named = (f" Rank {rank} of {len(causes)}: {text}" for rank, text in enumerate(causes) if text)
    raise RuntimeError(failure + next(named, ""))


def gather_texts(text: str, group: Transport) -> list[str]:
    """Return the texts of all ranks, on every rank; long ones are truncated."""
    data = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    texts = gather(torch.tensor(list(data), dtype=torch.uint8, device=group.device), group)
    return [bytes(x).rstrip(b"\0").decode(errors="replace") for x in texts.tolist()]


# ---------------------------------------------------------------- all processes of the job


def rank() -> int:
    """Return this process's rank, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of processes, 1 without a group."""
    return dist.group.WORLD.size() if dist.group.WORLD is not None else 1


def from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, in their order; ``group``: another group of all ranks."""
    values = [value] * size()
    if dist.is_initialized():
        dist.all_gather_object(values, value, group=group)
    return values


def from_rank_0(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on all ranks; ``group``: another group of all ranks."""
    return from_rank(0, value, group)


def from_rank(source: int, value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return one rank's value on all ranks; ``group``: another group of all ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, source, group)
    return box[0]


def meet(what: str, cure: str) -> None:
    """Wait until all ranks call this function; raise if some do not, instead of waiting forever.

    Args:
        what: the call that all ranks must make, for the message.
        cure: what to do instead, for the message.
    """
    global _num_meetings
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or group.size() == 1:
        return
    store, key = default_store(), f"lightning_cp/meeting {_num_meetings}"
    store.add(f"{key}/{rank()}", 1)
    if store.add(key, 1) == group.size():
        store.set(f"{key}/all", "")
    try:
        store.wait([f"{key}/all"], PATIENCE)
    except RuntimeError as error:
        missing = [str(r) for r in range(group.size()) if store.add(f"{key}/{r}", 0) == 0]
        store.add(f"{key}/{rank()}", -1)
        store.add(key, -1)
        raise RuntimeError(
            f"{what} was called on rank {rank()}, but for {PATIENCE.total_seconds():.0f} s not on "
            f"rank {', '.join(missing)}. {cure}"
        ) from error
    _num_meetings += 1


def together(
    action: Callable[[], T],
    failure: str,
    keep: tuple[type[Exception], ...] = (),
    group: dist.ProcessGroup | None = None,
) -> T:
    """Run ``action`` on all ranks; if it fails on one, raise on all, naming the rank and the cause.

    Args:
        action: the function to run.
        failure: what to add to the message.
        keep: errors that are raised unchanged on the ranks where they arose.
        group: another group of all ranks, for threads that do not wait for the others.
    """
    local_error: BaseException | None = None
    causes: dict[int, str] = {}
    try:
        result = action()
    except CheckpointException as error:  # a BaseException, and the same on all ranks
        local_error = error
        causes = {r: f"{type(e).__name__}: {e}" for r, (e, _) in error.failures.items()}
    except Exception as error:  # noqa: BLE001  raised below, on all ranks
        local_error = error
        causes = {rank(): f"{type(error).__name__}: {error}"}
    causes = {r: cause for known in from_all(causes, group) for r, cause in known.items()}
    if not causes:
        return result
    if isinstance(local_error, keep):
        raise local_error
    failed, cause = min(causes.items())
    others = f" (and {len(causes) - 1} other ranks)" if len(causes) > 1 else ""
    raise RuntimeError(f"Rank {failed}{others} failed: {cause}. {failure}") from local_error
