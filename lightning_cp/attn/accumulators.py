# SPDX-License-Identifier: Apache-2.0
"""Accumulators of partial attention, (out, lse) + (out, lse), and of gradients.

Two KV blocks give two softmaxes, each normalised by its own sum; lse is the log of that sum. The
full softmax is their mean, weighted by those sums. Accumulated in float32, or float64 for float64.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from lightning_cp.attn import triton_ops
from lightning_cp.config import GradientWire
from lightning_cp.geometry.ranges import Range
from lightning_cp.step.precision import accumulation_dtype

NEVER = float("-inf")
"""The lse of a query that sees no key: its sum is empty."""

_LOWEST = -1e30


def wire_dtype(dtype: torch.dtype, gradient_wire: GradientWire) -> torch.dtype:
    """Return the dtype of gradients in reduce-scatters.

    Example:
        >>> wire_dtype(torch.bfloat16, "float32"), wire_dtype(torch.bfloat16, "model")
        (torch.float32, torch.bfloat16)
    """
    return dtype if gradient_wire == "model" else accumulation_dtype(dtype)


OutputAndLse = tuple[Tensor, Tensor]
"""Partial attention: out [B, H, L, D] and lse [B, H, L]."""


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to an accumulator, in place.

    Args:
        out: [B, H, L, D], accumulated output; 0 for queries that saw no key.
        lse: [B, H, L], accumulated lse; -inf for queries that saw no key.
        block_out: the block's output, in any precision.
        block_lse: the block's lse.
    """
    merge_into(out, lse, (out, lse), (block_out, block_lse))


def merge_into(out: Tensor, lse: Tensor, a: OutputAndLse, b: OutputAndLse) -> None:
    """Write the combination of two parts to ``out`` and ``lse``, which may be those of ``a``.

    Computed in at least float32, whatever the dtypes of the parts and of ``out``.
    """
    if triton_ops.can_take(out, a[0], b[0]):
        triton_ops.merge_into(out, lse, a, b)
        return
    (a_out, a_lse), (b_out, b_lse) = a, b
    dtype = accumulation_dtype(out.dtype)
    # weight = e^b / (e^b + e^a). A query that saw no key on either side has -inf twice, and
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
    # torch is fast if both have the same strides, and three times slower than necessary otherwise.
    is_copy = b is None and a.dtype == out.dtype and a.stride() == out.stride()
    if not is_copy and triton_ops.can_take(out, *parts):
        triton_ops.sum_into(out, a, b)
    elif b is None:
        out.copy_(a)
    # torch adds narrower dtypes in float32, and rounds to the wider of both before it writes.
    elif torch.promote_types(a.dtype, b.dtype) == torch.promote_types(a.dtype, out.dtype):
        torch.add(a, b, out=out)
    else:
        out.copy_(a)
        out += b


class TensorRegion(NamedTuple):
    """A region of a tensor [B, H, L, D]: some samples and some tokens, all heads."""

    batch: Range
    tokens: Range

    @property
    def indices(self) -> tuple[slice, slice, slice]:
        """Return the index that selects it."""
        return slice(*self.batch), slice(None), slice(*self.tokens)

    @property
    def size(self) -> int:
        """Return the number of tokens, over all samples."""
        return self.batch.size * self.tokens.size

    def overlaps(self, other: "TensorRegion") -> bool:
        """Return whether two regions have tokens in common."""
        return bool(self.batch.meet(other.batch).size and self.tokens.meet(other.tokens).size)


T = TypeVar("T", Tensor, OutputAndLse)

# More regions go into an accumulator at once: comparing them all would cost more than it saves.
_MAX_REGIONS = 16


class PartialSums(ABC, Generic[T]):
    """A tensor accumulated from parts, each of which covers a region of it.

    Up to two parts of a region are kept as they are, and combined straight into the result: most
    calls have no more, and need no accumulator. A single part that covers everything is the result.

    Args:
        region: what all parts cover together.
        expects_more: whether regions get more than two parts: then the second one allocates the
            accumulator.
    """

    def __init__(self, region: TensorRegion, *, expects_more: bool = False) -> None:
        self.region = region
        self._expects_more = expects_more
        self._parts: dict[TensorRegion, list[T]] = {}
        self._total: T | None = None

    def add(self, region: TensorRegion, part: T) -> None:
        """Add a part."""
        if self._total is None:
            parts = self._parts.setdefault(region, [])
            if len(parts) == 1 and self._expects_more and region == self.region:
                self._parts.clear()
                self._total = self._empty(raised=True)
                self._write_both(self._total, region, parts.pop(), part)
                return
            if len(parts) == 1:
                parts.append(part)
                return
            others = (other for other in self._parts if other != region)
            few = len(self._parts) <= _MAX_REGIONS
            if not parts and few and not any(region.overlaps(other) for other in others):
                parts.append(part)
                return
            self._total = self.accumulate_parts()
        self._add_to(self._total, region, part)

    def accumulate_parts(self) -> T:
        """Move all parts into a new accumulator."""
        total = self._empty(raised=True)
        kept, self._parts = self._parts, {}
        self._clear_rest(total, [region for region, parts in kept.items() if parts])
        for region, parts in kept.items():
            if len(parts) == 1:
                self._write(total, region, parts.pop())
            elif parts:
                self._write_both(total, region, *parts)
                parts.clear()
        return total

    def _clear_rest(self, target: T, regions: list[TensorRegion]) -> None:
        """Clear a tensor unless disjoint regions to be written cover all of it."""
        if sum(region.size for region in regions) < self.region.size:
            self._clear(target)

    def result(self) -> T:
        """Return the sum, in the precision of the result."""
        if self._total is not None:
            return self._finished(self._total)
        if list(self._parts) == [self.region] and len(self._parts[self.region]) == 1:
            return self._finished(self._parts[self.region][0])
        total = self._empty(raised=False)
        self.write(total)
        return total

    def write(self, target: T) -> None:
        """Write the sum into a tensor."""
        if self._total is not None:
            self._write(target, self.region, self._total)
            return
        self._clear_rest(target, list(self._parts))
        for region, parts in self._parts.items():
            if len(parts) == 1:
                self._write(target, region, parts[0])
            else:
                self._write_both(target, region, *parts)

    @abstractmethod
    def _empty(self, *, raised: bool) -> T:
        """Return an empty tensor, ``raised`` in the precision of sums, else of the result."""

    @abstractmethod
    def _clear(self, target: T) -> None:
        """Set a tensor to the sum of no parts."""

    @abstractmethod
    def _write(self, target: T, region: TensorRegion, part: T) -> None:
        """Write a part to its region."""

    @abstractmethod
    def _write_both(self, target: T, region: TensorRegion, a: T, b: T) -> None:
        """Write the combination of two parts to their region."""

    @abstractmethod
    def _add_to(self, total: T, region: TensorRegion, part: T) -> None:
        """Add a part to an accumulator."""

    @abstractmethod
    def _finished(self, total: T) -> T:
        """Return the sum in the precision of the result."""


class OutputAccumulator(PartialSums[OutputAndLse]):
    """The output of one call, accumulated from partial attention.

    Args:
        q: the queries [B, H, L, D], for shape, dtype and device.
        value_dim: head dim of the output.
        expects_more: see `PartialSums`.
    """

    def __init__(self, q: Tensor, value_dim: int, *, expects_more: bool = False) -> None:
        region = TensorRegion(Range(0, q.shape[0]), Range(0, q.shape[2]))
        super().__init__(region, expects_more=expects_more)
        self._like = q
        self._value_dim = value_dim

    def _empty(self, *, raised: bool) -> OutputAndLse:
        return empty_output(self._like, self._value_dim, raised=raised)

    def _clear(self, target: OutputAndLse) -> None:
        target[0].zero_()
        target[1].fill_(NEVER)

    def _write(self, target: OutputAndLse, region: TensorRegion, part: OutputAndLse) -> None:
        for to, from_ in zip(target, part, strict=True):
            to[region.indices].copy_(from_)

    def _write_both(
        self, target: OutputAndLse, region: TensorRegion, a: OutputAndLse, b: OutputAndLse
    ) -> None:
        merge_into(target[0][region.indices], target[1][region.indices], a, b)

    def _add_to(self, total: OutputAndLse, region: TensorRegion, part: OutputAndLse) -> None:
        merge_(total[0][region.indices], total[1][region.indices], *part)

    def _finished(self, total: OutputAndLse) -> OutputAndLse:
        return total[0].to(self._like.dtype), total[1]


def empty_output(q: Tensor, value_dim: int, *, raised: bool = False) -> OutputAndLse:
    """Return empty out and lse for ``q``; ``raised`` in the precision of sums."""
    dtype = accumulation_dtype(q.dtype)
    lse = q.new_empty(q.shape[:-1], dtype=dtype)
    if value_dim == q.shape[-1]:
        return torch.empty_like(q, dtype=dtype if raised else None), lse
    return q.new_empty(*q.shape[:-1], value_dim, dtype=dtype if raised else None), lse


def with_layout_of(q: Tensor, x: Tensor) -> Tensor:
    """Return x with the strides of `empty_output`: some kernels need out and dout alike."""
    if x.shape != q.shape:
        return x.contiguous()
    return x if x.stride() == new_strides(q.shape, q.stride()) else torch.empty_like(q).copy_(x)


@lru_cache(maxsize=64)
def new_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of ``torch.empty_like`` for a tensor of these strides."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def has_strides(x: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether x has the strides, except in dims of size 1, where they mean nothing."""
    own = x.stride()
    return own == strides or all(
        size == 1 or stride == other
        for size, stride, other in zip(x.shape, own, strides, strict=True)
    )


class GradAccumulator(PartialSums[Tensor]):
    """A gradient, accumulated in at least float32.

    Args:
        like: the tensor that it is the gradient of.
        expects_more: see `PartialSums`.
    """

    def __init__(self, like: Tensor, *, expects_more: bool = False) -> None:
        region = TensorRegion(Range(0, like.shape[0]), Range(0, like.shape[2]))
        super().__init__(region, expects_more=expects_more)
        self._like = like

    def _empty(self, *, raised: bool) -> Tensor:
        dtype = accumulation_dtype(self._like.dtype)
        return torch.empty_like(self._like, dtype=dtype if raised else None)

    def _clear(self, target: Tensor) -> None:
        target.zero_()

    def _write(self, target: Tensor, region: TensorRegion, part: Tensor) -> None:
        sum_into(target[region.indices], part)

    def _write_both(self, target: Tensor, region: TensorRegion, a: Tensor, b: Tensor) -> None:
        sum_into(target[region.indices], a, b)

    def _add_to(self, total: Tensor, region: TensorRegion, part: Tensor) -> None:
        total[region.indices] += part

    def _finished(self, total: Tensor) -> Tensor:
        return total.to(self._like.dtype)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Give each head's sink its share of the softmax, in place.

    A sink is a key that is always visible and whose value is 0: it only increases the sum.

    Args:
        out: [B, H, L, D], the output without sinks.
        lse: [B, H, L], its lse; afterwards with the sink.
        sinks: [H], one logit per head.
    """
    logits = _logits(sinks, lse)
    torch.mul(out, _share(lse, logits).unsqueeze(-1), out=out)
    torch.logaddexp(lse, logits, out=lse)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return d loss / d sinks, [H], for this rank's queries; out and lse are those with sinks.

    The softmax's derivative for a key of value v is p (dout.v - dout.out); here v = 0.
    """
    # A quarter of the heads at a time: products are in float32.
    parts = zip(dout.chunk(4, 1), out.chunk(4, 1), strict=True)
    products = torch.cat([_dot_head_dim(x, y) for x, y in parts], 1)
    shares = products * torch.exp(_logits(sinks, lse) - lse)
    return -shares.sum((0, 2)).to(sinks.dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return ``out`` with sinks, as `add_sinks_` does, but out of place; rounded once.

    Differentiable by autograd and compilers. The share of the keys is e^-softplus(sink - lse): its
    derivative is the product of both shares, each computed directly; 1 - share would lose digits.
    """
    # A query that saw no key has a share of 0; -inf - -inf would be NaN. Beyond its threshold
    # softplus is the identity: torch's default, 20, is too low for float64.
    distance = sinks.to(lse.dtype)[:, None] - lse.clamp(min=_LOWEST)
    share = torch.exp(-functional.softplus(distance, threshold=60.0))
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _logits(sinks: Tensor, lse: Tensor) -> Tensor:
    return sinks.detach().to(lse.dtype)[:, None].expand_as(lse)


def _share(part: Tensor, other: Tensor) -> Tensor:
    """Return e^part / (e^part + e^other); 0 if both are empty.

    Computed directly: a small share, as 1 - the other one, would lose digits.
    """
    return torch.where(part == NEVER, 0.0, torch.sigmoid(part - other))


def _dot_head_dim(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over D of x times y, [B, H, L] in at least float32."""
    dtype = accumulation_dtype(x.dtype)
    return (x.to(dtype) * y.to(dtype)).sum(-1)
