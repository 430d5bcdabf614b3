# SPDX-License-Identifier: Apache-2.0
"""Gathering of FSDP2 parameters for modules inside a unit that are called directly.

FSDP2 gathers a unit when its forward is called. Hooks on the modules inside a unit do the same for
a module that is called outside of that forward: ``self.model.model(...)`` for hidden states,
``self.model.lm_head(hidden)``. They also preserve FSDP2's own hooks on outputs that are views.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_cp.fsdp.scalars import USE_CALLBACK
from lightning_cp.private.fsdp2 import (
    has_gradients_of_one_copy,
    has_unreduced_gradients,
    init_root,
    is_grouped,
    is_idle,
    is_in_forward,
    map_tensors,
    post_forward,
    pre_backward_hook,
    pre_forward,
    wait_for_reductions,
)
from lightning_cp.private.modes import plain_functions
from lightning_cp.private.modules import base_of

_DIRECT_CALLS: Final = "_lightning_cp_parts"
"""Attribute of a unit: its modules that were called directly and have not returned yet."""

_DirectCall = tuple[nn.Module, RemovableHandle | None]
"""A module that was called directly, and its hook `_close`; None for a call inside that call."""

_USED: Final = "_lightning_cp_used"
"""Attribute of a root: whether its parameters were used outside of its forward."""

_USED_BETWEEN_CALLS: Final = (
    "A parameter was used directly between two calls of the module that it belongs to, or of its "
    "submodules; in backward it would be resharded before its gradient is computed. Compute terms "
    "over parameters before the first call of the model or after the last one, and call modules "
    "instead of using their parameters."
)


def gather_parts(owner: nn.Module) -> None:
    """Let every module inside FSDP2 units be called directly. Does nothing when called again."""
    for root in outermost_units(owner):
        root.__dict__[_USED] = False
        if _DIRECT_CALLS not in root.__dict__:
            root.register_forward_pre_hook(_check_use, prepend=True)
            for part in own_modules(root):
                for parameter in part.parameters(recurse=False):
                    if not isinstance(parameter, DTensor):  # replicated: is never gathered
                        parameter.__dict__[USE_CALLBACK] = None
        for unit in root.modules():
            if not is_unit(unit) or _DIRECT_CALLS in unit.__dict__ or is_grouped(unit):
                continue
            unit.__dict__[_DIRECT_CALLS] = []
            if unit is not root:
                hook = partial(_init_root_first, root)
                unit.register_forward_pre_hook(hook, prepend=True)
            unit.register_forward_hook(_hook_view_bases, with_kwargs=True, prepend=True)
            for part in own_modules(unit):
                if part is not unit and any(True for _ in part.parameters()):
                    opening = partial(_open, root, unit)
                    part.register_forward_pre_hook(opening, with_kwargs=True, prepend=True)
            # `_hook_view_bases` handles what the warning is about.
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")


def check_reduced(units: Iterable[nn.Module]) -> None:
    """Raise if gradients arrived too late in a backward pass to be reduced over the ranks.

    Args:
        units: of a module for which `gather_parts` was called.
    """
    for unit in units:
        if _USED in unit.__dict__:  # a root
            unit.__dict__[_USED] = False
            if has_unreduced_gradients(unit):
                raise RuntimeError(_USED_BETWEEN_CALLS)
        if has_gradients_of_one_copy(unit):
            raise RuntimeError(
                f"{type(unit).__name__} was not used in the last batch of an accumulation "
                "window, so that its gradients of earlier batches were not reduced between "
                "the copies of the parameters. Set "
                "parameters=Parameters(reduce_every_microbatch=True)."
            )


def _note_use(root: nn.Module) -> None:
    """Record that a gathered parameter was used outside of the forward of its unit."""
    root.__dict__[_USED] = root.__dict__[_USED] or is_idle(root)


def _check_use(root: nn.Module, *_: object) -> None:
    """Raise if a unit is called again after autograd used its parameters outside of its forward.

    In backward, the last call comes first, and may reshard what those uses still need.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not is_unit(root):
        return
    if root.__dict__[_USED] and is_idle(root):  # not in backward, to recompute
        root.__dict__[_USED] = False
        raise RuntimeError(_USED_BETWEEN_CALLS)


def order_gradients(owner: nn.Module) -> None:
    """Order the gradients of sharded parameters that also appear in a term of the loss.

    Autograd accumulates that term's gradient, while FSDP2, on another CUDA stream, accumulates the
    gradient that it has reduced.
    """
    for unit in owner.modules():
        if not is_unit(unit):
            continue
        for part in own_modules(unit):
            for parameter in part.parameters(recurse=False):
                if parameter.is_cuda and parameter.requires_grad and isinstance(parameter, DTensor):
                    hook = partial(_wait, unit)
                    parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _wait(unit: nn.Module, _: Tensor) -> None:
    wait_for_reductions(unit)


def is_unit(module: nn.Module) -> bool:
    """Return whether a module is an FSDP2 unit: its parameters are gathered when it is called."""
    return isinstance(module, FSDPModule)


def is_gathering_hook(hook: object) -> bool:
    """Return whether a hook of a module is one of those that `gather_parts` has registered."""
    return getattr(hook, "func", None) in (_open, _close)


def find_units(owner: nn.Module) -> list[nn.Module]:
    """Return the FSDP2 units inside a module, itself included."""
    return [module for module in owner.modules() if is_unit(module)]


def outermost_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the FSDP2 units that are not inside another unit."""
    if is_unit(module):
        yield module
        return
    for child in module.children():
        yield from outermost_units(child)


def own_modules(unit: nn.Module, others: Sequence[nn.Module] = ()) -> Iterator[nn.Module]:
    """Yield the modules of a unit that belong to no inner unit, existing or in ``others``."""
    stack, seen = [unit], set()
    while stack:
        module = stack.pop()
        if module in seen:  # registered under two names
            continue
        seen.add(module)
        yield module
        children = reversed(list(module.children()))
        stack += [m for m in children if not is_unit(m) and m not in others]


def _init_root_first(root: nn.Module, *_: object) -> None:
    """Make the outermost unit FSDP2's root, by default the first unit that is called."""
    if not torch.compiler.is_compiling() and is_unit(root):
        init_root(root)


def _open(
    root: nn.Module, unit: nn.Module, part: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Gather a unit, unless its own forward is running and has gathered it."""
    if torch.compiler.is_compiling() or not is_unit(unit):  # a copy of a unit is not a unit
        return None
    calls: list[_DirectCall] = unit.__dict__[_DIRECT_CALLS]
    if is_in_forward(unit):
        if calls and calls[-1][0] is part:  # a module that calls itself
            calls.append((part, None))
        return None
    while calls:  # calls that have raised
        _, stale = calls.pop()
        if stale is not None:
            stale.remove()
    init_root(root)
    if unit is root:
        _check_use(root)
    # Not before: a hook costs microseconds for each call of each module.
    closing = part.register_forward_hook(partial(_close, unit), with_kwargs=True)
    calls.append((part, closing))
    return pre_forward(unit, part, args, kwargs)


def _close(unit: nn.Module, part: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Free what was gathered for this call, as the unit does after its own forward."""
    calls: list[_DirectCall] = unit.__dict__[_DIRECT_CALLS]
    if torch.compiler.is_compiling() or not calls or calls[-1][0] is not part:
        return None
    _, closing = calls.pop()
    if closing is None:
        return None
    closing.remove()
    _hook_view_bases(unit, args, kwargs, output)
    return post_forward(unit, part, args, output)


def _hook_view_bases(unit: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Let FSDP2 gather before the backward of a unit whose output is a view.

    FSDP2 registers its hook on the output, where an in-place operation on a view would drop it, and
    warns. The base of the view keeps its hooks.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if _USED in unit.__dict__:  # a root, which stays gathered until backward
        for part in own_modules(unit):
            for parameter in part.parameters(recurse=False):
                if not isinstance(parameter, DTensor):
                    parameter.__dict__.setdefault(USE_CALLBACK, partial(_note_use, unit))
    with plain_functions():
        views = _views(output)
        if not views:
            return
        skipped: set[int] = set()  # the inputs, and bases that have the hook

        def skip(x: Tensor) -> Tensor:
            skipped.update((id(x), id(base_of(x))))
            return x

        map_tensors(skip, (args, kwargs))
        for base in views:
            if id(base) not in skipped:
                skipped.add(id(base))
                base.register_hook(pre_backward_hook(unit))  # type: ignore[no-untyped-call]


def _views(output: Any) -> list[Tensor]:
    """Return the bases of those tensors of an output that are views, with gradients."""
    tensors: list[Tensor] = []
    if isinstance(output, Tensor):
        tensors.append(output)
    else:
        map_tensors(lambda x: tensors.append(x) or x, output)  # type: ignore[func-returns-value]
    bases = ((x, base_of(x)) for x in tensors if x.requires_grad)
    return [base for x, base in bases if base is not None and base.requires_grad]
