# SPDX-License-Identifier: Apache-2.0
"""Modules and tensors: what they hold, their hooks, their versions."""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
)

from lightning_cp.private.fsdp2 import _is_fsdp_hook


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
        hook_tables: Any = x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None)
    else:
        hook_tables = (vars(x).get(name) for name in _HOOK_DICTS)
    return [hooks for hooks in hook_tables if hooks is not None]


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


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks are called after an update (`Optimizer._optimizer_step_post_hooks`)."""
    return bool(optimizer._optimizer_step_post_hooks)
