# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets (Qwen3-Next, Qwen3.5) and Kimi delta attention, over sharded sequences.

The state S of a head is a matrix [key dim, value dim], and a range of tokens maps it to A S + U.
The model's kernel is linear in state and values: called with the values and zeros side by side,
from a state of zeros and the identity side by side, it returns U and A, the outputs from a zero
state, and the matrices that outputs read the state before the range with.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hf_patches.mixers.layer_functions import Functions, replace_functions
from hf_patches.mixers.rows import RESET, RangeRows, build_rows
from hf_patches.mixers.short_conv import convolve
from lightning_cp.patch import Patch
from lightning_cp.sequence import initial_states

_CHUNK_SIZE: Final = 64  # of the torch code, and of fla


def delta_rule(
    stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the delta rule over full sequences with this rank's tokens.

    Args:
        stock: the kernel of the model, which sees one range.
        query: [B, L, H, key dim].
        key: [B, L, H, key dim].
        value: [B, L, H, value dim].
        g: [B, L, H] or [B, L, H, key dim], logarithms of decays.
        beta: [B, L, H].
        use_qk_l2norm_in_kernel: whether queries and keys are normalized.
        others: no state comes from a cache, none is returned; the step knows the documents.

    Returns:
        [B, L, H, value dim].
    """
    rows = build_rows(query, _CHUNK_SIZE)
    dtype = query.dtype
    if not _has_kernels():
        # The torch code computes in float32 and rounds the result to the dtype of the queries, also
        # the matrices that the state is read with. The kernels of fla take no float32.
        query = query.float()
    tokens = rows.arrange(query), rows.arrange(rows.hide(key)), rows.arrange(value)
    kernel = partial(
        stock,
        g=rows.arrange(g, reset=RESET),
        beta=rows.arrange(beta),
        chunk_size=_CHUNK_SIZE,
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    compute = _compute_with_states if rows.enters else _compute_alone
    return rows.restore(compute(kernel, *tokens, rows)).to(dtype), None


@lru_cache(maxsize=1)
def _has_kernels() -> bool:
    return find_spec("fla") is not None


def _compute_with_states(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, rows: RangeRows
) -> Tensor:
    """Return the outputs of rows [N, T, H, value dim], with the states before them."""
    num_rows, _, heads, value_dim = value.shape
    sizes = [value_dim, key.shape[-1]]
    eye = torch.eye(sizes[1], dtype=torch.float32, device=value.device)
    start = pad(eye, (value_dim, 0)).expand(num_rows, heads, -1, -1)
    out, final = kernel(query, key, pad(value, (0, sizes[1])), initial_state=start)
    state, decay = final.split(sizes, -1)
    before = _initial(decay, state, rows)
    out, reads = out.split(sizes, -1)
    read = torch.einsum("nthk,nhkv->nthv", reads, before.to(reads.dtype))
    complete: Tensor = out + read
    return complete


def _compute_alone(
    kernel: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, rows: RangeRows
) -> Tensor:
    """Return the outputs of rows that no state reaches: less work, but theirs reach others."""
    out, state = kernel(query, key, value)
    decay = state.new_zeros(*state.shape[:-1], state.shape[-2])
    # The states are zero; adding them lets gradients of other ranks come back.
    complete: Tensor = out + _initial(decay, state, rows).sum().to(out.dtype)
    return complete


def _initial(decay: Tensor, state: Tensor, rows: RangeRows) -> Tensor:
    pair = (rows.by_range(x) for x in (decay, state))
    return initial_states(*pair, apply=torch.matmul).flatten(0, 1)


_GATED: Final[Functions] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
}
_BY_CHANNEL: Final[Functions] = {
    "causal_conv1d_fn": convolve,
    "chunk_kimi_delta_attention": delta_rule,
}


def replace_delta_nets(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the gated delta nets of a model, with one decay for each head."""
    return replace_functions(model, _GATED)


def replace_kimi_delta_attention(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the delta nets of a model with a decay for each channel of the keys."""
    return replace_functions(model, _BY_CHANNEL)
