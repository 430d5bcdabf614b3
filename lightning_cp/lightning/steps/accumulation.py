# SPDX-License-Identifier: Apache-2.0
"""Batches of one optimizer step, as Lightning accumulates them: weighted by tokens, then reduced.

`lightning_cp.loss.accumulate` has the arithmetic; this knows when Lightning sets gradients to zero,
divides losses, and steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_cp.fsdp.replication import is_replicated
from lightning_cp.fsdp.sharding import drop_gradients, set_gradient_reduction
from lightning_cp.loss.accumulate import GradientWindow
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import Opened


class Accumulation:
    """The gradient of the mean over the tokens of all batches of an optimizer step.

    With manual optimization, the user weights losses with `window`, and nothing is done here.

    Args:
        reduce_each: whether gradients of sharded parameters are reduced after each batch; otherwise
            once, and so are those of replicated parameters.
    """

    def __init__(self, *, reduce_each: bool) -> None:
        self.reduce_each = reduce_each
        self.window = GradientWindow()

    def start_run(self, module: LightningModule, *, training: bool) -> None:
        """Start a window, and training without the gradients of a run that was interrupted."""
        self.window = GradientWindow()
        if training:
            drop_gradients(module)

    def start_batch(self, module: LightningModule, batch_idx: int) -> None:
        """Start a window where Lightning sets gradients to zero."""
        is_first = batch_idx % module.trainer.accumulate_grad_batches == 0
        if is_first and module.automatic_optimization:
            self.window = GradientWindow()

    def weigh(self, loss: Tensor, module: LightningModule, step: Opened) -> Tensor:
        """Return a loss, which Lightning has divided by the number of batches, by its tokens."""
        if module.trainer.accumulate_grad_batches == 1:  # a mean over all tokens already
            return loss
        weight = self.window.weigh(step) * module.trainer.accumulate_grad_batches
        return loss * weight.to(accumulation_dtype(loss.dtype))

    @contextmanager
    def before_last(self, module: nn.Module) -> Iterator[None]:
        """Run backward of a batch that is not the last of its window."""
        if self.reduce_each and not is_replicated(module):
            yield
            return
        set_gradient_reduction(module, enabled=False)
        try:
            yield
        finally:
            set_gradient_reduction(module, enabled=True)

    def finish_after(
        self, closure: Callable[[], Any], module: LightningModule
    ) -> Callable[[], Any]:
        """Return a closure of an optimizer after which gradients are those of the mean."""

        def finished_closure() -> Any:
            result = closure()
            if module.automatic_optimization:
                self.window.finish(module.parameters())
            return result

        return finished_closure
