# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a request: the first of a list that does not refuse, or the one named.

``flex`` is not in the list: it computes whole rows, not blocks, and is asked for by its name
(`engine/flex.py`).
"""

from typing import Literal, get_args

from lightning_cp.choices import check_choice
from lightning_cp.engine.kernels.base import Kernel, Request
from lightning_cp.engine.kernels.cpu import CpuKernel
from lightning_cp.engine.kernels.cudnn import CudnnKernel
from lightning_cp.engine.kernels.flash import FlashKernel
from lightning_cp.engine.kernels.reference import ReferenceKernel

KernelName = Literal["auto", "cpu", "cudnn", "flash", "flex", "reference"]

# Fastest first; the last refuses nothing.
_KERNELS: tuple[Kernel, ...] = (CpuKernel(), CudnnKernel(), FlashKernel(), ReferenceKernel())


def check_kernel(name: str) -> None:
    """Refuse a kernel that does not exist."""
    check_choice("kernel", name, get_args(KernelName))


def check_pair(kernel: str, algorithm: str) -> None:
    """Refuse a kernel of whole rows with an algorithm that brings parts of them."""
    if kernel == "flex" and algorithm == "ring":
        raise ValueError(
            "kernel='flex' computes whole rows at once, and algorithm='ring' brings keys part by "
            "part. Use algorithm='gather' or 'ulysses' with it, or another kernel."
        )


def select_kernel(name: str, request: Request) -> Kernel:
    """Return the kernel for a request; a named one that cannot do it is an error."""
    check_kernel(name)
    refusals = {kernel.name: kernel.refuse(request) for kernel in _KERNELS}
    able = [kernel for kernel in _KERNELS if refusals[kernel.name] is None]
    if name == "auto":
        return able[0]
    for kernel in able:
        if kernel.name == name:
            return kernel
    names = " or ".join(repr(kernel.name) for kernel in able)
    raise ValueError(
        f"kernel={name!r} cannot compute this attention: {refusals[name]}. "
        f"Use kernel='auto', or {names}."
    )
