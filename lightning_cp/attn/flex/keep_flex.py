# SPDX-License-Identifier: Apache-2.0
"""FlexAttention under activation checkpointing: its results are kept, its inputs are recomputed.

torch compiles forward and backward of FlexAttention together, so that output and log-sum-exp cannot
be given to its backward. Instead the graph of the call is kept, without the inputs: where autograd
saves a part of an input, the graph holds its place only. Backward gets the recomputed inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lightning_cp.attn.keep_attention import Slot
from lightning_cp.memory.offload import Saved
from lightning_cp.step.guards import backward_of_step

Compute = Callable[..., Tensor]
"""Computes attention from q, k, v and sinks."""


class _Place(NamedTuple):
    """A part of an input, or of the output after them: its number, and the sizes of the part."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedTensor:
    """A tensor that autograd has saved: its place, or itself."""

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | Saved | _Place = (
            x.detach()
        )  # an output holds its node, and that its output


class _Inputs:
    """The inputs of a graph while it is computed or differentiated, and their gradients."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor | None, ...] = ()
        self.gradients: tuple[Tensor | None, ...] = ()
        self.held: list[_SavedTensor] = []

    def pack(self, x: Tensor) -> _SavedTensor:
        """Note the place of a tensor in the inputs, or hold a tensor that is not a part of them."""
        held = _SavedTensor(x)
        for number, full_tensor in enumerate(self.tensors):
            if full_tensor is not None and _is_part(x, full_tensor):
                held.x = _place(number, x, full_tensor)
                return held
        self.held.append(held)
        return held

    def unpack(self, held: _SavedTensor) -> Tensor:
        if isinstance(held.x, Saved):
            return held.x.get()
        if isinstance(held.x, Tensor):
            return held.x
        number, size, stride, offset = held.x
        full_tensor = self.tensors[number]
        assert full_tensor is not None  # noqa: S101  it was there when its place was noted
        return full_tensor.as_strided(size, stride, full_tensor.storage_offset() + offset)

    def release(self, out: Tensor, save: Callable[[Tensor], Saved]) -> None:
        """Forget the inputs; save what is held, the output as a place."""
        for held in self.held:
            assert isinstance(held.x, Tensor)  # noqa: S101  places are not listed
            is_out = _is_part(held.x, out)
            held.x = _place(len(self.tensors), held.x, out) if is_out else save(held.x)
        self.held, self.tensors = [], ()


def _place(number: int, x: Tensor, whole: Tensor) -> _Place:
    offset = int(x.storage_offset()) - int(whole.storage_offset())
    return _Place(number, x.size(), x.stride(), offset)


def _is_part(x: Tensor, whole: Tensor) -> bool:
    """Return whether the memory of a tensor lies inside that of another one."""
    if x.dtype != whole.dtype or x.numel() == 0:
        return False
    if x.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return False
    offset = x.storage_offset() - whole.storage_offset()
    return offset >= 0 and offset + _extent(x) <= _extent(whole)


def _extent(x: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _with_strides(x: Tensor | None, stride: tuple[int, ...]) -> Tensor | None:
    """Return a tensor as it lay in memory before: the same one, unless it was made otherwise."""
    if x is None or x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x.detach())


class _Source(torch.autograd.Function):
    """Where the graph begins: unlike leaves, its node does not hold the tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: _Inputs) -> tuple[Tensor, ...]:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in inputs.tensors if x is not None and x.requires_grad)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.inputs.gradients = gradients
        return None, None


class KeptGraph:
    """The graph of one attention call, without its inputs and without its output.

    Args:
        compute: computes attention.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        # Apart from the graph, which holds it: with its end in it, it would hold itself.
        self._inputs = _Inputs()
        self._end: GradientEdge | None = None
        self._strides: list[tuple[int, ...]] = []
        self.out: Tensor | None = None
        """The output, from the recomputation to backward."""

    def run(
        self, inputs: Sequence[Tensor | None], save: Callable[[Tensor], Saved] = Saved
    ) -> Tensor:
        """Compute attention and hold its graph; return the output, detached.

        Args:
            inputs: q, k, v and sinks.
            save: saves what backward needs besides them; not held, since it knows the region.
        """
        held = self._inputs
        held.tensors = tuple(inputs)
        anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad(), saved_tensors_hooks(held.pack, held.unpack):
            sources = iter(_Source.apply(anchor, held))  # type: ignore[no-untyped-call]
            arguments = [
                next(sources) if x is not None and x.requires_grad else x for x in held.tensors
            ]
            out = self._compute(*arguments)
        held.release(out, save)
        self._end = get_gradient_edge(out)
        self._strides = [() if x is None else x.stride() for x in (*inputs, out)]
        return out.detach()

    def gradients(
        self, inputs: Sequence[Tensor | None], needs_grad: Sequence[bool], dout: Tensor
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs, and free the graph."""
        out, self.out = self.out, None
        if self._end is None or out is None:
            # Backward runs again (`retain_graph`), or the output was changed in place.
            with torch.no_grad():
                inputs = [
                    x if x is None else x.detach().requires_grad_(needs)
                    for x, needs in zip(inputs, needs_grad, strict=True)
                ]
            out = self.run(inputs)
        end, self._end, held = self._end, None, self._inputs
        assert end is not None  # noqa: S101  for the types
        held.tensors = tuple(map(_with_strides, (*inputs, out), self._strides))
        torch.autograd.backward(end, dout)
        kept_gradients, held.tensors, held.gradients = iter(held.gradients), (), ()
        return [next(kept_gradients) if needs else None for needs in needs_grad]


class _AttendKept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        slot: Slot[KeptGraph],
        compute: Compute,
        mark: Tensor,
        *inputs: Tensor | None,
    ) -> Tensor:
        kept = slot.result
        if kept is None:
            graph = KeptGraph(compute)
            out = graph.run(inputs, slot.save)
            slot.store(slot.save(out), graph)
        else:
            graph = kept.rest
            is_unchanged = kept.out.is_unchanged
            out = kept.out.get().detach() if is_unchanged else compute(*inputs)
            graph.out = out.detach() if is_unchanged else None
        ctx.graph, ctx.uid = graph, int(mark)
        ctx.save_for_backward(*inputs, mark)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with backward_of_step(ctx, ctx.uid) as inputs:
            gradients = ctx.graph.gradients(inputs, ctx.needs_input_grad[3:], dout)
        return None, None, None, *gradients


def attend_once(
    call: object,
    compute: Compute,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    uid: int,
) -> Tensor:
    """Compute attention; under activation checkpointing only once, if the step keeps results.

    Args:
        call: the call, for the key of the result.
        compute: computes attention from the tensors that follow.
        q: [B, H, L, D].
        k: [B, K, S, D].
        v: [B, K, S, Dv].
        sinks: [H] or None.
        uid: the step.
    """
    slot: Slot[KeptGraph] = Slot(call)
    out_bytes = q.shape[:3].numel() * v.shape[-1] * v.element_size()
    # The kernel's output, lse in float32, and with sinks the output after them.
    num_bytes = (1 if sinks is None else 2) * out_bytes + 4 * q.shape[:3].numel()
    needs_grad = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if slot.result is None and not (needs_grad and slot.reserve(num_bytes)):
        return compute(q, k, v, sinks)
    out: Tensor = _AttendKept.apply(  # type: ignore[no-untyped-call]
        slot, compute, torch.tensor(uid), q, k, v, sinks
    )
    return out
