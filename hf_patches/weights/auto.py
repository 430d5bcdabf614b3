# SPDX-License-Identifier: Apache-2.0
"""The class of transformers that builds the model of a config: of text, or with its towers."""

from typing import Any, Final

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from hf_patches.private import is_built_by

_OF_TEXT: Final[tuple[Any, ...]] = (AutoModelForCausalLM,)
_OF_MEDIA: Final[tuple[Any, ...]] = (AutoModelForImageTextToText, AutoModelForMultimodalLM)


def auto_class(config: PreTrainedConfig, *, media: bool = False) -> Any:
    """Return the Auto class for a config; None if transformers has no language model for it.

    Some configs have two models: one with towers for images, video or audio, and its text decoder
    alone. Others have one, which is returned for both values of ``media``.

    Args:
        config: of the model.
        media: prefer the model with towers.

    Example:
        >>> from transformers import MllamaConfig, Qwen3VLConfig
        >>> [auto_class(MllamaConfig(), media=media).__name__ for media in (False, True)]
        ['AutoModelForCausalLM', 'AutoModelForImageTextToText']
        >>> auto_class(Qwen3VLConfig()).__name__
        'AutoModelForImageTextToText'
    """
    order = (*_OF_MEDIA, *_OF_TEXT) if media else (*_OF_TEXT, *_OF_MEDIA)
    return next((auto for auto in order if is_built_by(auto, config)), None)
