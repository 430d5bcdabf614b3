# SPDX-License-Identifier: Apache-2.0
"""Token-wise modules of a model, found by a probe (`probe.py`), with another forward.

Tiles and compiled layers are two kinds of `Replacement`. `replace_modules` walks a model from the
outside in: a module is replaced, or left alone for a reason, and the modules inside are visited.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from lightning_cp.fsdp.gathering import is_unit
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.memory.probe import (
    Verdict,
    find_input,
    format_states,
    has_matrices,
    is_pending,
    probe,
    sample_input,
    takes_one_tensor,
)
from lightning_cp.patch import Patch, patches_of, replace_method

_logger = logging.getLogger(__name__)

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class ModuleReport:
    """What became of a module.

    Args:
        name: of the module in the model.
        is_replaced: whether it is computed in tiles, or compiled; None if that is decided by a
            call, since its parameters are sharded or on the meta device.
        reason: why it is left alone; empty if it is not.
    """

    name: str
    is_replaced: bool | None
    reason: str = ""


@dataclass(eq=False)
class Replacement:
    """A module whose forward is replaced, in the instance.

    Args:
        module: the module.
        name: of the module in the model.
        finder: visits the modules inside, if the module turns out not to be token-wise.
    """

    state: ClassVar[str]
    """What the module is, in reports."""

    projection: ClassVar["type[Replacement] | None"] = None
    """What replaces single matrices that are left alone. None: modules with matrices inside of
    attention are visited as all others."""

    module: nn.Module
    name: str
    finder: "Finder"
    obstacle: str = ""
    is_settled: bool = False
    patch: Patch = field(init=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, where its arguments and its state allow it, in another way."""
        raise NotImplementedError

    @classmethod
    def reason_to_leave(cls, module: nn.Module) -> str:
        """Return why a module is left alone, without calling it."""
        return "" if takes_one_tensor(module) else "its forward takes more than one tensor"

    def check(self, x: Tensor, call: Callable[[Tensor], Any]) -> Verdict:
        """Probe the module, on a sample from `sample_input`."""
        return probe(self.module, call, x)

    def first_verdict(self) -> Verdict | None:
        """Probe the module on an input that its weights suggest; None if it cannot be called."""
        if is_pending(self.module):
            return None
        x = find_input(self.module, self.call)
        if x is None:
            return Verdict("no input of one tensor [batch, tokens, width] was found that it takes")
        return self.check(x, self.call)

    def verdict_like(self, x: Tensor, call: Callable[[Tensor], Any]) -> Verdict:
        """Probe the module on an input like this one."""
        sample = sample_input(x.dim(), x.shape[-1], dtype=x.dtype, device=x.device)
        if sample is None:
            return Verdict(f"its input has {x.dim()} dims")
        return self.check(sample, call)

    def decide(self, verdict: Verdict) -> None:
        """Note what a probe has shown; after the first, modules inside may be replaced instead."""
        is_first, self.is_settled, self.obstacle = not self.is_settled, True, verdict.obstacle
        if is_first and verdict.obstacle:
            self.finder.give_up(self, verdict)

    def install(self) -> None:
        """Replace the forward."""
        self.patch = replace_method(self.module, "forward", self._forward)

    def _forward(self, _: nn.Module, __: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that was replaced."""
        return self.patch.stock(*args, **kwargs)

    def report(self) -> ModuleReport:
        """Return what became of the module."""
        if self.obstacle:
            return ModuleReport(self.name, False, self.obstacle)
        return ModuleReport(self.name, True if self.is_settled else None)


def is_replaced(module: nn.Module, kind: type[Replacement]) -> bool:
    """Return whether the forward of a module is replaced."""
    functions = (patch.value.function for patch in patches_of(module, "forward"))
    return any(isinstance(getattr(function, "__self__", None), kind) for function in functions)


class Finder:
    """Finds the modules to replace, from the outside in, and remembers what became of each.

    Args:
        model: the model; None in a copy of a module.
        kind: of the replacements.
        options: further arguments of a replacement.
    """

    def __init__(
        self, model: nn.Module | None, kind: type[Replacement], options: dict[str, Any]
    ) -> None:
        self.model, self.kind, self.options = model, kind, options
        self.found: list[Replacement] = []
        self.projections: list[Replacement] = []
        self.left_alone: list[ModuleReport] = []
        self._seen: set[nn.Module] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle no modules: a copy of one module holds no others."""
        return Finder, (None, self.kind, self.options)

    def share_units(self, a: str, b: str) -> bool:
        """Return whether every FSDP2 unit with one of two modules inside has both, by name."""
        if self.model is None:
            return False
        try:
            parents = [set(self._parents(self.model, name)) for name in (a, b)]
        except AttributeError:  # the model has changed
            return False
        return not any(is_unit(module) for module in parents[0] ^ parents[1])

    @staticmethod
    def _parents(model: nn.Module, name: str) -> Iterator[nn.Module]:
        for part in name.split("."):
            model = model.get_submodule(part)
            yield model

    def visit_children(
        self, name: str, module: nn.Module, *, matrices: bool = True, experts: bool = True
    ) -> None:
        """Visit the modules inside one.

        Args:
            name: of the module.
            module: the module.
            matrices: whether modules with matrices may be replaced.
            experts: whether lists of modules are visited.
        """
        for child_name, child in module.named_children():
            if experts or not isinstance(child, _CONTAINERS):
                self.visit(f"{name}.{child_name}" if name else child_name, child, matrices=matrices)

    def visit(self, name: str, module: nn.Module, *, matrices: bool = True) -> None:
        """Replace a module, or leave it alone and visit the modules inside."""
        if module in self._seen or not any(True for _ in module.parameters()):
            return
        self._seen.add(module)
        if isinstance(module, _CONTAINERS):
            self.visit_children(name, module, matrices=matrices)
        elif not matrices and self.kind.projection is not None and has_matrices(module):
            self._project(name, module)
            self.visit_children(name, module, matrices=False)
        elif is_replaced(module, self.kind):
            self._leave(name, f"it is {self.kind.state} already")
            self._seen.update(module.modules())
        elif reason := self.kind.reason_to_leave(module):
            self._leave(name, reason)
            self.visit_children(name, module, matrices=False)
        else:
            replacement = self.kind(module, name, self, **self.options)
            self.found.append(replacement)
            replacement.install()
            if verdict := replacement.first_verdict():
                replacement.decide(verdict)
            self._seen.update(module.modules() if replacement in self.found else ())

    def give_up(self, replacement: Replacement, verdict: Verdict) -> None:
        """Leave a module alone, and visit the modules inside."""
        replacement.patch.remove()
        if replacement in self.found:  # not in a copy of the model
            self.found.remove(replacement)
        name, module = replacement.name, replacement.module
        self._leave(name, verdict.obstacle)
        self._project(name, module)
        self._seen -= set(module.modules()) - {module, *(other.module for other in self.found)}
        self.visit_children(name, module, matrices=not verdict.mixes, experts=not verdict.routes)

    def _project(self, name: str, module: nn.Module) -> None:
        kind, is_leaf = self.kind.projection, not any(True for _ in module.children())
        if kind is not None and is_leaf and has_matrices(module) and not is_replaced(module, kind):
            self.projections.append(kind(module, name, self))
            self.projections[-1].install()

    def _leave(self, name: str, reason: str) -> None:
        self.left_alone.append(ModuleReport(name, False, reason))


class Handle:
    """The replaced modules of a model, until `remove()`."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder

    def remove(self) -> None:
        """Restore the modules. Graphs that exist already can still be used for backward."""
        for replacements in (self.finder.found, self.finder.projections):
            for replacement in replacements:
                replacement.patch.remove()
            replacements.clear()

    def report(self) -> tuple[ModuleReport, ...]:
        """Return which modules are replaced, and which are left alone and why, by name."""
        found = [replacement.report() for replacement in self.finder.found]
        return tuple(sorted(found + self.finder.left_alone, key=lambda x: _natural(x.name)))

    def __str__(self) -> str:
        """Return the report as text, layers that are alike in one line."""
        states = {
            True: self.finder.kind.state,
            None: "decided at its first call",
            False: "left alone",
        }
        return format_states(
            (each.name, states[each.is_replaced] + (f": {each.reason}" if each.reason else ""))
            for each in self.report()
        )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def replace_modules(
    model: nn.Module,
    kind: type[Replacement],
    *,
    shard_modules: Sequence[str] | None,
    **options: Any,
) -> Handle:
    """Replace the parts of the blocks of a model, and norms anywhere.

    Args:
        model: a model, or a single block.
        kind: of the replacements.
        shard_modules: class names or name patterns of the blocks, as in `shard_parameters`.
        options: further arguments of a replacement.
    """
    finder = Finder(model, kind, options)
    names = {module: name for name, module in model.named_modules()}
    for block in find_blocks(model, shard_modules) or [model]:
        finder.visit_children(names[block], block)
    for name, module in model.named_modules():
        if name and not has_matrices(module):
            finder.visit(name, module)
    handle = Handle(finder)
    _logger.info("%s modules %s:\n%s", kind.state, options or "", handle)
    return handle
