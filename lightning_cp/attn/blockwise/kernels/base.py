# SPDX-License-Identifier: Apache-2.0
"""The contract of a kernel: one block of attention, forward and backward, under a mask.

Normalised for all: lse is (B, H, Lq), -inf on queries that see nothing, and out is 0 there;
backward takes the out and lse of the *whole* softmax, not of this block, so that blocks simply add
up. `TiledKernel` serves kernels that know dense rectangles only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_cp.attn.plan import Block, PlacedTile
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.ranges import IntArray, Range


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
    """What a kernel is asked to do, as far as it may refuse it.

    Args:
        device: where the tensors are.
        dtype: of queries, keys and values.
        scores: how a score is made.
        head_dim: the larger of the head dims of keys and values.
    """

    device: torch.device
    dtype: torch.dtype
    scores: Scores
    head_dim: int


class BackwardInputs(NamedTuple):
    """What backward starts from; out and lse are those of the whole softmax.

    Queries that see nothing at all come with lse = +inf, which makes their weights 0.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def part(self, batch: slice, rows: slice, columns: slice) -> "BackwardInputs":
        """Return what one tile needs."""
        dout, q, k, v, out, lse = self
        dout, q, out, lse = (part_of(x, batch, rows) for x in (dout, q, out, lse))
        return BackwardInputs(
            dout, q, part_of(k, batch, columns), part_of(v, batch, columns), out, lse
        )


class Part(NamedTuple):
    """What a tile gave: out and lse of some rows of the batch and some queries."""

    batch: slice
    rows: slice
    out: Tensor
    lse: Tensor


class BackwardPart(NamedTuple):
    """What a tile gave in backward: dq of its queries, dk and dv of its keys."""

    batch: slice
    rows: slice
    columns: slice
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Kernel(Protocol):
    """Computes blocks. Shapes: q [B, H, Lq, D], k [B, K, Lk, D], v [B, K, Lk, Dv]; K divides H.

    Blocks are given back in parts, as they are ready: the caller puts them together.

    ``bias`` is added to the scores, or None: [B or 1, H or 1, Lq or 1, S], its keys in global
    positions; or slopes [H], by which a score falls with the distance of query and key.
    """

    name: str

    def refuse(self, request: Request) -> str | None:
        """Return why this kernel cannot do what is asked, or None if it can."""

    def settled(self) -> "Kernel":
        """Return the kernel for one step, in which it computes the same in the same way again."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block: Block, scores: Scores
    ) -> Iterator[Part]:
        """Yield out [.., H, .., Dv] and lse [.., H, ..] of the tiles of this block."""

    def backward(
        self, given: BackwardInputs, bias: Tensor | None, block: Block, scores: Scores
    ) -> Iterator[BackwardPart]:
        """Yield what the tiles of this block add to dq, dk, dv."""


@dataclass(frozen=True, slots=True)
class TileMask:
    """The mask of one tile, written out only if a kernel asks for it.

    Args:
        tile: the tile and its place.
        bounds: what sees what.
        bias: [.., .., Lq or 1, Lk] to add to the tile's scores, or None.
        device: where the kernel computes.
    """

    tile: PlacedTile
    bounds: Bounds
    bias: Tensor | None
    device: torch.device

    @property
    def is_causal(self) -> bool:
        """Say whether the mask is ``k <= q`` on a square, and nothing else."""
        return self.tile.kind == "causal" and self.bias is None

    @property
    def is_full(self) -> bool:
        """Say whether every query sees every key, and nothing is added."""
        return self.tile.kind == "full" and self.bias is None

    def visible(self) -> Tensor | None:
        """Return bool [R, 1, Lq, Lk], or None if all is visible; R is 1 or the tile's rows."""
        if self.tile.kind == "full":
            return None
        batch, query, keys = self.tile.batch, self.tile.query, self.tile.keys
        first = self._there(self.bounds.first[batch, None, slice(*query), None])
        last = self._there(self.bounds.last[batch, None, slice(*query), None])
        real_before = self._there(
            self.bounds.real_before[batch, None, None, keys.start : keys.stop + 1]
        )
        positions = torch.arange(*keys, device=self.device)
        return (positions >= first) & (positions < last) & (real_before.diff() > 0)

    def _there(self, bounds: IntArray) -> Tensor:
        """Bring bounds to the device: they are small, and the table that they make is not."""
        return torch.from_numpy(bounds).to(self.device, non_blocking=True)


def same_dim(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Pad head dims with zeros to the largest, and on to a multiple of a number.

    Neither scores nor the kept outputs change.
    """
    dims = {x.shape[-1] for x in tensors}
    if len(dims) == 1 and not min(dims) % multiple:
        return tensors
    dim = -(-max(dims) // multiple) * multiple
    return tuple(pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in tensors)


def _tile_bias(bias: Tensor | None, tile: PlacedTile) -> Tensor | None:
    if bias is None:
        return None
    if bias.dim() == 1:
        queries, keys = (
            torch.arange(*part, device=bias.device) for part in (tile.query, tile.keys)
        )
        return -bias[None, :, None, None] * (queries[:, None] - keys).abs()
    batch = tile.batch if bias.shape[0] > 1 else slice(None)
    rows = tile.rows if bias.shape[2] > 1 else slice(None)
    return bias[batch, :, rows, tile.keys.start : tile.keys.stop]


class TiledKernel(ABC):
    """A kernel made of one that computes a dense tile: cuts the block.

    Subclasses say how large a masked tile may be (``tile_size`` squared pairs) and compute one.
    """

    name: str
    tile_size: int
    # Whether whole and causal tiles are computed without asking for their mask.
    fuses = True

    @abstractmethod
    def refuse(self, request: Request) -> str | None:
        """Return why this kernel cannot do what is asked, or None if it can."""

    def settled(self) -> Kernel:
        """Return the kernel for one step: itself, for it does not change."""
        return self

    def tiles(self, block: Block, bias: Tensor | None) -> tuple[PlacedTile, ...]:
        """Return the tiles to compute; whole and causal ones are as large as the block allows."""
        return block.tiles(self.tile_size, fused=self.fuses and bias is None)

    def backward_tiles(
        self, block: Block, bias: Tensor | None, num_heads: tuple[int, int]
    ) -> tuple[PlacedTile, ...]:
        """Return the tiles to differentiate with so many query and key heads."""
        return self.tiles(block, bias)

    @abstractmethod
    def tile_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of a tile."""

    @abstractmethod
    def tile_backward(
        self, given: BackwardInputs, mask: TileMask, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a tile's part of dq, dk, dv."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block: Block, scores: Scores
    ) -> Iterator[Part]:
        """Compute tile after tile."""
        for tile in self.tiles(block, bias):
            batch, rows, columns = tile.batch, tile.rows, tile.columns
            mask = TileMask(tile, block.bounds, _tile_bias(bias, tile), q.device)
            queries, keys, values = (
                part_of(x, batch, where) for x, where in ((q, rows), (k, columns), (v, columns))
            )
            yield Part(batch, rows, *self.tile_forward(queries, keys, values, mask, scores))

    def backward(
        self, given: BackwardInputs, bias: Tensor | None, block: Block, scores: Scores
    ) -> Iterator[BackwardPart]:
        """Compute tile after tile."""
        num_heads = given.q.shape[1], given.k.shape[1]
        for tile in self.backward_tiles(block, bias, num_heads):
            batch, rows, columns = tile.batch, tile.rows, tile.columns
            mask = TileMask(tile, block.bounds, _tile_bias(bias, tile), given.q.device)
            part = self.tile_backward(given.part(batch, rows, columns), mask, scores)
            yield BackwardPart(batch, rows, columns, *part)


def part_of(x: Tensor, batch: slice, tokens: slice) -> Tensor:
    """Return some rows and tokens; slicing costs microseconds, so not where that is all."""
    size = tokens.stop - tokens.start
    if batch != slice(None):
        return x[batch, :, tokens]
    # Half of what an index costs the host.
    return x if size == x.shape[2] else x.narrow(2, tokens.start, size)


def halved(tile: PlacedTile, multiple: int) -> tuple[PlacedTile, PlacedTile]:
    """Cut a whole tile across its keys, of which it has more than a number, at a multiple of it."""
    width = -(-tile.keys.size // (2 * multiple)) * multiple
    middle, column = tile.keys.start + width, tile.columns.start + width
    return (
        tile._replace(
            keys=Range(tile.keys.start, middle), columns=slice(tile.columns.start, column)
        ),
        tile._replace(keys=Range(middle, tile.keys.stop), columns=slice(column, tile.columns.stop)),
    )


def cut_tile(tile: PlacedTile, size: int) -> Iterator[PlacedTile]:
    """Cut a whole or causal tile into squares of ``size``; masked ones are small already."""
    if tile.kind == "masked":
        yield tile
        return
    for row in range(0, tile.query.size, size):
        for column in range(0, tile.keys.size, size):
            if tile.kind == "causal" and column > row:
                continue
            on_diagonal = tile.kind == "causal" and column == row
            height = min(size, tile.query.size - row)
            width = min(size, tile.keys.size - column)
            query, keys = tile.query.start + row, tile.keys.start + column
            rows, columns = tile.rows.start + row, tile.columns.start + column
            yield PlacedTile(
                Range(query, query + height),
                Range(keys, keys + width),
                "causal" if on_diagonal else "full",
                tile.batch,
                slice(rows, rows + height),
                slice(columns, columns + width),
            )
