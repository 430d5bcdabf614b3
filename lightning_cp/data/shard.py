# SPDX-License-Identifier: Apache-2.0
"""Sharding and unsharding of tensors along their sequence dim; labels of the next token.

Works on any tensor and any layout; `batch.py` decides which tensors of a batch are sharded.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_cp.comm.transport import Transport, to_device
from lightning_cp.data.outputs import OutputLeaf
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.geometry.ranges import Range
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.step.guards import enter_backward_of
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import IGNORED_LABEL, Opened, Step, not_sharded


def shard(x: Tensor, dim: int, *, layout: Layout, rank: int, fill: float = 0) -> Tensor:
    """Return the shard of ``x`` along ``dim`` that ``rank`` holds; differentiable.

    What ``x`` holds beyond the sequence length is left out.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> shard(torch.arange(7), 0, layout=build_layout("zigzag", seq_len=7, cp_size=2), rank=0)
        tensor([0, 1, 6, 0])
    """
    sequence = Range(0, layout.seq_len)
    parts = []
    for owned in layout.ranges(rank):
        real = owned.meet(sequence)
        parts.append(x.narrow(dim, min(real.start, layout.seq_len), real.size))
        if real.size < owned.size and layout.shows_padding:
            shape = list(x.shape)
            shape[dim] = owned.size - real.size
            parts.append(x.new_full(shape, fill))
    return torch.cat(parts, dim)


@outside_graphs
def unshard(x: Tensor, dim: int, *, layout: Layout, transport: Transport, uid: int = 0) -> Tensor:
    """Return full sequences in their original order, without padding; differentiable.

    Gradients of all ranks are summed. If every rank computes the same loss, each local gradient is
    therefore cp_size times its share, which averaging over ranks undoes.

    Args:
        x: this rank's shard.
        dim: the sequence dim.
        layout: which rank owns which tokens.
        transport: the context ranks.
        uid: the step that ``x`` belongs to.
    """
    if not layout.shows_padding:
        x = pad_end(x, dim, layout.local_len - x.shape[dim])
    full: Tensor = _Unshard.apply(  # type: ignore[no-untyped-call]
        x, dim % x.dim(), layout, transport, uid
    )
    return full


def full_tokens(x: Tensor, step: Step, dim: int = 1) -> Tensor:
    """Return the tokens of all ranks of a step, in their order; see `unshard`."""
    return unshard(x, dim, layout=step.layout, transport=step.groups.context, uid=step.uid)


def own_tokens(x: Tensor, step: Step, dim: int = 1, *, fill: float = 0) -> Tensor:
    """Return this rank's tokens of full sequences; see `shard`."""
    return shard(x, dim, layout=step.layout, rank=step.cp_rank, fill=fill)


def unshard_value(x: Any, dim: int, step: Opened) -> Any:
    """Return a tensor or an array of this rank's tokens as full sequences, on its own device."""
    if not isinstance(step, Step):
        raise not_sharded()
    local = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    check_local(local, dim, step)
    transport = step.groups.context
    moved = local.to(transport.device) if transport.size > 1 else local
    full = full_tokens(moved, step, dim)
    full = full.to(local.device)
    return full.numpy() if isinstance(x, np.ndarray) else full


def check_local(x: Tensor, dim: int, step: Step) -> None:
    """Raise if a tensor does not hold this rank's tokens along ``dim``."""
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != step.tensor_len:
        raise ValueError(
            f"unshard(x, dim={dim}) got x of shape {tuple(x.shape)}, but this rank holds "
            f"{step.tensor_len} tokens per sequence: give the dim that has that length."
        )


def token_dim(leaf: OutputLeaf, step: Opened) -> int | None:
    """Return the sequence dim of a value that is known to hold tokens; None for others."""
    x = leaf.value
    if not isinstance(x, Tensor | np.ndarray) or not isinstance(step, Step):
        return None
    known = step.shard_of(x)
    dim = step.config.sequence_dims.get(leaf.key, leaf.dim if known is None else known.leaf.dim)
    if dim is None or not -x.ndim <= dim < x.ndim:
        return None
    # Full already, by unshard(): then it is the same on all ranks.
    is_full = x.shape[dim] == step.layout.seq_len != step.tensor_len
    return None if is_full else dim


def pad_end(x: Tensor, dim: int, size: int) -> Tensor:
    """Return ``x`` with ``size`` zeros appended along ``dim``; differentiable."""
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
        # The sequence dim first, so that the gathered shards are concatenated along it.
        local = x.movedim(dim, 0).contiguous()
        gathered = local.new_empty(transport.size, *local.shape)
        transport.all_gather(gathered, local)()
        order = to_device(layout.order, x.device)
        return gathered.flatten(0, 1).index_select(0, order).movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        enter_backward_of(ctx.uid)
        layout, transport = ctx.layout, ctx.transport
        dtype = accumulation_dtype(grad.dtype)
        full = grad.movedim(ctx.dim, 0).to(dtype)
        shards = full.new_zeros(layout.padded_len, *full.shape[1:])
        shards.index_copy_(0, to_device(layout.order, grad.device), full)
        shards = shards.view(transport.size, layout.local_len, *full.shape[1:])
        local = torch.empty_like(shards[0])
        transport.reduce_scatter(local, shards)()
        return local.to(grad.dtype).movedim(0, ctx.dim), None, None, None, None


def shift_labels(labels: Tensor, documents: Tensor | None) -> Tensor:
    """Return, for each token, the label of the next one of its document; -100 where there is none.

    Args:
        labels: [B, S], full sequences.
        documents: [B, S] or [1, S] ids, or None where each sequence is one document.

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
