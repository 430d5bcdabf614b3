# SPDX-License-Identifier: Apache-2.0
"""Restores what a run that must leave no trace changes.

One walk follows everything that the code of a user reaches: attributes, containers, closures,
globals, defaults, classes. What it finds is restored in place. Knows torch and Python; nothing
about steps, Lightning or transformers.
"""

import builtins
import io
import logging
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_cp.torch_private import (
    accumulation_hooks,
    global_module_hooks,
    gradient_hooks,
    module_hooks,
    own_buffers,
    tensor_version,
)

_logger = logging.getLogger(__name__)

_MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module())) | {"log"}
_PLAIN: Final = (int, float, str, tuple, list, dict, set, deque, type(None), Tensor, np.ndarray)
_ATOMS: Final = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_COUNTS: Final = (int, float, list, deque)
"""What hooks add to modules of libraries, and count in."""

# Larger containers and arrays are data, not something that a step appends to: their items are not
# looked at, or they are not copied. Of tensors so many numbers are copied in all.
_MAX_ITEMS, _MAX_LEN, _MAX_OBJECTS = 1_000, 100_000, 200_000
_MAX_NUMEL, _MAX_COPIED = 1 << 24, 1 << 26

# Their functions and objects keep what they set up once, and caches; so do those of other packages
# that are installed. The modules of users may be installed, too.
_LIBRARIES: Final = frozenset(
    ("accelerate", "builtins", "hf_patches", "lightning", "lightning_cp", "peft", "torch")
) | {"pytorch_lightning", "torchmetrics", "transformers", "trl"}
_INSTALLED: Final = ("site-packages", "dist-packages")

_HOLDERS: Final = (types.SimpleNamespace,)
"""Classes of libraries whose objects hold what users put into them."""


class UpdatesWeightsError(Exception):
    """A step updates weights by itself, and cannot run for a comparison."""


class NotRestoredError(RuntimeError):
    """What a run has changed could not be restored."""


@contextmanager
def restored_state(
    model: nn.Module, *objects: Any, functions: Iterable[Any] = (), leave: Iterable[str] = ()
) -> Iterator["Reached"]:
    """Restore on exit what a run of a model may change, but not parameters and their gradients.

    Args:
        model: its buffers and modes, the attributes of modules of users' classes, and what hooks
            count in the others.
        objects: others whose attributes are restored, with all that their methods reach.
        functions: that may change attributes of their objects, closures and globals; hooks of the
            model are among them.
        leave: names of attributes of ``objects`` that are left as they are: large data.

    Raises:
        UpdatesWeightsError: in the run, where an optimizer steps.
    """
    reached = Reached(model, frozenset(leave))
    for x in [model, *objects]:
        reached.add_root(x)
    for function in [*user_hooks(model), *functions]:
        reached.add(function, getattr(function, "__qualname__", type(function).__qualname__))
    handle = register_optimizer_step_pre_hook(_refuse_update)
    try:
        with _restored_random_states(model):
            yield reached
    finally:
        handle.remove()
        reached.restore()


def user_hooks(model: nn.Module) -> list[Any]:
    """Return the hooks on a model and its parameters that are of no library that we know."""
    hooks = [hook for part in model.modules() for hook in module_hooks(part)]
    for parameter in model.parameters():
        hooks += [*gradient_hooks(parameter), *accumulation_hooks(parameter).values()]
    return [hook for hook in [*hooks, *global_module_hooks()] if _is_of_user(hook)]


def kept_numbers(owner: Any, leave: Iterable[str] = ()) -> Iterator[tuple[str, float]]:
    """Yield the fractions in the plain attributes of an object, with their paths: what it measures.

    Counts are not among them: of local tokens, for example.
    """
    skipped = frozenset(leave)
    for name, value in vars(owner).items():
        if name not in skipped and name not in _MODULE_ATTRIBUTES:
            yield from _fractions(value, name)


def _fractions(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Tensor):
        if value.dim() == 0 and value.is_floating_point() and not value.is_meta:
            yield path, float(value)
    elif isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        for key, part in value.items():
            yield from _fractions(part, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | deque) and len(value) <= _MAX_ITEMS:
        for index, part in enumerate(value):
            yield from _fractions(part, f"{path}[{index}]")


def _refuse_update(*_: Any) -> None:
    raise UpdatesWeightsError(
        "The step calls step() of an optimizer: it cannot run for a comparison with one device, "
        "which would update the weights once more."
    )


# ---------------------------------------------------------------- what is reached


class Reached:
    """What the code of a user reaches from some objects and functions, as it was found.

    Args:
        model: the model that runs: its parameters, and what libraries keep in its modules, are
            none of this.
        leave: names of attributes of roots that are not looked at.
    """

    def __init__(self, model: nn.Module, leave: frozenset[str]) -> None:
        self.trained: dict[str, Tensor] = {}
        """Tensors outside of the model that get gradients, by where they were found."""
        self._leave = leave
        self._own = {id(part) for part in model.modules()}
        self._weights = {id(parameter) for parameter in model.parameters()}
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._pending: list[tuple[Any, str]] = []
        self._classes = set[type]()
        self._num_copied = 0
        self._owners: list[tuple[Any, str]] = []
        for part in model.modules():
            self._seen[id(part)] = part
            self._save_module(part, is_own=True)

    def add_root(self, x: Any) -> None:
        """Follow an object of any class."""
        self._seen[id(x)] = x
        name = type(x).__name__
        if isinstance(x, list | dict):
            self._save_container(x, name)
        elif id(x) not in self._own:
            self._save_attributes(x, name, self._leave)
        elif not _is_holder(type(x)):  # a model of a library
            attributes = vars(x)

            def is_plain(name: str) -> bool:
                return name not in _MODULE_ATTRIBUTES and isinstance(attributes[name], _PLAIN)

            self._save_items(attributes, None, f"{name}.", is_mine=is_plain)
        self._visit_classes(type(x), name)
        self._walk()

    def add(self, x: Any, path: str) -> None:
        """Follow a function, or whatever it is."""
        if isinstance(x, FunctionType):  # of any package
            self._seen[id(x)] = x
            self._visit_function(x, path)
        else:
            self._pending.append((x, path))
        self._walk()

    def numbers(self) -> dict[str, float]:
        """Return the fractions that objects and functions of users hold now, by their paths."""
        return {
            found: number
            for value, path in self._owners
            for found, number in _fractions(_contents(value), path)
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, the last found first."""
        failures = []
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # noqa: BLE001  raised below, after all others
                failures.append(error)
        if failures:
            raise NotRestoredError(
                "A step ran for a comparison, and what it changed could not be restored: "
                f"{failures[0]}"
            ) from failures[0]

    # ------------------------------------------------------------ the walk

    def _walk(self) -> None:
        while self._pending and len(self._seen) < _MAX_OBJECTS:
            value, path = self._pending.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._visit(value, path)
        if self._pending:
            _logger.warning(
                "A step that is compared with one device reaches more than %d objects, by %s: what "
                "it changes in others is not restored. verify_steps=False omits the comparison.",
                _MAX_OBJECTS,
                self._pending[-1][1],
            )
        self._pending.clear()

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            self._save_tensor(value, path)
        elif isinstance(value, np.ndarray):
            self._save_array(value)
        elif isinstance(value, _Replayed):
            self._undo.append(value.rewind())
        elif (saved := _random_state(value)) is not None:
            self._undo.append(saved)
        elif isinstance(value, dict | list | deque | set | bytearray):
            self._save_container(value, path)
        elif isinstance(value, tuple | frozenset):
            if len(value) <= _MAX_ITEMS:
                self._pending += [(x, f"{path}[{n}]") for n, x in enumerate(value)]
        elif isinstance(value, FunctionType):
            if not _is_of_package(value):
                self._visit_function(value, path)
        elif isinstance(value, MethodType):
            self._pending += [(value.__func__, path), (value.__self__, path)]
        elif isinstance(value, partial):
            self._pending += [(x, path) for x in (value.func, value.args, value.keywords)]
        elif isinstance(value, staticmethod | classmethod):
            self._pending.append((value.__func__, path))
        elif isinstance(value, property):
            self._pending += [(value.fget, path), (value.fset, path)]
        elif isinstance(value, type):
            self._visit_classes(value, path)
        elif isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, CellType):
            self._save_cell(value, path)
        if _is_holder(type(value)) and not isinstance(value, nn.Module | type):
            self._save_attributes(value, path)
            self._visit_classes(type(value), path)

    def _visit_classes(self, kind: type, path: str) -> None:
        """Follow the methods and attributes of a class and its bases, but those of libraries."""
        for cls in kind.__mro__:
            if cls not in self._classes and not _is_of_package(cls):
                self._classes.add(cls)
                names = [name for name in vars(cls) if not _is_special(name)]
                put, drop = partial(setattr, cls), partial(delattr, cls)
                self._save_names(partial(vars, cls), names, put, drop, f"{path}.")

    def _visit_function(self, function: FunctionType, path: str) -> None:
        for x in (function.__dict__, function.__defaults__, function.__kwdefaults__):
            self._pending.append((x, path))
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._pending.append((cell, f"{path}.{name}"))
        wanted = sorted(_names(function.__code__))  # paths are the same on all ranks
        around = function.__globals__
        self._save_items(around, wanted, f"{around.get('__name__', '')}.")
        for name in wanted:
            module = around.get(name)
            if isinstance(module, ModuleType) and not _is_package(module.__name__):
                self._save_items(vars(module), wanted, f"{module.__name__}.")

    def _visit_module(self, module: nn.Module, path: str) -> None:
        """Follow a module outside of the model; of one that holds the model, its own attributes."""
        if any(id(part) in self._own for part in module.modules()):
            if _is_holder(type(module)):
                self._save_attributes(module, path, _MODULE_ATTRIBUTES)
                self._visit_classes(type(module), path)
            return
        self._save_module(module, is_own=False, path=path)

    def _save_module(self, module: nn.Module, *, is_own: bool, path: str = "") -> None:
        """Save the mode, buffers and plain attributes of a module.

        Parameters of the model are left: FSDP2 replaces them. Of modules of libraries inside of it
        only what hooks count is restored, since they set up the rest once.
        """
        training = module.training

        def restore_mode() -> None:
            module.training = training

        self._undo.append(restore_mode)
        attributes, has_users_class = vars(module), _is_holder(type(module))
        if is_own:
            self._save_items(own_buffers(module), None, f"{path}.")
        if has_users_class or not is_own:
            self._save_attributes(module, path, _MODULE_ATTRIBUTES if is_own else frozenset())
            self._visit_classes(type(module), path)
        else:
            names = {
                name
                for name, value in attributes.items()
                if type(value) in _COUNTS and name not in _MODULE_ATTRIBUTES
            }
            known = {*attributes}

            def is_count(name: str) -> bool:
                return name in names or (
                    name not in known and type(attributes.get(name)) in _COUNTS
                )

            self._save_items(attributes, names, f"{path}.", is_mine=is_count)

    # ------------------------------------------------------------ slots

    def _save_attributes(self, x: Any, path: str, leave: frozenset[str] = frozenset()) -> None:
        """Save the attributes of an object, in its dict and in slots."""
        if hasattr(x, "__dict__"):
            attributes = vars(x)
            self._owners.append((attributes, path))
            self._save_items(
                attributes,
                {name for name in attributes if name not in leave},
                f"{path}.",
                is_mine=lambda name: name not in leave,
            )
        slots = [
            name
            for cls in type(x).__mro__
            for name in _as_tuple(vars(cls).get("__slots__", ()))
            if name not in ("__dict__", "__weakref__")
        ]
        if slots:
            present = {name: getattr(x, name) for name in slots if hasattr(x, name)}
            self._save_names(
                lambda: {name: getattr(x, name) for name in slots if hasattr(x, name)},
                [*present],
                lambda name, value: object.__setattr__(x, name, value),
                lambda name: object.__delattr__(x, name),
                path,
            )

    def _save_items(
        self,
        items: MutableMapping[str, Any],
        names: Iterable[str] | None,
        path: str,
        is_mine: Callable[[str], bool] | None = None,
    ) -> None:
        """Save some items of a dict of attributes or globals; all when ``names`` is None."""
        wanted = None if names is None else {*names}
        mine = is_mine or (lambda name: wanted is None or name in wanted)

        def current() -> dict[str, Any]:
            return {name: x for name, x in items.items() if mine(name) and not _is_ours(name)}

        self._save_names(current, [*current()], items.__setitem__, items.__delitem__, path)

    def _save_names(
        self,
        current: Callable[[], Any],
        names: Iterable[str],
        put: Callable[[str, Any], None],
        drop: Callable[[str], None],
        path: str,
    ) -> None:
        """Save what names are bound to, and follow it; new names are dropped."""
        found = current()
        before = {name: found[name] for name in names if name in found}
        for name, value in [*before.items()]:
            if _is_consumed(value):
                before[name] = _Replayed(value)
                put(name, before[name])
            self._pending.append((before[name], f"{path}{name}"))

        def undo() -> None:
            now = dict(current())
            for name in now:
                if name not in before and not _is_special(name):
                    drop(name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    put(name, value)

        self._undo.append(undo)

    # ------------------------------------------------------------ contents

    def _save_container(self, value: Any, path: str) -> None:
        if len(value) > _MAX_LEN:
            return
        is_dict = isinstance(value, dict)
        if is_dict and len(value) <= _MAX_ITEMS:
            for key, item in [*value.items()]:
                if _is_consumed(item):
                    value[key] = _Replayed(item)
        elif isinstance(value, list | deque) and len(value) <= _MAX_ITEMS:
            for n, item in enumerate(value):
                if _is_consumed(item):
                    value[n] = _Replayed(item)
        before = [*value.items()] if is_dict else [*value]
        if len(value) <= _MAX_ITEMS:
            named = before if is_dict else enumerate(before)
            self._pending += [(item, f"{path}[{key!r}]") for key, item in named]

        def undo() -> None:
            now = [*value.items()] if is_dict else [*value]
            if not _are_same(now, before):
                _fill(value, before)

        self._undo.append(undo)

    def _save_cell(self, cell: CellType, path: str) -> None:
        before = _contents(cell)
        if _is_consumed(before):
            before = cell.cell_contents = _Replayed(before)
        self._owners.append((cell, path))
        self._pending.append((before, path))

        def undo() -> None:
            if before is cell:  # it was empty
                if _contents(cell) is not cell:
                    del cell.cell_contents
            elif _contents(cell) is not before:
                cell.cell_contents = before

        self._undo.append(undo)

    def _save_tensor(self, x: Tensor, path: str) -> None:
        if id(x) in self._weights or x.is_meta or x.layout != torch.strided:
            return
        if x.is_leaf and x.requires_grad:
            self.trained[path] = x
            gradient = x.grad
            copied = None if gradient is None else gradient.detach().clone()

            def restore_gradient() -> None:
                if gradient is not None and copied is not None:
                    gradient.detach().copy_(copied)
                x.grad = gradient

            self._undo.append(restore_gradient)
        local = x.to_local() if isinstance(x, DTensor) else x.detach()
        version = tensor_version(x)
        if local.numel() > min(_MAX_NUMEL, _MAX_COPIED - self._num_copied):

            def check() -> None:
                if tensor_version(x) != version:
                    raise RuntimeError(f"{path} is too large for a copy, and has changed")

            self._undo.append(check)
            return
        self._num_copied += local.numel()
        value = local.clone()

        def undo() -> None:
            if not torch.equal(local, value):
                local.copy_(value)

        self._undo.append(undo)

    def _save_array(self, x: Any) -> None:
        if not x.flags.writeable or x.size > _MAX_NUMEL:
            return
        value = x.copy()

        def undo() -> None:
            if x.dtype.hasobject or x.tobytes() != value.tobytes():
                x[...] = value

        self._undo.append(undo)


class _Replayed(Iterator[Any]):
    """An iterator that gives again what it gave in a run that must leave no trace.

    Args:
        source: the iterator.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._kept: deque[Any] = deque()
        self._at: int | None = None

    def __next__(self) -> Any:
        if self._at is None:
            return self._kept.popleft() if self._kept else next(self._source)
        if self._at == len(self._kept):
            self._kept.append(next(self._source))
        self._at += 1
        return self._kept[self._at - 1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies ask before there is a source
            raise AttributeError(name)
        return getattr(self._source, name)

    def rewind(self) -> Callable[[], None]:
        """Keep what it gives from now on; return what goes back."""
        self._at = 0

        def undo() -> None:
            self._at = None

        return undo


# ---------------------------------------------------------------- kinds of values


def _is_consumed(value: Any) -> bool:
    """Return whether a value is an iterator of Python or torch, which cannot go back."""
    if not isinstance(value, Iterator) or isinstance(value, io.IOBase | _Replayed):
        return False
    kind = type(value)
    return _is_of_package(kind) and hasattr(kind, "__next__")


def _is_holder(kind: type) -> bool:
    """Return whether objects of a class hold what users put there."""
    return issubclass(kind, _HOLDERS) or not all(map(_is_of_package, kind.__mro__))


def _is_of_user(x: Any) -> bool:
    """Return whether a function or a class is of no library that we know."""
    while isinstance(x, partial):
        x = x.func
    module = getattr(x, "__module__", None) or type(x).__module__
    return module.partition(".")[0] not in _LIBRARIES


def _is_of_package(x: Any) -> bool:
    """Return whether a function or a class is of Python or of an installed package."""
    return _is_package(getattr(x, "__module__", None) or "builtins")


def _is_package(module: str) -> bool:
    return _is_installed(module.partition(".")[0])


@lru_cache(maxsize=4096)
def _is_installed(root: str) -> bool:
    if root in _LIBRARIES or root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return any(part in _INSTALLED for part in Path(file).parts)


def _is_ours(name: str) -> bool:
    """Return whether an attribute is ours: a module that was called in a run stays noted."""
    return name.startswith("_lightning_cp")


def _is_special(name: str) -> bool:
    return (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _names(code: CodeType) -> set[str]:
    """Return the names that code looks up, nested functions included."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return {name for name in set(code.co_names).union(*inner) if not hasattr(builtins, name)}


def _contents(value: Any) -> Any:
    """Return what a cell holds, the cell itself if nothing; other values as they are."""
    if not isinstance(value, CellType):
        return value
    try:
        return value.cell_contents
    except ValueError:  # not set yet
        return value


def _are_same(now: list[Any], before: list[Any]) -> bool:
    if len(now) != len(before):
        return False
    return all(
        a is b or (type(a) is tuple and len(a) == 2 and a[0] is b[0] and a[1] is b[1])
        for a, b in zip(now, before, strict=True)
    )


def _fill(value: Any, items: list[Any]) -> None:
    """Replace the items of a container, past what a user's class overrides."""
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        for key, item in items:
            kind.__setitem__(value, key, item)
        return
    kind = next(kind for kind in (list, deque, set, bytearray) if isinstance(value, kind))
    kind.clear(value)
    (kind.update if kind is set else kind.extend)(value, items)


def _random_state(value: Any) -> Callable[[], None] | None:
    """Return what restores a generator of random numbers; None for anything else."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state", deepcopy(bits.state))
    if isinstance(value, np.random.RandomState | torch.Generator):
        generator: Any = value
        return partial(generator.set_state, generator.get_state())
    return None


@contextmanager
def _restored_random_states(model: nn.Module) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch on exit."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([*devices]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
