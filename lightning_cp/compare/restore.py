# SPDX-License-Identifier: Apache-2.0
"""Restores what a run that must leave no trace changes.

One walk follows everything that the code of a user reaches: attributes, containers, closures,
globals, defaults, classes. What it finds is restored in place, each kind in its own way: `_KINDS`.
Iterators are in `lightning_cp.compare.replay`. Knows torch and Python; nothing about steps.
"""

import builtins
import functools
import gc
import logging
import operator
import os
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import lru_cache, partial
from itertools import zip_longest
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_cp.compare.contents import (
    BASES,
    STATES,
    are_same,
    array_bits,
    bits_of,
    checksum,
    fill,
    is_equal_state,
    is_same_memory,
    is_strided,
    is_table,
    items_of,
    length,
)
from lightning_cp.compare.replay import NotComparableError, StandIns
from lightning_cp.compare.whose_code import (
    is_holder,
    is_metric,
    is_of_package,
    is_of_user,
    is_package,
    is_restored_in_part,
)
from lightning_cp.private.modules import (
    accumulation_hooks,
    global_module_hooks,
    gradient_hooks,
    hook_dicts,
    module_hooks,
    own_parts,
    tensor_version,
)

_logger = logging.getLogger(__name__)

_MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module())) | {"log"}
_PLAIN: Final = (int, float, str, tuple, list, dict, set, deque, type(None), Tensor, np.ndarray)
_ATOMS: Final = frozenset(
    (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
)
_COUNTS: Final = (int, float, list, deque)
"""What hooks add to modules of libraries, and count in."""

# Of larger containers only the length is looked at, and fractions are compared in small ones. Of
# tensors and arrays so many bytes are copied, in one and in all; of others a checksum is compared,
# of so many bytes in all.
_MAX_ITEMS, _MAX_LEN, _MAX_OBJECTS = 1_000, 1 << 22, 200_000
_MAX_BYTES, _MAX_COPIED, _MAX_SUMMED = 1 << 26, 1 << 28, 1 << 31

_INNER: Final = ("optimizer", "scheduler", "lr_scheduler", "generator", "config")
"""Attributes of such objects that are followed."""

_LIBRARY_VARIABLES: Final = ("CUDA", "NCCL", "PYTORCH", "TORCH", "TRITON", "TOKENIZERS", "OMP")

_CURE: Final = (
    "verify=False omits the comparison of steps, verify_first_batch=False that of batches."
)


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
        NotComparableError: in the run, where an optimizer steps, or an iterator without a copy is
            drawn from.
    """
    reached = Reached(model, frozenset(leave))
    for x in [model, *objects]:
        reached.add_root(x)
    for function in [*user_hooks(model), *functions]:
        reached.add(function, getattr(function, "__qualname__", type(function).__qualname__))
    handle = register_optimizer_step_pre_hook(_refuse_update)
    try:
        with restored_random_states(model):
            yield reached
    finally:
        handle.remove()
        reached.restore()


def user_hooks(model: nn.Module) -> list[Any]:
    """Return the hooks on a model and its parameters that are of no library that we know."""
    hooks = [hook for part in model.modules() for hook in module_hooks(part)]
    for parameter in model.parameters():
        hooks += [*gradient_hooks(parameter), *accumulation_hooks(parameter).values()]
    return [hook for hook in [*hooks, *global_module_hooks()] if is_of_user(hook)]


def _fractions(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, float]]:
    """Yield the fractions in a value; those of a container once, where it is met first."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Tensor):
        if not (is_lazy(value) or value.is_meta or value.dim()) and value.is_floating_point():
            yield path, float(value)
    elif isinstance(value, dict | list | tuple | deque) and id(value) not in seen:
        seen.add(id(value))
        if length(value) <= _MAX_ITEMS:
            named = items_of(value) if isinstance(value, dict) else enumerate(items_of(value))
            for key, part in named:
                if isinstance(part, float | Tensor | dict | list | tuple | deque):
                    yield from _fractions(part, f"{path}[{key!r}]", seen)


def _refuse_update(*_: Any) -> None:
    raise NotComparableError(
        "The step calls step() of an optimizer: it cannot run for a comparison with one device, "
        "which would update the weights once more. Compare the losses and weights of a few steps "
        "with those of one process."
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
        self._undo: list[tuple[str, Callable[[], None]]] = []
        self._pending: deque[tuple[Any, str]] = deque()
        self._classes = set[type]()
        self._stand_ins = StandIns()
        self._budget = {"copies": _MAX_COPIED, "sums": _MAX_SUMMED}
        self._owners: list[tuple[Any, str]] = []
        self._save_environment()
        for name, parameter in model.named_parameters():
            self._save_weight(parameter, name)
        for part in model.modules():
            self._seen[id(part)] = part
            self._save_module(part, type(model).__name__, is_own=True)

    def add_root(self, x: Any) -> None:
        """Follow an object of any class."""
        self._seen[id(x)] = x
        name = type(x).__name__
        if isinstance(x, list | dict):
            self._save_container(x, name)
        elif id(x) not in self._own:
            self._save_attributes(x, name, self._leave)
        elif not is_holder(type(x)):  # a model of a library
            self._save_some(vars(x), lambda value: isinstance(value, _PLAIN), f"{name}.")
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

    def numbers(self, owner: Any = None) -> dict[str, float]:
        """Return the fractions that objects and functions of users hold now, by their paths.

        Counts are not among them: of local tokens, for example.

        Args:
            owner: a module whose plain attributes alone are looked at.
        """
        seen, values = set[int](), self._owners
        if owner is not None:
            plain = vars(owner).keys() - _MODULE_ATTRIBUTES
            values = [(vars(owner)[name], f"self.{name}") for name in sorted(plain)]
        return {
            found: number
            for value, path in values
            for found, number in _fractions(_contents(value), path, seen)
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, the last found first."""
        failures: list[tuple[str, Exception]] = []
        for path, undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # noqa: BLE001  raised below, after all others
                failures.append((path, error))
        if failures:
            path, reason = failures[0]
            raise NotRestoredError(
                f"A step ran for a comparison, and what it changed in {path.rstrip('.')} could not "
                f"be restored: {reason}. {_CURE}"
            ) from reason

    # ------------------------------------------------------------ the walk

    def _walk(self) -> None:
        """Visit what is pending, the nearest first: limits cut off what lies deepest."""
        with _without_collection():
            while self._pending and len(self._seen) < _MAX_OBJECTS:
                value, path = self._pending.popleft()
                if id(value) not in self._seen and type(value) not in _ATOMS:
                    self._seen[id(value)] = value
                    _method(type(value))(self, value, path)
        if self._pending:
            _warn_once(f"more than {_MAX_OBJECTS} objects, by", self._pending[0][1])
        self._pending.clear()

    def _follow(
        self, values: Iterable[tuple[Any, Any]], path: str, style: str = "{}[{!r}]"
    ) -> None:
        self._pending += [
            (x, style.format(path, key)) for key, x in values if type(x) not in _ATOMS
        ]

    def _visit_object(self, x: Any, path: str) -> None:
        kind = type(x)
        if is_holder(kind):
            self._save_attributes(x, path)
            self._visit_classes(kind, path)
        elif is_restored_in_part(kind) and hasattr(x, "__dict__"):
            self._save_some(vars(x), _is_flat, f"{path}.")
            named = [(name, part) for name, part in vars(x).items() if name.endswith(_INNER)]
            self._follow(named, path, "{}.{}")

    def _visit_classes(self, kind: type, path: str) -> None:
        """Follow the methods and attributes of a class and its bases, but those of libraries."""
        for cls in kind.__mro__:
            if cls not in self._classes and not is_of_package(cls):
                self._classes.add(cls)
                put, drop = partial(setattr, cls), partial(delattr, cls)

                def current(cls: type = cls) -> dict[str, Any]:
                    return {name: x for name, x in vars(cls).items() if not _is_special(name)}

                self._save_names(current, put, drop, f"{path}.")

    def _visit_function(self, function: FunctionType, path: str) -> None:

        def defaults() -> dict[str, Any]:
            return {name: getattr(function, name) for name in ("__defaults__", "__kwdefaults__")}

        put, drop = partial(setattr, function), partial(delattr, function)
        self._save_names(defaults, put, drop, f"{path}.")
        self._pending.append((function.__dict__, path))
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._pending.append((cell, f"{path}.{name}"))
        wanted, around = _names(function.__code__), function.__globals__
        package = around.get("__package__") or ""
        seen = {id(around)}
        self._save_items(around, f"{around.get('__name__', '')}.", wanted.__contains__)
        inside = [around]
        while inside:  # modules, those in them, and those that the function imports
            found = inside.pop()
            for name in sorted(wanted):  # paths are the same on all ranks
                imported = sys.modules.get(name), sys.modules.get(f"{package}.{name}")
                for module in (found.get(name), *imported):
                    if not isinstance(module, ModuleType) or is_package(module.__name__):
                        continue
                    items = vars(module)
                    if id(items) not in seen:
                        seen.add(id(items))
                        inside.append(items)
                        self._save_items(items, f"{module.__name__}.", wanted.__contains__)

    def _visit_package_function(self, function: FunctionType, path: str) -> None:
        if not is_of_package(function):
            self._visit_function(function, path)

    def _visit_parts(self, x: Any, path: str) -> None:
        """Follow what wraps others by name: methods, partials, properties, references."""
        names = next(names for kinds, names in _WRAPPERS.items() if isinstance(x, kinds))
        self._pending += [(getattr(x, name, None), path) for name in names.split()]

    def _visit_items(self, x: Any, path: str) -> None:
        self._follow(enumerate(x), path)
        self._visit_object(x, path)

    def _visit_reference(self, reference: Any, path: str) -> None:
        self._pending.append((reference(), path))

    def _visit_loader(self, x: Any, path: str) -> None:
        """Follow what gives the order of a DataLoader, not its data."""
        attributes = vars(x)
        names = {"generator", "sampler", "batch_sampler", "epoch", "seed"}
        self._save_items(attributes, f"{path}.", names.__contains__)
        self._visit_object(x, path)

    def _visit_module(self, module: nn.Module, path: str) -> None:
        """Follow a module outside of the model; of one that holds the model, its own attributes."""
        if any(id(part) in self._own for part in module.modules()):
            if is_holder(type(module)):
                self._save_attributes(module, path, _MODULE_ATTRIBUTES)
                self._visit_classes(type(module), path)
            return
        self._save_module(module, path, is_own=False)

    def _save_module(self, module: nn.Module, path: str, *, is_own: bool) -> None:
        """Save what a module holds.

        Parameters of the model are put back where FSDP2 has not replaced them. Of attributes of
        modules of libraries inside of it only what hooks count is restored, since they set up the
        rest once.
        """
        self._save(path, lambda: module.training, partial(setattr, module, "training"))
        buffers, parameters, modules = own_parts(module)
        if is_own:
            self._save_items(buffers, f"{path}.")
            self._save_order(parameters, path)
            self._save_order(modules, path)
        self._save_hooks(module, path)
        attributes, has_state = vars(module), is_holder(type(module)) or is_metric(type(module))
        if has_state or not is_own:
            self._save_attributes(module, path, _MODULE_ATTRIBUTES if is_own else frozenset())
            self._visit_classes(type(module), path)
            return
        self._save_some(attributes, lambda value: type(value) in _COUNTS, f"{path}.")
        self._follow([("config", attributes.get("config"))], path, "{}.{}")

    def _save_order(self, items: dict[str, Any], path: str) -> None:
        """Save which modules or parameters a module has, and in which order."""

        def put(before: list[tuple[str, Any]]) -> None:
            kept = dict(items)
            items.clear()
            for name, x in before:
                now = kept.get(name, x)
                is_sharded = isinstance(x, DTensor) or isinstance(now, DTensor)
                items[name] = now if is_sharded else x

        self._save(path, lambda: [*items.items()], put, are_same)

    def _save_hooks(self, x: nn.Module | Tensor, path: str) -> None:
        """Save the hooks of users; those of libraries come and go as they need them."""

        def current() -> list[dict[int, Any]]:
            found = hook_dicts(x)
            mine = {
                number
                for hooks in found
                for number, hook in hooks.items()
                if callable(hook) and is_of_user(hook)
            }
            return [{k: hook for k, hook in hooks.items() if k in mine} for hooks in found]

        def put(before: list[dict[int, Any]]) -> None:
            none: dict[int, Any] = {}
            for hooks, now, old in zip_longest(hook_dicts(x), current(), before, fillvalue=none):
                for number in now.keys() - old.keys():
                    del hooks[number]
                hooks.update({k: hook for k, hook in old.items() if k not in hooks})

        self._save(path, current, put)

    # ------------------------------------------------------------ one way to save

    def _save(
        self,
        path: str,
        get: Callable[[], Any],
        put: Callable[[Any], Any],
        is_same: Callable[[Any, Any], bool] = is_equal_state,
    ) -> None:
        """Save what ``get`` returns now; ``put`` gets it on exit if it is not the same then."""
        before = get()

        def undo() -> None:
            if not is_same(get(), before):
                put(before)

        self._undo.append((path, undo))

    def _save_or_refuse(self, path: str, get: Callable[[], Any]) -> None:
        """Raise on exit if what is too large for a copy has changed."""
        self._save(path, get, _refuse_large)

    # ------------------------------------------------------------ slots

    def _save_attributes(self, x: Any, path: str, leave: frozenset[str] = frozenset()) -> None:
        """Save the attributes of an object, in its dict and in slots."""
        if hasattr(x, "__dict__"):
            attributes = vars(x)
            self._owners.append((attributes, path))
            self._save_items(attributes, f"{path}.", lambda name: name not in leave)
        slots = _slots(type(x))
        if slots:

            def current() -> dict[str, Any]:
                return {name: getattr(x, name) for name in slots if hasattr(x, name)}

            self._save_names(
                current,
                lambda name, value: object.__setattr__(x, name, value),
                lambda name: object.__delattr__(x, name),
                f"{path}.",
            )

    def _save_items(
        self, items: dict[str, Any], path: str, is_mine: Callable[[str], bool] = bool
    ) -> None:
        """Save some items of a dict of attributes or globals."""

        def current() -> dict[str, Any]:
            return {name: x for name, x in items.items() if is_mine(name) and not _is_ours(name)}

        self._save_names(current, items.__setitem__, items.__delitem__, path)

    def _save_some(
        self, attributes: dict[str, Any], is_kind: Callable[[Any], bool], path: str
    ) -> None:
        """Save those attributes of an object of a library that hold values of some kind."""
        others = {name for name, value in attributes.items() if not is_kind(value)}

        def is_mine(name: str) -> bool:
            is_other = name in others or name in _MODULE_ATTRIBUTES
            return not is_other and is_kind(attributes[name])

        self._save_items(attributes, path, is_mine)

    def _save_names(
        self,
        current: Callable[[], dict[str, Any]],
        put: Callable[[str, Any], None],
        drop: Callable[[str], None],
        path: str,
    ) -> None:
        """Save what names are bound to, and follow it; new names are dropped."""
        before = current()
        for name, value in before.items():
            if type(value) not in _ATOMS:
                lent = self._stand_ins.lend(value)
                if lent is not value:
                    put(name, lent)
                self._pending.append((lent, path + name))

        def undo() -> None:
            now = current()
            for name in now:
                if name not in before and not _is_special(name):
                    drop(name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    put(name, value)

        self._undo.append((path, undo))

    # ------------------------------------------------------------ contents

    def _save_container(self, value: Any, path: str) -> None:
        num, is_dict = length(value), isinstance(value, dict)
        if num > _MAX_LEN:
            _warn_once("a container of more than 4 million items", path)
            self._save_or_refuse(path, lambda: length(value))
            return
        self._save(path, lambda: items_of(value), partial(fill, value), are_same)
        if isinstance(value, dict | list | deque):
            items, lend = items_of(value), self._stand_ins.lend
            lent = [(k, lend(x)) for k, x in items] if is_dict else [*map(lend, items)]
            if not are_same(lent, items):
                fill(value, lent)
            self._follow(lent if is_dict else enumerate(lent), path)
        if not isinstance(value, bytearray) and type(value) not in BASES:
            self._visit_object(value, path)

    def _save_cell(self, cell: CellType, path: str) -> None:
        self._owners.append((cell, path))
        self._save_names(
            lambda: {} if (x := _contents(cell)) is cell else {"": x},
            lambda _, x: setattr(cell, "cell_contents", x),
            lambda _: delattr(cell, "cell_contents"),
            path,
        )

    def _save_context(self, variable: ContextVar[Any], path: str) -> None:
        missing = object()
        self._save_names(
            lambda: {} if (x := variable.get(missing)) is missing else {"": x},
            lambda _, x: variable.set(x) and None,
            lambda _: variable.set(Context().run(variable.get)) and None,  # its default
            path,
        )

    def _save_cache(self, function: Any, path: str) -> None:
        """Follow what a function keeps (`functools.lru_cache`), and drop what the run adds."""
        self._pending.append((function.__wrapped__, path))
        if is_of_package(function.__wrapped__):
            return
        self._follow(enumerate(_cached(function)), path)
        self._save(
            path,
            function.cache_info,
            lambda _: function.cache_clear(),
            lambda now, before: before.currsize > 0 or now.misses == before.misses,
        )

    def _save_state(self, x: Any, path: str) -> None:
        """Save what gives and takes its state: random generators, files in memory."""
        if isinstance(x, random.SystemRandom) or getattr(x, "closed", False):
            return
        get, put = next(pair for kind, pair in STATES.items() if isinstance(x, kind))
        self._save(path, partial(get, x), partial(put, x))
        self._pending.append((getattr(x, "seed_seq", None), path))
        if not is_of_package(type(x)):
            self._visit_object(x, path)

    def _save_environment(self) -> None:
        items = os.environ

        def current() -> dict[str, str]:
            return {k: v for k, v in items.items() if not k.startswith(_LIBRARY_VARIABLES)}

        self._save_names(current, items.__setitem__, items.__delitem__, "os.environ ")

    def _save_weight(self, x: Tensor, path: str) -> None:
        """Save whether a weight is trained, and its hooks."""
        self._save(
            path,
            lambda: x.requires_grad,
            x.requires_grad_,
            lambda now, before: now == before or not x.is_leaf,
        )
        if x.requires_grad:
            self._save_hooks(x, path)

    def _save_tensor(self, x: Tensor, path: str) -> None:
        if id(x) in self._weights or x.is_meta or is_lazy(x):
            return
        if x.is_leaf and x.requires_grad:
            self.trained[path] = x
            gradient = x.grad
            copied = None if gradient is None else gradient.detach().clone()

            def restore_gradient() -> None:
                if gradient is not None and copied is not None:
                    gradient.detach().copy_(copied)
                x.grad = gradient

            self._undo.append((path, restore_gradient))
        if x.is_leaf:
            self._save_weight(x, path)
        found = x.to_local() if isinstance(x, DTensor) else x.detach()
        if type(x) is not DTensor and is_strided(x):
            whole = found

            def restore_data() -> None:  # after `x.data = ...` or resizing
                if not is_same_memory(x, whole):
                    x.data = whole

            self._undo.append((path, restore_data))
            for dim, stride in enumerate(found.stride()):  # an expanded one cannot be written to
                found = found.narrow(dim, 0, 1) if stride == 0 and found.shape[dim] else found
        version, num_bytes = tensor_version(x), found.numel() * found.element_size()
        if not self._affords("copies", num_bytes):
            self._save_or_refuse(path, lambda: tensor_version(x))
            if self._affords("sums", num_bytes):
                self._save_or_refuse(path, lambda: checksum(found))
            return
        value = found.clone()

        def undo() -> None:
            try:
                is_same = torch.equal(found, value) or torch.equal(bits_of(found), bits_of(value))
            except (RuntimeError, TypeError, NotImplementedError):  # sparse or nested, for example
                is_same = tensor_version(x) == version
            if not is_same:
                found.copy_(value)

        self._undo.append((path, undo))

    def _save_array(self, x: Any, path: str) -> None:
        if x.dtype == object:
            self._follow(enumerate(x.ravel().tolist()), path)
        if x.flags.writeable and (x.dtype.hasobject or self._affords("copies", x.nbytes)):
            value = np.array(x)

            def undo() -> None:
                if x.shape != value.shape:
                    x.resize(value.shape, refcheck=False)
                now = np.asarray(x)
                if x.dtype.hasobject or not np.array_equal(array_bits(now), array_bits(value)):
                    now[...] = value

            self._undo.append((path, undo))
        elif x.flags.writeable and self._affords("sums", x.nbytes):
            self._save_or_refuse(
                path, lambda: checksum(torch.from_numpy(array_bits(np.asarray(x))))
            )
        elif x.flags.writeable:
            _warn_once("more than 2 GB of arrays, by", path)
        if type(x) is not np.ndarray:
            self._visit_object(x, path)

    def _save_table(self, x: Any, path: str) -> None:
        """Let the run write to a copy of a frame or series of pandas."""
        if not self._affords("copies", int(np.sum(x.memory_usage()))):
            _warn_once("large data frames, by", path)
            return
        self._save(path, lambda: x._mgr, partial(setattr, x, "_mgr"), operator.is_)
        x._mgr = x.copy()._mgr

    def _affords(self, what: str, num_bytes: int) -> bool:
        """Return whether so much may be copied, or summed, and count it."""
        limit = min(_MAX_BYTES, self._budget[what]) if what == "copies" else self._budget[what]
        if num_bytes <= limit:
            self._budget[what] -= num_bytes
        return num_bytes <= limit


# ---------------------------------------------------------------- kinds of values


def _flat(table: dict[Any, Any]) -> tuple[type, ...]:
    """Return the classes that are keys of a table, alone or in tuples."""
    return tuple(x for key in table for x in (key if isinstance(key, tuple) else (key,)))


_WRAPPERS: Final[dict[Any, str]] = {
    MethodType: "__func__ __self__",
    (BuiltinMethodType, MethodWrapperType): "__self__",
    partial: "func args keywords",
    functools.partialmethod: "func args keywords",
    (staticmethod, classmethod): "__func__",
    property: "fget fset fdel",
    functools.cached_property: "func",
    np.random.Generator: "bit_generator",
    Optimizer: "param_groups",
}

_KINDS: Final[tuple[tuple[Any, Callable[[Reached, Any, str], None]], ...]] = (
    (Tensor, Reached._save_tensor),
    (np.ndarray, Reached._save_array),
    ((dict, list, deque, set, bytearray), Reached._save_container),
    ((tuple, frozenset), Reached._visit_items),
    (FunctionType, Reached._visit_package_function),
    (_flat(_WRAPPERS), Reached._visit_parts),
    (type(lru_cache(len)), Reached._save_cache),
    (type, Reached._visit_classes),
    (nn.Module, Reached._visit_module),
    (CellType, Reached._save_cell),
    (weakref.ref, Reached._visit_reference),
    (ContextVar, Reached._save_context),
    ((DataLoader, Sampler, BatchSampler), Reached._visit_loader),
    (_flat(STATES), Reached._save_state),
)
"""How each kind of value is saved and followed; any other by `Reached._visit_object`."""


_methods = weakref.WeakKeyDictionary[type, Callable[[Reached, Any, str], None]]()


def _method(kind: Any) -> Callable[[Reached, Any, str], None]:
    if kind not in _methods:
        found = (method for kinds, method in _KINDS if issubclass(kind, kinds))
        other = Reached._save_table if is_table(kind) else Reached._visit_object
        _methods[kind] = next(found, other)
    return _methods[kind]


def _refuse_large(_: Any) -> None:
    raise RuntimeError("it is too large for a copy")


def _is_flat(value: Any) -> bool:
    """Return whether a value is a number or text, or a small container of them alone."""
    if type(value) in _ATOMS:
        return True
    if type(value) not in (tuple, list, dict, set) or len(value) > _MAX_ITEMS:
        return False
    values = value.values() if type(value) is dict else value
    return all(type(x) in _ATOMS for x in values)


@lru_cache(maxsize=64)
def _warn_once(what: str, path: str) -> None:
    _logger.warning(
        "A step that is compared with one device reaches %s %s: what it changes there is not "
        "restored. verify=False omits the comparison.",
        what,
        path,
    )


def _is_ours(name: str) -> bool:
    """Return whether an attribute is ours: a module that was called in a run stays noted."""
    return name.startswith("_lightning_cp")


def _is_special(name: str) -> bool:
    return (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"


def _slots(kind: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class of users, private ones as Python spells them."""
    names = list[str]()
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that code looks up, nested functions included."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    texts = code.co_consts if "globals" in code.co_names else ()
    found = {x for x in (*code.co_names, *texts) if isinstance(x, str)}
    return frozenset(name for name in found.union(*inner) if not hasattr(builtins, name))


def _contents(value: Any) -> Any:
    """Return what a cell holds, the cell itself if nothing; other values as they are."""
    if not isinstance(value, CellType):
        return value
    try:
        return value.cell_contents
    except ValueError:  # not set yet
        return value


def _cached(function: Any) -> list[Any]:
    """Return what a function with a cache (`functools.lru_cache`) keeps."""
    return [
        x
        for x in gc.get_referents(function)
        if x is not vars(function)
        and x is not function.__wrapped__
        and not isinstance(x, type)
        and not (type(x) is dict and any("lru_list" in type(y).__name__ for y in x.values()))
    ]


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage inside: looking at all that is kept each time takes half of a walk."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def restored_random_states(model: nn.Module) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch on exit."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([*devices]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
