# SPDX-License-Identifier: Apache-2.0
"""The call of a model with media inside a step: its arguments, checked and completed.

`outer` runs the model with them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_patches.interface.input_checks import parameters_of
from hf_patches.interface.names import active
from hf_patches.multimodal import outer
from hf_patches.multimodal.table import Media
from lightning_cp.data.media_names import MEDIA
from lightning_cp.step.step import Step


def around_decoder(
    model: PreTrainedModel,
    media: Media,
    decoder: str,
    stock: Callable[..., Any],
    /,
    **arguments: Any,
) -> Any:
    """Run a model with media: on full sequences up to its decoder, which shards what it gets.

    Args:
        model: the model.
        media: how media and text meet in it.
        decoder: path of its text decoder.
        stock: its forward method.
        arguments: of the call, with this rank's tokens inside a step.
    """
    step = active()
    if step is None:
        return stock(**arguments)
    inner: Any = model.get_submodule(decoder)
    configs = (model.config, model.config.get_text_config(), inner.config)
    _check_dropout(model, decoder if media.seam == "decoder" else f"{decoder}.layers")
    _check_grids(model, arguments)
    if step.documents is not None:
        arguments = _with_documents(model, media, arguments, step)
    if "use_cache" in parameters_of(type(model).forward):
        arguments["use_cache"] = False
    try:
        return outer.run(
            stock,
            arguments,
            step,
            frozenset(map(id, configs)),
            merges_shards=_merges_shards(model, media, arguments, step),
        )
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        if names := [name for name in MEDIA if arguments.get(name) is not None]:
            error.add_note(
                f"{type(model).__name__} got {', '.join(names)}. Pass everything that its "
                "processor returns for the samples of a batch, and shorten samples before it, so "
                "that each feature has its placeholder."
            )
        raise


def _merges_shards(
    model: PreTrainedModel, media: Media, arguments: Mapping[str, Any], step: Step
) -> bool:
    """Return whether the model merges this rank's tokens with their features."""
    if not media.merges_shards or step.cp_size == 1:
        return False
    if arguments.get("mm_encoder_outputs") is not None:
        return False  # features of full sequences, by the user
    # Padding, token 0, must not look like media.
    return 0 not in (model.config.image_token_id, model.config.video_token_id)


_GRIDS: Final = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


def _check_grids(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Raise for patches without their grid, on which stock models fail somewhere inside."""
    names = parameters_of(type(model).forward)
    for pixels, grid in _GRIDS.items():
        if grid in names and arguments.get(pixels) is not None and arguments.get(grid) is None:
            raise ValueError(
                f"{type(model).__name__} got `{pixels}` without `{grid}`, which says how patches "
                "lie in images and frames. Put both into the batch: its processor returns them."
            )


def _with_documents(
    model: PreTrainedModel, media: Media, arguments: dict[str, Any], step: Step
) -> dict[str, Any]:
    """Return the arguments of a model with media for packed documents."""
    if media.packing:
        raise ValueError(
            f"The batch holds packed documents, and {type(model).__name__} cannot take them: "
            f"{media.packing}. Give each document its own sample."
        )
    arguments, positions = dict(arguments), arguments.get("position_ids")
    if any(hasattr(owner, "get_rope_index") for owner in (model, model.base_model)):
        if isinstance(positions, Tensor) and positions.dim() == 2:
            del arguments["position_ids"]  # they describe the documents; the model counts media
        if arguments.get("attention_mask") is None:  # without one some models count text only
            shape = (step.batch_size, step.layout.seq_len)
            ones = torch.ones(shape, dtype=torch.int64, device=step.position_ids.device)
            arguments["attention_mask"] = ones
    elif positions is None and media.first_position is not None:
        arguments["position_ids"] = outer.counted_positions(step) + media.first_position
    return arguments


def _check_dropout(model: PreTrainedModel, sharded: str) -> None:
    """Raise for dropout in training in parts that several ranks compute.

    At each call: adapters may be added, and modules switched to training, after `enable`.
    """
    for path, module in model.named_modules() if model.training else ():
        if not module.training or f"{path}.".startswith(f"{sharded}."):
            continue
        for name, value in vars(module).items():
            is_dropout = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
            if is_dropout and isinstance(value, float) and 0 < value < 1:
                raise ValueError(
                    f"{path}.{name} is {value} in training, outside of the text decoder: ranks "
                    "compute this part several times, and would draw different numbers. Set it to "
                    "0 in the config of the model or of the adapter, or switch it off: "
                    f"model.get_submodule('{path}').eval()."
                )
