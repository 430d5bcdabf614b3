# SPDX-License-Identifier: Apache-2.0
"""Private names of torch, patches of torch, and differences between its versions.

Checked with torch 2.11, 2.13 and 2.15. Each function names the private attribute behind it and why
no public one serves. No other module uses private torch names (docs/private-names.md lists
the exceptions), except the attention kernels `torch.ops.aten._scaled_dot_product_*`: their public
wrapper returns no log-sum-exp, which partial attention outputs are combined by.
"""

import atexit
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial, wraps
from inspect import signature
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch._ops import HigherOrderOperator
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._triton import has_triton

from lightning_cp.patch import Patch

P = ParamSpec("P")
T = TypeVar("T")


# Process groups and collectives


@lru_cache(maxsize=1)
def delay_exit_for_gloo() -> None:
    """Give gloo's threads time to release their tensors before interpreter exit.

    They need the interpreter to do so; once it is gone, they abort a process that has finished
    ("terminate called without an active exception", pytorch/pytorch#190489). Destroying the groups
    ends no thread while a mesh refers to them, and may block where other ranks have failed.
    """
    atexit.register(time.sleep, 0.1)


def all_gather_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start an all-gather into one tensor.

    2.13 renamed ``all_gather_into_tensor`` and made the old name warn; 2.11 has only the old one.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def reduce_scatter_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start a summing reduce-scatter from one tensor; renamed like the all-gather."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def num_process_groups() -> int:
    """Return the number of process groups that this process has created (`c10d._world`).

    A group that only its members create is named by that number: it must be equal on all of them.
    """
    return len(distributed_c10d._world.pg_names)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a group has not been destroyed (`c10d._world`)."""
    return group in distributed_c10d._world.pg_map


def is_made_of_tensors(x: object) -> bool:
    """Return whether a tensor consists of others, as a DTensor (`torch.utils._python_dispatch`)."""
    return bool(is_traceable_wrapper_subclass(x))


def taken_apart(x: Any, place: Callable[[Tensor], Callable[[], Tensor]]) -> Callable[[], Any]:
    """Return a function that builds a tensor such as a DTensor from others (`__tensor_flatten__`).

    `DTensor.from_local` would move them to the mesh's devices.

    Args:
        x: a tensor; nothing of it is read later.
        place: takes a plain tensor inside, and returns a function that gives the other one.
    """
    if not is_made_of_tensors(x):
        # From 2.12 on, a mesh is a part of a DTensor, too.
        return place(x) if isinstance(x, Tensor) else lambda: x
    kind: Any = type(x)
    names, context = x.__tensor_flatten__()
    parts = {name: taken_apart(getattr(x, name), place) for name in names}
    size, stride = x.size(), x.stride()

    def build() -> Any:
        inner = {name: part() for name, part in parts.items()}
        return kind.__tensor_unflatten__(inner, context, size, stride)

    return build


def default_store() -> Any:
    """Return the default group's key-value store (`c10d._get_default_store`).

    Ranks exchange messages through it where a collective could hang.
    """
    return distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group (`c10d._set_pg_timeout`): a mesh creates them with the default."""
    distributed_c10d._set_pg_timeout(timeout, group)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return several mesh axes as one, registered in the root mesh (`DeviceMesh._flatten`)."""
    return mesh._flatten(name)


# FSDP2: `fully_shard.state()` and what it holds


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
            found = fsdp_param.unsharded_accumulated_grad, getattr(full, "grad", None)
            # A unit that is called twice comes here twice: only the first time shows what a former
            # backward pass has left.
            before = group.used.get(sharded, sharded.grad is not None)
            group.used[sharded] = before or any(x is not None for x in found)
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


# Tensors and modules


def local_slices(x: DTensor) -> tuple[slice, ...]:
    """Return which part of the full tensor this rank holds (`DTensor.__create_chunk_list__`).

    For placements `Shard` and `Replicate`, whose shard is one block.
    """
    (chunk,) = x.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def module_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield parameters and buffers of a module itself, each with the dict that holds it.

    `nn.Module._parameters` and `_buffers`: assigning to the dict keeps hooks and DTensors, and
    replaces a tensor that is registered under several names.
    """
    for tensors in (module._parameters, module._buffers):
        for name, x in tensors.items():
            if x is not None:
                yield tensors, name, x


def apply_to_tensors(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers (`nn.Module._apply`, where FSDP2 tracks new memory)."""
    module._apply(fn)  # type: ignore[no-untyped-call]


def run_pre_hooks(
    module: nn.Module, arguments: dict[str, Any], numbers: Container[int]
) -> dict[str, Any]:
    """Return the arguments of a call, by name, after forward pre-hooks (`_forward_pre_hooks`).

    Args:
        module: the module; hooks of its submodules do not run.
        arguments: of the call.
        numbers: the ids of the handles of the hooks to run.
    """
    for number, hook in tuple(module._forward_pre_hooks.items()):
        if number in numbers:
            takes_names = number in module._forward_pre_hooks_with_kwargs
            call: Callable[..., Any] = hook
            changed = call(module, (), *([arguments] if takes_names else []))
            arguments = arguments if changed is None else changed[1]
    return arguments


def own_parts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the dicts of what a module itself holds.

    Its buffers, parameters and modules (`nn.Module._buffers`, `_parameters`, `_modules`).
    """
    return module._buffers, module._parameters, module._modules


_HOOK_DICTS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"),
    "_forward_hooks_always_called",
)


def hook_dicts(x: nn.Module | Tensor) -> list[dict[int, Any]]:
    """Return the dicts that hold the hooks of a module, or of a tensor, and their settings.

    `nn.Module._forward_hooks`...; of tensors `_backward_hooks`, `_post_accumulate_grad_hooks`.
    """
    if isinstance(x, Tensor):
        found: Any = x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None)
    else:
        found = (vars(x).get(name) for name in _HOOK_DICTS)
    return [hooks for hooks in found if hooks is not None]


def module_hooks(module: nn.Module) -> list[object]:
    """Return the hooks of a module itself, without those of FSDP2 (`nn.Module._forward_hooks`...).

    torch has no public way to list them.
    """
    dicts = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for hooks in dicts for hook in hooks.values() if not _is_fsdp_hook(hook)]


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks on the gradient of a parameter (`Tensor._backward_hooks`)."""
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    return [*hooks.values()]


def accumulation_hooks(parameter: Tensor) -> dict[int, Any]:
    """Return the hooks after accumulation of a parameter; to be changed in place.

    `Tensor._post_accumulate_grad_hooks`; torch has no public way to list them.
    """
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def global_module_hooks() -> list[object]:
    """Return the hooks of all modules (`nn.modules.module.register_module_forward_hook`)."""
    return [
        *nn.modules.module._global_forward_pre_hooks.values(),
        *nn.modules.module._global_forward_hooks.values(),
        *nn.modules.module._global_backward_pre_hooks.values(),
        *nn.modules.module._global_backward_hooks.values(),
    ]


def base_of(x: Tensor) -> Tensor | None:
    """Return the tensor that ``x`` is a view of (`Tensor._base`); None if it is not a view."""
    return x._base


@contextmanager
def without_tensor_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Remove the hooks of `Tensor.register_hook` from leaves inside, and put them back on exit.

    torch has no way to list them; a handle refers to their dict (`RemovableHandle.hooks_dict_ref`).
    """
    removed = []
    for leaf in leaves:
        if leaf.requires_grad:
            handle = leaf.register_hook(_identity)  # type: ignore[no-untyped-call]
            hooks = handle.hooks_dict_ref()
            handle.remove()
            removed.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, original in removed:
            hooks.update(original)


def _identity(x: Tensor) -> Tensor:
    return x


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the hooks that pack and unpack what autograd saves now, or None.

    `torch._C._autograd._top_saved_tensors_default_hooks`; no public function returns them. Hooks of
    `torch.autograd.graph.saved_tensors_hooks` hide those around them: hooks that do not handle a
    tensor themselves call these. Activation checkpointing has other ones in each region.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def tensor_version(x: Tensor) -> int | None:
    """Return a counter of in-place changes (`Tensor._version`); None for inference tensors."""
    return None if x.is_inference() else x._version


def swap_contents(a: Tensor, b: Tensor) -> None:
    """Exchange data, shape and autograd history of two tensor objects (`_C._swap_tensor_impl`).

    What autograd has saved is not affected. ``torch.utils.swap_tensors`` does the same, but raises
    for tensors that autograd has saved, and makes the backward of leaves fail
    (pytorch/pytorch#127313).
    """
    try:
        torch._C._swap_tensor_impl(a, b)
    except RuntimeError:  # raised for weak references, which autocast's cache has of its inputs
        torch.clear_autocast_cache()
        torch._C._swap_tensor_impl(a, b)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread, recompute included."""
    return backward_id() != -1


def saves_through_hooks() -> bool:
    """Return whether tensors that autograd saves are replaced, as activation checkpointing does.

    `_C._autograd._top_saved_tensors_default_hooks`; offloading and `save_on_cpu` do so too.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def backward_id() -> int:
    """Return a number of the backward pass that runs on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def after_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends (`Variable._execution_engine`).

    On the caller's CUDA streams, after all gradients are accumulated; FSDP2 and DDP end theirs so.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks are called after an update (`Optimizer._optimizer_step_post_hooks`)."""
    return bool(optimizer._optimizer_step_post_hooks)


# torch's own context parallelism, a prototype (`torch.distributed.tensor.experimental`)

_PROTOTYPE = "torch.distributed.tensor.experimental._context_parallel._attention"


def prototype_balances() -> bool:
    """Return whether the prototype would balance causal attention between ranks.

    Its private option (`_cp_options`), on unless a script has switched it off.
    """
    options = getattr(sys.modules.get(_PROTOTYPE), "_cp_options", None)
    return bool(getattr(options, "enable_load_balance", True))


# torch.compile


def outside_graphs(fn: Callable[P, T]) -> Callable[P, T]:
    """Keep a function out of compiled graphs: torch.compile breaks the graph around it.

    Like ``torch.compiler.disable``, which imports the compiler (a second) and costs each call some
    microseconds; this applies it only while the compiler traces, or runs code that it may compile
    (`_C._dynamo.eval_frame.get_eval_frame_callback`).
    """
    disabled: Callable[P, T] | None = None

    def disable() -> None:
        nonlocal disabled
        disabled = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_dynamo_compiling() and _compiler_callback() is None:
            return fn(*args, **kwargs)
        if disabled is None:
            disable()
        return disabled(*args, **kwargs)  # type: ignore[misc]

    _not_disabled.append(disable)
    return call


_not_disabled: list[Callable[[], None]] = []


def prepare_breaks() -> None:
    """Prepare the functions that are kept out of graphs, once the compiler is imported.

    Disabled while the compiler traces, the first call would break its graph elsewhere than later
    ones; activation checkpointing compares what the two have saved.
    """
    while _not_disabled and "torch._dynamo" in sys.modules:
        _not_disabled.pop()()


_compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def within(fn: Callable[P, T]) -> Callable[P, T]:
    """Return the function that `outside_graphs` was given."""
    inner: Callable[P, T] = fn.__wrapped__  # type: ignore[attr-defined]
    return inner


@outside_graphs
def node_number(x: Tensor) -> int | None:
    """Return the number of the operation whose result a tensor is; None if it has no gradient.

    Autograd counts operations up, on each thread (`Node._sequence_nr`; no public one).
    """
    return None if x.grad_fn is None else int(x.grad_fn._sequence_nr())


def depends_on(x: Tensor, numbers: Container[int], first: int) -> bool:
    """Return whether a tensor is computed from the result of one of some operations.

    Args:
        x: the tensor.
        numbers: of the operations, by `node_number`.
        first: the lowest of them: what is older cannot depend on them.
    """
    seen, nodes = set[Any](), [x.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        if node._sequence_nr() in numbers:
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def constant_in_graphs(fn: Callable[P, T]) -> Callable[P, T]:
    """Let torch.compile call a function while it traces, and use the result as a constant.

    ``torch.compiler.assume_constant_result`` without importing the compiler: it sets the same
    attribute.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def uncompiled(module: Any) -> Any:
    """Return the module inside one that torch.compile returned (`OptimizedModule._orig_mod`)."""
    return getattr(module, "_orig_mod", module)


def any_autocast() -> bool:
    """Return whether autocast is on for any kind of device (`_C._is_any_autocast_enabled`).

    `torch.is_autocast_enabled` asks for one kind, and takes some microseconds to read its name.
    """
    return torch._C._is_any_autocast_enabled()


def never_compile_alone(fn: Callable[P, T]) -> bool:
    """Keep torch.compile from compiling a function on its own; inside other graphs it is inlined.

    For the handler of a torch function mode: it is called with short-lived functions (getters of
    attributes), which compiled code identifies by their address, and so confuses with each other.

    Returns:
        Whether it was done (`eval_frame.skip_code`): not before the compiler is imported.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)
    return True


# Torch function modes, and operators that they see


def is_higher_order(func: object) -> bool:
    """Return whether a torch function is an operator that calls Python functions (`torch._ops`)."""
    return isinstance(func, HigherOrderOperator)


def plain_functions() -> AbstractContextManager[None]:
    """Switch torch function modes off, also those entered inside (`_C.DisableTorchFunction`)."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled


def num_function_modes() -> int:
    """Return how many torch function modes are active (`_C._len_torch_function_stack`)."""
    return int(torch._C._len_torch_function_stack())


@contextmanager
def without_modes() -> Iterator[None]:
    """Remove the active torch function modes (`overrides._pop_mode`); those entered inside work.

    Also inside `plain_functions` (`_C._EnableTorchFunction`): FlexAttention traces with a mode.
    """
    modes = [overrides._pop_mode() for _ in range(num_function_modes())]  # type: ignore[no-untyped-call]
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)  # type: ignore[no-untyped-call]


class RecordedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the operators that run inside (`torch.utils._python_dispatch`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operator, and call it."""
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Switch the active dispatch modes off inside (`_disable_current_modes`).

    Selective activation checkpointing is one: it counts the operators of a forward, and expects the
    same ones when it recomputes.
    """
    off: AbstractContextManager[Any] = _disable_current_modes()
    return off


# Patches of Python functions


def copy_function(fn: Any, variables: dict[str, Any] | None = None) -> FunctionType:
    """Return a copy of a Python function that later changes of ``fn.__code__`` do not affect.

    Its code object is a copy too: torch.compile counts compilations by code object, and gives up
    after 8.

    Args:
        fn: the function.
        variables: the globals of the copy; by default those of ``fn``.
    """
    variables = fn.__globals__ if variables is None else variables
    code = fn.__code__.replace()
    copied = FunctionType(code, variables, fn.__name__, fn.__defaults__, fn.__closure__)
    copied.__kwdefaults__ = fn.__kwdefaults__
    return copied


class Detour:
    """A context that redirects every call of a Python function, however it was imported.

    It replaces the function's code, so that callers that hold the function, and compiled callers,
    which trace its code, reach ``replacement``. That runs with the globals of ``fn``, so it must
    import what it needs. torch.compile binds arguments by name, so both must have the same
    parameters; if they differ (another torch version), nothing is redirected.

    The code is replaced for the whole process: do not enter it on two threads at once.

    Args:
        fn: the function whose calls are redirected.
        replacement: the function that is called instead.
    """

    def __init__(self, fn: Any, replacement: Any) -> None:
        self._fn, self._depth = fn, 0
        self._original, self._replacement = fn.__code__, replacement.__code__
        self.fits = _parameters(fn) == _parameters(replacement)

    def __enter__(self) -> None:
        self._depth += 1
        if self.fits:
            self._fn.__code__ = self._replacement

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._fn.__code__ = self._original


def _parameters(fn: Any) -> list[tuple[str, object]]:
    return [(name, parameter.kind) for name, parameter in signature(fn).parameters.items()]


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
ContextFn = Callable[[], Contexts]
"""Returns the contexts that activation checkpointing enters in forward, and when it recomputes."""


@contextmanager
def checkpoint_contexts(
    context_fn: ContextFn,
    saving_inputs: Callable[[AbstractContextManager[Any]], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Make every ``checkpoint(use_reentrant=False)`` call inside use a context_fn.

    ``saving_inputs`` takes the context of a forward, and returns the one in which the inputs of
    that forward are saved: hooks that are active there see these, and nothing else.

    torch has no setting for callers that pass none (models, wrappers), so the function that all of
    them reach is replaced: `_checkpoint_without_reentrant_generator`, with the same arguments since
    torch 2.1. torch 2.15 moved it to `..._impl`, which takes the arguments of the checkpointed
    function as a tuple and a dict.
    """
    name = "_checkpoint_without_reentrant_generator"
    moved = hasattr(checkpoint, f"{name}_impl")
    name = f"{name}_impl" if moved else name
    original = getattr(checkpoint, name)

    def combined(ours: Contexts, theirs: ContextFn) -> ContextFn:
        def contexts() -> Contexts:
            if theirs in (checkpoint.noop_context_fn, context_fn):
                return ours
            inner = theirs()
            return Nested(ours[0], inner[0]), Nested(ours[1], inner[1])

        return contexts

    def generator(
        fn: Any, preserve_rng_state: bool, theirs: ContextFn, *args: Any, **kwargs: Any
    ) -> Any:
        ours = context_fn()
        with saving_inputs(ours[0]):
            yield from original(fn, preserve_rng_state, combined(ours, theirs), *args, **kwargs)

    def moved_generator(fn: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        theirs = options.pop("context_fn", checkpoint.noop_context_fn)
        ours = context_fn()
        with saving_inputs(ours[0]):
            yield from original(fn, args, kwargs, context_fn=combined(ours, theirs), **options)

    with Patch(checkpoint, name, moved_generator if moved else generator):
        yield


class Nested:
    """Two contexts as one, which may be entered again."""

    def __init__(
        self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
    ) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


# Kernels that torch compiles


def can_compile(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch compiles kernels for a GPU and a dtype (`torch.utils._triton`)."""
    if not has_triton():
        return False
    if dtype == torch.bfloat16:
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def exact_backend(backend: Any) -> Callable[..., Any]:
    """Return a compiler backend with correct gradients that supports ``retain_graph=True``.

    By default compiled code overwrites what forward saved ("donated buffers",
    pytorch/pytorch#129496), and its backward raises when it is run twice. A user who calls
    attention did not ask for a compiler. torch's ``torch._functorch.config.donated_buffer`` must be
    off whenever backward runs, on whichever thread: instead, the compiler finds no buffer that it
    may overwrite. A tag keeps such code apart in the compiler's caches.

    Padding is off: where the samples of a batch are not a multiple of 128 bytes apart, torch 2.11
    writes sums without padding and reads them with it, and gradients of sinks, queries and keys
    are wrong or NaN.
    """
    from torch._dynamo import lookup_backend  # takes seconds to import

    compile_graph: Callable[..., Any] = backend
    if isinstance(backend, str):
        compile_graph = lookup_backend(backend)
    if backend == "inductor":
        compile_graph = partial(compile_graph, config_patches={"comprehensive_padding": False})

    def compile_exactly(*args: Any, **kwargs: Any) -> Any:
        tagged = torch.compiler.config.patch(cache_key_tag="lightning_cp")  # type: ignore[attr-defined]
        with tagged, _no_donated_buffers():
            return compile_graph(*args, **kwargs)

    return compile_exactly


@contextmanager
def _no_donated_buffers() -> Iterator[None]:
    from torch._functorch._aot_autograd import graph_compile

    name = "collect_bw_donated_buffer_idxs"
    # Another torch version: a second backward raises torch's own error.
    if not hasattr(graph_compile, name):
        yield
        return
    with Patch(graph_compile, name, lambda *_, **__: []):
        yield
