# SPDX-License-Identifier: Apache-2.0
"""`attention()` by FlexAttention: one call under any mask, with the keys that the mask needs.

A `Mask` can be planned with, unlike a function: `plan.py` says which keys travel, and the mask is
counted in places of the key buffer. Buffers of all key heads that would take too much memory are
brought group by group. Read next: `gathered.py` for the traffic, `mods.py` for the functions.

Shapes: B batch, H query heads, K key/value heads, L local tokens, S tokens of the row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from lightning_cp.attn.accumulators import accumulation_dtype
from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.flex.api import is_plain
from lightning_cp.attn.flex.kernel import Mods, attend_compiled, attend_plain
from lightning_cp.attn.flex.mods import (
    BLOCK_SIZE,
    Keys,
    Place,
    add_bias,
    add_slopes,
    bounds_mods,
    whole_row_keys,
)
from lightning_cp.attn.flex.remote_kv import Arriving, Way, bring, whole_row
from lightning_cp.attn.plan import Stage, build_plan, num_places
from lightning_cp.comm.transport import Transport
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import IntArray, Range
from lightning_cp.options import GradientWire
from lightning_cp.torch_private import without_modes

SHORT_ROW = 16384
"""Rows of fewer tokens have one length of key buffers: another one is compiled for 10 to 40 s."""

GROUP_BYTES = 2**30
"""What keys, values and their gradients may always take; see `group_budget`."""


@dataclass(frozen=True, eq=False)
class RowCall:
    """Everything about a call of `attention()` by FlexAttention that is no tensor.

    Args:
        mods: the mask, and the softcap.
        place: this rank.
        keys: what its queries meet.
        stages: what travels, a group of key heads after the other, counted from 0 in each; empty
            where keys of whole rows travel.
        way: between whom.
        scale: factor on q.k.
        plain: whether functions are evaluated in plain torch.
    """

    mods: Mods
    place: Place
    keys: Keys
    stages: tuple[Stage, ...]
    way: Way
    scale: float
    plain: bool


def build_row_call(
    q: Tensor,
    v: Tensor,
    bounds: Bounds,
    scores: Scores,
    place: Place,
    transport: Transport,
    *,
    num_heads: tuple[int, int],
    kernel: str = "flex",
    uid: int = 0,
    budget: int | None = None,
    gradient_wire: GradientWire = "float32",
) -> RowCall:
    """Make functions of a mask that was worked out, and plan what travels.

    Args:
        q: queries, for dtype, head dim, rows and device.
        v: values, for their head dim.
        bounds: who sees whom.
        scores: how a score is made.
        place: whose queries, once tokens are swapped for heads.
        transport: the ranks that share the row then.
        num_heads: query and key heads that this rank computes.
        kernel: the step's.
        uid: the step.
        budget: bytes for the buffers of a group of heads; `group_budget` when None.
        gradient_wire: how precise gradients of keys are that collectives add up.
    """
    layout = place.layout
    plain = is_plain(q, kernel, layout.local_len)
    block_size = _block_size(plain=plain)
    if all(_rises(layout.ranges(rank)) for rank in range(layout.cp_size)):
        size = sum(x.shape[-1] for x in (q, v)) * q.shape[0]
        kinds = (q.dtype, accumulation_dtype(q.dtype))  # of keys, and of their gradients
        num_bytes = size * sum(dtype.itemsize for dtype in kinds)
        # The same on all ranks, though the length of buffers is not: messages pair up.
        longest = max(
            _buffer_len(num_places(layout, bounds, rank, block_size), layout, fused=not plain)
            for rank in range(layout.cp_size)
        )
        queries = q.shape[0] * num_heads[0] * layout.local_len * q.shape[-1] * q.dtype.itemsize
        budget = group_budget(queries) if budget is None else budget
        num_groups = _num_groups(num_heads[1], num_bytes * longest, budget)
        (stage,) = build_plan(
            "gather",
            layout=layout,
            bounds=bounds,
            rank=place.rank,
            num_kv_heads=num_heads[1],
            sorted_keys=True,
            block_size=block_size,
        ).stages
        stage = replace(stage, heads=Range(0, num_heads[1] // num_groups))
        keys = _keys_of(stage, place, fused=not plain)
        stages = (stage,) * num_groups
    else:  # no builder makes such a layout; an own shard would not lie in the buffer's order
        keys, stages = whole_row_keys(layout), ()
    mods = bounds_mods(
        bounds,
        scores,
        place,
        keys=keys,
        batch=q.shape[0],
        device=q.device,
        fused=not plain,
    )
    way = Way(layout, transport, uid, gradient_wire)
    return RowCall(mods, place, keys, stages, way, scores.scale, plain)


def _block_size(*, plain: bool) -> int:
    """Return in blocks of how many keys lie: the fused kernel's."""
    return 1 if plain else BLOCK_SIZE


def group_budget(query_bytes: int) -> int:
    """Return how many bytes keys, values and their gradients of a group of heads may take.

    Fewer and larger kernels are faster, so it is large: a few times what a layer holds for each of
    its activations, which many of them exceed together, and always 1 GiB. 131,072 tokens over 8
    ranks with 8 key heads of 128 take 1.6 GB under a mask that needs them all: two groups.

    Args:
        query_bytes: bytes of this rank's queries.
    """
    return max(4 * query_bytes, GROUP_BYTES)


def _num_groups(num_kv_heads: int, head_bytes: int, budget: int) -> int:
    """Return the fewest groups within the budget; of one size, so that one kernel serves all."""
    counts = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
    fitting = [n for n in counts if num_kv_heads // n * head_bytes <= budget]
    return fitting[0] if fitting else counts[-1]


def _rises(ranges: tuple[Range, ...]) -> bool:
    return all(a.stop <= b.start for a, b in pairwise(ranges))


def _buffer_len(least: int, layout: Layout, *, fused: bool) -> int:
    """Return how long a buffer of so many places for keys is.

    Fused kernels are compiled for one length. Under documents what is needed changes with every
    batch, so lengths are those of a short ladder: the row, 3/4, 1/2, 3/8, 1/4 of it, and so on down
    to what a rank holds itself. What is empty costs memory, but no time.

    Args:
        least: places that are needed.
        layout: who owns what.
        fused: whether a fused kernel is compiled for it.
    """
    if not fused:
        return max(1, least)
    row_len = layout.seq_len
    if row_len < SHORT_ROW:
        return row_len
    least = max(least, layout.local_len)
    halvings = range(layout.cp_size.bit_length())
    quarters = [(part, (4 << n) * BLOCK_SIZE) for n in halvings for part in (4, 3)]
    rungs = [-(-row_len * part // size) * BLOCK_SIZE for part, size in quarters]
    return min(row_len, *(rung for rung in rungs if rung >= least))


def _keys_of(stage: Stage, place: Place, *, fused: bool) -> Keys:
    layout, positions = place.layout, _positions_of(stage, place)
    num_keys = len(positions)
    # What a rank holds may be all that it needs, and reach into our padding.
    buffer_len = max(num_keys, _buffer_len(num_keys, layout, fused=fused))
    return Keys(positions, buffer_len, layout.seq_len, stage.gaps)


def _positions_of(stage: Stage, place: Place) -> IntArray:
    """Return the position of each key that a stage brings, in the order of its buffer.

    See `Keys` for what stands where there is none.
    """
    layout, rank = place.layout, place.rank
    if stage.is_local:  # the shard itself is the buffer
        own: IntArray = layout.positions(rank).numpy()
        return own
    positions = np.empty(stage.buffer_len, np.int64)
    for owner, runs in ((rank, stage.own), *stage.receives):
        held = layout.positions(owner).numpy()
        for run in runs:
            part = held[run.shard : run.shard + run.size]
            positions[run.buffer : run.buffer + run.size] = part
    for start, stop in stage.gaps:
        positions[start:stop] = positions[start - 1] + 1 if start else 0
    return positions


def attend_row(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, call: RowCall
) -> Tensor:
    """Do what `attend.attend` does, by functions of positions; the same arguments."""
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = (x.contiguous() for x in (q, k, v))
    # As in `attend.py`: what autocast would lower are sums.
    with without_modes(), torch.autocast(q.device.type, enabled=False):
        num_groups = max(1, len(call.stages))
        if num_groups == 1:
            (arriving,) = _bring_groups(k, v, call)
            return _attend_group(q, *arriving(), sinks, bias, call)
        size = q.shape[1] // num_groups
        heads = (slice(size * group, size * (group + 1)) for group in range(num_groups))
        parts = [
            _attend_group(
                queries,
                *arriving(),
                None if sinks is None else sinks[group],
                None if bias is None else _bias_of(bias, group),
                call,
            )
            for queries, arriving, group in zip(
                q.chunk(num_groups, 1), _bring_groups(k, v, call), heads, strict=True
            )
        ]
        return torch.cat(parts, 1)


def _bring_groups(k: Tensor, v: Tensor, call: RowCall) -> Iterator[Arriving]:
    """Yield what waits for each group's keys; those of the next one are already on their way."""
    if not call.stages:
        yield lambda: whole_row(k, v, call.way)
        return
    num_groups = len(call.stages)
    # By `chunk`, whose gradient is put together once; even that of one chunk is copied.
    keys, values = ((x,) if num_groups == 1 else x.chunk(num_groups, 1) for x in (k, v))
    before: Arriving | None = None
    for group, stage in zip(zip(keys, values, strict=True), call.stages, strict=True):
        following = bring(*group, stage, call.way, buffer_len=call.keys.buffer_len)
        if before is not None:
            yield before
        before = following
    assert before is not None  # noqa: S101  for the types
    yield before


def _bias_of(bias: Tensor, heads: slice) -> Tensor:
    """Return the bias, or the slopes, of some heads."""
    if bias.dim() == 1:
        return bias[heads]
    return bias if bias.shape[1] == 1 else bias[:, heads]


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, call: RowCall
) -> Tensor:
    """Attend with some heads to the keys that were brought here."""
    mods, fused = call.mods, not call.plain
    if bias is not None and bias.dim() == 1:
        mods = add_slopes(mods, bias, call.place, call.keys, fused=fused)
    elif bias is not None:
        shape = (*q.shape[:3], call.keys.row_len)
        mods = add_bias(mods, bias, shape, call.keys, fused=fused)
    if call.plain:
        return attend_plain(q, k, v, mods, scale=call.scale, sinks=sinks).out
    wants = AuxRequest()
    return attend_compiled(q, k, v, mods, scale=call.scale, wants=wants, sinks=sinks).out
