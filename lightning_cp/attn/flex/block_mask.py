# SPDX-License-Identifier: Apache-2.0
"""Our `Mask` as FlexAttention: mask_mod, score_mod and block mask, built from its bounds.

Shapes: B batch, H query heads, L local tokens, S tokens of the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.call import AlibiSlopes, ScoreBias
from lightning_cp.attn.flex.kernel import FlexFunctions, MaskMod, ScoreMod
from lightning_cp.attn.plan import QueryShard
from lightning_cp.comm.transport import to_device
from lightning_cp.data.shard import pad_end
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import IntArray, Range

BLOCK_SIZE = 128
"""Queries and keys of a block: the default of FlexAttention."""


SHORTEST = 512
"""The shortest length that a fused kernel is compiled for."""


def round_up(length: int) -> int:
    """Return the length that a fused kernel is compiled for; a multiple of `BLOCK_SIZE`.

    Powers of two up to 8192: a kernel takes 4 to 6 s to compile. Two lengths from there to 16384,
    and eight from each later power of two to the next, where memory counts more than seconds.
    Padding takes memory and is copied, but nothing is computed with it.

    Example:
        >>> [round_up(length) for length in (1, 513, 4097, 8193, 12289, 16385, 100_000)]
        [512, 1024, 8192, 12288, 16384, 18432, 106496]
    """
    power = 1 << (max(length, SHORTEST) - 1).bit_length()
    num_steps = 1 if power <= 8192 else 2 if power <= 16384 else 8
    step = power if num_steps == 1 else power // (2 * num_steps)
    return -(-length // step) * step


@dataclass(frozen=True, eq=False)
class BufferedKeys:
    """The keys in the key buffer, and their positions.

    Args:
        positions: int64 [n], increasing: the global positions of the first n entries.
        buffer_len: entries of the buffer; those after the keys are not visible.
        seq_len: tokens of the sequence; keys at later positions are our padding.
        gaps: entries between keys that are not visible either. Their position is the one after the
            previous key, which is not in the buffer.
    """

    positions: IntArray
    buffer_len: int
    seq_len: int
    gaps: tuple[Range, ...] = ()
    _cache: dict[object, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def is_prefix(self) -> bool:
        """Return whether the index of each key in the buffer is its global position."""
        num_keys = len(self.positions)
        return num_keys == 0 or bool(self.positions[-1] == num_keys - 1)

    @property
    def is_identity(self) -> bool:
        """Return whether every index of the buffer is a global position of the sequence."""
        return self.is_prefix and self.buffer_len <= self.seq_len

    def positions_on(self, device: torch.device, *, fused: bool) -> Tensor:
        """Return a valid position for each entry of the buffer, as a tensor."""
        key = device, fused
        if key not in self._cache:
            with torch.inference_mode(False):
                positions = np.zeros(self.buffer_len, np.int32 if fused else np.int64)
                positions[: len(self.positions)] = self.positions.clip(max=self.seq_len - 1)
                self._cache[key] = torch.from_numpy(positions).to(device)
        return self._cache[key]


def all_keys(layout: Layout) -> BufferedKeys:
    """Return all keys of the sequence, each at its position."""
    return BufferedKeys(np.arange(layout.seq_len), layout.seq_len, layout.seq_len)


def kind_of(*functions: Any) -> object:
    """Return what identifies functions for the compiler: their code objects."""
    return tuple(getattr(getattr(fn, "func", fn), "__code__", type(fn)) for fn in functions)


def block_mask_from_lists(
    partial: tuple[Any, Any],
    full: tuple[Any, Any],
    mask_mod: MaskMod,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> BlockMask:
    """Build a block mask from the numbers and indices of partial and of full blocks."""
    block_mask: BlockMask = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=block_size, mask_mod=mask_mod, seq_lengths=lengths
    )
    return block_mask


def mask_functions(
    bounds: Bounds,
    scores: Scores,
    query_shard: QueryShard,
    *,
    keys: BufferedKeys | None = None,
    query_len: int | None = None,
    batch: int,
    device: torch.device,
    fused: bool,
) -> FlexFunctions:
    """Return a `Mask` as functions of its bounds.

    What they captured has shapes that depend on the batch size and on the two lengths only.

    Args:
        bounds: the mask.
        scores: its softcap becomes a score_mod; the scale is left to the caller.
        query_shard: the queries.
        keys: the keys in the buffer; None for the full sequence.
        query_len: queries with padding after the shard, which sees nothing; None for none.
        batch: samples.
        device: of the tensors.
        fused: whether a fused kernel calls the functions.
    """
    layout = query_shard.layout
    keys = all_keys(layout) if keys is None else keys
    query_len = layout.local_len if query_len is None else query_len
    visible_keys = _build_visible_keys(bounds, query_shard, keys, query_len)
    dtype = torch.int32 if fused else torch.int64

    def copy_of(x: Any) -> Tensor:
        # Samples with equal masks are stored once; here each has a copy, so that shapes and strides
        # are those of every batch.
        host = torch.from_numpy(x)
        host = host if host.dtype == torch.bool else host.to(dtype)
        return to_device(host.expand(batch, -1).contiguous(), device)

    with torch.inference_mode(False):
        first, last = copy_of(visible_keys.first), copy_of(visible_keys.last)
        real = copy_of(visible_keys.real) if visible_keys.has_holes else None

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= first[b, q]) & (k < last[b, q])

    def mask_mod_of_real(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert real is not None  # noqa: S101  for the types
        return (k >= first[b, q]) & (k < last[b, q]) & real[b, k]

    # The bounds end at real keys: only padding in between is looked up, which takes time in every
    # partial block.
    visible = mask_mod if real is None else mask_mod_of_real

    def build_block_mask() -> BlockMask:
        sizes = [part.size for part in layout.ranges(query_shard.rank)]
        sizes.append(query_len - layout.local_len)
        states = torch.from_numpy(_block_states(visible_keys, sizes))
        states = to_device(states, device).expand(batch, -1, -1).unsqueeze(1)
        lengths = query_len, keys.buffer_len
        with torch.inference_mode(False):
            partial, full = _listed(states == 1), _listed(states == 2)
            return block_mask_from_lists(partial, full, visible, lengths, (BLOCK_SIZE, BLOCK_SIZE))

    score_mod = _softcap(scores.softcap)
    kind = kind_of(visible, score_mod)
    return FlexFunctions(visible, score_mod, lru_cache(maxsize=1)(build_block_mask), kind)


@dataclass(frozen=True, eq=False)
class _VisibleKeys:
    """The keys of a buffer that a rank's queries see.

    Args:
        first: int64 [R, L], index of the first visible key; L with padding.
        last: int64 [R, L], index after the last visible key.
        real: bool [R, buffer_len], which keys are not padding.
        has_holes: whether some query has padding between its first and last key.
    """

    first: IntArray
    last: IntArray
    real: Any
    has_holes: bool


def _build_visible_keys(
    bounds: Bounds, query_shard: QueryShard, keys: BufferedKeys, query_len: int
) -> _VisibleKeys:
    queries = query_shard.layout.positions(query_shard.rank).numpy()
    first, last = bounds.first[:, queries], bounds.last[:, queries]
    num_real = np.take_along_axis(bounds.real_before, last, 1)
    num_real -= np.take_along_axis(bounds.real_before, first, 1)
    # A query sees an interval of the sequence, which has no gap in the buffer.
    first_index, last_index = (np.searchsorted(keys.positions, end) for end in (first, last))
    is_gapless = (last_index - first_index == last - first).all()
    assert is_gapless, "the key buffer misses a key, or is not sorted"  # noqa: S101
    real = np.zeros((bounds.num_samples, keys.buffer_len), np.bool_)
    real[:, : len(keys.positions)] = (np.diff(bounds.real_before) > 0)[:, keys.positions]
    for gap in keys.gaps:
        real[:, slice(*gap)] = False
    has_holes = bool((num_real != last - first).any())
    padding = (0, 0), (0, query_len - len(queries))
    first_index, last_index = (np.pad(index, padding) for index in (first_index, last_index))
    return _VisibleKeys(first_index, last_index, real, has_holes)


def _block_states(visible_keys: _VisibleKeys, sizes: Sequence[int]) -> Any:
    """Return uint8 [R, blocks of queries, blocks of keys]: 0 empty, 1 partial, 2 full.

    Computed from the bounds of the queries in a block, not from pairs: a block of keys between them
    that no query sees counts as partial.

    Args:
        visible_keys: of each query.
        sizes: of the ranges of consecutive queries.
    """
    (num_samples, length), num_keys = visible_keys.first.shape, visible_keys.real.shape[1]
    start = np.arange(0, num_keys, BLOCK_SIZE)
    stop = np.minimum(start + BLOCK_SIZE, num_keys)
    shape = (num_samples, -(-length // BLOCK_SIZE), BLOCK_SIZE)
    any_visible = np.zeros((*shape[:2], len(start)), np.bool_)
    latest_first = np.full(shape[:2], -1)
    earliest_last = np.full(shape[:2], num_keys + 1)
    offset = 0
    # Range by range: keys between two ranges of a rank are seen by neither.
    for size in sizes:
        queries = slice(offset, offset + size)
        offset += size
        first, last = visible_keys.first[:, queries], visible_keys.last[:, queries]
        blind = first >= last

        def of_blocks(x: Any, fill: int, queries: slice = queries) -> Any:
            blocks = np.full((shape[0], shape[1] * BLOCK_SIZE), fill)
            blocks[:, queries] = x
            return blocks.reshape(shape)

        lowest = of_blocks(np.where(blind, num_keys, first), num_keys).min(-1)[..., None]
        highest = of_blocks(np.where(blind, 0, last), 0).max(-1)[..., None]
        any_visible |= (lowest < stop) & (highest > start)
        latest_first = np.maximum(latest_first, of_blocks(first, -1).max(-1))
        earliest_last = np.minimum(earliest_last, of_blocks(last, num_keys + 1).min(-1))
    full = (latest_first[..., None] <= start) & (earliest_last[..., None] >= start + BLOCK_SIZE)
    full &= (np.add.reduceat(visible_keys.real, start, axis=1, dtype=np.int64) == BLOCK_SIZE)[
        :, None
    ]
    if length % BLOCK_SIZE:
        full[:, -1] = False
    return any_visible.astype(np.uint8) + full.astype(np.uint8)


def _listed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks per block of queries, and their indices, as in a BlockMask."""
    order = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _softcap(cap: float | None) -> ScoreMod | None:
    if cap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def add_bias(
    functions: FlexFunctions,
    bias: ScoreBias,
    shape: tuple[int, ...],
    query_shard: QueryShard,
    keys: BufferedKeys,
    *,
    fused: bool,
) -> FlexFunctions:
    """Return the functions with a bias that is added to the scores.

    Args:
        functions: mask_mod and score_mod.
        bias: of the heads that are computed here.
        shape: [B, H, L, S], where L is the number of queries with padding after the shard.
        query_shard: the queries.
        keys: the keys in the buffer.
        fused: whether a fused kernel calls the functions.
    """
    values = bias.values
    if isinstance(bias, AlibiSlopes):
        return _add_slopes(functions, values, query_shard, keys, shape[2], fused=fused)
    local_len, query_len = query_shard.layout.local_len, shape[2]
    numbers = values.expand(*shape[:2], local_len, shape[3])
    if query_len > local_len:
        return _add_padded(functions, numbers, keys, query_len, fused=fused)
    if keys.is_identity:

        def plus(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + numbers[b, h, q, k]

        return _then(functions, plus)
    positions = keys.positions_on(values.device, fused=fused)

    def plus_buffered(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + numbers[b, h, q, positions[k]]

    return _then(functions, plus_buffered)


def _add_padded(
    functions: FlexFunctions, numbers: Tensor, keys: BufferedKeys, query_len: int, *, fused: bool
) -> FlexFunctions:
    """Add a bias that has no entries for the padding after the queries."""
    k_positions = keys.positions_on(numbers.device, fused=fused)
    with torch.inference_mode(False):
        rows = torch.arange(query_len, device=numbers.device, dtype=k_positions.dtype)
        rows.clamp_(max=numbers.shape[2] - 1)

    def plus_padded(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + numbers[b, h, rows[q], k_positions[k]]

    return _then(functions, plus_padded)


def _add_slopes(
    functions: FlexFunctions,
    slopes: Tensor,
    query_shard: QueryShard,
    keys: BufferedKeys,
    query_len: int,
    *,
    fused: bool,
) -> FlexFunctions:
    q_positions, _ = query_shard.positions(slopes.device, fused=fused)
    with torch.inference_mode(False):
        q_positions = pad_end(q_positions, 0, query_len - len(q_positions))
    if keys.is_prefix:

        def falling(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score - slopes[h] * (q_positions[q] - k).abs()

        return _then(functions, falling)
    k_positions = keys.positions_on(slopes.device, fused=fused)

    def falling_buffered(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes[h] * (q_positions[q] - k_positions[k]).abs()

    return _then(functions, falling_buffered)


def _then(functions: FlexFunctions, score_mod: ScoreMod) -> FlexFunctions:
    """Return the functions with another score_mod after the existing one."""
    before = functions.score_mod

    def both(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert before is not None  # noqa: S101  for the types
        return score_mod(before(score, b, h, q, k), b, h, q, k)

    kind = kind_of(functions.mask_mod, before, score_mod)
    return replace(functions, score_mod=score_mod if before is None else both, kind=kind)
