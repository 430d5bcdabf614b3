# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN202  Triton reads annotations
"""Triton kernels for the GPU that need one pass over memory where torch needs several.

Everything here has an equivalent in plain torch, which is used wherever Triton does not work.
"""

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # not included in builds of torch for CPUs
    triton = None

_logger = logging.getLogger(__name__)

_ROWS = 32
# Launchers of compiled kernels: Triton's own launch inspects every argument again, which takes the
# host 60 µs and more.
_ready: dict[object, Any] = {}


def can_take(*tensors: Tensor) -> bool:
    """Return whether these [B, H, L, D] are on a GPU, and each token is aligned to 16 bytes."""
    return triton is not None and all(_is_fit(x) for x in tensors) and can_start(tensors[0].device)


@lru_cache(maxsize=16)
def can_start(device: torch.device) -> bool:
    """Return whether kernels can be compiled and launched here, by trying; a failure is logged."""
    if triton is None or device.type != "cuda":
        return False
    x, lse = torch.ones(1, 1, 4, 16, device=device), torch.zeros(1, 1, 4, device=device)
    out = torch.empty_like(x)
    try:
        for _ in range(2):  # compiled and launched, then launched only
            merge_into(out, lse.clone(), (x, lse), (2 * x, lse))
        works = bool(((out - 1.5).abs() < 1e-3).all())
    except Exception as error:  # noqa: BLE001  no compiler, an old GPU, no folder to write to: anything
        works = False
        _logger.warning(
            "Triton does not work here (%s: %s): attention uses slower kernels. Triton needs a C "
            "compiler such as gcc, and a writable folder (TRITON_CACHE_DIR).",
            type(error).__name__,
            str(error).strip().splitlines()[:1],
        )
    return works


def _is_fit(x: Tensor) -> bool:
    *strides, last = x.stride()
    return (
        x.is_cuda
        and x.dtype != torch.float64
        and last == 1
        and x.data_ptr() % 16 == 0
        and all(stride % 8 == 0 and stride < 2**34 for stride in strides)
    )


def merge_into(
    out: Tensor, lse: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]
) -> None:
    """Compute `accumulators.merge_into`: each number is read once and written once."""
    (a_out, a_lse), (b_out, b_lse) = a, b
    args = (
        out,
        a_out,
        b_out,
        lse,
        a_lse,
        b_lse,
        *(stride // 8 for x in (out, a_out, b_out) for stride in x.stride()[:3]),
        *lse.stride(),
        *a_lse.stride(),
        *b_lse.stride(),
    )
    _start(_merge, out.shape, args)


def sum_into(out: Tensor, a: Tensor, b: Tensor | None) -> None:
    """Write a, or a + b, to ``out``, which may be a; all [B, H, L, D], added in float32."""
    second = a if b is None else b
    strides = (stride // 8 for x in (out, a, second) for stride in x.stride()[:3])
    _start(_sum, out.shape, (out, a, second, *strides), b is not None)


def _start(kernel: Any, shape: tuple[int, ...], args: tuple[Any, ...], *flags: bool) -> None:
    """Start a kernel on all tiles of [B, H, L, D].

    It is compiled for the dtypes, its flags, the head dim, and the rows and columns of a tile.
    """
    batch, heads, length, dim = shape
    if 0 in shape:
        return
    grid = (-(-length // _ROWS), heads, batch)
    constants = (*flags, dim, _ROWS, 1 << (dim - 1).bit_length())
    device = args[0].device
    key = (kernel, device, tuple(x.dtype for x in args if isinstance(x, Tensor)), constants)
    ready = _ready.get(key)
    if ready is not None and device.index == torch.cuda.current_device():
        ready[grid](*args, length, *constants)
    else:
        with torch.cuda.device(device):
            _ready[key] = kernel[grid](*args, length, *constants)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _share(x, y):  # type: ignore[no-untyped-def]
        """Return the share of e^y in e^x + e^y, and the log of the sum."""
        never = float("-inf")
        top = tl.maximum(x, y)
        # Where neither side has seen anything: 0 - -inf instead of -inf - -inf, which is NaN.
        base = tl.where(top == never, 0.0, top)
        x, y = tl.exp(x - base), tl.exp(y - base)
        total = x + y
        some = tl.where(total > 0, total, 1.0)
        return y / some, tl.where(top == never, never, base + tl.log(total))

    @triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
        do_not_specialize=list(range(6, 25)), do_not_specialize_on_alignment=[3, 4, 5]
    )
    def _merge(  # type: ignore[no-untyped-def]
        out,
        a_out,
        b_out,
        lse,
        a_lse,
        b_lse,
        out_b,
        out_h,
        out_l,
        a_b,
        a_h,
        a_l,
        b_b,
        b_h,
        b_l,
        lse_b,
        lse_h,
        lse_l,
        alse_b,
        alse_h,
        alse_l,
        blse_b,
        blse_h,
        blse_l,
        length,
        DIM: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        column = tl.arange(0, WIDTH)
        real_row = row < length
        real = real_row[:, None] & (column < DIM)[None, :]
        row = row.to(tl.int64)
        never = float("-inf")
        x = tl.load(a_lse + batch * alse_b + head * alse_h + row * alse_l, real_row, never)
        y = tl.load(b_lse + batch * blse_b + head * blse_h + row * blse_l, real_row, never)
        share, summed = _share(x, y)
        # Strides come in units of 8 numbers.
        at_a = a_out + (batch * a_b + head * a_h + row[:, None] * a_l) * 8 + column[None, :]
        at_b = b_out + (batch * b_b + head * b_h + row[:, None] * b_l) * 8 + column[None, :]
        at_out = out + (batch * out_b + head * out_h + row[:, None] * out_l) * 8 + column[None, :]
        first = tl.load(at_a, real, 0.0).to(tl.float32)
        second = tl.load(at_b, real, 0.0).to(tl.float32)
        mixed = first + share[:, None] * (second - first)
        tl.store(at_out, mixed.to(out.dtype.element_ty), real)
        # In place, all warps must have read what one of them writes.
        tl.debug_barrier()
        tl.store(lse + batch * lse_b + head * lse_h + row * lse_l, summed, real_row)

    @triton.jit(do_not_specialize=list(range(3, 13)))  # type: ignore[untyped-decorator,unused-ignore]
    def _sum(  # type: ignore[no-untyped-def]
        out,
        a,
        b,
        out_b,
        out_h,
        out_l,
        a_b,
        a_h,
        a_l,
        b_b,
        b_h,
        b_l,
        length,
        BOTH: tl.constexpr,
        DIM: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        column = tl.arange(0, WIDTH)[None, :]
        real = (row < length) & (column < DIM)
        row = row.to(tl.int64)
        at_a = a + (batch * a_b + head * a_h + row * a_l) * 8 + column
        values = tl.load(at_a, real, 0.0).to(tl.float32)
        if BOTH:
            at_b = b + (batch * b_b + head * b_h + row * b_l) * 8 + column
            values += tl.load(at_b, real, 0.0).to(tl.float32)
        at_out = out + (batch * out_b + head * out_h + row * out_l) * 8 + column
        tl.store(at_out, values.to(out.dtype.element_ty), real)
