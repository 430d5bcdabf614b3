# SPDX-License-Identifier: Apache-2.0
"""Gradients that a function computes part by part: their sums, and leaves that it would miss."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_cp.step.precision import accumulation_dtype


def add_gradients(sums: list[Tensor | None], parts: Sequence[Tensor | None]) -> None:
    """Add gradients to their sums, in float32 or wider; None is a gradient of zeros."""
    for at, gradient in enumerate(parts):
        total = sums[at]
        if gradient is not None and total is not None:
            total += gradient
        elif gradient is not None:
            # A copy: autograd may return one tensor for two leaves.
            sums[at] = gradient.to(accumulation_dtype(gradient.dtype), copy=True)


def unlisted_leaf(result: Tensor, known: Iterable[Tensor]) -> Tensor | None:
    """Return a leaf that a result depends on, requires a gradient and is not known; else None.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> unlisted_leaf(x * weight, [x]) is weight, unlisted_leaf(x * weight, [x, weight])
        (True, None)
    """
    listed = {id(x) for x in known}
    seen: set[Any] = set()
    stack: list[Any] = [result.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        leaf: Tensor | None = None if node.next_functions else getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in listed:
            return leaf
    return None
