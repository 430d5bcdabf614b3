# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise convolution over full sequences with this rank's shard of them.

Each range is convolved after its halo, all of them in one call. That is right for all tokens but
the first few of documents that start inside a range, which are computed again, without what they
must not see.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from lightning_cp.comm.transport import to_device
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.private.modes import plain_functions
from lightning_cp.sequence.halo import build_halo_plan, extend, per_token
from lightning_cp.sequence.token_map import active_map, token_map
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import Step, per_step


@outside_graphs
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve full sequences along their tokens, channel by channel, with this rank's shard.

    ``out[b, d, t] = bias[d] + sum_k weight[d, k] * x[b, d, t - K + 1 + k]`` over the tokens that
    ``t`` sees: tokens of its document that are not padding. Tokens of no document get the bias.
    Differentiable; the tokens before a range come from other ranks. Every rank must call it in the
    same order.

    Args:
        x: [B, D, L], where L is the number of tokens on this rank.
        weight: [D, K]; of a ``nn.Conv1d(D, D, K, groups=D)``, ``conv.weight.squeeze(1)``.
        bias: [D].

    Returns:
        [B, D, L]. Outside a step, the convolution of full sequences.

    Example:
        >>> causal_conv1d(torch.arange(1.0, 5).view(1, 1, 4), torch.tensor([[10.0, 1.0]]))
        tensor([[[ 1., 12., 23., 34.]]])
    """
    _check_shapes(x, weight, bias)
    active = active_map("causal_conv1d", x, 2)
    if active is None:
        return _conv(pad(x, (weight.shape[1] - 1, 0)), weight, bias)
    with plain_functions():  # a step refuses other convolutions along this rank's tokens
        return _conv_sharded(x, weight, bias, active[0])


def _conv_sharded(x: Tensor, weight: Tensor, bias: Tensor | None, step: Step) -> Tensor:
    left = weight.shape[1] - 1
    plan = build_halo_plan(step, left, x.device)
    patch = _build_patch(step, left, x.shape[0], x.device)
    if patch.hidden is not None:
        x = x.masked_fill(per_token(patch.hidden, x, 2), 0)
    extended = extend(x, 2, plan)
    if x.shape[2] == 0:  # nothing to compute, but the weights keep their place in backward
        return _conv(pad(extended, (0, 1)), weight, bias)[..., :0]
    out = _conv(extended, weight, bias)
    if len(plan.lengths) > 1:
        sizes = [size for length in plan.lengths for size in (length, left)][:-1]
        out = torch.cat(torch.split(out, sizes, 2)[::2], 2)
    return out if patch.targets is None else _recompute(out, extended, weight, bias, patch)


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    fits = x.dim() == 3 and weight.dim() == 2 and weight.shape[0] == x.shape[1]
    if not fits or weight.shape[1] < 1 or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = ", ".join(
            f"{name} {tuple(value.shape)}"
            for name, value in (("x", x), ("weight", weight), ("bias", bias))
            if value is not None
        )
        raise ValueError(
            "causal_conv1d() needs x [batch, channels, tokens], weight [channels, width] and bias "
            f"[channels]; it got {shapes}. For a nn.Conv1d with groups=channels, give "
            "conv.weight.squeeze(1); hidden states [batch, tokens, channels] need "
            "x.transpose(1, 2)."
        )


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return conv1d(x, weight.unsqueeze(1), bias, groups=weight.shape[0])


class _Patch(NamedTuple):
    """What a plain convolution of ranges and halos does not know.

    Args:
        hidden: bool [R, L], tokens that no token sees; None for none.
        targets: int64 [2, n], samples and local positions of tokens that are computed again; None
            for none.
        sources: int64 [n, K], the positions of their taps in the extended tensor.
        visible: bool [n, K], the taps that they see.
    """

    hidden: Tensor | None
    targets: Tensor | None
    sources: Tensor | None
    visible: Tensor | None


@per_step
def _build_patch(step: Step, left: int, batch_size: int, device: torch.device) -> _Patch:
    tokens = token_map(step)
    hidden = tokens.hidden
    moved = None if hidden is None else to_device(torch.from_numpy(hidden), device)
    lengths = tokens.lengths
    range_start = np.repeat([held.tokens.start for held in tokens.held], lengths)
    # Each range lies behind its own halo and those of the ranges before it.
    shift = np.repeat([left * (held.number + 1) for held in tokens.held], lengths)
    age = tokens.positions - tokens.first[:, tokens.positions]
    is_cut = (age < left) & (tokens.positions - age > range_start)
    samples, locals_ = np.nonzero(np.broadcast_to(is_cut, (batch_size, is_cut.shape[1])))
    if len(samples) == 0:
        return _Patch(moved, None, None, None)
    back = np.arange(left, -1, -1)
    ages = np.broadcast_to(age, (batch_size, age.shape[1]))[samples, locals_]
    arrays = (
        np.stack([samples, locals_]),
        (locals_ + shift[locals_])[:, None] - back,
        back <= ages[:, None],
    )
    return _Patch(moved, *(to_device(torch.from_numpy(array), device) for array in arrays))


def _recompute(
    out: Tensor, extended: Tensor, weight: Tensor, bias: Tensor | None, patch: _Patch
) -> Tensor:
    """Return the convolution with the tokens of the patch computed from what they see."""
    targets, sources, visible = patch.targets, patch.sources, patch.visible
    assert targets is not None and sources is not None and visible is not None  # noqa: S101, PT018
    dtype = accumulation_dtype(out.dtype)
    taps = extended.transpose(1, 2)[targets[0].unsqueeze(1), sources]  # [n, K, D]
    taps = taps.masked_fill(~visible.unsqueeze(-1), 0).to(dtype)
    values = (taps * weight.T.to(dtype)).sum(1)
    if bias is not None:
        values = values + bias
    by_token = out.transpose(1, 2).index_put((targets[0], targets[1]), values.to(out.dtype))
    return by_token.transpose(1, 2)
