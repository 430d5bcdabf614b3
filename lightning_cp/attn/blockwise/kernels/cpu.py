# SPDX-License-Identifier: Apache-2.0
"""The CPU's own flash attention (aten), tile by tile.

Its traps, all handled here: causal is aligned top-left, so only squares are causal; a row that its
mask leaves empty returns lse 0; head dims of keys and values must be equal; a mask must be float.
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
    same_dim,
)
from lightning_cp.attn.plan import Block, PlacedTile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuKernel(TiledKernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu` and its backward."""

    name = "cpu"
    tile_size = 256

    def refuse(self, request: Request) -> str | None:
        """Refuse other devices, and softcap, which the op does not know."""
        if request.device.type != "cpu":
            return f"it runs on the CPU, and the tensors are on {request.device}"
        if request.scores.softcap is not None:
            return f"it has no softcap (asked: {request.scores.softcap})"
        return None

    def tiles(self, block: Block, bias: Tensor | None) -> tuple[PlacedTile, ...]:
        """Return the tiles to compute; under slopes all are small: each takes a table."""
        tiles = super().tiles(block, bias)
        if bias is None or bias.dim() > 1:
            return tiles
        return tuple(part for tile in tiles for part in cut_tile(tile, 2 * self.tile_size))

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Run the op on one tile."""
        dim, value_dim = q.shape[-1], v.shape[-1]
        bias, seen = _bias(mask, q)
        if dim != value_dim:
            q, k, v = same_dim(q, k, v)
        out, lse = _forward(q, k, v, 0.0, mask.is_causal, attn_mask=bias, scale=scores.scale)
        if seen is not None:
            lse = torch.where(seen, lse, NEVER)
        return (out[..., :value_dim], lse) if dim > value_dim else (out, lse)

    def tile_backward(
        self, given: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the op's backward on one tile."""
        dout, q, k, v, out, lse = given
        dim, value_dim = q.shape[-1], v.shape[-1]
        bias, _ = _bias(mask, q)
        if dim != value_dim:
            q, k, v, out, dout = same_dim(q, k, v, out, dout)
        dq, dk, dv = _backward(
            dout, q, k, v, out, lse, 0.0, mask.is_causal, attn_mask=bias, scale=scores.scale
        )
        if dim != value_dim:
            dq, dk, dv = dq[..., :dim], dk[..., :dim], dv[..., :value_dim]
        return dq, dk, dv


def _bias(mask: TileMask, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the tile's mask as a float bias, and [.., .., Lq]: which queries see anything."""
    if mask.is_causal or mask.is_full:
        return None, None
    dtype = accumulation_dtype(q.dtype)
    bias, visible = mask.bias, mask.visible()
    if bias is None:
        bias = torch.zeros(1, dtype=dtype)
    else:
        bias = bias.to(dtype).expand(-1, -1, q.shape[2], -1)
    if visible is not None:
        bias = torch.where(visible, bias, NEVER)
    return bias, (bias > NEVER).any(-1)
