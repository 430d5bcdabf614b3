# SPDX-License-Identifier: Apache-2.0
"""A probe that finds modules which mix tokens outside of registered attention.

Attention is replaced by a function of each token's own value, one token is changed, and the inputs
and outputs of every module are compared: a module mixes if its output changes at other tokens while
its input does not.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

PROBE: Final = "lightning_cp_probe"
_LENGTHS: Final = (23, 131)  # unlike any other dim of a model


def _own_value(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """Return the value of each token, in place of attention."""
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


def _no_mask(*_: object, **__: object) -> None:
    return None


AttentionInterface.register(PROBE, _own_value)
AttentionMaskInterface.register(PROBE, _no_mask)


def find_mixing(model: PreTrainedModel) -> list[str]:
    """Return the names of the innermost modules that mix tokens outside of attention.

    Runs the model on a few tokens, so it cannot be on the meta device. Mixing over more than a
    hundred tokens, or with weights of 0, is not found.

    Args:
        model: a text model that is not enabled.
    """
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    mixing: list[str] = []
    with _probing(model):
        for length in _LENGTHS:
            mixing += _mixing(model, min(length, longest), config.vocab_size)
    mixing = list(dict.fromkeys(mixing))
    return [name for name in mixing if not any(_is_inside(other, name) for other in mixing)]


def _mixing(model: PreTrainedModel, length: int, vocab_size: int) -> list[str]:
    tokens = torch.arange(length, device=next(model.parameters()).device) % vocab_size
    changed = tokens.clone()
    at = length // 2
    changed[at] = (changed[at] + 1) % vocab_size
    before, after = _record(model, tokens[None]), _record(model, changed[None])
    if len(before) != len(after):
        return [""]
    pairs = zip(before, after, strict=True)
    return [
        name
        for (name, inputs, outputs), (_, new_inputs, new_outputs) in pairs
        if _differ(outputs, new_outputs, length) and not _differ(inputs, new_inputs, length)
    ]


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


Call = tuple[str, list[Tensor], list[Tensor]]
"""Name, inputs and outputs of a module."""


@contextmanager
def _probing(model: PreTrainedModel) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    names = [(config, config._attn_implementation) for config in _configs(model.config)]
    model.train(False)
    model.set_attn_implementation(PROBE)
    try:
        with torch.no_grad():
            yield
    finally:
        for config, name in names:  # a config sets those inside it, which follow
            config._attn_implementation = name
        for module, was in training.items():
            module.training = was


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and all configs inside it."""
    yield config
    for key in config.sub_configs:
        inside = getattr(config, key, None)
        if inside is not None:
            yield from _configs(inside)


def _record(model: PreTrainedModel, tokens: Tensor) -> list[Call]:
    """Run a model and return the inputs and outputs of each of its modules."""
    calls: list[Call] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def record(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                calls.append((name, list(_tensors((args, kwargs))), list(_tensors(output))))

            stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        model(input_ids=tokens)
    return calls


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _differ(before: list[Tensor], after: list[Tensor], length: int) -> bool:
    """Return whether tensors differ at a token other than the changed one."""
    for one, other in zip(before, after, strict=False):
        if one.shape != other.shape:
            return True
        dims = [dim for dim, size in enumerate(one.shape) if size == length]
        if not dims:
            continue
        others = [position for position in range(length) if position != length // 2]
        index = torch.tensor(others, device=one.device)
        x, y = one.index_select(dims[0], index), other.index_select(dims[0], index)
        if x.is_complex():
            x, y = torch.view_as_real(x), torch.view_as_real(y)
        if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            return True
    return False
