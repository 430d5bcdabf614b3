# SPDX-License-Identifier: Apache-2.0
"""What a module logs during a step: losses weighed by their tokens, or nothing at all.

Replaces `log` on the module itself for the length of a block. Knows that method and torchmetrics,
not Lightning.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

from torch import Tensor
from torchmetrics import Metric

from lightning_cp.context import Step

Sync = Literal["never", "epoch", "always"]
"""When a logged mean is taken over the data axis too."""


@contextmanager
def no_logs(module: Any) -> Iterator[None]:
    """Let `self.log` and `self.log_dict` do nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    module.log = module.log_dict = nothing
    try:
        yield
    finally:
        del module.log, module.log_dict


@contextmanager
def kept_metrics(module: Any) -> Iterator[None]:
    """Put the states of metrics back as they were."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    before = [deepcopy(metric.__dict__) for metric in metrics]
    try:
        yield
    finally:
        for metric, state in zip(metrics, before, strict=True):
            metric.__dict__.update(state)


@contextmanager
def token_weighted_logs(module: Any, step: Step | None, sync: Sync) -> Iterator[None]:
    """Let `self.log` weigh a loss of token_mean() by its tokens in the mean over an epoch.

    Lightning weighs by rows, which is another number wherever rows have different numbers of
    labels.

    Args:
        module: whose `log` is called.
        step: whose losses are recognised.
        sync: when the mean is taken over the data axis too.
    """
    log = module.log

    def weighted(*args: Any, **kwargs: Any) -> None:
        call = inspect.signature(log).bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        num_tokens = _num_tokens_of(options["value"], step)
        if num_tokens is not None and options["reduce_fx"] == "mean":
            if options["batch_size"] is None:
                options["batch_size"] = num_tokens
            wanted = sync == "always" or (sync == "epoch" and not options["on_step"])
            options["sync_dist"] = options["sync_dist"] or wanted
        log(*call.args, **call.kwargs)

    module.log = weighted
    try:
        yield
    finally:
        del module.log


def _num_tokens_of(value: Any, step: Step | None) -> Tensor | None:
    """Return over how many tokens a logged value is the mean, if it is a loss of the step."""
    if not isinstance(value, Tensor) or step is None:
        return None
    for mark in step.losses:
        if mark.value.data_ptr() == value.data_ptr():
            return mark.num_tokens
    return None
