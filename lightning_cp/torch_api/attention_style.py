# SPDX-License-Identifier: Apache-2.0
"""A `ParallelStyle` for attention modules, which plans of torch's `parallelize_module` can name.

Each call of the module opens a step of its own, from the shapes that it is called with. Attention,
routing and backward are those of any step. For users: docs/tensor-parallel.md.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_cp.attn.ulysses import has_attended
from lightning_cp.comm.transport import gather
from lightning_cp.config import check_choice
from lightning_cp.data.batch import unnamed_batch
from lightning_cp.data.step_builder import build_step
from lightning_cp.geometry.layout import Layout, layout_of_shards
from lightning_cp.parallel import ContextParallel, run_step
from lightning_cp.patch import replace_method
from lightning_cp.private.autograd import in_backward
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.step import active_step
from lightning_cp.step.leaves import flatten
from lightning_cp.step.step import Opened, Step

_NAME = "ContextParallelAttention"


class ContextParallelAttention(ParallelStyle):
    """Let the attention calls of a module see full sequences, of which each rank holds a part.

    For plans of ``parallelize_module``, and models whose tokens the caller has sharded. All ranks
    must make each call, and compare shapes in it. Inside ``cp.step(batch)``, which knows documents
    and padding and routes the attention of all modules, it changes nothing.

    Args:
        cp: the ranks that share sequences. The mesh of the plan is not used: its ranks may share
            heads.
        seq_dim: the sequence dim of the first tensor that the module is called with.
        layout: how the tokens were sharded, S of them over n ranks. ``contiguous``: rank r holds
            the r-th of n chunks of ceil(S / n). ``zigzag``: the r-th and the r-th from the end, of
            2 n chunks of ceil(S / 2n). The last chunks may be shorter, or empty.

    Example:
        >>> cp = ContextParallel(None)
        >>> style = ContextParallelAttention(cp, seq_dim=1, layout="zigzag")
        >>> module = style.apply(nn.MultiheadAttention(8, 2, batch_first=True))
        >>> module(*[torch.randn(1, 6, 8)] * 3, need_weights=False)[0].shape
        torch.Size([1, 6, 8])
    """

    def __init__(
        self,
        cp: ContextParallel,
        *,
        seq_dim: int,
        layout: Literal["contiguous", "zigzag"],
    ) -> None:
        check_choice(f"{_NAME}(layout=...)", layout, ("contiguous", "zigzag"))
        if not isinstance(cp, ContextParallel):
            raise TypeError(
                f"{_NAME}() got a {type(cp).__name__} as its ranks. Give ContextParallel(mesh)."
            )
        self._cp, self._seq_dim, self._layout = cp, seq_dim, layout

    def apply(self, module: nn.Module) -> nn.Module:
        """Change a module and return it, as a plan does with the modules that it names."""
        packages = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
        if packages & {"transformers", "transformers_modules"}:
            raise ValueError(
                f"{_NAME}: {type(module).__name__} is a part of a Hugging Face model, which leaves "
                "windows and documents to masks of this rank's tokens. Use hf_patches.enable(model)"
                " and cp.step(batch)."
            )
        replace_method(module, "forward", partial(_call, _Styled(self)))
        return module

    def __deepcopy__(self, memo: object) -> "ContextParallelAttention":
        """Return this style: copies of a module have the same ranks."""
        return self

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module)

    def build_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """Build the step of a call; what is wrong on one rank is raised on all of them."""
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.empty(()))
        layout = self._compare(x, has_positions=kwargs.get("position_ids") is not None)
        batch_size = x.shape[0] if self._seq_dim % x.dim() else 1
        # Of the full sequences only positions are known.
        positions = torch.arange(layout.seq_len, device=x.device)
        full = unnamed_batch(flatten(positions), [0], batch_size=batch_size, seq_len=layout.seq_len)
        config = replace(self._cp.config, layout=self._layout)
        # Equal calls are the same step, so that activation checkpointing may repeat one in
        # backward.
        uid, training = hash((id(self._cp), layout, batch_size)), torch.is_grad_enabled()
        groups = self._cp.groups
        return build_step(full, Opened(groups=groups, config=config, training=training, uid=uid))

    def _compare(self, x: Tensor, *, has_positions: bool) -> Layout:
        """Return the layout of the ranks' shards; raise on all ranks if one cannot be served."""
        sizes, dim, context = list(x.shape), self._seq_dim, self._cp.groups.context
        is_known = -x.dim() <= dim < x.dim() and not isinstance(x, DTensor) and not has_positions
        length = sizes.pop(dim) if is_known else -1
        others = zlib.crc32(repr((sizes, x.dtype)).encode())
        found = gather(torch.tensor([length, others], device=context.device), context).tolist()
        lengths = [length for length, _ in found]
        if len({others for _, others in found}) > 1 or min(lengths) < 0:
            raise ValueError(
                f"{_NAME}(seq_dim={dim}): the first tensor of a call must be this rank's part of "
                f"sequences along dim {dim}, with the same other sizes and dtype on all ranks; "
                f"here it is a {type(x).__name__} of shape {tuple(x.shape)}. Name a module that "
                "takes q, k, v or hidden states; for a DTensor, use_local_output=True before it. "
                "`position_ids` are not taken: rotate outside of the module, or use cp.step(batch)."
            )
        return layout_of_shards(self._layout, lengths)


@dataclass
class _Styled:
    """The style of a module, and whether its last call belonged to a step of others."""

    style: ContextParallelAttention
    was_in_step: bool = False


@outside_graphs
def _call(
    styled: _Styled, _: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a module in a step, unless one is open or attention is declared unsharded."""
    if active_step.is_paused() or active_step.num_exempt() > 0:
        return forward(*args, **kwargs)
    is_in_step = active_step.opened() is not None
    if not in_backward():
        styled.was_in_step = is_in_step
    elif styled.was_in_step != is_in_step:  # activation checkpointing
        raise RuntimeError(
            f"{_NAME}: the module ran {'inside' if styled.was_in_step else 'outside'} of a cp.step "
            f"and runs again, in backward, {'inside' if is_in_step else 'outside'} of one. Call "
            "backward where forward was, or use checkpoint(..., use_reentrant=False)."
        )
    if is_in_step:
        return forward(*args, **kwargs)
    step = styled.style.build_step(args, kwargs)
    with run_step(step):
        output = forward(*args, **kwargs)
    if not has_attended(step):
        raise RuntimeError(
            f"{_NAME}: the module has not called F.scaled_dot_product_attention, flex_attention or "
            "lightning_cp.attention. Attention that it computes otherwise sees this rank's tokens "
            "only: call one of them, or name the module that does."
        )
    return output
