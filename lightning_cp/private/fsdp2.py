# SPDX-License-Identifier: Apache-2.0
"""FSDP2: `fully_shard.state()` and what it holds."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.utils import _apply_to_tensors

P = ParamSpec("P")
T = TypeVar("T")


def _fsdp_state(unit: Any) -> Any:
    # `FSDPModule._get_fsdp_state()` takes three times as long, in a hook of each module.
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def _param_groups(unit: Any) -> list[Any]:
    """Return the parameter groups of a unit; torch before 2.13 has at most one."""
    state = _fsdp_state(unit)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def stays_unsharded(module: object) -> bool:
    """Return whether a module is an FSDP2 unit whose weights stay gathered after its forward."""
    if not isinstance(module, FSDPModule):
        return False
    return all(group.post_forward_mesh_info is None for group in _param_groups(module))


def reduce_unused_parameters(module: FSDPModule) -> None:
    """Let a rank that did not use a parameter reduce a zero gradient for it.

    FSDP2 leaves such parameters out on that rank only, and then reduces gradients that do not
    correspond (pytorch/pytorch#158719): for example with experts that no token of this rank was
    routed to. torch 2.13 has a setting; before, `FSDPParamGroup.post_backward` is patched.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in _param_groups(module):
        if not hasattr(group, "fills_unused"):
            group.post_backward, group.fills_unused = _with_zero_gradients(group), True


def _with_zero_gradients(group: Any) -> Callable[..., Any]:
    original = group.post_backward

    def post_backward(*args: Any) -> Any:
        for fsdp_param in group.fsdp_params if group.is_unsharded else ():
            full = getattr(fsdp_param, "_unsharded_param", None)
            if full is None or not full.requires_grad or full.grad is not None:
                continue
            if fsdp_param.unsharded_accumulated_grad is None:
                full.grad = torch.zeros_like(full)
        return original(*args)

    return post_backward


def keep_dtypes(unit: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Let FSDP2 gather some parameters of a unit in their own dtype, whatever the unit's policy.

    A policy is one of a unit; FSDP2 derives the dtype of each parameter from it when it gathers for
    the first time (`FSDPParam.init_dtype_attrs`, which is replaced on the instances).
    """
    kept = {id(parameter) for parameter in parameters}
    for group in _param_groups(unit) if kept else ():
        for fsdp_param in group.fsdp_params:
            if id(fsdp_param.sharded_param) in kept:
                fsdp_param.init_dtype_attrs = _without_cast(fsdp_param.init_dtype_attrs)


def _without_cast(init_dtype_attrs: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda policy: init_dtype_attrs(replace(policy, param_dtype=None))


def drop_unreduced_gradients(unit: FSDPModule) -> None:
    """Drop gradients that FSDP2 has accumulated in a unit and not reduced: no `zero_grad` does.

    Unsharded ones, and with hybrid sharding the sums of a copy.
    """
    for group in _param_groups(unit):
        group._partial_reduce_output = None
        for fsdp_param in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(fsdp_param):  # from 2.15 on `full.grad` itself
                fsdp_param.unsharded_accumulated_grad = None
            full = getattr(fsdp_param, "_unsharded_param", None)
            if full is not None:
                full.grad = None


def note_used_parameters(unit: Any) -> None:
    """Let each backward pass record which parameters of a unit it has used: see `take_used`.

    `reduce_unused_parameters` gives a zero gradient to the others, which cannot be told from a
    gradient that is zero. FSDP2 has no hook there: `FSDPParamGroup.post_backward` is wrapped.
    """
    for group in _param_groups(unit):
        if not hasattr(group, "used"):
            group.used, group.post_backward = {}, _noting_use(group)


def _noting_use(group: Any) -> Callable[..., Any]:
    original = group.post_backward

    def post_backward(*args: Any) -> Any:
        for fsdp_param in group.fsdp_params:
            sharded = fsdp_param.sharded_param
            full = getattr(fsdp_param, "_unsharded_param", None)
            pending_gradients = fsdp_param.unsharded_accumulated_grad, getattr(full, "grad", None)
            # A unit that is called twice comes here twice: only the first time shows what a former
            # backward pass has left.
            before = group.used.get(sharded, sharded.grad is not None)
            group.used[sharded] = before or any(x is not None for x in pending_gradients)
        return original(*args)

    return post_backward


def take_used(unit: Any) -> Iterator[tuple[nn.Parameter, bool]]:
    """Yield the trained parameters of a unit, and whether they need the gradient that they have.

    That is: the backward passes since the last call have used them, or there was a gradient before.
    """
    for group in _param_groups(unit):
        # Until copies of shards are reduced too, their gradients are kept elsewhere.
        is_noted = group.reduce_grads and group.all_reduce_grads and hasattr(group, "used")
        for fsdp_param in group.fsdp_params if is_noted else ():
            sharded = fsdp_param.sharded_param
            if sharded.requires_grad:
                yield sharded, group.used.pop(sharded, sharded.grad is not None)


_UNIT_METHODS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


_STATE_METHODS = ("_register_pre_backward_hook",)


def hide_from_modes(unit: Any) -> None:
    """Keep what FSDP2 itself computes for a unit out of torch function modes.

    Half of the functions that a mode sees in a step are FSDP2's own: reads of dtypes and sizes,
    copies of parameters. `FSDPParamGroup` and `FSDPState` have no setting for it: their methods are
    wrapped, on the instances.
    """
    _hide_methods(_fsdp_state(unit), _STATE_METHODS)
    for group in _param_groups(unit):
        _hide_methods(group, _UNIT_METHODS)


def _hide_methods(owner: Any, names: Sequence[str]) -> None:
    if not hasattr(owner, "hidden_from_modes"):
        owner.hidden_from_modes = True
        for name in names:
            setattr(owner, name, _without_functions(getattr(owner, name)))


def _without_functions(method: Callable[P, T]) -> Callable[P, T]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return call


def without_fsdp(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``__dict__`` of a module without what `fully_shard` added to it.

    That is its state, under the keys of torch's "composable" API (`STATE_KEY`, `REGISTRY_KEY`), and
    hooks, recognised by the module that defines them.
    """
    copied = {key: value for key, value in state.items() if key not in (STATE_KEY, REGISTRY_KEY)}
    for key, value in copied.items():
        if isinstance(value, OrderedDict) and "hooks" in key:
            hooks = ((i, hook) for i, hook in value.items() if not _is_fsdp_hook(hook))
            copied[key] = OrderedDict(hooks)
    return copied


def _is_fsdp_hook(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def is_in_forward(unit: Any) -> bool:
    """Return whether the forward of a unit is running, so that its parameters are gathered."""
    return _fsdp_state(unit)._training_state is TrainingState.FORWARD


def end_forward(unit: Any) -> None:
    """Say that the forward of a unit has ended: after an error FSDP2 takes it to be running."""
    for state in (_fsdp_state(unit), *_param_groups(unit)):
        if state._training_state is TrainingState.FORWARD:
            state._training_state = TrainingState.IDLE


def is_idle(unit: Any) -> bool:
    """Return whether a unit is neither in its forward nor in its backward."""
    return _fsdp_state(unit)._training_state is TrainingState.IDLE


def is_grouped(unit: Any) -> bool:
    """Return whether a unit is one of several modules that `fully_shard` got as a list."""
    return len(_fsdp_state(unit)._modules) > 1


def init_root(root: Any) -> None:
    """Make a unit FSDP2's root (`_lazy_init`), by default the first unit that is called."""
    _fsdp_state(root)._lazy_init()


def pre_forward(unit: Any, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gather a unit for a call (`_pre_forward`).

    ``register_fsdp_forward_method`` (pytorch/pytorch#125394) does so for the unit's own methods,
    not for modules inside the unit.
    """
    inputs: tuple[Any, Any] = _fsdp_state(unit)._pre_forward(module, args, kwargs)
    return inputs


def post_forward(unit: Any, module: Any, args: Any, output: Any) -> Any:
    """End a call that `pre_forward` began (`_post_forward`)."""
    return _fsdp_state(unit)._post_forward(module, args, output)


def pre_backward_hook(unit: Any) -> Callable[[Tensor], Tensor]:
    """Return the tensor hook with which FSDP2 gathers a unit before its backward."""
    hook: Callable[[Tensor], Tensor] = _fsdp_state(unit)._pre_backward
    return hook


def is_hybrid(unit: Any) -> bool:
    """Return whether FSDP2 replicates a unit over one axis of its mesh (`HSDPMeshInfo`)."""
    return any(isinstance(group.mesh_info, HSDPMeshInfo) for group in _param_groups(unit))


def divide_once(unit: FSDPModule) -> None:
    """Let FSDP2 divide the gradients of a unit once by the factor that was set for it.

    Over one rank it divides twice, where sums are forced or the dtype is neither float32 nor
    bfloat16 (`foreach_reduce`, torch 2.13): experts that transformers places on one rank each.
    """
    for group in _param_groups(unit):
        factor = group.gradient_divide_factor
        if factor not in (None, 1.0) and group.mesh_info.shard_mesh_size == 1:
            unit.set_gradient_divide_factor(1.0)
            unit.set_all_reduce_hook(partial(_divide, factor))


def _divide(factor: float, gradients: Tensor) -> None:
    gradients.div_(factor)


def has_gradients_of_one_copy(unit: Any) -> bool:
    """Return whether gradients wait to be reduced between copies (`_partial_reduce_output`).

    FSDP2 adds them in the next backward in which this unit takes part, which may be too late.
    """
    return any(
        group.all_reduce_grads and group._partial_reduce_output is not None
        for group in _param_groups(unit)
    )


def has_unreduced_gradients(unit: Any) -> bool:
    """Return whether gradients of a unit arrived after FSDP2 had reduced it."""
    return any(
        getattr(getattr(fsdp_param, "_unsharded_param", None), "grad", None) is not None
        for group in _param_groups(unit)
        if group.reduce_grads
        for fsdp_param in group.fsdp_params
    )


def wait_for_reductions(unit: Any) -> None:
    """Make the current CUDA stream wait for the streams on which FSDP2 reduces gradients."""
    streams = _fsdp_state(unit)._comm_ctx
    for name in ("reduce_scatter_stream", "all_reduce_stream"):
        if (stream := getattr(streams, name, None)) is not None:
            torch.cuda.current_stream().wait_stream(stream)


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to all tensors that FSDP2 finds in a module's inputs or outputs."""
    return _apply_to_tensors(fn, value)
