# SPDX-License-Identifier: Apache-2.0
"""Lightning attention (MiniMax) over sharded sequences.

It is a Mamba-2 recurrence whose decay is one constant per head: values are its inputs, keys and
queries are its B and C. So it is computed with the kernel of Mamba-2, in float32.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import sigmoid
from transformers import PreTrainedModel

from hf_patches.interface.names import step_of
from hf_patches.mixers.layer_functions import check_own_forward, unknown_layer
from hf_patches.mixers.mamba2 import chunk_scan
from hf_patches.mixers.replacement import Replacement
from hf_patches.mixers.rows import build_rows
from lightning_cp.patch import Patch
from lightning_cp.private.compiler import outside_graphs


class LightningAttention(Replacement):
    """The forward of a lightning attention layer."""

    def call(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the class; inside a step, compute over full sequences."""
        if step_of() is None:
            return self.stock(hidden_states, *args, **kwargs)
        return self._forward_in_step(hidden_states), None

    @outside_graphs
    def _forward_in_step(self, hidden_states: Tensor) -> Tensor:
        module: Any = self.module
        shape = hidden_states.shape[:2]
        qkv = module.act_fn(module.qkv_proj(hidden_states))
        qkv = build_rows(qkv, module.block_size).hide(qkv)  # the step knows the padding
        query, key, value = qkv.view(*shape, module.num_attention_heads, -1).chunk(3, -1)
        out = _attend(query, key, value, module.slope_rate.flatten(), module.block_size)
        out = module.norm(out.flatten(2).to(value.dtype))
        gated: Tensor = module.out_proj(sigmoid(module.output_gate(hidden_states)) * out)
        return gated


def _attend(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, chunk_size: int) -> Tensor:
    """Return the output [B, L, H, D] of lightning attention over full sequences."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    steps = value.new_ones(value.shape[:3]).float()
    return chunk_scan(mamba2_chunk_scan, value, steps, -slope.float(), key, query, chunk_size)


def replace_lightning_attention(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the lightning attention layers of a model; yield them.

    Raises before it changes anything if the model has others than those that we know.
    """
    layers = [
        (name, module) for name, module in model.named_modules() if _is_lightning_attention(module)
    ]
    for name, module in layers:
        check_own_forward(name, module)
    num_linear = model.config.get_text_config().layer_types.count("linear_attention")
    if len(layers) != num_linear:
        raise unknown_layer("the model", model, f"{num_linear - len(layers)} other linear layers")
    for _, module in layers:
        yield LightningAttention(module).install()


def _is_lightning_attention(module: nn.Module) -> bool:
    return hasattr(module, "slope_rate") and hasattr(module, "output_gate")
