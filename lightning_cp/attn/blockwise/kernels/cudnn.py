# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention, nearly twice as fast as FA2 on Hopper.

Its traps: every new shape is planned, which takes the host about 40 ms for each of forward and
backward, and plans are never freed; plans of backward are looked up by the strides of q, k and v
only, so out and dout must always have the same strides.
"""

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import has_strides, new_strides
from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Request
from lightning_cp.attn.blockwise.kernels.flash import FlashKernel

forward_op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
backward_op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

# No dropout, like 0.0, but it separates our plans from those of other calls. Those were made for
# another layout of dout, and give silently wrong gradients with ours (seen in torch 2.11; later
# versions compare its layout too).
_OUR_DROPOUT = -0.0

MAX_SHAPES = 1024
"""Most recent shapes that are remembered."""

# Older ones are wrong for lengths that are not multiples of 128 (pytorch#169849).
_MIN_VERSION = 91501


class CudnnKernel(FlashKernel):
    """`aten._scaled_dot_product_cudnn_attention` and its backward; FA2 for tiles not worth a plan.

    With documents, shapes may be new in every batch, and their plans would cost more than they
    save. Shapes of a fixed length repeat with every layer and step: FA2 computes a new shape until
    it has lost as much time as a plan takes, and cuDNN from the next step on. Lengths of chunks
    are planned at once, as long as they are few.

    Args:
        work: multiply-adds that FA2 has computed for each shape; shared with `for_step`.
        planned: shapes that are worth a plan.
        trusted: shapes of chunks that were planned at once; shared with `for_step`.
    """

    name = "cudnn"
    max_head_dim = 128
    min_capability = 9
    # Lengths that are multiples of this are assumed to be those of chunks, which repeat.
    grain = 128
    # So many of them, of both directions: 3 s of plans. Where each batch brings other lengths (a
    # collator that rounds them up to 1024), further ones must be worth it like all others.
    max_trusted = 64
    # Other tiles are planned at once if they are this large (multiply-adds of one matrix product;
    # 32 heads of 128, 8k by 8k): then the layers of one step pay for the plan.
    large = 2**38
    # The rest once FA2 has computed this much of one shape: it takes 36 ms longer for it than cuDNN
    # in forward and 100 ms in backward (H200, nothing masked).
    patience = 2**43

    def __init__(
        self,
        work: dict[object, int] | None = None,
        planned: frozenset[object] = frozenset(),
        trusted: set[object] | None = None,
    ) -> None:
        self._work = {} if work is None else work
        self._planned = planned
        self._trusted = set() if trusted is None else trusted

    def for_step(self) -> "CudnnKernel":
        """Return the kernel in its current state, for one step.

        Recomputed layers must use the same kernel again: different rounding might route tokens to
        other experts, and checkpointing rejects other shapes.
        """
        planned = (shape for shape, done in self._work.items() if done >= self.patience)
        return CudnnKernel(self._work, frozenset(planned), self._trusted)

    def unsupported_reason(self, request: Request) -> str | None:
        """Exclude what FA2 does not support, an old cuDNN, and deterministic mode."""
        reason = super().unsupported_reason(request)
        if reason is not None:
            return reason
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if version is None:
            return "this build of torch has no cuDNN"
        if version < _MIN_VERSION:
            return (
                f"it needs cuDNN {_format(_MIN_VERSION)} or newer, but torch has {_format(version)}"
            )
        if torch.are_deterministic_algorithms_enabled():
            return "it is not deterministic, but torch.use_deterministic_algorithms() is on"
        return None

    def rectangle_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Run the op. Its causal mask is aligned top-left: the usual one on squares."""
        if not self.is_worth_a_plan(q, k, ("forward", causal)):
            return super().rectangle_forward(q, k, v, causal=causal, scale=scale)
        out, lse, *_ = self.run_op(q, k, v, causal, scale)
        return out, lse.squeeze(-1)

    def differentiable_rectangle(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> Tensor | None:
        """Run the op if both passes are planned, and its output will have the layout of q."""
        kinds, strides = (("forward", causal), ("backward", causal)), q.stride()
        is_planned = all(self._has_plan(q, k, kind) for kind in kinds)
        if not is_planned or not has_strides(q, new_strides(q.shape, strides)):
            return None
        out, *_ = self.run_op(q, k, v, causal, scale)
        return out if has_strides(out, strides) else None

    def rectangle_backward(
        self, inputs: BackwardInputs, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the op's backward."""
        dout, q, k, v, out, lse = inputs
        if not self.is_worth_a_plan(q, k, ("backward", causal)):
            return super().rectangle_backward(inputs, causal=causal, scale=scale)
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = backward_op(
            _with_strides_of(q, dout),
            q,
            k,
            v,
            _with_strides_of(q, out),
            lse.unsqueeze(-1),
            philox_seed=no_dropout,
            philox_offset=no_dropout,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[2],
            max_k=k.shape[2],
            dropout_p=_OUR_DROPOUT,
            is_causal=causal,
            scale=scale,
        )
        return dq, dk, dv

    @staticmethod
    def run_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        """Run the op; return out, lse and what else it has."""
        results: tuple[Tensor, ...] = forward_op(
            q,
            k,
            v,
            attn_bias=None,
            compute_log_sumexp=True,
            dropout_p=_OUR_DROPOUT,
            is_causal=causal,
            scale=scale,
        )
        return results

    def is_worth_a_plan(self, q: Tensor, k: Tensor, kind: object) -> bool:
        """Return whether cuDNN computes this rectangle, and count it.

        Needs no lock: the caller of backward waits for autograd's thread.

        Args:
            q: its queries.
            k: its keys.
            kind: each kind has its own plans.
        """
        queries, keys = q.shape[2], k.shape[2]
        if min(queries, keys) == 1 or q.numel() == 0:
            return False  # torch excludes single keys and single queries from cuDNN
        if self._has_plan(q, k, kind):
            return True
        work, shape = q.numel() * keys, _shape(q, k, kind)
        is_chunk = queries % self.grain == 0 and keys % self.grain == 0
        # Not one that FA2 has begun with: a step computes a shape by one kernel to its end.
        if is_chunk and len(self._trusted) < self.max_trusted and shape not in self._work:
            self._trusted.add(shape)
            return True
        self._work[shape] = self._work.pop(shape, 0) + work
        if len(self._work) > MAX_SHAPES:
            del self._work[next(iter(self._work))]
        return False

    def _has_plan(self, q: Tensor, k: Tensor, kind: object) -> bool:
        """Return whether cuDNN computes this rectangle whatever was computed before."""
        if q.numel() * k.shape[2] >= self.large:
            return True
        shape = _shape(q, k, kind)
        if shape in self._planned:  # used again: it is remembered longer
            self._work[shape] = self._work.pop(shape, self.patience)
            return True
        return shape in self._trusted


def _shape(q: Tensor, k: Tensor, kind: object) -> object:
    """Return what plans are made for."""
    return kind, q.dtype, q.shape, k.shape


def _with_strides_of(q: Tensor, x: Tensor) -> Tensor:
    """Return x with the strides of q, by which plans are looked up."""
    if has_strides(x, q.stride()):
        return x
    return torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device).copy_(x)


def _format(version: int) -> str:
    """Return a version of cuDNN 9 or newer as text.

    Example:
        >>> _format(91501)
        '9.15.1'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
