# SPDX-License-Identifier: Apache-2.0
"""mask_mod and score_mod of whole rows, seen from one rank: its queries are counted from 0.

A user's functions are called with global positions: that of a query is looked up, that of a key is
its index, for keys are gathered in their order. Our padding is hidden from them and never shown to
them, so that what they captured is not read past its end. Block masks are cut or made here.

Shapes: B batch, H query heads, L local tokens, S tokens of the row.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.flex.closure_key import identity_of
from lightning_cp.attn.flex.kernel import MaskMod, Mods, ScoreMod, build_block_mask
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import IntArray, Range

BLOCK_SIZE = 128
"""Queries and keys of a block, as FlexAttention has them by default."""


@dataclass(frozen=True)
class Place:
    """Where this rank's queries and heads stand in the row.

    Args:
        layout: who owns which position.
        rank: whose queries.
        head_offset: which query head of the model is the first one here.
    """

    layout: Layout
    rank: int
    head_offset: int = 0

    @property
    def lengths(self) -> tuple[int, int]:
        """Return how many queries and how many keys meet here."""
        return self.layout.local_len, self.layout.seq_len

    def positions(self, device: torch.device, *, fused: bool) -> tuple[Tensor, Tensor | None]:
        """Return the positions of the queries, [L], and which are real; None if all are.

        Padding stands at the row's last position, so that what it looks up exists.
        """
        return _positions(self.layout, self.rank, device, torch.int32 if fused else torch.int64)


@lru_cache(maxsize=32)
def _positions(
    layout: Layout, rank: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    with torch.inference_mode(False):
        positions = layout.positions(rank)
        real = positions < layout.seq_len
        positions = positions.clamp(max=layout.seq_len - 1).to(device, dtype)
        return positions, None if bool(real.all()) else real.to(device)


@dataclass(frozen=True, eq=False)
class Keys:
    """Which keys of the row lie in the buffer that queries meet, and where.

    Args:
        positions: int64 [n], rising: the keys, from the start of the buffer on.
        buffer_len: tokens of the buffer; those after the keys are seen by nobody.
        row_len: tokens of the row; keys at later positions are our padding.
        gaps: places between keys that are seen by nobody, either. The position there is the one
            after the key before, which is not in the buffer.
    """

    positions: IntArray
    buffer_len: int
    row_len: int
    gaps: tuple[Range, ...] = ()
    _kept: dict[object, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def is_row(self) -> bool:
        """Say whether a place in the buffer is a position of the row."""
        num_keys = len(self.positions)
        begins = num_keys == 0 or bool(self.positions[-1] == num_keys - 1)
        return begins and self.buffer_len <= self.row_len

    def there(self, device: torch.device, *, fused: bool) -> Tensor:
        """Return the positions as a tensor of the buffer's length; each of them is in the row."""
        key = device, fused
        if key not in self._kept:
            with torch.inference_mode(False):
                positions = np.zeros(self.buffer_len, np.int32 if fused else np.int64)
                positions[: len(self.positions)] = self.positions.clip(max=self.row_len - 1)
                self._kept[key] = torch.from_numpy(positions).to(device)
        return self._kept[key]


def whole_row_keys(layout: Layout) -> Keys:
    """Return all keys of the row, each at its position."""
    return Keys(np.arange(layout.seq_len), layout.seq_len, layout.seq_len)


@dataclass(frozen=True, eq=False)
class RowMask:
    """A mask_mod of whole rows, and the block masks that were made of it.

    ``cp.block_mask(...)`` returns one, and ``flex_attention`` takes it inside a step.

    Args:
        mask_mod: (batch, head, query, key) to whether the query sees the key, in positions of the
            whole row.
        batch: rows of the block mask: 1 if all are alike; None to look whether the function asks.
        heads: heads of the block mask, likewise.
        block_size: queries and keys of a block.
        given: the block mask of the whole row that it came from. Its blocks count, too: fused
            kernels never ask the function about a block that is empty or full.
    """

    mask_mod: MaskMod
    batch: int | None = None
    heads: int | None = None
    block_size: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)
    given: BlockMask | None = None
    _kept: dict[object, Any] = field(default_factory=dict, repr=False)

    def visible(self, device: torch.device) -> MaskMod:
        """Return a function that says what is visible, with the blocks that were given."""
        if self.given is None:
            return self.mask_mod
        if device not in self._kept:
            self._kept[device] = _with_blocks(self.mask_mod, self.given, device)
        found: MaskMod = self._kept[device]
        return found

    def table(self, place: Place, *, batch: int, heads: int, device: torch.device) -> BlockMask:
        """Return the block mask of a rank's queries with the keys of the row.

        Made once, and again if what the function captured has changed, as far as can be seen.
        """
        found = None if self.given is not None else identity_of(self.mask_mod)
        key = (place, batch, heads, device, None if found is None else found[0])
        if key not in self._kept:
            if len(self._kept) >= 8:
                self._kept.clear()
            sizes = self._size(self.batch, 0, batch), self._size(self.heads, 1, heads)
            # The tensors stay with it: the key holds their ids, which must not be reused.
            self._kept[key] = (self._build(place, *sizes, device), found)
        table: BlockMask = self._kept[key][0]
        return table

    def _size(self, told: int | None, argument: int, size: int) -> int:
        if told is None:
            return size if _depends(self.mask_mod, argument) else 1
        return 1 if told == 1 else size

    def _build(self, place: Place, batch: int, heads: int, device: torch.device) -> BlockMask:
        cut = None if self.given is None else _cut(self.given, place, heads)
        if cut is not None:
            return cut
        return build_block_mask(
            local_mask(self.visible(device), place, device, fused=True),
            batch=batch,
            heads=heads,
            lengths=place.lengths,
            block_size=self.block_size,
            device=device,
            kind=kind_of(self.mask_mod),
        )


def kind_of(*mods: Any) -> object:
    """Return what tells functions from others for the compiler: their codes."""
    return tuple(getattr(getattr(mod, "func", mod), "__code__", type(mod)) for mod in mods)


def row_mask_of(block_mask: BlockMask) -> RowMask:
    """Return the mask that a block mask of the whole row stands for."""
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    size = block_mask.BLOCK_SIZE
    return RowMask(block_mask.mask_mod, batch, heads, (size[0], size[1]), block_mask)


class RowMasks:
    """The masks of functions that compute the same, over steps: their block masks are kept.

    Args:
        size: how many are kept.
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._kept: OrderedDict[object, tuple[RowMask, Any]] = OrderedDict()

    def find(self, mask_mod: MaskMod, **settings: Any) -> RowMask:
        """Return the mask of a function; the former one if nothing that it computes with changed.

        Args:
            mask_mod: the function.
            settings: further arguments of `RowMask`.
        """
        found = identity_of(mask_mod)
        if found is None:
            return RowMask(mask_mod, **settings)
        identity, tensors = found
        key = (identity, tuple(settings.items()))
        if key not in self._kept:
            # The tensors stay with it: the key holds their ids, which must not be reused.
            self._kept[key] = (RowMask(mask_mod, **settings), tensors)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][0]


def build_mods(
    mask: RowMask | None,
    score_mod: ScoreMod | None,
    place: Place,
    *,
    batch: int,
    heads: int,
    device: torch.device,
    fused: bool,
) -> Mods:
    """Return a user's functions as this rank's queries meet them.

    Args:
        mask: of the whole row, or None.
        score_mod: of the whole row, or None.
        place: whose queries and heads.
        batch: rows.
        heads: query heads here.
        device: where they are called.
        fused: whether a fused kernel calls them, which wants a block mask, too.
    """
    _, real = place.positions(device, fused=fused)
    kind = kind_of(None if mask is None else mask.mask_mod, score_mod)
    if score_mod is not None:
        score_mod = _local_score(score_mod, place, device, fused=fused)
    if mask is None and real is None:
        return Mods(score_mod=score_mod, kind=kind)
    visible = mask or RowMask(_all_pairs, 1, 1)
    return Mods(
        local_mask(visible.visible(device), place, device, fused=fused),
        score_mod,
        lambda: visible.table(place, batch=batch, heads=heads, device=device),
        kind,
    )


def _all_pairs(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k >= 0


# What a fused kernel compiles is told apart by the code of these functions and by the shapes of
# what they capture, so another batch is not compiled again.


def local_mask(mask_mod: MaskMod, place: Place, device: torch.device, *, fused: bool) -> MaskMod:
    """Return a mask_mod that takes this rank's queries; padding sees nothing."""
    positions, real = place.positions(device, fused=fused)
    offset = place.head_offset

    def of_queries(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_mod(b, h + offset, positions[q], k)

    def of_real_queries(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert real is not None  # noqa: S101  for the types
        return real[q] & mask_mod(b, h + offset, positions[q], k)

    return of_queries if real is None else of_real_queries


def _local_score(
    score_mod: ScoreMod, place: Place, device: torch.device, *, fused: bool
) -> ScoreMod:
    positions, _ = place.positions(device, fused=fused)
    offset = place.head_offset

    def of_queries(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, b, h + offset, positions[q], k)

    return of_queries


def _with_blocks(mask_mod: MaskMod, given: BlockMask, device: torch.device) -> MaskMod:
    """Let the blocks of a block mask count: empty ones hide, full ones show, others ask."""
    blocks = _states(given).to(device)
    rows, heads = (int(size > 1) for size in blocks.shape[:2])
    height, width = given.BLOCK_SIZE

    def of_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        state = blocks[b * rows, h * heads, q // height, k // width]
        return (state == 2) | ((state == 1) & mask_mod(b, h, q, k))

    return of_blocks


def _states(given: BlockMask) -> Tensor:
    """Return [B or 1, H or 1, blocks of queries, blocks of keys]: 0 empty, 1 ask, 2 full."""
    states = _dense(given.kv_num_blocks, given.kv_indices)
    if given.full_kv_num_blocks is not None and given.full_kv_indices is not None:
        states = states + 2 * _dense(given.full_kv_num_blocks, given.full_kv_indices)
    return states.clamp(max=2)


def _dense(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Return 1 where a block is listed: the first ``num_blocks`` of each row of indices."""
    width = indices.shape[-1]
    listed = torch.arange(width, device=indices.device) < num_blocks.unsqueeze(-1)
    # What is not listed goes to a column of its own, and is cut off.
    where = torch.where(listed, indices, width).long()
    dense = indices.new_zeros(*indices.shape[:-1], width + 1)
    return dense.scatter_(-1, where, 1)[..., :width]


def _cut(given: BlockMask, place: Place, heads: int) -> BlockMask | None:
    """Take a rank's blocks out of a block mask of the whole row; None where blocks straddle."""
    size, ranges = given.BLOCK_SIZE[0], place.layout.ranges(place.rank)
    if any(part.start % size or part.size % size for part in ranges):
        return None
    if any(part.stop > place.layout.seq_len for part in ranges):
        return None
    device = given.kv_indices.device
    rows = [torch.arange(part.start // size, part.stop // size) for part in ranges]
    chosen = torch.cat(rows).to(device)

    def part(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        mine = x if x.shape[1] == 1 else x.narrow(1, place.head_offset, heads)
        return mine.index_select(2, chosen)

    return _table(
        (part(given.kv_num_blocks), part(given.kv_indices)),
        (part(given.full_kv_num_blocks), part(given.full_kv_indices)),
        local_mask(given.mask_mod, place, device, fused=True),
        place.lengths,
        (size, given.BLOCK_SIZE[1]),
    )


def _table(
    asked: tuple[Any, Any],
    full: tuple[Any, Any],
    mask_mod: MaskMod,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
) -> BlockMask:
    table: BlockMask = BlockMask.from_kv_blocks(
        *asked, *full, BLOCK_SIZE=block_size, mask_mod=mask_mod, seq_lengths=lengths
    )
    return table


def bounds_mods(
    bounds: Bounds,
    scores: Scores,
    place: Place,
    *,
    keys: Keys | None = None,
    batch: int,
    device: torch.device,
    fused: bool,
) -> Mods:
    """Return the functions of a `Mask`: its bounds as tensors, whose shapes are those of the batch.

    Args:
        bounds: the mask, worked out.
        scores: its softcap becomes a score_mod; the scale is left to the caller.
        place: whose queries.
        keys: what they meet; None for the whole row.
        batch: rows.
        device: where they are called.
        fused: whether a fused kernel calls them.
    """
    keys = whole_row_keys(place.layout) if keys is None else keys
    seen = _build_seen(bounds, place, keys)
    dtype = torch.int32 if fused else torch.int64

    def there(x: Any) -> Tensor:
        # Rows that are all alike are kept once; here each has its own, so that shapes and strides
        # are those of the next batch.
        return torch.from_numpy(x).expand(batch, -1).contiguous().to(device)

    with torch.inference_mode(False):
        first, last = there(seen.first).to(dtype), there(seen.last).to(dtype)
        real = there(seen.real) if seen.has_holes else None

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= first[b, q]) & (k < last[b, q])

    def mask_mod_of_real(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert real is not None  # noqa: S101  for the types
        return (k >= first[b, q]) & (k < last[b, q]) & real[b, k]

    # The bounds end at real keys: only padding in between is looked up, which takes time wherever
    # a block is partly visible.
    visible = mask_mod if real is None else mask_mod_of_real

    def build_table() -> BlockMask:
        sizes = [part.size for part in place.layout.ranges(place.rank)]
        states = torch.from_numpy(_block_states(seen, sizes))
        states = states.expand(batch, -1, -1).unsqueeze(1).to(device)
        lengths = place.layout.local_len, keys.buffer_len
        with torch.inference_mode(False):
            asked, full = _listed(states == 1), _listed(states == 2)
            return _table(asked, full, visible, lengths, (BLOCK_SIZE, BLOCK_SIZE))

    score_mod = _softcap(scores.softcap)
    kind = kind_of(visible, score_mod)
    return Mods(visible, score_mod, lru_cache(maxsize=1)(build_table), kind)


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a rank's queries see of a key buffer.

    Args:
        first: int64 [R, L], the first visible key's place in the buffer.
        last: int64 [R, L], one past that of the last.
        real: bool [R, buffer_len], which keys are no padding.
        has_holes: whether some query has padding between its first and last key.
    """

    first: IntArray
    last: IntArray
    real: Any
    has_holes: bool


def _build_seen(bounds: Bounds, place: Place, keys: Keys) -> _Seen:
    queries = place.layout.positions(place.rank).numpy()
    first, last = bounds.first[:, queries], bounds.last[:, queries]
    num_real = np.take_along_axis(bounds.real_before, last, 1)
    num_real -= np.take_along_axis(bounds.real_before, first, 1)
    # What a query sees is an interval of the row, and lies in the buffer without a gap.
    at_first, at_last = (np.searchsorted(keys.positions, end) for end in (first, last))
    is_gapless = (at_last - at_first == last - first).all()
    assert is_gapless, "the key buffer misses a key, or is not sorted"  # noqa: S101
    real = np.zeros((bounds.num_samples, keys.buffer_len), np.bool_)
    real[:, : len(keys.positions)] = (np.diff(bounds.real_before) > 0)[:, keys.positions]
    for gap in keys.gaps:
        real[:, slice(*gap)] = False
    return _Seen(at_first, at_last, real, bool((num_real != last - first).any()))


def _block_states(seen: _Seen, sizes: Sequence[int]) -> Any:
    """Return uint8 [R, blocks of queries, blocks of keys]: 0 empty, 1 ask, 2 full.

    From the ends of what the neighbours in a block see, not from their pairs: keys in between that
    none of them sees count as keys to ask about.

    Args:
        seen: what each query sees.
        sizes: of the ranges of neighbours that the queries are made of.
    """
    (num_rows, length), num_keys = seen.first.shape, seen.real.shape[1]
    start = np.arange(0, num_keys, BLOCK_SIZE)
    stop = np.minimum(start + BLOCK_SIZE, num_keys)
    shape = (num_rows, -(-length // BLOCK_SIZE), BLOCK_SIZE)
    any_seen = np.zeros((*shape[:2], len(start)), np.bool_)
    latest_first = np.full(shape[:2], -1)
    earliest_last = np.full(shape[:2], num_keys + 1)
    offset = 0
    # Range by range: what lies between two ranges of one rank is seen by neither.
    for size in sizes:
        rows = slice(offset, offset + size)
        offset += size
        first, last = seen.first[:, rows], seen.last[:, rows]
        blind = first >= last

        def of_blocks(x: Any, fill: int, rows: slice = rows) -> Any:
            blocks = np.full((shape[0], shape[1] * BLOCK_SIZE), fill)
            blocks[:, rows] = x
            return blocks.reshape(shape)

        lowest = of_blocks(np.where(blind, num_keys, first), num_keys).min(-1)[..., None]
        highest = of_blocks(np.where(blind, 0, last), 0).max(-1)[..., None]
        any_seen |= (lowest < stop) & (highest > start)
        latest_first = np.maximum(latest_first, of_blocks(first, -1).max(-1))
        earliest_last = np.minimum(earliest_last, of_blocks(last, num_keys + 1).min(-1))
    full = (latest_first[..., None] <= start) & (earliest_last[..., None] >= start + BLOCK_SIZE)
    full &= (np.add.reduceat(seen.real, start, axis=1, dtype=np.int64) == BLOCK_SIZE)[:, None]
    if length % BLOCK_SIZE:
        full[:, -1] = False
    return any_seen.astype(np.uint8) + full.astype(np.uint8)


def _listed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks there are per row, and their indices, as block masks hold them."""
    order = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _softcap(cap: float | None) -> ScoreMod | None:
    if cap is None:
        return None

    def bend(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return bend


def add_bias(mods: Mods, bias: Tensor, shape: tuple[int, ...], keys: Keys, *, fused: bool) -> Mods:
    """Return the functions with a bias that is added to the scores.

    Args:
        mods: the functions.
        bias: [B or 1, H or 1, L or 1, S], for this rank's queries and the keys of the row.
        shape: [B, H, L, S].
        keys: what the queries meet.
        fused: whether a fused kernel calls them.
    """
    numbers = bias.expand(shape)
    if keys.is_row:

        def plus(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + numbers[b, h, q, k]

        return _then(mods, plus)
    at = keys.there(bias.device, fused=fused)

    def plus_at(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + numbers[b, h, q, at[k]]

    return _then(mods, plus_at)


def add_slopes(mods: Mods, slopes: Tensor, place: Place, keys: Keys, *, fused: bool) -> Mods:
    """Return the functions with scores that fall with the distance of query and key.

    Args:
        mods: the functions.
        slopes: [H], of the heads that are computed here.
        place: whose queries.
        keys: what they meet.
        fused: whether a fused kernel calls them.
    """
    positions, _ = place.positions(slopes.device, fused=fused)
    if keys.is_row:

        def falling(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score - slopes[h] * (positions[q] - k).abs()

        return _then(mods, falling)
    at = keys.there(slopes.device, fused=fused)

    def falling_at(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes[h] * (positions[q] - at[k]).abs()

    return _then(mods, falling_at)


def _then(mods: Mods, score_mod: ScoreMod) -> Mods:
    """Return the functions with one more, which takes the score that the others have made."""
    before = mods.score_mod

    def both(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert before is not None  # noqa: S101  for the types
        return score_mod(before(score, b, h, q, k), b, h, q, k)

    kind = kind_of(mods.mask_mod, before, score_mod)
    return replace(mods, score_mod=score_mod if before is None else both, kind=kind)


class _Traced(Tensor):
    """A number whose use can be seen: what is computed from it is of its type."""


def _depends(mask_mod: MaskMod, argument: int) -> bool:
    """Say whether a mask_mod looks at an argument; yes if it cannot be found out."""
    numbers = [torch.tensor(0) for _ in range(4)]
    numbers[argument] = numbers[argument].as_subclass(_Traced)
    try:
        return isinstance(mask_mod(*numbers), _Traced)
    except Exception:  # noqa: BLE001  whatever a user's function raises, its real call tells
        return True


# What has been asked already, by codes and shapes.
_reached: set[object] = set()


def check_reach(
    mask_mod: MaskMod | None, score_mod: ScoreMod | None, place: Place, *, batch: int, heads: int
) -> None:
    """Refuse functions that captured this rank's part of a tensor: they are shown whole rows.

    A GPU would read past the tensor's end and say nothing. Asked at the corners of the row, as far
    as they are visible, with numbers on the host, which torch compares with sizes.

    Args:
        mask_mod: the user's, or None.
        score_mod: the user's, or None.
        place: the rank.
        batch: rows.
        heads: query heads here.
    """
    found = [identity_of(mod) for mod in (mask_mod, score_mod) if mod is not None]
    shapes = tuple(x.shape for known in found if known is not None for x in known[1])
    kind = kind_of(mask_mod, score_mod)
    key = (kind, shapes, place.lengths, place.head_offset, batch, heads)
    if key in _reached:
        return
    last = place.layout.seq_len - 1
    for pair in ((last, last), (last, 0), (0, last)):
        where = [torch.tensor(x) for x in (batch - 1, place.head_offset + heads - 1, *pair)]
        try:
            if (mask_mod is None or mask_mod(*where)) and score_mod is not None:
                score_mod(torch.tensor(0.0), *where)
        except IndexError as error:
            raise ValueError(
                "flex_attention() inside a step: mask_mod or score_mod reads past the end of a "
                f"tensor that it captured ({error}). They are called with positions of the whole "
                f"row, {place.layout.seq_len} tokens, of which this rank holds "
                f"{place.layout.local_len}: let them capture tensors of whole rows, as they are "
                "before cp.step(...) cuts the batch."
            ) from error
        except Exception:  # noqa: BLE001  such numbers may not do; the real call tells
            break
    if len(_reached) > 1000:
        _reached.clear()
    _reached.add(key)
