# SPDX-License-Identifier: Apache-2.0
"""The oracle: attention in plain torch, any mask, any precision, softcap, any head dims.

Half precisions are computed in float32. Slow, and exact wherever torch runs.
"""

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import NEVER, accumulation_dtype
from lightning_cp.attn.blockwise.kernels.base import (
    BackwardInputs,
    Request,
    Scores,
    TiledKernel,
    TileMask,
    cut_tile,
)
from lightning_cp.attn.plan import Block, PlacedTile


class ReferenceKernel(TiledKernel):
    """Pure torch; grouped heads by broadcasting, never by expanding keys."""

    name = "reference"
    tile_size = 512
    fuses = False
    # Scores of a tile are written out: whole tiles are cut too, or long rows would not fit.
    largest_tile = 1024

    def refuse(self, request: Request) -> str | None:
        """Refuse nothing."""
        return None

    def tiles(self, block: Block, bias: Tensor | None) -> tuple[PlacedTile, ...]:
        """Return tiles none of which is large."""
        tiles = super().tiles(block, bias)
        return tuple(part for tile in tiles for part in cut_tile(tile, self.largest_tile))

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Compute softmax(scores) v and the log of its sum."""
        q, k, v = _grouped(q, k), _raised(k), _raised(v)
        logits, _ = _logits(q, k, mask, scores)
        lse = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - _finite(lse))
        out = weights @ v.unsqueeze(2)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def tile_backward(
        self, given: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate, with weights made from the whole softmax's lse."""
        dout, q, k, v, out, lse = given
        dout, out = _grouped(dout, k), _grouped(out, k)
        q, k, v = _grouped(q, k), _raised(k), _raised(v)
        logits, slope = _logits(q, k, mask, scores)
        weights = torch.exp(logits - lse.reshape(q.shape[:-1]).unsqueeze(-1).to(q.dtype))
        dv = (weights.mT @ dout).sum(2)
        spread = (dout * out).sum(-1, keepdim=True)
        dlogits = weights * (dout @ v.unsqueeze(2).mT - spread) * slope * scores.scale
        dq = (dlogits @ k.unsqueeze(2)).flatten(1, 2)
        dk = (dlogits.mT @ q).sum(2)
        return dq, dk, dv


def _raised(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return [B, K, H / K, L, D]: the query heads beside the key head that they share."""
    return _raised(x).reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _logits(q: Tensor, k: Tensor, mask: TileMask, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Return the masked scores, and their derivative by the uncapped ones."""
    logits = q @ k.unsqueeze(2).mT * scores.scale
    slope: Tensor | float = 1.0
    if scores.softcap is not None:
        bent = torch.tanh(logits / scores.softcap)
        logits, slope = bent * scores.softcap, 1 - bent * bent
    if mask.bias is not None:
        logits = logits + _grouped_bias(mask.bias, q)
    visible = mask.visible()
    if visible is not None:
        logits = logits.masked_fill(~visible.unsqueeze(1), NEVER)
    return logits, slope


def _grouped_bias(bias: Tensor, q: Tensor) -> Tensor:
    """Return [B or 1, K or 1, H / K or 1, Lq or 1, Lk], to go with grouped scores."""
    shape = q.shape[1:3] if bias.shape[1] > 1 else (1, 1)
    return bias.to(q.dtype).reshape(bias.shape[0], *shape, *bias.shape[2:])


def _finite(lse: Tensor) -> Tensor:
    """Return lse, with 0 for queries that see nothing: exp(-inf - 0) is the 0 that they need."""
    return torch.where(lse == NEVER, 0.0, lse).unsqueeze(-1)
