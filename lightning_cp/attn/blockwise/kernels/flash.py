# SPDX-License-Identifier: Apache-2.0
"""Flash attention on the GPU, as included in torch: FA2.

`torch.nn.attention.activate_flash_attention_impl` puts FA3 or FA4 behind the same ops.
"""

import torch
from torch import Tensor

from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Request
from lightning_cp.attn.blockwise.kernels.dense import DenseKernel

forward_op = torch.ops.aten._scaled_dot_product_flash_attention.default
backward_op = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class FlashKernel(DenseKernel):
    """`aten._scaled_dot_product_flash_attention` and its backward."""

    name = "flash"
    max_head_dim = 256
    min_capability = 8

    def unsupported_reason(self, request: Request) -> str | None:
        """Exclude what no such op supports, and builds of torch without this one."""
        reason = super().unsupported_reason(request)
        if reason is None and not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no flash attention"
        return reason

    def rectangle_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Run the op. Its causal mask is aligned bottom-right: the usual one on squares."""
        out, lse, *_ = forward_op(q, k, v, dropout_p=0.0, is_causal=causal, scale=scale)
        return out, lse

    def differentiable_rectangle(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> Tensor | None:
        """Run the op; its backward makes what it needs contiguous."""
        out: Tensor = forward_op(q, k, v, dropout_p=0.0, is_causal=causal, scale=scale)[0]
        return out

    def rectangle_backward(
        self, inputs: BackwardInputs, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the op's backward."""
        dout, q, k, v, out, lse = inputs
        no_dropout = q.new_empty(0)
        dq, dk, dv = backward_op(
            dout,
            q,
            k,
            v,
            out,
            lse,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[2],
            max_k=k.shape[2],
            dropout_p=0.0,
            is_causal=causal,
            philox_seed=no_dropout,
            philox_offset=no_dropout,
            scale=scale,
        )
        return dq, dk, dv
