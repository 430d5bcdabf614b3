# SPDX-License-Identifier: Apache-2.0
"""Token-wise modules compiled by torch.compile: MLPs and norms, one fused kernel for many.

`compile_layers(model)` finds them by a probe (`probe.py`). What lies between them, attention and
communication, stays as it is: no graph is broken, and hooks of FSDP2 and checkpointing run outside
of compiled code. Equal layers share what is compiled, for any number of tokens.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.fsdp.scalars import USE_CALLBACK
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.memory.probe import (
    Verdict,
    find_input,
    format_states,
    has_hooks_inside,
    has_matrices,
    has_units_inside,
    is_pending,
    probe,
    sample_input,
    takes_one_tensor,
)
from lightning_cp.memory.tiles import is_tiled
from lightning_cp.torch_private import (
    copy_function,
    exact_backend,
    in_dispatch_mode,
    is_compiled,
    without_modes,
)

_logger = logging.getLogger(__name__)

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)

_backend: Any = "inductor"


@dataclass(frozen=True)
class CompileReport:
    """What became of a module.

    Args:
        name: of the module in the model.
        is_compiled: whether it is compiled; None if that is decided when it is first called, since
            its parameters are sharded or on the meta device.
        reason: why it is left alone; empty if it is not.
    """

    name: str
    is_compiled: bool | None
    reason: str = ""


class CompiledLayers:
    """The compiled modules of a model, until `remove()`."""

    def __init__(self, finder: "_Finder") -> None:
        self._finder = finder

    def remove(self) -> None:
        """Restore the modules. Graphs that exist already can still be used for backward."""
        for module in self._finder.found:
            module.uninstall()
        self._finder.found.clear()

    def report(self) -> tuple[CompileReport, ...]:
        """Return which modules are compiled, and which are left alone and why."""
        return (*(module.report() for module in self._finder.found), *self._finder.left_alone)

    def __str__(self) -> str:
        """Return the report as text, layers that are alike in one line."""
        states = {True: "compiled", None: "decided at its first call", False: "left alone"}
        return format_states(
            (each.name, states[each.is_compiled] + (f": {each.reason}" if each.reason else ""))
            for each in self.report()
        )


def compile_layers(
    model: nn.Module, *, shard_modules: Sequence[str] | None = None
) -> CompiledLayers:
    """Compile the token-wise modules of a model: the MLPs and norms of its layers.

    A module is compiled if a probe shows that it computes each token by itself, without random
    numbers or routing. The loss and all gradients are those of the plain model, but for rounding.
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
    finder = _Finder()
    names = {module: name for name, module in model.named_modules()}
    for block in find_blocks(model, shard_modules) or [model]:
        finder.visit_children(names[block], block)
    for name, module in model.named_modules():
        if name and not has_matrices(module):
            finder.visit(name, module)
    handle = CompiledLayers(finder)
    _logger.info("compiled modules:\n%s", handle)
    return handle


class _Finder:
    """Finds the modules to compile, from the outside in, and remembers what became of each."""

    def __init__(self) -> None:
        self.found: list[_Compiled] = []
        self.left_alone: list[CompileReport] = []
        self._seen: set[nn.Module] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle no modules: a copy of one module holds no others."""
        return _Finder, ()

    def visit_children(self, name: str, module: nn.Module, *, experts: bool = True) -> None:
        """Visit the modules inside one; not those of lists, unless ``experts``."""
        for child_name, child in module.named_children():
            if experts or not isinstance(child, _CONTAINERS):
                self.visit(f"{name}.{child_name}" if name else child_name, child)

    def visit(self, name: str, module: nn.Module) -> None:
        """Compile a module, or leave it alone and visit the modules inside."""
        if module in self._seen or not any(True for _ in module.parameters()):
            return
        self._seen.add(module)
        if isinstance(module, _CONTAINERS):
            self.visit_children(name, module)
            return
        if reason := _reason_to_leave(module):
            self._leave(name, reason)
            self.visit_children(name, module)
            return
        compiled = _Compiled(module, name, self)
        self.found.append(compiled)
        compiled.install()
        if not is_pending(module):
            compiled.decide(compiled.probe_now())
        self._seen.update(module.modules() if compiled in self.found else ())

    def give_up(self, compiled: "_Compiled", verdict: Verdict) -> None:
        """Leave a module alone, and visit the modules inside."""
        compiled.uninstall()
        if compiled in self.found:  # not in a copy of the model
            self.found.remove(compiled)
        self._leave(compiled.name, verdict.obstacle)
        self._seen -= set(compiled.module.modules()) - {compiled.module}
        self._seen |= {other.module for other in self.found}
        self.visit_children(compiled.name, compiled.module, experts=not verdict.routes)

    def _leave(self, name: str, reason: str) -> None:
        self.left_alone.append(CompileReport(name, False, reason))


def _reason_to_leave(module: nn.Module) -> str:
    """Return why a module is not compiled, without calling it."""
    is_leaf = not any(True for _ in module.children())
    if is_leaf and type(module).__module__.startswith("torch.nn."):
        return "it is one operator of torch"
    if _is_ours(module):
        return "it is compiled already"
    if "forward" in module.__dict__ or not isinstance(type(module).forward, FunctionType):
        return "its forward was replaced"
    if not takes_one_tensor(module):
        return "its forward takes more than one tensor"
    return ""


def _is_ours(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward


@dataclass(eq=False)
class _Compiled:
    """A module whose forward is replaced, in the instance.

    Args:
        module: the module.
        name: of the module in the model.
        finder: visits the modules inside, if the module turns out not to be token-wise.
    """

    module: nn.Module
    name: str
    finder: _Finder
    is_settled: bool = False
    is_active: bool = True
    obstacle: str = ""

    def install(self) -> None:
        self.module.forward = partial(_forward, self)

    def uninstall(self) -> None:
        """Restore the forward, unless somebody has wrapped ours; ours is then plain."""
        if _is_ours(self.module):
            del self.module.forward
        self.is_active = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that was replaced."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def report(self) -> CompileReport:
        if self.obstacle:
            return CompileReport(self.name, False, self.obstacle)
        return CompileReport(self.name, True if self.is_settled else None)

    def probe_now(self, like: Tensor | None = None) -> Verdict:
        """Probe the module, on an input like this one, or on one that its weights suggest."""
        if like is None:
            x = find_input(self.module, self.call)
        else:
            x = sample_input(like.dim(), like.shape[-1], dtype=like.dtype, device=like.device)
        if x is None:
            return Verdict("no input of one tensor [batch, tokens, width] was found that it takes")
        return probe(self.module, self.call, x)

    def decide(self, verdict: Verdict) -> None:
        self.is_settled = True
        if verdict.obstacle:
            self.finder.give_up(self, verdict)

    def is_ready(self, x: Any) -> bool:
        """Return whether this call runs compiled code."""
        if type(x) not in (Tensor, nn.Parameter) or x.dim() < 2 or not x.is_floating_point():
            return False
        self.obstacle = self._obstacle_now()
        if self.obstacle or in_dispatch_mode():
            return False
        if not self.is_settled:
            self.decide(self.probe_now(x))
        return self.is_active

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


def _forward(compiled: _Compiled, *args: Any, **kwargs: Any) -> Any:
    """Call a module, by compiled code where its arguments and its state allow it."""
    # Inside somebody else's graph, or somebody had wrapped the forward before it was restored.
    if torch.compiler.is_compiling() or not compiled.is_active:
        return compiled.call(*args, **kwargs)
    values = [*args, *kwargs.values()]
    if len(values) != 1 or not compiled.is_ready(values[0]):
        return compiled.call(*args, **kwargs)
    (x,) = values
    module = compiled.module
    fn = _compiled(type(module).forward, _key(module, x), tuple(kwargs), _backend)
    # The modes of a step route attention, of which there is none: traced, they would take minutes.
    with without_modes():
        return fn(module, *args, **kwargs)


def _key(module: nn.Module, x: Tensor) -> object:
    """Return everything that the compiler would compile again for, but the number of tokens.

    It gives up on a code object after 8 compilations; so each has a copy of its own.
    """
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (
        (x.dim(), x.shape[-1], x.dtype, x.device, x.requires_grad, autocast),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), module.training),
        tuple(type(part) for part in module.modules()),
        tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters()),
    )


@lru_cache(maxsize=256)
def _compiled(
    fn: Callable[..., Any], key: object, names: tuple[str, ...], backend: Any
) -> Callable[..., Any]:
    return torch.compile(copy_function(fn), backend=exact_backend(backend), dynamic=True)
