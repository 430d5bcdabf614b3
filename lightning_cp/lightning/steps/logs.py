# SPDX-License-Identifier: Apache-2.0
"""What a module logs during a step: losses weighted by their tokens, all values recorded.

Replaces `LightningModule.log` on the instance for the duration of a block, and reads that method's
arguments by name. What hooks log is compared too.
"""

import inspect
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_cp.lightning import private
from lightning_cp.lightning.steps.warning_filters import ignore_sync_advice
from lightning_cp.parallel import ContextParallel
from lightning_cp.patch import Patch
from lightning_cp.step.step import LossMark, Opened

Sync = Literal["never", "epoch", "always"]
"""When a logged mean is reduced over the data axis too."""

# The parameters of a step's `log`. What a method of a user that overrides it does not take by name,
# it is assumed to pass on.
_PARAMETERS: Final = [*inspect.signature(LightningModule.log).parameters.values()][1:]
_ORDER: Final = [x.name for x in _PARAMETERS]
_DEFAULTS: Final = {x.name: x.default for x in _PARAMETERS if x.default is not x.empty}

# A weight that does not change a sum of other weights, and avoids 0 / 0 in a mean over no tokens.
_NO_TOKENS: Final = 1e-30


@dataclass(frozen=True)
class Logged:
    """A value that a step has logged.

    Args:
        name: the name under which it was logged.
        value: a number or a tensor; of a metric that is logged at each step, the step's value.
        is_global: whether it is known to be a mean over the tokens of all ranks.
        reduction: how ranks combine their parts, if the caller requests it: ``sum``, ``min`` or
            ``max``; empty where the value must be the same on all ranks.
    """

    name: str
    value: Any
    is_global: bool = False
    reduction: str = ""


@contextmanager
def recorded_logs(
    module: Any, step: Opened | None, *, training: bool, sync: Sync | None
) -> Iterator[list[Logged]]:
    """Record what a step logs; weight a token mean by its tokens in the mean over an epoch.

    Lightning weights by samples, which gives another mean if samples have different numbers of
    labels.

    Args:
        module: the module whose `log` is called.
        step: the step whose losses are recognised.
        training: whether values are logged at each step by default.
        sync: when a mean is reduced over the data axis too; None to record without logging.
    """
    log, records = module.log, list[Logged]()
    signature = inspect.signature(log)

    def record(*args: Any, **kwargs: Any) -> None:
        signature.bind(*args, **kwargs)  # raises as the call would
        options = _DEFAULTS | dict(zip(_ORDER, args, strict=False)) | kwargs
        if not options.keys() >= {"name", "value"}:
            raise TypeError("log() takes `name` and `value` first, or by these names.")
        changes: dict[str, Any] = {}
        if isinstance(options["value"], DTensor):
            changes["value"] = options["value"] = options["value"].full_tensor()
        loss = loss_of(options["value"], step)
        if not options["rank_zero_only"]:
            records.extend(_record(options, training=training, is_global=loss is not None))
        if loss is not None and _reduction(options) == "mean":
            if options["batch_size"] is None:
                changes["batch_size"] = loss.num_tokens.clamp(min=_NO_TOKENS)
            must_sync = sync == "always" or (sync == "epoch" and not options["on_step"])
            if must_sync and not options["sync_dist"]:
                changes["sync_dist"] = True
            elif not options["sync_dist"]:
                ignore_sync_advice(options["name"])
        if sync is not None:
            positional = dict(zip(_ORDER, args, strict=False))
            args = *(changes.get(x, value) for x, value in positional.items()), *args[len(_ORDER) :]
            named = {name: x for name, x in changes.items() if name not in positional}
            kwargs = kwargs | named
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{log.__qualname__}() does not take {', '.join(named)}, by which the mean "
                    "over an epoch is made the mean over the tokens of all ranks. Let it take "
                    "**kwargs, and pass them on: super().log(name, value, **kwargs)."
                ) from error
            log(*args, **kwargs)

    with Patch(module, "log", record):
        yield records


_STEPS: Final = {"training_step", "validation_step", "test_step"}


def noted_hook_logs(trainer: Any, cp: ContextParallel) -> list[Callable[[], None]]:
    """Let context ranks compare what hooks log, with the next batch; return what ends it.

    What steps log is compared by `StepOutputs`. Replaces ``log`` of the values of Lightning's loops
    (2.6) on the instances, where the name of the hook is known.
    """
    training, device = trainer.fit_loop.epoch_loop, cp.groups.context.device
    loops = (training, training.val_loop, trainer.validate_loop, trainer.test_loop)
    undos = list[Callable[[], None]]()

    def note(original: Any, fx: str, name: str, value: Any, **options: Any) -> None:
        original(fx, name, value, **options)
        is_reduced = options["sync_dist"] and _reduction(options) != "mean"
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if fx not in _STEPS and is_plain and not (is_reduced or options["rank_zero_only"]):
            cp.checks.released.add(f"{name!r} in {fx}()", value, device)

    for results in private.loop_results(loops) if cp.cp_size > 1 else ():
        vars(results)["log"] = partial(note, results.log)
        undos.append(partial(vars(results).pop, "log"))
    return undos


def _record(options: dict[str, Any], *, training: bool, is_global: bool) -> Iterator[Logged]:
    value: Any = options["value"]
    reduction = _reduction(options)
    if isinstance(value, Metric):
        # Its states are reduced at the end of the epoch; its value of a step is not.
        on_step = training if options["on_step"] is None else options["on_step"]
        of_step = private.value_of_step(value) if on_step else None
        if of_step is not None:
            yield Logged(f"{options['name']} (of this step)", of_step)
        return
    if isinstance(value, Tensor | numbers.Number):
        value = value.item() if isinstance(value, np.generic) else value
        is_reduced = options["sync_dist"] and options["sync_dist_group"] is None
        reduction = reduction if is_reduced and reduction != "mean" else ""
        yield Logged(options["name"], value, is_global and not reduction, reduction)


def _reduction(options: dict[str, Any]) -> str:
    reduce_fx = options["reduce_fx"]
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    return "mean" if name.lower() == "avg" else name.lower()


def loss_of(value: Any, step: Opened | None) -> LossMark | None:
    """Return the token mean of the step that a value is, by its memory; None for other values."""
    if not isinstance(value, Tensor) or step is None:
        return None
    marks = (mark for mark in step.losses if mark.value.data_ptr() == value.data_ptr())
    return next(marks, None)
