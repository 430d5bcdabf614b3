# SPDX-License-Identifier: Apache-2.0
"""The key-value store of a job that torchrun has started, also after it has restarted processes.

torchrun keeps its store when it restarts processes, and new ones would read the addresses of dead
ones there. Its count of restarts does not tell attempts apart: a node counts only restarts after
failures of its own.
"""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]


def agent_store(rank: int, size: int, timeout: timedelta) -> Any:
    """Return torchrun's store, with names that no earlier attempt has used. Collective.

    Returns:
        None if processes were not started by torchrun, or if it is told not to share its store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=False,
        timeout=timeout,
        wait_for_workers=False,
    )
    return PrefixStore(agree_on_attempt(store, rank, size, timeout), store)


def agree_on_attempt(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name for this attempt, the same on all ranks and never used before. Collective.

    Rank 0 draws it, and answers every rank that asks under a name of its own. What ranks of earlier
    attempts have asked stands in the store as well: rank 0 goes on until each rank has confirmed.

    Example:
        >>> from torch.distributed import HashStore
        >>> agree_on_attempt(HashStore(), 0, 1, timedelta(seconds=1))[:20]
        'lightning_cp/attempt'
    """
    asking = uuid.uuid4().hex
    store.set(f"lightning_cp/asking {rank}", asking)
    if rank > 0:
        answer: str = store.get(f"lightning_cp/answer {asking}").decode()
        store.set(f"{answer}/confirmed {rank}", "")
        return answer
    name = f"lightning_cp/attempt {asking}"
    missing = set(range(1, size))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"lightning_cp/asking {other}"]):
                theirs = store.get(f"lightning_cp/asking {other}").decode()
                store.set(f"lightning_cp/answer {theirs}", name)
            if store.check([f"{name}/confirmed {other}"]):
                missing.remove(other)
        if time.monotonic() > end:
            raise RuntimeError(
                f"{len(missing)} of {size} ranks have not connected within "
                f"{timeout.total_seconds():.0f} s, the first of them rank {min(missing)}. Look for "
                "errors in their output; torchrun must run on all nodes. If a node has joined "
                "that was not there at first, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all."
            )
        time.sleep(0.05)
    return name
