# SPDX-License-Identifier: Apache-2.0
"""Where this rank's tokens stand in the row, for models that would count from 0.

All of it acts inside a step only. Hooks are plain functions, so that models deepcopy and pickle.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_patches.names import active
from lightning_cp import active_step
from lightning_cp.comm.transport import gather
from lightning_cp.data.batch import count_positions
from lightning_cp.data.sharding import shard, unshard
from lightning_cp.guards import check_recompute
from lightning_cp.step import Step, StepMask
from lightning_cp.torch_private import constant_in_graphs

LENGTH_DEPENDENT: Final = {"dynamic", "longrope"}
"""Kinds of RoPE whose frequencies follow the longest position of a call."""

FILLED: Final = "position ids that were filled in"
"""Where a step keeps them, so that they are not taken for the caller's."""


def add_hooks(model: PreTrainedModel) -> Iterator[RemovableHandle]:
    """Let every part of a model that counts positions take those of the whole row."""
    rule = position_rule(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            hook = partial(_fill, rule=rule)
            yield module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        if _counts_itself(module):
            yield module.register_forward_hook(_look_up)
        if LENGTH_DEPENDENT & _rope_types(module):
            yield module.register_forward_pre_hook(_append_longest, with_kwargs=True)
            yield module.register_forward_hook(_drop_longest)
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "use_rope"):
            yield module.register_forward_pre_hook(_leave_temperature, with_kwargs=True)
            yield module.register_forward_hook(_restore_temperature, always_call=True)


def position_rule(model: PreTrainedModel) -> tuple[str, int]:
    """Return how a model numbers its tokens if nobody tells it, and from where.

    ``row``: by their place. ``ids``: tokens that are not the padding token, from the number after
    that token's (RoBERTa). ``mask``: tokens that are not padding (OPT).
    """
    if model.config.model_type == "opt":
        return "mask", 0
    for module in model.modules():
        if hasattr(type(module), "create_position_ids_from_input_ids"):
            return "ids", int(module.padding_idx)  # type: ignore[arg-type]
    return "row", 0


_names: dict[Callable[..., Any], tuple[str, ...]] = {}


@constant_in_graphs
def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that a forward function takes, without those that stand for the rest."""
    if forward not in _names:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        _names[forward] = tuple(p.name for p in parameters if p.kind in named)
    return _names[forward]


def name_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of a module, all by their names."""
    return dict(zip(parameters_of(type(module).forward), args, strict=False)) | kwargs


def _fill(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rule: tuple[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Fill in position ids that the caller left out, and leave the cache of keys out."""
    step = active()
    if step is None:
        return None
    names, given = parameters_of(type(module).forward), name_arguments(module, args, kwargs)
    if "position_ids" in names and given.get("position_ids") is None:
        given["position_ids"] = local_positions(step, rule, given.get("input_ids"))
        step.cache.setdefault(FILLED, []).append(given["position_ids"])
    if "use_cache" in names and given.get("use_cache") is None:
        given["use_cache"] = False
    return (), given


def local_positions(step: Step, rule: tuple[str, int], input_ids: Tensor | None) -> Tensor:
    """Return the position ids of this rank's tokens, [B, L], as the model would number them."""
    kind, first = rule
    if step.has_position_ids or kind == "row":
        return step.position_ids
    layout = step.layout
    real = torch.ones(1, layout.seq_len, dtype=torch.bool, device=step.position_ids.device)
    if kind == "mask":
        first = -1
        if step.padding is not None:
            real = ~torch.from_numpy(step.padding).to(real.device)
    elif input_ids is not None:
        real = unshard(input_ids, 1, layout=layout, transport=step.groups.context) != first
    numbers = torch.where(real, _count(real, step) + first, first)
    numbers = numbers.expand(step.batch_size, -1)
    return shard(numbers, 1, layout=layout, rank=step.cp_rank)


def _count(real: Tensor, step: Step) -> Tensor:
    """Count the real tokens of each document up to each place, the place itself included."""
    total = real.cumsum(1)
    place = torch.from_numpy(count_positions(step.documents, step.layout.seq_len)).to(real.device)
    start = torch.arange(step.layout.seq_len, device=real.device) - place
    rows = max(len(total), len(start))
    total, start, real = (x.expand(rows, -1) for x in (total, start, real))
    before = total.gather(1, start) - real.gather(1, start).long()
    return total - before


def row_places(step: Step) -> Tensor:
    """Return the place of each of this rank's tokens in its document, [B or 1, L]."""
    key = "row places"
    if key not in step.cache:
        places = torch.from_numpy(count_positions(step.documents, step.layout.seq_len))
        local = shard(places, 1, layout=step.layout, rank=step.cp_rank)
        step.cache[key] = local.to(step.position_ids.device)
    found: Tensor = step.cache[key]
    return found


# ---------------------------------------------------------------- tables of positions


def _counts_itself(module: nn.Module) -> bool:
    """Say whether this is a table of positions that is asked by length, not by position ids."""
    if not isinstance(module, nn.Embedding):
        return False
    names = parameters_of(type(module).forward)
    return "past_key_values_length" in names and "attention_mask" not in names


def _look_up(module: nn.Embedding, _: object, output: Tensor) -> Tensor | None:
    """Replace positions counted from 0 by those of the whole row."""
    step = active()
    if step is None:
        return None
    places = step.position_ids if step.has_position_ids else row_places(step)
    return functional.embedding(places + int(getattr(module, "offset", 0)), module.weight)


# ---------------------------------------------------------------- RoPE that follows the length


def _rope_types(module: nn.Module) -> set[str]:
    """Return the kinds of RoPE that a module computes."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return {str(x) for x in kind.values()}
    return {kind} if isinstance(kind, str) else set()


def _append_longest(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add one more token, at the longest position of the whole batch.

    The module takes its frequencies from the longest position that it sees, which must be the same
    on all ranks.
    """
    step = active()
    if step is None:
        check_recompute(active_step.current())
        return None
    given = name_arguments(module, args, kwargs)
    positions = given["position_ids"]
    longest = gather(positions.max(), step.groups.context).max().expand(*positions.shape[:-1], 1)
    given["position_ids"] = torch.cat([positions, longest], -1)
    return (), given


def _drop_longest(_: nn.Module, __: object, output: Any) -> Any:
    if active() is None:
        return None
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(x[..., :-1, :] for x in output)


# ---------------------------------------------------------------- temperature (Llama 4)


def _leave_temperature(layer: Any, _: object, kwargs: dict[str, Any]) -> None:
    # When a layer is recomputed its step may have ended; the mask still carries it.
    if active() is not None or isinstance(kwargs.get("attention_mask"), StepMask):
        layer.attn_temperature_tuning = False


def _restore_temperature(layer: Any, *_: object) -> None:
    layer.attn_temperature_tuning = True


def temperature(layer: Any, query: Tensor, step: Step) -> Tensor:
    """Scale queries by their place, where a layer would count places from 0 (Llama 4).

    Only layers without RoPE do it, and only those whose own scaling our hook has switched off.
    """
    off = getattr(layer, "attn_temperature_tuning", None) is False
    if not off or layer.use_rope or not layer.config.attn_temperature_tuning:
        return query
    steps = torch.floor((row_places(step).to(torch.float32) + 1.0) / layer.floor_scale)
    scales = torch.log1p(steps) * layer.attn_scale + 1.0
    scaled: Tensor = query * scales[:, None, :, None]
    return scaled.to(query.dtype)
