# SPDX-License-Identifier: Apache-2.0
"""Numbers that are computed from sharded parameters or gradients: whole, the same on every rank.

A norm of a DTensor is a DTensor again, whose value may still be spread over the ranks; it cannot
be logged, nor added to a loss. Here such a number is put together at once. Its gradient is that of
the whole, for the part of the parameter that a rank holds: nothing is left to be averaged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_cp.torch_private import never_compile_alone

NOTED: Final = "_lightning_cp_used"
"""Under which name a gathered parameter may hold what is called when autograd uses it."""


def call_whole(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function, and put numbers together that it returns in parts."""
    if torch.compiler.is_compiling():
        return func(*args, **kwargs)
    try:
        output = func(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}() was given a parameter of which each rank holds a "
            "part (or its gradient), together with a plain tensor. Parameters are whole while a "
            "module that holds them is called: call that module instead of using its parameter. "
            "A term over parameters is a sum of numbers, one for each: sum(p.pow(2).sum() for p in "
            "self.parameters()). Elsewhere p.full_tensor(), on every rank, is the whole of one."
        ) from error
    if type(output) is Tensor and output.requires_grad:
        for x in (*args, *kwargs.values()):
            if type(x) is nn.Parameter and (note := x.__dict__.get(NOTED)) is not None:
                note()
        return output
    if isinstance(output, DTensor):
        return _whole(output)
    if type(output) in (list, tuple) and output and isinstance(output[0], DTensor):
        return _all_whole(output)
    return output


def _is_number(x: Any) -> bool:
    return isinstance(x, DTensor) and x.dim() == 0


def _whole(x: DTensor) -> Tensor:
    return x.full_tensor() if _is_number(x) else x


def _all_whole(xs: list[Any] | tuple[Any, ...]) -> Any:
    """Put several numbers together, by one collective where they are spread alike."""
    first = xs[0]
    alike = all(
        _is_number(x)
        and (x.device_mesh, x.placements, x.dtype)
        == (first.device_mesh, first.placements, first.dtype)
        and not x.requires_grad
        for x in xs
    )
    if not alike:
        return type(xs)(_whole(x) if isinstance(x, DTensor) else x for x in xs)
    local = torch.stack([x.to_local() for x in xs])
    spread = DTensor.from_local(local, first.device_mesh, first.placements, run_check=False)
    return type(xs)(spread.full_tensor().unbind())


class _WholeScalars(TorchFunctionMode):
    """While it is entered, numbers from sharded tensors are whole."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return call_whole(func, args, kwargs or {})


# One object: compiled code is specialised on the mode that it runs under.
_mode = _WholeScalars()


def whole_scalars() -> TorchFunctionMode:
    """Return the context in which numbers from sharded tensors are whole."""
    for handler in (_WholeScalars.__torch_function__, call_whole):
        never_compile_alone(handler)
    return _mode
