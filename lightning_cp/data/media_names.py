# SPDX-License-Identifier: Apache-2.0
"""The names of images, video and audio in batches; which of them a batch holds."""

from typing import Any, Final

from lightning_cp.step.leaves import Flat, flatten

MEDIA: Final = (
    "acoustic_tokenizer_chunk_size",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "audio_attention_mask",
    "audio_embed_sizes",
    "audio_feature_lengths",
    "audio_input_features",
    "audio_input_ids",
    "audio_input_ids_mask",
    "batch_num_images",
    "cross_attention_mask",
    "feature_attention_mask",
    "flattened_patches",
    "high_res_pixel_values",
    "image_attention_mask",
    "image_embeds_position_mask",
    "image_grid_hw",
    "image_grid_thw",
    "image_grids",
    "image_merge_sizes",
    "image_num_crops",
    "image_patches",
    "image_pixel_values",
    "image_position_ids",
    "image_sizes",
    "image_sizes_videos",
    "image_token_pooling",
    "input_features",
    "input_features_mask",
    "input_values",
    "input_values_mask",
    "moe_mm_token_type_ids",
    "num_frames_per_video",
    "num_local_patches",
    "patches_grid",
    "pixel_attention_mask",
    "pixel_mask",
    "pixel_values",
    "pixel_values_images",
    "pixel_values_local",
    "pixel_values_videos",
    "protein_attention_mask",
    "protein_input_ids",
    "qformer_attention_mask",
    "qformer_input_ids",
    "second_per_grid_ts",
    "spatial_shapes",
    "target_sizes",
    "target_sizes_videos",
    "video_compression_mask",
    "video_grid_thw",
    "video_grids",
    "video_merge_sizes",
    "video_position_ids",
    "video_second_per_grid",
    "video_token_pooling",
)
"""Images, video and audio, as processors of Hugging Face name them: every rank takes them in full.

Also what they say of tokens, for models that read it before their sequences are sharded.
"""


def media_names(batch: Any) -> set[str]:
    """Return the names of images, video, audio and what describes them in a batch.

    Example:
        >>> import torch
        >>> media_names({"input_ids": torch.ones(1, 4), "pixel_values": torch.ones(1, 3, 8, 8)})
        {'pixel_values'}
    """
    return media_of(flatten(batch))


def media_of(flat: Flat) -> set[str]:
    """Return the same for a batch that is taken apart."""
    return {str(x.role) for x in flat.leaves if x.role in MEDIA and x.value is not None}
