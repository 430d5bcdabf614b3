# SPDX-License-Identifier: Apache-2.0
"""Find where tokens of a model meet outside of registered attention.

Attention is replaced by a function of each token's own value, one token is changed, and every
module is watched: where other tokens move although nothing reached the module from them, it mixes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hf_patches.names import implementations

PROBE: Final = "lightning_cp_probe"
_LENGTHS: Final = (23, 131)  # that no other dim of a model has


def _own_value(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    """Return each token's own value, where attention would mix them."""
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


def _no_mask(*_: object, **__: object) -> None:
    return None


AttentionInterface.register(PROBE, _own_value)
AttentionMaskInterface.register(PROBE, _no_mask)


def find_mixing(model: PreTrainedModel) -> list[str]:
    """Return the names of the innermost modules in which tokens meet outside of attention.

    Runs the model on a few random tokens; its weights must be there. Mixing that reaches further
    than a hundred tokens, or whose weights are 0, is not seen.

    Args:
        model: a text model that is not enabled.
    """
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    found: list[str] = []
    with _probing(model):
        for length in _LENGTHS:
            found += _mixing(model, min(length, longest), config.vocab_size)
    found = list(dict.fromkeys(found))
    return [name for name in found if not any(_is_inside(other, name) for other in found)]


def _mixing(model: PreTrainedModel, length: int, vocab_size: int) -> list[str]:
    tokens = torch.arange(length, device=next(model.parameters()).device) % vocab_size
    changed = tokens.clone()
    at = length // 2
    changed[at] = (changed[at] + 1) % vocab_size
    before, after = _watch(model, tokens[None]), _watch(model, changed[None])
    if len(before) != len(after):
        return [""]
    pairs = zip(before, after, strict=True)
    return [
        name
        for (name, given, made), (_, given_after, made_after) in pairs
        if _moved(made, made_after, length) and not _moved(given, given_after, length)
    ]


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


Seen = tuple[str, list[Tensor], list[Tensor]]


@contextmanager
def _probing(model: PreTrainedModel) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    names = implementations(model)
    model.train(False)
    model.set_attn_implementation(PROBE)
    try:
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(names)
        for module, was in training.items():
            module.training = was


def _watch(model: PreTrainedModel, tokens: Tensor) -> list[Seen]:
    """Run a model and return what came into and out of each of its modules."""
    seen: list[Seen] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def look(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                seen.append((name, list(_tensors((args, kwargs))), list(_tensors(output))))

            stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        model(input_ids=tokens)
    return seen


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _moved(before: list[Tensor], after: list[Tensor], length: int) -> bool:
    """Say whether anything differs at a token that was not changed."""
    for one, other in zip(before, after, strict=False):
        if one.shape != other.shape:
            return True
        dims = [dim for dim, size in enumerate(one.shape) if size == length]
        if not dims:
            continue
        others = [place for place in range(length) if place != length // 2]
        index = torch.tensor(others, device=one.device)
        x, y = one.index_select(dims[0], index), other.index_select(dims[0], index)
        if x.is_complex():
            x, y = torch.view_as_real(x), torch.view_as_real(y)
        if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            return True
    return False
