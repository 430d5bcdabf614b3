# SPDX-License-Identifier: Apache-2.0
"""Put partial attention together: (out, lse) + (out, lse), in place.

Two blocks of keys give two softmaxes, each normalised by its own sum; lse is the log of that sum.
The whole is their mean, weighted by those sums. Accumulated in float32, in float64 for float64.
"""

import torch
from torch import Tensor

NEVER = float("-inf")
"""The lse of a query that has seen no key: its sum is empty."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which sums over blocks are kept: never less than the input's."""
    return torch.promote_types(dtype, torch.float32)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to an accumulator, in place.

    Args:
        out: [B, H, L, D], accumulated output; 0 where nothing was seen.
        lse: [B, H, L], its log of sums; -inf where nothing was seen.
        block_out: the block's output, in any precision.
        block_lse: the block's log of sums.
    """
    # weight = e^block / (e^block + e^lse). A query that neither side has seen carries -inf twice,
    # and -inf - -inf is NaN: it keeps the empty accumulator, so that ranks which hold only padding
    # stay finite.
    weight = torch.sigmoid(block_lse - lse)
    weight = torch.where(block_lse == NEVER, 0.0, weight).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), weight.to(out.dtype))
    torch.logaddexp(lse, block_lse.to(lse.dtype), out=lse)


class Softmax:
    """Partial attention of one call, put together part by part.

    A part that is the whole is taken as it is: no copy, no sum.

    Args:
        q: the queries [B, H, L, D], for shape, dtype and device.
        value_dim: head dim of the output.
    """

    def __init__(self, q: Tensor, value_dim: int) -> None:
        self._like = q
        self._shape = (*q.shape[:-1], value_dim)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, heads: slice, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add a block's part, which covers some heads and rows."""
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out, lse
            return
        whole_out, whole_lse = self.result()
        dtype = accumulation_dtype(self._like.dtype)
        self._out, self._lse = whole_out.to(dtype), whole_lse
        merge_(self._out[:, heads, rows], whole_lse[:, heads, rows], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out [B, H, L, Dv] and lse [B, H, L]; 0 and -inf where nothing was added."""
        if self._out is None or self._lse is None:
            dtype = accumulation_dtype(self._like.dtype)
            self._out = self._like.new_zeros(self._shape, dtype=dtype)
            self._lse = self._like.new_full(self._shape[:-1], NEVER, dtype=dtype)
        return self._out, self._lse


class Sum:
    """A gradient, added up part by part in at least float32; a part that is the whole is taken.

    Args:
        like: what it is the gradient of.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, index: tuple[slice, ...], part: Tensor) -> None:
        """Add a part, which covers some of the tensor."""
        if self._total is None and part.shape == self._like.shape:
            self._total = part
            return
        self.running()[index] += part

    def running(self) -> Tensor:
        """Return the sum so far, to be added to in place."""
        dtype = accumulation_dtype(self._like.dtype)
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=dtype)
        else:
            self._total = self._total.to(dtype)
        return self._total

    def result(self) -> Tensor:
        """Return the sum, in the dtype of what it is the gradient of."""
        total = self.running() if self._total is None else self._total
        return total.to(self._like.dtype)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let each head's sink take its share of the softmax, in place.

    A sink is a key that is always visible and whose value is 0: it only enlarges the sum.

    Args:
        out: [B, H, L, D], the output without sinks.
        lse: [B, H, L], its log of sums; afterwards with the sink.
        sinks: [H], one logit per head.
    """
    logits = sinks.detach().to(lse.dtype)[:, None].expand_as(lse)
    share = torch.where(lse == NEVER, 0.0, torch.sigmoid(lse - logits))
    out.mul_(share.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, logits, out=lse)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return d loss / d sinks, [H], from this rank's queries.

    The softmax's derivative for a key of value v is p (dout.v - dout.out); here v = 0.
    """
    spread = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(share * spread).sum((0, 2)).to(sinks.dtype)
