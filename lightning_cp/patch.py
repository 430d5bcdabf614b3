# SPDX-License-Identifier: Apache-2.0
"""One attribute of an object that is not ours, replaced until `Patch.remove`.

What holds for every patch:

- Only the object itself changes. What its class has is found again when the patch is removed, also
  if the class was swapped in between (`fully_shard` does).
- Patches on one attribute are removed in any order; the others stay in force.
- Who has wrapped a patched method keeps the wrapper: our method below it then calls what was there
  before the patch. A value that is no method is put back in any case.
- A copy of the object (`copy.deepcopy`, pickle) has patches of its own.
- A `Method` rebinds like a method of a class, so that libraries that wrap a forward by its function
  and bind it again (accelerate) end with the same call.

Copies of functions with other globals, and hooks of modules, are no patches.
"""

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from importlib import metadata
from types import MethodType
from typing import Any, Final

_PATCHES: Final = "_lightning_cp_patches"
"""The attribute of an owner that holds its patches, by name; those that came last stand last."""

_numbers = itertools.count()


class Patch:
    """An attribute of an object, replaced.

    Args:
        owner: an instance, a class or a module of Python.
        name: of the attribute.
        value: the new one.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.previous = self._current()
        self.is_active = True
        patches: dict[str, list[Patch]] = vars(owner).get(_PATCHES) or {}
        patches.setdefault(name, []).append(self)
        setattr(owner, _PATCHES, patches)
        setattr(owner, name, value)

    def remove(self) -> None:
        """Put back what was there before; a second call changes nothing."""
        if not self.is_active:
            return
        self.is_active = False
        patches: dict[str, list[Patch]] = vars(self.owner)[_PATCHES]
        others = patches[self.name]
        index = others.index(self)
        del others[index]
        over = others[index] if index < len(others) else None
        if over is None:
            if self._is_value(*self._current()) or not isinstance(self.value, Method):
                self._put_back()
        elif self._is_value(*over.previous):  # it stays in force, over what was there before
            over.previous = self.previous
        if not others:
            del patches[self.name]
        if not patches:
            delattr(self.owner, _PATCHES)

    @property
    def stock(self) -> Callable[..., Any]:
        """Return the method that was there before: another object's, or that of the class."""
        if self.previous:
            return self.previous[0]  # type: ignore[no-any-return]
        # Not a bound method: the compiler would look it up on the owner and find the patch.
        return partial(getattr(type(self.owner), self.name), self.owner)

    def _current(self) -> tuple[Any, ...]:
        """Return what the owner itself has, or nothing."""
        existed = self.name in vars(self.owner)
        return (vars(self.owner)[self.name],) if existed else ()

    def _is_value(self, *current_values: Any) -> bool:
        """Return whether what was found is the value, maybe bound again."""
        return any(
            x is self.value
            or (isinstance(x, MethodType) and getattr(x.__func__, "method", None) is self.value)
            for x in current_values
        )

    def _put_back(self) -> None:
        if self.previous:
            setattr(self.owner, self.name, *self.previous)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Method:
    """What stands in place of a method of an instance.

    Args:
        function: called with the owner, the method that was there before, and the arguments.
    """

    patch: Patch

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.number = next(_numbers)  # the same in copies
        self.__func__ = _Unbound(self)

    @property
    def __self__(self) -> Any:
        return self.patch.owner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.patch.stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; what was there before, once the patch is removed."""
        if not self.patch.is_active:
            return self.patch.stock(*args, **kwargs)
        return self.function(self.patch.owner, self.patch.stock, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as what was there before, once the patch is removed: nothing of ours stays."""
        if not self.patch.is_active and not self.patch.previous:
            return self.patch.stock.__reduce__()
        return super().__reduce_ex__(protocol)


class _Unbound:
    """The function of a `Method`: what others bind to the owner again, or to a copy of it."""

    def __init__(self, method: Method) -> None:
        self.method = method

    @property
    def __name__(self) -> str:
        return self.method.patch.name

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.method.patch
        if owner is patch.owner:
            return self.method(*args, **kwargs)
        # Bound to a copy, which `copy.deepcopy` gives the functions of the original.
        for copied in patches_of(owner, patch.name):
            if getattr(copied.value, "number", None) == self.method.number:
                return copied.value(*args, **kwargs)
        return getattr(type(owner), patch.name)(owner, *args, **kwargs)


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> Patch:
    """Call a function in place of a method of an instance.

    Args:
        owner: the instance.
        name: of the method.
        function: called with the owner, the method that was there before, and the arguments.
    """
    method = Method(function)
    method.patch = Patch(owner, name, method)
    return method.patch


def require(owner: object, name: str, *, library: str, use: str) -> None:
    """Raise if another library has no longer a private name that this package relies on.

    Args:
        owner: the instance, class or module that should have it.
        name: of the attribute.
        library: the distribution that it belongs to.
        use: what would no longer hold without it.
    """
    if not hasattr(owner, name):
        of = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"{library} {metadata.version(library)} has no `{of}.{name}`, by which {use}. Install "
            f"a version of {library} that this package was tested with (see its constraints.txt), "
            "and report this error."
        )


def patches_of(owner: Any, name: str) -> list[Patch]:
    """Return the patches on an attribute; that which came last is last."""
    patches: dict[str, list[Patch]] = vars(owner).get(_PATCHES) or {}
    return [*patches.get(name, ())]
