# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of full sequences, the same on every context rank: for preference losses.

Each rank scores its tokens; the scores are unsharded, [B, S - 1] numbers. A loss that every rank
computes from them has exact gradients: backward of `unshard` sums over the context ranks, and
DDP and FSDP2 average over them. Read next: `means.py`, `chunked_loss.py`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_cp.comm.transport import to_device
from lightning_cp.data.shard import full_tokens
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.geometry.ranges import IntArray
from lightning_cp.loss.chunked_loss import chunked_losses, cross_entropy
from lightning_cp.loss.means import build_problem, check_label_shape, scored_labels
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.step.guards import step_of_call
from lightning_cp.step.step import IGNORED_LABEL, Step

Head = Callable[[Tensor], Tensor]
"""Computes logits [1, n, V] from hidden states [1, n, d], each token separately."""


class SequenceLogp(NamedTuple):
    """Log-probabilities of samples, documents or other segments, the same on every context rank.

    Args:
        sums: [B, segments]; 0 where a sample has fewer segments, or a segment no valid label.
        num_tokens: int64, the number of valid labels in each sum.
    """

    sums: Tensor
    num_tokens: Tensor

    @property
    def means(self) -> Tensor:
        """Return the mean per valid label; 0 where there is none."""
        return self.sums / self.num_tokens.clamp(min=1)


@outside_graphs
def token_logp(
    scores: Tensor | tuple[Tensor, Head],
    labels: Tensor,
    *,
    parameters: Sequence[Tensor] | None = None,
    softcap: float | None = None,
    chunk_len: int | None = None,
) -> Tensor:
    """Return the log-probability of each token of the full sequences, given those before it.

    Inside a step every context rank gets the same values, in the order of the sequence. If every
    rank computes the same loss from them, gradients averaged over the ranks are exact. Outside a
    step, sequences are full. With a head, the logits of all tokens never exist at once: they are
    computed in chunks, and again in backward.

    Args:
        scores: logits [B, L, V], or a pair of hidden states [B, L, d] and the head that computes
            logits from them. It is called on chunks of the tokens of all samples, concatenated.
        labels: [B, L], sharded like the scores and not shifted; -100 is ignored.
        parameters: the weights that the head computes with, those of a module by default; their
            gradients are summed in float32. With FSDP2, call this inside the forward of the
            module that is sharded as one unit with them, where they are unsharded.
        softcap: c replaces the logits by ``c * tanh(logits / c)``.
        chunk_len: maximal number of tokens that the head gets at once. By default their logits
            take at most 1 GiB in float32.

    Returns:
        [B, S - 1], float32 or wider: column t belongs to the label of token t + 1. 0, without a
        gradient, for labels of -100 and for the first token of each document.

    Example:
        >>> head, hidden = torch.nn.Linear(4, 8), torch.randn(1, 4, 4)
        >>> labels = torch.tensor([[1, 2, -100, 3]])
        >>> token_logp((hidden, head), labels).shape
        torch.Size([1, 3])
        >>> token_logp(torch.zeros(1, 4, 8), labels).exp()  # a uniform guess among 8
        tensor([[0.1250, 1.0000, 0.1250]])
    """
    step = step_of_call()
    local = _local_logp(scores, labels, parameters, softcap, chunk_len, step)
    return _full(local, step)


def sequence_logp(
    logp: Tensor, labels: Tensor, *, per: Literal["sample", "document"] | Tensor = "sample"
) -> SequenceLogp:
    """Return sums and means of `token_logp` over samples, documents or other segments.

    Args:
        logp: [B, S - 1], from `token_logp`, in the same step.
        labels: [B, L], as in `token_logp`.
        per: ``sample`` for one segment per sample; ``document`` for the documents of the step, in
            the order of the sequence; or integer ids [B, L], sharded like the labels, from 0, -1
            for tokens of no segment.

    Example:
        >>> from lightning_cp import ContextParallel
        >>> cp, tokens = ContextParallel(None), torch.tensor([[1, 2, 3, 4, 5]])
        >>> batch = {"labels": tokens, "document_ids": torch.tensor([[0, 0, 0, 1, 1]])}
        >>> with cp.step(batch) as local:
        ...     logp = token_logp(torch.zeros(1, 5, 8), local["labels"])
        ...     pooled = sequence_logp(logp, local["labels"], per="document")
        >>> pooled.num_tokens, pooled.means.exp()
        (tensor([[2, 1]]), tensor([[0.1250, 0.1250]]))
    """
    step = step_of_call()
    length = labels.shape[-1] if step is None else step.layout.seq_len
    if logp.shape != (len(labels), length - 1):
        raise ValueError(
            f"sequence_logp() got {tuple(logp.shape)} and labels {tuple(labels.shape)}, but needs "
            f"the log-probabilities of full sequences, {(len(labels), length - 1)}. Pass what "
            "token_logp() returned in this step."
        )
    ids = _segments(per, labels, step)
    valid = _full((scored_labels(labels, step) != IGNORED_LABEL).to(torch.uint8), step).long()
    if ids is None:
        return SequenceLogp(logp.sum(1, keepdim=True), valid.sum(1, keepdim=True))
    num_segments = max(int(ids.max()) + 1, 1)
    ids = to_device(ids, logp.device)[:, 1:].long()  # a column belongs to the label of t + 1
    counted = valid * (ids >= 0)
    ids = ids.clamp(min=0).expand(logp.shape)
    sums = logp.new_zeros(len(logp), num_segments).scatter_add(1, ids, logp * counted)
    return SequenceLogp(sums, counted.new_zeros(sums.shape).scatter_add(1, ids, counted))


def _local_logp(
    scores: Tensor | tuple[Tensor, Head],
    labels: Tensor,
    parameters: Sequence[Tensor] | None,
    softcap: float | None,
    chunk_len: int | None,
    step: Step | None,
) -> Tensor:
    """Return the log-probability of the label that each of this rank's tokens predicts, [B, L]."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"token_logp(softcap={softcap}): pass a number above 0, or None for none.")
    if isinstance(scores, Tensor):
        if parameters is not None or chunk_len is not None:
            raise ValueError(
                "token_logp() got logits, and parameters or chunk_len of a head. Pass the hidden "
                "states with their head, (hidden, head), or leave both out."
            )
        check_label_shape("token_logp() needs logits [batch, tokens, classes]", scores, labels)
        targets = scored_labels(labels, step)
        losses = cross_entropy(_capped(scores, softcap), targets, "none")
        return losses.neg().view(labels.shape)
    hidden, head = scores
    check_label_shape("token_logp() needs hidden states [batch, tokens, width]", hidden, labels)
    if parameters is None:
        if not isinstance(head, nn.Module):
            raise ValueError(
                f"token_logp() got a head that is a {type(head).__name__}, not a module. Name the "
                "weights that it computes with: parameters=[...], [] for none."
            )
        parameters = list(head.parameters())
    targets = scored_labels(labels, step)
    problem = build_problem(
        lambda x: _capped(head(x), softcap),
        hidden,
        targets,
        parameters,
        chunk_len,
        step,
        caller="token_logp",
    )
    return chunked_losses(problem, hidden).neg().view(labels.shape)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _full(x: Tensor, step: Step | None) -> Tensor:
    """Return the columns of the full sequence; the last token predicts nothing."""
    return (x if step is None else full_tokens(x, step))[:, :-1]


def _segments(per: str | Tensor, labels: Tensor, step: Step | None) -> Tensor | None:
    """Return the segment of each token of the full sequences, [B or 1, S]; None for one each."""
    if isinstance(per, Tensor):
        if per.shape != labels.shape or per.is_floating_point() or per.dtype == torch.bool:
            raise ValueError(
                f"sequence_logp(per=...) got {per.dtype} of shape {tuple(per.shape)}; segments are "
                f"integer ids of the shape of the labels, {tuple(labels.shape)}, from 0, and -1 "
                "for tokens of no segment."
            )
        return per if step is None else full_tokens(per, step)
    if per not in ("sample", "document"):
        raise ValueError(
            f"sequence_logp(per={per!r}): pass 'sample', 'document', or integer ids "
            "[batch, tokens]."
        )
    if per == "sample":
        return None
    if step is None:
        raise RuntimeError(
            "sequence_logp(per='document') was called outside a step, which knows the documents. "
            "Call it inside `with cp.step(batch):`, or pass ids: per=document_ids."
        )
    if step.documents is None:
        return None
    return torch.from_numpy(_numbered(step.documents))


def _numbered(documents: IntArray) -> IntArray:
    """Number the documents of each sample from 0, in their order; -1 stays."""
    real = documents != NO_DOCUMENT
    starts = real.copy()
    starts[:, 1:] &= documents[:, 1:] != documents[:, :-1]
    numbers: IntArray = np.where(real, np.cumsum(starts, 1) - 1, NO_DOCUMENT)
    return numbers
