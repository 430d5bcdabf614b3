# SPDX-License-Identifier: Apache-2.0
"""Values that leave a step: their paths, their checksums, and whether two runs computed the same.

Knows tensors and containers; nothing about steps, models or Lightning.
"""

import hashlib
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_cp.step.leaves import parts_of, with_parts

_SAMPLED: Final = 1 << 20

_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)

# Largest difference of two runs that rounding explains, relative to the values: of a scalar, which
# is mostly a mean, and of each element of a tensor.
_SCALAR: Final[Mapping[torch.dtype, float]] = {torch.float64: 1e-9, torch.float32: 1e-4}
_ELEMENT: Final[Mapping[torch.dtype, float]] = {torch.float64: 1e-8, torch.float32: 1e-2}
_LOW_SCALAR, _LOW_ELEMENT, _LOW_SHARE = 2e-2, 0.3, 3e-2
# A loss is that much more exact than a scalar may be.
_LOSS: Final = 4
# In low precision, a few choices among nearly equal scores may differ.
_LOW_EQUAL: Final = 0.95


class OutputLeaf(NamedTuple):
    """One value of an output.

    Args:
        path: its path in the output, such as ``['logits']``; empty for the output itself.
        value: a tensor, an array, or anything without tensors inside.
        key: the last name of the path; empty if there is none.
        dim: the sequence dim, if the type of the output determines it.
    """

    path: str
    value: Any
    key: str = ""
    dim: int | None = None


OutputDims = Callable[[Any], Mapping[str, int]]
"""Returns the sequence dims of a model's output, by key; empty if not known."""


def _no_dims(_: Any) -> Mapping[str, int]:
    return {}


def leaves(
    output: Any, dims: OutputDims = _no_dims, path: str = "", key: str = "", dim: int | None = None
) -> Iterator[OutputLeaf]:
    """Yield the values of an output; a container without tensors is one value.

    Example:
        >>> [leaf.path for leaf in leaves({"logits": torch.zeros(1), "words": ["a", "b"]})]
        ["['logits']", "['words']"]
    """
    parts = parts_of(output)
    if parts is None or not any(_has_arrays(part) for part in parts.values()):
        if output is not None:
            yield OutputLeaf(path, output, key, dim)
        return
    known = dims(output)
    for name, part in parts.items():
        inner = f"{path}[{name!r}]"
        inner_dim = known.get(name, dim) if isinstance(name, str) else dim
        yield from leaves(part, dims, inner, name if isinstance(name, str) else key, inner_dim)


def rebuild(output: Any, changed: Mapping[str, Any], path: str = "") -> Any:
    """Return an output with other values at some paths; containers keep their types.

    Example:
        >>> rebuild({"a": torch.zeros(1), "b": 2}, {"['b']": 3})["b"]
        3
    """
    if path in changed:
        return changed[path]
    if not any(other.startswith(f"{path}[") for other in changed):
        return output
    parts = parts_of(output) or {}
    new = {name: rebuild(part, changed, f"{path}[{name!r}]") for name, part in parts.items()}
    if isinstance(output, Mapping) and not isinstance(output, MutableMapping):
        return type(output)(new)  # type: ignore[call-arg]
    return with_parts(output, new)


def _has_arrays(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return True
    parts = parts_of(value)
    return parts is not None and any(_has_arrays(part) for part in parts.values())


def as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, an array or a number as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return torch.as_tensor(np.asarray(value))
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64)
    return None


def describe(value: Any) -> str:
    """Return a short description of a value.

    Example:
        >>> describe(torch.zeros(2, 3)), describe(0.25), describe(["a"])
        ('[0, 0, 0, 0, ...] of shape (2, 3)', '0.25', "['a']")
    """
    x = as_tensor(value) if isinstance(value, Tensor | np.ndarray) else None
    if x is not None:
        if x.numel() == 1:
            return f"{x.item():.6g}"
        numbers = ", ".join(f"{number:.6g}" for number in x.flatten()[:4].tolist())
        more = ", ..." if x.numel() > 4 else ""
        return f"[{numbers}{more}] of shape {tuple(x.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def form(leaf: OutputLeaf) -> str:
    """Return the path, type and shape of a value: ranks compare these first."""
    value = leaf.value
    if isinstance(value, Tensor | np.ndarray):
        return f"{leaf.path} {value.dtype} {tuple(value.shape)}"
    return f"{leaf.path} {type(value).__name__}"


def digest(text: str) -> int:
    """Return an integer hash of a text, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def checksum(value: Any, device: torch.device) -> Tensor:
    """Return an integer hash of the bits of a value, as a tensor: nothing waits for the GPU."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // _SAMPLED)]
        # Not contiguous(), which keeps the stride of a single element.
        flat = flat.clone(memory_format=torch.contiguous_format)
        bits = flat.view(torch.uint8).to(torch.int64)
        weights = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
        return (bits * weights).sum().to(device)
    if isinstance(value, float):
        return torch.tensor(struct.unpack("q", struct.pack("d", value))[0], device=device)
    if isinstance(value, set | frozenset):  # its order depends on the process
        value = sorted(value, key=repr)
    try:
        data = pickle.dumps(value)
    except Exception as error:  # whatever a class of the user raises
        raise TypeError(
            f"a {type(value).__name__} cannot be compared between ranks ({error}). Return or log "
            "tensors, numbers, strings, and dicts and lists of them."
        ) from error
    number = int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")
    return torch.tensor(number, device=device)


def checksums(values: Sequence[Any], device: torch.device) -> Tensor:
    """Return one integer per value, int64 [n]."""
    if not values:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([checksum(value, device) for value in values])


def is_close(
    value: Any,
    reference: Any,
    precision: torch.dtype,
    *,
    is_loss: bool = False,
    floor: float = 0.0,
) -> bool:
    """Return whether two runs computed the same value, except for rounding.

    Args:
        value: the value under context parallelism.
        reference: the value on full sequences.
        precision: the lowest precision of the computation.
        is_loss: whether it is a mean over many tokens, computed in float32 at least, whose
            rounding errors mostly cancel.
        floor: a difference of two numbers that is rounding, whatever they are.
    """
    a, b = as_tensor(value), as_tensor(reference)
    if a is None or b is None:
        return _is_equal(value, reference, precision)
    if a.shape != b.shape:
        return False
    # Means are often computed in float32, whatever the precision of the model.
    types = {precision, a.dtype, b.dtype}
    low = any(dtype in _LOW_PRECISION for dtype in types)
    dtype = torch.float32 if torch.float32 in types else torch.float64
    is_real = a.is_floating_point() or b.is_floating_point()
    a, b = a.cpu().double(), b.cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    if b.numel() == 1:
        allowed = (_LOW_SCALAR if low else _SCALAR[dtype]) * b.abs().clamp(min=1e-2)
        if is_loss and not low:
            allowed = allowed / _LOSS
        share = _LOW_SHARE if low and bool(b.abs() <= 1) else 0.0
        near = (a - b).abs() <= allowed.clamp(min=max(share, floor))
    elif is_real:
        spread = b[b.isfinite()].std(correction=0).nan_to_num()
        limit, rounding = (_LOW_ELEMENT, _LOW_SCALAR) if low else (_ELEMENT[dtype], _SCALAR[dtype])
        near = (a - b).abs() <= limit * spread + rounding * b.abs()
    else:
        near = same
        if low and float(same.double().mean()) >= _LOW_EQUAL:
            return True
    return bool((same | (near & a.isfinite() & b.isfinite())).all())


def is_uniform(value: Any) -> bool:
    """Return whether a value is 0 or constant: many wrong computations would give the same.

    Example:
        >>> is_uniform(torch.ones(3)), is_uniform(0.0), is_uniform(0.5), is_uniform(["a", "b"])
        (True, True, False, False)
    """
    x = as_tensor(value)
    if x is None:
        parts = parts_of(value)
        return parts is not None and len(parts) > 1 and len(set(map(repr, parts.values()))) == 1
    if x.numel() < 2:
        return bool((x == 0).all() | x.isnan().all())
    return bool((x == x.reshape(-1)[0]).all())


def _is_equal(value: Any, reference: Any, precision: torch.dtype) -> bool:
    a, b = parts_of(value), parts_of(reference)
    if a is None or b is None:
        same_type = type(value) is type(reference)
        return same_type and pickle.dumps(value) == pickle.dumps(reference)
    return a.keys() == b.keys() and all(_is_plain_close(a[k], b[k], precision) for k in a)


def _is_plain_close(a: Any, b: Any, precision: torch.dtype) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, int | float) and is_close(float(a), b, precision)
    return _is_equal(a, b, precision)
