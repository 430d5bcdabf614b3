# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits whose classes are sharded over tensor ranks.

Each rank has the logits of some classes. Ranks exchange three numbers per token: the largest logit,
the sum of exponentials, and the logit of the label, which one of them has.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from lightning_cp.private.modules import local_slices
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import IGNORED_LABEL


def sharded_cross_entropy(logits: DTensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token in float32 or wider, the same on all ranks.

    Args:
        logits: [B, L, V], sharded over one mesh axis along V.
        targets: [B, L], the same on all ranks; -100 is ignored.
    """
    last = logits.dim() - 1
    dims = [placement.dim % logits.dim() for placement in logits.placements if placement.is_shard()]  # type: ignore[attr-defined]
    if logits.device_mesh.ndim != 1 or dims != [last] or type(logits.placements[0]) is not Shard:
        raise ValueError(
            f"Logits are a DTensor with placements {logits.placements} on {logits.device_mesh}. "
            "Shard them along the classes over one axis, Shard(-1), or return full logits: "
            "ColwiseParallel(output_layouts=Replicate())."
        )
    start = local_slices(logits)[-1].start
    local = logits.to_local()
    wide = local.to(accumulation_dtype(local.dtype)).flatten(0, 1)
    group = logits.device_mesh.get_group()
    losses: Tensor = _CrossEntropy.apply(wide, targets.flatten(), start, group)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, start: int, group: dist.ProcessGroup
    ) -> Tensor:
        # A rank may have no classes at all: 5 of them over 4 ranks.
        largest = logits.new_full(targets.shape, -torch.inf)
        if logits.shape[1]:
            largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest[:, None]).exp_()
        is_here = (targets >= start) & (targets < start + logits.shape[1])
        rows = is_here.nonzero()[:, 0]
        classes = targets[rows] - start
        own = torch.zeros_like(largest)
        own[rows] = logits[rows, classes]
        sums = torch.stack([exponentials.sum(1), own])
        dist.all_reduce(sums, group=group)
        total, own = sums
        is_valid = targets != IGNORED_LABEL
        ctx.save_for_backward(exponentials.div_(total[:, None]), rows, classes, is_valid)
        return torch.where(is_valid, total.log() + largest - own, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, rows, classes, is_valid = ctx.saved_tensors
        factor = torch.where(is_valid, grad, 0)[:, None]
        gradient = probabilities * factor
        gradient[rows, classes] -= factor[rows, 0]
        return gradient, None, None, None
