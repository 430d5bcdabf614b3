# SPDX-License-Identifier: Apache-2.0
"""Hooks that give a model the global positions of this rank's tokens, where it would count from 0.

They act inside a step only, and are plain functions, so that models can be copied and pickled.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_patches.interface.input_checks import name_arguments, note_filled, parameters_of
from hf_patches.interface.names import active
from lightning_cp.comm.transport import gather
from lightning_cp.data.batch import count_positions
from lightning_cp.data.shard import full_tokens, own_tokens
from lightning_cp.step import active_step
from lightning_cp.step.guards import check_recompute
from lightning_cp.step.step import Step, StepMask, per_step

LENGTH_DEPENDENT: Final = {"dynamic", "longrope"}
"""Types of RoPE whose frequencies depend on the longest position of a call."""


def add_hooks(model: PreTrainedModel) -> Iterator[RemovableHandle]:
    """Hook every module of a model that counts positions; yield the handles."""
    rule = position_rule(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            hook = partial(_fill, rule=rule)
            yield module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        if _counts_positions(module):
            yield module.register_forward_hook(_look_up)
        if LENGTH_DEPENDENT & _rope_types(module):
            yield module.register_forward_pre_hook(_append_longest, with_kwargs=True)
            yield module.register_forward_hook(_drop_longest)
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "use_rope"):
            yield module.register_forward_pre_hook(_disable_temperature, with_kwargs=True)
            yield module.register_forward_hook(_restore_temperature, always_call=True)


def position_rule(model: PreTrainedModel) -> tuple[str, int]:
    """Return how a model numbers tokens when it gets no position ids, and the padding id.

    ``index``: by their index. ``ids``: counts tokens other than the padding token, from its id + 1
    (RoBERTa). ``mask``: counts tokens that are not padding (OPT).
    """
    if model.config.model_type == "opt":
        return "mask", 0
    for module in model.modules():
        if hasattr(type(module), "create_position_ids_from_input_ids"):
            return "ids", int(module.padding_idx)  # type: ignore[arg-type]
    return "index", 0


def counts_by_index(model: PreTrainedModel) -> bool:
    """Return whether positions are indices of tokens, or the caller's, in all of a model."""
    tuned = (getattr(module, "attn_temperature_tuning", False) for module in model.modules())
    return position_rule(model)[0] == "index" and not any(tuned)


def _fill(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rule: tuple[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Fill in position ids that the caller left out, and switch the KV cache off."""
    step = active()
    if step is None:
        return None
    names, arguments = parameters_of(type(module).forward), name_arguments(module, args, kwargs)
    if "position_ids" in names and arguments.get("position_ids") is None:
        arguments["position_ids"] = local_positions(step, rule, arguments.get("input_ids"))
        note_filled(step, arguments["position_ids"])
    if "use_cache" in names and arguments.get("use_cache") is None:
        arguments["use_cache"] = False
    return (), arguments


def local_positions(step: Step, rule: tuple[str, int], input_ids: Tensor | None) -> Tensor:
    """Return the position ids of this rank's tokens, [B, L], as the model would number them."""
    kind, first = rule
    if step.has_position_ids or kind == "index":
        return step.position_ids
    layout = step.layout
    real = torch.ones(1, layout.seq_len, dtype=torch.bool, device=step.position_ids.device)
    if kind == "mask":
        first = -1
        if step.padding is not None:
            real = ~torch.from_numpy(step.padding).to(real.device)
    elif input_ids is not None:
        real = full_tokens(input_ids, step) != first
    numbers = torch.where(real, count_real(real, step) + first, first)
    numbers = numbers.expand(step.batch_size, -1)
    return own_tokens(numbers, step)


def count_real(real: Tensor, step: Step) -> Tensor:
    """Count the real tokens of each document up to and including each position."""
    total = real.cumsum(1)
    within = torch.from_numpy(count_positions(step.documents, step.layout.seq_len)).to(real.device)
    start = torch.arange(step.layout.seq_len, device=real.device) - within
    batch_size = max(len(total), len(start))
    total, start, real = (x.expand(batch_size, -1) for x in (total, start, real))
    before = total.gather(1, start) - real.gather(1, start).long()
    return total - before


@per_step
def document_positions(step: Step) -> Tensor:
    """Return the index of each of this rank's tokens in its document, [B or 1, L]."""
    positions = torch.from_numpy(count_positions(step.documents, step.layout.seq_len))
    return own_tokens(positions, step).to(step.position_ids.device)


# ---------------------------------------------------------------- position embeddings


def _counts_positions(module: nn.Module) -> bool:
    """Return whether this is a position embedding that takes a length, not position ids."""
    if not isinstance(module, nn.Embedding):
        return False
    names = parameters_of(type(module).forward)
    return "past_key_values_length" in names and "attention_mask" not in names


def _look_up(module: nn.Embedding, _: object, output: Tensor) -> Tensor | None:
    """Replace embeddings of positions counted from 0 by those of the global positions."""
    step = active()
    if step is None:
        return None
    positions = step.position_ids if step.has_position_ids else document_positions(step)
    return functional.embedding(positions + int(getattr(module, "offset", 0)), module.weight)


# ---------------------------------------------------------------- RoPE that depends on the length


def _rope_types(module: nn.Module) -> set[str]:
    """Return the types of RoPE that a module computes."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return {str(x) for x in kind.values()}
    return {kind} if isinstance(kind, str) else set()


def _append_longest(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Append a token at the longest position of the full batch.

    The module derives its frequencies from the longest position that it sees, which must be the
    same on all ranks.
    """
    step = active()
    if step is None:
        check_recompute(active_step.current())
        return None
    arguments = name_arguments(module, args, kwargs)
    positions = arguments["position_ids"]
    longest = gather(positions.max(), step.groups.context).max().expand(*positions.shape[:-1], 1)
    arguments["position_ids"] = torch.cat([positions, longest], -1)
    return (), arguments


def _drop_longest(_: nn.Module, __: object, output: Any) -> Any:
    if active() is None:
        return None
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(x[..., :-1, :] for x in output)


# ---------------------------------------------------------------- temperature (Llama 4)


def _disable_temperature(layer: Any, _: object, kwargs: dict[str, Any]) -> None:
    # When a layer is recomputed, its step may be closed; the mask still carries it.
    if active() is not None or isinstance(kwargs.get("attention_mask"), StepMask):
        layer.attn_temperature_tuning = False


def _restore_temperature(layer: Any, *_: object) -> None:
    layer.attn_temperature_tuning = True


def scales_queries(layer: Any) -> bool:
    """Return whether `temperature` scales the queries of a layer.

    Only layers without RoPE do it, and only those whose own scaling our hook has switched off.
    """
    # A module looks for a missing attribute in several places, for each layer.
    is_disabled = vars(layer).get("attn_temperature_tuning") is False
    return is_disabled and not layer.use_rope and bool(layer.config.attn_temperature_tuning)


def temperature(layer: Any, query: Tensor, step: Step) -> Tensor:
    """Scale queries by their position, where a layer would count from 0 (Llama 4)."""
    if not scales_queries(layer):
        return query
    steps = torch.floor((document_positions(step).to(torch.float32) + 1.0) / layer.floor_scale)
    scales = torch.log1p(steps) * layer.attn_scale + 1.0
    scaled: Tensor = query * scales[:, None, :, None]
    return scaled.to(query.dtype)
