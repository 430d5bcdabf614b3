# SPDX-License-Identifier: Apache-2.0
"""Preference losses of completions, from the log-probabilities of a model and of a reference.

Pure functions of tensors: one value per pair or completion, whose mean is the loss, and metrics of
the same shape. Know neither models nor ranks: `lightning_cp.sequence_logp` computes their inputs.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

DPOKind = Literal["sigmoid", "ipo", "sigmoid_norm"]
"""``sigmoid_norm`` is ``sigmoid`` of log-ratios per token."""

PreferenceLoss = Literal["sigmoid", "ipo", "sigmoid_norm", "kto", "orpo"]
"""All losses: the kinds of DPO, KTO and ORPO."""


ACCURACIES: Final = "rewards/accuracies"
"""The metric of how often the chosen completion has the higher reward."""


class Completions(NamedTuple):
    """Log-probabilities of completions, given their prompts.

    Args:
        sums: over the tokens of each completion.
        num_tokens: how many they are.
    """

    sums: Tensor
    num_tokens: Tensor

    @property
    def means(self) -> Tensor:
        """Return the log-probability per token."""
        return self.sums / self.num_tokens.clamp(min=1)


class Losses(NamedTuple):
    """Losses and metrics, detached, of pairs.

    Args:
        values: the loss of each pair.
        metrics: by name, each of the shape of ``values``.
    """

    values: Tensor
    metrics: Mapping[str, Tensor]


def dpo_losses(
    chosen: Completions,
    rejected: Completions,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
) -> Losses:
    """Return the losses of direct preference optimization.

    With r the log-ratio of a completion, log p(y | x) - log p_ref(y | x), and d = r(chosen) -
    r(rejected):

        sigmoid        -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)    arXiv 2305.18290
        sigmoid_norm   the same with r divided by the tokens of its completion
        ipo            (d - 1 / (2 beta))^2, r divided likewise                 arXiv 2310.12036

    Args:
        chosen: the preferred completions.
        rejected: the others.
        ref_chosen: sums of the reference for ``chosen``.
        ref_rejected: sums of the reference for ``rejected``.
        beta: how much a deviation from the reference counts; tau in IPO.
        kind: the loss.
        label_smoothing: e, the probability that a pair is labelled the wrong way round.

    Example:
        >>> chosen = Completions(torch.tensor([-3.0]), torch.tensor([2]))
        >>> rejected = Completions(torch.tensor([-8.0]), torch.tensor([4]))
        >>> losses = dpo_losses(chosen, rejected, torch.tensor([-4.0]), torch.tensor([-7.0]))
        >>> losses.values, losses.metrics["rewards/margins"]
        (tensor([0.5981]), tensor([0.2000]))
    """
    if kind not in get_args(DPOKind):
        raise ValueError(f"kind={kind!r}: use one of {', '.join(get_args(DPOKind))}.")
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing}: give a probability from 0 to below 0.5."
        )
    if label_smoothing and kind == "ipo":
        raise ValueError("label_smoothing is not defined for kind='ipo'. Set it to 0.")
    ratios = chosen.sums - ref_chosen, rejected.sums - ref_rejected
    scores = ratios
    if kind != "sigmoid":
        scores = ratios[0] / _length(chosen), ratios[1] / _length(rejected)
    delta = scores[0] - scores[1]
    if kind == "ipo":
        values = (delta - 1 / (2 * beta)) ** 2
    else:
        right, wrong = logsigmoid(beta * delta), logsigmoid(-beta * delta)
        values = -(1 - label_smoothing) * right - label_smoothing * wrong
    return Losses(values, _metrics(chosen, rejected, beta * ratios[0], beta * ratios[1]))


def kto_losses(
    chosen: Completions,
    rejected: Completions,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    divergence: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Losses:
    """Return the losses of Kahneman-Tversky optimization (arXiv 2402.01306), the mean per pair.

    With r the log-ratio of a completion and z the divergence: 1 - sigmoid(beta (r - z)) of a
    desirable completion, 1 - sigmoid(beta (z - r)) of another one, each times its weight. A pair
    counts as one of each.

    Args:
        chosen: the desirable completions.
        rejected: the undesirable ones.
        ref_chosen: sums of the reference for ``chosen``.
        ref_rejected: sums of the reference for ``rejected``.
        divergence: z, a scalar: the mean log-ratio of completions of other prompts, over all
            ranks. It has no gradient, and counts as 0 if it is below.
        beta: how much a deviation from the reference counts.
        desirable_weight: of the losses of ``chosen``.
        undesirable_weight: of the losses of ``rejected``.
    """
    _check_beta(beta)
    z = divergence.detach().clamp(min=0)
    ratios = chosen.sums - ref_chosen, rejected.sums - ref_rejected
    desirable = desirable_weight * (1 - torch.sigmoid(beta * (ratios[0] - z)))
    undesirable = undesirable_weight * (1 - torch.sigmoid(beta * (z - ratios[1])))
    metrics = _metrics(chosen, rejected, beta * ratios[0], beta * ratios[1])
    return Losses((desirable + undesirable) / 2, {**metrics, "kl": z.expand(desirable.shape)})


def orpo_losses(chosen: Completions, rejected: Completions, *, beta: float = 0.1) -> Losses:
    """Return the losses of odds ratio preference optimization (arXiv 2403.07691).

    With p the geometric mean of the probabilities of a completion's tokens: -log p(chosen), and
    beta times -log sigmoid of the log odds ratio, odds(p) = p / (1 - p). No reference is needed.

    Args:
        chosen: the preferred completions.
        rejected: the others.
        beta: weight of the odds ratio; lambda in the paper.
    """
    _check_beta(beta)
    log_odds = (chosen.means - rejected.means) - (
        _log1mexp(chosen.means) - _log1mexp(rejected.means)
    )
    nll, ratio = -chosen.means, logsigmoid(log_odds)
    metrics = _metrics(chosen, rejected, beta * chosen.means, beta * rejected.means)
    more = {"nll": nll.detach(), "log_odds_ratio": ratio.detach(), "log_odds": log_odds.detach()}
    return Losses(nll - beta * ratio, {**metrics, **more})


def _metrics(
    chosen: Completions, rejected: Completions, reward_chosen: Tensor, reward_rejected: Tensor
) -> dict[str, Tensor]:
    """Return the metrics of pairs, under the names that are usual."""
    high, low = reward_chosen.detach(), reward_rejected.detach()
    return {
        "rewards/chosen": high,
        "rewards/rejected": low,
        ACCURACIES: (high > low).to(high.dtype),
        "rewards/margins": high - low,
        "logps/chosen": chosen.sums.detach(),
        "logps/rejected": rejected.sums.detach(),
    }


def _length(completions: Completions) -> Tensor:
    return completions.num_tokens.clamp(min=1)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0, exact near 0 and far from it.

    A probability of 1 has infinite odds; it counts as the nearest number below 1.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    is_near = x > -0.693
    # Each side gets numbers that it can handle: a gradient of inf times 0 would be NaN.
    near = torch.log(-torch.expm1(torch.where(is_near, x, -0.5)))
    far = torch.log1p(-torch.exp(torch.where(is_near, -1.0, x)))
    return torch.where(is_near, near, far)


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta={beta}: give a number above 0.")
