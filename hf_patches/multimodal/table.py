# SPDX-License-Identifier: Apache-2.0
"""What differs between multimodal models by type: where they become sharded, and by which names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Media:
    """How media and text meet in the models of one type.

    Args:
        seam: where the model becomes sharded: at its text ``decoder``, or at each of the
            ``layers`` of a decoder that merges media by itself.
        decoder: path of the decoder; found by `find_decoder` if empty.
        dims: sequence dims of arguments of the decoder or its layers, besides `seam.DIMS`.
        cross: names of the classes of attention to media, whose keys every rank holds.
        first_position: where the model around the decoder starts to count positions; None if it
            leaves counting to the decoder.
        drops_labels: whether the stock loss ignores labels of padding.
        packing: why packed documents are refused; empty if they are not.
    """

    seam: Literal["decoder", "layers"] = "decoder"
    decoder: str = ""
    dims: Mapping[str, int | None] = field(default_factory=dict)
    cross: tuple[str, ...] = ()
    first_position: int | None = None
    drops_labels: bool = False
    packing: str = ""


@lru_cache(maxsize=1)
def _classes() -> frozenset[str]:
    """Return the names of the classes that take media besides text."""
    names = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    names |= set(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values())
    names |= {"AudioFlamingo3ForConditionalGeneration", "MusicFlamingoForConditionalGeneration"}
    return frozenset(names)


def is_multimodal(model: PreTrainedModel) -> bool:
    """Return whether the class of a model takes media besides text."""
    return any(owner.__name__ in _classes() for owner in type(model).__mro__)


_INSIDE = ("model", "decoder", "language_model", "text_model", "transformer")


def find_decoder(model: PreTrainedModel, media: Media) -> str:
    """Return the path of the text decoder: the innermost model that computes hidden states."""
    if media.decoder:
        return media.decoder
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    inside = True
    while inside:
        children = (getattr(decoder, name, None) for name in _INSIDE)
        inner = next((x for x in children if isinstance(x, PreTrainedModel)), None)
        inside = inner is not None
        decoder = inner if inner is not None else decoder
    paths: dict[object, str] = {module: name for name, module in model.named_modules()}
    return paths[decoder]
