# SPDX-License-Identifier: Apache-2.0
"""Parameter sharding: FSDP2 over data x context or inside nodes, block by block.

Finds the blocks of a model, broadcasts the weights of rank 0, materialises models that were built
on the meta device one block at a time, and checks what a user has sharded.
"""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lightning_cp.adapters import parallelize_models
from lightning_cp.config import TENSOR_AXIS, Sharding
from lightning_cp.fsdp.frozen import FrozenWeights, keep_packed
from lightning_cp.fsdp.gathering import own_modules
from lightning_cp.fsdp.replication import of_rank_0, set_averaging
from lightning_cp.private.fsdp2 import (
    divide_once,
    drop_unreduced_gradients,
    end_forward,
    hide_from_modes,
    is_hybrid,
    note_used_parameters,
    reduce_unused_parameters,
    take_used,
)
from lightning_cp.private.modules import (
    accumulation_hooks,
    apply_to_tensors,
    gradient_hooks,
    module_tensors,
)

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
_PARAMETERS: Final = (nn.ParameterList, nn.ParameterDict)


def is_sharded(module: nn.Module) -> bool:
    """Return whether any parameter is sharded over data x context."""
    return any(isinstance(p, DTensor) and not _is_tensor_only(p) for p in module.parameters())


def is_parallelized(module: nn.Module) -> bool:
    """Return whether tensor ranks share any parameter."""
    return any(isinstance(p, DTensor) and _is_tensor_only(p) for p in module.parameters())


def on_tensor_ranks(x: DTensor) -> bool:
    """Return whether tensor ranks, and no others, hold the parts of a tensor.

    Also inside the forward of an FSDP2 unit, which has gathered it over data x context. The second
    name is that of transformers.
    """
    return x.device_mesh.mesh_dim_names in ((TENSOR_AXIS,), ("tp",))


def _is_tensor_only(parameter: DTensor) -> bool:
    return parameter.device_mesh.mesh_dim_names == (TENSOR_AXIS,)


def has_copies(module: nn.Module) -> bool:
    """Return whether parameters are sharded inside of groups of ranks that hold a copy each."""
    return any(is_hybrid(part) for part in module.modules() if isinstance(part, FSDPModule))


def shard_parameters(
    owner: nn.Module,
    mesh: DeviceMesh,
    *,
    sharding: Sharding = "full",
    tensor: DeviceMesh | None = None,
    shard_modules: Sequence[str] | None = None,
    compute_dtype: torch.dtype | None = None,
    offload: bool = False,
    device: torch.device,
) -> FrozenWeights:
    """Shard the parameters over the ranks, with the weights of rank 0.

    Args:
        owner: module whose children are sharded; it is not called itself (a LightningModule).
        mesh: data x context, one axis; or two axes, which FSDP2 replicates and shards over.
        sharding: ``full`` and ``hybrid`` shard every parameter over the mesh but those that FSDP2
            cannot hold, see `find_replicated`; ``none`` leaves all of them replicated, see
            `average_gradients`.
        tensor: the ranks that share the weights of each layer, one axis of the same mesh; models of
            adapters are divided by their plans, unless a user has applied one.
        shard_modules: class names or name patterns of the blocks; by default those that the model
            lists in ``_no_split_modules``, else the items of its outermost ``ModuleList``s.
        compute_dtype: dtype to which parameters are cast when they are gathered, and inputs of
            blocks; their shards, gradients and gradient sums keep their own.
        offload: keep shards and their gradients in host memory; FSDP2 copies a block to the device
            when it gathers it.
        device: device of this rank.

    Returns:
        What frozen weights were before they were sharded.
    """
    frozen = FrozenWeights(compute_dtype)
    if sharding == "none":
        _materialise(owner, owner, device)
        _broadcast_weights(owner, device)
        return frozen
    check_no_gradient_hooks(owner, "parameters='none'")
    hooks = {name: [*accumulation_hooks(p).values()] for name, p in owner.named_parameters()}
    is_divided = tensor is not None and tensor.size() > 1 and not is_parallelized(owner)
    if tensor is not None and is_divided:
        _materialise(owner, owner, device)
        _broadcast_weights(owner, device)  # each rank then keeps its part of the same weights
        parallelize_models(owner, tensor)
    replicated, roots = find_replicated(owner), list(_roots(owner))
    inside = {part for root in roots for part in root.modules() if part is not root}
    roots = [root for root in roots if root not in inside]  # also registered inside another root
    blocks = [block for root in roots for block in find_blocks(root, shard_modules)]
    if shard_modules and not blocks:
        classes = sorted({type(m).__name__ for root in roots for m in root.modules()})
        raise ValueError(
            f"Parameters(shard_modules={list(shard_modules)}) matches no module of "
            f"{type(owner).__name__}. Use class names or patterns of module names; the classes are "
            f"{', '.join(classes)}."
        )
    # Inner blocks first: FSDP2 excludes the parameters of inner units from outer ones.
    units = _join_tied(owner, list(dict.fromkeys([*reversed(blocks), *roots])), roots)
    # FSDP2 keeps a root gathered from forward to backward; blocks directly under the owner are all
    # roots, and would save no memory.
    reshard_roots = True if len(roots) > 1 and owner not in units else None
    is_pinned = device.type == "cuda"
    placement = CPUOffloadPolicy(pin_memory=is_pinned) if offload else OffloadPolicy()
    for unit in units:
        if not is_divided:  # else it was done above, with full weights
            _materialise(owner, unit, device)
            _broadcast_weights(unit, device, mesh)
        policy = _policy(unit, compute_dtype)
        packed = frozen.note(unit)
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=placement,
            reshard_after_forward=reshard_roots,
            ignored_params=replicated | _numbers(unit),
        )
        keep_packed(unit, packed)
    if not is_divided and owner not in units:
        _materialise(owner, owner, device)
    broadcast_replicated(owner, device)
    # FSDP2 calls those of the shards, once gradients are averaged.
    for name, parameter in owner.named_parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            for hook in hooks[name]:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return frozen


def find_replicated(owner: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 cannot hold: every rank has all of them.

    That is: numbers, which have no dim to shard, and what the owner holds itself or in lists of
    parameters, since nothing is called that would gather them in time.
    """
    holders = [owner, *(m for m in _outermost(owner) if isinstance(m, _PARAMETERS))]
    own = {p for m in holders for p in m.parameters(recurse=m is not owner)}
    return own | _numbers(owner)


def _numbers(module: nn.Module) -> set[nn.Parameter]:
    return {p for p in module.parameters() if p.dim() == 0}


def check_no_gradient_hooks(owner: nn.Module, other_way: str) -> None:
    """Raise for hooks on parameters, which FSDP2 drops where it replaces parameters by shards.

    Args:
        owner: the module that is about to be sharded.
        other_way: what leaves parameters as they are, for the error.
    """
    replicated = find_replicated(owner)
    for name, parameter in owner.named_parameters():
        if parameter not in replicated and gradient_hooks(parameter):
            raise ValueError(
                f"`{name}` has a hook (register_hook), which FSDP2 never calls: it replaces the "
                "parameter by its shards. Change gradients after backward, where they are "
                "averaged (on_after_backward() in Lightning, on_pre_optimizer_step() of a "
                f"TrainerCallback), or leave parameters as they are: {other_way}."
            )


def move_unsharded(owner: nn.Module, device: torch.device) -> None:
    """Move all tensors of a module to a device, except shards of parameters."""
    apply_to_tensors(owner, lambda x: x if isinstance(x, DTensor) else x.to(device))


def _join_tied(
    owner: nn.Module, units: list[nn.Module], roots: Sequence[nn.Module]
) -> list[nn.Module]:
    """Return units such that each weight that they shard belongs to one of them, by all its names.

    A block that shares a weight with another unit becomes part of the module around it. Where two
    roots share a weight, the owner becomes a unit that gathers both, whichever is called.
    """
    replicated = find_replicated(owner)
    while True:
        holders: dict[int, list[nn.Module]] = {}
        for unit in units:
            for module in own_modules(unit, others=units):
                for parameter in module.parameters(recurse=False):
                    owners = holders.setdefault(id(parameter), [])
                    if unit not in owners and parameter not in replicated:
                        owners.append(unit)
        shared = [unit for tied in holders.values() if len(tied) > 1 for unit in tied]
        if not shared:
            return units
        blocks = [unit for unit in shared if unit not in roots]
        units = [unit for unit in units if unit not in (blocks or shared)]
        if not blocks:
            units.append(owner)


def prepare_reduction(owner: nn.Module) -> None:
    """Let ranks use different parameters, as with routed experts; hide FSDP2 from modes."""
    for part in owner.modules():
        if isinstance(part, FSDPModule):
            divide_once(part)
            reduce_unused_parameters(part)
            note_used_parameters(part)
            hide_from_modes(part)


def drop_unused_gradients(units: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Remove the zero gradients of parameters that no rank has used. Collective.

    On one device they have no gradient: an optimizer leaves them alone, where momentum and weight
    decay move a parameter whose gradient is zero. A tower is not used by a batch of text.

    Args:
        units: FSDP2 units, whose parameters a backward pass has just reduced.
        mesh: data x context; several axes with hybrid sharding.
    """
    parameters = [entry for unit in units for entry in take_used(unit)]
    if not parameters:
        return
    numbers = [float(is_used) for _, is_used in parameters]
    if mesh.size() > 1:
        used = torch.tensor(numbers).to(parameters[0][0].device, non_blocking=True)
        for axis in range(mesh.ndim):
            dist.all_reduce(used, group=mesh.get_group(axis))
        if all(numbers):
            return  # the host need not wait for the other ranks
        numbers = used.tolist()
    for (parameter, _), number in zip(parameters, numbers, strict=True):
        if number == 0:
            parameter.grad = None


def _roots(owner: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are called and hold parameters."""
    replicated = find_replicated(owner)
    for module in _outermost(owner):
        if any(parameter not in replicated for parameter in module.parameters()):
            yield module


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules inside a module that are no lists or dicts of modules."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _outermost(child)
        else:
            yield child


def find_blocks(root: nn.Module, shard_modules: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, outermost first.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), num_layers=3)
        >>> [type(block).__name__ for block in find_blocks(encoder)]
        ['TransformerEncoderLayer', 'TransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    named = [
        (name, module)
        for name, module in root.named_modules()
        if name and not isinstance(module, _CONTAINERS) and any(True for _ in module.parameters())
    ]
    if shard_modules:
        return [
            module
            for name, module in named
            if any(type(module).__name__ == p or fnmatch(name, p) for p in shard_modules)
        ]
    listed = {c for m in root.modules() for c in (getattr(m, "_no_split_modules", None) or ())}
    matching = [module for _, module in named if type(module).__name__ in listed]
    # A complete tower that is listed: FSDP2 changes the class of a unit, and Hugging Face models
    # look up by it which hidden states they return.
    blocks = [
        block
        for module in matching
        for block in (_list_items(module) if hasattr(module, "_no_split_modules") else [module])
    ]
    return list(dict.fromkeys(blocks)) or list(_list_items(root))


def _list_items(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost ``ModuleList``s.

    Lists of experts belong to the module that holds them: a rank that routes no token to an expert
    does not call it, and the other ranks would wait for its all-gather.
    """
    for name, child in module.named_children():
        if "expert" in name:
            continue
        if isinstance(child, nn.ModuleList):
            for item in child:
                if not isinstance(item, _CONTAINERS) and any(True for _ in item.parameters()):
                    yield item
        else:
            yield from _list_items(child)


def _policy(unit: nn.Module, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return a policy that reduces gradients of half-precision parameters in float32."""
    if compute_dtype is not None:
        return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    half = any(p.dtype.itemsize < 4 for p in unit.parameters())
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)


def _materialise(owner: nn.Module, unit: nn.Module, device: torch.device) -> None:
    """Allocate and initialise the tensors of a unit that are on the meta device."""
    entries: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    modules = []
    for module in own_modules(unit):
        metas = [entry for entry in module_tensors(module) if entry[2].is_meta]
        for tensors, name, x in metas:
            entries.setdefault(x, []).append((tensors, name))
        if metas:
            modules.append(module)
    for x, names in entries.items():
        empty = _like(x, device)
        if isinstance(x, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=x.requires_grad)
        for tensors, name in names:  # more than one where weights are tied
            tensors[name] = empty
    for module in modules:
        _initialise(owner, module)


def fill_sharded(owner: nn.Module, device: torch.device) -> None:
    """Allocate and initialise what a user has sharded on the meta device."""
    modules = [m for m in owner.modules() if any(x.is_meta for _, _, x in module_tensors(m))]
    if not modules:
        return
    apply_to_tensors(owner, lambda x: _like(x, device) if x.is_meta else x)
    for module in modules:
        _initialise(owner, module)


def _like(x: Tensor, device: torch.device) -> Tensor:
    return torch.full_like(x, _unset(x.dtype), device=device)


def _unset(dtype: torch.dtype) -> float | int:
    """Return a value that no initialisation produces, to detect tensors that were not set."""
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _initialise(owner: nn.Module, module: nn.Module) -> None:
    """Initialise a module by its ``reset_parameters()`` and its model's ``_init_weights()``."""
    with torch.no_grad():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        for model in owner.modules():
            init = getattr(model, "_init_weights", None)
            if callable(init) and any(module is part for part in model.modules()):
                init(module)
                break
    for _, name, x in module_tensors(module):
        unset = x.isnan() if x.is_floating_point() else x == _unset(x.dtype)
        if x.dtype != torch.bool and bool(unset.any()):
            raise TypeError(
                f"{type(module).__name__} was built on the meta device, and nothing sets the "
                f"initial values of its `{name}`. Give it a `reset_parameters()`, or build the "
                "model on the CPU."
            )


def _broadcast_weights(
    unit: nn.Module, device: torch.device, mesh: DeviceMesh | None = None
) -> None:
    """Broadcast the values of rank 0: `fully_shard` shards each rank's own values.

    Args:
        unit: a module.
        device: device of this rank.
        mesh: data x context; along it, ranks have the same part of what tensor ranks share.
    """
    seen: set[int] = set()
    with torch.no_grad():
        for module in own_modules(unit):
            for tensors, name, x in module_tensors(module):
                if id(x) in seen:
                    continue
                seen.add(id(x))
                if isinstance(x, DTensor):
                    assert mesh is not None  # noqa: S101
                    _broadcast_along(x.to_local(), mesh, device)
                    continue
                staged = of_rank_0(x, device)
                if 0 in x.stride():  # expanded: several elements share memory
                    tensors[name] = staged
                else:
                    x.copy_(staged)


@torch.no_grad()
def broadcast_replicated(owner: nn.Module, device: torch.device) -> None:
    """Broadcast the values of rank 0 to the parameters of a sharded model that are not sharded."""
    for parameter in owner.parameters():
        if not isinstance(parameter, DTensor):
            parameter.copy_(of_rank_0(parameter, device))


def _broadcast_along(x: Tensor, mesh: DeviceMesh, device: torch.device) -> None:
    """Replace a tensor by that of the first rank of each axis, one after the other."""
    staged = x.detach().to(device).clone(memory_format=torch.contiguous_format)
    for axis in range(mesh.ndim):
        dist.broadcast(staged.view(-1).view(torch.uint8), group=mesh.get_group(axis), group_src=0)
    x.copy_(staged)


def check_sharding(owner: nn.Module, mesh: DeviceMesh) -> None:
    """Raise for sharded parameters whose gradients would not be averaged over data x context.

    Args:
        owner: a model that a user has sharded.
        mesh: data x context, of the tensor index of this rank.
    """
    ranks = set(mesh.mesh.flatten().tolist())
    for name, parameter in owner.named_parameters():
        if not parameter.requires_grad or not isinstance(parameter, DTensor):
            continue
        covered = set(parameter.device_mesh.mesh.flatten().tolist())
        if not ranks <= covered:
            raise ValueError(
                f"configure_model() has put `{name}` on the mesh {parameter.device_mesh}, which "
                f"does not cover all {len(ranks)} ranks of data x context: weights of other ranks "
                "would diverge. Use mesh=self.trainer.strategy.shard_mesh."
            )


def set_gradient_reduction(module: nn.Module, enabled: bool) -> None:
    """Set whether backward reduces gradients over the ranks, or accumulates them.

    They are accumulated unsharded, or, where copies of the parameters are sharded, as the shards
    of each copy.
    """
    set_averaging(module, enabled=enabled)
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        if is_hybrid(part):
            part.set_requires_all_reduce(enabled, recurse=False)
        else:
            part.set_requires_gradient_sync(enabled, recurse=False)


def drop_gradients(module: nn.Module) -> None:
    """Drop all gradients, also those that are not reduced yet: of a run that was interrupted."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            drop_unreduced_gradients(part)
    for parameter in module.parameters():
        parameter.grad = None


def reshard(module: nn.Module) -> None:
    """Reshard what a forward without backward, or one that has raised, has left gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            end_forward(part)
            part.reshard()
