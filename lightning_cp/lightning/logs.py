# SPDX-License-Identifier: Apache-2.0
"""What a module logs during a step: losses weighed by their tokens, all values noted.

Replaces `log` on the module itself for the length of a block. Knows that method and torchmetrics,
not Lightning.
"""

import inspect
import numbers
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

from lightning_cp.lightning.warning_filters import expect_global
from lightning_cp.step import LossMark, Step

Sync = Literal["never", "epoch", "always"]
"""When a logged mean is taken over the data axis too."""

# A weight that changes no sum of other weights, and keeps a mean over nothing from being 0 / 0.
_NO_TOKENS: Final = 1e-30


@dataclass(frozen=True)
class Logged:
    """A value that a step has logged.

    Args:
        name: under which it was logged.
        value: a number or a tensor; of a metric that is logged at each step, the step's value.
        is_global: whether it is known to be a mean over the tokens of all ranks.
        reduction: how ranks put their parts together, if the caller has asked for it: ``sum``,
            ``min`` or ``max``; empty where the value must be the same on all ranks.
    """

    name: str
    value: Any
    is_global: bool = False
    reduction: str = ""


@contextmanager
def no_logs(module: Any) -> Iterator[None]:
    """Let `self.log` and `self.log_dict` do nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    with _replaced(module, nothing):
        yield


@contextmanager
def _replaced(module: Any, log: Any) -> Iterator[None]:
    """Let ``log`` stand for the module's; `log_dict` calls it too."""
    before = module.__dict__.get("log")
    module.log = log
    try:
        yield
    finally:
        del module.log
        if before is not None:
            module.log = before


@contextmanager
def recorded_logs(
    module: Any, step: Step | None, *, training: bool, sync: Sync | None
) -> Iterator[list[Logged]]:
    """Note what a step logs; weigh a loss of token_mean() by its tokens in the mean over an epoch.

    Lightning weighs by rows, which is another number wherever rows have different numbers of
    labels.

    Args:
        module: whose `log` is called.
        step: whose losses are recognised.
        training: whether values are logged at each step unless the caller says otherwise.
        sync: when a mean is taken over the data axis too; None to log nothing, only note it.
    """
    log, noted = module.log, list[Logged]()
    signature = inspect.signature(log)

    def record(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        if isinstance(options["value"], DTensor):
            options["value"] = options["value"].full_tensor()
        loss = loss_of(options["value"], step)
        if not options["rank_zero_only"]:
            noted.extend(_note(options, training=training, is_global=loss is not None))
        if loss is not None and _reduction(options) == "mean":
            if options["batch_size"] is None:
                options["batch_size"] = loss.num_tokens.clamp(min=_NO_TOKENS)
            wanted = sync == "always" or (sync == "epoch" and not options["on_step"])
            options["sync_dist"] = options["sync_dist"] or wanted
            if not options["sync_dist"]:
                expect_global(options["name"])
        if sync is not None:
            log(*call.args, **call.kwargs)

    with _replaced(module, record):
        yield noted


def _note(options: dict[str, Any], *, training: bool, is_global: bool) -> Iterator[Logged]:
    value: Any = options["value"]
    reduction = _reduction(options)
    if isinstance(value, Metric):
        # Its states are put together at the end of the epoch; the value of a step is not.
        at_step = training if options["on_step"] is None else options["on_step"]
        if at_step and vars(value)["_forward_cache"] is not None:
            yield Logged(f"{options['name']} (of this step)", value._forward_cache)
        return
    if isinstance(value, Tensor | numbers.Number):
        value = value.item() if isinstance(value, np.generic) else value
        asked = options["sync_dist"] and options["sync_dist_group"] is None
        combined = reduction if asked and reduction != "mean" else ""
        yield Logged(options["name"], value, is_global and not combined, combined)


def _reduction(options: dict[str, Any]) -> str:
    asked = options["reduce_fx"]
    name = asked if isinstance(asked, str) else getattr(asked, "__name__", "")
    return "mean" if name.lower() == "avg" else name.lower()


def loss_of(value: Any, step: Step | None) -> LossMark | None:
    """Return which loss of the step a value is: a mean over the tokens of all ranks."""
    if not isinstance(value, Tensor) or step is None:
        return None
    same = (mark for mark in step.losses if mark.value.data_ptr() == value.data_ptr())
    return next(same, None)


# ---------------------------------------------------------------- a step that leaves no trace


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics inside a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


@contextmanager
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Put the states of metrics back as they were."""
    parts = [m for m in module.modules() if isinstance(m, Metric | MetricCollection)]
    others = [{k: _kept(v) for k, v in vars(m).items() if _is_figure(v)} for m in parts]
    # In one copy: the metrics of a collection share their states.
    states = deepcopy([{k: vars(m)[k] for k in getattr(m, "_defaults", ())} for m in parts])
    try:
        yield
    finally:
        for metric, other, state in zip(parts, others, states, strict=True):
            metric.__dict__.update(other | state)


def _is_figure(value: Any) -> bool:
    """Say whether an attribute of a metric is one that computing may change."""
    return not callable(value) and not isinstance(value, nn.Module)


def _kept(value: Any) -> Any:
    return value if isinstance(value, dist.ProcessGroup) else copy(value)


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Put plain attributes, lists and dicts of a module, and all buffers, back as they were.

    Those of its parts stay: libraries note there what they have set up for good.
    """
    attributes = _plain_attributes(module)
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        _put_back(module, attributes)


_OWN: Final = frozenset(vars(nn.Module())) | {"log"}
_PLAIN: Final = (int, float, str, bool, type(None), tuple)
_CHANGING: Final = (list, dict, set, deque, Tensor, np.ndarray)


def _plain_attributes(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return plain attributes, each with a copy of what it holds."""
    return {
        name: (value, _snapshot(value))
        for name, value in vars(part).items()
        if name not in _OWN and isinstance(value, (*_PLAIN, *_CHANGING))
    }


# What is larger is data, not something that a step adds to: it is not copied.
_MOST_ITEMS, _MOST_NUMBERS = 1_000, 1 << 24


def _snapshot(value: Any) -> Any:
    """Return what it takes to put a value back: copies of numbers, and of what containers hold."""
    if isinstance(value, Tensor):
        is_small = value.numel() <= _MOST_NUMBERS and not isinstance(value, DTensor)
        return value.detach().clone() if is_small and not value.is_meta else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _MOST_NUMBERS else None
    deep = isinstance(value, list | tuple | deque | dict) and len(value) <= _MOST_ITEMS
    if isinstance(value, dict):
        return {key: (item, _snapshot(item) if deep else None) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [(item, _snapshot(item) if deep else None) for item in value]
    return copy(value) if isinstance(value, set) else None


def _restore(value: Any, held: Any) -> None:
    """Give a value what it held, down to the values inside of it."""
    if held is None:
        return
    if isinstance(value, Tensor):
        if not torch.equal(value, held):
            value.copy_(held)
    elif isinstance(value, np.ndarray):
        value[...] = held
    elif isinstance(value, dict):
        value.clear()
        for key, (item, inner) in held.items():
            _restore(item, inner)
            value[key] = item
    elif isinstance(value, list | tuple | deque):
        for item, inner in held:
            _restore(item, inner)
        if not isinstance(value, tuple):
            value.clear()
            value.extend(item for item, _ in held)
    elif isinstance(value, set):
        value.clear()
        value.update(held)


@torch.no_grad()
def _put_back(part: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    for name in [*_plain_attributes(part)]:
        if name not in attributes:
            del part.__dict__[name]
    for name, (value, held) in attributes.items():
        _restore(value, held)
        part.__dict__[name] = value
