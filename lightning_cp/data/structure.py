# SPDX-License-Identifier: Apache-2.0
"""A batch of dicts, lists, tuples and data classes <-> its tensors, each with a path.

Knows containers, and nothing about what the tensors mean: that is `batch.py`'s business.
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
    """One value of a batch that holds no further tensors: a tensor, or anything else.

    Args:
        value: the value.
        names: the keys and field names on the way to it, outermost first; list indices are none.
        above: the paths of the containers that it lies in, outermost first, without the batch.
        is_listed: whether it lies in a list or tuple itself.
    """

    value: Any
    names: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    is_listed: bool = False

    @property
    def name(self) -> str | None:
        """Return the last name on the path, by which a tensor is known; None for no name."""
        return self.names[-1] if self.names else None

    @property
    def parent(self) -> str:
        """Return the path of the container that it lies in; '' is the batch itself."""
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
    """Say whether a batch of this type can be gone through."""
    return _parts(x) is not None


def holds_tensors(x: Any) -> bool:
    """Say whether this is a tensor, or a container with one in it."""
    return isinstance(x, Tensor) or any(holds_tensors(part) for _, _, part in _parts(x) or ())


def rebuild(
    batch: Any, values: Mapping[str, Any], *, added: Mapping[str, Mapping[str, Any]] | None = None
) -> Any:
    """Return a batch of the same structure with other values.

    Args:
        batch: the batch that was flattened; it stays as it is.
        values: the values by path. A key that is not there is left out; elsewhere it becomes None.
        added: keys and values for dicts, by the path of the dict.
    """
    if isinstance(batch, Tensor):
        return values[BARE]
    return _rebuilt(batch, "", values, added or {})


def _parts(x: Any) -> list[tuple[str, bool, Any]] | None:
    """Return what a container holds as (key, whether that is a name, value); None for others."""
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
        at = f"{path}.{key}" if path else key
        names = (*above.names, key) if is_name else above.names
        leaf = Leaf(value, names, above.above, is_listed=not is_name)
        if not isinstance(value, Tensor) and holds_tensors(value):
            yield from _walk(value, at, Leaf(None, names, (*above.above, at)))
        else:
            yield at, leaf


def _rebuilt(
    x: Any, path: str, values: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]
) -> Any:
    parts = {}
    for key, _, value in _parts(x) or ():
        at = f"{path}.{key}" if path else key
        if not isinstance(value, Tensor) and holds_tensors(value):
            parts[key] = _rebuilt(value, at, values, added)
        elif at in values:
            parts[key] = values[at]
    if isinstance(x, Mapping):
        kept = {key: parts[str(key)] for key in x if str(key) in parts}
        return _like(x, {**kept, **added.get(path, {})})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        fields_: list[Any] = [parts.get(name) for name in x._fields]
        return type(x)(*fields_)
    if isinstance(x, list | tuple):
        listed: list[Any] = [parts.get(str(index)) for index in range(len(x))]
        return type(x)(listed)
    return replace(x, **{f.name: parts.get(f.name) for f in fields(x) if f.init})


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type, where that can be had."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    copied = copy.copy(mapping)
    for key in list(copied):
        del copied[key]
    copied.update(items)
    return copied
