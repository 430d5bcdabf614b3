# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a request: the first of a list that does not refuse, or the one named.

``flex`` is not in the list: it computes all that a rank needs at once, not blocks
(`engine/row.py`). `prefer_flex` says where ``auto`` takes it all the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch

from lightning_cp.attn import triton_ops
from lightning_cp.attn.blockwise.kernels.base import Kernel, Request
from lightning_cp.attn.blockwise.kernels.cpu import CpuKernel
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel
from lightning_cp.attn.blockwise.kernels.flash import FlashKernel
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel
from lightning_cp.attn.flex.kernel import MIN_HEAD_DIM, MIN_QUERIES
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.options import KernelName, check_choice
from lightning_cp.torch_private import can_compile

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


# In float32 FlexAttention's kernels are slow, too; below, the reference is done before they are
# compiled.
_LONG_FLOAT32_ROW = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be computed, as far as it decides about FlexAttention; the same on all ranks.

    Args:
        is_dense: whether the mask is only causal, or hides nothing; see `is_dense`.
        has_bias: whether a bias or slopes are added to the scores.
        row_len: tokens of the row.
        num_queries: those of a rank, per row.
        min_head_dim: the smaller of the head dims of keys and values.
    """

    is_dense: bool
    has_bias: bool
    row_len: int
    num_queries: int
    min_head_dim: int


def is_dense(bounds: Bounds, row_len: int) -> bool:
    """Say whether a mask is only causal, or hides nothing; padding of ours does not count.

    Example:
        >>> from lightning_cp.geometry.mask import Mask
        >>> is_dense(Mask(causal=True, window=4).bounds(4), 4)  # it reaches everything
        True
        >>> is_dense(Mask(causal=True, window=3).bounds(4), 4)
        False
    """
    first, last = bounds.first[:, :row_len], bounds.last[:, :row_len]
    if first.any() or not (bounds.real_before[:, row_len] == row_len).all():
        return False
    return bool((last == row_len).all() or (last == np.arange(1, row_len + 1)).all())


def prefer_flex(
    listed: Kernel,
    request: Request,
    work: Work,
    *,
    compiles: Callable[[torch.device, torch.dtype], bool] | None = None,
) -> bool:
    """Say whether ``auto`` takes FlexAttention instead of the kernel that the list gives.

    Where all is dense the list's kernels are faster. Everything else they cut into tiles, and leave
    tiles at the edges to the reference, which writes scores out: on a GPU ten times slower.
    FlexAttention's kernels are deterministic as we call them (nothing is summed by atomics), so
    ``torch.use_deterministic_algorithms`` does not decide.

    Args:
        listed: what `select_kernel` gives.
        request: what is asked.
        work: what is to be computed.
        compiles: whether kernels are compiled for a device and a precision; by trying when None.
    """
    is_half = request.dtype in (torch.bfloat16, torch.float16)
    is_long = request.dtype == torch.float32 and work.row_len >= _LONG_FLOAT32_ROW
    able = (
        request.device.type == "cuda"  # it has no backward elsewhere
        and (is_half or is_long)  # float64 is asked for to be exact
        and work.num_queries >= MIN_QUERIES
        and work.min_head_dim >= MIN_HEAD_DIM
    )
    # Softcap, other scales, large head dims, float32, old GPUs: no fused kernel takes them.
    wanted = listed.name == "reference" or work.has_bias or not work.is_dense
    return able and wanted and (compiles or _compiles)(request.device, request.dtype)


def _compiles(device: torch.device, dtype: torch.dtype) -> bool:
    return can_compile(device, dtype) and triton_ops.can_start(device)
