# SPDX-License-Identifier: Apache-2.0
"""What differs between torch versions, and the private names that we lean on.

Checked against torch 2.11, 2.13 and 2.15. Nothing else in the package may touch a private name.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start an all-gather into one tensor.

    2.13 renamed ``all_gather_into_tensor`` and made the old name warn; 2.11 has only the old one.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def reduce_scatter_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start a summing reduce-scatter from one tensor; renamed like the all-gather."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def in_backward() -> bool:
    """Say whether autograd is running a backward pass on this thread (recompute included)."""
    return bool(torch._C._current_graph_task_id() != -1)
