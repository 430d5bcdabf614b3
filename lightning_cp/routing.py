# SPDX-License-Identifier: Apache-2.0
"""Routing of torch's attention functions to `lightning_cp.attention` while a step is active.

`F.scaled_dot_product_attention` is not patched: a torch function mode sees every call, however its
caller imported the function, and ends with the step. `flex_attention` is a Python function that
checks its arguments before a mode sees any call: its code is replaced during the step. Attention
calls that cannot be routed raise. Not seen: attention written as matmul, softmax, matmul, and SDPA
inside TorchScript, inside a custom operator or a custom backward, and on other threads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from lightning_cp.attn.accumulators import NEVER
from lightning_cp.attn.api import attend
from lightning_cp.data.shard import full_tokens, own_tokens
from lightning_cp.fsdp.scalars import call_unsharded
from lightning_cp.geometry.mask import Mask
from lightning_cp.private.compiler import (
    constant_in_graphs,
    never_compile_alone,
    outside_graphs,
    prepare_breaks,
)
from lightning_cp.private.functions import Detour
from lightning_cp.private.modes import is_higher_order, plain_functions
from lightning_cp.step import active_step, guards
from lightning_cp.step.precision import as_autocast
from lightning_cp.step.step import Step

# A model that ignores documents and padding on one device ignores them on several.
_CAUSAL = Mask(causal=True, documents=False, padding=False)
_FULL = Mask(documents=False, padding=False)

_sdpa = functional.scaled_dot_product_attention
_multi_head = functional.multi_head_attention_forward


def _to_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Call our flex_attention; this code runs with the globals of torch's module."""
    from lightning_cp.attn.flex.flex_attention import flex_attention

    return flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,
    )


# While it is entered, calls of torch's flex_attention reach ours.
flex_detour = Detour(torch_flex.flex_attention, _to_flex_attention)


class _Dispatch(TorchFunctionMode):
    """A mode that routes attention, and unshards scalars that other functions return."""

    def __enter__(self) -> "_Dispatch":
        flex_detour.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        flex_detour.__exit__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "property":
            return func(*args, **kwargs)
        if kind == "other":
            return call_unsharded(func, args, kwargs)
        if active_step.num_exempt() > 0 or active_step.opened() is None:
            return func(*args, **kwargs)
        if kind == "sdpa":
            return _attend(*args, **kwargs)
        if kind == "multi-head":
            return _attend_multi_head(*args, **kwargs)
        if kind == "checkpoint":
            return _call_outside(func, *args, **kwargs)
        if kind == "mixing":
            _check_mixing(func.__name__, args, kwargs)
            return func(*args, **kwargs)
        raise RuntimeError(
            f"{func.__name__}() was called inside a step: it would see only this rank's tokens. "
            "Call F.scaled_dot_product_attention or lightning_cp.attention, or declare the module "
            "with cp.exempt(module) if its keys are not sharded."
        )


_aten = torch.ops.aten.scaled_dot_product_attention
_kinds: dict[object, str] = {
    _sdpa: "sdpa",
    _aten: "sdpa",
    _aten.default: "sdpa",
    _multi_head: "multi-head",
    # The compiler calls it while it compiles a backward.
    torch.ops.higher_order.flex_attention_backward: "other",
}


# What a tensor is, not what it holds: they compute nothing, and return no tensor of values.
_PROPERTIES = {
    *("device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse"),
    *("itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape", "data_ptr", "dim"),
    *("element_size", "is_complex", "is_contiguous", "is_floating_point", "numel"),
    *("register_hook", "size", "stride", "untyped_storage"),
}


@constant_in_graphs
def _kind(func: Callable[..., Any]) -> str:
    """Return how a torch function is handled, by its name unless `_kinds` lists it."""
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _find_kind(func)
    return kind


def _find_kind(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of an attribute; each access makes a new object, equal to the others
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return "property" if attribute in _PROPERTIES else "other"
    if name in _PROPERTIES and func is getattr(Tensor, name):
        return "property"
    hides = is_higher_order(func) and name in _HIDING
    if hides or any(part in name for part in ("attention", "attn", "_encoder_layer_fwd")):
        return "unknown attention"
    if name in _MIXING:
        return "mixing"
    return "checkpoint" if name == "tag_activation_checkpoint" else "other"


# Functions other than attention that carry information from token to token.
_MIXING = {"conv1d", "batch_norm", "gru", "lstm", "rnn_tanh", "rnn_relu"}


@outside_graphs
def _check_mixing(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for convolutions and recurrences along this rank's tokens, and statistics over them."""
    step = active_step.opened()
    if not isinstance(step, Step) or step.cp_size == 1:
        return
    x = kwargs.get("input", args[0] if args else None)
    if not isinstance(x, Tensor):
        return
    local_len, mixes = step.tensor_len, False
    if name == "conv1d":
        width = kwargs.get("weight", args[1] if len(args) > 1 else x).shape[-1]
        mixes = width > 1 and 0 <= x.shape[-1] - local_len <= 2 * width
    elif name == "batch_norm":
        mixes = bool(kwargs.get("training", args[5] if len(args) > 5 else False))
    else:
        mixes = local_len in x.shape[:-1]
    if mixes:
        instead = (
            "Use lightning_cp.sequence.causal_conv1d"
            if name == "conv1d"
            else "This is not supported yet"
        )
        raise RuntimeError(
            f"{name}() was called inside a step on a tensor of shape {tuple(x.shape)}: it mixes "
            f"tokens, but sees only the {local_len} of this rank. {instead}; if it does not run "
            "along the sequence, or on tokens with their halo, declare it with "
            "cp.exempt(module)."
        )


# Operators whose Python functions run without the mode, and may call attention.
_HIDING = {"cond", "while_loop", "scan", "map_impl", "associative_scan"}


@outside_graphs
def _call_outside(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Break the graph around checkpointing, whose body would be traced without the mode."""
    return func(*args, **kwargs)


# One object for all steps: compiled code is specialised on the mode object that it runs under, and
# would be recompiled for each new one.
_mode = _Dispatch()

_skipped_by_compiler = False


def enabled() -> TorchFunctionMode:
    """Return the context in which attention calls are routed to the active step."""
    global _skipped_by_compiler
    prepare_breaks()
    _skipped_by_compiler = _skipped_by_compiler or (
        never_compile_alone(_Dispatch.__torch_function__) and never_compile_alone(call_unsharded)
    )
    return _mode


@outside_graphs
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute F.scaled_dot_product_attention with the keys of all ranks."""
    step = active_step.current()
    if step is None:  # paused between the call and here: run the function that was called
        return _sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    guards.check_recomputable("scaled_dot_product_attention", step)
    if dropout_p:
        raise ValueError(
            f"scaled_dot_product_attention(dropout_p={dropout_p}) inside a step: attention dropout "
            "is not exact when several ranks share a sequence. Set it to 0 (in "
            "nn.MultiheadAttention and nn.TransformerEncoderLayer: dropout=0.0), or call eval()."
        )
    guards.check_lengths("scaled_dot_product_attention", query, key, step)
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention(): pass attn_mask or is_causal, not both.")
    lead = query.shape[:-3]
    with plain_functions():
        query, key, value = as_autocast(query, key, value)
        q, k, v = (_four_dims(x) for x in (query, key, value))
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"scaled_dot_product_attention() got {q.shape[1]} query heads and {k.shape[1]} key "
                "heads: set enable_gqa=True to share them."
            )
        bias = None if attn_mask is None else _bias(attn_mask, query, step)
        mask = _CAUSAL if is_causal else _FULL
        out = attend(q, k, v, mask=mask, scale=scale, bias=bias)
        if query.dim() == 4:
            return out
        return out.reshape(*lead, *query.shape[len(lead) : -1], value.shape[-1])


def _four_dims(x: Tensor) -> Tensor:
    """Return ``x`` as [B, H, L, D], whatever dims precede L."""
    if x.dim() == 4:
        return x
    heads = x.shape[-3] if x.dim() > 3 else 1
    return x.reshape(-1, heads, *x.shape[-2:])


def _bias(mask: Tensor, query: Tensor, step: Step) -> Tensor:
    """Return an attn_mask as a bias on the scores of this rank's queries and all keys."""
    layout, local_len = step.layout, step.tensor_len
    if type(mask) not in (Tensor, nn.Parameter):
        raise TypeError(
            f"attn_mask is a {type(mask).__name__}, whose meaning is not in its values. Pass a "
            "plain tensor; for a causal mask, is_causal=True."
        )
    if mask.requires_grad:
        raise ValueError(
            "attn_mask requires a gradient, which would not be computed. Use attn_mask.detach() if "
            "it is not trained; a trained position bias is not supported inside a step."
        )
    num_queries, num_keys = mask.shape[-2:]
    lengths = {layout.tensor_len(rank) for rank in range(layout.cp_size)}
    # Ranks that hold different numbers of tokens must not read one mask in two ways.
    if layout.cp_size > 1 and (layout.seq_len in lengths or (len(lengths) > 1 and 1 in lengths)):
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} is ambiguous: a sequence of {layout.seq_len} "
            f"tokens is too short compared with the {max(lengths)} that a rank holds. Use longer "
            "sequences, or no mask."
        )
    if num_queries == 1 and num_keys == local_len != layout.seq_len:
        mask = full_tokens(mask, step, -1)
    elif num_keys == 1:
        mask = mask.expand(*mask.shape[:-1], layout.seq_len)
    elif num_keys != layout.seq_len:
        raise _mask_shape_error(mask, step)
    if num_queries not in (1, local_len):
        if num_queries != layout.seq_len:
            raise _mask_shape_error(mask, step)
        mask = own_tokens(mask, step, -2)
    if mask.dtype == torch.bool:
        visible, mask = mask, torch.zeros_like(mask, dtype=query.dtype)
        mask = mask.masked_fill(~visible, NEVER)
    # Leading dims line up from the right, as in broadcasting; those before the heads become one.
    if query.dim() <= 3:
        mask = mask.unsqueeze(-3) if mask.dim() == 3 else mask
        return mask.reshape(-1, 1, *mask.shape[-2:])
    mask = mask.reshape(*[1] * (query.dim() - mask.dim()), *mask.shape)
    if query.dim() > 4:
        mask = mask.expand(*query.shape[:-3], *mask.shape[-3:])
    return mask.reshape(-1, *mask.shape[-3:])


def _mask_shape_error(mask: Tensor, step: Step) -> ValueError:
    local_len, seq_len = step.tensor_len, step.layout.seq_len
    return ValueError(
        f"attn_mask has shape {tuple(mask.shape)} inside a step whose ranks hold {local_len} of "
        f"{seq_len} tokens. A mask of this rank's queries needs the keys of the full sequence: "
        f"[..., {local_len}, {seq_len}] (in the batch, sharded along the query dim: "
        f"sequence_dims={{'mask': -2}}); a mask of keys is [..., 1, {seq_len}], or this rank's "
        f"[..., 1, {local_len}]. For a causal mask, pass is_causal=True."
    )


@outside_graphs  # the compiler would not see the replaced function, and attend locally
def _attend_multi_head(*args: Any, **kwargs: Any) -> Any:
    """Run nn.MultiheadAttention with its attention routed."""
    if kwargs.get("need_weights", True):
        raise ValueError(
            "nn.MultiheadAttention was called with need_weights=True inside a step: it would "
            "compute weights over this rank's tokens only. Call it with need_weights=False."
        )
    # The mode is off inside its own handler, so that the SDPA call of this function would not be
    # routed: the function that it looks up in its module is replaced during the call.
    original = functional.scaled_dot_product_attention  # perhaps patched by another library
    functional.scaled_dot_product_attention = _attend  # type: ignore[assignment]
    try:
        return _multi_head(*args, **kwargs)
    finally:
        functional.scaled_dot_product_attention = original


def _enter_exempt(*_: object) -> None:
    active_step.declare_exempt(1)


def _leave_exempt(*_: object) -> None:
    active_step.declare_exempt(-1)


class Exempt:
    """A declaration that attention calls are not routed, because their keys are not sharded.

    As a context, it applies to the calls inside; for modules, to all calls until ``remove()``.

    Args:
        modules: modules whose calls are not routed; none to use the context only.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"cp.exempt({module!r}): give modules, cp.exempt(model.encoder, ...), or none "
                    "for the calls inside `with cp.exempt():`."
                )
        self._handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(_enter_exempt),
                module.register_forward_hook(_leave_exempt, always_call=True),
            )
        ]

    def remove(self) -> None:
        """Route the modules' attention again."""
        for handle in self._handles:
            handle.remove()

    undo = remove

    def __enter__(self) -> "Exempt":
        _enter_exempt()
        return self

    def __exit__(self, *_: object) -> None:
        _leave_exempt()
