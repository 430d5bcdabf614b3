# SPDX-License-Identifier: Apache-2.0
"""Processors of models with media: one for the embedded model, others from a folder or the hub."""

from typing import Any, Final

from transformers import AutoProcessor, CLIPImageProcessorPil, LlavaProcessor, ProcessorMixin

from recipes.files import check_folder
from recipes.tokens import CHAT_TEMPLATE, IMAGE_TOKEN, byte_tokenizer, from_folder_or_hub

TINY_IMAGE: Final = "tiny-image"
"""The name of the embedded model with images."""
IMAGE_SIDE: Final = 32
"""Pixels of the side of an image of the embedded model; its patches have a quarter of that."""
PATCH_SIDE: Final = IMAGE_SIDE // 4


def tiny_processor() -> LlavaProcessor:
    """Build the processor of the embedded model: bytes for tokens, 16 tokens for an image.

    Example:
        >>> processor = tiny_processor()
        >>> len(processor.tokenizer), processor.image_token_id
        (263, 262)
    """
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}, do_center_crop=False
        ),
        tokenizer=byte_tokenizer(IMAGE_TOKEN),
        patch_size=PATCH_SIDE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # that of the class, which this strategy removes
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )


def load_processor(name_or_path: str | None) -> Any:
    """Load a processor from a folder or by its hub name; None is `tiny_processor`."""
    if name_or_path is None or name_or_path == TINY_IMAGE:
        return tiny_processor()
    check_folder("processor", name_or_path, "the embedded processor")
    loaded = from_folder_or_hub(
        AutoProcessor,
        "processor",
        name_or_path,
        cure="Check the name and the connection; processors of videos need torchvision.",
        errors=(OSError, ValueError, KeyError, ImportError),
    )
    if not isinstance(loaded, ProcessorMixin):
        raise ValueError(
            f"processor={name_or_path!r} is a {type(loaded).__name__}: the folder has no processor "
            "of text and media. Give the folder or the name of the model that media are for, with "
            "its processor_config.json or preprocessor_config.json."
        )
    return loaded
