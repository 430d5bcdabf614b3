# SPDX-License-Identifier: Apache-2.0
"""The indexer of MiniMax-M3, which chooses blocks of keys, over the full sequence.

Blocks are counted from the first token of each document, padding included, as the model counts
them in a sequence of one document. The rest of the layer is as in `eager_attention`.

Shapes: B batch, G indexer heads, L local length, S sequence length, N blocks, D head dim.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_patches.interface.names import find_in_modules
from hf_patches.mixers.gathered_keys import (
    GatheredKeys,
    additive_mask,
    local_positions,
    visible_keys,
)
from hf_patches.mixers.replacement import Replacement, kind_of
from lightning_cp.data.batch import count_positions
from lightning_cp.geometry.mask import Mask
from lightning_cp.patch import Patch
from lightning_cp.step.step import Step, StepReference, per_step

# The attribute of a tensor of chosen blocks that refers to its step.
_STEP: Final = "lightning_cp_step"


def install(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the methods of each indexer; yield the replacements."""
    for module in model.modules():
        if kind_of(module, ("MiniMaxM3VLIndexer",)):
            mask = _BuildMask(module, "MiniMaxM3VLIndexer", "build_block_mask")
            for method in (_Choose(module, "MiniMaxM3VLIndexer"), mask):
                yield method.install()


@per_step
def _check_padding(step: Step, kind: type[nn.Module]) -> None:
    """Raise for padding before tokens: it shifts the blocks, and takes the place of chosen ones."""
    padding = step.padding
    if padding is None:
        return
    follows = ~padding[:, 1:]  # a token, after padding of the same document
    if step.documents is not None:
        follows = follows & (step.documents[:, 1:] == step.documents[:, :-1])
    if (padding[:, :-1] & follows).any():
        raise ValueError(
            f"{kind.__name__} got a batch with padding before tokens: it counts "
            "blocks of keys from the first token, padding included, so that padding changes what "
            "it computes. Pad on the right: tokenizer.padding_side = 'right'."
        )


class _Choose(Replacement):
    """The forward of an indexer."""

    def call(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: object,
        position_ids: Tensor,
    ) -> Tensor:
        """Return the blocks that each query chooses, [B, G, L, chosen]; -1 for none."""
        if not isinstance(past_key_values, GatheredKeys):
            blocks: Tensor = self.stock(
                hidden_states, position_embeddings, past_key_values, position_ids
            )
            return blocks
        step = past_key_values.step
        _check_padding(step, type(self.module))
        with torch.no_grad():  # what is chosen has no gradient
            scores = _scores(self.module, hidden_states, position_embeddings, past_key_values)
            blocks = _choose(self.module, scores, step)
        setattr(blocks, _STEP, StepReference(step))
        return blocks


def _scores(
    module: Any, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: GatheredKeys
) -> Tensor:
    """Return the scores of this rank's queries with all keys, [B, G, L, S]."""
    shape = (*hidden.shape[:2], -1, module.head_dim)
    query = module.q_norm(module.q_proj(hidden).view(shape)).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden).view(shape)).transpose(1, 2)
    rotate = find_in_modules(type(module), "apply_rotary_pos_emb")
    query, key = rotate(query, key, *(x[..., : module.head_dim] for x in position_embeddings))
    key = cache.update_indexer(key)
    scores: Tensor = query.float() @ key.float().transpose(-1, -2)
    visible = visible_keys(Mask(causal=True, padding=False), cache.step, hidden.device)
    return scores.masked_fill(~visible, -torch.inf)


def _choose(module: Any, scores: Tensor, step: Step) -> Tensor:
    """Choose the blocks next to each query, and those with the highest scores."""
    block, first, num_blocks = _blocks(step, module.block_size, scores.device)
    of_blocks = scores.new_full((*scores.shape[:3], num_blocks), -torch.inf)
    of_blocks.scatter_reduce_(3, block[:, None, None].expand_as(scores), scores, "amax")
    if module.local_blocks > 0:
        position = local_positions(step, scores.device)
        position = position.clamp(max=step.layout.seq_len - 1)
        nearest = torch.arange(module.local_blocks, device=scores.device)
        local = block[:, position, None] - nearest
        local = torch.maximum(local, first[:, position, None])
        of_blocks.scatter_(3, local[:, None].expand(-1, scores.shape[1], -1, -1), torch.inf)
    best, blocks = of_blocks.topk(min(module.topk_blocks, num_blocks), dim=-1)
    return blocks.masked_fill(best == -torch.inf, -1)


@per_step
def _blocks(step: Step, size: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the block of each key, the first block of its document, [B, S] each, and their number.

    Computed once per step.
    """
    positions = torch.from_numpy(count_positions(step.documents, step.layout.seq_len))
    block = (positions % size == 0).cumsum(1) - 1
    first = block - positions // size
    of_key, of_document = (x.to(device).expand(step.batch_size, -1) for x in (block, first))
    return of_key, of_document, int(block.max()) + 1


class _BuildMask(Replacement):
    """The method of an indexer that turns chosen blocks into a mask."""

    def call(
        self,
        block_indices: Tensor,
        attention_mask: Tensor,
        key_length: int,
        dtype: torch.dtype,
        *others: Any,
    ) -> Tensor:
        """Return what is added to the scores, [B, H, L, S]."""
        reference: StepReference | None = getattr(block_indices, _STEP, None)
        if reference is None:
            mask: Tensor = self.stock(block_indices, attention_mask, key_length, dtype, *others)
            return mask
        module: Any = self.module
        step, shape = reference.step, block_indices.shape[:3]
        block, _, num_blocks = _blocks(step, module.block_size, block_indices.device)
        chosen = block_indices.new_zeros((*shape, num_blocks + 1), dtype=torch.bool)
        chosen.scatter_(3, block_indices.masked_fill(block_indices < 0, num_blocks), True)
        keep = chosen.gather(3, block[:, None, None].expand(*shape, -1))
        keep = keep.repeat_interleave(module.config.num_attention_heads // shape[1], dim=1)
        is_bool = attention_mask.dtype == torch.bool
        keep = keep & (attention_mask if is_bool else attention_mask == 0)
        return additive_mask(keep, dtype)
