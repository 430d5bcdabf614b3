# SPDX-License-Identifier: Apache-2.0
"""What all attention calls share: the interface, typed biases and input checks.

Knows neither kernels nor communication. Read next: `choose.py`, which builds the calls.

Shapes: B batch, H query heads, K key/value heads, L local tokens, S tokens of the sequence, D and
Dv head dims.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_cp.attn.mask_blocks import PlacedTile
from lightning_cp.data.shard import pad_end


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Values added to the scores of local queries with all keys of the sequence; no gradient.

    Args:
        values: [B or 1, H or 1, L or 1, S]; keys in their original order.
    """

    values: Tensor

    def select(self, heads: slice, q_slice: slice | None = None) -> "Bias":
        """Return the bias of some heads and queries; dims of size 1 stand for all."""
        values = self.values if self.values.shape[1] == 1 else self.values[:, heads]
        if q_slice is not None and values.shape[2] > 1:
            values = values[:, :, q_slice]
        return Bias(values)

    def per_query(self, local_len: int) -> "Bias":
        """Return the bias with one entry per query, also where all queries share one."""
        if self.values.shape[2] > 1:
            return self
        return Bias(self.values.expand(-1, -1, local_len, -1))

    def pad_queries(self, tensor_len: int, num_padding: int) -> "Bias":
        """Append padding to a bias that has one entry for each of ``tensor_len`` queries."""
        if self.values.shape[2] != tensor_len or tensor_len == 1:
            return self
        return Bias(pad_end(self.values, 2, num_padding))

    def of_tile(self, tile: PlacedTile) -> Tensor:
        """Return the values of one tile, [.., .., Lq or 1, Lk]."""
        batch = tile.batch if self.values.shape[0] > 1 else slice(None)
        q_slice = tile.q_slice if self.values.shape[2] > 1 else slice(None)
        return self.values[batch, :, q_slice, tile.keys.start : tile.keys.stop]


@dataclass(frozen=True, slots=True, eq=False)
class AlibiSlopes:
    """Slopes by which a score falls with the distance of query and key; no gradient.

    Args:
        values: [H], one slope per query head.
    """

    values: Tensor

    def select(self, heads: slice, q_slice: slice | None = None) -> "AlibiSlopes":
        """Return the slopes of some heads; they hold for all queries."""
        return AlibiSlopes(self.values[heads])

    def per_query(self, local_len: int) -> "AlibiSlopes":
        """Return the slopes: they do not depend on the query."""
        return self

    def pad_queries(self, tensor_len: int, num_padding: int) -> "AlibiSlopes":
        """Return the slopes: they do not depend on the query."""
        return self

    def of_tile(self, tile: PlacedTile) -> Tensor:
        """Return the values of one tile, [1, H, Lq, Lk]."""
        slopes = self.values
        queries, keys = (
            torch.arange(*part, device=slopes.device) for part in (tile.query, tile.keys)
        )
        return -slopes[None, :, None, None] * (queries[:, None] - keys).abs()


ScoreBias = Bias | AlibiSlopes
"""What is added to the scores."""


class AttentionCall(Protocol):
    """One attention call, chosen and planned: all that is not a tensor."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: ScoreBias | None
    ) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks.

        Args:
            q: [B, H, L, D].
            k: [B, K, L, D].
            v: [B, K, L, Dv].
            sinks: [H] or None.
            bias: added to the scores, or None.

        Returns:
            [B, H, L, Dv] in the dtype of ``q``.
        """


@dataclass(frozen=True, eq=False)
class PaddedCall:
    """A call of a rank whose tensors leave out padding: all ranks send the same number of tokens.

    Args:
        call: the call, with padding.
        local_len: tokens of this rank, with padding.
        spreads_bias: whether a bias gets an entry per query: size 1 may mean one local query or all
            queries, and ranks of a Ulysses group must agree on what they send.
    """

    call: AttentionCall
    local_len: int
    spreads_bias: bool

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: ScoreBias | None
    ) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks; see `AttentionCall`."""
        tensor_len, num_padding = q.shape[2], self.local_len - q.shape[2]
        if bias is not None and self.spreads_bias:
            bias = bias.per_query(self.local_len)
        if num_padding == 0:
            return self.call.run(q, k, v, sinks, bias)
        bias = None if bias is None else bias.pad_queries(tensor_len, num_padding)
        q, k, v = (pad_end(x, 2, num_padding) for x in (q, k, v))
        return self.call.run(q, k, v, sinks, bias).narrow(2, 0, tensor_len)


def check_qkv(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless shapes and dtypes of q, k and v fit together.

    Args:
        name: the public function, for the message.
        q: queries.
        k: keys.
        v: values.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"{name}() needs [batch, heads, tokens, head_dim]; it got {shapes_of(q, k, v)}."
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{name}(): q, k, v do not fit together: {shapes_of(q, k, v)}. Batch must agree, k and "
            "v must have the same heads and tokens, q and k the same head dim."
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(
            f"{name}(): q, k, v must have one floating dtype, but are {q.dtype}, {k.dtype}, "
            f"{v.dtype}. Cast them to the dtype in which attention is to be computed."
        )


def shapes_of(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the shapes of q, k and v for an error message."""
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def with_unit_stride(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors, copied unless the head dim of all of them has stride 1.

    Kernels walk along the head dim: the CPU's op assumes stride 1 without a check.
    """
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


def split_query_heads(x: Tensor, k: Tensor) -> Tensor:
    """Return [B, K, H / K, L, ...]: query heads by the key head that they share."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])
