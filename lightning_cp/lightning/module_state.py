# SPDX-License-Identifier: Apache-2.0
"""The state of a module that a step may change: metrics, buffers, plain attributes.

Restores it after a run that must leave no trace. Knows torch and torchmetrics.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

_MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module())) | {"log"}
_IMMUTABLE: Final = (int, float, str, bool, type(None), tuple)
_MUTABLE: Final = (list, dict, set, deque, Tensor, np.ndarray)

# Larger containers and arrays are data, not something that a step appends to: not copied.
_MAX_ITEMS, _MAX_NUMEL = 1_000, 1 << 24


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics inside a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


@contextmanager
def restored_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the states of metrics on exit."""
    metrics = [m for m in module.modules() if isinstance(m, Metric | MetricCollection)]
    # In one copy: the metrics of a collection share their states.
    states = deepcopy([{k: vars(m)[k] for k in getattr(m, "_defaults", ())} for m in metrics])
    attributes = [
        {k: _copy_attribute(x) for k, x in vars(m).items() if k not in state and _may_change(x)}
        for m, state in zip(metrics, states, strict=True)
    ]
    try:
        yield
    finally:
        for metric, saved, state in zip(metrics, attributes, states, strict=True):
            metric.__dict__.update(saved | state)


def _may_change(value: Any) -> bool:
    """Return whether computing may change an attribute of a metric."""
    return not callable(value) and not isinstance(value, nn.Module)


def _copy_attribute(value: Any) -> Any:
    return value if isinstance(value, dist.ProcessGroup) else copy(value)


@contextmanager
def restored_attributes(module: nn.Module) -> Iterator[None]:
    """Restore the plain attributes, lists and dicts of a module, and all buffers, on exit.

    Attributes of submodules are not restored: libraries store there what they set up once.
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
        _restore_attributes(module, attributes)


def _plain_attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return plain attributes, each with a snapshot of its contents."""
    return {
        name: (value, _snapshot(value))
        for name, value in vars(module).items()
        if name not in _MODULE_ATTRIBUTES and isinstance(value, (*_IMMUTABLE, *_MUTABLE))
    }


def _snapshot(value: Any) -> Any:
    """Return copies of the numbers in a value and of the items of its containers."""
    if isinstance(value, Tensor):
        is_small = value.numel() <= _MAX_NUMEL and not isinstance(value, DTensor)
        return value.detach().clone() if is_small and not value.is_meta else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _MAX_NUMEL else None
    deep = isinstance(value, list | tuple | deque | dict) and len(value) <= _MAX_ITEMS
    if isinstance(value, dict):
        return {key: (item, _snapshot(item) if deep else None) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [(item, _snapshot(item) if deep else None) for item in value]
    return copy(value) if isinstance(value, set) else None


def _restore(value: Any, snapshot: Any) -> None:
    """Restore the contents of a value in place, recursively."""
    if snapshot is None:
        return
    if isinstance(value, Tensor):
        if not torch.equal(value, snapshot):
            value.copy_(snapshot)
    elif isinstance(value, np.ndarray):
        value[...] = snapshot
    elif isinstance(value, dict):
        value.clear()
        for key, (item, inner) in snapshot.items():
            _restore(item, inner)
            value[key] = item
    elif isinstance(value, list | tuple | deque):
        for item, inner in snapshot:
            _restore(item, inner)
        if not isinstance(value, tuple):
            value.clear()
            value.extend(item for item, _ in snapshot)
    elif isinstance(value, set):
        value.clear()
        value.update(snapshot)


@torch.no_grad()
def _restore_attributes(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    for name in [*_plain_attributes(module)]:
        if name not in attributes:
            del module.__dict__[name]
    for name, (value, snapshot) in attributes.items():
        _restore(value, snapshot)
        module.__dict__[name] = value
