# SPDX-License-Identifier: Apache-2.0
"""Base of the GPU kernels, whose ops compute full and causal rectangles but know no mask.

Such rectangles are one call each, however large. Tiles with document edges, windows, padding or a
bias are computed by the reference kernel, in float32. Read next: `flash.py`, `cudnn.py`.
"""

from abc import abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import new_strides
from lightning_cp.attn.blockwise.kernels.base import (
    BackwardInputs,
    Differentiable,
    Request,
    Scores,
    TiledKernel,
    TileMask,
    halve_tile,
    same_dim,
    split_tile,
)
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel
from lightning_cp.attn.call import ScoreBias
from lightning_cp.attn.mask_blocks import Block, PlacedTile

_reference = ReferenceKernel()


class DenseKernel(TiledKernel):
    """A kernel around an op in half precision; subclasses compute one rectangle.

    Rectangles have one head dim, a multiple of 8, and each token starts at a multiple of 16 bytes:
    the ops load 16 bytes at once.
    """

    # Larger masked tiles are fewer calls, but more of each is hidden. Measured on an H200 with 16k
    # tokens, both passes, at 256 / 512 / 1024: a window of 1024 tokens takes 176 / 92 / 66 ms,
    # documents of 100 to 2,000 tokens take 6.7 / 7.9 / 8.6 ms. A tile of 1024 squared needs about
    # 20 MB per head and sample, for any sequence length.
    tile_size = 1024
    # Pairs, times query heads, above which backward in two halves takes as long as in one: about
    # 7 ms on an H200. The ops compute dk and dv for each query head before they add them up: 4
    # heads of 128 and 120k keys take 250 MB, twice as much as 8k queries of 32 heads.
    min_pairs_to_halve = 3 * 10**9
    max_head_dim: int
    min_capability: int

    def unsupported_reason(self, request: Request) -> str | None:
        """Exclude other devices, older GPUs, other dtypes, large head dims, and softcap."""
        if request.device.type != "cuda":
            return f"it runs on GPUs, but the tensors are on {request.device}"
        if torch.version.hip is not None:
            return "it is for NVIDIA GPUs, but this torch is built for AMD GPUs"
        if request.dtype not in (torch.bfloat16, torch.float16):
            return f"it computes bfloat16 and float16, but the tensors are {request.dtype}"
        if request.scores.softcap is not None:
            return f"it has no softcap (got {request.scores.softcap})"
        if request.scores.scale <= 0:
            return f"its scale must be above 0 (got {request.scores.scale})"
        if request.head_dim > self.max_head_dim:
            return f"its largest head dim is {self.max_head_dim} (got {request.head_dim})"
        major, minor = torch.cuda.get_device_capability(request.device)
        if major < self.min_capability:
            return (
                f"it needs a GPU of compute capability {self.min_capability}.0 or newer, but "
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
        self, inputs: BackwardInputs, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rectangle's contribution to dq, dk, dv; lse is contiguous."""

    def tiles(self, block: Block, bias: ScoreBias | None) -> tuple[PlacedTile, ...]:
        """Return the tiles to compute; with a bias all are small: it is materialized for each."""
        tiles = super().tiles(block, bias)
        if bias is None:
            return tiles
        return tuple(part for tile in tiles for part in split_tile(tile, self.tile_size))

    def backward_tiles(
        self, block: Block, bias: ScoreBias | None, num_heads: tuple[int, int]
    ) -> tuple[PlacedTile, ...]:
        """Halve the largest tiles, where query heads share key heads."""
        tiles, (heads, key_heads) = self.tiles(block, bias), num_heads
        if heads == key_heads:
            return tiles
        parts: list[PlacedTile] = []
        for tile in tiles:
            pairs = tile.query.size * tile.keys.size * heads
            many = tile.kind == "full" and tile.keys.size > 2 * self.tile_size
            is_large = many and pairs > self.min_pairs_to_halve
            parts += halve_tile(tile, 128) if is_large else (tile,)
        return tuple(parts)

    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Compute a rectangle by the op, other tiles by the reference kernel."""
        if not mask.is_rectangle:
            return _reference.tile_forward(q, k, v, mask, scores)
        value_dim = v.shape[-1]
        q, k, v = (_aligned(x) for x in same_dim(q, k, v, multiple=8))
        out, lse = self.rectangle_forward(q, k, v, causal=mask.is_causal, scale=scores.scale)
        return out[..., :value_dim], lse

    def tile_backward(
        self, inputs: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate a rectangle by the op, other tiles by the reference kernel."""
        if not mask.is_rectangle:
            return _reference.tile_backward(inputs, mask, scores)
        dout, q, k, v, out, lse = inputs
        dim, value_dim = q.shape[-1], v.shape[-1]
        dout, out = dout.to(q.dtype), out.to(q.dtype)
        q, k, v, out, dout = (_aligned(x) for x in same_dim(q, k, v, out, dout, multiple=8))
        # The ops assume that lse is contiguous, without a check.
        aligned = BackwardInputs(dout, q, k, v, out, lse.contiguous())
        dq, dk, dv = self.rectangle_backward(aligned, causal=mask.is_causal, scale=scores.scale)
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]

    def differentiable(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> Differentiable | None:
        """Run the op on a rectangle whose inputs need neither padding nor a copy."""
        dim = q.shape[-1]
        if not mask.is_rectangle or dim % 8 or v.shape[-1] != dim:
            return None
        if not all(map(_is_aligned, (q, k, v))):
            return None
        causal, scale = mask.is_causal, scores.scale
        out = self.differentiable_rectangle(q, k, v, causal=causal, scale=scale)
        return None if out is None else Differentiable(out, new_strides(q.shape, q.stride()))

    @abstractmethod
    def differentiable_rectangle(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> Tensor | None:
        """Return out of a rectangle with the op's own backward, or None if not to be used.

        The op's backward gets a gradient with the strides of ``torch.empty_like(q)``.
        """


def _aligned(x: Tensor) -> Tensor:
    """Return x, copied unless each token starts at a multiple of 16 bytes."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    """Return whether each token starts at a multiple of 16 bytes, in memory of its own."""
    return x.data_ptr() % 16 == 0 and _are_apart(x.shape, x.stride())


@lru_cache(maxsize=256)
def _are_apart(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether tokens are multiples of 8 elements apart, and share none of them.

    Example:
        >>> _are_apart(torch.Size([1, 2, 4, 8]), (0, 32, 8, 1))
        True
        >>> _are_apart(torch.Size([1, 2, 4, 8]), (0, 8, 8, 1))  # two heads in the same place
        False
    """
    end = shape[-1]
    for stride, size in sorted(zip(strides[:-1], shape[:-1], strict=True)):
        if size > 1:
            if stride % 8 or stride < end:
                return False
            end = stride * size
    return True
