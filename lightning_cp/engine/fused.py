# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN202  Triton reads annotations
"""Small kernels of our own for the GPU, in Triton: one pass over memory where torch takes several.

Everything here has an equal in plain torch, which serves wherever Triton does not.
"""

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # builds of torch for CPUs come without it
    triton = None

_logger = logging.getLogger(__name__)

_ROWS = 32
# What starts a kernel that is compiled already: Triton's own way looks at every argument again,
# which costs the host 60 µs and more.
_ready: dict[object, Any] = {}


def can_take(*tensors: Tensor) -> bool:
    """Say whether these [B, H, L, D] are on a GPU, in rows that start at multiples of 16 bytes."""
    return triton is not None and all(_is_fit(x) for x in tensors) and can_start(tensors[0].device)


@lru_cache(maxsize=16)
def can_start(device: torch.device) -> bool:
    """Say whether a kernel can be compiled and started here, by trying; a failure is logged."""
    if triton is None or device.type != "cuda":
        return False
    x, factors = torch.ones(1, 1, 4, 16, device=device), torch.full((1, 1, 4), 2.0, device=device)
    try:
        for _ in range(2):  # compiled and started, then started only
            scale_rows(x, factors, x)
        works = bool((x == 4).all())
    except Exception as error:  # noqa: BLE001  no compiler, an old GPU, no place to write: anything
        works = False
        _logger.warning(
            "Triton does not work here (%s: %s): attention takes slower kernels. It needs a C "
            "compiler such as gcc, and a folder to write to (TRITON_CACHE_DIR).",
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
    """Do what `merge.merge_into` does: each number is read once and written once."""
    batch, heads, length, dim = out.shape
    if out.numel() == 0:
        return
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
        length,
    )
    _start(_merge, (-(-length // _ROWS), heads, batch), args, *_constants(dim))


def sum_into(out: Tensor, a: Tensor, b: Tensor | None) -> None:
    """Write a, or a + b, to ``out``, all [B, H, L, D]; added in float32. ``out`` may be a."""
    batch, heads, length, dim = out.shape
    if out.numel():
        both = a if b is None else b
        strides = (stride // 8 for x in (out, a, both) for stride in x.stride()[:3])
        args = (out, a, both, *strides, length)
        _start(_sum, (-(-length // _ROWS), heads, batch), args, b is not None, *_constants(dim))


def scale_rows(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Write x [B, H, L, D] times factors [B, H, L] to ``out``, which may be x."""
    batch, heads, length, dim = x.shape
    if x.numel():
        strides = (stride // 8 for t in (x, out) for stride in t.stride()[:3])
        args = (x, factors, out, *strides, *factors.stride(), length)
        _start(_scale, (-(-length // _ROWS), heads, batch), args, *_constants(dim))


def dot_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over D of x times y, [B, H, L] in float32."""
    batch, heads, length, dim = x.shape
    out = x.new_empty(batch, heads, length, dtype=torch.float32)
    if x.numel():
        strides = (stride // 8 for t in (x, y) for stride in t.stride()[:3])
        args = (x, y, out, *strides, *out.stride(), length)
        _start(_dot, (-(-length // _ROWS), heads, batch), args, *_constants(dim))
    return out


def _constants(dim: int) -> tuple[int, int, int]:
    """Return what kernels are compiled for: the head dim, rows and columns of a tile."""
    return dim, _ROWS, 1 << (dim - 1).bit_length()


def _start(kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], *constants: int) -> None:
    """Start a kernel; ``constants``, its last arguments, are what it is compiled for."""
    device = args[0].device
    dtypes = tuple(x.dtype for x in args if isinstance(x, Tensor))
    key = (kernel, device, dtypes, constants)
    ready = _ready.get(key)
    if ready is not None and device.index == torch.cuda.current_device():
        ready[grid](*args, *constants)
    else:
        with torch.cuda.device(device):
            _ready[key] = kernel[grid](*args, *constants)


if triton is not None:

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
        top = tl.maximum(x, y)
        # Where neither side has seen anything: 0 - -inf instead of -inf - -inf, which is NaN.
        base = tl.where(top == never, 0.0, top)
        x, y = tl.exp(x - base), tl.exp(y - base)
        total = x + y
        share = tl.where(total > 0, y / tl.where(total > 0, total, 1.0), 0.0)[:, None]
        # Strides come in units of 8 numbers.
        at_a = a_out + (batch * a_b + head * a_h + row[:, None] * a_l) * 8 + column[None, :]
        at_b = b_out + (batch * b_b + head * b_h + row[:, None] * b_l) * 8 + column[None, :]
        at_out = out + (batch * out_b + head * out_h + row[:, None] * out_l) * 8 + column[None, :]
        first = tl.load(at_a, real, 0.0).to(tl.float32)
        second = tl.load(at_b, real, 0.0).to(tl.float32)
        mixed = first + share * (second - first)
        tl.store(at_out, mixed.to(out.dtype.element_ty), real)
        summed = tl.where(top == never, never, base + tl.log(total))
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
        at_out = out + (batch * out_b + head * out_h + row * out_l) * 8 + column
        at_a = a + (batch * a_b + head * a_h + row * a_l) * 8 + column
        found = tl.load(at_a, real, 0.0).to(tl.float32)
        if BOTH:
            at_b = b + (batch * b_b + head * b_h + row * b_l) * 8 + column
            found += tl.load(at_b, real, 0.0).to(tl.float32)
        tl.store(at_out, found.to(out.dtype.element_ty), real)

    @triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
        do_not_specialize=list(range(3, 13)), do_not_specialize_on_alignment=[1]
    )
    def _scale(  # type: ignore[no-untyped-def]
        x,
        factors,
        out,
        x_b,
        x_h,
        x_l,
        out_b,
        out_h,
        out_l,
        factors_b,
        factors_h,
        factors_l,
        length,
        DIM: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        column = tl.arange(0, WIDTH)[None, :]
        real_row = row < length
        real = real_row[:, None] & (column < DIM)
        row = row.to(tl.int64)
        at_factors = factors + batch * factors_b + head * factors_h + row * factors_l
        factor = tl.load(at_factors, real_row, 0.0)[:, None]
        at_x = x + (batch * x_b + head * x_h + row[:, None] * x_l) * 8 + column
        at_out = out + (batch * out_b + head * out_h + row[:, None] * out_l) * 8 + column
        scaled = tl.load(at_x, real, 0.0).to(tl.float32) * factor
        tl.store(at_out, scaled.to(out.dtype.element_ty), real)

    @triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
        do_not_specialize=list(range(3, 13)), do_not_specialize_on_alignment=[2]
    )
    def _dot(  # type: ignore[no-untyped-def]
        x,
        y,
        out,
        x_b,
        x_h,
        x_l,
        y_b,
        y_h,
        y_l,
        out_b,
        out_h,
        out_l,
        length,
        DIM: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        column = tl.arange(0, WIDTH)[None, :]
        real_row = row < length
        real = real_row[:, None] & (column < DIM)
        row = row.to(tl.int64)
        at_x = x + (batch * x_b + head * x_h + row[:, None] * x_l) * 8 + column
        at_y = y + (batch * y_b + head * y_h + row[:, None] * y_l) * 8 + column
        product = tl.load(at_x, real, 0.0).to(tl.float32) * tl.load(at_y, real, 0.0).to(tl.float32)
        at_out = out + batch * out_b + head * out_h + row * out_l
        tl.store(at_out, tl.sum(product, 1), real_row)
