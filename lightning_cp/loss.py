# SPDX-License-Identifier: Apache-2.0
"""The loss: a mean over the tokens of the whole batch, the same number on every rank.

With s_r the sum over the valid tokens of rank r, R ranks and N valid tokens among them all:

    loss = sum_r s_r / N          forward, on every rank (one all-reduce)
    d loss / d s_r = R / N        backward, on rank r

DDP and FSDP2 average gradients over the ranks: mean_r (R / N) ds_r/dw = sum_r ds_r/dw / N, which is
the gradient of one process that saw the whole batch.

Chunked, s_r and ds_r/dw are summed piece by piece in forward; backward multiplies by a number.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from lightning_cp.active_step import current
from lightning_cp.data.sharding import shard, shift_labels, unshard
from lightning_cp.guards import check_mark, check_recompute, enter_backward_of
from lightning_cp.step import IGNORED_LABEL, LossMark, Step
from lightning_cp.torch_private import in_backward, outside_graphs

CHUNK_NUMBERS: Final = 2**28
"""How many logits are held at once unless the caller says: 1 GiB in float32."""


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
    _check_shapes("token_mean() needs logits [batch, tokens, classes]", logits, labels)
    step = current()
    check_recompute(step)
    targets = _targets(labels, shift, step)
    asked = step is not None and bool(step.position_edges)
    losses = _cross_entropy(logits, targets, "none" if asked else "sum")
    by_position = _by_position(losses, targets, step)
    return global_mean(losses.sum(), _num_valid(targets), by_position=by_position)


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
    """Return `token_mean` of ``head(hidden)`` without ever holding the logits of all tokens.

    Gradients are computed in forward, piece by piece, and kept: as much memory as ``hidden`` and
    the parameters take, these in float32 where there are several pieces. Activation checkpointing
    around it would do that work twice.

    Args:
        head: what makes logits [1, n, V] of hidden states [1, n, d], for each token by itself. It
            is called on pieces of the tokens, all rows one after the other.
        hidden: [B, L, d].
        labels: as in `token_mean`.
        parameters: the weights that ``head`` computes with; others among them do no harm. Their
            gradients are summed in float32. With FSDP2 call this inside the forward of the module
            that is sharded as one with them, where they are whole.
        shift: as in `token_mean`.
        chunk_len: how many tokens ``head`` gets at once, at most: pieces are of about equal length.
            By default so many that their logits take 1 GiB in float32 (for float16 256 MiB, since
            larger sums overflow), for which ``head`` is first asked about one token; working on
            them takes a few times that.

    Example:
        >>> head, hidden = torch.nn.Linear(4, 8), torch.randn(1, 6, 4)
        >>> labels, weights = torch.tensor([[1, 2, -100, 3, 0, 7]]), list(head.parameters())
        >>> loss = chunked_token_mean(head, hidden, labels, parameters=weights, chunk_len=2)
        >>> torch.allclose(loss, token_mean(head(hidden), labels))
        True
    """
    _check_shapes("chunked_token_mean() needs hidden states [batch, tokens, width]", hidden, labels)
    if chunk_len is not None and chunk_len < 1:
        raise ValueError(
            f"chunked_token_mean(chunk_len={chunk_len}): give a number of tokens above 0, or None "
            "for as many as take 1 GiB."
        )
    leaves = _leaves(parameters)
    step = current()
    check_recompute(step)
    targets = _targets(labels, shift, step)
    # As many on all ranks that share the rows: a head may need all of them for each piece.
    num_tokens = hidden.shape[0] * (hidden.shape[1] if step is None else step.layout.local_len)
    work = _Work(head, targets.flatten(), leaves, chunk_len, num_tokens, torch.is_grad_enabled())
    total, losses = _ChunkedSum.apply(work, hidden, *leaves)  # type: ignore[no-untyped-call]
    by_position = _by_position(losses, targets, step)
    return global_mean(total, _num_valid(targets), by_position=by_position)


def _check_shapes(rule: str, x: Tensor, labels: Tensor) -> None:
    if x.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ValueError(
            f"{rule} and labels [batch, tokens]; it got {tuple(x.shape)} and "
            f"{tuple(labels.shape)}. Give labels unshifted, cut like the rest of the batch: "
            "local['labels']."
        )


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction
    )


def _num_valid(targets: Tensor) -> Tensor:
    return (targets != IGNORED_LABEL).sum()


def _by_position(losses: Tensor, targets: Tensor, step: Step | None) -> Tensor | None:
    """Return sums and numbers of tokens by their place in the row, if that was asked for."""
    if step is None or not step.position_edges:
        return None
    edges = torch.tensor(step.position_edges, device=losses.device)
    places = step.layout.positions(step.cp_rank)[: targets.shape[1]].to(losses.device)
    bucket = torch.bucketize(places, edges, right=True).expand_as(targets).flatten()
    pairs = torch.stack([losses.detach().double(), (targets.flatten() != IGNORED_LABEL).double()])
    return pairs.new_zeros(2, len(edges) + 1).index_add_(1, bucket, pairs)


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
        step.note_loss(LossMark(mean.detach(), num_tokens, by_position))
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
    if labels.shape[1] != step.tensor_len:
        raise ValueError(
            f"The loss got {labels.shape[1]} tokens per row inside a step whose ranks hold "
            f"{step.tensor_len} each. Whole rows go under `with cp.paused():`."
        )
    if not shift:
        ours = ~layout.is_real(step.cp_rank).to(labels.device)
        return labels.masked_fill(ours, IGNORED_LABEL)
    return local_targets(labels, step)


def local_targets(labels: Tensor, step: Step) -> Tensor:
    """Return, for each of this rank's tokens, the label of the next one of its document."""
    layout = step.layout
    whole = unshard(labels, 1, layout=layout, transport=step.groups.context)
    documents = step.documents
    ids = None if documents is None else torch.from_numpy(documents).to(labels.device)
    shifted = shift_labels(whole, ids)
    return shard(shifted, 1, layout=layout, rank=step.cp_rank, fill=IGNORED_LABEL)


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, step: Step | None) -> tuple[Tensor, Tensor]:
        # One message for both; float64 counts exactly.
        sums = torch.stack([total.double(), count.double()])
        num_ranks = 1
        for transport in () if step is None else step.loss_groups:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What a chunked sum is made of, beside the tensors that autograd follows.

    Args:
        head: makes logits of hidden states.
        targets: [tokens], what each is scored against.
        leaves: the parameters themselves, which ``head`` computes with.
        chunk_len: tokens of a piece at most; None to go by the vocabulary.
        num_tokens: by how many the pieces are counted.
        grad: whether the caller has gradients enabled.
    """

    head: Callable[[Tensor], Tensor]
    targets: Tensor
    leaves: Sequence[Tensor]
    chunk_len: int | None
    num_tokens: int
    grad: bool


class _ChunkedSum(torch.autograd.Function):
    """The summed cross entropy, whose gradients are worked out along with it."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        tokens, wanted = hidden.detach().flatten(0, 1)[None], work.grad and hidden.requires_grad
        slopes = torch.zeros_like(tokens) if wanted else None
        sums: list[Tensor | None] = [None for _ in work.leaves]
        losses: list[Tensor] = []
        num_pieces = _num_pieces(work, tokens)
        parts, targets = tokens.tensor_split(num_pieces, 1), work.targets.tensor_split(num_pieces)
        kept = (None,) * num_pieces if slopes is None else slopes.tensor_split(num_pieces, 1)
        with _without_hooks(work.leaves if work.grad else ()):
            for part, target, into in zip(parts, targets, kept, strict=True):
                piece = part.detach().requires_grad_(wanted)
                with _own_graph(work):
                    found = _cross_entropy(_logits(work, piece), target, "none")
                losses.append(found.detach())
                slope = _add_gradients(found, piece, work.leaves, sums, alone=num_pieces == 1)
                if into is not None and slope is not None:
                    into.copy_(slope)
        ctx.save_for_backward(None if slopes is None else slopes.view(hidden.shape), *sums)
        ctx.dtypes = [x.dtype for x in (hidden, *work.leaves)]
        by_token = torch.cat(losses)
        ctx.mark_non_differentiable(by_token)
        return by_token.sum(), by_token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # once_differentiable refuses what depends on `grad` only, but this depends on the inputs.
        twice = torch.is_grad_enabled() and not grad.requires_grad
        return _ChunkedSum._scaled(ctx, grad.detach().requires_grad_() if twice else grad)

    @staticmethod
    @once_differentiable
    def _scaled(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        kept = zip(ctx.saved_tensors, ctx.dtypes, needed, strict=True)
        return None, *(
            _times(x, grad, dtype) if need and x is not None else None for x, dtype, need in kept
        )


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * factor`` in ``dtype``: one pass, rounded once."""
    if type(x) is not Tensor:  # a DTensor takes plain factors without dimensions only
        return (x.to(torch.promote_types(x.dtype, factor.dtype)) * factor).to(dtype)
    # Beside a tensor that has dimensions, a factor without would be rounded to that one's dtype.
    return torch.mul(x, factor.expand_as(x), out=torch.empty_like(x, dtype=dtype))


def _num_pieces(work: _Work, tokens: Tensor) -> int:
    """Return into how many pieces the tokens are cut."""
    length = work.chunk_len
    if length is None:
        # As the pieces, not under no_grad: autocast may keep what it made of the weights there,
        # without gradients, for the pieces too (pytorch/pytorch#112583).
        with _own_graph(work):
            length = piece_len(_logits(work, tokens[:, :1]), work.leaves)
    return max(1, -(-work.num_tokens // length))


def piece_len(logits: Tensor, parameters: Iterable[Tensor]) -> int:
    """Return how many tokens a piece may have.

    Args:
        logits: of some token.
        parameters: of the head. In float16 a gradient that is summed over very many tokens ends
            beyond 65,504, and no loss scaling helps: pieces have a quarter.
    """
    is_narrow = any(x.dtype == torch.float16 for x in (logits, *parameters))
    return max(1, CHUNK_NUMBERS // (4 if is_narrow else 1) // logits.shape[-1])


@contextmanager
def _own_graph(work: _Work) -> Iterator[None]:
    """Record what the head does, if the caller has gradients enabled, for nobody else to see."""
    # What a piece saves lives for a moment. Those who take saved tensors away until backward, as
    # activation checkpointing and offloading do, must not see it.
    with torch.set_grad_enabled(work.grad), saved_tensors_hooks(_detached, _unchanged):
        yield


def _logits(work: _Work, piece: Tensor) -> Tensor:
    logits = work.head(piece)
    if logits.dim() != 3 or logits.shape[:-1] != piece.shape[:-1]:
        raise ValueError(
            "chunked_token_mean() needs a head that makes logits [batch, tokens, classes] of "
            f"hidden states [batch, tokens, width]; it made {tuple(logits.shape)} of "
            f"{tuple(piece.shape)}."
        )
    _check_listed(logits, (piece, *work.leaves))
    return logits


def _add_gradients(
    losses: Tensor,
    piece: Tensor,
    leaves: Sequence[Tensor],
    sums: list[Tensor | None],
    *,
    alone: bool,
) -> Tensor | None:
    """Add the gradients of the leaves to ``sums``, and return that of the piece.

    Those of a piece that is alone are kept as they are: no sum is taken.
    """
    if not losses.requires_grad:
        return None
    inputs = [x for x in (piece, *leaves) if x.requires_grad]
    # As in a backward of its own: ops run in the dtype that forward chose for them.
    with _no_autocast(losses.device.type):
        found = torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True)
    gradients = {id(x): gradient for x, gradient in zip(inputs, found, strict=True)}
    for at, leaf in enumerate(leaves):
        gradient, total = gradients.get(id(leaf)), sums[at]
        if alone:
            sums[at] = gradient
        elif gradient is not None and total is None:
            # A copy, for two leaves may have been given the same tensor.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            sums[at] = gradient.to(wide, copy=True)
        elif gradient is not None and total is not None:
            total += gradient
    return gradients.get(id(piece))


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off, on devices that have it: ``meta`` has none."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return each parameter once: what is named twice must not get its gradient twice."""
    leaves = list({id(x): x for x in parameters}.values())
    for x in leaves:
        if not x.is_leaf:
            raise ValueError(
                f"chunked_token_mean(parameters=...) has a tensor of shape {tuple(x.shape)} that "
                "is computed from others. Compute it in the head, and list what it is computed "
                "from."
            )
    return leaves


def _check_listed(logits: Tensor, known: Collection[Tensor]) -> None:
    """Refuse logits that depend on a weight whose gradient nobody would ask for."""
    listed = {id(x) for x in known}
    seen, todo = set(), [logits.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        leaf = None if node.next_functions else getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in listed:
            raise ValueError(
                f"chunked_token_mean(): head computes with a tensor of shape {tuple(leaf.shape)} "
                "that requires a gradient and is not in `parameters`: its gradient would be lost. "
                "Add it. With FSDP2, call chunked_token_mean() in the forward() of the module that "
                "is sharded as one with the head, and list the parameters there, where they are "
                "whole."
            )


@contextmanager
def _without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Keep hooks of `Tensor.register_hook` from pieces of a gradient: they get the whole later."""
    taken = []
    for leaf in leaves:
        if leaf.requires_grad:
            handle = leaf.register_hook(_unchanged)  # type: ignore[no-untyped-call]
            hooks = handle.hooks_dict_ref()
            handle.remove()
            taken.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, own in taken:
            hooks.update(own)


def _detached(x: Tensor) -> Tensor:
    return x.detach()


def _unchanged(x: Tensor) -> Tensor:
    return x
