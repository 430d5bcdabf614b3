# SPDX-License-Identifier: Apache-2.0
"""Ranks that succeed or fail together."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


def rank() -> int:
    """Return this process's rank, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_rank_0(value: T) -> T:
    """Return rank 0's value on all ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


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
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        heard: list[dict[int, str]] = [{}] * group.size()
        dist.all_gather_object(heard, causes)
        causes = {r: cause for known in heard for r, cause in known.items()}
    if not causes:
        return result
    if isinstance(own, keep):
        raise own
    failed, cause = min(causes.items())
    others = f" (and {len(causes) - 1} other ranks)" if len(causes) > 1 else ""
    raise RuntimeError(f"Rank {failed}{others} failed: {cause}. {failure}") from own
