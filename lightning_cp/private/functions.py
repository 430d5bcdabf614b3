# SPDX-License-Identifier: Apache-2.0
"""Python functions: copies, and calls that go elsewhere."""

import sys
from inspect import signature
from types import CellType, FunctionType
from typing import Any

_PROTOTYPE = "torch.distributed.tensor.experimental._context_parallel._attention"


def prototype_balances() -> bool:
    """Return whether the prototype would balance causal attention between ranks.

    Its private option (`_cp_options`), on unless a script has switched it off.
    """
    options = getattr(sys.modules.get(_PROTOTYPE), "_cp_options", None)
    return bool(getattr(options, "enable_load_balance", True))


def copy_function(
    fn: Any,
    variables: dict[str, Any] | None = None,
    cells: tuple[CellType, ...] | None = None,
) -> FunctionType:
    """Return a copy of a Python function that later changes of ``fn.__code__`` do not affect.

    Its code object is a copy too: torch.compile counts compilations by code object, and gives up
    after 8.

    Args:
        fn: the function.
        variables: the globals of the copy; by default those of ``fn``.
        cells: the variables from around it; by default those of ``fn``.
    """
    variables = fn.__globals__ if variables is None else variables
    cells = fn.__closure__ if cells is None else cells
    code = fn.__code__.replace()
    copied = FunctionType(code, variables, fn.__name__, fn.__defaults__, cells)
    copied.__kwdefaults__ = fn.__kwdefaults__
    return copied


class Detour:
    """A context that redirects every call of a Python function, however it was imported.

    It replaces the function's code, so that callers that hold the function, and compiled callers,
    which trace its code, reach ``replacement``. That runs with the globals of ``fn``, so it must
    import what it needs. torch.compile binds arguments by name, so both must have the same
    parameters; if they differ (another torch version), nothing is redirected.

    The code is replaced for the whole process: do not enter it on two threads at once.

    Args:
        fn: the function whose calls are redirected.
        replacement: the function that is called instead.
    """

    def __init__(self, fn: Any, replacement: Any) -> None:
        self._fn, self._depth = fn, 0
        self._original, self._replacement = fn.__code__, replacement.__code__
        self.fits = _parameters(fn) == _parameters(replacement)

    def __enter__(self) -> None:
        self._depth += 1
        if self.fits:
            self._fn.__code__ = self._replacement

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._fn.__code__ = self._original


def _parameters(fn: Any) -> list[tuple[str, object]]:
    return [(name, parameter.kind) for name, parameter in signature(fn).parameters.items()]
