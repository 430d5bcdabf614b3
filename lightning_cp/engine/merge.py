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
