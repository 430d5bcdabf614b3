# SPDX-License-Identifier: Apache-2.0
"""`attention()`: the one verb. Checks what came, chooses algorithm and kernel once, says which.

Inside a step it attends over the whole row with this rank's tokens; with no step, or a paused one,
the row is what it is given.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from lightning_cp.active_step import current
from lightning_cp.attn.accumulators import wire_dtype
from lightning_cp.attn.blockwise.function import Call, attend
from lightning_cp.attn.blockwise.kernels.base import Request, Scores
from lightning_cp.attn.blockwise.kernels.select import (
    Work,
    check_pair,
    is_dense,
    prefer_flex,
    select_kernel,
)
from lightning_cp.attn.cost import Choice, Problem, TravelName, chip_of, choose, memory_budget
from lightning_cp.attn.flex.api import place_of, swap_of
from lightning_cp.attn.flex.from_mask import RowCall, attend_row, build_row_call
from lightning_cp.attn.flex.mods import Place
from lightning_cp.attn.plan import Plan, build_plan, resolve_algorithm
from lightning_cp.attn.ulysses import SwappedCall
from lightning_cp.comm.mesh import Gpu, Groups
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.data.sharding import pad_end
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.guards import check_recompute
from lightning_cp.step import Step, StepMask
from lightning_cp.torch_private import outside_graphs

_logger = logging.getLogger(__name__)

AnyCall = Call | RowCall | SwappedCall


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
    """Attend over the whole row with this rank's part of it.

    Args:
        q: queries [B, H, L, D], L being the tokens of this rank.
        k: keys [B, K, L, D]; K divides H (grouped heads are not expanded).
        v: values [B, K, L, Dv].
        mask: who sees whom, in positions of the whole row. Documents and padding that it leaves
            open come from the step's batch. A mask from ``cp.mask(...)`` carries its step.
        scale: factor on q.k; 1 / sqrt(D) when None.
        softcap: ``c`` bends each score s to ``c * tanh(s / c)``.
        sinks: [H], a logit per head that takes its share of each softmax and adds nothing.
        bias: [B or 1, H or 1, L or 1, S], added to the scores of this rank's queries with the keys
            of the whole row, in their original order. It gets no gradient.
        alibi: [H], a slope per head: a score falls by slope * distance of query and key. It gets no
            gradient.
        dropout: must be 0; it is here to be refused in words.

    Returns:
        [B, H, L, Dv]. Queries that see nothing get 0. A document of padding alone is not among them
        if it was read from a batch: it counts as padding of the document before it.

    Example:
        >>> import torch
        >>> q, k = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
        >>> attention(q, k, k, mask=Mask(causal=True, window=3)).shape
        torch.Size([1, 4, 10, 8])
    """
    if isinstance(mask, StepMask):
        step = mask.step
    else:
        step = current()
        check_recompute(step)
    if dropout:
        raise ValueError(
            f"attention(dropout={dropout}): attention dropout is not exact when a row is shared by "
            "several ranks. Set it to 0 (attention_dropout=0.0 in most model configs); dropout on "
            "activations is fine."
        )
    if bias is not None:
        _check_bias(bias, q, q.shape[2] if step is None else step.layout.seq_len)
    if alibi is not None:
        _check_slopes(alibi, bias, q)
        bias = alibi
    call: AnyCall
    if step is None:
        _check_tensors(q, k, v, sinks)
        call = _whole_row_call(mask, _request(q, v, scale, softcap), q, k, v, bias)
    else:
        # Layers ask for the same again and again: what was checked and planned once is kept.
        kinds = (q.dtype, k.dtype, v.dtype, q.device, None if sinks is None else sinks.shape)
        key = (mask.key(), q.shape, k.shape, v.shape, *kinds, scale, softcap, bias is None)
        if key not in step.cache:
            _check_tensors(q, k, v, sinks)
            step.cache[key] = _call(mask, step, _request(q, v, scale, softcap), q, k, v, bias)
        call = step.cache[key]
        short = step.layout.local_len - q.shape[2]
        if bias is not None:
            bias = _row_per_query(bias, step)
        if short:
            return _attend_padded(q, k, v, sinks, bias, call, short)
    return _attend(q, k, v, sinks, bias, call)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None, call: AnyCall
) -> Tensor:
    if isinstance(call, SwappedCall):
        return call.attend(q, k, v, sinks, bias, partial(_attend, call=call.call))
    if isinstance(call, RowCall):
        return attend_row(q, k, v, sinks, bias, call)
    return attend(q, k, v, sinks, bias, call)


def _row_per_query(bias: Tensor, step: Step) -> Tensor:
    """Write a bias out where one row may stand for one query or for all, by what a rank holds.

    Ranks that swap heads must all send their rows, or none.
    """
    layout = step.layout
    if layout.shows_padding or step.groups.inside.size == 1 or bias.dim() == 1:
        return bias
    return bias.expand(-1, -1, layout.local_len, -1) if bias.shape[2] == 1 else bias


def _attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    call: AnyCall,
    short: int,
) -> Tensor:
    """Add the padding that this rank's tensors do not show: all ranks move as many tokens."""
    tensor_len = q.shape[2]
    q, k, v = (pad_end(x, 2, short) for x in (q, k, v))
    if bias is not None and bias.dim() == 4 and bias.shape[2] == tensor_len > 1:
        bias = pad_end(bias, 2, short)
    return _attend(q, k, v, sinks, bias, call).narrow(2, 0, tensor_len)


def _request(q: Tensor, v: Tensor, scale: float | None, softcap: float | None) -> Request:
    if isinstance(scale, Tensor):
        raise TypeError(
            "attention(scale=...) got a tensor, whose gradient would be lost. Multiply q by a "
            "learned scale and give scale=1.0."
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(
            f"attention(softcap={softcap}): give a number above 0, or None for no cap."
        )
    scores = Scores(q.shape[-1] ** -0.5 if scale is None else float(scale), softcap)
    return Request(q.device, q.dtype, scores, max(q.shape[-1], v.shape[-1]))


def _call(
    mask: Mask, step: Step, request: Request, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> AnyCall:
    """Choose a kernel for a call of a step, and plan it."""
    _check_length(q, step)
    bounds = step.bounds(mask)
    _check_rows(bounds, q)
    swap, inside = swap_of(step, q, k), step.groups.inside.rank
    place = place_of(step, swap)
    num_heads = q.shape[1], k.shape[1]
    if swap is not None:
        num_heads = swap.query_heads[inside].size, swap.num_local_keys(inside)
    num_kv_heads = max(1, num_heads[1])
    check_pair(step.kernel, step.algorithm)
    algorithm = resolve_algorithm(step.algorithm)
    budget = None if step.attention_memory is None else int(step.attention_memory * 2**30)
    if _takes_flex(step.kernel, algorithm, request, bounds, place, q, v, bias, step.gpu):
        call: Call | RowCall = build_row_call(
            q,
            v,
            bounds,
            request.scores,
            place,
            step.groups.attend,
            num_heads=(num_heads[0], num_kv_heads),
            kernel=step.kernel,
            uid=step.uid,
            budget=budget,
            gradient_wire=step.gradient_wire,
        )
        kernel = "flex"
    else:
        selected = select_kernel(step.kernel, request).settled()
        choice = _choose_way(step, bounds, q, k, v, budget)
        algorithm = choice.algorithm
        groups = choice.num_groups_forward, choice.num_groups_backward
        plan = _plan(algorithm, bounds, place, num_kv_heads, groups)
        transport, wire = step.groups.attend, step.gradient_wire
        call = Call(plan, transport, selected, request.scores, step.uid, wire)
        kernel = selected.name
    if step.cp_rank == 0:
        _say(name_algorithm(algorithm, step.groups), step.layout.name, kernel, step.cp_size)
    return call if swap is None else SwappedCall(swap, step.groups.inside, call)


def _plan(
    algorithm: str, bounds: Bounds, place: Place, num_kv_heads: int, groups: tuple[int, int]
) -> Plan:
    """Plan a call; under bounds that later batches share, once."""
    build = _shared_plan if bounds.is_shared else _build_plan
    return build(algorithm, bounds, place, num_kv_heads, groups)


def _build_plan(
    algorithm: str, bounds: Bounds, place: Place, num_kv_heads: int, groups: tuple[int, int]
) -> Plan:
    forward, backward = groups
    return build_plan(
        algorithm,
        layout=place.layout,
        bounds=bounds,
        rank=place.rank,
        num_kv_heads=num_kv_heads,
        num_groups=forward,
        num_backward_groups=backward,
    )


_shared_plan = lru_cache(maxsize=16)(_build_plan)


def _choose_way(
    step: Step, bounds: Bounds, q: Tensor, k: Tensor, v: Tensor, budget: int | None
) -> Choice:
    """Choose how keys travel, and in how many groups of heads; the same on all ranks."""
    named = resolve_algorithm(step.algorithm)
    if q.device.type != "cuda":
        # Two groups let the second one travel while the first is computed.
        return Choice("ring", 1, 1, "") if named == "ring" else Choice("gather", 2, 2, "")
    seq_len = step.layout.seq_len
    problem = Problem(
        seq_len=seq_len,
        cp_size=step.cp_size,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        itemsize=q.dtype.itemsize,
        batch_size=q.shape[0],
        kind="full" if (bounds.last[:, 0] >= seq_len).all() else "causal",
        ulysses_size=step.groups.inside.size,
        wire_itemsize=wire_dtype(q.dtype, step.gradient_wire).itemsize,
    )
    capability = step.gpu.capability if step.gpu else torch.cuda.get_device_capability(q.device)
    chip = chip_of(capability)
    algorithms: Sequence[TravelName] = ("gather", "ring") if step.algorithm == "auto" else (named,)
    if budget is None:
        limit = memory_budget(problem, chip=chip, algorithms=algorithms)
    else:
        limit = float(budget)
    choice = choose(problem, memory_budget=limit, chip=chip, algorithms=algorithms)
    if not choice.fits and step.cp_rank == 0:
        _say_memory(choice.algorithm, choose(problem, memory_budget=limit, chip=chip).reason)
    return choice


def name_algorithm(algorithm: str, groups: Groups) -> str:
    """Return how tokens meet, in words."""
    between = resolve_algorithm(algorithm)
    if groups.inside.size == 1:
        return between
    return "ulysses" if groups.attend.size == 1 else f"ulysses x {between}"


def _takes_flex(
    kernel: str,
    algorithm: str,
    request: Request,
    bounds: Bounds,
    place: Place,
    q: Tensor,
    v: Tensor,
    bias: Tensor | None,
    gpu: Gpu | None = None,
) -> bool:
    """Say whether a call goes to FlexAttention; the same on all ranks, for it says what travels."""
    if kernel != "auto" or request.device.type != "cuda":
        return kernel == "flex"
    if gpu is not None and not gpu.compiles:
        return False
    work = Work(
        is_dense=is_dense(bounds, place.layout.seq_len),
        has_bias=bias is not None,
        row_len=place.layout.seq_len,
        num_queries=place.layout.local_len,
        min_head_dim=min(q.shape[-1], v.shape[-1]),
    )
    preferred = prefer_flex(select_kernel("auto", request), request, work)
    if preferred and algorithm == "ring" and place.rank == 0:
        _say_ring()
    return preferred and algorithm != "ring"


@lru_cache(maxsize=4)
def _say_memory(algorithm: str, ways: str) -> None:
    _logger.warning(
        "Attention by %s takes more GPU memory than its budget (attention_memory). By the cost "
        "model: %s",
        algorithm,
        ways,
    )


@lru_cache(maxsize=1)
def _say_ring() -> None:
    _logger.warning(
        "algorithm='ring' computes the edges of documents, windows and padding, and scores with "
        "softcap or bias, by the slow reference kernel. algorithm='gather' would take "
        "FlexAttention for them."
    )


def _whole_row_call(
    mask: Mask, request: Request, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> Call | RowCall:
    bounds = mask.bounds(q.shape[2])
    _check_rows(bounds, q)
    layout = build_layout("contiguous", seq_len=k.shape[2], cp_size=1)
    place, heads = Place(layout, 0), (q.shape[1], k.shape[1])
    if _takes_flex("auto", "gather", request, bounds, place, q, v, bias):
        lone = LoneTransport()
        return build_row_call(q, v, bounds, request.scores, place, lone, num_heads=heads)
    plan = _plan("gather", bounds, place, k.shape[1], (1, 1))
    return Call(plan, LoneTransport(), select_kernel("auto", request), request.scores)


def _check_rows(bounds: Bounds, q: Tensor) -> None:
    if bounds.num_samples not in (1, q.shape[0]):
        raise ValueError(
            f"attention(): the mask has {bounds.num_samples} rows (documents, spans or padding), "
            f"but the tensors have a batch of {q.shape[0]}."
        )


@lru_cache(maxsize=64)
def _say(algorithm: str, layout: str, kernel: str, cp_size: int) -> None:
    """Log a choice, once for each different one."""
    _logger.info(
        "context-parallel attention over %d ranks: algorithm=%s layout=%s kernel=%s",
        cp_size,
        algorithm,
        layout,
        kernel,
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    queries, keys, values = q.shape, k.shape, v.shape
    shapes_fit = (
        len(queries) == len(keys) == len(values) == 4
        and keys[:3] == values[:3]
        and queries[::3] == keys[::3]
        and queries[2] == keys[2]
        and keys[1] > 0
        and queries[1] % keys[1] == 0
    )
    if not shapes_fit:
        raise _misfit(q, k, v)
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(
            f"attention(): q, k, v must have one floating dtype, but are {q.dtype}, {k.dtype}, "
            f"{v.dtype}. Cast them to the dtype in which attention shall be computed."
        )
    if sinks is not None and sinks.shape != (queries[1],):
        raise ValueError(
            f"attention(sinks=...) has shape {tuple(sinks.shape)}, but needs one logit per query "
            f"head: ({queries[1]},)."
        )


def _misfit(q: Tensor, k: Tensor, v: Tensor) -> ValueError:
    """Say what is wrong with the shapes."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        return ValueError(f"attention() needs [batch, heads, tokens, head_dim]; it got {shapes}.")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return ValueError(
            f"attention(): q, k, v do not fit together: {shapes}. Batch must agree, k and v must "
            "have the same heads and tokens, q and k the same head dim."
        )
    if q.shape[2] != k.shape[2]:
        return ValueError(
            "attention() is self-attention: queries and keys are the same tokens, but there are "
            f"{q.shape[2]} queries and {k.shape[2]} keys. With a key cache (generate()), or for "
            "cross-attention, use `with cp.paused():` and plain attention."
        )
    return ValueError(
        f"attention(): {q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly "
        f"({shapes})."
    )


def _check_bias(bias: Tensor, q: Tensor, seq_len: int) -> None:
    wanted = (*q.shape[:3], seq_len)
    fits = bias.dim() == 4 and all(
        size == want or (size == 1 and dim < 3)
        for dim, (size, want) in enumerate(zip(bias.shape, wanted, strict=True))
    )
    if not fits or not bias.is_floating_point():
        raise ValueError(
            f"attention(bias=...) is {bias.dtype} of shape {tuple(bias.shape)}, but must be "
            f"floating and of shape {wanted}; each of the first three sizes may be 1."
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
        whole = " That is the whole row." if q.shape[2] == layout.seq_len else ""
        raise ValueError(
            f"attention() got {q.shape[2]} tokens inside a step whose ranks hold "
            f"{step.tensor_len} each ({layout.seq_len} over {layout.cp_size} ranks).{whole} Feed "
            "the model what cp.step(...) yields; for whole rows (generate(), a second model) use "
            "`with cp.paused():`."
        )
