# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of known models run without the torch function mode of a step.

The mode sees every torch function, in order to route attention that is called directly. The layers
of known models call attention through transformers' interface only; without the mode, the host
needs some microseconds less for each function.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_patches.support import LIBRARIES
from lightning_cp.fsdp.gathering import is_gathering_hook, unit_of_hook
from lightning_cp.fsdp.scalars import USE_CALLBACK
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.routing import unrouted
from lightning_cp.torch_private import (
    code_of_calls,
    module_hooks,
    own_parameters,
    without_pre_hooks,
)


@dataclass(eq=False)
class Layer:
    """A decoder layer whose forward is replaced, in the instance.

    Args:
        module: the layer.
        parts: its modules when they were last checked, itself included.
        code: theirs, then.
        is_known: the result.
        unhooked: the context in which its other modules are called without hooks, if they have any.
    """

    module: nn.Module
    parts: tuple[nn.Module, ...] = ()
    code: list[tuple[object, ...]] | None = None
    is_known: bool = False
    unhooked: AbstractContextManager[None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy starts with: it checks its own modules."""
        return {"module": self.module}

    def remove(self) -> None:
        """Restore the forward, unless somebody has wrapped ours; ours is then plain."""
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, partial) and self in forward.args:
            del self.module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the class, without the mode if nothing in it needs the mode."""
        module = self.module
        if torch.compiler.is_compiling() or not self.needs_no_routing():
            return type(module).forward(module, *args, **kwargs)
        with self._needed_hooks(), unrouted():
            return type(module).forward(module, *args, **kwargs)

    def _needed_hooks(self) -> AbstractContextManager[None]:
        """Return a context without hooks of its parts that gather the layer, if it is gathered."""
        if self.unhooked is None:
            return nullcontext()
        is_gathered = all(type(x) is nn.Parameter for x in own_parameters(self.parts))
        return self.unhooked if is_gathered else nullcontext()

    def needs_no_routing(self) -> bool:
        """Return whether only code of known libraries runs in the layer, as far as it shows."""
        if code_of_calls(self.parts) != self.code:
            self.parts = tuple(self.module.modules())
            self.code = code_of_calls(self.parts)
            layer, *others = self.parts
            self.is_known = _calls_known(layer) and all(map(_is_known, others))
            unhooked = without_pre_hooks(others, partial(_gathers_layer, others))
            self.unhooked = unhooked if unhooked.num_modules else None
        # Parameters that are gathered for this call only: the mode notes which of them are used.
        return self.is_known and not any(
            USE_CALLBACK in x.__dict__ for x in own_parameters(self.parts)
        )


def _gathers_layer(parts: Collection[nn.Module], hook: object) -> bool:
    """Return whether a hook of one of the modules of a layer gathers the layer, not one of them."""
    unit = unit_of_hook(hook)
    return unit is not None and unit not in parts


def _calls_known(part: nn.Module) -> bool:
    """Return whether the forward of a class comes from a known library."""
    fn = type(part).forward
    return isinstance(fn, FunctionType) and fn.__module__.partition(".")[0] in LIBRARIES


def _is_known(part: nn.Module) -> bool:
    """Return whether a call of a module runs no code of a user."""
    override = part.__dict__.get("forward")
    return (
        _calls_known(part)
        and (override is None or _is_ours(override))
        and all(is_gathering_hook(hook) for hook in module_hooks(part))
    )


def _is_ours(forward: object) -> bool:
    """Return whether a forward is one of `lightning_cp.memory` or `hf_patches.mixers`."""
    first = forward.args[:1] if isinstance(forward, partial) else ()
    return any(type(x).__module__.startswith(("lightning_cp.", "hf_patches.")) for x in first)


def replace_forwards(model: nn.Module) -> Iterator[Layer]:
    """Replace the forward of each decoder layer of a known model; yield the layers."""
    for block in find_blocks(model):
        if "forward" not in block.__dict__:
            layer = Layer(block)
            block.forward = partial(Layer.forward, layer)
            yield layer
