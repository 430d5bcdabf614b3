# SPDX-License-Identifier: Apache-2.0
"""What a function computes with: so that what was worked out for it can be used again, or not.

Two calls of a function give the same if its code is the same, and everything that it captured: by
its closure, its defaults, or its module's globals. Pure Python: knows nothing of attention.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_cp.torch_private import tensor_version

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class _Unknown(Exception):
    """Something was captured that may change without being seen."""


def identity_of(fn: Callable[..., Any]) -> tuple[object, list[Tensor]] | None:
    """Return a key that is equal for functions that compute the same, and the tensors behind it.

    The key holds the tensors by their ids: whoever keeps it keeps them. None where the function
    captured something (an object, a list that may grow) that can change without being seen.

    Example:
        >>> def build(width):
        ...     return lambda b, h, q, k: q - k < width
        >>> identity_of(build(4)) == identity_of(build(4)) != identity_of(build(5))
        True
    """
    tensors: list[Tensor] = []
    try:
        return _identity(fn, tensors, ()), tensors
    except _Unknown:
        return None


def _identity(x: object, tensors: list[Tensor], above: tuple[object, ...]) -> object:
    if type(x) in _PLAIN:
        return type(x), x
    if isinstance(x, Tensor):
        version = tensor_version(x)
        if version is None:
            raise _Unknown
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
        raise _Unknown
    own = x.__code__ if isinstance(x, FunctionType) else type(x)
    return own, tuple(_identity(part, tensors, (*above, x)) for part in parts)


def _parts(fn: FunctionType) -> Iterator[object]:
    """Yield what a function captured."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            raise _Unknown from None
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).items()
    for name in sorted(_names(fn.__code__)):
        if name in fn.__globals__:
            yield fn.__globals__[name]


def _names(code: CodeType) -> set[str]:
    """Return the names that a code may look up among globals, also in functions inside it."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)
