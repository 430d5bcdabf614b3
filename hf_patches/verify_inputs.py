# SPDX-License-Identifier: Apache-2.0
"""A model and a random batch for `verify` on the command line.

Built so that a wrong mask shows: weights whose attention is far from uniform, documents and padding
of uneven lengths.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_patches.private import is_built_by
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.step.step import IGNORED_LABEL

HEADS: Final[Mapping[str, Any]] = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
    "question": transformers.AutoModelForQuestionAnswering,
}
_CLASS_ENDINGS: Final = {
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "question",
}


def resolve_head(head: str, config: PreTrainedConfig) -> str:
    """Return the head of a model, ``auto`` by the class that its config names.

    Raises:
        ValueError: if transformers has no such head for this type of model.
    """
    if head == "auto":
        names = config.architectures or ("",)
        heads = (kind for ending, kind in _CLASS_ENDINGS.items() if names[0].endswith(ending))
        head = next(heads, "causal")
    if not is_built_by(HEADS[head], config):
        available = [name for name, auto in HEADS.items() if is_built_by(auto, config)]
        raise ValueError(
            f"transformers has no model of type '{config.model_type}' with the head '{head}'. "
            f"Choose --head from: {', '.join(available) or 'none that is supported'}."
        )
    return head


def build_model(
    path: Path, config: PreTrainedConfig, head: str, *, dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, str]:
    """Load a model, or build one with random weights where there is a config only.

    Returns:
        The model, and ``loaded`` or ``random``.
    """
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in vars(part).items() if part is not None else ():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)  # off while comparing; refused in attention
    text = config.get_text_config()
    if text.pad_token_id is None and head == "sequence":
        text.pad_token_id = config.pad_token_id = 0  # the head reads the last token before padding
    auto: Any = HEADS[head]
    torch.manual_seed(seed)
    if path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("*.bin"))):
        loaded = auto.from_pretrained(path, config=config, dtype=dtype)
        return loaded, "loaded"
    model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    redraw(model, seed=seed)
    return model, "random"


@torch.no_grad()
def redraw(model: PreTrainedModel, *, seed: int) -> None:
    """Draw new weights, larger than the usual initial values.

    A newly initialized model attends almost uniformly and adds little to its residual stream, so a
    wrong mask would hardly change its loss. Here the scores of a query have a standard deviation of
    about two, and norms and biases differ between channels.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # Logits of tied embeddings must not become so large that softmax saturates.
    is_tied = head is not None and id(getattr(head, "weight", None)) in embeddings
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.3 * noise)
        elif id(parameter) in embeddings:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if is_tied else noise)
        else:
            parameter.copy_(1.4 * noise / (parameter.shape[-1] * parameter.shape[-2]) ** 0.25)


def build_batch(
    config: PreTrainedConfig,
    head: str,
    *,
    shape: tuple[int, int],
    packed: bool,
    padded: str | None,
    seed: int,
) -> dict[str, Tensor]:
    """Draw a full batch, the same on every rank.

    Args:
        config: of the model.
        head: as `resolve_head` returns it; decides the labels.
        shape: batch size and sequence length.
        packed: several documents per sequence.
        padded: ``left`` or ``right`` for samples of different lengths.
        seed: of everything that is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    batch_size, length = shape
    text = config.get_text_config()
    vocabulary = torch.tensor(sorted({*range(text.vocab_size)} - _special_ids(config, text)))
    ids = vocabulary[torch.randint(len(vocabulary), shape, generator=generator)]
    labels = torch.where(torch.rand(shape, generator=generator) < 0.2, IGNORED_LABEL, ids)
    batch = {"input_ids": ids}
    is_real = torch.ones(shape, dtype=torch.bool)
    if padded:
        pad_len = torch.randint(length // 8, length // 2 + 1, (batch_size, 1), generator=generator)
        is_real = torch.arange(length) >= pad_len
        is_real = is_real if padded == "left" else is_real.flip(1)
        batch["attention_mask"] = is_real.long()
        batch["input_ids"] = torch.where(is_real, ids, text.pad_token_id or 0)
        labels = torch.where(is_real, labels, IGNORED_LABEL)
    if packed:
        documents = _draw_documents(is_real, generator)
        batch["document_ids"] = torch.where(is_real, documents, NO_DOCUMENT)
    num_labels = config.num_labels or 2
    if head == "sequence":
        batch["labels"] = torch.randint(num_labels, (batch_size,), generator=generator)
    elif head == "question":
        positions = torch.arange(length).expand(shape)
        first = torch.where(is_real, positions, length).amin(1)
        last = torch.where(is_real, positions, 0).amax(1)
        batch["start_positions"] = first + (last - first) // 3
        batch["end_positions"] = last - (last - first) // 3
    elif head == "token":
        classes = labels % num_labels
        batch["labels"] = torch.where(labels == IGNORED_LABEL, IGNORED_LABEL, classes)
    else:
        batch["labels"] = labels
    return batch


def _special_ids(*configs: PreTrainedConfig) -> set[int]:
    """Return the ids that stand for padding, an image and the like."""
    ids: set[int] = set()
    for config in configs:
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index")):
                values = value if isinstance(value, list) else [value]
                ids |= {x for x in values if x is not None}
    return ids


def _draw_documents(is_real: Tensor, generator: torch.Generator) -> Tensor:
    """Return ids of up to six documents per sample, of uneven lengths, one of a single token."""
    is_start = torch.zeros(is_real.shape, dtype=torch.int64)
    for starts, mask in zip(is_start, is_real, strict=True):
        positions = mask.nonzero().flatten()
        drawn = positions[torch.randperm(len(positions), generator=generator)[:4]]
        starts[drawn] = 1
        starts[(drawn[:1] + 1) % len(starts)] = 1
    return is_start.cumsum(1)
