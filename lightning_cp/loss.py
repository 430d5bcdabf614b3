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
from lightning_cp.context import IGNORED_LABEL, Step, current
from lightning_cp.sequence import shard, shift_labels, unshard


def token_mean(logits: Tensor, labels: Tensor, *, shift: bool = True) -> Tensor:
    """Return the mean cross entropy over the valid tokens of the whole batch.

    Inside a step every rank gets the same value, and gradients averaged over the ranks are exact,
    however unevenly the labels are spread. Outside, rows are whole. No valid label: 0.

    Args:
        logits: [B, L, V].
        labels: [B, L], cut like the logits and not shifted; -100 is ignored. Usually what the step
            yielded; other labels work too, at the price of gathering them.
        shift: score each token against the label of the next one, also across ranks, never across
            documents. False scores it against its own.

    Example:
        >>> logits, labels = torch.zeros(1, 4, 8), torch.tensor([[1, 2, -100, 3]])
        >>> round(token_mean(logits, labels).exp().item(), 4)  # a blind guess among 8
        8.0
    """
    if logits.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ValueError(
            f"token_mean() needs logits [batch, tokens, classes] and labels [batch, tokens]; it "
            f"got {tuple(logits.shape)} and {tuple(labels.shape)}. Give labels unshifted, cut like "
            "the logits: local['labels']."
        )
    step = current()
    targets, count = _targets(labels, shift, step)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return _global_mean(total, count, step)


def _targets(labels: Tensor, shift: bool, step: Step | None) -> tuple[Tensor, Tensor]:
    """Return what each local token is scored against, and how many tokens count in all."""
    if step is None:
        targets = shift_labels(labels, None) if shift else labels
        return targets, _num_valid(targets)
    known = step.targets
    if known is not None and known.are(labels):
        return (known.shifted, known.num_shifted) if shift else (labels, known.num_plain)
    if labels.shape[1] != step.layout.local_len:
        raise ValueError(
            f"token_mean() got {labels.shape[1]} tokens per row inside a step whose ranks hold "
            f"{step.layout.local_len} each. Whole rows go under `with cp.paused():`."
        )
    context, layout = step.groups.context, step.layout
    targets = labels
    if shift:
        whole = unshard(labels, 1, layout=layout, transport=context)
        documents = step.documents
        ids = None if documents is None else torch.from_numpy(documents).to(labels.device)
        shifted = shift_labels(whole, ids)
        targets = shard(shifted, 1, layout=layout, rank=step.cp_rank, fill=IGNORED_LABEL)
    count = _num_valid(targets)
    for transport in _loss_transports(step):
        transport.all_reduce(count)
    return targets, count


def _num_valid(targets: Tensor) -> Tensor:
    return (targets != IGNORED_LABEL).sum()


def _loss_transports(step: Step) -> tuple[Transport, ...]:
    """Return the groups over which the loss is one mean.

    In training also the data axis, whose ranks take the same number of steps. In evaluation their
    loaders may be uneven, and waiting for a rank that has finished would be for ever.
    """
    return (step.groups.context, step.groups.data) if step.training else (step.groups.context,)


def _global_mean(total: Tensor, count: Tensor, step: Step | None) -> Tensor:
    transports = () if step is None else _loss_transports(step)
    mean: Tensor = _GlobalMean.apply(total, count, transports)  # type: ignore[no-untyped-call]
    return mean


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, total: Tensor, count: Tensor, transports: tuple[Transport, ...]
    ) -> Tensor:
        num_tokens = count.clamp(min=1).to(total.dtype)
        num_ranks = 1
        total = total.clone()
        for transport in transports:
            transport.all_reduce(total)
            num_ranks *= transport.size
        ctx.save_for_backward(num_ranks / num_tokens)
        return total / num_tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None, None
