# SPDX-License-Identifier: Apache-2.0
"""Cut a tensor along its sequence and put it back; shift labels on whole rows.

Works on any tensor and any layout; which tensors of a batch are cut is `batch.py`'s business.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_cp.comm.transport import Transport
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.geometry.ranges import Range
from lightning_cp.guards import enter_backward_of
from lightning_cp.step import IGNORED_LABEL
from lightning_cp.torch_private import outside_graphs


def shard(x: Tensor, dim: int, *, layout: Layout, rank: int, fill: float = 0) -> Tensor:
    """Return what ``rank`` holds of ``x`` along ``dim``; differentiable.

    What ``x`` has beyond the row is left out.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> shard(torch.arange(7), 0, layout=build_layout("zigzag", seq_len=7, cp_size=2), rank=0)
        tensor([0, 1, 6, 0])
    """
    row = Range(0, layout.seq_len)
    parts = []
    for held in layout.ranges(rank):
        kept = held.meet(row)
        parts.append(x.narrow(dim, min(kept.start, layout.seq_len), kept.size))
        if kept.size < held.size and layout.shows_padding:
            shape = list(x.shape)
            shape[dim] = held.size - kept.size
            parts.append(x.new_full(shape, fill))
    return torch.cat(parts, dim)


@outside_graphs
def unshard(x: Tensor, dim: int, *, layout: Layout, transport: Transport, uid: int = 0) -> Tensor:
    """Return whole rows in their original order, without padding; differentiable.

    Gradients of all ranks are summed. Where every rank goes on to the same loss, each local
    gradient is so cp_size times its share, which averaging over ranks undoes.

    Args:
        x: this rank's part.
        dim: the sequence dim.
        layout: who owns what.
        transport: the ranks that share the row.
        uid: the step that ``x`` belongs to.
    """
    if not layout.shows_padding:
        x = pad_end(x, dim, layout.local_len - x.shape[dim])
    whole: Tensor = _Unshard.apply(  # type: ignore[no-untyped-call]
        x, dim % x.dim(), layout, transport, uid
    )
    return whole


def pad_end(x: Tensor, dim: int, size: int) -> Tensor:
    """Return ``x`` with so many zeros after its end along ``dim``; differentiable."""
    if size == 0:
        return x
    shape = list(x.shape)
    shape[dim] = size
    return torch.cat([x, x.new_zeros(shape)], dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, layout: Layout, transport: Transport, uid: int
    ) -> Tensor:
        ctx.dim, ctx.layout, ctx.transport, ctx.uid = dim, layout, transport, uid
        # The sequence goes first, so that the shards lie end to end.
        local = x.movedim(dim, 0).contiguous()
        gathered = local.new_empty(transport.size, *local.shape)
        transport.all_gather(gathered, local)()
        order = layout.order.to(x.device)
        return gathered.flatten(0, 1).index_select(0, order).movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        enter_backward_of(ctx.uid)
        layout, transport = ctx.layout, ctx.transport
        dtype = torch.promote_types(grad.dtype, torch.float32)
        whole = grad.movedim(ctx.dim, 0).to(dtype)
        shards = whole.new_zeros(layout.padded_len, *whole.shape[1:])
        shards.index_copy_(0, layout.order.to(grad.device), whole)
        shards = shards.view(transport.size, layout.local_len, *whole.shape[1:])
        local = torch.empty_like(shards[0])
        transport.reduce_scatter(local, shards)()
        return local.to(grad.dtype).movedim(0, ctx.dim), None, None, None, None


def shift_labels(labels: Tensor, documents: Tensor | None) -> Tensor:
    """Return, for each token, the label of the next one of its document; -100 where there is none.

    Args:
        labels: [B, S], whole rows.
        documents: [B, S] or [1, S] ids, or None where each row is one document.

    Example:
        >>> shift_labels(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]])).tolist()
        [[6, -100, 8, -100]]
    """
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[:, :-1] = labels[:, 1:]
    if documents is not None:
        same = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] != NO_DOCUMENT)
        shifted[:, :-1].masked_fill_(~same, IGNORED_LABEL)
    return shifted
