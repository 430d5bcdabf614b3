# SPDX-License-Identifier: Apache-2.0
"""While a step is active, `F.scaled_dot_product_attention` means attention over the whole row.

Nothing is patched: a torch function mode sees every call, whichever way its caller imported the
function, and ends with the step. Attention that it cannot serve is refused; what it cannot see is
attention written out by hand (matmul, softmax, matmul).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_cp import context
from lightning_cp.compat import outside_graphs, plain_functions
from lightning_cp.context import Step
from lightning_cp.engine.attention import attention
from lightning_cp.engine.merge import NEVER
from lightning_cp.mask import Mask
from lightning_cp.sequence import shard, unshard

# A model that ignores documents and padding on one device ignores them on several.
_CAUSAL = Mask(causal=True, documents=False, padding=False)
_FULL = Mask(documents=False, padding=False)

_sdpa = functional.scaled_dot_product_attention
_multi_head = functional.multi_head_attention_forward


class _Dispatch(TorchFunctionMode):
    """Routes attention; lets every other torch function pass."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "att" not in name and name != "_transformer_encoder_layer_fwd":
            return func(*args, **kwargs)
        step = context.current()
        if step is None or _num_untouched:
            return func(*args, **kwargs)
        if func in _SDPA:
            return _attend(*args, **kwargs)
        if func is _multi_head:
            return _attend_multi_head(*args, **kwargs)
        if "attention" in name or "attn" in name or name == "_transformer_encoder_layer_fwd":
            raise RuntimeError(
                f"{name}() was called inside a step: it would see only this rank's tokens. Call "
                "F.scaled_dot_product_attention or lightning_cp.attention, or declare the module "
                "with cp.unsharded(module) if its keys are not cut."
            )
        return func(*args, **kwargs)


_aten = torch.ops.aten.scaled_dot_product_attention
_SDPA = {_sdpa, _aten, _aten.default}

# One object for all steps: compiled code is specialised on the mode that it runs under, and would
# be compiled again for each new one.
_mode = _Dispatch()


def enabled() -> TorchFunctionMode:
    """Return the context in which attention calls are routed to the active step."""
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
    """Do what F.scaled_dot_product_attention does, with the keys of all ranks."""
    step = context.current()
    if step is None:  # switched off between the call and here: what the caller asked for
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if dropout_p:
        raise ValueError(
            f"scaled_dot_product_attention(dropout_p={dropout_p}) inside a step: attention dropout "
            "is not exact when a row is shared by several ranks. Set it to 0 (in "
            "nn.MultiheadAttention and nn.TransformerEncoderLayer: dropout=0.0), or call eval()."
        )
    _check_lengths(query, key, step)
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention(): give attn_mask or is_causal, not both.")
    lead = query.shape[:-3]
    with plain_functions():
        q, k, v = (_four_dims(x) for x in (query, key, value))
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"scaled_dot_product_attention() got {q.shape[1]} query heads and {k.shape[1]} key "
                "heads: set enable_gqa=True to share them."
            )
        bias = None if attn_mask is None else _bias(attn_mask, query, step)
        mask = _CAUSAL if is_causal else _FULL
        out = attention(q, k, v, mask=mask, scale=scale, bias=bias)
        if query.dim() == 4:
            return out
        return out.reshape(*lead, *query.shape[len(lead) : -1], value.shape[-1])


def _four_dims(x: Tensor) -> Tensor:
    """Return [batch, heads, tokens, head dim], whatever comes before the tokens."""
    if x.dim() == 4:
        return x
    heads = x.shape[-3] if x.dim() > 3 else 1
    return x.reshape(-1, heads, *x.shape[-2:])


def _check_lengths(query: Tensor, key: Tensor, step: Step) -> None:
    local_len = step.layout.local_len
    if query.shape[-2] == key.shape[-2] == local_len:
        return
    tokens = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
    held = f"whose ranks hold {local_len} tokens each ({step.layout.seq_len} in all)"
    if query.shape[-2] == local_len:
        raise ValueError(
            f"scaled_dot_product_attention() got {tokens} inside a step {held}. If the keys are "
            "the same on every rank (cross-attention), say so: `with cp.unsharded():` around the "
            "call, or cp.unsharded(module) once."
        )
    raise ValueError(
        f"scaled_dot_product_attention() got {tokens} inside a step {held}. Feed the model what "
        "cp.step(...) yields. Whole rows (generate(), a second model) go under "
        "`with cp.paused():`; a module that attends over something else than the sequence is "
        "declared with cp.unsharded(module)."
    )


def _bias(mask: Tensor, query: Tensor, step: Step) -> Tensor:
    """Turn an attn_mask into what is added to the scores of this rank's queries with all keys."""
    layout = step.layout
    if mask.requires_grad:
        raise ValueError(
            "attn_mask requires a gradient, which it would not get. Use attn_mask.detach() if it "
            "is not trained; a trained position bias is not supported inside a step."
        )
    rows, columns = mask.shape[-2:]
    if columns == 1:
        mask = mask.expand(*mask.shape[:-1], layout.seq_len)
    elif columns != layout.seq_len:
        if columns != layout.local_len or rows != 1:
            _refuse_mask(mask, step)
        mask = unshard(mask, -1, layout=layout, transport=step.groups.context)
    if rows not in (1, layout.local_len):
        if rows != layout.seq_len:
            _refuse_mask(mask, step)
        mask = shard(mask, -2, layout=layout, rank=step.cp_rank)
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


def _refuse_mask(mask: Tensor, step: Step) -> None:
    local_len, seq_len = step.layout.local_len, step.layout.seq_len
    raise ValueError(
        f"attn_mask has shape {tuple(mask.shape)} inside a step whose ranks hold {local_len} of "
        f"{seq_len} tokens. A mask of this rank's queries needs the keys of the whole row: "
        f"[..., {local_len}, {seq_len}] (in the batch, cut along the query dim: "
        f"sequence_dims={{'mask': -2}}); for keys alone give [..., 1, {seq_len}], or this rank's "
        f"[..., 1, {local_len}]. A causal mask is best said by is_causal=True."
    )


@outside_graphs  # the compiler would not see the change of the module's name, and attend locally
def _attend_multi_head(*args: Any, **kwargs: Any) -> Any:
    """Run nn.MultiheadAttention with its attention routed."""
    if kwargs.get("need_weights", True):
        raise ValueError(
            "nn.MultiheadAttention was called with need_weights=True inside a step: it would "
            "compute weights over this rank's tokens only. Call it with need_weights=False."
        )
    # Inside a mode its own functions run without it. This one calls SDPA by its module's name.
    functional.scaled_dot_product_attention = _attend  # type: ignore[assignment]
    try:
        return _multi_head(*args, **kwargs)
    finally:
        functional.scaled_dot_product_attention = _sdpa


_num_untouched = 0


def _enter_untouched(*_: object) -> None:
    global _num_untouched
    _num_untouched += 1


def _leave_untouched(*_: object) -> None:
    global _num_untouched
    _num_untouched -= 1


class Unsharded:
    """Attention calls that are left as they are, for their keys are not cut.

    As a context, for the calls inside it; for modules, whenever they run, until ``undo()``.

    Args:
        modules: whose calls; none for the context alone.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self._handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(_enter_untouched),
                module.register_forward_hook(_leave_untouched, always_call=True),
            )
        ]

    def undo(self) -> None:
        """Route the modules' attention again."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "Unsharded":
        _enter_untouched()
        return self

    def __exit__(self, *_: object) -> None:
        _leave_untouched()
