# SPDX-License-Identifier: Apache-2.0
"""Attention with a bias by relative position that has weights: XLNet and CPM-Ant.

Their layers see the keys of the full sequence; positions and masks are those of this rank's
queries. CPM-Ant prepends a prompt to each sequence: every rank computes it, from all tokens.

Shapes: B batch, H heads, L local length, S sequence length, P prompt length, D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from hf_patches.forward import Removable
from hf_patches.input_checks import name_arguments
from hf_patches.mixers.common import (
    GatheredKeys,
    Replacement,
    full_tokens,
    kind_of,
    local_positions,
    step_of,
    visible_keys,
)
from hf_patches.names import active
from lightning_cp.geometry.mask import Mask
from lightning_cp.step import Step


def install(model: PreTrainedModel) -> Iterator[Removable]:
    """Replace the attention and the positions of a model; yield the replacements."""
    for module in model.modules():
        methods: list[Replacement] = []
        if kind_of(module, ("XLNetModel",)):
            yield module.register_forward_pre_hook(_check_xlnet, with_kwargs=True)
            methods = [_Encoding(module, "XLNetModel", "relative_positional_encoding")]
        elif kind_of(module, ("XLNetRelativeAttention",)):
            causal = model.config.attn_type == "uni"
            methods = [_RelativeCore(module, "XLNetRelativeAttention", "rel_attn_core", causal)]
        elif kind_of(module, ("CpmAntModel",)):
            yield module.register_forward_pre_hook(_check_cpm_ant)
            methods = [_PromptMask(module, "CpmAntModel", "_prepare_attention_mask")]
        elif kind_of(module, ("CpmAntSegmentPositionEmbedding",)):
            methods = [_PromptBias(module, "CpmAntSegmentPositionEmbedding")]
        elif kind_of(module, ("CpmAntAttention",)):
            methods = [_PromptAttention(module, "CpmAntAttention")]
        for method in methods:
            method.install()
            yield method


# ---------------------------------------------------------------- XLNet


def _check_xlnet(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for arguments of XLNet that hold pairs of this rank's tokens, or other tokens."""
    if active() is None:
        return
    arguments = name_arguments(module, args, kwargs)
    names = ("mems", "perm_mask", "target_mapping", "token_type_ids", "input_mask")
    given = [name for name in names if arguments.get(name) is not None]
    if given:
        raise ValueError(
            f"XLNet got {', '.join(given)} inside a step, which is not supported. Leave it out "
            "(for padding use `attention_mask`), or use full sequences: `with cp.paused():`."
        )
    if module.attn_type == "uni" and module.same_length:
        raise ValueError(
            "XLNet with same_length=True hides keys by the length of its memory, which is not "
            "supported inside a step. Use same_length=False."
        )


class _Encoding(Replacement):
    """XLNet's table of relative positions, of the full sequence."""

    def call(self, qlen: int, klen: int, bsz: int | None = None, device: Any = None) -> Tensor:
        """Return the table, [2 S or S + 1, B, D], from a distance of S downwards."""
        step = active()
        if step is not None:
            qlen = klen = step.layout.seq_len
        table: Tensor = self.stock(qlen, klen, bsz=bsz, device=device)
        return table


@dataclass(eq=False)
class _RelativeCore(Replacement):
    """XLNet's method that takes queries, keys, values and relative positions.

    Args:
        causal: whether a query sees no keys after it.
    """

    causal: bool = False

    def call(
        self, query: Tensor, key: Tensor, value: Tensor, key_r: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what this rank's queries read from all values, [L, B, H, D]."""
        step, module = step_of(None), self.module
        if step is None:
            return self.stock(query, key, value, key_r, *args, **kwargs)
        # [L, B, H, D] to [B, H, S, D]
        key, value = (x.permute(1, 2, 0, 3) for x in (key, value))
        key, value = GatheredKeys(step).update(key, value)
        return _attend_relative(module, query, key, value, key_r, step, causal=self.causal)


def _attend_relative(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_r: Tensor,
    step: Step,
    *,
    causal: bool,
) -> Tensor:
    """Attend with a bias by distance.

    Args:
        module: the layer.
        query: [L, B, H, D].
        key: [B, H, S, D].
        value: [B, H, S, D].
        key_r: [R, B, H, D], keys of the distances S, S - 1, ...
        step: the step.
        causal: whether a query sees no keys after it.

    Returns:
        [L, B, H, D].
    """
    device, seq_len = query.device, step.layout.seq_len
    position = local_positions(step, device)[:, None]
    keys = torch.arange(seq_len, device=device)
    content = torch.einsum("ibnd,bnjd->bnij", query + module.r_w_bias, key)
    distance = torch.einsum("ibnd,rbnd->bnir", query + module.r_r_bias, key_r)
    at = (seq_len - position + keys).clamp(0, key_r.shape[0] - 1)  # out of range: never visible
    distance = distance.gather(3, at.expand(*distance.shape[:2], -1, -1))
    # Every token sees itself, padding too.
    visible = visible_keys(Mask(causal=causal), step, device) | (position == keys)
    scores = (content + distance) * module.scale
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = module.dropout(functional.softmax(scores, dim=3))
    return torch.einsum("bnij,bnjd->ibnd", weights, value)


# ---------------------------------------------------------------- CPM-Ant


def _check_cpm_ant(module: Any, _: tuple[Any, ...]) -> None:
    """Raise for packed documents: each would need a prompt of its own."""
    step = active()
    if step is not None and step.documents is not None and (step.documents > 0).any():
        raise ValueError(
            f"{type(module).__name__} prepends a prompt to each sequence, but the batch holds "
            "sequences of several documents. Give each document its own sequence."
        )


class _PromptMask(Replacement):
    """The method of CPM-Ant that builds its mask: all tokens see each other and the prompt."""

    def call(self, input_ids: Tensor, span: Tensor, context: Tensor, length: Tensor) -> Tensor:
        """Return bool [B, P + L, P + S].

        The model takes the first tokens for padding, as many as there are ids of 0.
        """
        step = active()
        if step is None:
            mask: Tensor = self.stock(input_ids, span, context, length)
            return mask
        prompt_len, seq_len = int(self.module.prompt_length), step.layout.seq_len  # type: ignore[arg-type]
        is_token = full_tokens((input_ids[:, prompt_len:] != 0).long(), step)
        keys = torch.arange(seq_len, device=input_ids.device)
        real = keys >= seq_len - is_token.sum(1, keepdim=True)
        real = functional.pad(real, (prompt_len, 0), value=True)
        position = local_positions(step, input_ids.device)
        # A row of our own padding may see everything: nothing reads it.
        queries = functional.pad(real, (0, step.layout.padded_len - seq_len), value=True)
        ours = torch.cat([queries[:, :prompt_len], queries[:, prompt_len + position]], 1)
        return ours[:, :, None] & real[:, None, :]


class _PromptBias(Replacement):
    """The bias of CPM-Ant, by the distance and the segments of a query and a key."""

    def call(
        self, key_pos: Tensor, query_pos: Tensor, key_segment: Tensor, query_segment: Tensor
    ) -> Tensor:
        """Return the bias of the prompt and this rank's queries, [B, H, P + L, P + S]."""
        step, module = active(), self.module
        if step is None:
            bias: Tensor = self.stock(key_pos, query_pos, key_segment, query_segment)
            return bias
        return _prompt_bias(module, query_segment, step)


def _prompt_bias(module: Any, segment: Tensor, step: Step) -> Tensor:
    prompt_len = segment.shape[1] - step.tensor_len
    prompt, tokens = segment[:, :prompt_len], segment[:, prompt_len:]
    key_segment = torch.cat([prompt, full_tokens(tokens, step)], 1)[:, None, :]
    query_segment = segment[:, :, None]
    ours = local_positions(step, segment.device) + prompt_len
    queries = torch.cat([torch.arange(prompt_len, device=segment.device), ours])
    keys = torch.arange(prompt_len + step.layout.seq_len, device=segment.device)
    by_distance = module._position_bucket(
        (keys - queries[:, None]).to(torch.int32),
        num_buckets=module.num_buckets,
        max_distance=module.max_distance,
    )
    by_segment = module._segment_relative_position_bucket(query_segment, key_segment)
    bucket = torch.where(key_segment == query_segment, by_distance, by_segment + module.num_buckets)
    bias = functional.embedding(bucket, module.relative_attention_bias)
    return bias.permute(0, 3, 1, 2)


class _PromptAttention(Replacement):
    """An attention layer of CPM-Ant."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the keys of the prompt and of the full sequence."""
        step = step_of(None)
        if step is None:
            return self.stock(*args, **kwargs)
        arguments = name_arguments(self.module, args, kwargs)
        arguments["past_key_values"] = _PromptKeys(step)
        return self.stock(**arguments)


class _PromptKeys(GatheredKeys):
    """A cache whose keys start with a prompt, which every rank holds."""

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the prompt and of all ranks, [B, H, P + S, D]."""
        prompt_len = keys.shape[2] - self.step.tensor_len
        rest = super().update(keys[:, :, prompt_len:], values[:, :, prompt_len:])
        prompts = (keys[:, :, :prompt_len], values[:, :, :prompt_len])
        key, value = (torch.cat(pair, 2) for pair in zip(prompts, rest, strict=True))
        return key, value
