# SPDX-License-Identifier: Apache-2.0
"""The loss: a mean over the tokens of the whole batch, the same number on every rank.

With s_r the sum over the valid tokens of rank r, R ranks and N valid tokens among them all:

    loss = sum_r s_r / N          forward, on every rank (one all-reduce)
    d loss / d s_r = R / N        backward, on rank r

DDP and FSDP2 average gradients over the ranks: mean_r (R / N) ds_r/dw = sum_r ds_r/dw / N, which is
the gradient of one process that saw the whole batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_cp.collectives import Transport
from lightning_cp.compat import in_backward, outside_graphs
from lightning_cp.context import (
    IGNORED_LABEL,
    LossMark,
    Step,
    check_mark,
    check_recompute,
    current,
    enter_backward_of,
)
from lightning_cp.sequence import shard, shift_labels, unshard


@outside_graphs
def token_mean(logits: Tensor, labels: Tensor, *, shift: bool = True) -> Tensor:
    """Return the mean cross entropy over the valid tokens of the whole batch.

    Inside a step every rank gets the same value, and gradients averaged over the ranks are exact,
    however unevenly the labels are spread. Outside, rows are whole. No valid label: 0.

    Args:
        logits: [B, L, V].
        labels: [B, L], cut like the logits and not shifted; -100 is ignored.
        shift: score each token against the label of the next one, also across ranks, never across
            documents. False scores it against its own.

    Example:
        >>> logits, labels = torch.zeros(1, 4, 8), torch.tensor([[1, 2, -100, 3]])
        >>> round(token_mean(logits, labels).exp().item(), 4)  # a blind guess among 8
        8.0
    """
    if logits.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ValueError(
            "token_mean() needs logits [batch, tokens, classes] and labels [batch, tokens]; it got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}. Give labels unshifted, cut like the "
            "logits: local['labels']."
        )
    step = current()
    check_recompute(step)
    targets = _targets(labels, shift, step)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total, by_position = _summed(wide, targets, step)
    return global_mean(total, (targets != IGNORED_LABEL).sum(), by_position=by_position)


def _summed(logits: Tensor, targets: Tensor, step: Step | None) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross entropy, and by position if that was asked for."""
    asked = step is not None and bool(step.position_edges)
    losses = cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="none" if asked else "sum",
    )
    if step is None or not asked:
        return losses, None
    edges = torch.tensor(step.position_edges, device=losses.device)
    places = step.layout.positions(step.cp_rank).to(losses.device)
    bucket = torch.bucketize(places, edges, right=True).expand_as(targets).flatten()
    pairs = torch.stack([losses.detach().double(), (targets.flatten() != IGNORED_LABEL).double()])
    sums = pairs.new_zeros(2, len(edges) + 1).index_add_(1, bucket, pairs)
    return losses.sum(), sums


def global_mean(total: Tensor, count: Tensor, *, by_position: Tensor | None = None) -> Tensor:
    """Return the mean over all ranks of a loss that this rank has summed over its own tokens.

    For losses of one's own: give the sum over this rank's tokens and how many they are. Inside a
    step every rank gets the same value, and gradients averaged over the ranks are exact.

    Args:
        total: the sum of this rank's losses, a scalar.
        count: how many tokens it is the sum of, a scalar; may be 0.
        by_position: the same in buckets of positions, for reports.

    Example:
        >>> global_mean(torch.tensor(6.0), torch.tensor(4))
        tensor(1.5000)
    """
    step = current()
    check_recompute(step)
    mean, num_tokens = _GlobalMean.apply(total, count, step)  # type: ignore[no-untyped-call]
    if step is not None and not in_backward():
        step.losses.append(LossMark(mean.detach(), num_tokens, by_position))
    result: Tensor = mean
    return result


def _targets(labels: Tensor, shift: bool, step: Step | None) -> Tensor:
    """Return what each local token is scored against.

    Labels are gathered, for the next token may be another rank's. The step could have shifted them
    beforehand; but then labels that the user edits on one rank only would be missed there, or
    send the ranks into different collectives.
    """
    if step is None:
        return shift_labels(labels, None) if shift else labels
    layout = step.layout
    if labels.shape[1] != layout.local_len:
        raise ValueError(
            f"token_mean() got {labels.shape[1]} tokens per row inside a step whose ranks hold "
            f"{layout.local_len} each. Whole rows go under `with cp.paused():`."
        )
    if not shift:
        ours = layout.positions(step.cp_rank).to(labels.device) >= layout.seq_len
        return labels.masked_fill(ours, IGNORED_LABEL)
    whole = unshard(labels, 1, layout=layout, transport=step.groups.context)
    documents = step.documents
    ids = None if documents is None else torch.from_numpy(documents).to(labels.device)
    shifted = shift_labels(whole, ids)
    return shard(shifted, 1, layout=layout, rank=step.cp_rank, fill=IGNORED_LABEL)


def _transports(step: Step | None) -> tuple[Transport, ...]:
    """Return the groups over which the loss is one mean.

    In training also the data axis, whose ranks take the same number of steps. In evaluation their
    loaders may be uneven, and waiting for a rank that has finished would be for ever.
    """
    if step is None:
        return ()
    return (step.groups.context, step.groups.data) if step.training else (step.groups.context,)


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, step: Step | None) -> tuple[Tensor, Tensor]:
        # One message for both; float64 counts exactly.
        sums = torch.stack([total.double(), count.double()])
        num_ranks = 1
        for transport in _transports(step):
            transport.all_reduce(sums)
            num_ranks *= transport.size
        num_tokens = sums[1].clamp(min=1)
        ctx.uid = 0 if step is None else step.uid
        ctx.save_for_backward(num_ranks / num_tokens, torch.tensor(ctx.uid))
        count = sums[1].clone()
        ctx.mark_non_differentiable(count)
        return (sums[0] / num_tokens).to(total.dtype), count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        factor, mark = ctx.saved_tensors
        check_mark(mark, ctx.uid)
        enter_backward_of(ctx.uid)
        return grad * factor.to(grad.dtype), None, None
