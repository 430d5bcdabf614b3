# SPDX-License-Identifier: Apache-2.0
"""Scalars computed from sharded parameters or gradients: unsharded, equal on every rank.

A norm of a DTensor is again a DTensor, whose value may still be a partial sum on each rank; it can
neither be logged nor added to a loss. A torch function mode reduces such scalars at once. Their
gradient is that of the full scalar with respect to the shard that a rank holds, without averaging.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_cp.private.compiler import never_compile_alone

USE_CALLBACK: Final = "_lightning_cp_used"
"""Attribute of a gathered parameter: a function to call when autograd uses the parameter."""


def call_unsharded(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function, and unshard the scalars that it returns."""
    if torch.compiler.is_compiling():
        return func(*args, **kwargs)
    # On the path of every torch function in a step: the common cases come first.
    if args and type(args[0]) in (list, tuple) and _are_separate(func, args[0]):
        return _call_by_mesh(func, args, kwargs)
    try:
        output = func(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}() got a sharded parameter (or its gradient) "
            "together with a plain tensor. Parameters are unsharded while a module that holds them "
            "is called: call that module instead of using its parameter. A term over parameters is "
            "a sum of scalars, one for each: sum(p.pow(2).sum() for p in self.parameters()). "
            "Elsewhere, call p.full_tensor() on every rank."
        ) from error
    kind = type(output)
    if kind is Tensor:
        if output.requires_grad:
            for x in args if not kwargs else (*args, *kwargs.values()):
                if type(x) is nn.Parameter and (used := x.__dict__.get(USE_CALLBACK)) is not None:
                    used()
        return output
    if kind is DTensor or isinstance(output, DTensor):
        return _unsharded(output)
    if kind in (list, tuple) and output and isinstance(output[0], DTensor):
        return _all_unsharded(output)
    return output


def _mesh_of(x: object) -> object:
    return getattr(x, "device_mesh", None)


def _are_separate(func: Callable[..., Any], xs: Sequence[object]) -> bool:
    """Return whether a multi-tensor function got tensors of several meshes, or plain ones too."""
    name = getattr(func, "__name__", "")
    return name.startswith(("_foreach_", "_fused_")) and len(set(map(_mesh_of, xs))) > 1


def _call_by_mesh(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a multi-tensor function separately for the tensors of each mesh, and for plain ones.

    Tensor ranks share some parameters and replicate others, such as the weights of norms. Where a
    model is sharded, every rank holds the parameters of the LightningModule itself.
    """
    size = len(args[0])
    indices: dict[Any, list[int]] = {}
    for index, x in enumerate(args[0]):
        indices.setdefault(_mesh_of(x), []).append(index)
    outputs: list[Any] = [None] * size
    for part in indices.values():
        chosen = [_chosen(x, part, size) for x in args]
        options = {name: _chosen(x, part, size) for name, x in kwargs.items()}
        output = call_unsharded(func, chosen, options)
        if output is None:  # in place
            outputs = []
            continue
        for index, x in zip(part, output, strict=True):
            outputs[index] = x
    return outputs or None


def _chosen(x: Any, indices: Sequence[int], size: int) -> Any:
    """Return the given items of a list that has one for each tensor; other arguments unchanged."""
    is_list = isinstance(x, list | tuple) and len(x) == size
    return [x[index] for index in indices] if is_list else x


def _is_scalar(x: Any) -> bool:
    return isinstance(x, DTensor) and x.dim() == 0


def _unsharded(x: DTensor) -> Tensor:
    return x.full_tensor() if _is_scalar(x) else x


def _all_unsharded(xs: list[Any] | tuple[Any, ...]) -> Any:
    """Unshard several scalars, with one collective if they are sharded in the same way."""
    first = xs[0]
    alike = all(
        _is_scalar(x)
        and (x.device_mesh, x.placements, x.dtype)
        == (first.device_mesh, first.placements, first.dtype)
        and not x.requires_grad
        for x in xs
    )
    if not alike:
        return type(xs)(_unsharded(x) if isinstance(x, DTensor) else x for x in xs)
    local = torch.stack([x.to_local() for x in xs])
    sharded = DTensor.from_local(local, first.device_mesh, first.placements, run_check=False)
    return type(xs)(sharded.full_tensor().unbind())


class _UnshardedScalars(TorchFunctionMode):
    """A mode in which scalars computed from sharded tensors are unsharded."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return call_unsharded(func, args, kwargs or {})


# One object: compiled code is specialised on the mode object that it runs under.
_mode = _UnshardedScalars()


def unsharded_scalars() -> TorchFunctionMode:
    """Return the context in which scalars computed from sharded tensors are unsharded."""
    for handler in (_UnshardedScalars.__torch_function__, call_unsharded):
        never_compile_alone(handler)
    return _mode
