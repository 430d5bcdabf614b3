# SPDX-License-Identifier: Apache-2.0
"""The user's mask_mod and score_mod for one rank, whose queries are counted from 0.

The functions are called with global positions: that of a query is looked up, that of a key is its
index, because keys are gathered in their order. Our padding is hidden and never passed to them, so
that captured tensors are not read past their end. Block masks are sharded or built here.

Shapes: B batch, H query heads, L local tokens, S tokens of the sequence.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_cp.attn.flex.block_mask import BLOCK_SIZE, block_mask_from_lists, kind_of
from lightning_cp.attn.flex.closure_key import closure_key
from lightning_cp.attn.flex.kernel import FlexFunctions, MaskMod, ScoreMod, build_block_mask
from lightning_cp.attn.plan import QueryShard


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """A mask_mod of full sequences, and the block masks built from it.

    ``cp.block_mask(...)`` returns one, and ``flex_attention`` accepts it inside a step.

    Args:
        mask_mod: (batch, head, query, key) to whether the query sees the key, in global positions.
        batch: samples of the block mask: 1 if all are equal; None to find out whether the function
            uses the argument.
        heads: heads of the block mask, likewise.
        block_size: queries and keys of a block.
        full_block_mask: the block mask of full sequences that it comes from. Its blocks matter,
            too: fused kernels do not call the function for empty and full blocks.
    """

    mask_mod: MaskMod
    batch: int | None = None
    heads: int | None = None
    block_size: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)
    full_block_mask: BlockMask | None = None
    _cache: dict[object, Any] = field(default_factory=dict, repr=False)

    def visible(self, device: torch.device) -> MaskMod:
        """Return the mask_mod, restricted by the blocks of the full block mask."""
        if self.full_block_mask is None:
            return self.mask_mod
        if device not in self._cache:
            self._cache[device] = _with_blocks(self.mask_mod, self.full_block_mask, device)
        mask_mod: MaskMod = self._cache[device]
        return mask_mod

    def block_mask(
        self, query_shard: QueryShard, *, batch: int, heads: int, device: torch.device
    ) -> BlockMask:
        """Return the block mask of a rank's queries with all keys of the sequence.

        Built once, and again if a captured value is known to have changed.
        """
        closure = None if self.full_block_mask is not None else closure_key(self.mask_mod)
        key = (query_shard, batch, heads, device, None if closure is None else closure[0])
        if key not in self._cache:
            if len(self._cache) >= 8:
                self._cache.clear()
            sizes = self._size(self.batch, 0, batch), self._size(self.heads, 1, heads)
            # The tensors are kept alive: the key holds their ids, which must not be reused.
            self._cache[key] = (self._build(query_shard, *sizes, device), closure)
        block_mask: BlockMask = self._cache[key][0]
        return block_mask

    def _size(self, specified: int | None, argument: int, size: int) -> int:
        if specified is None:
            return size if _uses_argument(self.mask_mod, argument) else 1
        return 1 if specified == 1 else size

    def _build(
        self, query_shard: QueryShard, batch: int, heads: int, device: torch.device
    ) -> BlockMask:
        if self.full_block_mask is not None:
            sharded = _shard_block_mask(self.full_block_mask, query_shard, heads)
            if sharded is not None:
                return sharded
        return build_block_mask(
            local_mask(self.visible(device), query_shard, device, fused=True),
            batch=batch,
            heads=heads,
            lengths=query_shard.lengths,
            block_size=self.block_size,
            device=device,
            kind=kind_of(self.mask_mod),
        )


def sequence_mask_of(block_mask: BlockMask) -> SequenceMask:
    """Return the mask of a block mask of full sequences."""
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    size = block_mask.BLOCK_SIZE
    return SequenceMask(block_mask.mask_mod, batch, heads, (size[0], size[1]), block_mask)


class SequenceMaskCache:
    """Masks of functions that compute the same in every step, with their block masks.

    Args:
        size: number of masks in the cache.
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._cache: OrderedDict[object, tuple[SequenceMask, Any]] = OrderedDict()

    def find(self, mask_mod: MaskMod, **settings: Any) -> SequenceMask:
        """Return the mask of a function: a cached one if nothing that it captures has changed.

        Args:
            mask_mod: the function.
            settings: further arguments of `SequenceMask`.
        """
        closure = closure_key(mask_mod)
        if closure is None:
            return SequenceMask(mask_mod, **settings)
        identity, tensors = closure
        key = (identity, tuple(settings.items()))
        if key not in self._cache:
            # The tensors are kept alive: the key holds their ids, which must not be reused.
            self._cache[key] = (SequenceMask(mask_mod, **settings), tensors)
            if len(self._cache) > self._size:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key][0]


def build_functions(
    mask: SequenceMask | None,
    score_mod: ScoreMod | None,
    query_shard: QueryShard,
    *,
    batch: int,
    heads: int,
    device: torch.device,
    fused: bool,
) -> FlexFunctions:
    """Return the user's functions for this rank's queries.

    Args:
        mask: of full sequences, or None.
        score_mod: of full sequences, or None.
        query_shard: the queries and heads of this rank.
        batch: samples.
        heads: query heads here.
        device: of the tensors.
        fused: whether a fused kernel calls the functions, which needs a block mask, too.
    """
    _, real = query_shard.positions(device, fused=fused)
    kind = kind_of(None if mask is None else mask.mask_mod, score_mod)
    if score_mod is not None:
        score_mod = _local_score(score_mod, query_shard, device, fused=fused)
    if mask is None and real is None:
        return FlexFunctions(score_mod=score_mod, kind=kind)
    visible = mask or SequenceMask(_all_pairs, 1, 1)
    return FlexFunctions(
        local_mask(visible.visible(device), query_shard, device, fused=fused),
        score_mod,
        lambda: visible.block_mask(query_shard, batch=batch, heads=heads, device=device),
        kind,
    )


def _all_pairs(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k >= 0


# Fused kernels are compiled once per code of these functions and shapes of captured tensors, not
# for every batch.


def local_mask(
    mask_mod: MaskMod, query_shard: QueryShard, device: torch.device, *, fused: bool
) -> MaskMod:
    """Return a mask_mod that takes this rank's queries; padding sees nothing."""
    positions, real = query_shard.positions(device, fused=fused)
    offset = query_shard.head_offset

    def of_queries(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_mod(b, h + offset, positions[q], k)

    def of_real_queries(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert real is not None  # noqa: S101  for the types
        return real[q] & mask_mod(b, h + offset, positions[q], k)

    return of_queries if real is None else of_real_queries


def _local_score(
    score_mod: ScoreMod, query_shard: QueryShard, device: torch.device, *, fused: bool
) -> ScoreMod:
    positions, _ = query_shard.positions(device, fused=fused)
    offset = query_shard.head_offset

    def of_queries(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, b, h + offset, positions[q], k)

    return of_queries


def _with_blocks(mask_mod: MaskMod, block_mask: BlockMask, device: torch.device) -> MaskMod:
    """Restrict a mask_mod by blocks: empty ones hide, full ones show, partial ones call it."""
    blocks = _states(block_mask).to(device)
    b_stride, h_stride = (int(size > 1) for size in blocks.shape[:2])
    height, width = block_mask.BLOCK_SIZE

    def of_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        state = blocks[b * b_stride, h * h_stride, q // height, k // width]
        return (state == 2) | ((state == 1) & mask_mod(b, h, q, k))

    return of_blocks


def _states(block_mask: BlockMask) -> Tensor:
    """Return [B or 1, H or 1, blocks of queries, blocks of keys]: 0 empty, 1 partial, 2 full."""
    states = _dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    num_full, full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if num_full is not None and full is not None:
        states = states + 2 * _dense(num_full, full)
    return states.clamp(max=2)


def _dense(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Return 1 for listed blocks: the first ``num_blocks`` along the last dim of indices."""
    width = indices.shape[-1]
    is_listed = torch.arange(width, device=indices.device) < num_blocks.unsqueeze(-1)
    # Unlisted blocks go to an extra column, which is dropped.
    columns = torch.where(is_listed, indices, width).long()
    dense = indices.new_zeros(*indices.shape[:-1], width + 1)
    return dense.scatter_(-1, columns, 1)[..., :width]


def _shard_block_mask(
    block_mask: BlockMask, query_shard: QueryShard, heads: int
) -> BlockMask | None:
    """Select a rank's blocks of a full block mask; None if its shard does not end at blocks."""
    layout = query_shard.layout
    size, ranges = block_mask.BLOCK_SIZE[0], layout.ranges(query_shard.rank)
    if any(part.start % size or part.size % size for part in ranges):
        return None
    if any(part.stop > layout.seq_len for part in ranges):
        return None
    device = block_mask.kv_indices.device
    blocks = [torch.arange(part.start // size, part.stop // size) for part in ranges]
    selected = torch.cat(blocks).to(device)

    def local(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x if x.shape[1] == 1 else x.narrow(1, query_shard.head_offset, heads)
        return x.index_select(2, selected)

    return block_mask_from_lists(
        (local(block_mask.kv_num_blocks), local(block_mask.kv_indices)),
        (local(block_mask.full_kv_num_blocks), local(block_mask.full_kv_indices)),
        local_mask(block_mask.mask_mod, query_shard, device, fused=True),
        query_shard.lengths,
        (size, block_mask.BLOCK_SIZE[1]),
    )


class _Traced(Tensor):
    """A number that leaves a trace: everything computed from it has its type."""


def _uses_argument(mask_mod: MaskMod, argument: int) -> bool:
    """Return whether a mask_mod uses an argument; True if that is unknown."""
    numbers = [torch.tensor(0) for _ in range(4)]
    numbers[argument] = numbers[argument].as_subclass(_Traced)
    try:
        return isinstance(mask_mod(*numbers), _Traced)
    except Exception:  # noqa: BLE001  a user's function may raise anything; its real call shows it
        return True


# Checked functions, by code and shapes.
_checked: set[object] = set()


def check_reach(
    mask_mod: MaskMod | None,
    score_mod: ScoreMod | None,
    query_shard: QueryShard,
    *,
    batch: int,
    heads: int,
) -> None:
    """Raise if functions captured a shard of a tensor: they are called with global positions.

    A GPU would silently read past the tensor's end. Called for the corners of the sequence, as far
    as they are visible, with indices on the host, which torch compares with sizes.

    Args:
        mask_mod: the user's, or None.
        score_mod: the user's, or None.
        query_shard: the queries of this rank.
        batch: samples.
        heads: query heads here.
    """
    closures = [closure_key(fn) for fn in (mask_mod, score_mod) if fn is not None]
    shapes = tuple(x.shape for closure in closures if closure is not None for x in closure[1])
    kind = kind_of(mask_mod, score_mod)
    key = (kind, shapes, query_shard.lengths, query_shard.head_offset, batch, heads)
    if key in _checked:
        return
    last = query_shard.layout.seq_len - 1
    for pair in ((last, last), (last, 0), (0, last)):
        head = query_shard.head_offset + heads - 1
        indices = [torch.tensor(x) for x in (batch - 1, head, *pair)]
        try:
            if (mask_mod is None or mask_mod(*indices)) and score_mod is not None:
                score_mod(torch.tensor(0.0), *indices)
        except IndexError as error:
            raise ValueError(
                "flex_attention() inside a step: mask_mod or score_mod reads past the end of a "
                f"tensor that it captured ({error}). They are called with global positions of "
                f"{query_shard.layout.seq_len} tokens, of which this rank holds "
                f"{query_shard.layout.local_len}: let them capture tensors of full sequences, as "
                "they are before cp.step(...) shards the batch."
            ) from error
        except Exception:  # noqa: BLE001  such indices may not be valid; the real call shows it
            break
    if len(_checked) > 1000:
        _checked.clear()
    _checked.add(key)
