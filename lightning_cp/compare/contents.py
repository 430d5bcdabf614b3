# SPDX-License-Identifier: Apache-2.0
"""The contents of values: read, compared and put back past what classes of users override."""

import array
import io
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

BASES: Final = (OrderedDict, dict, list, deque, set, bytearray, tuple)


def _fill_array(x: "array.array[Any]", content: bytes) -> None:
    del x[:]
    x.frombytes(content)


STATES: Final[dict[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]]] = {
    random.Random: (lambda x: x.getstate(), lambda x, state: x.setstate(state)),
    np.random.RandomState: (lambda x: x.get_state(), lambda x, state: x.set_state(state)),
    torch.Generator: (lambda x: x.get_state(), lambda x, state: x.set_state(state)),
    np.random.BitGenerator: (
        lambda x: deepcopy(x.state),
        lambda x, state: setattr(x, "state", state),
    ),
    np.random.SeedSequence: (
        lambda x: [x.state["n_children_spawned"], x.__reduce__()],
        lambda x, state: x.__setstate_cython__(state[1][2]),
    ),
    (io.StringIO, io.BytesIO): (
        lambda x: x.__getstate__()[:-1],
        lambda x, state: x.__setstate__((*state, None)),
    ),
    array.array: (lambda x: x.tobytes(), _fill_array),
}


def _base(kind: Any) -> Any:
    return next(base for base in BASES if issubclass(kind, base))


def length(value: Any) -> int:
    """Return the length of a container, past what a user's class overrides."""
    return int(_base(type(value)).__len__(value))


def items_of(value: Any) -> list[Any]:
    """Return the items of a container, in pairs with their keys those of a dict."""
    base = _base(type(value))
    return [*(base.items(value) if isinstance(value, dict) else base.__iter__(value))]


def are_same(now: list[Any], before: list[Any]) -> bool:
    """Return whether two lists hold the same objects, in pairs or alone."""
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(
        a is b or (type(a) is tuple and len(a) == 2 and a[0] is b[0] and a[1] is b[1])
        for a, b in zip(now, before, strict=True)
    )


def fill(value: Any, items: list[Any]) -> None:
    """Replace the items of a container, past what a user's class overrides."""
    base = _base(type(value))
    base.clear(value)
    if isinstance(value, dict):
        for key, item in items:
            base.__setitem__(value, key, item)
    else:
        (base.update if base is set else base.extend)(value, items)


def is_table(kind: type) -> bool:
    """Return whether objects of a class are frames or series of pandas."""
    return hasattr(kind, "loc") and any(
        base.__module__.startswith("pandas.") for base in kind.__mro__
    )


def is_strided(x: Tensor) -> bool:
    """Return whether a tensor lies in memory as a grid."""
    return x.layout == torch.strided and not x.is_nested and not x.is_quantized


def is_same_memory(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors show the same part of the same memory."""
    try:
        is_same = x.data_ptr() == other.data_ptr()
    except RuntimeError:  # it has none of its own
        return True
    return is_same and x.shape == other.shape and x.stride() == other.stride()


def bits_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor: as one may compare them, whatever they mean."""
    return x.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def array_bits(x: Any) -> Any:
    """Return the bytes of an array."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def checksum(x: Tensor) -> Any:
    """Return the sum of the bytes of a tensor, and some of them; None where there are none."""
    try:
        bits = bits_of(x)
        some = bits[:: max(bits.numel() // 1024, 1)].tolist()
        is_aligned = bits.numel() % 8 == 0 and bits.storage_offset() % 8 == 0
        return (bits.view(torch.int64) if is_aligned else bits).sum().item(), some
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def is_equal_state(now: Any, before: Any) -> bool:
    """Return whether two states are known to be equal."""
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # arrays
        return False
