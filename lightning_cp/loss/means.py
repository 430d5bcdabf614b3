# SPDX-License-Identifier: Apache-2.0
"""The loss: a mean over the tokens of the global batch, the same value on every rank.

With s_r the sum over the valid tokens of rank r, R ranks and N valid tokens on all ranks:

    loss = sum_r s_r / N          forward, on every rank (one all-reduce)
    d loss / d s_r = R / N        backward, on rank r

DDP and FSDP2 average gradients over the ranks: mean_r (R / N) ds_r/dw = sum_r ds_r/dw / N, which is
the gradient of one process that holds the global batch.

A `sample_mean` is over the data ranks alone, since each context rank computes all of it; backward
of what unshards its inputs has summed over the context ranks what is then averaged.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.comm.transport import Transport, to_device
from lightning_cp.data import outputs
from lightning_cp.data.consistency import find_differing
from lightning_cp.data.shard import full_tokens, own_tokens, shift_labels
from lightning_cp.loss.chunked_loss import (
    MAX_CHUNK_LOGITS,
    ChunkedInputs,
    auto_chunk_len,
    chunked_sum,
    cross_entropy,
    unique_leaves,
)
from lightning_cp.private.autograd import depends_on, in_backward, node_number
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.step.active_step import opened
from lightning_cp.step.guards import check_mark, check_recompute, enter_backward_of, step_of_call
from lightning_cp.step.step import IGNORED_LABEL, LossMark, Opened, Step

__all__ = [
    "MAX_CHUNK_LOGITS",
    "auto_chunk_len",
    "build_problem",
    "check_label_shape",
    "chunked_token_mean",
    "global_mean",
    "local_targets",
    "sample_mean",
    "scored_labels",
    "token_mean",
]


@outside_graphs
def token_mean(logits: Tensor, labels: Tensor, *, shift: bool = True) -> Tensor:
    """Return the mean cross entropy over the valid tokens of the global batch.

    Inside a step every rank gets the same value, and gradients averaged over the ranks are exact,
    however unevenly labels are distributed. Outside a step, sequences are full. Without a valid
    label, the loss is 0.

    Args:
        logits: [B, L, V].
        labels: [B, L], sharded like the logits and not shifted; -100 is ignored.
        shift: score each token against the label of the next one, also across ranks, never across
            documents. False scores it against its own label.

    Example:
        >>> logits, labels = torch.zeros(1, 4, 8), torch.tensor([[1, 2, -100, 3]])
        >>> round(token_mean(logits, labels).exp().item(), 4)  # a uniform guess among 8
        8.0
    """
    check_label_shape("token_mean() needs logits [batch, tokens, classes]", logits, labels)
    step = step_of_call()
    targets = scored_labels(labels, step, shift=shift)
    per_token = step is not None and bool(step.position_edges)
    losses = cross_entropy(logits, targets, "none" if per_token else "sum")
    by_position = _by_position(losses, targets, step)
    total = losses.sum() if per_token else losses
    return global_mean(total, _num_valid(targets), by_position=by_position)


@outside_graphs
def chunked_token_mean(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    parameters: Sequence[Tensor],
    shift: bool = True,
    chunk_len: int | None = None,
) -> Tensor:
    """Return `token_mean` of ``head(hidden)`` without holding the logits of all tokens at once.

    Gradients are computed in forward, chunk by chunk, and saved: as much memory as ``hidden`` and
    the parameters take, the latter in float32 if there are several chunks. Activation checkpointing
    around it would do that work twice.

    Args:
        head: computes logits [1, n, V] from hidden states [1, n, d], each token separately. It is
            called on chunks of the tokens of all samples, concatenated.
        hidden: [B, L, d].
        labels: as in `token_mean`.
        parameters: the weights that ``head`` computes with; others may be among them. Their
            gradients are summed in float32. With FSDP2, call this inside the forward of the module
            that is sharded as one unit with them, where they are unsharded.
        shift: as in `token_mean`.
        chunk_len: maximal number of tokens that ``head`` gets at once; chunks have about equal
            length. By default their logits take at most 1 GiB in float32 (256 MiB for float16,
            where larger sums overflow), for which ``head`` is first called on one token; working
            memory is a few times that.

    Example:
        >>> head, hidden = torch.nn.Linear(4, 8), torch.randn(1, 6, 4)
        >>> labels, weights = torch.tensor([[1, 2, -100, 3, 0, 7]]), list(head.parameters())
        >>> loss = chunked_token_mean(head, hidden, labels, parameters=weights, chunk_len=2)
        >>> torch.allclose(loss, token_mean(head(hidden), labels))
        True
    """
    check_label_shape(
        "chunked_token_mean() needs hidden states [batch, tokens, width]", hidden, labels
    )
    step = step_of_call()
    targets = scored_labels(labels, step, shift=shift)
    problem = build_problem(
        head, hidden, targets, parameters, chunk_len, step, caller="chunked_token_mean"
    )
    total, losses = chunked_sum(problem, hidden)
    by_position = _by_position(losses, targets, step)
    return global_mean(total, _num_valid(targets), by_position=by_position)


def build_problem(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    parameters: Sequence[Tensor],
    chunk_len: int | None,
    step: Step | None,
    *,
    caller: str,
) -> ChunkedInputs:
    """Check the arguments of a loss in chunks, and collect them."""
    if chunk_len is not None and chunk_len < 1:
        raise ValueError(
            f"{caller}(chunk_len={chunk_len}): pass a number of tokens above 0, or None "
            "for chunks of 1 GiB of logits."
        )
    # The same number of chunks on all context ranks: a head may run collectives for each chunk.
    num_tokens = hidden.shape[0] * (hidden.shape[1] if step is None else step.layout.local_len)
    return ChunkedInputs(
        head=head,
        targets=targets.flatten(),
        leaves=unique_leaves(parameters, caller=caller),
        chunk_len=chunk_len,
        num_tokens=num_tokens,
        grad=torch.is_grad_enabled(),
        caller=caller,
    )


def check_label_shape(rule: str, x: Tensor, labels: Tensor) -> None:
    """Raise unless labels [B, L] belong to the tokens of ``x`` [B, L, ...]."""
    if x.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ValueError(
            f"{rule} and labels [batch, tokens]; it got {tuple(x.shape)} and "
            f"{tuple(labels.shape)}. Pass labels unshifted, sharded like the rest of the batch: "
            "local['labels']."
        )


def _num_valid(targets: Tensor) -> Tensor:
    return (targets != IGNORED_LABEL).sum()


def _by_position(losses: Tensor, targets: Tensor, step: Step | None) -> Tensor | None:
    """Return loss sums and token counts per bucket of positions, if the step has buckets."""
    if step is None or not step.position_edges:
        return None
    edges = torch.tensor(step.position_edges, device=losses.device)
    positions = step.layout.positions(step.cp_rank)[: targets.shape[1]].to(losses.device)
    bucket = torch.bucketize(positions, edges, right=True).expand_as(targets).flatten()
    pairs = torch.stack([losses.detach().double(), (targets.flatten() != IGNORED_LABEL).double()])
    return pairs.new_zeros(2, len(edges) + 1).index_add_(1, bucket, pairs)


def global_mean(
    total: Tensor,
    count: Tensor,
    *,
    by_position: Tensor | None = None,
    unit: str = "tokens",
) -> Tensor:
    """Return the mean over all ranks of a loss that this rank has summed over its tokens.

    For custom losses: pass the sum over this rank's tokens and their number. Inside a step every
    rank gets the same value, and gradients averaged over the ranks are exact.

    Args:
        total: the sum of this rank's losses, a scalar.
        count: the number of tokens in the sum, a scalar; may be 0.
        by_position: sums and counts per bucket of positions, for logging.
        unit: what is counted. The exponential of a mean per token is logged as perplexity, that of
            others is not.

    Example:
        >>> global_mean(torch.tensor(6.0), torch.tensor(4))
        tensor(1.5000)
    """
    if total.dim() or count.dim():
        raise ValueError(
            "global_mean() needs two scalars, the sum over this rank's tokens and their number; it "
            f"got shapes {tuple(total.shape)} and {tuple(count.shape)}. Sum them up: losses.sum()."
        )
    step = step_of_call()
    groups = () if step is None else step.loss_groups
    mean, num_tokens = _mean_over(groups, total, count, step)
    if step is not None and not in_backward():
        step.note_loss(
            LossMark(mean.detach(), num_tokens, by_position, unit, node=node_number(mean))
        )
    return mean


@outside_graphs
def sample_mean(losses: Tensor) -> Tensor:
    """Return the mean over the samples of all data ranks of losses of full sequences.

    For losses that every context rank computes alike, from what `cp.pool`, `cp.unshard` or
    `token_logp` returns: contrastive losses, classifiers, preferences, means of sample means.
    Gradients averaged over the ranks are exact. Ranks compare the losses, and raise if they differ:
    for the batches whose contents they compare at once, later together with the next batch.

    Args:
        losses: one per sample, [samples]; or their mean, a scalar, which has the weight of the
            samples of the batch. Outside a step, a mean is returned unchanged.

    Example:
        >>> sample_mean(torch.tensor([1.0, 2.0]))
        tensor(1.5000)
    """
    if losses.dim() > 1:
        raise ValueError(
            "sample_mean() needs one loss per sample, [samples], or their mean, a scalar; it got "
            f"{tuple(losses.shape)}. For losses of tokens use token_mean(), or "
            "global_mean(total, count) from lightning_cp.loss."
        )
    step = opened()  # also one whose batch is full: losses of the parts of a batch
    check_recompute(step)
    if step is not None and not in_backward():
        _check_no_mean(losses, step)
    number = len(losses) if losses.dim() else 1
    weight = number if losses.dim() or step is None else max(step.num_samples, 1)
    # Each context rank has the same losses of the same samples: the sum is over the data ranks.
    groups = () if step is None else step.loss_groups[1:]
    total = losses.double().sum() * (weight / max(number, 1))
    count = total.new_full((), weight)
    mean, num_samples = _mean_over(groups, total, count, step, dtype=losses.dtype)
    if step is not None and not in_backward():
        _check_alike(losses.detach(), step)
        step.note_loss(
            LossMark(
                mean.detach(),
                num_samples,
                unit="samples",
                is_replicated=True,
                node=node_number(mean),
            )
        )
    return mean


def _check_no_mean(losses: Tensor, step: Opened) -> None:
    """Raise for losses that hold a mean over all ranks, which samples of a rank cannot weigh."""
    nodes = {x.node for x in step.all_losses if x.node is not None}
    if nodes and depends_on(losses, nodes, min(nodes)):
        raise ValueError(
            f"sample_mean() got {outputs.describe(losses)}, computed from a mean over all ranks "
            "already (the loss of a model, token_mean(), global_mean() or sample_mean()): it would "
            "be weighted by the samples of each data rank. Add the means instead: "
            "token_mean(logits, labels) + sample_mean(losses)."
        )


def _check_alike(losses: Tensor, step: Opened) -> None:
    """Raise on all ranks if context ranks have computed different losses. Collective."""
    context, *others = step.loss_groups
    if context.size == 1:
        return
    if not step.is_checked:  # with the next batch: nothing waits for it
        step.uncompared.append(losses)
        return
    differs = bool(find_differing([losses], context))
    failed = any_rank([differs], *others)[0]
    if differs:
        raise ValueError(
            f"sample_mean() got {outputs.describe(losses)} on rank {context.rank} of the "
            f"{context.size} context ranks, and other losses on another rank: they are computed "
            "from the tokens of one rank. Compute them from full sequences, which are the same on "
            "every rank: cp.pool(x, 'mean'), cp.unshard(x, 1) or token_logp(). For losses of "
            "tokens use token_mean(), or global_mean(total, count) from lightning_cp.loss."
        )
    if failed:
        raise ValueError(
            "Another context-parallel group of this job (other samples of the data axis) gave "
            "sample_mean() losses that its ranks do not share; see the errors of its ranks."
        )


def scored_labels(labels: Tensor, step: Step | None, *, shift: bool = True) -> Tensor:
    """Return the label that each local token is scored against.

    Labels are gathered, because the next token may be on another rank. If the step shifted them
    when it is opened, labels that a user edits later would be ignored, or would lead ranks into
    different collectives.
    """
    if step is None:
        return shift_labels(labels, None) if shift else labels
    layout = step.layout
    if labels.shape[1] != step.tensor_len:
        raise ValueError(
            f"The loss got {labels.shape[1]} tokens per sample inside a step whose ranks hold "
            f"{step.tensor_len} each. For full sequences, use `with cp.paused():`."
        )
    if not shift:
        appended = ~to_device(layout.is_real(step.cp_rank), labels.device)
        return labels.masked_fill(appended, IGNORED_LABEL)
    return local_targets(labels, step)


def local_targets(labels: Tensor, step: Step) -> Tensor:
    """Return, for each of this rank's tokens, the label of the next token of its document."""
    runs = step.label_runs
    ids = None if runs is None else to_device(torch.from_numpy(runs), labels.device)
    if step.layout.is_whole:
        return shift_labels(labels, ids)
    shifted = shift_labels(full_tokens(labels, step), ids)
    return own_tokens(shifted, step, fill=IGNORED_LABEL)


def _mean_over(
    groups: Sequence[Transport],
    total: Tensor,
    count: Tensor,
    step: Opened | None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean over the ranks of groups, one after the other, and the count of all."""
    uid = 0 if step is None else step.uid
    mean, number = _GlobalMean.apply(  # type: ignore[no-untyped-call]
        total, count, tuple(groups), uid, dtype or total.dtype
    )
    return mean, number


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        total: Tensor,
        count: Tensor,
        groups: tuple[Transport, ...],
        uid: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        num_ranks = 1
        total, count = total.double(), count.to(torch.float64, copy=True)  # it counts exactly
        groups = tuple(group for group in groups if group.size > 1)
        if groups:  # one message for both
            sums = torch.stack([total, count])
            for transport in groups:
                transport.all_reduce(sums)
                num_ranks *= transport.size
            total, count = sums[0], sums[1].clone()
        num_tokens = count.clamp(min=1)
        ctx.uid = uid
        ctx.save_for_backward(num_ranks / num_tokens, torch.tensor(ctx.uid))
        ctx.mark_non_differentiable(count)
        return (total / num_tokens).to(dtype), count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        factor, mark = ctx.saved_tensors
        check_mark(mark, ctx.uid)
        enter_backward_of(ctx.uid)
        return grad * factor.to(grad.dtype), None, None, None, None
