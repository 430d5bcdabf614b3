# SPDX-License-Identifier: Apache-2.0
"""Dtypes of computation: what sums are accumulated in, and what autocast would choose."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed: float32, or wider."""
    return torch.promote_types(dtype, torch.float32)


def as_autocast(x: Tensor) -> Tensor:
    """Cast an input of attention to the dtype that autocast would choose for it."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off inside; free where it is off, or not available (``meta``)."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
