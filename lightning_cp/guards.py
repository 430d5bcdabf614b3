# SPDX-License-Identifier: Apache-2.0
"""Checks of attention and loss calls: recomputed in the right step, on this rank's tokens."""

import sys

import torch
from torch import Tensor

from lightning_cp import active_step
from lightning_cp.step import Step
from lightning_cp.torch_private import in_backward

_CURE = "Use checkpoint(..., use_reentrant=False)"


def check_recompute(step: Step | None) -> None:
    """Refuse to run again in backward what first ran in a step that has ended.

    Activation checkpointing would run it on this rank's tokens alone, or under the documents of
    another batch, and nobody would notice.

    Args:
        step: the active step, which the caller is about to use.
    """
    if not in_backward():
        return
    if step is None and not active_step.is_paused() and active_step.was_ever_active():
        raise RuntimeError(
            "Attention or loss runs again in backward (activation checkpointing), but its step has "
            f"ended. {_CURE}, or take the mask from cp.mask(...), which carries its step, or call "
            "backward inside `with cp.step(...)`. For whole rows use `with cp.paused():`."
        )
    if step is not None and _backward_of not in (None, step.uid):
        raise _recomputed_elsewhere()


def check_recomputable(name: str, step: Step) -> None:
    """Refuse torch's attention under reentrant checkpointing: recomputed, nobody would route it.

    Args:
        name: the function that was called.
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
    """Refuse queries or keys that are not this rank's tokens.

    Args:
        name: the function that was called.
        query: [..., tokens, head dim].
        key: [..., tokens, head dim].
        step: the active step.
    """
    local_len = step.held_len
    if query.shape[-2] == key.shape[-2] == local_len:
        return
    tokens = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
    held = f"whose ranks hold {local_len} tokens each ({step.layout.seq_len} in all)"
    if query.shape[-2] == local_len:
        raise ValueError(
            f"{name}() got {tokens} inside a step {held}. If the keys are the same on every rank "
            "(cross-attention), say so: `with cp.unsharded():` around the call, or "
            "cp.unsharded(module) once."
        )
    raise ValueError(
        f"{name}() got {tokens} inside a step {held}. Feed the model what cp.step(...) yields. "
        "Whole rows (generate(), a second model) go under `with cp.paused():`; a module that "
        "attends over something else than the sequence is declared with cp.unsharded(module)."
    )


def check_mark(mark: Tensor, uid: int) -> None:
    """Refuse a backward whose saved tensors were recomputed under another step.

    Checkpointing replaces saved tensors by recomputed ones: ``mark`` is the step of the recompute,
    ``uid`` that of the forward.
    """
    if int(mark) != uid:
        raise _recomputed_elsewhere()


def _recomputed_elsewhere() -> RuntimeError:
    return RuntimeError(
        "Attention or loss was recomputed under another step than the one it first ran in "
        f"(activation checkpointing, and backward inside or after a later step). {_CURE}."
    )


# The step whose loss backward came through last. A reentrant recompute keeps no trace of the step
# that it first ran in; this tells when it cannot be the active one.
_backward_of: int | None = None


def refuse_second_derivative() -> None:
    """Refuse a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Context-parallel attention has no second derivative: call backward() or "
            "autograd.grad() without create_graph=True."
        )


def enter_backward_of(uid: int) -> None:
    """Note that backward is going through the loss of a step."""
    global _backward_of
    _backward_of = uid


def forget_backward() -> None:
    """Start anew: a step was opened."""
    global _backward_of
    _backward_of = None
