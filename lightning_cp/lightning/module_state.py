# SPDX-License-Identifier: Apache-2.0
"""The metrics inside a module, and their states after a run that must leave no trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric, MetricCollection


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics inside a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


@contextmanager
def restored_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the states of metrics on exit."""
    metrics = [m for m in module.modules() if isinstance(m, Metric | MetricCollection)]
    # In one copy: the metrics of a collection share their states.
    states = deepcopy([{k: vars(m)[k] for k in _names(m)} for m in metrics])
    attributes = [
        {k: _copy_attribute(x) for k, x in vars(m).items() if k not in state and _may_change(x)}
        for m, state in zip(metrics, states, strict=True)
    ]
    try:
        yield
    finally:
        for metric, saved, state in zip(metrics, attributes, states, strict=True):
            metric.__dict__.update(saved | state)


def _names(metric: nn.Module) -> list[str]:
    return [*metric.metric_state] if isinstance(metric, Metric) else []


def _may_change(value: Any) -> bool:
    """Return whether computing may change an attribute of a metric."""
    return not callable(value) and not isinstance(value, nn.Module)


def _copy_attribute(value: Any) -> Any:
    return value if isinstance(value, dist.ProcessGroup) else copy(value)
