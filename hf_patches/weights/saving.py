# SPDX-License-Identifier: Apache-2.0
"""`model.save_pretrained(folder)` of a sharded model.

Called on every rank: weights are gathered one by one, and rank 0 writes them as an unsharded model
would. Works for a model, for a PEFT model around it, and for a model with merged adapters.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_cp.checkpoint import gather_state, is_whole, meet
from lightning_cp.comm.collective_errors import rank, together
from lightning_cp.patch import patches_of, replace_method

_SAVE: Final = "save_pretrained"

_FIX: Final = (
    "Each rank holds a shard of the weights, so all ranks must call it, without `if "
    "trainer.is_global_zero`; only rank 0 writes. Or save with trainer.save_checkpoint(PATH) and "
    "turn that into a Hugging Face folder: lightning-cp export PATH OUT; or train with "
    "parameters='none'."
)


def add_saving(model: nn.Module) -> None:
    """Let a model, and the models inside it, save full weights when they are sharded."""
    for module in _models(model):
        if _SAVE not in module.__dict__:
            replace_method(module, _SAVE, save_full)


def remove_saving(model: nn.Module) -> None:
    """Undo `add_saving`, unless the model is sharded: it could no longer be saved."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return
    for module in _models(model):
        for patch in patches_of(module, _SAVE):
            patch.remove()


def _models(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) or _is_peft(module):
            yield module


def _is_peft(module: nn.Module) -> bool:
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def save_full(
    model: nn.Module, stock: Callable[..., Any], save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call the model's own ``save_pretrained`` with full weights, on rank 0. Collective."""
    state: Mapping[str, Any] | None = kwargs.pop("state_dict", None)
    if state is None and any(isinstance(p, DTensor) for p in model.parameters()):
        state = model.state_dict()
        if _is_peft(model):
            state = adapter_state(model, state, kwargs)
    sharded = state is not None and any(isinstance(x, DTensor) for x in state.values())
    if state is None or not sharded or kwargs.get("distributed_checkpoint"):
        if state is not None:
            kwargs["state_dict"] = state
        return stock(save_directory, *args, **kwargs)
    is_local = all(is_whole(x) for x in state.values())
    if not is_local:
        meet(f"{type(model).__name__.removeprefix('FSDP')}.{_SAVE}()", _FIX)
    full = gather_state(state)

    def write() -> Any:
        if rank() == 0:
            return stock(save_directory, *args, state_dict=full, **kwargs)
        return None

    return write() if is_local else together(write, f"{save_directory} was not written.")


def adapter_state(model: Any, state: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state that PEFT saves with its adapters; the rest is not gathered.

    Args:
        model: a PEFT model.
        state: its state dict.
        options: those of its ``save_pretrained``.
    """
    from peft import get_peft_model_state_dict

    saved: set[int] = set()
    for name in options.get("selected_adapters") or list(model.peft_config):
        adapter = get_peft_model_state_dict(
            model,
            state_dict=state,
            adapter_name=name,
            save_embedding_layers=options.get("save_embedding_layers", "auto"),
        )
        saved |= {id(x) for x in adapter.values()}
    return {name: x for name, x in state.items() if id(x) in saved}
