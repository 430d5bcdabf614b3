# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of ``head(hidden)`` in chunks: the logits of all tokens never exist at once.

`chunked_sum`: with s the sum over the tokens, s and its gradients ds/dhidden, ds/dweight are
accumulated chunk by chunk in forward; backward multiplies them by the gradient of the loss with
respect to s, a scalar. `chunked_losses`: one value per token, whose gradients are known in backward
only, which computes the logits again. Knows nothing about ranks: `lightning_cp.loss` does.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_cp.loss.gradients import add_gradients, unlisted_leaf
from lightning_cp.loss.vocabulary import sharded_cross_entropy
from lightning_cp.private.modules import without_tensor_hooks
from lightning_cp.step.precision import ForwardState, accumulation_dtype, autocast_off
from lightning_cp.step.step import IGNORED_LABEL

MAX_CHUNK_LOGITS: Final = 2**28
"""Number of logits of a chunk, by default: 1 GiB in float32."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Return the cross entropy of logits [B, L, V] in float32 or wider, [B * L] or summed."""
    if isinstance(logits, DTensor) and all(x.is_replicate() for x in logits.placements):
        logits = logits.to_local()
    if isinstance(logits, DTensor):
        losses = sharded_cross_entropy(logits, targets)
        return losses.sum() if reduction == "sum" else losses
    wide = logits.to(accumulation_dtype(logits.dtype))
    return functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction
    )


def auto_chunk_len(logits: Tensor, parameters: Iterable[Tensor]) -> int:
    """Return the default number of tokens of a chunk.

    Args:
        logits: of at least one token.
        parameters: of the head. In float16, a gradient summed over very many tokens overflows
            65,504 whatever the loss scale: such chunks are a quarter as long.
    """
    is_float16 = any(x.dtype == torch.float16 for x in (logits, *parameters))
    return max(1, MAX_CHUNK_LOGITS // (4 if is_float16 else 1) // logits.shape[-1])


def unique_leaves(parameters: Iterable[Tensor], *, caller: str) -> list[Tensor]:
    """Return each parameter once: a tied weight must not get its gradient twice."""
    leaves = list({id(x): x for x in parameters}.values())
    for x in leaves:
        if not x.is_leaf:
            raise ValueError(
                f"{caller}(parameters=...) has a tensor of shape {tuple(x.shape)} that "
                "is computed from others. Compute it in the head, and list what it is computed "
                "from."
            )
    return leaves


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedInputs:
    """Inputs of a chunked sum, other than the tensors that autograd tracks.

    Args:
        head: computes logits from hidden states.
        targets: [tokens], the label that each token is scored against.
        leaves: the parameters that ``head`` computes with, each once.
        chunk_len: maximal tokens of a chunk; None for `auto_chunk_len`.
        num_tokens: number of tokens from which the number of chunks is computed.
        grad: whether the caller has gradients enabled.
        caller: the public function, for messages.
    """

    head: Callable[[Tensor], Tensor]
    targets: Tensor
    leaves: Sequence[Tensor]
    chunk_len: int | None
    num_tokens: int
    grad: bool
    caller: str


def chunked_sum(problem: ChunkedInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, and that of each token, without gradient, [B * L]."""
    sums: tuple[Tensor, Tensor] = _ChunkedSum.apply(problem, hidden, *problem.leaves)  # type: ignore[no-untyped-call]
    return sums


def chunked_losses(problem: ChunkedInputs, hidden: Tensor) -> Tensor:
    """Return the cross entropy of each token, [B * L]; each may have a gradient of its own."""
    losses: Tensor = _ChunkedLosses.apply(problem, hidden, *problem.leaves)  # type: ignore[no-untyped-call]
    return losses


class _Results(NamedTuple):
    """What the chunks have computed.

    Args:
        losses: [tokens], without gradient.
        hidden_grad: as the hidden states; None where no gradient is needed.
        leaf_grads: one per leaf, likewise.
    """

    losses: Tensor
    hidden_grad: Tensor | None
    leaf_grads: list[Tensor | None]


def _run_chunks(
    problem: ChunkedInputs,
    hidden: Tensor,
    num_chunks: int,
    *,
    gradients: bool = True,
    weights: Tensor | None = None,
) -> _Results:
    """Compute losses chunk by chunk, and the gradients of their sum.

    Args:
        problem: the other inputs.
        hidden: [B, L, d].
        num_chunks: the number of chunks.
        gradients: whether gradients are computed, if anything requires them.
        weights: [tokens], the factors of the losses in the sum; None for ones.
    """
    tokens = hidden.detach().flatten(0, 1)[None]
    needs_grad = problem.grad and hidden.requires_grad
    hidden_grad = torch.zeros_like(tokens) if needs_grad and gradients else None
    leaf_grads: list[Tensor | None] = [None for _ in problem.leaves]
    losses: list[Tensor] = []
    nothing: Sequence[Tensor | None] = (None,) * num_chunks
    parts = zip(
        tokens.tensor_split(num_chunks, 1),
        problem.targets.tensor_split(num_chunks),
        nothing if weights is None else weights.tensor_split(num_chunks),
        nothing if hidden_grad is None else hidden_grad.tensor_split(num_chunks, 1),
        strict=True,
    )
    # Hooks of a parameter are for its gradient, which autograd passes to them after backward.
    with without_tensor_hooks(problem.leaves if problem.grad else ()):
        for tokens_of_chunk, target, weight, grad_out in parts:
            chunk = tokens_of_chunk.detach().requires_grad_(needs_grad)
            with _private_graph(problem):
                loss = cross_entropy(_logits(problem, chunk), target, "none")
            losses.append(loss.detach())
            if not gradients:
                continue
            grad = _add_leaf_grads(
                loss, weight, chunk, problem.leaves, leaf_grads, is_only_chunk=num_chunks == 1
            )
            if grad_out is not None and grad is not None:
                grad_out.copy_(grad)
    if hidden_grad is not None:
        hidden_grad = hidden_grad.view(hidden.shape)
    return _Results(torch.cat(losses), hidden_grad, leaf_grads)


class _ChunkedSum(torch.autograd.Function):
    """The summed cross entropy, whose gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any, problem: ChunkedInputs, hidden: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        results = _run_chunks(problem, hidden, _num_chunks(problem, hidden))
        ctx.save_for_backward(results.hidden_grad, *results.leaf_grads)
        ctx.dtypes = [x.dtype for x in (hidden, *problem.leaves)]
        ctx.mark_non_differentiable(results.losses)
        return results.losses.sum(), results.losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # once_differentiable raises only where the result depends on `grad`; it depends on inputs.
        twice = torch.is_grad_enabled() and not grad.requires_grad
        return _ChunkedSum._scaled(ctx, grad.detach().requires_grad_() if twice else grad)

    @staticmethod
    @once_differentiable
    def _scaled(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        saved = zip(ctx.saved_tensors, ctx.dtypes, needed, strict=True)
        return None, *(
            multiplied(x, grad, dtype) if need and x is not None else None
            for x, dtype, need in saved
        )


class _ChunkedLosses(torch.autograd.Function):
    """The cross entropy of each token, whose gradients are computed in backward."""

    @staticmethod
    def forward(ctx: Any, problem: ChunkedInputs, hidden: Tensor, *_: Tensor) -> Tensor:
        num_chunks = _num_chunks(problem, hidden)
        # Dropout and autocast of the head must be the same when it runs again.
        ctx.problem, ctx.num_chunks = problem, num_chunks
        ctx.state = ForwardState.capture(hidden.device) if problem.grad else None
        # The leaves too: autograd raises if they have been changed since.
        ctx.save_for_backward(hidden, *problem.leaves)
        return _run_chunks(problem, hidden, num_chunks, gradients=False).losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *_ = ctx.saved_tensors
        needs_hidden, *needed = ctx.needs_input_grad[1:]
        problem = replace(ctx.problem, grad=True)
        with ctx.state.restored():
            results = _run_chunks(problem, hidden, ctx.num_chunks, weights=grad)
        gradients = zip(
            (results.hidden_grad, *results.leaf_grads),
            (hidden, *problem.leaves),
            (needs_hidden, *needed),
            strict=True,
        )
        return None, *(
            leaf_gradient.to(x.dtype) if need and leaf_gradient is not None else None
            for leaf_gradient, x, need in gradients
        )


def multiplied(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * factor`` in ``dtype``: one pass, rounded once."""
    if type(x) is not Tensor:  # a DTensor multiplies plain tensors only if they have no dims
        return (x.to(torch.promote_types(x.dtype, factor.dtype)) * factor).to(dtype)
    # A factor without dims would be rounded to the dtype of a tensor that has dims.
    return torch.mul(x, factor.expand_as(x), out=torch.empty_like(x, dtype=dtype))


def _num_chunks(problem: ChunkedInputs, hidden: Tensor) -> int:
    length = problem.chunk_len
    if length is None:
        first = hidden.detach().flatten(0, 1)[None, :1]
        # Not under no_grad: autocast may cache the weights that it cast there, without gradients,
        # and use them for the chunks too (pytorch/pytorch#112583).
        with _private_graph(problem):
            length = auto_chunk_len(_logits(problem, first), problem.leaves)
    return max(1, -(-problem.num_tokens // length))


@contextmanager
def _private_graph(problem: ChunkedInputs) -> Iterator[None]:
    """Record the head's graph, if the caller has gradients enabled, without the caller's hooks."""
    # Tensors saved for a chunk live for a moment only. The saved-tensor hooks of activation
    # checkpointing and offloading, which hold tensors until backward, must not see them.
    with torch.set_grad_enabled(problem.grad), saved_tensors_hooks(_detached, _identity):
        yield


def _logits(problem: ChunkedInputs, chunk: Tensor) -> Tensor:
    logits = problem.head(chunk)
    if logits.dim() != 3 or logits.shape[:-1] != chunk.shape[:-1]:
        raise ValueError(
            f"{problem.caller}() needs a head that computes logits [batch, tokens, classes] from "
            f"hidden states [batch, tokens, width]; it returned {tuple(logits.shape)} for "
            f"{tuple(chunk.shape)}."
        )
    _check_listed(logits, (chunk, *problem.leaves), problem.caller)
    return logits


def _add_leaf_grads(
    losses: Tensor,
    weights: Tensor | None,
    chunk: Tensor,
    leaves: Sequence[Tensor],
    leaf_grads: list[Tensor | None],
    *,
    is_only_chunk: bool,
) -> Tensor | None:
    """Add the gradients of the leaves to ``leaf_grads``, and return that of the chunk.

    The gradients of a single chunk are not summed, and stay in their dtype.
    """
    if not losses.requires_grad:
        return None
    inputs = [x for x in (chunk, *leaves) if x.requires_grad]
    # As in a separate backward: operations run in the dtype that forward chose for them.
    weights = torch.ones_like(losses) if weights is None else weights
    with autocast_off(losses.device.type):
        computed = torch.autograd.grad(losses, inputs, weights, allow_unused=True)
    gradients = {id(x): gradient for x, gradient in zip(inputs, computed, strict=True)}
    chunk_grads = [gradients.get(id(leaf)) for leaf in leaves]
    if is_only_chunk:
        leaf_grads[:] = chunk_grads
    else:
        add_gradients(leaf_grads, chunk_grads)
    return gradients.get(id(chunk))


def _check_listed(logits: Tensor, known: Collection[Tensor], caller: str) -> None:
    """Raise if logits depend on a weight whose gradient would not be computed."""
    leaf = unlisted_leaf(logits, known)
    if leaf is not None:
        raise ValueError(
            f"{caller}(): head computes with a tensor of shape {tuple(leaf.shape)} "
            "that requires a gradient and is not in `parameters`: its gradient would be lost. "
            f"Add it. With FSDP2, call {caller}() in the forward() of the module that "
            "is sharded as one unit with the head, and list the parameters there, where they "
            "are unsharded."
        )


def _detached(x: Tensor) -> Tensor:
    return x.detach()


def _identity(x: Tensor) -> Tensor:
    return x
