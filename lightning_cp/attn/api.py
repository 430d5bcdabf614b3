# SPDX-License-Identifier: Apache-2.0
"""`attention()`, the public function: checks its inputs, gets a call from the chooser, runs it.

Inside a step it attends over full sequences with this rank's tokens. Without a step, or in a paused
one, its inputs are full sequences.
"""

from collections.abc import Sequence

from torch import Tensor

from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.call import (
    AlibiSlopes,
    AttentionCall,
    Bias,
    ScoreBias,
    check_qkv,
    shapes_of,
)
from lightning_cp.attn.choose import build_call
from lightning_cp.geometry.branches import Branches, BranchMask
from lightning_cp.geometry.mask import Mask
from lightning_cp.private.compiler import outside_graphs, within
from lightning_cp.step.guards import step_of_call
from lightning_cp.step.step import PerStep, Step, full_step


@outside_graphs
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend over full sequences with this rank's shard of them.

    Args:
        q: queries [B, H, L, D], where L is the number of tokens on this rank.
        k: keys [B, K, L, D]; K divides H (key heads are not expanded).
        v: values [B, K, L, Dv].
        mask: which keys a query sees, in global positions. Documents and padding that it does not
            specify come from the step's batch. A mask from ``cp.mask(...)`` carries its step.
        scale: factor on q.k; 1 / sqrt(D) when None.
        softcap: ``c`` turns each score s into ``c * tanh(s / c)``.
        sinks: [H], a logit per head that takes its share of each softmax and adds no value.
        bias: [B or 1, H or 1, L or 1, S], added to the scores of this rank's queries with all keys
            of the sequence, in their original order. It gets no gradient.
        alibi: [H], a slope per head: a score falls by slope * distance of query and key. It gets no
            gradient.
        dropout: must be 0; any other value raises.

    Returns:
        [B, H, L, Dv]. Queries that see nothing get 0. This does not apply to a document of padding
        alone that was read from a batch: it counts as padding of the document before it.

    Example:
        >>> import torch
        >>> q, k = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
        >>> attention(q, k, k, mask=Mask(causal=True, window=3)).shape
        torch.Size([1, 4, 10, 8])
    """
    step = step_of_call(mask)
    if dropout:
        raise ValueError(
            f"attention(dropout={dropout}): attention dropout is not exact when a sequence is "
            "sharded over several ranks. Set it to 0 (attention_dropout=0.0 in most model "
            "configs); dropout on activations is fine."
        )
    if step is None:
        step = full_step(q.shape[2] if q.dim() == 4 else 1)  # other shapes are refused below
    score_bias = None
    if bias is not None or alibi is not None:
        score_bias = _read_bias(bias, alibi, q, step.layout.seq_len)
    has_bias = score_bias is not None
    if step.branches is None:
        call = find_call(step, mask, q, k, v, scale, softcap, sinks, has_bias=has_bias)
        return call.run(q, k, v, sinks, score_bias)
    masks = branch_masks(mask, step, step.branches, has_slopes=alibi is not None)
    calls = [
        find_call(step, part, q, k, v, scale, softcap, sinks, has_bias=has_bias) for part in masks
    ]
    first, *others = (call.run(q, k, v, sinks, score_bias) for call in calls)
    return sum(others, first)


attend = within(attention)
"""`attention` without its break of compiled graphs, for callers that have made one."""


def branch_masks(mask: Mask, step: Step, branches: Branches, *, has_slopes: bool) -> Sequence[Mask]:
    """Return the masks whose outputs add up to attention between branches of a document."""
    problems = {
        "no causal mask": not mask.causal,
        "a window or chunks": mask.is_windowed(step.layout.seq_len),
        "spans": mask.spans is not None,
        "ALiBi slopes": has_slopes,
        "documents or padding of its own": mask.documents is not None or mask.padding is not None,
    }
    present = ", ".join(name for name, is_present in problems.items() if is_present)
    if present:
        raise ValueError(
            f"attention() got {present} inside a step whose batch has `branch_ids`. Only plain "
            "causal attention knows branches: elsewhere distances of tokens would not be those of "
            "their positions. Put each branch into a document of its own, behind a copy of what it "
            "shares. (SDPA calls ignore documents and branches: use attention().)"
        )
    numbers = range(branches.count)
    return [BranchMask(causal=True, branches=branches, number=number) for number in numbers]


_calls = PerStep[AttentionCall]()


def calls_of(step: Step) -> list[AttentionCall]:
    """Return the attention calls that have been built in a step."""
    return _calls.all(step)


def find_call(
    step: Step,
    mask: Mask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    has_bias: bool,
) -> AttentionCall:
    """Return a call of a step: all layers make the same one, which is checked and planned once."""
    tensors = (q.dtype, k.dtype, v.dtype, q.device, None if sinks is None else sinks.shape)
    key = (mask.key(), q.shape, k.shape, v.shape, *tensors, scale, softcap, has_bias)
    call = _calls.get(step, key)
    if call is None:
        _check_tensors(q, k, v, sinks)
        scores = _read_scores(q, scale, softcap)
        _check_length(q, step)
        call = _calls.put(step, build_call(mask, step, scores, q, k, v, has_bias=has_bias), key)
    return call


def _read_scores(q: Tensor, scale: float | None, softcap: float | None) -> Scores:
    if isinstance(scale, Tensor):
        raise TypeError(
            "attention(scale=...) got a tensor, whose gradient would be lost. Multiply q by a "
            "learned scale and pass scale=1.0."
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(
            f"attention(softcap={softcap}): pass a number above 0, or None for no softcap."
        )
    return Scores(q.shape[-1] ** -0.5 if scale is None else float(scale), softcap)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    check_qkv("attention", q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "attention() is self-attention: queries and keys are the same tokens, but there are "
            f"{q.shape[2]} queries and {k.shape[2]} keys. With a key cache (generate()), or for "
            "cross-attention, use `with cp.paused():` and plain attention."
        )
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"attention(): {num_heads} query heads cannot share {num_kv_heads} key heads evenly "
            f"({shapes_of(q, k, v)}). Use a number of key heads that divides the query heads."
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(
            f"attention(sinks=...) has shape {tuple(sinks.shape)}, but needs one logit per query "
            f"head: ({num_heads},)."
        )


def _read_bias(
    bias: Tensor | None, alibi: Tensor | None, q: Tensor, seq_len: int
) -> ScoreBias | None:
    if bias is not None:
        _check_bias(bias, q, seq_len)
    if alibi is None:
        return None if bias is None else Bias(bias)
    _check_slopes(alibi, bias, q)
    return AlibiSlopes(alibi)


def _check_bias(bias: Tensor, q: Tensor, seq_len: int) -> None:
    shape = (*q.shape[:3], seq_len)
    fits = bias.dim() == 4 and all(
        size == needed or (size == 1 and dim < 3)
        for dim, (size, needed) in enumerate(zip(bias.shape, shape, strict=True))
    )
    if not fits or not bias.is_floating_point():
        raise ValueError(
            f"attention(bias=...) is {bias.dtype} of shape {tuple(bias.shape)}, but must be "
            f"floating and of shape {shape}; each of the first three sizes may be 1."
        )
    if bias.requires_grad:
        raise ValueError(
            "attention(bias=...) requires a gradient, which it would not get. Use bias.detach() if "
            "it is not trained; a trained position bias is not supported."
        )


def _check_slopes(alibi: Tensor, bias: Tensor | None, q: Tensor) -> None:
    if alibi.shape != (q.shape[1],) or not alibi.is_floating_point():
        raise ValueError(
            f"attention(alibi=...) is {alibi.dtype} of shape {tuple(alibi.shape)}, but must be one "
            f"floating slope per query head: ({q.shape[1]},)."
        )
    if alibi.requires_grad:
        raise ValueError(
            "attention(alibi=...) requires a gradient, which it would not get. Slopes are "
            "constants: use alibi.detach()."
        )
    if bias is not None:
        raise ValueError(
            "attention() got bias and alibi. Add the slopes to the bias, -slope * |q - k|, and "
            "leave alibi out."
        )


def _check_length(q: Tensor, step: Step) -> None:
    layout = step.layout
    if q.shape[2] != step.tensor_len:
        full = " That is the full sequence." if q.shape[2] == layout.seq_len else ""
        raise ValueError(
            f"attention() got {q.shape[2]} tokens inside a step whose ranks hold "
            f"{step.tensor_len} each ({layout.seq_len} over {layout.cp_size} ranks).{full} Feed "
            "the model what cp.step(...) yields; for full sequences (generate(), a second model) "
            "use `with cp.paused():`."
        )
