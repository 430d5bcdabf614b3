# SPDX-License-Identifier: Apache-2.0
"""Features of media, as models return them, exchanged between ranks that have computed a part each.

An output holds tensors and lists of tensors, one per item. What a model uses of it is flattened to
rows, of which each rank gets those that it wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_cp.comm.transport import Transport, gather
from lightning_cp.geometry.ranges import IntArray
from lightning_cp.step.guards import enter_backward_of
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import Step

_FEATURES: Final = ("pooler_output", "deepstack_features")
_USED: Final = (*_FEATURES, "attention_mask")
"""What models use of an output; the last hidden state too if it has no features."""


@dataclass
class FeatureTensor:
    """A tensor of features, or a list of one tensor per item, of this rank's items.

    Args:
        rows: all of it, concatenated along dim 0.
        counts: rows of each item; None for a tensor.
    """

    rows: Tensor
    counts: list[int] | None


@dataclass(frozen=True)
class _Number:
    """The place of a leaf in an output."""

    leaf: int


class UsedOutput:
    """What a model uses of an output with features, flattened.

    Args:
        output: of a method that computes features.
        is_dummy: whether it is of an item that another rank computes: leaves are then empty.
    """

    def __init__(self, output: Any, *, is_dummy: bool = False) -> None:
        self.leaves: list[FeatureTensor] = []
        self._class = type(output)
        self._is_dummy = is_dummy
        names = [name for name in _USED if output.get(name) is not None]
        if not set(_FEATURES) & set(names):
            names.append("last_hidden_state")
        self._values = {name: self._flatten_entry(name, output[name]) for name in names}

    def rebuild(self, full: Sequence[Any]) -> Any:
        """Return an output with other values in place of the leaves."""
        return self._class(**{name: _fill(x, full) for name, x in self._values.items()})

    def _flatten_entry(self, name: str, value: Any) -> Any:
        # Features that are added in layers: one entry per layer, a tensor or one per item.
        if name == "deepstack_features":
            return [self._flatten(x) for x in value]
        return self._flatten(value)

    def _flatten(self, value: Any) -> Any:
        """Return a value with a number in place of each tensor or list of tensors."""
        if isinstance(value, Tensor):
            return self._add(value, None)
        if not isinstance(value, list | tuple):
            return value
        if value and all(isinstance(x, Tensor) for x in value):
            return self._add(torch.cat(tuple(value)), [len(x) for x in value])
        return type(value)(self._flatten(x) for x in value)

    def _add(self, rows: Tensor, counts: list[int] | None) -> _Number:
        if self._is_dummy:
            rows, counts = rows[:0], None if counts is None else []
        self.leaves.append(FeatureTensor(rows, counts))
        return _Number(len(self.leaves) - 1)


def _fill(value: Any, full: Sequence[Any]) -> Any:
    if isinstance(value, _Number):
        return full[value.leaf]
    if isinstance(value, list | tuple):
        return type(value)(_fill(x, full) for x in value)
    return value


def agree_on_counts(
    leaves: Sequence[FeatureTensor], num_items: Sequence[int], transport: Transport
) -> list[list[IntArray]]:
    """Return, for each leaf and rank, the rows of each item of the rank; one sum for a tensor.

    Args:
        leaves: of this rank.
        num_items: of each rank.
        transport: the context ranks.
    """
    longest = max(1, *num_items)
    local = torch.zeros(len(leaves), longest, dtype=torch.int64)
    for at, leaf in enumerate(leaves):
        counts = [len(leaf.rows)] if leaf.counts is None else leaf.counts
        local[at, : len(counts)] = torch.tensor(counts, dtype=torch.int64)
    gathered = gather(local.to(transport.device), transport).cpu().numpy()
    return [
        [
            gathered[rank, at, : 1 if leaf.counts is None else number]
            for rank, number in enumerate(num_items)
        ]
        for at, leaf in enumerate(leaves)
    ]


def exchange_rows(x: Tensor, sizes: IntArray, wanted: Sequence[IntArray], step: Step) -> Tensor:
    """Return rows of all ranks; differentiable.

    Args:
        x: this rank's rows.
        sizes: rows of each rank; they are numbered rank by rank.
        wanted: for each rank, the numbers of the rows that it gets.
        step: the step, for its context ranks.
    """
    if x.dtype == torch.bool:  # not every backend sends it
        return exchange_rows(x.to(torch.uint8), sizes, wanted, step).bool()
    stops = sizes.cumsum()
    starts, rank = stops - sizes, step.cp_rank
    sent = [w[(w >= starts[rank]) & (w < stops[rank])] - starts[rank] for w in wanted]
    owners = np.searchsorted(stops, wanted[rank], side="right")
    order = np.argsort(owners, kind="stable")
    received: Tensor = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
        x,
        torch.from_numpy(np.concatenate(sent)).to(x.device),
        [len(rows) for rows in sent],
        np.bincount(owners, minlength=step.cp_size).tolist(),
        step.groups.context,
        step.uid,
    )
    if (order[1:] > order[:-1]).all():
        return received
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return received.index_select(0, torch.from_numpy(back).to(x.device))


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        sizes: list[int],
        received: list[int],
        transport: Transport,
        uid: int,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows, ctx.sizes, ctx.received = len(x), sizes, received
        ctx.transport, ctx.uid = transport, uid
        out = x.new_empty(sum(received), *x.shape[1:])
        transport.all_to_all(out, x.index_select(0, rows), received, sizes)()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        enter_backward_of(ctx.uid)
        (rows,) = ctx.saved_tensors
        shares = grad.new_empty(len(rows), *grad.shape[1:])
        ctx.transport.all_to_all(shares, grad.contiguous(), ctx.sizes, ctx.received)()
        dtype = accumulation_dtype(grad.dtype)
        total = torch.zeros(ctx.num_rows, *grad.shape[1:], dtype=dtype, device=grad.device)
        total.index_add_(0, rows, shares.to(dtype))
        return total.to(grad.dtype), None, None, None, None, None
