# SPDX-License-Identifier: Apache-2.0
"""`model.save_pretrained(folder)` of a model of which each rank holds a part.

Called on every rank: weights are gathered one by one, and rank 0 writes them as the model would
without sharding. Works for a model, for PEFT's around it, and for what is left when adapters are
merged.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_cp.checkpoint import gather_state, is_whole, meet
from lightning_cp.comm.collective_errors import rank, together

_SAVE: Final = "save_pretrained"

_CURE: Final = (
    "Each rank holds a part of the weights, so that all of them must call it, without `if "
    "trainer.is_global_zero`; rank 0 alone writes. Or save by trainer.save_checkpoint(PATH) and "
    "turn that into a Hugging Face folder: python -m hf_patches export PATH OUT; or train with "
    "parameter_sharding='none'."
)


def add_saving(model: nn.Module) -> None:
    """Let a model, and the models inside it, save whole weights once they are sharded."""
    for module in _models(model):
        module.__dict__.setdefault(_SAVE, functools.partial(save_whole, module))


def remove_saving(model: nn.Module) -> None:
    """Undo `add_saving`, unless the model is sharded: then it could not be saved any more."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return
    for module in _models(model):
        own = module.__dict__.get(_SAVE)
        if isinstance(own, functools.partial) and own.func is save_whole:
            del module.__dict__[_SAVE]


def _models(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) or _is_peft(module):
            yield module


def _is_peft(module: nn.Module) -> bool:
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def save_whole(model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what the model's own ``save_pretrained`` does, with whole weights, on rank 0."""
    stock: Callable[..., Any] = getattr(type(model), _SAVE)
    state: Mapping[str, Any] | None = kwargs.pop("state_dict", None)
    if state is None and any(isinstance(p, DTensor) for p in model.parameters()):
        state = model.state_dict()
        if _is_peft(model):
            state = _of_adapters(model, state, kwargs)
    sharded = state is not None and any(isinstance(x, DTensor) for x in state.values())
    if state is None or not sharded or kwargs.get("distributed_checkpoint"):
        given = {} if state is None else {"state_dict": state}
        return stock(model, save_directory, *args, **given, **kwargs)
    alone = all(is_whole(x) for x in state.values())
    if not alone:
        meet(f"{type(model).__name__.removeprefix('FSDP')}.{_SAVE}()", _CURE)
    whole = gather_state(state)

    def write() -> Any:
        if rank() == 0:
            return stock(model, save_directory, *args, state_dict=whole, **kwargs)
        return None

    return write() if alone else together(write, f"{save_directory} was not written.")


def _of_adapters(model: Any, state: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state that is saved with adapters: nobody gathers the rest."""
    from peft import get_peft_model_state_dict

    kept: set[int] = set()
    for name in options.get("selected_adapters") or list(model.peft_config):
        found = get_peft_model_state_dict(
            model,
            state_dict=state,
            adapter_name=name,
            save_embedding_layers=options.get("save_embedding_layers", "auto"),
        )
        kept |= {id(x) for x in found.values()}
    return {name: x for name, x in state.items() if id(x) in kept}
