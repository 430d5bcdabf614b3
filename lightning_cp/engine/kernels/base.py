# SPDX-License-Identifier: Apache-2.0
"""The contract of a kernel: one block of attention, forward and backward, under a mask.

Normalised for all: lse is (B, H, Lq), -inf on queries that see nothing, and out is 0 there;
backward takes the out and lse of the *whole* softmax, not of this block, so that blocks simply add
up. `TiledKernel` serves kernels that know dense rectangles only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_cp.engine.merge import NEVER, accumulation_dtype, merge_
from lightning_cp.engine.plan import Block, PlacedTile
from lightning_cp.mask import Bounds


@dataclass(frozen=True, slots=True)
class Scores:
    """How a score is made of a query and a key: ``scale * q.k``, then perhaps capped.

    Args:
        scale: factor on the dot product.
        softcap: ``c`` turns a score s into ``c * tanh(s / c)``; None leaves it.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a kernel is asked to do, as far as it may refuse it."""

    device: torch.device
    dtype: torch.dtype
    scores: Scores


class Kernel(Protocol):
    """Computes blocks. Shapes: q [B, H, Lq, D], k [B, K, Lk, D], v [B, K, Lk, Dv]; K divides H."""

    name: str

    def refuse(self, request: Request) -> str | None:
        """Return why this kernel cannot do what is asked, or None if it can."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return out [B, H, Lq, Dv] and lse [B, H, Lq] of this block alone."""

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's part of dq, dk, dv, given the out and lse of the whole softmax.

        Queries that see nothing at all come with lse = +inf, which makes their weights 0.
        """


class TiledKernel(ABC):
    """A kernel made of one that computes a dense tile: cuts the block, merges the results.

    Subclasses say how large a masked tile may be (``tile_size`` squared pairs) and compute one.
    """

    name: str
    tile_size: int

    @abstractmethod
    def refuse(self, request: Request) -> str | None:
        """Return why this kernel cannot do what is asked, or None if it can."""

    @abstractmethod
    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: "TileMask", scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of a tile."""

    @abstractmethod
    def tile_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: "TileMask",
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a tile's part of dq, dk, dv."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Compute tile after tile and merge them."""
        dtype = accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
        lse = q.new_full(q.shape[:-1], NEVER, dtype=dtype)
        for tile in block.tiles(self.tile_size):
            batch, rows, columns = tile.batch, tile.rows, tile.columns
            mask = TileMask(tile, block.bounds, q.device)
            queries, keys, values = q[batch, :, rows], k[batch, :, columns], v[batch, :, columns]
            part = self.tile_forward(queries, keys, values, mask, scores)
            merge_(out[batch, :, rows], lse[batch, :, rows], *part)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute tile after tile and add them up."""
        dtype = accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for tile in block.tiles(self.tile_size):
            batch, rows, columns = tile.batch, tile.rows, tile.columns
            part = self.tile_backward(
                dout[batch, :, rows],
                q[batch, :, rows],
                k[batch, :, columns],
                v[batch, :, columns],
                out[batch, :, rows],
                lse[batch, :, rows],
                TileMask(tile, block.bounds, q.device),
                scores,
            )
            dq[batch, :, rows] += part[0]
            dk[batch, :, columns] += part[1]
            dv[batch, :, columns] += part[2]
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class TileMask:
    """The mask of one tile, written out only if a kernel asks for it."""

    tile: PlacedTile
    bounds: Bounds
    device: torch.device

    @property
    def kind(self) -> str:
        """Return ``full``, ``causal`` or ``masked``."""
        return self.tile.kind

    def visible(self) -> Tensor | None:
        """Return bool [R, 1, Lq, Lk], or None for a full tile; R is 1 or the batch size."""
        if self.tile.kind == "full":
            return None
        visible = self.bounds.visible(self.tile.query, self.tile.keys)
        return visible[self.tile.batch].unsqueeze(1).to(self.device)
