# SPDX-License-Identifier: Apache-2.0
"""Flash attention on the CPU (aten), tile by tile.

Its traps, all handled here: causal is aligned top-left, so only squares are causal; a query that
sees nothing gets lse 0; head dims of keys and values must be equal; a mask must be float.
"""

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import NEVER
from lightning_cp.attn.blockwise.kernels.base import (
    BackwardInputs,
    Differentiable,
    Request,
    Scores,
    TiledKernel,
    TileMask,
    same_dim,
    split_tile,
)
from lightning_cp.attn.call import AlibiSlopes, ScoreBias
from lightning_cp.attn.mask_blocks import Block, PlacedTile
from lightning_cp.step.precision import accumulation_dtype

forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuKernel(TiledKernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu` and its backward."""

    name = "cpu"
    tile_size = 256

    def unsupported_reason(self, request: Request) -> str | None:
        """Exclude other devices, scales with which the op is wrong, and softcap, which it lacks."""
        if request.device.type != "cpu":
            return f"it runs on CPUs, but the tensors are on {request.device}"
        if request.scores.softcap is not None:
            return f"it has no softcap (got {request.scores.softcap})"
        if request.scores.scale <= 0:  # it hides scores before it scales them
            return f"its scale must be above 0 (got {request.scores.scale})"
        return None

    def tiles(self, block: Block, bias: ScoreBias | None) -> tuple[PlacedTile, ...]:
        """Return the tiles to compute; with slopes all are small: a bias is built for each."""
        tiles = super().tiles(block, bias)
        if not isinstance(bias, AlibiSlopes):
            return tiles
        return tuple(part for tile in tiles for part in split_tile(tile, 2 * self.tile_size))

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Run the op on one tile."""
        dim, value_dim = q.shape[-1], v.shape[-1]
        bias, sees_any = _bias(mask, q)
        if dim != value_dim:
            q, k, v = same_dim(q, k, v)
        out, lse = forward_op(q, k, v, 0.0, mask.is_causal, attn_mask=bias, scale=scores.scale)
        if sees_any is not None:
            lse = torch.where(sees_any, lse, NEVER)
        return (out[..., :value_dim], lse) if dim > value_dim else (out, lse)

    def tile_backward(
        self, inputs: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the op's backward on one tile."""
        dout, q, k, v, out, lse = inputs
        dim, value_dim = q.shape[-1], v.shape[-1]
        bias, _ = _bias(mask, q)
        if dim != value_dim:
            q, k, v, out, dout = same_dim(q, k, v, out, dout)
        dq, dk, dv = backward_op(
            dout, q, k, v, out, lse, 0.0, mask.is_causal, attn_mask=bias, scale=scores.scale
        )
        if dim != value_dim:
            dq, dk, dv = dq[..., :dim], dk[..., :dim], dv[..., :value_dim]
        return dq, dk, dv

    def differentiable(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> Differentiable | None:
        """Run the op, except on tiles with a mask and on different head dims."""
        if not mask.is_rectangle or q.shape[-1] != v.shape[-1]:
            return None
        return Differentiable(forward_op(q, k, v, 0.0, mask.is_causal, scale=scores.scale)[0])


def _bias(mask: TileMask, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the tile's mask as a float bias, and which queries see any key, [.., .., Lq]."""
    if mask.is_rectangle:
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
