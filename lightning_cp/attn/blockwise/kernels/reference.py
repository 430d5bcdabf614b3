# SPDX-License-Identifier: Apache-2.0
"""The reference kernel: attention in plain torch, any mask, dtype, softcap and head dims.

Half precisions are computed in float32. Slow, and exact wherever torch runs.
"""

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import NEVER
from lightning_cp.attn.blockwise.kernels.base import (
    BackwardInputs,
    Request,
    Scores,
    TiledKernel,
    TileMask,
    split_tile,
)
from lightning_cp.attn.call import ScoreBias, split_query_heads
from lightning_cp.attn.mask_blocks import Block, PlacedTile
from lightning_cp.step.precision import accumulation_dtype


class ReferenceKernel(TiledKernel):
    """Plain torch; query heads share key heads by broadcasting, never by expanding keys."""

    name = "reference"
    tile_size = 512
    fuses_tiles = False
    # Scores are materialized: full tiles are split too, or long sequences would not fit.
    max_tile_size = 1024

    def unsupported_reason(self, request: Request) -> str | None:
        """Return None: it supports everything."""
        return None

    def tiles(self, block: Block, bias: ScoreBias | None) -> tuple[PlacedTile, ...]:
        """Return the tiles to compute, none of them large."""
        tiles = super().tiles(block, bias)
        return tuple(part for tile in tiles for part in split_tile(tile, self.max_tile_size))

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Compute softmax(scores) v and its lse."""
        q, k, v = _grouped(q, k), _raised(k), _raised(v)
        logits, _ = _logits(q, k, mask, scores)
        lse = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - _finite(lse))
        out = weights @ v.unsqueeze(2)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def tile_backward(
        self, inputs: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate, with weights from the lse of the full softmax."""
        dout, q, k, v, out, lse = inputs
        dout, out = _grouped(dout, k), _grouped(out, k)
        q, k, v = _grouped(q, k), _raised(k), _raised(v)
        logits, softcap_grad = _logits(q, k, mask, scores)
        weights = torch.exp(logits - lse.reshape(q.shape[:-1]).unsqueeze(-1).to(q.dtype))
        dv = (weights.mT @ dout).sum(2)
        delta = (dout * out).sum(-1, keepdim=True)
        dlogits = weights * (dout @ v.unsqueeze(2).mT - delta) * softcap_grad * scores.scale
        dq = (dlogits @ k.unsqueeze(2)).flatten(1, 2)
        dk = (dlogits.mT @ q).sum(2)
        return dq, dk, dv


def _raised(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    return split_query_heads(_raised(x), k)


def _logits(q: Tensor, k: Tensor, mask: TileMask, scores: Scores) -> tuple[Tensor, Tensor | float]:
    """Return the masked scores, and the derivative of the softcap."""
    logits = q @ k.unsqueeze(2).mT * scores.scale
    softcap_grad: Tensor | float = 1.0
    if scores.softcap is not None:
        tanh = torch.tanh(logits / scores.softcap)
        logits, softcap_grad = tanh * scores.softcap, 1 - tanh * tanh
    if mask.bias is not None:
        logits = logits + _grouped_bias(mask.bias, q)
    visible = mask.visible()
    if visible is not None:
        logits = logits.masked_fill(~visible.unsqueeze(1), NEVER)
    return logits, softcap_grad


def _grouped_bias(bias: Tensor, q: Tensor) -> Tensor:
    """Return [B or 1, K or 1, H / K or 1, Lq or 1, Lk], as grouped scores."""
    shape = q.shape[1:3] if bias.shape[1] > 1 else (1, 1)
    return bias.to(q.dtype).reshape(bias.shape[0], *shape, *bias.shape[2:])


def _finite(lse: Tensor) -> Tensor:
    """Return lse, with 0 for queries that see nothing: exp(-inf - 0) is the 0 they need."""
    return torch.where(lse == NEVER, 0.0, lse).unsqueeze(-1)
