# SPDX-License-Identifier: Apache-2.0
"""Put partial attention together: (out, lse) + (out, lse), in place.

Two blocks of keys give two softmaxes, each normalised by its own sum; lse is the log of that sum.
The whole is their mean, weighted by those sums. Accumulated in float32, in float64 for float64.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from lightning_cp.attn import triton_ops
from lightning_cp.geometry.ranges import Range
from lightning_cp.options import GradientWire

NEVER = float("-inf")
"""The lse of a query that has seen no key: its sum is empty."""

_HARDLY = -1e30


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which sums over blocks are kept: never less than the input's."""
    return torch.promote_types(dtype, torch.float32)


def wire_dtype(dtype: torch.dtype, gradient_wire: GradientWire) -> torch.dtype:
    """Return the precision in which gradients travel that are added up on the way.

    Example:
        >>> wire_dtype(torch.bfloat16, "float32"), wire_dtype(torch.bfloat16, "model")
        (torch.float32, torch.bfloat16)
    """
    return dtype if gradient_wire == "model" else accumulation_dtype(dtype)


Softmaxed = tuple[Tensor, Tensor]
"""Partial attention: out [B, H, L, D] and the log of its sums [B, H, L]."""


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to an accumulator, in place.

    Args:
        out: [B, H, L, D], accumulated output; 0 where nothing was seen.
        lse: [B, H, L], its log of sums; -inf where nothing was seen.
        block_out: the block's output, in any precision.
        block_lse: the block's log of sums.
    """
    merge_into(out, lse, (out, lse), (block_out, block_lse))


def merge_into(out: Tensor, lse: Tensor, a: Softmaxed, b: Softmaxed) -> None:
    """Write two parts, put together, to ``out`` and ``lse``; these may be those of ``a``.

    Computed in at least float32, whatever the parts and ``out`` are in.
    """
    if triton_ops.can_take(out, a[0], b[0]):
        triton_ops.merge_into(out, lse, a, b)
        return
    (a_out, a_lse), (b_out, b_lse) = a, b
    dtype = accumulation_dtype(out.dtype)
    # weight = e^b / (e^b + e^a). A query that neither side has seen carries -inf twice, and
    # -inf - -inf is NaN: it keeps the empty accumulator, so that ranks which hold only padding
    # stay finite.
    weight = torch.sigmoid(b_lse - a_lse)
    weight = torch.where(b_lse == NEVER, 0.0, weight).unsqueeze(-1).to(dtype)
    if out is a_out and out.dtype == dtype:
        out.lerp_(b_out.to(dtype), weight)
    else:
        out.copy_(torch.lerp(a_out.to(dtype), b_out.to(dtype), weight))
    torch.logaddexp(a_lse.to(lse.dtype), b_lse.to(lse.dtype), out=lse)


def sum_into(out: Tensor, a: Tensor, b: Tensor | None = None) -> None:
    """Write a, or a + b, to ``out``: added in at least float32, rounded once."""
    parts = (a,) if b is None else (a, b)
    # torch is fast where both lie alike, and three times as slow as it could be where they do not.
    is_copy = b is None and a.dtype == out.dtype and a.stride() == out.stride()
    if not is_copy and triton_ops.can_take(out, *parts):
        triton_ops.sum_into(out, a, b)
    elif b is None:
        out.copy_(a)
    # torch adds in float32 what is narrower, and rounds to the wider of both before it writes.
    elif torch.promote_types(a.dtype, b.dtype) == torch.promote_types(a.dtype, out.dtype):
        torch.add(a, b, out=out)
    else:
        out.copy_(a)
        out += b


class Where(NamedTuple):
    """A part of a tensor [B, H, L, D], all heads: some rows of the batch and some tokens."""

    batch: Range
    tokens: Range

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """Return the index that picks it out."""
        return slice(*self.batch), slice(None), slice(*self.tokens)

    @property
    def size(self) -> int:
        """Return how many tokens it covers, over the rows."""
        return self.batch.size * self.tokens.size

    def meets(self, other: "Where") -> bool:
        """Say whether they have anything in common."""
        return bool(self.batch.meet(other.batch).size and self.tokens.meet(other.tokens).size)


T = TypeVar("T", Tensor, Softmaxed)

# More are put into one tensor at once: looking through them would cost more than it saves.
_MOST_PATCHES = 16


class Patches(ABC, Generic[T]):
    """A tensor that is put together of parts, each of which covers some of it.

    Up to two parts of a place are kept as they came, and put together straight into the result:
    most calls have no more, and are spared an accumulator. A part that is the whole is the result.

    Args:
        whole: what all parts cover together.
        expects_more: whether places get more than two parts: the second one makes the accumulator.
    """

    def __init__(self, whole: Where, *, expects_more: bool = False) -> None:
        self.whole = whole
        self._expects_more = expects_more
        self._patches: dict[Where, list[T]] = {}
        self._total: T | None = None

    def add(self, where: Where, part: T) -> None:
        """Add a part."""
        if self._total is None:
            held = self._patches.setdefault(where, [])
            if len(held) == 1 and self._expects_more and where == self.whole:
                self._patches.clear()
                self._total = self._empty(raised=True)
                self._write_both(self._total, where, held.pop(), part)
                return
            if len(held) == 1:
                held.append(part)
                return
            others = (other for other in self._patches if other != where)
            few = len(self._patches) <= _MOST_PATCHES
            if not held and few and not any(where.meets(other) for other in others):
                held.append(part)
                return
            self._total = self._gathered()
        self._add_to(self._total, where, part)

    def _gathered(self) -> T:
        """Move all parts into a new accumulator."""
        total = self._empty(raised=True)
        patches, self._patches = self._patches, {}
        self._fill(total, [where for where, parts in patches.items() if parts])
        for where, parts in patches.items():
            if len(parts) == 1:
                self._write(total, where, parts.pop())
            elif parts:
                self._write_both(total, where, *parts)
                parts.clear()
        return total

    def _fill(self, target: T, written: list[Where]) -> None:
        """Make empty what will not be written; parts do not overlap."""
        if sum(where.size for where in written) < self.whole.size:
            self._clear(target)

    def result(self) -> T:
        """Return the whole, in the precision of what it is for."""
        if self._total is not None:
            return self._finished(self._total)
        if list(self._patches) == [self.whole] and len(self._patches[self.whole]) == 1:
            return self._finished(self._patches[self.whole][0])
        total = self._empty(raised=False)
        self.write(total)
        return total

    def write(self, target: T) -> None:
        """Write the whole into a tensor."""
        if self._total is not None:
            self._write(target, self.whole, self._total)
            return
        self._fill(target, list(self._patches))
        for where, parts in self._patches.items():
            if len(parts) == 1:
                self._write(target, where, parts[0])
            else:
                self._write_both(target, where, *parts)

    @abstractmethod
    def _empty(self, *, raised: bool) -> T:
        """Return memory for the whole, in the precision of sums or in that of the result."""

    @abstractmethod
    def _clear(self, target: T) -> None:
        """Let it hold nothing."""

    @abstractmethod
    def _write(self, target: T, where: Where, part: T) -> None:
        """Write a part to its place."""

    @abstractmethod
    def _write_both(self, target: T, where: Where, a: T, b: T) -> None:
        """Write two parts, put together, to their place."""

    @abstractmethod
    def _add_to(self, total: T, where: Where, part: T) -> None:
        """Add a part to an accumulator."""

    @abstractmethod
    def _finished(self, total: T) -> T:
        """Return the whole in the precision of the result."""


class Softmax(Patches[Softmaxed]):
    """Partial attention of one call, put together part by part.

    Args:
        q: the queries [B, H, L, D], for shape, dtype and device.
        value_dim: head dim of the output.
        expects_more: see `Patches`.
    """

    def __init__(self, q: Tensor, value_dim: int, *, expects_more: bool = False) -> None:
        whole = Where(Range(0, q.shape[0]), Range(0, q.shape[2]))
        super().__init__(whole, expects_more=expects_more)
        self._like = q
        self._value_dim = value_dim

    def _empty(self, *, raised: bool) -> Softmaxed:
        return empty_softmaxed(self._like, self._value_dim, raised=raised)

    def _clear(self, target: Softmaxed) -> None:
        target[0].zero_()
        target[1].fill_(NEVER)

    def _write(self, target: Softmaxed, where: Where, part: Softmaxed) -> None:
        for to, from_ in zip(target, part, strict=True):
            to[where.place].copy_(from_)

    def _write_both(self, target: Softmaxed, where: Where, a: Softmaxed, b: Softmaxed) -> None:
        merge_into(target[0][where.place], target[1][where.place], a, b)

    def _add_to(self, total: Softmaxed, where: Where, part: Softmaxed) -> None:
        merge_(total[0][where.place], total[1][where.place], *part)

    def _finished(self, total: Softmaxed) -> Softmaxed:
        return total[0].to(self._like.dtype), total[1]


def empty_softmaxed(q: Tensor, value_dim: int, *, raised: bool = False) -> Softmaxed:
    """Return memory for the attention of ``q``; ``raised`` in the precision of sums."""
    dtype = accumulation_dtype(q.dtype)
    lse = q.new_empty(q.shape[:-1], dtype=dtype)
    if value_dim == q.shape[-1]:
        return torch.empty_like(q, dtype=dtype if raised else None), lse
    return q.new_empty(*q.shape[:-1], value_dim, dtype=dtype if raised else None), lse


def laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """Return x in the layout of `empty_softmaxed`: some kernels want one for both."""
    if x.shape != q.shape:
        return x.contiguous()
    return x if x.stride() == _own_strides(q.shape, q.stride()) else torch.empty_like(q).copy_(x)


@lru_cache(maxsize=64)
def _own_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives to a new tensor like one of these."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


class Sum(Patches[Tensor]):
    """A gradient, added up part by part in at least float32.

    Args:
        like: what it is the gradient of.
        expects_more: see `Patches`.
    """

    def __init__(self, like: Tensor, *, expects_more: bool = False) -> None:
        whole = Where(Range(0, like.shape[0]), Range(0, like.shape[2]))
        super().__init__(whole, expects_more=expects_more)
        self._like = like

    def _empty(self, *, raised: bool) -> Tensor:
        dtype = accumulation_dtype(self._like.dtype)
        return torch.empty_like(self._like, dtype=dtype if raised else None)

    def _clear(self, target: Tensor) -> None:
        target.zero_()

    def _write(self, target: Tensor, where: Where, part: Tensor) -> None:
        sum_into(target[where.place], part)

    def _write_both(self, target: Tensor, where: Where, a: Tensor, b: Tensor) -> None:
        sum_into(target[where.place], a, b)

    def _add_to(self, total: Tensor, where: Where, part: Tensor) -> None:
        total[where.place] += part

    def _finished(self, total: Tensor) -> Tensor:
        return total.to(self._like.dtype)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let each head's sink take its share of the softmax, in place.

    A sink is a key that is always visible and whose value is 0: it only enlarges the sum.

    Args:
        out: [B, H, L, D], the output without sinks.
        lse: [B, H, L], its log of sums; afterwards with the sink.
        sinks: [H], one logit per head.
    """
    if _can_fuse(sinks, out):
        triton_ops.add_sinks_(out, lse, sinks)
        return
    logits = _logits(sinks, lse)
    torch.mul(out, _share(lse, logits).unsqueeze(-1), out=out)
    torch.logaddexp(lse, logits, out=lse)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return d loss / d sinks, [H], from this rank's queries; of `add_sinks_` and its results.

    The softmax's derivative for a key of value v is p (dout.v - dout.out); here v = 0.
    """
    if _can_fuse(sinks, dout, out):
        taken = triton_ops.sink_gradients(dout, out, lse, sinks)
    else:
        taken = _dot_rows(dout, out) * torch.exp(_logits(sinks, lse) - lse)
    return -taken.sum((0, 2)).to(sinks.dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return what `add_sinks_` makes of ``out``, and leave both as they are; rounded once.

    Differentiable by autograd and compilers. The share of the keys is e^-softplus(sink - lse): its
    derivative is the product of both shares, each by itself. 1 - the other's would be rounding.
    """
    # A query that has seen no key has a share of 0; -inf - -inf would be NaN. Beyond its threshold
    # softplus is the identity: torch's own, 20, would be felt in float64.
    distance = sinks.to(lse.dtype)[:, None] - lse.clamp(min=_HARDLY)
    share = torch.exp(-functional.softplus(distance, threshold=60.0))
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _can_fuse(sinks: Tensor, *tensors: Tensor) -> bool:
    # Kernels take any address. A DTensor has none, and torch refuses what is elsewhere.
    return (
        triton_ops.can_take(*tensors)
        and sinks.device == tensors[0].device
        and sinks.data_ptr() != 0
    )


def _logits(sinks: Tensor, lse: Tensor) -> Tensor:
    return sinks.detach().to(lse.dtype)[:, None].expand_as(lse)


def _share(part: Tensor, other: Tensor) -> Tensor:
    """Return e^part / (e^part + e^other); 0 where neither is there.

    Each share by itself: that of a small part, as 1 - the other's, would be rounding.
    """
    return torch.where(part == NEVER, 0.0, torch.sigmoid(part - other))


def _dot_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over D of x times y, [B, H, L] in at least float32."""
    dtype = accumulation_dtype(x.dtype)
    return (x.to(dtype) * y.to(dtype)).sum(-1)
