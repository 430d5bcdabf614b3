# SPDX-License-Identifier: Apache-2.0
"""Ranks that succeed or fail together."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_cp.torch_private import default_store

T = TypeVar("T")

PATIENCE = timedelta(seconds=60)
"""How long ranks wait for each other before something that all of them must call."""

_num_meetings = 0


def rank() -> int:
    """Return this process's rank, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of processes, 1 without a group."""
    return dist.group.WORLD.size() if dist.group.WORLD is not None else 1


def from_all(value: T) -> list[T]:
    """Return the values of all ranks, in their order."""
    values = [value] * size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def from_rank_0(value: T) -> T:
    """Return rank 0's value on all ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def meet(what: str, cure: str) -> None:
    """Wait for all ranks to call the same; raise where some do not, which would wait for ever.

    Args:
        what: that all must call.
        cure: what to do instead.
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


def together(action: Callable[[], T], failure: str, keep: tuple[type[Exception], ...] = ()) -> T:
    """Run ``action`` on all ranks; if it fails on one, raise on all, naming the rank and the cause.

    Args:
        action: what to do.
        failure: what to say besides.
        keep: errors that are raised as they are where they arose.
    """
    own: BaseException | None = None
    causes: dict[int, str] = {}
    try:
        result = action()
    except CheckpointException as error:  # no Exception, and the same on all ranks
        own = error
        causes = {r: f"{type(e).__name__}: {e}" for r, (e, _) in error.failures.items()}
    except Exception as error:  # noqa: BLE001  whatever it is, the others must hear of it
        own = error
        causes = {rank(): f"{type(error).__name__}: {error}"}
    causes = {r: cause for known in from_all(causes) for r, cause in known.items()}
    if not causes:
        return result
    if isinstance(own, keep):
        raise own
    failed, cause = min(causes.items())
    others = f" (and {len(causes) - 1} other ranks)" if len(causes) > 1 else ""
    raise RuntimeError(f"Rank {failed}{others} failed: {cause}. {failure}") from own
