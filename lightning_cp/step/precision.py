# SPDX-License-Identifier: Apache-2.0
"""Dtypes of computation: what sums are accumulated in, and what autocast would choose."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cp.private.modes import any_autocast


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed: float32, or wider."""
    return torch.promote_types(dtype, torch.float32)


def as_autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Cast the inputs of attention, on one device, to the dtype that autocast would choose."""
    if not any_autocast():
        return inputs
    device_type = inputs[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return inputs
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs)


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off inside; free where it is off, or not available (``meta``)."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class ForwardState:
    """Autocast and random numbers of a forward pass, for a backward that computes it again.

    Args:
        device: of the computation.
        autocast: its dtype; None where it is off, or not available.
        cpu_random: state of the CPU's generator.
        gpu_random: state of the GPU's generator; None for other devices.
    """

    device: torch.device
    autocast: torch.dtype | None
    cpu_random: Tensor
    gpu_random: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> "ForwardState":
        """Return the current state."""
        kind, dtype = device.type, None
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        gpu = torch.cuda.get_rng_state(device) if kind == "cuda" else None
        return cls(device, dtype, torch.get_rng_state(), gpu)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Compute in this state inside, and continue with the current one on exit."""
        kind = self.device.type
        autocast: AbstractContextManager[Any] = autocast_off(kind)
        if self.autocast is not None:
            autocast = torch.autocast(kind, dtype=self.autocast)
        gpus = [self.device] if self.gpu_random is not None else []
        with torch.random.fork_rng(gpus), autocast:
            torch.set_rng_state(self.cpu_random)
            if self.gpu_random is not None:
                torch.cuda.set_rng_state(self.gpu_random, self.device)
            yield
