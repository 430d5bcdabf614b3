# SPDX-License-Identifier: Apache-2.0
"""Attention as one opaque operator of compiled graphs; eager code never calls it.

Operators take tensors and numbers, no plans. A mask that may be used in graphs has a *mark*: a
tensor of one number, an input of the graph, which holds the mask and its step as a Python
attribute. Autograd saves the mark, so backward finds them too. A graph serves all masks and steps.

A graph makes the calls that eager code makes, so that ranks pair up of which one has given up
compiling: the compiler may not drop a call, and does not merge equal ones, which are numbered.
"""

import itertools
import sys
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from lightning_cp.attn.api import find_call
from lightning_cp.attn.blockwise.function import (
    BlockwiseCall,
    compute_gradients,
    compute_or_take,
)
from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Request, Scores
from lightning_cp.attn.blockwise.kernels.select import select_kernel
from lightning_cp.attn.call import PaddedCall, with_unit_stride
from lightning_cp.attn.choose import is_dense
from lightning_cp.data.shard import pad_end
from lightning_cp.geometry.mask import Mask
from lightning_cp.private.compiler import (
    constant_in_graphs,
    outside_graphs,
    recomputes_operators,
)
from lightning_cp.private.modes import plain_functions
from lightning_cp.step.guards import enter_backward_of
from lightning_cp.step.precision import accumulation_dtype, autocast_off
from lightning_cp.step.step import Step, StepMask

AnyMask = TypeVar("AnyMask", bound=StepMask)


# --- marks ---


@dataclass(frozen=True, eq=False)
class _Marked:
    """What a mark stands for. Not the mask that has the mark, which would hold itself."""

    step: Step
    mask: Mask


_numbers = itertools.count()
# Copies of a mark have its number only: those that activation checkpointing and hooks for saved
# tensors make.
_held: WeakValueDictionary[int, _Marked] = WeakValueDictionary()


@outside_graphs  # a tensor that is made in a graph has no Python attribute
def mark_mask(mask: AnyMask) -> AnyMask:
    """Let graphs use a mask, where its calls need no compiler of their own; return it.

    FlexAttention, Ulysses and branches stay outside of graphs.
    """
    reference = mask.reference
    if reference is None or "torch._dynamo" not in sys.modules:
        return mask
    step = reference.step
    config, groups = step.config, step.groups
    if step.branches is not None or groups.inside.size > 1 or config.attention.kernel == "flex":
        return mask
    reference.needs_fused = (
        config.attention.kernel == "auto" and config.algorithm != "ring" and groups.compiles
    )
    is_fused = reference.needs_fused and step.position_ids.device.type == "cuda"
    if is_fused and not is_dense(step.bounds(mask), step.layout.seq_len):
        return mask
    plain = Mask(**{field.name: getattr(mask, field.name) for field in fields(Mask)})
    held, number = _Marked(step, plain), next(_numbers)
    reference.mark, _held[number] = torch.tensor(number), held
    reference.mark.held = held  # type: ignore[attr-defined]
    return mask


def _find_held(mark: Tensor) -> _Marked:
    held: _Marked | None = getattr(mark, "held", None) or _held.get(int(mark))
    if held is None:
        raise RuntimeError(
            "Compiled attention has lost its step: hooks for saved tensors (save_on_cpu) have "
            "copied what backward needs, and the step has ended. Call backward inside "
            "`with cp.step(...)`, or do not compile these layers."
        )
    return held


# --- calls while the compiler traces ---


def can_trace(
    mask: object, q: Tensor, v: Tensor, scale: float | None, softcap: float | None
) -> bool:
    """Return whether a call becomes an operator of the graph that the compiler traces."""
    if not isinstance(mask, StepMask) or mask.reference is None or mask.reference.mark is None:
        return False
    if recomputes_operators():  # a rank that runs the same code eagerly calls once
        return False
    if not mask.reference.needs_fused or q.device.type != "cuda":
        return True
    head_dim = max(int(q.shape[-1]), int(v.shape[-1]))
    return _is_fused(q.device, q.dtype, head_dim, scale, softcap)


@constant_in_graphs
def _is_fused(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    scale: float | None,
    softcap: float | None,
) -> bool:
    scores = Scores(head_dim**-0.5 if scale is None else float(scale), softcap)
    request = Request(device, dtype, scores, head_dim)
    return select_kernel("auto", request).name != "reference"


@constant_in_graphs
def _next_number() -> int:
    return next(_numbers)


def attend_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: StepMask,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend as `attention` does, by an operator; only where `can_trace`.

    Returns:
        [B, L, H, Dv].
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if any(map(_has_tangent, inputs)):
        raise RuntimeError(
            "Attention has no forward-mode derivative (torch.func.jvp): use backward()."
        )
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    mark: Tensor = mask.reference.mark  # type: ignore[union-attr, assignment]
    out: Tensor = torch.ops.lightning_cp.attend.default(
        q, k, v, sinks, mark, scale, softcap, keeps, _next_number()
    )[0]
    return out


def _has_tangent(x: Tensor) -> bool:
    # Operators would return a tangent of 0.
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


# --- operators ---

_TAGS = (torch.Tag.cudagraph_unsafe,)  # a replay would not run their Python code

torch.library.define(
    "lightning_cp::attend",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor mark, float? scale, float? softcap, "
    "bool keeps, int number) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "lightning_cp::attend_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, "
    "Tensor mark, float? scale, float? softcap, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mark: Tensor,
    scale: float | None,
    softcap: float | None,
) -> BlockwiseCall:
    held = _find_held(mark)
    call = find_call(held.step, held.mask, q, k, v, scale, softcap, sinks, has_bias=False)
    if isinstance(call, PaddedCall):  # padded here: its own run() is one for eager code
        call = call.call
    assert isinstance(call, BlockwiseCall)  # noqa: S101  others have no mark
    return call


@torch.library.impl("lightning_cp::attend", "default")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mark: Tensor,
    scale: float | None,
    softcap: float | None,
    keeps: bool,
    number: int,
) -> tuple[Tensor, Tensor]:
    with plain_functions(), autocast_off(q.device.type):
        call, length = _call(q, k, v, sinks, mark, scale, softcap), q.shape[2]
        q, k, v = (_padded(x, call) for x in with_unit_stride(q, k, v))
        out, lse = compute_or_take(q, k, v, sinks, None, call, keeps=keeps)
        out = out[:, :, :length].transpose(1, 2).contiguous()
        return out, lse[:, :, :length].contiguous()


@torch.library.impl("lightning_cp::attend_backward", "default")
def _attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mark: Tensor,
    scale: float | None,
    softcap: float | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    with plain_functions(), autocast_off(q.device.type):
        call, length = _call(q, k, v, sinks, mark, scale, softcap), q.shape[2]
        enter_backward_of(call.uid)
        q, k, v = (_padded(x, call) for x in with_unit_stride(q, k, v))
        dout, out = (_padded(x.transpose(1, 2), call) for x in (dout, out))
        # exp(score - inf): padding has no weights.
        lse = functional.pad(lse, (0, q.shape[2] - length), value=torch.inf)
        inputs = BackwardInputs(dout, q, k, v, out, lse)
        *all_gradients, dsinks = compute_gradients(inputs, sinks, None, call, tuple(needs))
    gradients = [
        q.new_empty(0) if x is None else _tokens_first(x[:, :, :length]) for x in all_gradients
    ]
    return *gradients, q.new_empty(0) if dsinks is None else dsinks


def _padded(x: Tensor, call: BlockwiseCall) -> Tensor:
    """Return a tensor with the padding that this rank leaves out, but all ranks exchange."""
    num_padding = call.plan.layout.local_len - x.shape[2]
    return pad_end(x, 2, num_padding) if num_padding else x


def _tokens_first(x: Tensor) -> Tensor:
    """Return [B, H, L, D], with tokens before heads in memory, as models have it.

    Kernels return several layouts, and the compiler must know one before the call.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1])
    return out, q.new_empty(batch, heads, length, dtype=accumulation_dtype(q.dtype))


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    needs = others[-1]
    like = [x.transpose(1, 2).new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
    like.append(q.new_empty(0) if sinks is None else torch.empty_like(sinks))
    return tuple(x if need else q.new_empty(0) for x, need in zip(like, needs, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, mark, ctx.scale, ctx.softcap, *_ = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, out, lse, mark)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, mark = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    all_gradients = torch.ops.lightning_cp.attend_backward.default(
        dout, q, k, v, sinks, out, lse, mark, ctx.scale, ctx.softcap, needs
    )
    gradients = (x if need else None for x, need in zip(all_gradients, needs, strict=True))
    return *gradients, None, None, None, None, None


torch.library.register_fake("lightning_cp::attend", _fake)
torch.library.register_fake("lightning_cp::attend_backward", _fake_backward)
torch.library.register_autograd("lightning_cp::attend", _differentiate, setup_context=_save)
for _operator in ("attend", "attend_backward"):
    torch.fx.has_side_effect(getattr(torch.ops.lightning_cp, _operator).default)
