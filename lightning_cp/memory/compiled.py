# SPDX-License-Identifier: Apache-2.0
"""Token-wise parts compiled by torch.compile: MLPs, norms, rotary embeddings; fewer kernels.

`compile_layers(model)` finds modules by a probe (`probe.py`), and the functions that apply rotary
embeddings by their names. What lies between them, attention and communication, stays as it is: no
graph is broken, and hooks of FSDP2 and checkpointing run outside of compiled code. Equal layers
share what is compiled, for any number of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.fsdp.scalars import USE_CALLBACK
from lightning_cp.memory.probe import has_hooks_inside, has_units_inside
from lightning_cp.memory.replace import Handle, Replacement, replace_modules
from lightning_cp.memory.tiles import is_tiled
from lightning_cp.torch_private import (
    copy_function,
    exact_backend,
    in_dispatch_mode,
    is_compiled,
    without_modes,
)

BACKEND: Any = "inductor"
"""What torch.compile makes of a layer."""


def compile_layers(model: nn.Module, *, shard_modules: Sequence[str] | None = None) -> Handle:
    """Compile the token-wise parts of a model: the MLPs, norms and rotary embeddings of its layers.

    A module is compiled if a probe shows that it computes each token by itself, without random
    numbers or routing; of other modules, such as attention, the functions that apply rotary
    embeddings. The loss and all gradients are those of the plain model, but for rounding.
    Code is compiled once for all equal layers and all lengths; the first call of each takes
    seconds, or a minute.

    Call it before or after `fully_shard`, PEFT and `enable`, and before `tile_modules`: modules are
    then compiled inside their tiles.

    Args:
        model: a model, a LightningModule that holds some, or a single block.
        shard_modules: class names or name patterns of the blocks, as in `shard_parameters`.

    Returns:
        A handle: ``report()`` lists what is compiled and what is not; ``remove()`` restores the
        model.

    Example:
        >>> class Norm(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(4))
        ...
        ...     def forward(self, x):
        ...         return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        >>> layer = nn.Sequential(Norm(), nn.Linear(4, 4))
        >>> handle = compile_layers(nn.ModuleDict({"layers": nn.ModuleList([layer])}))
        >>> print(handle)
        layers.*.0 (1): compiled
        layers.*.1 (1): left alone: it is one operator of torch
        >>> handle.remove()
    """
    for name, module in model.named_modules():
        if is_tiled(module):
            raise ValueError(
                f"compile_layers() after tile_modules(): `{name}` is tiled already. Call "
                "compile_layers first, then tile_modules: the modules are compiled inside their "
                "tiles."
            )
        if is_compiled(module):
            raise ValueError(
                f"compile_layers(): `{name or type(module).__name__}` is compiled already, by "
                "torch.compile or Module.compile(). Use one of the two: compile_layers on the "
                "model as it was, or none."
            )
    handle = replace_modules(model, _Compiled, shard_modules=shard_modules)
    for name, module in model.named_modules():
        if functions := _rotary_functions(module):
            label = f"{name}.{functions[0]}"
            handle.add(_CompiledRotary(module, label, handle.finder, functions=functions))
    return handle


class _Compiled(Replacement):
    """A module that is computed by compiled code."""

    state = "compiled"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call a module, by compiled code where its arguments and its state allow it."""
        if torch.compiler.is_compiling():  # somebody else's graph
            return self.call(*args, **kwargs)
        values = [*args, *kwargs.values()]
        if len(values) != 1 or not self.is_ready(values[0]):
            return self.call(*args, **kwargs)
        (x,) = values
        module = self.module
        fn = _compiled(type(module).forward, _key(module, x), tuple(kwargs), BACKEND)
        # The modes of a step route attention, of which there is none: tracing them takes minutes.
        with without_modes():
            return fn(module, *args, **kwargs)

    @classmethod
    def reason_to_leave(cls, module: nn.Module) -> str:
        """Return why a module is not compiled, without calling it."""
        is_leaf = not any(True for _ in module.children())
        if is_leaf and type(module).__module__.startswith("torch.nn."):
            return "it is one operator of torch"
        if "forward" in module.__dict__ or not isinstance(type(module).forward, FunctionType):
            return "its forward was replaced"
        return super().reason_to_leave(module)

    def is_ready(self, x: Any) -> bool:
        """Return whether this call runs compiled code."""
        if type(x) not in (Tensor, nn.Parameter) or x.dim() < 2 or not x.is_floating_point():
            return False
        self.obstacle = self._obstacle_now()
        if self.obstacle or in_dispatch_mode():
            return False
        if not self.is_settled:
            self.decide(self.verdict_like(x, self.call))
        return self.patch.is_active

    def _obstacle_now(self) -> str:
        parameters = list(self.module.parameters())
        if any(isinstance(p, DTensor) for p in parameters):
            return "its parameters are sharded while it is called"
        if any(USE_CALLBACK in p.__dict__ for p in parameters):
            return "it is called outside of the module that it is sharded with"
        if has_units_inside(self.module):
            return "an FSDP2 unit is inside it"
        if has_hooks_inside(self.module):
            return "hooks are registered on modules inside it"
        return ""


def _rotary_functions(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the functions that a forward applies rotary embeddings with.

    Models of transformers call functions with "rotary" in their names, from the file of the model.
    """
    fn = type(module).forward
    if "forward" in module.__dict__ or not isinstance(fn, FunctionType):
        return ()
    names = (name for name in fn.__code__.co_names if "rotary" in name)
    return tuple(name for name in names if isinstance(fn.__globals__.get(name), FunctionType))


@dataclass(eq=False)
class _CompiledRotary(Replacement):
    """An attention module that applies rotary embeddings by compiled code.

    Args:
        functions: names of the functions that its forward applies them with.
    """

    state = "compiled"
    functions: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the class, in which these functions are compiled."""
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        fn = _with_compiled(type(self.module).forward, self.functions)
        return fn(self.module, *args, **kwargs)


@lru_cache(maxsize=256)
def _with_compiled(fn: FunctionType, names: tuple[str, ...]) -> FunctionType:
    """Return a function with other globals, of which these functions are compiled."""
    replaced = {name: partial(_call_compiled, fn.__globals__[name]) for name in names}
    return copy_function(fn, _Globals(fn.__globals__, replaced))


def _call_compiled(fn: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Call a function of tensors by compiled code."""
    values = [*args, *kwargs.values()]
    tensors = [x for x in values if isinstance(x, Tensor)]
    is_plain = all(type(x) is Tensor or type(x) in (int, bool, NoneType) for x in values)
    if not is_plain or not tensors or in_dispatch_mode():
        return fn(*args, **kwargs)
    key = (tuple(_describe(x) for x in values), _modes(tensors[0]))
    # As for modules: no mode of a step has to see what is computed here.
    with without_modes():
        return _compiled(fn, key, tuple(kwargs), BACKEND)(*args, **kwargs)


def _describe(x: Any) -> object:
    """Return everything of an argument that the compiler would compile again for, but lengths."""
    if not isinstance(x, Tensor):
        return x
    order = sorted(range(x.dim()), key=x.stride)
    is_one = tuple(size == 1 for size in x.shape)
    return x.shape[-1], x.dtype, x.device, x.requires_grad, tuple(order), is_one


class _Globals(dict[str, Any]):
    """The globals of a function, of which some are replaced."""

    def __init__(self, original: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(replaced)
        self._original = original

    def __missing__(self, name: str) -> Any:
        return self._original[name]


def _key(module: nn.Module, x: Tensor) -> object:
    """Return everything that the compiler would compile again for, but the number of tokens.

    It gives up on a code object after 8 compilations; so each has a copy of its own.
    """
    return (
        (x.dim(), x.shape[-1], x.dtype, x.device, x.requires_grad, _modes(x)),
        module.training,
        tuple(type(part) for part in module.modules()),
        tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters()),
    )


def _modes(x: Tensor) -> object:
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@lru_cache(maxsize=256)
def _compiled(
    fn: Callable[..., Any], key: object, names: tuple[str, ...], backend: Any
) -> Callable[..., Any]:
    return torch.compile(copy_function(fn), backend=exact_backend(backend), dynamic=True)
