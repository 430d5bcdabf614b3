# SPDX-License-Identifier: Apache-2.0
"""Tiles: rectangles of queries and keys, each of which one kernel call computes.

A `Block` holds the queries and keys of one stage under a mask, and splits them into tiles. Pure
integers: knows neither tensors nor ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_cp.geometry.bounds import Bounds, Tile
from lightning_cp.geometry.ranges import Range


class Piece(NamedTuple):
    """Consecutive global positions, and the offset of the first of them in a tensor."""

    positions: Range
    offset: int


class PlacedTile(NamedTuple):
    """A tile and its indices: samples of the batch, queries of the q slice, keys of the key buffer.

    Fused tiles are full or causal in their indices, but not consecutive in the sequence: only the
    sizes of their ``query`` and ``keys`` are meaningful.
    """

    query: Range
    keys: Range
    kind: Literal["full", "causal", "masked"]
    batch: slice
    q_slice: slice
    k_slice: slice


@dataclass(frozen=True, eq=False)
class Block:
    """Queries and keys of one stage, under the mask.

    Args:
        queries: this rank's tokens that take part, with their offsets in the q slice.
        keys: the tokens in the key buffer.
        bounds: the mask.
        q_slice: which of the rank's tokens take part.
        pairs: which pieces are combined: all, only those that are the same tokens, or only others.
    """

    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    bounds: Bounds
    q_slice: slice
    pairs: Literal["all", "same", "others"] = "all"
    _tiles: dict[tuple[int, bool], tuple[PlacedTile, ...]] = field(default_factory=dict, repr=False)

    def tiles(self, size: int, *, fused: bool = False) -> tuple[PlacedTile, ...]:
        """Return the block as tiles (see `Bounds.tiles`); computed once.

        Args:
            size: masked tiles have at most ``size`` squared pairs.
            fused: join full and causal tiles that are adjacent in the tensors.
        """
        key = (size, fused)
        if key not in self._tiles:
            tiles = tuple(self._build_tiles(size))
            self._tiles[key] = fuse(tiles) if fused else tiles
        return self._tiles[key]

    def _build_tiles(self, size: int) -> Iterator[PlacedTile]:
        for query, keys in self._combinations():
            parts = [(slice(None), self.bounds)]
            # Samples with different masks have little in common in a large block: split each
            # separately.
            num_pairs = query.positions.size * keys.positions.size
            if self.bounds.num_samples > 1 and num_pairs > size * size:
                samples = range(self.bounds.num_samples)
                parts = [(slice(b, b + 1), self.bounds.sample(b)) for b in samples]
            for batch, bounds in parts:
                for tile in bounds.tiles(query.positions, keys.positions, size=size):
                    yield _place(tile, batch, query, keys)

    def _combinations(self) -> Iterator[tuple[Piece, Piece]]:
        for query in self.queries:
            for keys in self.keys:
                # A piece is trimmed to queries that see something: the rest lies inside it.
                same = keys.positions.start <= query.positions.start < keys.positions.stop
                if self.pairs == "all" or same == (self.pairs == "same"):
                    yield query, keys

    @property
    def visible_pairs(self) -> int:
        """Return the number of visible pairs."""
        return sum(
            self.bounds.work(query.positions, keys.positions)
            for query, keys in self._combinations()
        )


def _place(tile: Tile, batch: slice, query: Piece, keys: Piece) -> PlacedTile:
    q_start = query.offset + tile.query.start - query.positions.start
    k_start = keys.offset + tile.keys.start - keys.positions.start
    q_slice = slice(q_start, q_start + tile.query.size)
    return PlacedTile(*tile, batch, q_slice, slice(k_start, k_start + tile.keys.size))


def fuse(tiles: Iterable[PlacedTile]) -> tuple[PlacedTile, ...]:
    """Join tiles that are adjacent in the tensors: fewer and larger kernel calls, the same pairs.

    In a full tile the order of keys does not matter, nor their positions. Largest tiles come first.

    Example:
        >>> from lightning_cp.attn.plan import build_plan
        >>> from lightning_cp.geometry.layout import build_layout
        >>> from lightning_cp.geometry.mask import Mask
        >>> layout = build_layout("zigzag", seq_len=8, cp_size=2)
        >>> bounds = Mask(causal=True).bounds(8)
        >>> ring = build_plan("ring", layout=layout, bounds=bounds, rank=0, num_kv_heads=1)
        >>> block = ring.stages[0].block
        >>> len(block.tiles(1)), [tile.kind for tile in block.tiles(1, fused=True)]
        (3, ['causal'])
    """
    others = [tile for tile in tiles if tile.kind == "masked" or tile.batch != slice(None)]
    full = {_span(tile) for tile in tiles if tile.kind == "full" and tile.batch == slice(None)}
    causal = {_span(tile) for tile in tiles if tile.kind == "causal" and tile.batch == slice(None)}
    full = _join_spans(full, dim=1)
    joined: list[tuple[Range, Range]] = []
    for queries, keys in sorted(causal):
        if joined:
            above, left = joined[-1]
            corner = (queries, left)
            if above.stop == queries.start and left.stop == keys.start and corner in full:
                full.remove(corner)
                joined[-1] = (Range(above.start, queries.stop), Range(left.start, keys.stop))
                continue
        joined.append((queries, keys))
    full = _join_spans(full, dim=0)
    fused = [_fused_tile("full", *span) for span in sorted(full)]
    fused += [_fused_tile("causal", *span) for span in joined]
    return tuple(sorted([*fused, *others], key=lambda tile: -tile.query.size * tile.keys.size))


def _span(tile: PlacedTile) -> tuple[Range, Range]:
    q_slice, k_slice = tile.q_slice, tile.k_slice
    return Range(q_slice.start, q_slice.stop), Range(k_slice.start, k_slice.stop)


def _join_spans(spans: set[tuple[Range, Range]], *, dim: int) -> set[tuple[Range, Range]]:
    """Join rectangles that are adjacent along ``dim`` and equal along the other."""
    joined: list[list[Range]] = []
    for span in sorted(spans, key=lambda span: (span[1 - dim], span[dim])):
        last = joined[-1] if joined else None
        if last and last[1 - dim] == span[1 - dim] and last[dim].stop == span[dim].start:
            last[dim] = Range(last[dim].start, span[dim].stop)
        else:
            joined.append(list(span))
    return {(queries, keys) for queries, keys in joined}


def _fused_tile(kind: Literal["full", "causal"], queries: Range, keys: Range) -> PlacedTile:
    return PlacedTile(queries, keys, kind, slice(None), slice(*queries), slice(*keys))
