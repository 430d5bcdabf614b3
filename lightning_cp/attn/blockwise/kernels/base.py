# SPDX-License-Identifier: Apache-2.0
"""The interface of a kernel: one block of attention, forward and backward, under a mask.

For all kernels: lse is (B, H, Lq), -inf for queries that see nothing, and out is 0 there; backward
takes the out and lse of the *full* softmax, not of this block, so that blocks simply add up.
`TiledKernel` is the base of kernels that compute one tile.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_cp.attn.call import ScoreBias
from lightning_cp.attn.mask_blocks import Block, PlacedTile
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.ranges import IntArray, Range


@dataclass(frozen=True, slots=True)
class Scores:
    """The score of a query and a key: ``scale * q.k``, optionally capped.

    Args:
        scale: factor on the dot product.
        softcap: ``c`` turns a score s into ``c * tanh(s / c)``; None leaves it.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Properties of a call that decide whether a kernel supports it.

    Args:
        device: of the tensors.
        dtype: of queries, keys and values.
        scores: scale and softcap.
        head_dim: the larger of the head dims of keys and values.
    """

    device: torch.device
    dtype: torch.dtype
    scores: Scores
    head_dim: int


class BackwardInputs(NamedTuple):
    """Inputs of backward; out and lse are those of the full softmax.

    Queries that see nothing have lse = +inf here, which makes their weights 0.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def of_tile(self, tile: PlacedTile) -> "BackwardInputs":
        """Return the inputs of one tile."""
        dout, q, k, v, out, lse = self
        dout, q, out, lse = (part_of(x, tile.batch, tile.q_slice) for x in (dout, q, out, lse))
        k, v = (part_of(x, tile.batch, tile.k_slice) for x in (k, v))
        return BackwardInputs(dout, q, k, v, out, lse)


class ForwardPart(NamedTuple):
    """The result of a tile: out and lse of some samples and some queries."""

    batch: slice
    q_slice: slice
    out: Tensor
    lse: Tensor


class BackwardPart(NamedTuple):
    """The result of a tile in backward: dq of its queries, dk and dv of its keys."""

    batch: slice
    q_slice: slice
    k_slice: slice
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Differentiable(NamedTuple):
    """The output of a tile that autograd differentiates by the op's own backward.

    Args:
        out: the output.
        strides: those that the gradient of ``out`` must have; None for any.
    """

    out: Tensor
    strides: tuple[int, ...] | None = None


class Kernel(Protocol):
    """Computes blocks. Shapes: q [B, H, Lq, D], k [B, K, Lk, D], v [B, K, Lk, Dv]; K divides H.

    Results are yielded in parts, as they are ready; the caller accumulates them. ``bias`` is that
    of the block's queries with all keys of the sequence.
    """

    name: str

    def unsupported_reason(self, request: Request) -> str | None:
        """Return why this kernel cannot compute a call, or None if it can."""

    def for_step(self) -> "Kernel":
        """Return the kernel for one step, in which it computes equal calls in the same way."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None, block: Block, scores: Scores
    ) -> Iterator[ForwardPart]:
        """Yield out [.., H, .., Dv] and lse [.., H, ..] of the tiles of this block."""

    def backward(
        self, inputs: BackwardInputs, bias: ScoreBias | None, block: Block, scores: Scores
    ) -> Iterator[BackwardPart]:
        """Yield the contributions of the tiles of this block to dq, dk, dv."""


@dataclass(frozen=True, slots=True)
class TileMask:
    """The mask of one tile, materialized only on demand.

    Args:
        tile: the tile.
        bounds: the mask.
        bias: [.., .., Lq or 1, Lk] to add to the tile's scores, or None.
        device: of the kernel.
    """

    tile: PlacedTile
    bounds: Bounds
    bias: Tensor | None
    device: torch.device

    @property
    def is_causal(self) -> bool:
        """Return whether the mask is ``k <= q`` on a square, without a bias."""
        return self.tile.kind == "causal" and self.bias is None

    @property
    def is_full(self) -> bool:
        """Return whether every query sees every key, without a bias."""
        return self.tile.kind == "full" and self.bias is None

    @property
    def is_rectangle(self) -> bool:
        """Return whether the mask is one of these two, which ops compute without a mask."""
        return self.is_full or self.is_causal

    def visible(self) -> Tensor | None:
        """Return bool [R, 1, Lq, Lk], or None if all is visible; R is 1 or the tile's samples."""
        if self.tile.kind == "full":
            return None
        batch, query, keys = self.tile.batch, self.tile.query, self.tile.keys
        first = self._to_device(self.bounds.first[batch, None, slice(*query), None])
        last = self._to_device(self.bounds.last[batch, None, slice(*query), None])
        real_before = self._to_device(
            self.bounds.real_before[batch, None, None, keys.start : keys.stop + 1]
        )
        positions = torch.arange(*keys, device=self.device)
        return (positions >= first) & (positions < last) & (real_before.diff() > 0)

    def _to_device(self, bounds: IntArray) -> Tensor:
        """Copy bounds to the device: they are small, unlike the mask made of them."""
        return torch.from_numpy(bounds).to(self.device, non_blocking=True)


def same_dim(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Pad head dims with zeros to the largest, and on to a multiple of a number.

    Neither scores nor the outputs, narrowed again, change.
    """
    dims = {x.shape[-1] for x in tensors}
    if len(dims) == 1 and not min(dims) % multiple:
        return tensors
    dim = -(-max(dims) // multiple) * multiple
    return tuple(pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in tensors)


class TiledKernel(ABC):
    """A kernel that splits a block into tiles.

    Subclasses define the size of masked tiles (``tile_size`` squared pairs) and compute one tile.
    """

    name: str
    tile_size: int
    # Whether full and causal tiles are computed without their mask, and may be joined.
    fuses_tiles = True

    @abstractmethod
    def unsupported_reason(self, request: Request) -> str | None:
        """Return why this kernel cannot compute a call, or None if it can."""

    def for_step(self) -> Kernel:
        """Return the kernel for one step: itself, because it has no state."""
        return self

    def tiles(self, block: Block, bias: ScoreBias | None) -> tuple[PlacedTile, ...]:
        """Return the tiles to compute; full and causal ones are as large as the block allows."""
        return block.tiles(self.tile_size, fused=self.fuses_tiles and bias is None)

    def backward_tiles(
        self, block: Block, bias: ScoreBias | None, num_heads: tuple[int, int]
    ) -> tuple[PlacedTile, ...]:
        """Return the tiles of backward, for ``num_heads`` query and key heads."""
        return self.tiles(block, bias)

    @abstractmethod
    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of a tile."""

    @abstractmethod
    def tile_backward(
        self, inputs: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a tile's contribution to dq, dk, dv."""

    def differentiable(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> Differentiable | None:
        """Compute a tile with the op's own backward, the same kernel as in `tile_backward`.

        Python code of our own backward takes the host longer than the op. None where the op needs
        help.
        """
        return None

    @final  # a call that is one tile goes to `tile_forward` directly
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None, block: Block, scores: Scores
    ) -> Iterator[ForwardPart]:
        """Compute tile by tile."""
        for tile in self.tiles(block, bias):
            batch, q_slice, k_slice = tile.batch, tile.q_slice, tile.k_slice
            mask = self._mask(tile, block, bias, q.device)
            queries = part_of(q, batch, q_slice)
            keys, values = (part_of(x, batch, k_slice) for x in (k, v))
            result = self.tile_forward(queries, keys, values, mask, scores)
            yield ForwardPart(batch, q_slice, *result)

    @final
    def backward(
        self, inputs: BackwardInputs, bias: ScoreBias | None, block: Block, scores: Scores
    ) -> Iterator[BackwardPart]:
        """Differentiate tile by tile."""
        num_heads = inputs.q.shape[1], inputs.k.shape[1]
        for tile in self.backward_tiles(block, bias, num_heads):
            mask = self._mask(tile, block, bias, inputs.q.device)
            grads = self.tile_backward(inputs.of_tile(tile), mask, scores)
            yield BackwardPart(tile.batch, tile.q_slice, tile.k_slice, *grads)

    def _mask(
        self, tile: PlacedTile, block: Block, bias: ScoreBias | None, device: torch.device
    ) -> TileMask:
        return TileMask(tile, block.bounds, None if bias is None else bias.of_tile(tile), device)


def part_of(x: Tensor, batch: slice, tokens: slice) -> Tensor:
    """Return some samples and tokens; a view costs microseconds, so not where it would be all."""
    size = tokens.stop - tokens.start
    if batch != slice(None):
        return x[batch, :, tokens]
    # Takes the host half the time of an index.
    return x if size == x.shape[2] else x.narrow(2, tokens.start, size)


def halve_tile(tile: PlacedTile, multiple: int) -> tuple[PlacedTile, PlacedTile]:
    """Split a full tile of more than ``multiple`` keys into two, at a multiple of it."""
    width = -(-tile.keys.size // (2 * multiple)) * multiple
    keys, k_slice = tile.keys, tile.k_slice
    middle, k_middle = keys.start + width, k_slice.start + width
    return (
        tile._replace(keys=Range(keys.start, middle), k_slice=slice(k_slice.start, k_middle)),
        tile._replace(keys=Range(middle, keys.stop), k_slice=slice(k_middle, k_slice.stop)),
    )


def split_tile(tile: PlacedTile, size: int) -> Iterator[PlacedTile]:
    """Split a full or causal tile into squares of ``size``; masked ones are small already."""
    if tile.kind == "masked":
        yield tile
        return
    for q_offset in range(0, tile.query.size, size):
        for k_offset in range(0, tile.keys.size, size):
            if tile.kind == "causal" and k_offset > q_offset:
                continue
            on_diagonal = tile.kind == "causal" and k_offset == q_offset
            height = min(size, tile.query.size - q_offset)
            width = min(size, tile.keys.size - k_offset)
            query, keys = tile.query.start + q_offset, tile.keys.start + k_offset
            q_start, k_start = tile.q_slice.start + q_offset, tile.k_slice.start + k_offset
            yield PlacedTile(
                Range(query, query + height),
                Range(keys, keys + width),
                "causal" if on_diagonal else "full",
                tile.batch,
                slice(q_start, q_start + height),
                slice(k_start, k_start + width),
            )
