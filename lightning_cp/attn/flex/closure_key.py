# SPDX-License-Identifier: Apache-2.0
"""A cache key for a Python function: its code and everything it closes over.

Two functions compute the same if their code is equal, and everything that they captured: by
closure, defaults, or globals of their module. Pure Python: knows nothing of attention.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_cp.private.modules import tensor_version

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class _Mutable(Exception):
    """A captured value may change unnoticed."""


def closure_key(fn: Callable[..., Any]) -> tuple[object, list[Tensor]] | None:
    """Return a key that is equal for functions that compute the same, and the captured tensors.

    The key holds the ids of the tensors: keep them alive as long as the key. None if the function
    captured something that can change unnoticed (an object, a list).

    Example:
        >>> def build(width):
        ...     return lambda b, h, q, k: q - k < width
        >>> closure_key(build(4)) == closure_key(build(4)) != closure_key(build(5))
        True
    """
    tensors: list[Tensor] = []
    try:
        return _identity(fn, tensors, ()), tensors
    except _Mutable:
        return None


def _identity(x: object, tensors: list[Tensor], above: tuple[object, ...]) -> object:
    if type(x) in _PLAIN:
        return type(x), x
    if isinstance(x, Tensor):
        version = tensor_version(x)
        if version is None:
            raise _Mutable
        tensors.append(x)
        return Tensor, id(x), version
    if any(x is outer for outer in above):  # it calls itself
        return "above"
    parts: Iterator[object]
    if isinstance(x, FunctionType):
        parts = _parts(x)
    elif isinstance(x, partial):
        parts = iter((x.func, x.args, *x.keywords.items()))
    elif isinstance(x, tuple):
        parts = iter(x)
    elif isinstance(x, ModuleType | BuiltinFunctionType | type):
        return type(x), id(x)
    else:
        raise _Mutable
    kind = x.__code__ if isinstance(x, FunctionType) else type(x)
    return kind, tuple(_identity(part, tensors, (*above, x)) for part in parts)


def _parts(fn: FunctionType) -> Iterator[object]:
    """Yield everything that a function captured."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            raise _Mutable from None
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).items()
    for name in sorted(_names(fn.__code__)):
        if name in fn.__globals__:
            yield fn.__globals__[name]


def _names(code: CodeType) -> set[str]:
    """Return the names that code may look up in globals, including nested functions."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)
