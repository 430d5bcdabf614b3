# SPDX-License-Identifier: Apache-2.0
"""What the GPU's attention ops have in common: they know whole and causal rectangles, no mask.

Such rectangles are one call each, however large. What a document's edge, a window, padding or a
bias makes of a tile is computed by the reference, in float32. Read next: `flash.py`, `cudnn.py`.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_cp.attn.blockwise.kernels.base import (
    BackwardInputs,
    Request,
    Scores,
    TiledKernel,
    TileMask,
    cut_tile,
    halved,
    same_dim,
)
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel
from lightning_cp.attn.plan import Block, PlacedTile

_reference = ReferenceKernel()


class DenseKernel(TiledKernel):
    """A kernel of an op in half precision; subclasses compute one rectangle.

    Rectangles come with one head dim, a multiple of 8, in rows that start at a multiple of 16
    bytes: the ops load 16 bytes at once.
    """

    # Larger masked tiles are fewer calls, but more of each is hidden. Measured on an H200 with 16k
    # tokens, both passes, at 256 / 512 / 1024: a window of 1024 tokens takes 176 / 92 / 66 ms,
    # documents of 100 to 2,000 tokens take 6.7 / 7.9 / 8.6 ms. A tile of 1024 squared needs some
    # 20 MB per head and row, however long the row is.
    tile_size = 1024
    # Pairs, times query heads, from which on backward in two halves takes as long as in one: some
    # 7 ms on an H200. The ops find dk and dv for each query head before they add them up: 4 heads
    # of 128 and 120k keys take 250 MB, twice what 8k queries of 32 heads do.
    huge = 3 * 10**9
    max_head_dim: int
    min_capability: int

    def refuse(self, request: Request) -> str | None:
        """Refuse other devices, older GPUs, other precisions, large head dims, and softcap."""
        if request.device.type != "cuda":
            return f"it runs on a GPU, and the tensors are on {request.device}"
        if torch.version.hip is not None:
            return "it was written for NVIDIA's GPUs, and this torch is built for AMD's"
        if request.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes bfloat16 and float16, and the tensors are {request.dtype}"
        if request.scores.softcap is not None:
            return f"it has no softcap (asked: {request.scores.softcap})"
        if request.scores.scale <= 0:
            return f"its scale must be above 0 (asked: {request.scores.scale})"
        if request.head_dim > self.max_head_dim:
            return f"its head dims end at {self.max_head_dim} (asked: {request.head_dim})"
        major, minor = torch.cuda.get_device_capability(request.device)
        if major < self.min_capability:
            return (
                f"it needs a GPU of compute capability {self.min_capability}.0 or newer, and "
                f"{request.device} has {major}.{minor}"
            )
        return None

    @abstractmethod
    def rectangle_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of a rectangle; a causal one is a square."""

    @abstractmethod
    def rectangle_backward(
        self, given: BackwardInputs, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rectangle's part of dq, dk, dv; lse is contiguous."""

    def tiles(self, block: Block, bias: Tensor | None) -> tuple[PlacedTile, ...]:
        """Return the tiles to compute; under a bias all are small, for it takes a table of each."""
        tiles = super().tiles(block, bias)
        if bias is None:
            return tiles
        return tuple(part for tile in tiles for part in cut_tile(tile, self.tile_size))

    def backward_tiles(
        self, block: Block, bias: Tensor | None, num_heads: tuple[int, int]
    ) -> tuple[PlacedTile, ...]:
        """Halve what is huge, where query heads share key heads."""
        tiles, (heads, key_heads) = self.tiles(block, bias), num_heads
        if heads == key_heads:
            return tiles
        parts: list[PlacedTile] = []
        for tile in tiles:
            pairs = tile.query.size * tile.keys.size * heads
            many = tile.kind == "full" and tile.keys.size > 2 * self.tile_size
            parts += halved(tile, 128) if many and pairs > self.huge else (tile,)
        return tuple(parts)

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Compute a rectangle by the op, anything else by the reference."""
        if not (mask.is_full or mask.is_causal):
            return _reference.tile_forward(q, k, v, mask, scores)
        value_dim = v.shape[-1]
        q, k, v = (_aligned(x) for x in same_dim(q, k, v, multiple=8))
        out, lse = self.rectangle_forward(q, k, v, causal=mask.is_causal, scale=scores.scale)
        return out[..., :value_dim], lse

    def tile_backward(
        self, given: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate a rectangle by the op, anything else by the reference."""
        if not (mask.is_full or mask.is_causal):
            return _reference.tile_backward(given, mask, scores)
        dout, q, k, v, out, lse = given
        dim, value_dim = q.shape[-1], v.shape[-1]
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        q, k, v, out, dout = (_aligned(x) for x in same_dim(q, k, v, out, dout, multiple=8))
        # The ops read lse as if it were contiguous, without looking.
        aligned = BackwardInputs(dout, q, k, v, out, lse.contiguous())
        dq, dk, dv = self.rectangle_backward(aligned, causal=mask.is_causal, scale=scores.scale)
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _aligned(x: Tensor) -> Tensor:
    """Return x, copied if some row of it does not start at a multiple of 16 bytes."""
    if x.data_ptr() % 16 == 0:
        batch, head, token, _ = x.stride()
        if (batch | head | token) % 8 == 0 and min(batch, head, token) > 0:
            return x
        strides = zip(x.stride(), x.shape[:-1], strict=False)
        if all((stride > 0 and stride % 8 == 0) or size == 1 for stride, size in strides):
            return x
    return x.clone(memory_format=torch.contiguous_format)
