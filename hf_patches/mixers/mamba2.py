# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 layers over sharded sequences.

The state of a head decays by one number per token. The model's kernel computes each range from a
zero state; what the state before the range adds to its outputs is one more product.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PreTrainedModel

from hf_patches.mixers.layer_functions import Functions, replace_functions
from hf_patches.mixers.rows import RESET, build_rows
from hf_patches.mixers.short_conv import convolve
from lightning_cp.patch import Patch
from lightning_cp.sequence import initial_states


def chunk_scan(
    stock: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **others: Any,
) -> Tensor:
    """Compute the state-space model over full sequences with this rank's tokens.

    Args:
        stock: the kernel of the model, which sees one range.
        hidden_states: [B, L, H, P].
        dt: [B, L, H], before bias and softplus.
        A: [H], negative.
        B: [B, L, G, N], for G groups of heads.
        C: [B, L, G, N].
        chunk_size: of the kernel.
        D: [H], weights of the tokens themselves.
        dt_bias: [H].
        dt_softplus: whether dt is positive by softplus.
        dt_limit: least and largest dt.
        others: no state comes from a cache, none is returned; the step knows the documents.

    Returns:
        [B, L, H, P].
    """
    rows = build_rows(hidden_states, chunk_size)
    dt = _discretize(dt, dt_bias, softplus_=dt_softplus, limit=dt_limit)
    # At a reset, dt A is the logarithm of its decay.
    dt = rows.arrange(dt, reset=RESET / A.detach().float().clamp(max=-1e-20))
    x, B, C = rows.arrange(rows.hide(hidden_states)), rows.arrange(B), rows.arrange(C)
    out, state = stock(x, dt, A, B, C, chunk_size=chunk_size, D=D, return_final_states=True)
    log_decay = (dt * A.float()).cumsum(1)
    decay = log_decay[:, -1].exp()[..., None, None].to(state.dtype)
    initial = initial_states(rows.by_range(decay), rows.by_range(state))
    out = out + _read(C, initial.flatten(0, 1), log_decay).to(out.dtype)
    return rows.restore(out).contiguous()


def _discretize(
    dt: Tensor, bias: Tensor | None, *, softplus_: bool, limit: tuple[float, float]
) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return torch.clamp(softplus(dt) if softplus_ else dt, *limit)


def _read(C: Tensor, state: Tensor, log_decay: Tensor) -> Tensor:
    """Return what the states before the rows [n, H, P, N] add to the outputs [n, T, H, P]."""
    num_rows, heads, *sizes = state.shape
    by_group = state.view(num_rows, C.shape[2], heads // C.shape[2], *sizes)
    read = torch.einsum("ntgs,nghps->ntghp", C.to(state.dtype), by_group).flatten(2, 3)
    return read * log_decay.exp().unsqueeze(-1)


def no_fused_layer(stock: Callable[..., Any], *args: Any, **others: Any) -> None:
    """Let the layer call the convolution and the recurrence one by one, not its fused kernel."""


_FUNCTIONS: Final[Functions] = {
    "causal_conv1d_fn": convolve,
    "mamba2_chunk_scan": chunk_scan,
    "mamba2_split_conv1d_scan_combined": no_fused_layer,
}


def replace_mamba2(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the convolutions and the recurrences of Mamba-2 layers."""
    return replace_functions(model, _FUNCTIONS)
