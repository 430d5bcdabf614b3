# SPDX-License-Identifier: Apache-2.0
"""Outputs of models that lack fields which the stock model returns: reading one says how to get it.

``hasattr`` and ``getattr(output, "logits", None)`` answer as for a field that an output never had.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers.utils.generic import ModelOutput


class LeftOutError(AttributeError, KeyError, IndexError):
    """A field was read that is not in the output."""

    __str__ = Exception.__str__  # that of KeyError puts the message into quotes


def leave_out(output: ModelOutput, names: Sequence[str]) -> Any:
    """Return an output without some fields of its type; reading them raises.

    Args:
        output: of a model.
        names: the fields that are left out. One that its type does not have is ignored.
    """
    known = [field.name for field in fields(output)]  # type: ignore[arg-type]
    missing = tuple(name for name in known if name in names)
    kept = {name: value for name, value in output.items() if name not in missing}
    return _type_without(type(output), missing)(**kept)


@functools.cache
def _type_without(cls: type[ModelOutput], names: tuple[str, ...]) -> Any:
    """Return a subclass of an output's type that lacks fields; outputs of it can be rebuilt."""
    if not names:
        return cls
    members: dict[str, Any] = {name: _field(name) for name in names}
    members |= {"__module__": __name__, "__qualname__": cls.__name__, "_names": names, "_cls": cls}
    # FSDP2 and others read the fields of an output to find its tensors.
    declared = cls.__dataclass_fields__  # type: ignore[attr-defined]
    members["__dataclass_fields__"] = {k: v for k, v in declared.items() if k not in names}
    return type(cls.__name__, (_Without, cls), members)


class _Without:
    """What outputs that lack fields have in common; before the output's type in their bases."""

    _names: tuple[str, ...]
    _cls: type[ModelOutput]

    def __getitem__(self: Any, key: Any) -> Any:
        if isinstance(key, str):
            return getattr(self, key) if key in self._names else self._cls.__getitem__(self, key)
        declared: Any = self._cls
        order = [f.name for f in fields(declared) if f.name in self or f.name in self._names]
        for name in [order[key]] if isinstance(key, int) else order[key]:
            getattr(self, name)  # it may have been left out
        return self._cls.__getitem__(self, key)

    def __repr__(self: Any) -> str:
        return f"{self._cls.__name__}({dict(self)!r})"

    def __reduce__(self: Any) -> Any:
        return _rebuild, (self._cls, self._names, dict(self))


def _rebuild(cls: type[ModelOutput], names: tuple[str, ...], kept: dict[str, Any]) -> Any:
    return _type_without(cls, names)(**kept)


def _field(name: str) -> property:
    """Return an attribute that raises unless it was set."""

    def get(output: Any) -> Any:
        value = vars(output).get(name)
        if value is None:
            raise LeftOutError(
                f"`{name}` of this {type(output).__name__}: under context parallelism a model that "
                "gets labels returns none in training, nor where only losses are evaluated. In "
                f"full they take batch x length x vocabulary numbers on every rank; if the loss "
                "needs them: handle = context_parallel(trainer, size=...), then "
                "handle.models[0].logits = 'always' (of shard_in_forward(): logits='always'). "
                "Log-probabilities of labels without them: model(..., token_logp=True)."
            )
        return value

    def put(output: Any, value: Any) -> None:
        vars(output)[name] = value
        if value is not None:
            OrderedDict.__setitem__(output, name, value)

    return property(get, put)
