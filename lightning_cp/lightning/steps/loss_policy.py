# SPDX-License-Identifier: Apache-2.0
"""Loss policy: which losses of a training step may go backward under context parallelism.

Gradients are exact only for a mean over the tokens or the samples of all ranks. Such losses come
from `token_mean`, `global_mean`, `sample_mean` or an enabled model; a local mean becomes one if the
user declares it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_cp.config import LossName
from lightning_cp.loss.means import global_mean
from lightning_cp.parallel import ContextParallel
from lightning_cp.step.leaves import flatten
from lightning_cp.step.step import IGNORED_LABEL, Opened


def check_manual_optimization(policy: LossName) -> None:
    """Raise for a policy that must be verified, which manual optimization rules out."""
    if policy == "local_mean":
        raise ValueError(
            "loss='local_mean' is verified before the first step, which manual optimization "
            "does not allow: the step would train. Use token_mean() or "
            "lightning_cp.loss.global_mean(), or verify=False if each loss is the mean "
            "over this rank's labels that are not -100, without a shift."
        )


def count_labels(local: Any) -> Tensor | None:
    """Return the number of valid labels that this rank holds; None without one `labels` tensor."""
    labels, *others = flatten(local).named("labels") or [None]
    if others:
        return None
    return (labels != IGNORED_LABEL).sum() if isinstance(labels, Tensor) else None


def take_loss(output: Any) -> Any:
    """Return the loss in what a training step returned."""
    return output.get("loss") if isinstance(output, Mapping) else output


def to_global_loss(
    output: Any, *, policy: LossName, step: Opened, num_labels: Tensor | None, cp: ContextParallel
) -> Any:
    """Return the output of a training step with a loss that is a mean over all ranks' tokens.

    Args:
        output: what the training step returned: a loss, a dict with one, or None.
        policy: what a loss is that no function of ours computed.
        step: the step in which it was computed.
        num_labels: valid labels of this rank, for ``local_mean``.
        cp: whose ranks compare the loss, while batches are compared.

    Raises:
        ValueError: if the loss is not known to be a mean over the tokens of all ranks.
    """
    loss = take_loss(output)
    if step.is_stock or not isinstance(loss, Tensor):
        return output
    if step.losses:
        if step.cp_size == cp.cp_size:  # not in a run on full sequences
            cp.checks.check_loss(loss)
        return output
    if policy == "auto":
        raise ValueError(
            "training_step() returned a loss that is not known to be a mean over the tokens of "
            "all ranks; gradients would be wrong wherever ranks hold different numbers of "
            "labels. Use token_mean(logits, batch['labels']) from lightning_cp; "
            "lightning_cp.loss.global_mean(total, count) for another loss of tokens; "
            "sample_mean(losses) from lightning_cp for losses of samples, which each rank computes "
            "from full sequences (cp.pool(x, 'mean'), cp.unshard(x, 1)); or, if it is the mean "
            "over this rank's labels that are not -100, each scored at its own token (no shift), "
            "ContextParallelStrategy(loss='local_mean')."
        )
    if num_labels is None:
        raise ValueError(
            "loss='local_mean' weights the loss by the number of labels, but the batch has no "
            "`labels`. Use token_mean(), or lightning_cp.loss.global_mean(), instead."
        )
    # The mean over no labels is NaN; its weight is 0.
    count = num_labels.to(loss.device)
    total = torch.where(count > 0, loss, torch.zeros_like(loss)) * count
    mean = global_mean(total, count)
    return {**output, "loss": mean} if isinstance(output, Mapping) else mean
