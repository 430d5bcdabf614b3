# SPDX-License-Identifier: Apache-2.0
"""Weights of a model as the safetensors files of ``save_pretrained``, one file in memory at a time.

``save_pretrained`` needs all weights at once: it converts fused weights back to the format of the
hub, and splits the result into files. Here both are planned on the meta device, and weights are
read layer by layer.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_patches.private import names_not_saved

_PATTERN: Final = "model{suffix}.safetensors"
_INDEX: Final = "model.safetensors.index.json"

Weights = dict[str, Tensor]


def write_weights(
    model: PreTrainedModel,
    read: Callable[[Iterable[str]], Weights],
    folder: Path,
    max_shard_size: str,
) -> None:
    """Write weights, and their index if there are several files.

    At most one file and one layer are in memory.

    Args:
        model: on the meta device, with dtypes and ties of the weights.
        read: returns weights by their names in the model.
        folder: exists.
        max_shard_size: of a file, such as ``5GB``.
    """
    state = dict(model.state_dict())
    for name in names_not_saved(model):
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    written = _convert(model, state)
    sources = _sources(model, state, written)
    # New tensors: pieces of a fused weight share its storage, whose size would count for each.
    blank = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in written.items()}
    split = split_torch_state_dict_into_shards(
        blank, filename_pattern=_PATTERN, max_shard_size=max_shard_size
    )
    waiting: Weights = {}
    for file, names in split.filename_to_tensors.items():
        weights: Weights = {}
        for name in names:
            if name not in waiting:
                waiting |= _convert(model, read(sources[name]))
            weights[name] = waiting.pop(name).contiguous()
        save_file(weights, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        totals = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": totals, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _convert(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Weights:
    """Convert weights to the format of the hub, which may fuse or split them."""
    converted: Weights = revert_weight_conversion(model, dict(weights))
    return converted


def _sources(
    model: PreTrainedModel, state: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> dict[str, Sequence[str]]:
    """Return for each weight in a file the weights of the model that are read with it.

    Those of one layer together. If a conversion of this model combines more than one layer, the
    result differs on the meta device, and all weights are read together.
    """
    parts: dict[str, list[str]] = {}
    for name in state:
        parts.setdefault(layer_of(name), []).append(name)
    sources: dict[str, Sequence[str]] = {}
    converted: Weights = {}
    for names in parts.values():
        part = _convert(model, {name: state[name] for name in names})
        converted |= part
        sources |= dict.fromkeys(part, names)
    if _forms(converted) == _forms(written):
        return sources
    return dict.fromkeys(written, tuple(state))


def layer_of(name: str) -> str:
    """Return the layer that a weight belongs to, or its module outside of layers.

    Example:
        >>> layer_of("model.layers.7.mlp.experts.3.up"), layer_of("lm_head.weight")
        ('model.layers.7', 'lm_head')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def _forms(weights: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (x.shape, x.dtype) for name, x in weights.items()}
