# SPDX-License-Identifier: Apache-2.0
"""Stacks of decoder layers of known models run without the torch function mode of a step.

The mode sees every torch function, in order to route attention that is called directly. Known
models call attention through transformers' interface only; without the mode, the host needs some
microseconds less for each function. A layer is checked by itself where code of a user runs
elsewhere in its stack, and when it is recomputed in backward.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_patches.support import LIBRARIES
from lightning_cp.fsdp.gathering import must_note_use, unit_of_hook
from lightning_cp.fsdp.scalars import USE_CALLBACK
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.routing import unrouted
from lightning_cp.torch_private import (
    CallCode,
    call_methods,
    global_module_hooks,
    is_compiled,
    module_hooks,
    without_pre_hooks,
)


@dataclass(eq=False)
class _Checked:
    """A module and the modules inside it, whose code is checked.

    Args:
        module: the module.
        code: of its modules when they were last checked.
        is_known: the result.
    """

    module: nn.Module
    code: CallCode | None = field(default=None, init=False)
    is_known: bool = field(default=False, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy starts with: it checks its own modules."""
        return {"module": self.module}

    def checked_code(self) -> CallCode:
        """Return the code of the modules, checked again if it has changed."""
        code = self.code
        if code is None or not code.is_current():
            code = self.code = CallCode(self.module.modules())
            self.is_known = self.check(code.modules) and not global_module_hooks()
        return code

    def check(self, parts: tuple[nn.Module, ...]) -> bool:
        """Return whether only code of known libraries runs in the forward, as far as it shows."""
        raise NotImplementedError


@dataclass(eq=False)
class Layer(_Checked):
    """A decoder layer whose forward is replaced, in the instance.

    Args:
        stack: the stack that it is a layer of.
        unhooked: the context in which its other modules are called without hooks, if they have any.
    """

    stack: "Stack | None" = field(default=None, init=False)
    unhooked: AbstractContextManager[None] | None = field(default=None, init=False)

    def remove(self) -> None:
        """Restore the forward, unless somebody has wrapped ours; ours is then plain."""
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, partial) and self in forward.args:
            del self.module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the class, without the mode if nothing in it needs the mode."""
        module = self.module
        is_checked = self.stack is not None and self.stack.is_unrouted
        if torch.compiler.is_compiling() or not (is_checked or self.needs_no_routing()):
            return type(module).forward(module, *args, **kwargs)
        with self._needed_hooks(), unrouted():
            return type(module).forward(module, *args, **kwargs)

    def _needed_hooks(self) -> AbstractContextManager[None]:
        """Return a context without hooks of its parts that gather the layer, if it is gathered."""
        if self.unhooked is None or self.code is None:
            return nullcontext()
        is_gathered = all(type(x) is nn.Parameter or x is None for x in self.code.parameters())
        return self.unhooked if is_gathered else nullcontext()

    def needs_no_routing(self) -> bool:
        """Return whether no function in the layer needs the mode."""
        code = self.checked_code()
        # Parameters that are gathered for this call only: the mode notes which of them are used.
        return self.is_known and not any(
            x is not None and USE_CALLBACK in x.__dict__ for x in code.parameters()
        )

    def check(self, parts: tuple[nn.Module, ...]) -> bool:
        """Check the modules inside; the layer's own hooks run outside of its forward."""
        layer, *others = parts
        unhooked = without_pre_hooks(others, partial(_gathers_layer, others))
        self.unhooked = unhooked if unhooked.num_modules else None
        return _calls_known(layer) and all(map(_is_known, others))


@dataclass(eq=False)
class Stack(_Checked):
    """A model without its head, with embeddings and layers; hooks around its forward.

    Hooks get the module that is called, which may be a shallow copy; a replaced forward does not.

    Args:
        layers: its layers.
        contexts: of its calls that have not returned; None for one that runs with the mode.
        handles: of the hooks.
    """

    layers: list[Layer]
    contexts: list[AbstractContextManager[None] | None] = field(default_factory=list, init=False)
    handles: list[RemovableHandle] = field(default_factory=list, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy starts with; its hooks are those of the copied module."""
        return {
            **super().__getstate__(),
            "layers": self.layers,
            "contexts": [],
            "handles": self.handles,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the layers know the copy; a layer that is copied alone belongs to no stack."""
        self.__dict__.update(state)
        for layer in self.layers:
            layer.stack = self

    def install(self) -> None:
        """Register the hooks."""
        module = self.module
        self.handles = [
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, prepend=True, always_call=True),
        ]
        for layer in self.layers:
            layer.stack = self

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    @property
    def is_unrouted(self) -> bool:
        """Return whether it runs without the mode at the moment."""
        return any(self.contexts)

    def enter(self, module: nn.Module, *_: object) -> None:
        """Leave the mode before a call, if nothing in it needs the mode."""
        if torch.compiler.is_compiling() or module is not self.module:
            return
        context = unrouted() if not self.is_unrouted and self.needs_no_routing() else None
        self.contexts.append(context)
        if context is not None:
            context.__enter__()

    def leave(self, module: nn.Module, *_: object) -> None:
        """Enter the mode again after a call."""
        if torch.compiler.is_compiling() or module is not self.module or not self.contexts:
            return
        context = self.contexts.pop()
        if context is not None:
            context.__exit__(None, None, None)

    def needs_no_routing(self) -> bool:
        """Return whether no function in the stack needs the mode."""
        code = self.checked_code()
        return self.is_known and not any(
            x is not None and must_note_use(x) for x in code.parameters()
        )

    def check(self, parts: tuple[nn.Module, ...]) -> bool:
        """Check all modules with their hooks."""
        for layer in self.layers:
            layer.checked_code()  # for its `unhooked`
        inside = {part for layer in self.layers for part in layer.module.modules()}
        outside = (part for part in parts if part not in inside)
        return all(map(_is_known, parts)) and all(map(_computes_tokens, outside))


def _computes_tokens(part: nn.Module) -> bool:
    """Return whether a module is one that cannot mix tokens, as far as it shows, or holds such."""
    if isinstance(part, PreTrainedModel | nn.ModuleList | nn.ModuleDict):
        return True
    return not isinstance(part, _MIXING) and not any(True for _ in part.children())


_MIXING: Final = (nn.Conv1d, nn.RNNBase, nn.BatchNorm1d, nn.MultiheadAttention)


def _gathers_layer(parts: Collection[nn.Module], hook: object) -> bool:
    """Return whether a hook of one of the modules of a layer gathers the layer, not one of them."""
    unit = unit_of_hook(hook)
    return unit is not None and unit not in parts


def _calls_known(part: nn.Module) -> bool:
    """Return whether the methods of a class that a call runs come from known libraries."""
    return all(
        isinstance(fn, FunctionType) and fn.__module__.partition(".")[0] in LIBRARIES
        for fn in call_methods(type(part))
    )


def _is_known(part: nn.Module) -> bool:
    """Return whether a call of a module runs no code of a user."""
    override = part.__dict__.get("forward")
    return (
        _calls_known(part)
        and not is_compiled(part)
        and (override is None or _is_our_forward(override, part))
        and all(map(_is_ours, module_hooks(part)))
    )


def _is_our_forward(forward: object, part: nn.Module) -> bool:
    """Return whether a forward is one of ours, and what it wraps is known."""
    if isinstance(forward, MethodType):
        return forward.__func__ is type(part).forward
    return (
        isinstance(forward, partial)
        and _is_ours(forward)
        and all(_is_our_forward(x, part) for x in forward.args if _is_function(x))
    )


def _is_function(x: object) -> bool:
    return isinstance(x, partial | MethodType | FunctionType)


def _is_ours(function: object) -> bool:
    """Return whether a function is one of this package, possibly with some of its arguments."""
    function = getattr(function, "func", function)
    return getattr(function, "__module__", "").startswith(("lightning_cp.", "hf_patches."))


def replace_forwards(model: PreTrainedModel, stack: str) -> Iterator[Layer | Stack]:
    """Replace the forward of each decoder layer of a known model, and hook the stack of them.

    Args:
        model: the model.
        stack: path of the stack; empty for none.
    """
    layers = [Layer(block) for block in find_blocks(model) if "forward" not in block.__dict__]
    for layer in layers:
        layer.module.forward = partial(Layer.forward, layer)
    yield from layers
    if stack:
        module = model.get_submodule(stack)
        inside = set(module.modules())
        whole = Stack(module, [layer for layer in layers if layer.module in inside])
        whole.install()
        yield whole
