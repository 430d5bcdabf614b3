# SPDX-License-Identifier: Apache-2.0
"""Flattening of nested batches (dicts, lists, tuples, data classes), and rebuilding them.

Knows containers only; `batch.py` knows what the tensors mean.
"""

import copy
from collections import Counter
from collections.abc import Container, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, NamedTuple

from torch import Tensor

BARE: Final = "batch"
"""The path of a batch that is one tensor."""


class BatchLeaf(NamedTuple):
    """One value of a batch: a tensor, or anything without tensors inside.

    Args:
        path: keys, field names and indices, joined by dots.
        value: the value.
        names: the keys and field names of its path, outermost first, without list indices.
        above: the paths of its containers, outermost first, without the batch itself.
        is_listed: whether it is an element of a list or tuple.
        role: the name that tells what it means, at first the last of ``names``; None for none.
        dim: the sequence dim, if it is sharded; None for others.
    """

    path: str
    value: Any
    names: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    is_listed: bool = False
    role: str | None = None
    dim: int | None = None

    @property
    def parent(self) -> str:
        """Return the path of its container; '' is the batch itself."""
        return self.above[-1] if self.above else ""


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A batch taken apart: its values, in their order, and how to put others in their places.

    Args:
        batch: the batch, which is not changed.
        leaves: its values.
    """

    batch: Any = None
    leaves: tuple[BatchLeaf, ...] = ()

    @property
    def tensors(self) -> list[BatchLeaf]:
        """Return the values that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf.value, Tensor)]

    def named(self, name: str) -> list[Any]:
        """Return all values of a name.

        Example:
            >>> import torch
            >>> flatten({"text": {"labels": 1, "input_ids": torch.zeros(1, 2)}}).named("labels")
            [1]
        """
        return [leaf.value for leaf in self.leaves if leaf.role == name]

    def rebuild(
        self, values: Mapping[str, Any], *, added: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Any:
        """Return a batch of the same structure with other values.

        Args:
            values: the values by path. Without one, a key is left out; other places become None.
            added: keys and values for dicts, by the path of the dict.
        """
        if isinstance(self.batch, Tensor):
            return values[BARE]
        paths = {leaf.path for leaf in self.leaves}
        return _rebuilt(self.batch, "", paths, values, added or {})


def flatten(batch: Any) -> Flat:
    """Take a batch apart into its values. Containers without tensors are values themselves.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, 3)
        >>> flat = flatten({"text": {"input_ids": x}, "pair": (x, x), "sizes": [1, 2]})
        >>> [leaf.path for leaf in flat.leaves]
        ['text.input_ids', 'pair.0', 'pair.1', 'sizes']
    """
    if isinstance(batch, Tensor):
        return Flat(batch, (BatchLeaf(BARE, batch),))
    leaves = tuple(_walk(batch, BatchLeaf("", None)))
    paths = Counter(leaf.path for leaf in leaves)
    for path, count in paths.items():
        if count > 1:
            raise ValueError(
                f"The batch holds two values with the path `{path}`: a key with a dot in it, and a "
                "container. Rename one of them."
            )
    return Flat(batch, leaves)


def parts_of(x: Any) -> dict[Any, Any] | None:
    """Return the values of a container, by key, index or field; None for other objects."""
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: getattr(x, f.name) for f in fields(x) if f.init}
    return None


def with_parts(x: Any, values: Mapping[Any, Any]) -> Any:
    """Return a container of the same type with other values; mappings may lose or gain keys.

    A mapping that cannot be changed becomes a dict.
    """
    if isinstance(x, MutableMapping) and type(x) is not dict:
        copied = copy.copy(x)
        for key in [key for key in copied if key not in values]:  # ModelOutput forbids deletion
            del copied[key]
        for key, value in values.items():
            copied[key] = value
        return copied
    if isinstance(x, Mapping):
        return dict(values)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*values.values())
    if isinstance(x, list | tuple):
        return type(x)(values.values())
    return replace(x, **values)


def holds_tensors(x: Any) -> bool:
    """Return whether this is a tensor, or a container with one in it."""
    return isinstance(x, Tensor) or any(map(holds_tensors, (parts_of(x) or {}).values()))


def _name_of(x: Any, key: Any) -> tuple[str, bool]:
    """Return the path element of a key, and whether it is a name, not an index."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return x._fields[key], True
    return str(key), not isinstance(x, list | tuple)


def _walk(x: Any, above: BatchLeaf) -> Iterator[BatchLeaf]:
    for key, value in (parts_of(x) or {}).items():
        name, is_name = _name_of(x, key)
        path = f"{above.path}.{name}" if above.path else name
        names = (*above.names, name) if is_name else above.names
        if not isinstance(value, Tensor) and holds_tensors(value):
            yield from _walk(value, BatchLeaf(path, None, names, (*above.above, path)))
        else:
            role = names[-1] if names else None
            yield BatchLeaf(path, value, names, above.above, not is_name, role)


def _rebuilt(
    x: Any,
    path: str,
    leaves: Container[str],
    values: Mapping[str, Any],
    added: Mapping[str, Mapping[str, Any]],
) -> Any:
    is_mapping, parts = isinstance(x, Mapping), {}
    for key, value in (parts_of(x) or {}).items():
        name, _ = _name_of(x, key)
        inner = f"{path}.{name}" if path else name
        if inner not in leaves:
            parts[key] = _rebuilt(value, inner, leaves, values, added)
        elif inner in values or not is_mapping:
            parts[key] = values.get(inner)
    return with_parts(x, {**parts, **(added.get(path, {}) if is_mapping else {})})
