# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for iterators that a run must leave where they are.

Iterators of Python that can be copied exactly lend the run a copy. Generators and others have no
copy: a run that draws from them raises, before it has drawn anything.
"""

import itertools
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial
from types import BuiltinMethodType, GeneratorType, MethodWrapperType
from typing import Any, Final

from lightning_cp.compare.whose_code import is_of_package

_SOURCES: Final[tuple[Any, ...]] = (
    (),
    [],
    "",
    "é",
    b"",
    bytearray(),
    range(0),
    range(1 << 70),
    set(),
)
_COPIED: Final = frozenset(
    (
        *(type(iter(x)) for x in (*_SOURCES, {}, {}.values(), {}.items())),
        *(type(reversed([])), type(reversed({})), enumerate, map, filter, zip),
        *(itertools.count, itertools.cycle, itertools.repeat, itertools.chain, itertools.islice),
        *(itertools.accumulate, itertools.compress, itertools.takewhile, itertools.dropwhile),
        *(itertools.product, itertools.permutations, itertools.combinations, itertools.starmap),
        itertools.zip_longest,
    )
)
_PUBLIC: Final = {name for name in dir(GeneratorType) if name[0] != "_"} | {"dialect", "line_num"}
"""What iterators have beside their position that cannot start them anew."""

_ATOMS: Final = frozenset((int, float, complex, str, bytes, bool, type(None)))


class NotComparableError(RuntimeError):
    """A step cannot run for a comparison: it draws from an iterator that has no copy, for example.

    It has changed nothing that is not restored.
    """


class StandIns:
    """The iterators that one run draws from instead of those it must leave where they are."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[Any, Any]] = {}

    def lend(self, value: Any) -> Any:
        """Return what stands for a value in the run: the value, if no iterator is in it."""
        return _swapped(value, self._stand_in)

    def _stand_in(self, it: Any) -> Any:
        copy = self._copied(it)
        if copy is not None or not _is_plain(type(it)):
            return it if copy is None else copy
        if id(it) not in self._lent:
            refuses = _refuse_to_generate(it) if isinstance(it, GeneratorType) else _Refusing(it)
            self._lent[id(it)] = it, refuses
        return self._lent[id(it)][1]

    def _copied(self, it: Any) -> Any:
        """Return an exact copy; None if there is none: it may draw from one that has none."""
        if type(it) not in _COPIED:
            return None
        if id(it) in self._lent:
            return self._lent[id(it)][1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python plans to drop it
            try:
                function, arguments, *state = it.__reduce__()
                copy = function(*self._parts(arguments))
                if state:  # the list of what `cycle` has given grows
                    copy.__setstate__(self._parts(state, is_state=True)[0])
            except TypeError:
                return None
        self._lent[id(it)] = it, copy
        return copy

    def _parts(self, values: Any, *, is_state: bool = False) -> list[Any]:
        """Return what a copy is built from, with copies of the iterators in it."""
        parts = list[Any]()
        for x in values:
            if type(x) is tuple:
                parts.append(tuple(self._parts(x, is_state=is_state)))
            elif type(x) is list and is_state:
                parts.append([*x])
            elif not isinstance(x, Iterator):
                parts.append(x)
            elif (copy := self._copied(x)) is not None:
                parts.append(copy)
            else:
                raise TypeError(f"{type(x).__name__} has no exact copy")
        return parts


class _Refusing(Iterator[Any]):
    """Stands in for an iterator that is no generator."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __next__(self) -> Any:
        raise _drawn(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":  # copies ask before there is a source
            raise AttributeError(name)
        return getattr(self._source, name)


def _refuse_to_generate(source: Any) -> Generator[Any, Any, Any]:
    def generate() -> Generator[Any, Any, Any]:
        yield
        raise _drawn(source)

    stand_in = generate()
    next(stand_in)  # what is sent to it next raises, too
    return stand_in


def _drawn(source: Any) -> NotComparableError:
    name = getattr(source, "__qualname__", type(source).__qualname__)
    return NotComparableError(
        f"The step draws from `{name}`, an iterator that cannot be set back, so that it cannot run "
        "for a comparison with one device. Let its batch hold what it needs (a CombinedLoader in "
        "Lightning, the data set or collator of a Trainer), or draw in a hook before the step. "
        "verify=False omits the comparison."
    )


def _is_plain(kind: type) -> bool:
    """Return whether iterators of a class of Python or of a package do nothing but iterate.

    A cursor of a data base is started anew by its methods, and a file can seek.
    """
    return is_of_package(kind) and {name for name in dir(kind) if name[0] != "_"} <= _PUBLIC


def _swapped(value: Any, swap: Callable[[Any], Any]) -> Any:
    """Return a value with other iterators in it: in tuples, partials and bound methods, too."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if hasattr(kind, "__next__"):
        return swap(value)
    if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make")):
        parts = [_swapped(x, swap) for x in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return tuple(parts) if kind is tuple else kind._make(parts)
    if kind is partial:
        function, arguments = value.func, (value.args, *value.keywords.values())
        parts = [_swapped(x, swap) for x in (function, *arguments)]
        if all(a is b for a, b in zip(parts, (function, *arguments), strict=True)):
            return value
        keywords = dict(zip(value.keywords, parts[2:], strict=True))
        return partial(parts[0], *parts[1], **keywords)
    if kind in (BuiltinMethodType, MethodWrapperType) and hasattr(type(value.__self__), "__next__"):
        owner = swap(value.__self__)
        return value if owner is value.__self__ else getattr(owner, value.__name__)
    return value
