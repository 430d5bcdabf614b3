# SPDX-License-Identifier: Apache-2.0
"""Flattening of nested batches (dicts, lists, tuples, data classes) to paths, and rebuilding them.

Knows containers only; `batch.py` knows what the tensors mean.
"""

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

from torch import Tensor

BARE: Final = "batch"
"""The path of a batch that is one tensor."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a batch: a tensor, or anything without tensors inside.

    Args:
        value: the value.
        names: the keys and field names of its path, outermost first, without list indices.
        above: the paths of its containers, outermost first, without the batch itself.
        is_listed: whether it is an element of a list or tuple.
    """

    value: Any
    names: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    is_listed: bool = False

    @property
    def name(self) -> str | None:
        """Return the last name of the path; None if there is none."""
        return self.names[-1] if self.names else None

    @property
    def parent(self) -> str:
        """Return the path of its container; '' is the batch itself."""
        return self.above[-1] if self.above else ""


def flatten(batch: Any) -> dict[str, Leaf]:
    """Return every value of a batch by its path: keys, field names and indices, joined by dots.

    Containers without tensors are values themselves.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, 3)
        >>> list(flatten({"text": {"input_ids": x}, "pair": (x, x), "sizes": [1, 2]}))
        ['text.input_ids', 'pair.0', 'pair.1', 'sizes']
    """
    if isinstance(batch, Tensor):
        return {BARE: Leaf(batch)}
    leaves: dict[str, Leaf] = {}
    for path, leaf in _walk(batch, "", Leaf(None)):
        if path in leaves:
            raise ValueError(
                f"The batch holds two values with the path `{path}`: a key with a dot in it, and a "
                "container. Rename one of them."
            )
        leaves[path] = leaf
    return leaves


def is_container(x: Any) -> bool:
    """Return whether this is a container whose values can be found."""
    return _parts(x) is not None


def holds_tensors(x: Any) -> bool:
    """Return whether this is a tensor, or a container with one in it."""
    return isinstance(x, Tensor) or any(holds_tensors(part) for _, _, part in _parts(x) or ())


def rebuild(
    batch: Any, values: Mapping[str, Any], *, added: Mapping[str, Mapping[str, Any]] | None = None
) -> Any:
    """Return a batch of the same structure with other values.

    Args:
        batch: the batch that was flattened; it is not changed.
        values: the values by path. Without a value, a key is left out; other places become None.
        added: keys and values for dicts, by the path of the dict.
    """
    if isinstance(batch, Tensor):
        return values[BARE]
    return _rebuilt(batch, "", values, added or {})


def _parts(x: Any) -> list[tuple[str, bool, Any]] | None:
    """Return the (key, whether that is a name, value) of a container; None for other objects."""
    if isinstance(x, Mapping):
        return [(str(key), True, value) for key, value in x.items()]
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return [(name, True, value) for name, value in zip(x._fields, x, strict=True)]
    if isinstance(x, list | tuple):
        return [(str(index), False, value) for index, value in enumerate(x)]
    if is_dataclass(x) and not isinstance(x, type):
        return [(f.name, True, getattr(x, f.name)) for f in fields(x) if f.init]
    return None


def _walk(x: Any, path: str, above: Leaf) -> Iterator[tuple[str, Leaf]]:
    for key, is_name, value in _parts(x) or ():
        inner = f"{path}.{key}" if path else key
        names = (*above.names, key) if is_name else above.names
        leaf = Leaf(value, names, above.above, is_listed=not is_name)
        if not isinstance(value, Tensor) and holds_tensors(value):
            yield from _walk(value, inner, Leaf(None, names, (*above.above, inner)))
        else:
            yield inner, leaf


def _rebuilt(
    x: Any, path: str, values: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]
) -> Any:
    parts = {}
    for key, _, value in _parts(x) or ():
        inner = f"{path}.{key}" if path else key
        if not isinstance(value, Tensor) and holds_tensors(value):
            parts[key] = _rebuilt(value, inner, values, added)
        elif inner in values:
            parts[key] = values[inner]
    if isinstance(x, Mapping):
        items = {key: parts[str(key)] for key in x if str(key) in parts}
        return _like(x, {**items, **added.get(path, {})})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        fields_: list[Any] = [parts.get(name) for name in x._fields]
        return type(x)(*fields_)
    if isinstance(x, list | tuple):
        listed: list[Any] = [parts.get(str(index)) for index in range(len(x))]
        return type(x)(listed)
    return replace(x, **{f.name: parts.get(f.name) for f in fields(x) if f.init})


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type if possible, else a dict."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    copied = copy.copy(mapping)
    for key in list(copied):
        del copied[key]
    copied.update(items)
    return copied
