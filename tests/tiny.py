# SPDX-License-Identifier: Apache-2.0
"""A small language model written against `attention()`, for tests.

Grouped heads, a window on every other layer, sinks, learned positions: small, but nothing that
context parallelism could get wrong is left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp import Mask, attention

Attend = Callable[[Tensor, Tensor, Tensor, Mask, Tensor], Tensor]
"""Queries, keys, values [B, heads, L, D], the layer's mask and its sinks -> [B, heads, L, D]."""


def attend_shared(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
    """Attend over the full sequence, inside or outside a step."""
    return attention(q, k, v, mask=mask, sinks=sinks)


class TinyBlock(nn.Module):
    """Attention and a small MLP, each with a residual connection."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, mask: Mask) -> None:
        super().__init__()
        self.shape = num_heads, num_kv_heads, dim // num_heads
        self.mask = mask
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * self.shape[2])
        self.out = nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.randn(num_heads))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """Return the block's output, [B, L, dim]."""
        num_heads, num_kv_heads, head_dim = self.shape
        projected = self.qkv(self.norms[0](x)).view(*x.shape[:2], -1, head_dim).transpose(1, 2)
        q, k, v = torch.split(projected, [num_heads, num_kv_heads, num_kv_heads], 1)
        mixed = attend(q, k, v, self.mask, self.sinks)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        residual: Tensor = x + self.mlp(self.norms[1](x))
        return residual


class TinyLM(nn.Module):
    """A decoder of a few blocks.

    Args:
        vocab_size: number of tokens.
        dim: width.
        num_heads: query heads.
        num_kv_heads: key/value heads, shared by the query heads.
        num_layers: blocks; every other one has a sliding window.
        window: length of the sliding window.
        max_len: number of learned positions.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 61,
        dim: int = 32,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        num_layers: int = 2,
        window: int = 7,
        max_len: int = 512,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_len, dim)
        masks = [Mask(causal=True, window=window if i % 2 else None) for i in range(num_layers)]
        self.blocks = nn.ModuleList(TinyBlock(dim, num_heads, num_kv_heads, m) for m in masks)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        # Default weights make attention nearly uniform, and then a wrong mask hardly shows.
        for block in self.blocks:
            nn.init.normal_(block.qkv.weight, std=1.2 * dim**-0.5)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        attend: Attend = attend_shared,
        checkpoint: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Return logits [B, L, vocab].

        Args:
            input_ids: [B, L], or None with ``inputs_embeds``.
            position_ids: [B, L].
            inputs_embeds: [B, L, dim] instead of ``input_ids``.
            attend: the attention function.
            checkpoint: calls a block so that backward recomputes it.
        """
        embedded = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = embedded + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, attend) if checkpoint is None else checkpoint(block, x, attend)
        logits: Tensor = self.head(x)
        return logits
