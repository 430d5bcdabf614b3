# SPDX-License-Identifier: Apache-2.0
"""Where a multimodal model becomes sharded: hooks around its text decoder, or around its layers.

The model around it runs on full sequences (`outer`). The hooks shard what the decoder gets, by the
names of its arguments, and end the declaration that leaves attention unchanged for the length of
its call. Decoders that merge media by themselves have the hooks on each of their layers.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils.generic import ModelOutput

from hf_patches.interface.input_checks import name_arguments, note_filled, parameters_of
from hf_patches.interface.names import active
from hf_patches.multimodal.outer import hand_over_routers, merged_ids, on_full_sequences
from lightning_cp.data.shard import own_tokens, shard
from lightning_cp.geometry.layout import Layout
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.step import active_step
from lightning_cp.step.step import PerStep, Step, StepMask

_prepared = PerStep[StepMask | None]()


def prepared_mask(step: Step) -> StepMask | None:
    """Return the mask that the running decoder takes from the model around it; None for none."""
    return _prepared.get(step)


_ENTERED: Final = "_lightning_cp_entered"

DIMS: Final[Mapping[str, int | None]] = {
    "hidden_states": 1,
    "input_ids": 1,
    "inputs_embeds": 1,
    "attention_mask": 1,
    "position_ids": -1,
    "per_layer_inputs": 1,
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
    "moe_mm_token_type_ids": 1,
    "visual_pos_masks": 1,
    "vision_mask": 1,
    "cross_attention_mask": 2,
    "full_text_row_masked_out_mask": 2,
    "cross_attention_states": None,
    "encoder_hidden_states": None,
    "encoder_attention_mask": None,
}
"""The sequence dims of what decoders and their layers get; None: the same on every rank."""

ROWS: Final[Mapping[str, str]] = {
    "deepstack_visual_embeds": "visual_pos_masks",
    "deepstack_features": "vision_mask",
}
"""Features of media tokens, one row each, by the mask of the tokens that they belong to."""

_MERGED: Final = ("inputs_embeds", *ROWS, *ROWS.values())
"""What belongs to this rank's tokens already, if the model merges its shard."""


def add_hooks(
    modules: list[nn.Module], dims: Mapping[str, int | None], *, are_layers: bool
) -> Iterator[RemovableHandle]:
    """Hook a decoder, or the layers of one that merges media by itself; yield the handles.

    Args:
        modules: the decoder, or its layers.
        dims: sequence dims of arguments, besides `DIMS`.
        are_layers: whether the modules are layers.
    """
    for index, module in enumerate(modules):
        kept = ("hidden_states",) if are_layers and index > 0 else ()
        enter = partial(_enter, dims={**DIMS, **dims}, kept=kept, is_layer=are_layers)
        yield module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(_leave, always_call=True)


def _enter(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dims: Mapping[str, int | None],
    kept: tuple[str, ...],
    is_layer: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Shard the arguments of a decoder or of a layer, and end the part with full sequences."""
    step = on_full_sequences()
    if step is None:
        module.__dict__.pop(_ENTERED, None)  # of a call that was interrupted
        return None
    call_arguments = name_arguments(module, args, kwargs)
    is_merged = merged_ids() is not None
    local = {} if is_merged else _shard_rows(call_arguments, step)
    kept = (*kept, *_MERGED) if is_merged else kept
    for name, value in call_arguments.items():
        if name not in kept and name not in local:
            local[name] = _shard_value(module, name, value, dims, step)
    local = {name: local.get(name, value) for name, value in call_arguments.items()}
    if not is_layer:
        _prepare(module, local, step)
    entered = module.__dict__.setdefault(_ENTERED, [])
    entered.append((active_step.exchange_exempt(0), step))
    # A layer takes its hidden states by position: gradient checkpointing saves only those.
    if is_layer and args:
        first = parameters_of(type(module).forward)[0]
        return (local.pop(first),), local
    return (), local


def _prepare(module: nn.Module, local: dict[str, Any], step: Step) -> None:
    names = parameters_of(type(module).forward)
    if "past_key_values" in local:
        local["past_key_values"] = None
    if "use_cache" in names:
        local["use_cache"] = False
    if isinstance(local.get("attention_mask"), StepMask):
        _prepared.put(step, local["attention_mask"])
        local["attention_mask"] = None
    if isinstance(local.get("position_ids"), Tensor):
        note_filled(step, local["position_ids"])


def _leave(module: nn.Module, _: object, output: Any = None) -> Any:
    entered = module.__dict__.get(_ENTERED)
    if not entered:
        return None
    number, step = entered.pop()
    if not entered:
        del module.__dict__[_ENTERED]
    active_step.exchange_exempt(number)
    _prepared.put(step, None)
    if not isinstance(output, ModelOutput) or output.get("router_logits") is None:
        return None
    # The model around the decoder would compute a balance loss from this rank's tokens and the
    # full mask; without scores it is 0.
    hand_over_routers(output["router_logits"])
    return type(output)(**{k: v for k, v in output.items() if k != "router_logits"})


def _shard_rows(call_arguments: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Return the features of this rank's media tokens, where a decoder gets them as rows."""
    local: dict[str, Any] = {}
    for name, mask_name in ROWS.items():
        features, mask = call_arguments.get(name), call_arguments.get(mask_name)
        if features is None or mask is None:
            continue
        rows = rows_of(mask if mask.dim() == 2 else mask[..., 0], step.layout, step.cp_rank)
        if isinstance(features, Mapping):
            local[name] = {key: x[rows] for key, x in features.items()}
        else:
            local[name] = [x[rows] for x in features]
    return local


def rows_of(mask: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return which of the marked tokens of the full batch a rank holds, in its order.

    Args:
        mask: bool [B, S].
        layout: which rank owns which tokens.
        rank: the rank.
    """
    numbers = (mask.flatten().cumsum(0) - 1).view_as(mask)
    is_marked = shard(mask, 1, layout=layout, rank=rank, fill=False)
    return shard(numbers, 1, layout=layout, rank=rank)[is_marked]


def _shard_value(
    module: nn.Module, name: str, value: Any, dims: Mapping[str, int | None], step: Step
) -> Any:
    if name == "position_embeddings" and isinstance(value, tuple):
        return tuple(_shard_at(module, name, x, -2, step) for x in value)
    if name == "position_embeddings" and isinstance(value, Mapping):
        return {
            key: tuple(_shard_at(module, name, x, -2, step) for x in pair)
            for key, pair in value.items()
        }
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask" and value.dim() == 4:
        return _shard_at(module, name, value, -2, step)
    if name in dims:
        dim = dims[name]
        return value if dim is None else _shard_at(module, name, value, dim, step)
    if step.layout.seq_len in value.shape:
        raise ValueError(
            f"{type(module).__name__} got `{name}` of shape {tuple(value.shape)} inside a step, as "
            f"long as the full sequence of {step.layout.seq_len} tokens, and is not known to "
            "take it. Run the model on full sequences: `with cp.paused():`."
        )
    return value


def _shard_at(module: nn.Module, name: str, x: Tensor, dim: int, step: Step) -> Tensor:
    if x.dim() < abs(dim) + (dim >= 0) or x.shape[dim] == 1 != step.layout.seq_len:
        return x  # the same for all tokens
    if x.shape[dim] != step.layout.seq_len:
        raise ValueError(
            f"{type(module).__name__} got `{name}` of shape {tuple(x.shape)} inside a step whose "
            f"sequences have {step.layout.seq_len} tokens: the model has lengthened its sequences. "
            "Give it sequences that hold a placeholder for each feature, as its processor does."
        )
    return own_tokens(x, step, dim)


class AttendsToMedia:
    """Hooks of a layer inside the decoder whose keys every rank holds: it runs as the stock layer.

    Args:
        module: the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handles = (
            module.register_forward_pre_hook(lambda *_: active_step.declare_full_sequences(1)),
            module.register_forward_hook(
                lambda *_: active_step.declare_full_sequences(-1), always_call=True
            ),
        )

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def refuse_direct_call(module: nn.Module, *_: object) -> None:
    """Raise where the part of a model that holds towers and decoder is called by itself in a step.

    It would merge this rank's tokens with all media, and count positions from 0.
    """
    if active() is not None:
        raise ValueError(
            f"{type(module).__name__} was called inside a step, not the enabled model that holds "
            "it: a model with media runs on full sequences up to its decoder, from its own forward "
            "on. Call the model itself (output_hidden_states=True returns hidden states), or run "
            "full sequences: `with cp.paused():`."
        )


# ---------------------------------------------------------------- positions of packed documents


def full_positions(_: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute 3-D positions of full sequences, where a model merges this rank's shard.

    Args:
        stock: the model's ``compute_3d_position_ids``.
        args: of the call.
        kwargs: of the call.
    """
    ids = merged_ids()
    if ids is None:
        return stock(*args, **kwargs)
    call_arguments = inspect.signature(stock).bind(*args, **kwargs).arguments
    return stock(**{**call_arguments, "input_ids": ids})


def packed_positions(_: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute 3-D positions with each document as a sequence of its own.

    The model's own function counts images and frames along a sequence, and knows no documents.

    Args:
        stock: the model's ``get_rope_index``.
        args: of the call.
        kwargs: of the call.
    """
    step = on_full_sequences()
    if step is None or step.documents is None:
        return stock(*args, **kwargs)
    call_arguments = dict(inspect.signature(stock).bind(*args, **kwargs).arguments)
    call_arguments |= call_arguments.pop("kwargs", {})
    documents = torch.from_numpy(step.documents).expand(step.batch_size, -1)
    if step.padding is not None:
        documents = documents.masked_fill(torch.from_numpy(step.padding), NO_DOCUMENT)
    shape = (step.batch_size, step.layout.seq_len)
    rows, spots = [], []
    for row, ids in enumerate(documents):
        for number in sorted(set(ids.tolist()) - {NO_DOCUMENT}):
            rows.append(row)
            spots.append(torch.nonzero(ids == number)[:, 0])
    longest = max(len(x) for x in spots)

    def unpack(x: Tensor) -> Tensor:
        out = x.new_zeros(len(spots), longest)
        for i, (row, at) in enumerate(zip(rows, spots, strict=True)):
            out[i, : len(at)] = x[row, at.to(x.device)]
        return out

    ids = call_arguments["input_ids"]
    call_arguments["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=ids.device)
    unpacked = {
        name: unpack(x) if isinstance(x, Tensor) and x.shape == shape else x
        for name, x in call_arguments.items()
    }
    positions, deltas = stock(**unpacked)
    packed = positions.new_zeros(*positions.shape[:-2], *shape)
    for i, (row, at) in enumerate(zip(rows, spots, strict=True)):
        packed[..., row, at.to(packed.device)] = positions[..., i, : len(at)]
    return packed, deltas
