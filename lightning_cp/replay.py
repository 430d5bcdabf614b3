# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for iterators that a run must leave where they are.

Iterators of Python that can be copied exactly lend the run a copy. Of generators and others, what
they give in the run is kept, and given again with the effects of drawing it: random states, and
attributes that it has rebound. Once that is used up, the iterator itself comes back.
"""

import itertools
import random
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from types import BuiltinMethodType, GeneratorType, MethodWrapperType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_cp.whose_code import is_of_package

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
_SENT: Final = (int, float, str, bytes, type(None))


class ReplayError(RuntimeError):
    """A generator was sent something else than in the run that is to leave no trace."""


# ---------------------------------------------------------------- random states


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return (kind, bytes(memoryview(keys)), *rest)  # type: ignore[arg-type]


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    kind, keys, *rest = state
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))


def _torch_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _set_torch_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_GETTERS: Final = (random.getstate, _numpy_state, _torch_state)
_SETTERS: Final[tuple[Callable[[Any], None], ...]] = (
    random.setstate,
    _set_numpy_state,
    _set_torch_state,
)


def _random_states() -> list[Any]:
    return [get() for get in _GETTERS]


def _set_random_states(states: list[Any]) -> None:
    for put, state in zip(_SETTERS, states, strict=True):
        put(state)


# ---------------------------------------------------------------- what was drawn


class _Slot(NamedTuple):
    """An attribute or global that drawing has rebound."""

    items: dict[str, Any]
    name: str
    before: Any
    after: Any


class _Drawn(NamedTuple):
    """What an iterator gave, and what drawing it has changed."""

    sent: Any
    item: Any
    before: list[Any]
    after: list[Any]
    slots: list[_Slot]


class Tape(Iterator[Any]):
    """What an iterator gave in a run that must leave no trace.

    Args:
        source: the iterator.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.kept: deque[_Drawn] = deque()
        self.holders: list[Callable[[], None]] = []
        """Put the source back where the stand-in is, once nothing is kept."""
        self._run: StandIns | None = None
        self._at = 0

    def start(self, run: "StandIns") -> None:
        """Keep what is drawn from now on, and give again what is kept."""
        self._run, self._at = run, 0

    def stop(self) -> None:
        """Give again what is kept, once."""
        self._run = None

    def __next__(self) -> Any:
        return self.draw(None)

    def draw(self, sent: Any) -> Any:
        """Return the next item; the source is drawn if none is kept."""
        run = self._run
        if run is not None and self._at == len(self.kept):
            self.kept.append(self._record(run, sent))
        elif run is not None or self.kept:
            drawn = self.kept[0 if run is None else self._at]
            _check_sent(drawn.sent, sent)
            _repeat(drawn, None if run is None else run.outside)
        else:
            return self._pull(sent)
        if run is None:
            item = self.kept.popleft().item
            if not self.kept:
                self._put_back()
            return item
        self._at += 1
        return self.kept[self._at - 1].item

    def _pull(self, sent: Any) -> Any:
        return next(self.source) if sent is None else self.source.send(sent)  # type: ignore[attr-defined]

    def _record(self, run: "StandIns", sent: Any) -> _Drawn:
        watched = [*_watched(self.source)]
        found = [dict(items) for items in watched]
        inside = _random_states()
        before = inside if run.outside is None else run.outside
        if run.outside is not None:
            _set_random_states(run.outside)
        try:
            item = self._pull(sent)
        finally:
            after = _random_states()
            if run.outside is not None:
                run.outside = after
                _set_random_states(inside)
        slots = [
            _Slot(items, name, old.get(name), value)
            for items, old in zip(watched, found, strict=True)
            for name, value in items.items()
            if old.get(name) is not value
        ]
        return _Drawn(sent, item, before, after, slots)

    def _put_back(self) -> None:
        for refresh in self.holders:
            refresh()
        self.holders.clear()


def _repeat(drawn: _Drawn, outside: list[Any] | None) -> None:
    """Change what drawing has changed, where it is as it was before."""
    for n, (before, after) in enumerate(zip(drawn.before, drawn.after, strict=True)):
        if before != after and outside is not None:
            outside[n] = after if outside[n] == before else outside[n]
        elif before != after and _GETTERS[n]() == before:
            _SETTERS[n](after)
    for slot in drawn.slots:
        now = slot.items.get(slot.name)
        if now is slot.before or (isinstance(now, _SENT) and now == slot.before):
            slot.items[slot.name] = slot.after


def _check_sent(before: Any, now: Any) -> None:
    if before is not now and not (isinstance(now, _SENT) and before == now):
        raise ReplayError(
            "A step sends a generator something else than it did in the run that compares it with "
            "one device: what the generator gave there cannot be used. verify_steps=False omits "
            "the comparison."
        )


def _watched(source: Any) -> Iterator[dict[str, Any]]:
    """Yield the dicts of attributes that drawing may rebind names in."""
    frame = getattr(source, "gi_frame", None)
    fetcher = getattr(source, "_dataset_fetcher", None)
    values = [] if frame is None else [*frame.f_locals.values()]
    for x in [*values, getattr(fetcher, "dataset", None)]:
        if hasattr(x, "__dict__") and not isinstance(x, type | ModuleType | types.FunctionType):
            yield vars(x)
    if frame is not None:
        yield frame.f_globals


# ---------------------------------------------------------------- stand-ins


class _Replayed(Iterator[Any]):
    """Stands in for an iterator that is no generator."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __next__(self) -> Any:
        return self._tape.draw(None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tape":  # copies ask before there is a source
            raise AttributeError(name)
        return getattr(self._tape.source, name)


def _generate(tape: Tape) -> Generator[Any, Any, Any]:
    sent = yield
    while True:
        try:
            item = tape.draw(sent)
        except StopIteration as end:
            return end.value
        sent = yield item


_tapes = weakref.WeakKeyDictionary[Any, Tape]()
"""The tapes of stand-ins that are alive."""
_of_sources = weakref.WeakValueDictionary[int, Tape]()


class StandIns:
    """The iterators that one run draws from instead of those it must leave where they are."""

    def __init__(self) -> None:
        self.outside: list[Any] | None = None
        """The random states of iterators, where the run has a seed of its own."""
        self._found = _random_states()
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._lent: dict[int, tuple[Tape, Any]] = {}
        self._settled: dict[int, Any] = {}

    def lend(self, value: Any) -> Any:
        """Return what stands for a value in the run: the value, if no iterator is in it."""
        return _swapped(value, self._stand_in)

    def settle(self, value: Any, refresh: Callable[[], None]) -> Any:
        """Return what stands for a value after the run.

        Args:
            value: as it was found.
            refresh: puts what `returned` gives for it where it was found.
        """

        def swap(it: Any) -> Any:
            tape = _tape_of(it)
            if tape is None or not tape.kept:
                return it if tape is None else tape.source
            tape.holders.append(refresh)
            if id(tape) not in self._settled:
                self._settled[id(tape)] = _build(tape)
            return self._settled[id(tape)]

        return _swapped(value, swap) if self._lent else value

    @property
    def are_used(self) -> bool:
        """Return whether iterators that have no copy were met."""
        return bool(self._lent)

    def reseed(self, seed: int) -> None:
        """Seed torch for the run; iterators draw with the random states from before it."""
        if self.outside is None:
            self.outside = self._found
        torch.manual_seed(seed)

    def stop(self) -> None:
        """Say that the run is over."""
        for tape, _ in self._lent.values():
            tape.stop()

    def _stand_in(self, it: Any) -> Any:
        tape = _tape_of(it)
        if tape is None:
            if (copy := self._copied(it)) is not None:
                return copy
            if not _is_plain(type(it)):
                return it
            tape = _of_sources[id(it)] = Tape(it)
        if id(tape) not in self._lent:
            self._lent[id(tape)] = tape, _build(tape)
            tape.start(self)
        return self._lent[id(tape)][1]

    def _copied(self, it: Any) -> Any:
        """Return an exact copy; None if there is none: it may draw from one that has none."""
        if id(it) in self._copies:
            return self._copies[id(it)][1]
        if type(it) not in _COPIED:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python plans to drop it
            try:
                function, arguments, *state = it.__reduce__()
                copy = function(*self._parts(arguments))
                if state:  # the list of what `cycle` has given grows
                    copy.__setstate__(self._parts(state, is_state=True)[0])
            except TypeError:
                return None
        self._copies[id(it)] = it, copy
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


def returned(value: Any) -> Any:
    """Return a value with the iterators themselves where stand-ins have nothing to give again."""

    def swap(it: Any) -> Any:
        tape = _tape_of(it)
        return it if tape is None or tape.kept else tape.source

    return _swapped(value, swap)


def _build(tape: Tape) -> Any:
    """Return a new stand-in: a generator ends for good when its items do."""
    if isinstance(tape.source, GeneratorType):
        stand_in: Any = _generate(tape)
        stand_in.__name__, stand_in.__qualname__ = (
            tape.source.__name__,
            tape.source.__qualname__,
        )
        next(stand_in)
    else:
        stand_in = _Replayed(tape)
    _tapes[stand_in] = tape
    return stand_in


def _tape_of(it: Any) -> Tape | None:
    if isinstance(it, GeneratorType | _Replayed) and it in _tapes:
        return _tapes[it]
    tape = _of_sources.get(id(it))
    return tape if tape is not None and tape.source is it else None


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
