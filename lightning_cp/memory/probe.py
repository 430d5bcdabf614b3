# SPDX-License-Identifier: Apache-2.0
"""A probe that shows whether a module computes each token by itself, so that tiles are exact.

It calls the module on a few random tokens. Nothing is known of classes: one token is changed and
the others must stay as they are, bit for bit; slices and another order must give the same; nothing
may be random, routed, remembered, or trained without being a parameter of the module.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_cp.fsdp.gathering import is_gathering_hook, is_unit
from lightning_cp.loss.gradients import unlisted_leaf
from lightning_cp.private.modes import RecordedOperators, without_dispatch_modes, without_modes
from lightning_cp.private.modules import module_hooks
from lightning_cp.step import active_step
from lightning_cp.step.precision import autocast_off

PROBED_DIMS: Final = {2: (5,), 3: (2, 5), 4: (2, 5, 3)}
"""Number of dims of an input to its sizes in the probe, without the width."""

_ROUTING: Final = {"topk", "sort", "argmax", "kthvalue", "nonzero", "bincount", "histc"}
"""Operators with which a module selects experts."""

_ERRORS: Final = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    LookupError,
    ArithmeticError,
)


@dataclass(frozen=True)
class Verdict:
    """What a probe has found.

    Args:
        obstacle: why a module cannot be computed in tiles; empty if it can.
        saved: bytes that autograd saves for the module besides its input and its parameters, over
            the bytes of the input.
    """

    obstacle: str = ""
    saved: float = 0.0


def takes_one_tensor(module: nn.Module) -> bool:
    """Return whether a forward can be called with one argument."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in positional]
    several = any(p.kind == p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    takes = any(p.kind in (*positional, p.VAR_POSITIONAL) for p in parameters)
    return len(required) <= 1 and takes and not several


def has_units_inside(module: nn.Module) -> bool:
    """Return whether a module inside this one is an FSDP2 unit."""
    return any(is_unit(part) for part in module.modules() if part is not module)


def has_hooks_inside(module: nn.Module) -> bool:
    """Return whether hooks are registered on modules inside this one, other than ours."""
    inside = (part for part in module.modules() if part is not module)
    return any(not is_gathering_hook(hook) for part in inside for hook in module_hooks(part))


def sample_input(ndim: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a random input for a probe, with one of `PROBED_DIMS`.

    The global random state is neither used nor changed.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*PROBED_DIMS[ndim], width, generator=generator)
    return x.to(device, dtype)


def probe(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> Verdict:
    """Return whether a module computes each token by itself, and what tiles would save.

    The module is called in training mode, without autocast and outside of steps; its buffers,
    attributes and modes are as before afterwards.

    Args:
        module: the module; its parameters are on their device, and unsharded.
        forward: computes the module, without the hooks of the module itself.
        x: a sample from `sample_input`.
    """
    with _undisturbed(module) as has_changed:
        try:
            verdict = _probe(module, forward, x)
        except _ERRORS as error:
            text = (str(error).splitlines() or [""])[0]
            return Verdict(f"a probe with one tensor raised {type(error).__name__}: {text[:120]}")
        if not verdict.obstacle and has_changed():
            return Verdict("it changes its buffers or attributes when it is called")
        return verdict


def _probe(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> Verdict:
    with torch.no_grad(), RecordedOperators() as recorded:
        copied = x.clone()
        y = forward(copied)
    if _routes(recorded):
        return Verdict(
            "it routes tokens to experts; hooks that record its router need whole tensors"
        )
    if not isinstance(y, Tensor):
        return Verdict(f"it returns a {type(y).__name__}, not one tensor")
    if y.shape[:-1] != x.shape[:-1] or y.dim() != x.dim():
        return Verdict(f"it returns {tuple(y.shape)} for an input of {tuple(x.shape)}")
    if not torch.equal(copied, x):
        return Verdict("it changes its input in place")
    if any(torch.Tag.nondeterministic_seeded in op.tags for op in recorded.operators):
        return Verdict("it draws random numbers in training mode (dropout)")
    with torch.no_grad():
        if _mixes(forward, x, y):
            return Verdict("it mixes tokens, or depends on their positions")
    return _saved(module, forward, x)


def _routes(recorded: RecordedOperators) -> bool:
    names = {str(op).split(".")[1] for op in recorded.operators if str(op).count(".") > 1}
    return bool(names & _ROUTING) or any("grouped_mm" in name for name in names)


def _mixes(forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> bool:
    """Return whether the output of a token depends on more than the token."""
    num = math.prod(x.shape[:-1])
    for at in (0, num // 2, num - 1):
        changed = x.clone()
        changed.view(num, -1)[at] = 3 * x.view(num, -1)[at].flip(0) + 1
        others = [i for i in range(num) if i != at]
        # Of equal shapes, so that the same kernels run: not a bit may differ.
        if not torch.equal(forward(changed).reshape(num, -1)[others], y.reshape(num, -1)[others]):
            return True
    for dim in range(x.dim() - 1):
        parts = torch.cat([forward(part.contiguous()) for part in x.tensor_split(3, dim)], dim)
        backwards = forward(x.flip(dim)).flip(dim)
        if not (_is_close(parts, y) and _is_close(backwards, y)):
            return True
    return False


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal but for rounding, which other shapes may change."""
    tolerance = 1e-4 if min(a.dtype.itemsize, b.dtype.itemsize) >= 4 else 3e-2
    scale = b.abs().amax().double()
    return bool(((a - b).abs().amax().double() <= tolerance * scale).item())


def _saved(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Verdict:
    """Return a verdict with what autograd saves, or on weights that the module does not list."""
    x = x.detach().requires_grad_()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # Not the tensor itself: a graph that saves its own outputs through hooks is never freed,
        # and would hold the unsharded weights.
        saved.append(tensor.detach())
        return saved[-1]

    with torch.enable_grad(), saved_tensors_hooks(pack, _identity):
        y = forward(x)
    known = [x, *module.parameters(), *module.buffers()]
    if unlisted_leaf(y, known) is not None:
        return Verdict("it computes with trained weights that are not among its parameters")
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    extra = sum(sizes.values()) - sum(
        sizes.get(at, 0) for at in {t.untyped_storage().data_ptr() for t in known}
    )
    return Verdict(saved=extra / x.nbytes)


def _identity(x: Tensor) -> Tensor:
    return x


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Put a module into training mode inside, and restore modes, buffers, attributes and RNG.

    Yields:
        A function that returns whether buffers or attributes have changed.
    """
    parts = list(dict.fromkeys(module.modules()))
    attributes = [dict(part.__dict__) for part in parts]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    for part in parts:
        part.training = True  # not train(), which classes override

    def has_changed() -> bool:
        return any(not torch.equal(buffer, was) for buffer, was in buffers) or any(
            part.__dict__.keys() != before.keys()
            or any(part.__dict__[key] is not x for key, x in before.items() if key != "training")
            for part, before in zip(parts, attributes, strict=True)
        )

    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        with (
            active_step.paused(),
            without_modes(),
            without_dispatch_modes(),
            autocast_off(device.type),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            yield has_changed
    finally:
        for part, before in zip(parts, attributes, strict=True):
            for key in part.__dict__.keys() - before.keys():
                del part.__dict__[key]
            part.__dict__.update(before)
        with torch.no_grad():
            for buffer, was in buffers:
                if not torch.equal(buffer, was):
                    buffer.copy_(was)
