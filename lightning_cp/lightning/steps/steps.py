# SPDX-License-Identifier: Apache-2.0
"""Steps of a LightningModule under context parallelism: open, call, check what comes out.

The strategy builds one `StepRunner` for each run of the Trainer; its hooks call it.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_cp.compare.trials import is_in_turn
from lightning_cp.compare.verify import TOLERANCES, Report, has_room, lowest_precision, verify
from lightning_cp.fsdp.sharding import reshard
from lightning_cp.lightning.memory.memory_plan import MemoryCheck
from lightning_cp.lightning.steps.logs import Sync, recorded_logs
from lightning_cp.lightning.steps.loss_policy import (
    count_labels,
    take_loss,
    to_global_loss,
)
from lightning_cp.lightning.steps.step_outputs import StepOutputs
from lightning_cp.lightning.steps.trial_run import ModuleCall
from lightning_cp.parallel import ContextParallel
from lightning_cp.patch import Patch
from lightning_cp.step import active_step
from lightning_cp.step.leaves import flatten
from lightning_cp.step.step import Opened


class StepRunner:
    """Runs the steps of a module on this rank's tokens.

    Args:
        module: the LightningModule.
        cp: opens steps; its configuration has the loss policy, and whether steps are verified.
        precision: the Trainer's precision plugin.
        lockstep: whether all data ranks take the same number of steps. Loaders may have different
            lengths where parameters are not sharded: a step must not wait for data ranks then.
        stock: whether models of other libraries were enabled, so that `verify` disables them.
        memory: plans the memory of training steps; None for no plan.
    """

    def __init__(
        self,
        module: LightningModule,
        *,
        cp: ContextParallel,
        precision: Precision,
        lockstep: bool,
        stock: bool,
        memory: MemoryCheck | None = None,
    ) -> None:
        self._module = module
        self._cp = cp
        self._precision = precision
        self._loss = cp.config.loss
        self._lockstep = lockstep
        self._stock = stock
        self.memory = memory
        self.outputs = StepOutputs(cp, lockstep=lockstep)
        self.last_step: Opened | None = None
        self._num_labels: Tensor | None = None
        self._num_trained, self._is_due = 0, False

    def train(self, step_fn: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a training step; with automatic optimization, check its loss."""
        call = self._call("training_step", step_fn, args, kwargs)
        automatic = self._module.automatic_optimization
        with self._cp.step(batch, training=True) as local:
            step = self._begin(local)
            self._check_media()
            if self.memory is not None:
                self.memory.check(step)
            if automatic and self._is_trial_due(step):
                self._make_trial(call, batch, step)
                self._begin(local)
            with recorded_logs(self._module, step, training=True, sync="never") as logs:
                output = call.step_fn(local)
            if automatic:
                output = self.check_loss(output)
        return self.outputs.release(
            call, output, logs, step, batch=batch, may_verify=False, deferred=not step.is_checked
        )

    def evaluate(
        self, stage: str, step_fn: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a validation, test or predict step; return its output as full sequences."""
        call = self._call(stage, step_fn, args, kwargs)
        outputs, loader = self.outputs, args[1] if len(args) > 1 else 0
        with self._cp.step(batch, training=False) as local:
            step = self._begin(local)
            if self._lockstep and self._cp.groups.data.size > 1:
                self._cp.checks.compare_media(flatten(batch))
                self._check_media()
            is_sanity_check = outputs.is_on and self._module.trainer.sanity_checking
            if outputs.trials.any_data_rank(is_sanity_check or outputs.is_due(stage, step, loader)):
                outputs.verify(call, batch, step, loader)
            sync: Sync = "always" if self._lockstep else "epoch"
            with recorded_logs(self._module, step, training=False, sync=sync) as logs:
                output = call.step_fn(local)
        return outputs.release(call, output, logs, step, batch=batch)

    def check_loss(self, output: Any) -> Any:
        """Return the output of the training step with a loss over the tokens of all ranks."""
        if self.last_step is None:
            return output
        return to_global_loss(
            output,
            policy=self._loss,
            step=self.last_step,
            num_labels=self._num_labels,
            cp=self._cp,
        )

    def verify(
        self, batch: Mapping[str, Any], max_len: int | None, *, check: bool = True
    ) -> Report:
        """Compare loss and gradients of a training step with those on full sequences."""
        module = self._module
        if not module.automatic_optimization:
            raise ValueError(
                "A training step with manual optimization cannot be verified: it would train. Call "
                "lightning_cp.verify(model, batch, cp=strategy.context_parallel, loss_fn=...)."
            )

        def loss_fn(local: dict[str, Any]) -> Tensor:
            self._begin(local)
            arguments = (local, 0)[: len(inspect.signature(module.training_step).parameters)]
            with self._precision.train_step_context():
                loss = take_loss(self.check_loss(module.training_step(*arguments)))
            assert isinstance(loss, Tensor)  # noqa: S101
            return loss

        is_mixed = self._precision.precision == "bf16-mixed"  # by autocast: parameters are float32
        with Patch(module, "log", lambda *_, **__: None):
            return verify(
                module,
                batch,
                cp=self._cp,
                loss_fn=loss_fn,
                max_len=max_len,
                tolerance=TOLERANCES[torch.bfloat16] if is_mixed else None,
                stock=self._stock,
                check=check,
            )

    def _begin(self, local: Any) -> Opened:
        """Make the open step the last one; count its labels if the loss policy needs them."""
        step = active_step.opened()
        assert step is not None  # noqa: S101
        self.last_step = step
        self._num_labels = count_labels(local) if self._loss == "local_mean" else None
        return step

    def _check_media(self) -> None:
        """Raise on all ranks if some data ranks would call a sharded tower and others would not.

        FSDP2 gathers the layers of a tower when they are called, on all ranks or on none.
        """
        names = self._cp.checks.uneven_media
        if names and self._lockstep:
            raise ValueError(
                f"Some data ranks got `{names[0]}` in this step and others did not, but the layers "
                "that take it are sharded over all of them, and called by all or by none. Give "
                "every data rank a batch with media, or every one a batch of text, in each step; "
                "or replicate the parameters: parameters='none'."
            )

    def _is_trial_due(self, step: Opened) -> bool:
        """Return whether a training step needs a trial run, the same on all data ranks."""
        if not self.outputs.is_on:
            return False
        self._num_trained += 1
        trainer, is_first = self._module.trainer, self._num_trained == 1
        self._is_due |= is_in_turn(self._num_trained)
        self._is_due |= trainer.current_epoch == 1 and trainer.fit_loop.epoch_loop.batch_idx == 0
        if self._cp.groups.data.size == 1:  # a kind of batch may appear on some data ranks only
            self._is_due |= self.outputs.is_due("training_step", step)
        # FSDP2 may hold unreduced gradients of the batches before, which a trial run would drop.
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        if not self._is_due or batch_idx % trainer.accumulate_grad_batches:
            return False
        self._is_due = False
        # Later there are states of the optimizer.
        return is_first or not self.outputs.trials.any_rank(not has_room(self._module))[0]

    def _make_trial(self, call: ModuleCall, batch: Any, step: Opened) -> None:
        """Compare what a training step logs, and the gradients of a declared local mean."""
        try:
            self.outputs.verify(call, batch, step)
        finally:
            reshard(self._module)
        if self._loss == "local_mean":
            self.verify(batch, self._cp.config.verify.max_len)

    def _call(
        self, stage: str, step_fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> ModuleCall:
        def run(local: Mapping[str, Any]) -> Any:
            return step_fn(local, *args, **kwargs)

        precision = partial(lowest_precision, self._module, str(self._precision.precision))
        return ModuleCall(stage, self._module, run, precision, self._cp)
