# SPDX-License-Identifier: Apache-2.0
"""Restores what a run that must leave no trace changes: attributes, buffers, random states.

Also what hooks and other functions count: in attributes of their objects, in their closures and in
globals. Knows torch and Python; nothing about steps, Lightning or transformers.
"""

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.torch_private import (
    accumulation_hooks,
    global_module_hooks,
    gradient_hooks,
    module_hooks,
)

_MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module())) | {"log"}
_IMMUTABLE: Final = (int, float, str, bool, type(None), tuple)
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_MUTABLE: Final = (list, dict, set, deque, Tensor, np.ndarray, *_GENERATORS)

# Larger containers and arrays are data, not something that a step appends to: their items are not
# looked at, or they are not copied.
_MAX_ITEMS, _MAX_LEN, _MAX_NUMEL = 1_000, 100_000, 1 << 24

# Their functions keep what they set up once, and caches.
_LIBRARIES: Final = frozenset(
    ("accelerate", "builtins", "hf_patches", "lightning", "lightning_cp", "peft", "torch")
) | {"pytorch_lightning", "torchmetrics", "transformers", "trl"}


@contextmanager
def restored_state(
    model: nn.Module, *objects: Any, functions: Iterable[Any] = (), leave: Iterable[str] = ()
) -> Iterator[None]:
    """Restore on exit what a run of a model may change, but not parameters and their gradients.

    Args:
        model: its buffers, its mode, the plain attributes of the module itself, and numbers of its
            submodules: other attributes of these are what libraries set up once.
        objects: others whose plain attributes are restored, with lists and dicts inside.
        functions: that may change attributes of their objects, closures and globals; hooks of the
            model are among them.
        leave: names of attributes of ``objects`` that are left as they are: large data.
    """
    users = [*user_hooks(model), *(f for f in functions if _is_of_user(f))]
    numbers = [
        (vars(part), name, value)
        for part in model.modules()
        for name, value in vars(part).items()
        if type(value) in (int, float) and name not in _MODULE_ATTRIBUTES
    ]
    owners = [*objects, *_owners(users)]
    with (
        restored_attributes(model),
        _restored_objects([*owners, *_own_objects([model, *owners])], frozenset(leave)),
        _restored_cells(users),
        _restored_random_states(model),
    ):
        try:
            yield
        finally:
            for attributes, name, value in numbers:
                attributes[name] = value


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


def user_hooks(model: nn.Module) -> list[Any]:
    """Return the hooks on a model and its parameters that are of no library that we know."""
    hooks = [hook for part in model.modules() for hook in module_hooks(part)]
    for parameter in model.parameters():
        hooks += [*gradient_hooks(parameter), *accumulation_hooks(parameter).values()]
    return [hook for hook in [*hooks, *global_module_hooks()] if _is_of_user(hook)]


@contextmanager
def restored_attributes(module: nn.Module) -> Iterator[None]:
    """Restore the plain attributes, lists and dicts of a module, and all buffers, on exit."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    modes = [(part, part.training) for part in module.modules()]
    try:
        with _restored_objects([module], frozenset()):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _own_objects(owners: Iterable[Any]) -> list[Any]:
    """Return the objects of users' classes that are attributes of others, and theirs."""
    known: dict[int, Any] = {}
    pending = [*owners]
    while pending and len(known) < _MAX_ITEMS:
        for value in [*vars(pending.pop()).values()]:
            is_own = type(value).__module__.partition(".")[0] not in _LIBRARIES | _STANDARD
            if is_own and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
                if id(value) not in known and not callable(value):
                    pending.append(value)
                known.setdefault(id(value), value)
    return [*known.values()]


@contextmanager
def _restored_objects(objects: Iterable[Any], leave: frozenset[str]) -> Iterator[None]:
    """Restore the plain attributes of objects on exit."""
    saved = [
        (vars(x), _plain(vars(x), leave), {*vars(x)}) for x in objects if hasattr(x, "__dict__")
    ]
    try:
        yield
    finally:
        for attributes, before, names in saved:
            _restore_plain(attributes, before, leave)
            for name in [*attributes]:
                value = attributes[name]
                root = type(value).__module__.partition(".")[0]
                if name not in names and root not in _LIBRARIES | _STANDARD:
                    del attributes[name]  # an object of a user's class, built when it was needed


def _plain(attributes: dict[str, Any], leave: frozenset[str]) -> dict[str, tuple[Any, Any]]:
    """Return plain attributes, each with a snapshot of its contents."""
    return {
        name: (value, _snapshot(value))
        for name, value in attributes.items()
        if name not in leave
        and name not in _MODULE_ATTRIBUTES
        and isinstance(value, (*_IMMUTABLE, *_MUTABLE))
    }


@torch.no_grad()
def _restore_plain(
    attributes: dict[str, Any], before: dict[str, tuple[Any, Any]], leave: frozenset[str]
) -> None:
    for name in [*_plain(attributes, leave)]:
        if name not in before:
            del attributes[name]
    for name, (value, snapshot) in before.items():
        _restore(value, snapshot)
        attributes[name] = value


# ---------------------------------------------------------------- functions


_STANDARD: Final = sys.stdlib_module_names | {"numpy", "datasets", "tokenizers", "safetensors"}


def _is_of_user(function: Any) -> bool:
    """Return whether a function is of no library that we know."""
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] not in _LIBRARIES


def _unwrapped(functions: Iterable[Any]) -> Iterator[Any]:
    """Yield functions, and those inside partials and methods."""
    for function in functions:
        if isinstance(function, partial):
            yield from _unwrapped([function.func, *function.args, *function.keywords.values()])
        elif isinstance(function, MethodType):
            yield from _unwrapped([function.__func__])
        else:
            yield function


def _owners(functions: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects that functions may count in: those of methods, and callable ones."""
    for function in functions:
        if isinstance(function, partial):
            yield from _owners([function.func, *function.args])
        elif isinstance(owner := getattr(function, "__self__", function), nn.Module | type):
            continue
        elif not isinstance(owner, FunctionType):
            yield owner


@contextmanager
def _restored_cells(functions: Iterable[Any]) -> Iterator[None]:
    """Restore the closures and globals of functions on exit."""
    cells: dict[int, tuple[CellType, Any, Any]] = {}
    names: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}
    pending, seen = [*_unwrapped(functions)], set[int]()
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        called = [function.__globals__.get(name) for name in function.__code__.co_names]
        called += [_contents(cell) for cell in function.__closure__ or ()]
        pending += [f for f in called if isinstance(f, FunctionType) and _is_of_user(f)]
        for cell in function.__closure__ or ():
            value = _contents(cell)
            if isinstance(value, (*_IMMUTABLE, *_MUTABLE)):
                cells[id(cell)] = cell, value, _snapshot(value)
        around = function.__globals__
        for name in function.__code__.co_names:
            value = around.get(name)
            plain = (int, float, list, dict, set, deque, *_GENERATORS)
            if isinstance(value, plain) and name in around:
                names[id(around), name] = around, value, _snapshot(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for cell, value, snapshot in cells.values():
                _restore(value, snapshot)
                cell.cell_contents = value
            for (_, name), (around, value, snapshot) in names.items():
                _restore(value, snapshot)
                around[name] = value


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return cell


# ---------------------------------------------------------------- random states


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


# ---------------------------------------------------------------- contents of values


def _snapshot(value: Any) -> Any:
    """Return copies of the numbers in a value and of the items of its containers."""
    if isinstance(value, Tensor):
        is_small = value.numel() <= _MAX_NUMEL and not isinstance(value, DTensor)
        return value.detach().clone() if is_small and not value.is_meta else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _MAX_NUMEL else None
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return deepcopy(value.bit_generator.state)
    if isinstance(value, np.random.RandomState | torch.Generator):
        return value.get_state()
    if not isinstance(value, list | tuple | deque | dict | set) or len(value) > _MAX_LEN:
        return None
    deep = len(value) <= _MAX_ITEMS
    if isinstance(value, dict):
        return {key: (item, _snapshot(item) if deep else None) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [(item, _snapshot(item) if deep else None) for item in value]
    return copy(value)


def _restore(value: Any, snapshot: Any) -> None:
    """Restore the contents of a value in place, recursively."""
    if snapshot is None:
        return
    if isinstance(value, Tensor):
        if not torch.equal(value, snapshot):
            value.copy_(snapshot)
    elif isinstance(value, np.ndarray):
        value[...] = snapshot
    elif isinstance(value, random.Random):
        value.setstate(snapshot)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = snapshot
    elif isinstance(value, np.random.RandomState | torch.Generator):
        value.set_state(snapshot)
    elif isinstance(value, dict):
        value.clear()
        for key, (item, inner) in snapshot.items():
            _restore(item, inner)
            value[key] = item
    elif isinstance(value, list | tuple | deque):
        for item, inner in snapshot:
            _restore(item, inner)
        if not isinstance(value, tuple):
            value.clear()
            value.extend(item for item, _ in snapshot)
    elif isinstance(value, set):
        value.clear()
        value.update(snapshot)
