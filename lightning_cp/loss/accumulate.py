# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: the gradient of the mean over the tokens of all microbatches.

Or over their samples, for a `sample_mean`. What is said of tokens here holds for both.

With L_i the mean over the n_i tokens of microbatch i, one process that holds all of them has the
loss

    L = sum_i n_i L_i / sum_i n_i = (n_1 / N) * sum_i (n_i / n_1) L_i          N = sum_i n_i

The loss of microbatch i is multiplied by n_i / n_1, which is near 1, before its backward; N is
known only at the end, when gradients are multiplied once by n_1 / N. Counts stay on the device, so
that the host never waits for them.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_cp.step.active_step import opened
from lightning_cp.step.step import Opened


class GradientWindow:
    """The microbatches since the last optimizer step.

    The Lightning strategy has one. In a custom loop, call ``(loss * window.weigh()).backward()``
    inside each step, and ``window.finish(model.parameters())`` before clipping and stepping.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._first: Tensor | None = None
        self._counts: list[Tensor] = []  # of the means of the first microbatch
        self._total: Tensor | None = None
        self._num_microbatches = 0
        self._disagreements: list[Tensor] = []

    def weigh(self, step: Opened | None = None) -> Tensor:
        """Return the weight of the loss of a step, and count the step's tokens.

        Args:
            step: the step that the loss was computed in; the active step if None.
        """
        step = opened() if step is None else step
        marks = [] if step is None else step.losses
        # Not those that are only logged; a loss in a reentrant checkpoint has no node either.
        marks = [mark for mark in marks if mark.node is not None] or marks
        if not marks:
            raise RuntimeError(
                "GradientWindow.weigh() needs a step in which token_mean(), global_mean() or "
                "sample_mean() has been called: call it inside `with cp.step(batch):`, after the "
                "loss."
            )
        counts = [mark.num_tokens for mark in marks]
        count = counts[0]
        if self._first is None or self._total is None:
            self._first, self._total = count.clamp(min=1), torch.zeros_like(count)
            self._counts = counts
        # Several means of a step have a common weight if their counts grow alike: see `finish`. One
        # that is missing in some steps counts there what their first one counts.
        length = max(len(counts), len(self._counts))
        now, before = (x + [x[0]] * (length - len(x)) for x in (counts, self._counts))
        self._disagreements += [
            (other * before[0] != count * former) | ((other == 0) != (count == 0))
            for other, former in zip(now[1:], before[1:], strict=True)
        ]
        self._total = self._total + count
        self._num_microbatches += 1
        return count / self._first

    def finish(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Scale accumulated gradients to those of the mean over all tokens, and start a new window.

        Does nothing after one microbatch, whose gradients need no factor, or when called again.
        """
        first, total, disagreements = self._first, self._total, self._disagreements
        num_microbatches = self._num_microbatches
        self._reset()
        if num_microbatches < 2 or first is None or total is None:
            return
        if disagreements and bool(torch.stack(disagreements).any()):
            raise RuntimeError(
                "A training step computed two means over different numbers of tokens or samples, "
                f"and {num_microbatches} steps were accumulated: their gradients have no common "
                "weight. Use accumulate_grad_batches=1 with larger batches, compute both losses "
                "over the same tokens, or give all steps equally many tokens and samples. A mean "
                "that is only logged does not count under torch.no_grad()."
            )
        factor = first / total.clamp(min=1)
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = _local(parameter.grad)
                # A scalar tensor of higher precision is not rounded to the gradient's dtype.
                gradient.mul_(factor.to(gradient.device))


def _local(x: Tensor) -> Tensor:
    """Return this rank's shard of a gradient, sharing its memory."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local
