# SPDX-License-Identifier: Apache-2.0
"""The list of blockwise kernels: the first that supports a call is taken, or the one named.

``flex`` is not in the list: it computes a call at once, not in blocks (`attn/choose.py`).
"""

from lightning_cp.attn.blockwise.kernels.base import Kernel, Request
from lightning_cp.attn.blockwise.kernels.cpu import CpuKernel
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel
from lightning_cp.attn.blockwise.kernels.flash import FlashKernel
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel

# Fastest first; the last supports everything.
_KERNELS: tuple[Kernel, ...] = (CpuKernel(), CudnnKernel(), FlashKernel(), ReferenceKernel())


def select_kernel(name: str, request: Request) -> Kernel:
    """Return the kernel for a call; raise if a named one does not support it."""
    if name == "auto":
        return next(x for x in _KERNELS if x.unsupported_reason(request) is None)
    reasons = {kernel.name: kernel.unsupported_reason(request) for kernel in _KERNELS}
    able = [kernel for kernel in _KERNELS if reasons[kernel.name] is None]
    for kernel in able:
        if kernel.name == name:
            return kernel
    names = " or ".join(repr(kernel.name) for kernel in able)
    raise ValueError(
        f"kernel={name!r} cannot compute this attention: {reasons[name]}. "
        f"Use kernel='auto', or {names}."
    )
