# SPDX-License-Identifier: Apache-2.0
"""Gathers the parameters of an FSDP2 unit for the parts of it that are called by themselves.

FSDP2 gathers a unit when its forward is called. Hooks on the modules inside a unit do the same for
a module that is called outside of that forward: ``self.model.model(...)`` for hidden states,
``self.model.lm_head(hidden)``. They also keep FSDP2's own hooks on outputs that are views.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.fsdp.scalars import NOTED
from lightning_cp.torch_private import (
    before_backward,
    close_unit,
    has_unreduced,
    init_root,
    is_grouped,
    is_idle,
    is_open,
    map_tensors,
    open_unit,
    wait_for_reductions,
)

_PREPARED: Final = "_lightning_cp_parts"
"""Where a unit keeps which of its parts have been called by themselves, and not yet returned."""

_USED: Final = "_lightning_cp_used"
"""Where a root notes whether its parameters were used outside of its forward."""

_BETWEEN: Final = (
    "A parameter was used by itself between two calls of the module that it belongs to, or of its "
    "parts; in backward it would be given back before its gradient is there. Compute terms over "
    "parameters before the first call of the model or after the last one, and call modules instead "
    "of using their parameters."
)


def gather_parts(owner: nn.Module) -> None:
    """Let every module inside FSDP2 units be called by itself. Does nothing when called again."""
    for root in outermost_units(owner):
        root.__dict__[_USED] = False
        if _PREPARED not in root.__dict__:
            root.register_forward_pre_hook(_check_use, prepend=True)
        for unit in root.modules():
            if not is_unit(unit) or _PREPARED in unit.__dict__ or is_grouped(unit):
                continue
            unit.__dict__[_PREPARED] = []
            if unit is not root:
                hook = partial(_init_root_first, root)
                unit.register_forward_pre_hook(hook, prepend=True)
            unit.register_forward_hook(_keep_views, with_kwargs=True, prepend=True)
            for part in own_modules(unit):
                if part is not unit and any(True for _ in part.parameters()):
                    opening, closing = partial(_open, root, unit), partial(_close, unit)
                    part.register_forward_pre_hook(opening, with_kwargs=True, prepend=True)
                    part.register_forward_hook(closing, with_kwargs=True)
            # Safe by `_keep_views`.
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")


def check_reduced(owner: nn.Module) -> None:
    """Refuse gradients that came too late in a backward pass to be reduced over the ranks."""
    for root in outermost_units(owner):
        root.__dict__[_USED] = False
        if has_unreduced(root):
            raise RuntimeError(_BETWEEN)


def _note_use(root: nn.Module) -> None:
    """Note that a gathered parameter was used outside of the forward of its unit."""
    root.__dict__[_USED] = root.__dict__[_USED] or is_idle(root)


def _check_use(root: nn.Module, *_: object) -> None:
    """Refuse another call of a unit whose parameters autograd has used outside of its forward.

    In backward, the last call comes first, and may give back what those uses still need.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not is_unit(root):
        return
    if root.__dict__[_USED] and is_idle(root):  # not in backward, to recompute
        root.__dict__[_USED] = False
        raise RuntimeError(_BETWEEN)


def order_gradients(owner: nn.Module) -> None:
    """Keep gradients of sharded parameters in order, which a term of the loss over them has.

    Autograd adds them up where FSDP2, on another stream of the GPU, adds what it has reduced.
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
    """Say whether a module's parameters are gathered when it is called."""
    return isinstance(module, FSDPModule)


def outermost_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the FSDP2 units that lie in no other."""
    if is_unit(module):
        yield module
        return
    for child in module.children():
        yield from outermost_units(child)


def own_modules(unit: nn.Module, others: Sequence[nn.Module] = ()) -> Iterator[nn.Module]:
    """Yield the modules of a unit that no inner unit has taken, or will take."""
    stack, seen = [unit], set()
    while stack:
        module = stack.pop()
        if module in seen:  # it has two names
            continue
        seen.add(module)
        yield module
        children = reversed(list(module.children()))
        stack += [m for m in children if not is_unit(m) and m not in others]


def _init_root_first(root: nn.Module, *_: object) -> None:
    """Tell FSDP2 which unit is outermost: it would take the first one that is called."""
    if not torch.compiler.is_compiling() and is_unit(root):
        init_root(root)


def _open(
    root: nn.Module, unit: nn.Module, part: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Gather a unit, unless its own forward is running and has done so."""
    if torch.compiler.is_compiling() or not is_unit(unit):  # a copy of a unit is none
        return None
    calls: list[tuple[nn.Module, bool]] = unit.__dict__[_PREPARED]
    if is_open(unit):
        if calls and calls[-1][0] is part:  # a module that calls itself
            calls.append((part, False))
        return None
    init_root(root)
    if unit is root:
        _check_use(root)
    calls.append((part, True))
    return open_unit(unit, part, args, kwargs)


def _close(unit: nn.Module, part: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Free what was gathered for this call, as the unit does after its own forward."""
    calls: list[tuple[nn.Module, bool]] = unit.__dict__[_PREPARED]
    if torch.compiler.is_compiling() or not calls or calls[-1][0] is not part:
        return None
    _, opened = calls.pop()
    if not opened:
        return None
    _keep_views(unit, args, kwargs, output)
    return close_unit(unit, part, args, output)


def _keep_views(unit: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Let FSDP2 gather before the backward of a unit whose output is a view.

    FSDP2 hangs its hook on the output, where an operation in place on a view would lose it, and
    warns. The tensor behind the view keeps its hooks.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if _USED in unit.__dict__:  # a root, which stays gathered until backward
        for part in own_modules(unit):
            for parameter in part.parameters(recurse=False):
                if not isinstance(parameter, DTensor):
                    parameter.__dict__.setdefault(NOTED, partial(_note_use, unit))
    outside: set[int] = set()

    def note(x: Tensor) -> Tensor:
        outside.update((id(x), id(x._base)))
        return x

    def keep(x: Tensor) -> Tensor:
        base = x._base
        if base is not None and x.requires_grad and base.requires_grad and id(base) not in outside:
            outside.add(id(base))
            base.register_hook(before_backward(unit))  # type: ignore[no-untyped-call]
        return x

    map_tensors(note, (args, kwargs))
    map_tensors(keep, output)
