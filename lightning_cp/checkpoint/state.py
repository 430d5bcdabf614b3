# SPDX-License-Identifier: Apache-2.0
"""State dicts of a model and its optimizers, by plain names, sharded or full."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cp.checkpoint.blocks import full_tensor
from lightning_cp.comm.collective_errors import rank

Names = list[list[str]]
"""The names of an optimizer's parameters, group by group."""


@dataclass(frozen=True, slots=True)
class Entries:
    """A module's state by plain name: without the prefixes of torch.compile and checkpointing.

    Attributes:
        values: tensors to save or to load into, as ``state_dict`` returns them.
        own_names: the module's own name for each plain name.
        twins: for each name, the first name of the same tensor (tied weights have several).
        params: the first name of each tensor.
    """

    values: dict[str, Any]
    own_names: dict[str, str]
    twins: dict[str, str]
    params: dict[Tensor, str]


def plain_name(name: str) -> str:
    """Return a name without the prefixes of torch.compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def read_entries(module: nn.Module, *, detach: bool = True) -> Entries:
    """Collect the state of a module; without ``detach``, the parameters, which takes less time."""
    # First: its hooks replace gathered FSDP parameters by the shards that optimizers hold.
    state = module.state_dict(keep_vars=not detach)
    named = (module.named_parameters, module.named_buffers)
    first: dict[Tensor, str] = {}
    twins = {
        plain_name(name): first.setdefault(tensor, plain_name(name))
        for name, tensor in chain.from_iterable(n(remove_duplicate=False) for n in named)
    }
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"`{name}` is on the meta device, which has no values to save or to load. "
                "Call `module.to_empty(device=...)` first."
            )
    values = {plain_name(name): value for name, value in state.items()}
    return Entries(values, {plain_name(name): name for name in state}, twins, first)


def param_names(entries: Entries, optimizer: Optimizer) -> Names:
    """Return the names of an optimizer's parameters."""
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in entries.params:
                raise ValueError(
                    f"Group {index} of {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(param.shape)} that is not in the model, so that it has no name in a "
                    "checkpoint. Make it a parameter of the LightningModule."
                )
    return [[entries.params[param] for param in g["params"]] for g in optimizer.param_groups]


def renamed(saved: Mapping[str, Any], new: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return an optimizer's state with the keys of its parameters replaced, in the same order."""
    groups = saved["param_groups"]
    old = chain.from_iterable(group["params"] for group in groups)
    key_of = dict(zip(old, chain.from_iterable(new), strict=True))
    return {
        "state": {key_of[key]: state for key, state in saved["state"].items()},
        "param_groups": [{**g, "params": list(n)} for g, n in zip(groups, new, strict=True)],
    }


def map_tensors(
    change: Callable[[Tensor], Any], value: Any, others: Callable[[Any], Any] = lambda x: x
) -> Any:
    """Apply ``change`` to all tensors of a nested value, and ``others`` to what else is in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item, others) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(change, item, others) for item in value)
    return others(value)


def take_shards(value: Any) -> tuple[Any, Any]:
    """Return a nested value with None for each DTensor, and a nested dict of those DTensors.

    The second is None if there are no DTensors. Containers without DTensors are not copied.
    """
    if isinstance(value, DTensor):
        return None, value
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    parts = {key: take_shards(item) for key, item in items}
    shards = {key: part for key, (_, part) in parts.items() if part is not None}
    if not shards:
        return value, None
    if isinstance(value, list):
        return [rest for rest, _ in parts.values()], shards
    return {key: rest for key, (rest, _) in parts.items()}, shards


def gather_shards(value: Any) -> Any:
    """Return a nested value with full tensors in place of DTensors: on rank 0, on the CPU.

    Collective. All ranks must hold the same DTensors, in the same order.
    """
    rest, shards = take_shards(value)
    put_back(rest, map_tensors(_gather, shards))
    return rest


def put_back(rest: Any, shards: Any) -> None:
    """Insert what `take_shards` has removed."""
    for key, part in (shards or {}).items():
        if isinstance(part, dict):
            put_back(rest[key], part)
        else:
            rest[key] = part


@torch.no_grad()
def _gather(tensor: Tensor) -> Tensor:
    """Return the full tensor on rank 0's CPU, and an empty one elsewhere. Collective."""
    full = tensor
    if isinstance(tensor, DTensor):
        # With CPU offload the shards are on a device on which the mesh cannot communicate.
        on_mesh: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
        full = full_tensor(on_mesh)
    return full.detach().cpu() if rank() == 0 else torch.empty(0)


def is_whole(value: Any) -> bool:
    """Return whether this rank holds the full tensor, so that it can save it alone."""
    if not isinstance(value, DTensor):
        return True
    sizes = value.device_mesh.shape
    return all(
        p.is_replicate() or size == 1 for p, size in zip(value.placements, sizes, strict=True)
    )


def gather_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with full tensors on rank 0's CPU, and nothing elsewhere. Collective.

    A tensor under several names stays one tensor.
    """
    full: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in full:
            full[id(value)] = map_tensors(_gather, value)
    return {name: full[id(value)] for name, value in state.items()} if rank() == 0 else {}


def model_state(model: nn.Module, *, full: bool) -> dict[str, Any]:
    """Return a model's state dict.

    Args:
        model: its parameters may be DTensors on any mesh.
        full: gather full tensors on rank 0's CPU, one by one, and return nothing elsewhere;
            otherwise return each rank's shards. Collective if true.
    """
    entries = read_entries(model)
    if not full:
        return entries.values
    gathered: dict[str, Any] = {}
    for name, value in entries.values.items():
        twin = entries.twins.get(name, name)
        gathered[name] = gathered[twin] if twin in gathered else map_tensors(_gather, value)
    return gathered if rank() == 0 else {}


def optimizer_state(model: nn.Module, optimizer: Optimizer, *, full: bool) -> dict[str, Any]:
    """Return an optimizer's state without changing the optimizer.

    torch's `get_optimizer_state_dict` is not used: it runs a step of an optimizer without state,
    after which Adam's step count is one too high.

    Args:
        model: the model that holds the parameters.
        optimizer: the optimizer.
        full: gather on rank 0's CPU under integer ids, the form of a plain optimizer, and return
            nothing elsewhere; otherwise return shards under the parameters' names. Collective if
            true.
    """
    entries = read_entries(model, detach=False)
    names = param_names(entries, optimizer)
    saved = optimizer.state_dict()
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, param in enumerate(params):
        map_tensors(partial(_check_shardable, entries, param), saved["state"].get(index))
    if not full:
        return renamed(saved, names)
    gathered = map_tensors(_gather, saved["state"])
    return {**saved, "state": gathered} if rank() == 0 else {}


def _check_shardable(entries: Entries, param: Tensor, state: Tensor) -> None:
    """Raise if it is unknown which part of a sharded parameter's state a rank holds."""
    if not isinstance(param, DTensor) or all(p.is_replicate() for p in param.placements):
        return
    if state.ndim and not isinstance(state, DTensor):
        raise ValueError(
            f"The optimizer state of the sharded `{entries.params[param]}` is a plain tensor of "
            f"shape {tuple(state.shape)}: ranks may hold different parts, and one would be saved. "
            "Use an optimizer whose state is DTensors, such as those of torch.optim."
        )
