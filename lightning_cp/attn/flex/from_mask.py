# SPDX-License-Identifier: Apache-2.0
"""`attention()` by FlexAttention: one kernel call under any mask, with the keys that it needs.

Unlike a function, a `Mask` can be planned with: `plan.py` says which keys are sent, and the mask is
written in indices of the key buffer. Key heads are fetched in groups if the buffers of all would
exceed the memory budget. Kernels are compiled for one length each: queries and keys are padded to
one of a few lengths. Read next: `remote_kv.py` for the exchange, `block_mask.py` for the mask.

Shapes: B batch, H query heads, K key/value heads, L local tokens, S tokens of the sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.call import ScoreBias, with_unit_stride
from lightning_cp.attn.flex.block_mask import (
    BLOCK_SIZE,
    BufferedKeys,
    add_bias,
    all_keys,
    mask_functions,
    round_up,
)
from lightning_cp.attn.flex.keep_flex import attend_once
from lightning_cp.attn.flex.kernel import FlexFunctions, attend_compiled, attend_plain
from lightning_cp.attn.flex.remote_kv import KVRoute, PendingKV, fetch_kv, gather_kv
from lightning_cp.attn.plan import QueryShard, Stage, build_plan, key_buffer_len
from lightning_cp.comm.transport import Transport
from lightning_cp.config import GradientWire
from lightning_cp.data.shard import pad_end
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.ranges import IntArray, Range
from lightning_cp.private.modes import without_modes
from lightning_cp.step.precision import autocast_off

SHORT_SEQUENCE = 65536
"""Sequences up to this have one buffer length, up to twice this two: each is compiled for."""


@dataclass(frozen=True, eq=False)
class FlexCall:
    """A call of `attention()` by FlexAttention.

    Args:
        functions: the mask, and the softcap.
        query_shard: the queries of this rank.
        query_len: queries of a kernel call, with padding after the shard.
        keys: the keys in the buffer.
        stages: one per head group, with heads counted from 0 in each; empty if keys of full
            sequences are gathered.
        route: the ranks that exchange keys.
        scale: factor on q.k.
        plain: whether functions are evaluated in plain torch.
        may_keep: whether activation checkpointing may keep the result.
    """

    functions: FlexFunctions
    query_shard: QueryShard
    query_len: int
    keys: BufferedKeys
    stages: tuple[Stage, ...]
    route: KVRoute
    scale: float
    plain: bool
    may_keep: bool = True

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: ScoreBias | None
    ) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks; see `AttentionCall`."""
        q, k, v = with_unit_stride(q, k, v)
        with without_modes(), autocast_off(q.device.type):
            num_groups = max(1, len(self.stages))
            pending = self._fetch_groups(k, v)
            if num_groups == 1:
                return self._run_group(q, *next(pending)(), sinks, bias)
            size = q.shape[1] // num_groups
            outputs = []
            for group, queries in enumerate(q.chunk(num_groups, 1)):
                heads = slice(size * group, size * (group + 1))
                group_sinks = None if sinks is None else sinks[heads]
                group_bias = None if bias is None else bias.select(heads)
                keys, values = next(pending)()
                outputs.append(self._run_group(queries, keys, values, group_sinks, group_bias))
            return torch.cat(outputs, 1)

    def _fetch_groups(self, k: Tensor, v: Tensor) -> Iterator[PendingKV]:
        """Yield the pending keys of each head group, after those of the next one are requested."""
        if not self.stages:
            yield lambda: gather_kv(k, v, self.route)
            return
        num_groups = len(self.stages)
        # By `chunk`, whose gradient is concatenated once; even that of one chunk is copied.
        keys, values = ((x,) if num_groups == 1 else x.chunk(num_groups, 1) for x in (k, v))
        previous: PendingKV | None = None
        for group, stage in zip(zip(keys, values, strict=True), self.stages, strict=True):
            following = fetch_kv(*group, stage, self.route, buffer_len=self.keys.buffer_len)
            if previous is not None:
                yield previous
            previous = following
        assert previous is not None  # noqa: S101  for the types
        yield previous

    def _run_group(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: ScoreBias | None
    ) -> Tensor:
        """Attend with some heads to the keys in the buffer."""
        functions, length = self.functions, q.shape[2]
        if bias is not None:
            shape, fused = (*q.shape[:2], self.query_len, self.keys.seq_len), not self.plain
            functions = add_bias(functions, bias, shape, self.query_shard, self.keys, fused=fused)

        def compute(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            if self.plain:
                return attend_plain(q, k, v, functions, scale=self.scale, sinks=sinks).out
            aux = AuxRequest()
            return attend_compiled(q, k, v, functions, scale=self.scale, aux=aux, sinks=sinks).out

        padding = 0 if self.plain else self.query_len - length
        # Tokens before heads, as models have them: `out` is then as the model needs it, and so is
        # its gradient.
        q = pad_end(q.transpose(1, 2), 1, padding).transpose(1, 2) if padding else q
        if self.may_keep:
            out = attend_once(self, compute, q, k, v, sinks, uid=self.route.uid)
        else:
            out = compute(q, k, v, sinks)
        return out.transpose(1, 2).narrow(1, 0, length).transpose(1, 2) if padding else out


def build_flex_call(
    bounds: Bounds,
    scores: Scores,
    query_shard: QueryShard,
    transport: Transport,
    *,
    batch: int,
    device: torch.device,
    num_kv_heads: int,
    num_groups: int = 1,
    buffer_len: int | None = None,
    plain: bool = True,
    uid: int = 0,
    gradient_wire: GradientWire = "float32",
    may_keep: bool = True,
) -> FlexCall:
    """Turn a mask into functions, and plan which keys are sent.

    Args:
        bounds: the mask.
        scores: scale and softcap.
        query_shard: the queries, after tokens are exchanged for heads.
        transport: the ranks that share the sequence then.
        batch: samples of the tensors.
        device: of the tensors.
        num_kv_heads: key heads that this rank computes.
        num_groups: head groups; divides the key heads.
        buffer_len: entries of the key buffer; as many as are needed when None.
        plain: whether functions are evaluated in plain torch.
        uid: the step.
        gradient_wire: precision of gradients of keys in reduce-scatters.
        may_keep: whether activation checkpointing may keep the result.
    """
    layout = query_shard.layout
    query_len = layout.local_len if plain else round_up(layout.local_len)
    if all(_is_sorted(layout.ranges(rank)) for rank in range(layout.cp_size)):
        (stage,) = build_plan(
            "gather",
            layout=layout,
            bounds=bounds,
            rank=query_shard.rank,
            num_kv_heads=num_kv_heads,
            sorted_keys=True,
            block_size=block_size(plain=plain),
        ).stages
        stage = replace(stage, heads=Range(0, num_kv_heads // num_groups))
        keys = _buffered_keys(stage, query_shard, buffer_len)
        stages = (stage,) * num_groups
    else:  # no builder makes such a layout; a shard would not be in the order of the buffer
        keys, stages = all_keys(layout), ()
    functions = mask_functions(
        bounds,
        scores,
        query_shard,
        keys=keys,
        query_len=query_len,
        batch=batch,
        device=device,
        fused=not plain,
    )
    route = KVRoute(layout, transport, uid, gradient_wire)
    return FlexCall(
        functions, query_shard, query_len, keys, stages, route, scores.scale, plain, may_keep
    )


def _is_sorted(ranges: tuple[Range, ...]) -> bool:
    return all(a.stop <= b.start for a, b in pairwise(ranges))


def block_size(*, plain: bool) -> int:
    """Return the block size of the key buffer: that of the fused kernel."""
    return 1 if plain else BLOCK_SIZE


def longest_key_buffer(layout: Layout, bounds: Bounds, *, plain: bool) -> int:
    """Return the length of the longest key buffer of all ranks.

    Args:
        layout: which rank owns which positions.
        bounds: the mask.
        plain: whether functions are evaluated in plain torch.
    """
    lengths = (
        key_buffer_len(layout, bounds, rank, block_size(plain=plain))
        for rank in range(layout.cp_size)
    )
    return max(padded_buffer_len(length, layout, plain=plain) for length in lengths)


def padded_buffer_len(num_needed: int, layout: Layout, *, plain: bool) -> int:
    """Return the length of a buffer for ``num_needed`` entries.

    Fused kernels are compiled for one length. With documents the number of needed keys changes with
    every batch, so buffers are as long as the sequence; of long ones also a quarter of it, of
    longer ones 3/4, 1/2, 3/8, 1/4 of it, and so on down to the shard of a rank. The sequence is as
    long as the padded queries of all ranks, so that each length of queries has the same few
    buffers. Empty entries cost memory, but no time.
    """
    if plain:
        return max(1, num_needed)
    seq_len = round_up(layout.local_len) * layout.cp_size
    if seq_len <= SHORT_SEQUENCE:
        return seq_len
    num_needed = max(num_needed, layout.local_len)
    halvings = range(layout.cp_size.bit_length())
    quarters = [(part, (4 << n) * BLOCK_SIZE) for n in halvings for part in (4, 3)]
    lengths = [-(-seq_len * part // size) * BLOCK_SIZE for part, size in quarters]
    if seq_len <= 2 * SHORT_SEQUENCE:
        lengths = lengths[::4]
    return min(seq_len, *(length for length in lengths if length >= num_needed))


def _buffered_keys(stage: Stage, query_shard: QueryShard, buffer_len: int | None) -> BufferedKeys:
    layout, positions = query_shard.layout, _key_positions(stage, query_shard)
    # A rank may need its own shard only, which may include our padding.
    buffer_len = max(1, len(positions), buffer_len or 0)
    return BufferedKeys(positions, buffer_len, layout.seq_len, stage.gaps)


def _key_positions(stage: Stage, query_shard: QueryShard) -> IntArray:
    """Return the global position of each key in the buffer of a stage.

    See `BufferedKeys` for the positions of gaps.
    """
    layout, rank = query_shard.layout, query_shard.rank
    if stage.is_local:  # the shard is the buffer
        local: IntArray = layout.positions(rank).numpy()
        return local
    positions = np.empty(stage.buffer_len, np.int64)
    for owner, runs in ((rank, stage.own_runs), *stage.receives):
        shard = layout.positions(owner).numpy()
        for run in runs:
            part = shard[run.shard : run.shard + run.size]
            positions[run.buffer : run.buffer + run.size] = part
    for start, stop in stage.gaps:
        positions[start:stop] = positions[start - 1] + 1 if start else 0
    return positions
