# SPDX-License-Identifier: Apache-2.0
"""Checks of attention and loss calls: in the step that they belong to, on this rank's tokens."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cp.private.autograd import in_backward
from lightning_cp.private.modes import plain_functions
from lightning_cp.step import active_step
from lightning_cp.step.step import Opened, Step, StepMask

_FIX = "Use checkpoint(..., use_reentrant=False)"


def step_of_call(mask: object = None) -> Step | None:
    """Return the step that a call belongs to: that of its mask, or else the active one.

    Raises if backward recomputes what first ran in a step that has ended.
    """
    if isinstance(mask, StepMask):
        return mask.step
    step = active_step.current()
    check_recompute(step)
    return step


def check_recompute(step: Opened | None) -> None:
    """Raise if backward recomputes what first ran in a step that has ended.

    Activation checkpointing would silently run it on this rank's tokens only, or with the documents
    of another batch.

    Args:
        step: the active step, which the caller is about to use.
    """
    if not in_backward():
        return
    if step is None and not active_step.is_paused() and active_step.was_ever_active():
        raise RuntimeError(
            "Attention or loss runs again in backward (activation checkpointing), but its step has "
            f"ended. {_FIX}, or take the mask from cp.mask(...), which holds its step, or call "
            "backward inside `with cp.step(...)`. For full sequences use `with cp.paused():`."
        )
    if step is not None and _backward_of not in (None, step.uid):
        raise _recomputed_elsewhere()


def check_recomputable(name: str, step: Step) -> None:
    """Raise if torch's attention runs under reentrant checkpointing: recomputed, it is not routed.

    Args:
        name: the called function.
        step: the active step.
    """
    if torch.is_grad_enabled() or not step.training:
        return
    module = sys.modules.get("torch.utils.checkpoint")
    frame = sys._getframe() if module is not None else None
    while frame is not None and module is not None:
        if frame.f_code is module.CheckpointFunction.forward.__code__:
            raise RuntimeError(
                f"{name}() was called under reentrant activation checkpointing inside a step. "
                "Recomputed in backward it would see only this rank's tokens. Use "
                "checkpoint(..., use_reentrant=False)."
            )
        frame = frame.f_back


def check_lengths(name: str, query: Tensor, key: Tensor, step: Step) -> None:
    """Raise if queries or keys are not this rank's tokens.

    Args:
        name: the called function.
        query: [..., tokens, head dim].
        key: [..., tokens, head dim].
        step: the active step.
    """
    local_len = step.tensor_len
    if query.shape[-2] == key.shape[-2] == local_len:
        return
    tokens = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
    held = f"whose ranks hold {local_len} tokens each ({step.layout.seq_len} in all)"
    if query.shape[-2] == local_len:
        raise ValueError(
            f"{name}() got {tokens} inside a step {held}. If the keys are the same on every rank "
            "(cross-attention), declare it: `with cp.exempt():` around the call, or "
            "cp.exempt(module) once."
        )
    raise ValueError(
        f"{name}() got {tokens} inside a step {held}. Give the model what cp.step(...) yields. "
        "Use `with cp.paused():` for full sequences (generate(), a second model), and "
        "cp.exempt(module) for a module that attends over something other than the sequence."
    )


def check_mark(mark: Tensor, uid: int) -> None:
    """Raise if the saved tensors of a backward were recomputed under another step.

    Checkpointing replaces saved tensors by recomputed ones: ``mark`` is the step of the recompute,
    ``uid`` that of the forward.
    """
    if int(mark) != uid:
        raise _recomputed_elsewhere()


def _recomputed_elsewhere() -> RuntimeError:
    return RuntimeError(
        "Attention or loss was recomputed under another step, not the one it first ran in "
        f"(activation checkpointing, and backward inside or after a later step). {_FIX}."
    )


# The step whose loss backward passed last. A reentrant recompute does not know the step that it
# first ran in; this shows when that cannot be the active one.
_backward_of: int | None = None


def refuse_second_derivative() -> None:
    """Raise if a backward is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Context parallelism has no second derivative: call backward() or autograd.grad() "
            "without create_graph=True."
        )


def enter_backward_of(uid: int) -> None:
    """Record that backward passes the loss of a step."""
    global _backward_of
    _backward_of = uid


@contextmanager
def backward_of_step(ctx: Any, uid: int) -> Iterator[list[Any]]:
    """Guard a backward and yield its saved tensors, the last one left out.

    No second derivative, and only with tensors saved in the same step: activation checkpointing
    replaces saved tensors by recomputed ones, among them the last one, the uid of the step.

    Args:
        ctx: of the autograd function.
        uid: the step of the call.
    """
    refuse_second_derivative()
    *saved, mark = ctx.saved_tensors
    with plain_functions():
        check_mark(mark, uid)
        enter_backward_of(uid)
        yield saved


def forget_backward() -> None:
    """Reset the record: a step was opened."""
    global _backward_of
    _backward_of = None
