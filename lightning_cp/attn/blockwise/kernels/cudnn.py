# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention, nearly twice as fast as FA2 on Hopper.

Its traps: every new shape is planned, which takes the host some 40 ms for each of forward and
backward, and the plan is kept for ever; backward's plans are told apart by the layouts of q, k and
v only, so that out and dout must come in one layout always.
"""

import torch
from torch import Tensor

from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Request
from lightning_cp.attn.blockwise.kernels.flash import FlashKernel

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

# No dropout, like 0.0, but torch keeps our plans apart from those of other calls by it. They were
# made for the dout of those calls, and with ours they give wrong gradients without a word (seen in
# torch 2.11; later versions compare its layout too).
_OURS = -0.0

# So many shapes are remembered: those that came last.
_MOST_SHAPES = 1024

# Older ones are wrong on rows whose length is no multiple of 128 (pytorch#169849).
_OLDEST = 91501


class CudnnKernel(FlashKernel):
    """`aten._scaled_dot_product_cudnn_attention` and its backward; FA2 for tiles not worth a plan.

    Rows and documents may come in ever new lengths, whose plans would cost more than they bring.
    Those of rows of one length come again with every layer and step: FA2 computes a new shape until
    it has lost as much time as a plan takes, and cuDNN from the next step on.

    Args:
        work: what FA2 has computed of each shape; shared by what `settled` returns.
        planned: shapes that are worth a plan by now.
    """

    name = "cudnn"
    max_head_dim = 128
    min_capability = 9
    # Lengths that are multiples of this are taken for those of chunks that come again.
    grain = 128
    # Other tiles are planned at once if they are so large (multiply-adds of one matrix product; 32
    # heads of 128, 8k by 8k) that the layers of one step pay for it.
    large = 2**38
    # The rest once FA2 has computed so much of one shape: it takes 36 ms longer for that than cuDNN
    # forward and 100 backward (H200, nothing hidden).
    patience = 2**43

    def __init__(
        self, work: dict[object, int] | None = None, planned: frozenset[object] = frozenset()
    ) -> None:
        self._work = {} if work is None else work
        self._planned = planned

    def settled(self) -> "CudnnKernel":
        """Return the kernel as it is by now, for one step.

        Layers that are recomputed must find the same kernel again: other roundings might send
        tokens to other experts, and checkpointing refuses what has other shapes.
        """
        planned = (shape for shape, done in self._work.items() if done >= self.patience)
        return CudnnKernel(self._work, frozenset(planned))

    def refuse(self, request: Request) -> str | None:
        """Refuse what FA2 refuses too, a cuDNN that is too old, and determinism."""
        reason = super().refuse(request)
        if reason is not None:
            return reason
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if version is None:
            return "this build of torch has no cuDNN"
        if version < _OLDEST:
            return f"it needs cuDNN {_spelled(_OLDEST)} or newer, and torch has {_spelled(version)}"
        if torch.are_deterministic_algorithms_enabled():
            return "it is not deterministic, and torch.use_deterministic_algorithms() is on"
        return None

    def rectangle_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Run the op. Its causal mask starts at the top left, so on squares it is the usual."""
        if not self.is_worth_a_plan(q, k, ("forward", causal)):
            return super().rectangle_forward(q, k, v, causal=causal, scale=scale)
        out, lse, *_ = _forward(
            q,
            k,
            v,
            attn_bias=None,
            compute_log_sumexp=True,
            dropout_p=0.0,
            is_causal=causal,
            scale=scale,
        )
        return out, lse.squeeze(-1)

    def rectangle_backward(
        self, given: BackwardInputs, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the op's backward."""
        dout, q, k, v, out, lse = given
        if not self.is_worth_a_plan(q, k, ("backward", causal)):
            return super().rectangle_backward(given, causal=causal, scale=scale)
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _backward(
            _laid_out_like(q, dout),
            q,
            k,
            v,
            _laid_out_like(q, out),
            lse.unsqueeze(-1),
            philox_seed=no_dropout,
            philox_offset=no_dropout,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[2],
            max_k=k.shape[2],
            dropout_p=_OURS,
            is_causal=causal,
            scale=scale,
        )
        return dq, dk, dv

    def is_worth_a_plan(self, q: Tensor, k: Tensor, kind: object) -> bool:
        """Say whether cuDNN computes this rectangle, and remember it.

        Nobody else remembers at the same time: who calls backward waits for autograd's thread.

        Args:
            q: its queries.
            k: its keys.
            kind: what has plans of its own.
        """
        queries, keys = q.shape[2], k.shape[2]
        if min(queries, keys) == 1 or q.numel() == 0:
            return False  # torch does not trust cuDNN with a single key, nor with a single query
        work = q.numel() * keys
        if (queries % self.grain == 0 and keys % self.grain == 0) or work >= self.large:
            return True
        shape = (kind, q.dtype, q.shape, k.shape)
        self._work[shape] = self._work.pop(shape, 0) + work
        if len(self._work) > _MOST_SHAPES:
            del self._work[next(iter(self._work))]
        return shape in self._planned


def _laid_out_like(q: Tensor, x: Tensor) -> Tensor:
    """Return x with the strides of q, by which plans are told apart."""
    if x.stride() == q.stride():
        return x
    return torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device).copy_(x)


def _spelled(version: int) -> str:
    """Return a version of cuDNN 9 or newer in words.

    Example:
        >>> _spelled(91501)
        '9.15.1'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
