# SPDX-License-Identifier: Apache-2.0
"""Private names of transformers.

Checked with transformers 5.17 to 5.23. Each function names what it relies on and why no public name
serves. No other module uses private names of transformers (tests/tools/test_private_names.py).
Those of trainers stand in `trainers/private.py`; names of functions inside mask functions in
`mask_reader`, which refuses what it does not know.
"""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from lightning_cp.patch import Patch, require

_LIBRARY: Final = "transformers"


def attention_name(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation of a config (`_attn_implementation`), which it stores.

    `PreTrainedModel.set_attn_implementation` has no counterpart that reads.
    """
    name: str | None = config._attn_implementation
    return name


def set_attention_name(config: PreTrainedConfig, name: str) -> None:
    """Set the implementation of a config alone (`_attn_implementation_internal`).

    `set_attn_implementation` refuses models whose attention is written out; their masks depend on
    the name all the same.
    """
    name_of = "_attn_implementation_internal"
    require(config, name_of, library=_LIBRARY, use="models build the masks that we read")
    setattr(config, name_of, name)


def takes_attention(model: PreTrainedModel) -> bool:
    """Return whether a model calls registered attention (`_can_set_attn_implementation`)."""
    name = "_can_set_attn_implementation"
    require(model, name, library=_LIBRARY, use="models take our attention")
    return bool(getattr(model, name)())


def is_built_by(auto: Any, config: PreTrainedConfig) -> bool:
    """Return whether an Auto class has a model for a config (`_model_mapping`), also of users."""
    return type(config) in auto._model_mapping


def names_not_saved(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the weights that `save_pretrained` leaves out (`_keys_to_ignore_on_save`)."""
    return tuple(model._keys_to_ignore_on_save or ())


def check_loss_name() -> None:
    """Raise unless `PreTrainedModel.loss_function` is stored where `has_own_loss` looks."""
    use = "a loss of a user is refused inside a step"
    require(PreTrainedModel, "loss_function", library=_LIBRARY, use=use)
    stored = SimpleNamespace(__name__=PreTrainedModel.__name__)
    prop: Any = PreTrainedModel.loss_function
    prop.fset(stored, None)
    require(stored, "_loss_function", library=_LIBRARY, use=use)


def has_own_loss(model: PreTrainedModel) -> bool:
    """Return whether a user has set `PreTrainedModel.loss_function` (`_loss_function`)."""
    return "_loss_function" in vars(model)


_PREPARE: Final = "_preprocess_mask_arguments"
_stock: Any = getattr(masking_utils, _PREPARE, None)
_ARGUMENTS: Final = () if _stock is None else tuple(inspect.signature(_stock).parameters)


def replace_mask_arguments(prepare: Callable[..., Any]) -> Patch | None:
    """Replace what prepares the arguments of all mask functions (`_preprocess_mask_arguments`).

    None where it takes other arguments, or somebody else has replaced it: the search for packed
    documents then takes time, and changes nothing.

    Args:
        prepare: takes the arguments, of which ``config`` is the first.
    """
    is_known = "position_ids" in _ARGUMENTS and _ARGUMENTS[0] == "config"
    if not is_known or getattr(masking_utils, _PREPARE) is not _stock:
        return None
    return Patch(masking_utils, _PREPARE, prepare)


def prepare_mask_arguments(config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
    """Call what `replace_mask_arguments` has replaced."""
    return _stock(config, *args, **kwargs)


def mask_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `prepare_mask_arguments` after the config, by name."""
    return dict(zip(_ARGUMENTS[1:], args, strict=False)) | kwargs


def plan_by_module(model: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, str]:
    """Return a plan as `apply_tensor_parallelism` takes it; weights in it are tied no longer.

    Since transformers 5.23 it has the names of modules and parameters, `_expand_parallel_plan`, and
    finds parameters by the first of their names. Before, it has ``*`` for the numbers of layers.
    """
    expand: Callable[..., dict[str, str]] | None = getattr(model, "_expand_parallel_plan", None)
    if expand is None:
        return dict(plan)
    expanded = expand(dict(plan))
    first_names = {name for name, _ in model.named_parameters()}
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if name in expanded and name not in first_names:
            owner, _, own_name = name.rpartition(".")
            module = model.get_submodule(owner)
            untied = nn.Parameter(parameter.detach(), parameter.requires_grad)
            module.register_parameter(own_name, untied)
    return expanded
