# SPDX-License-Identifier: Apache-2.0
"""Autograd: what it saves, the backward pass that runs, the nodes of a graph, checkpointing."""

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from lightning_cp.patch import Patch
from lightning_cp.private.compiler import outside_graphs


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the hooks that pack and unpack what autograd saves now, or None.

    `torch._C._autograd._top_saved_tensors_default_hooks`; no public function returns them. Hooks of
    `torch.autograd.graph.saved_tensors_hooks` hide those around them: hooks that do not handle a
    tensor themselves call these. Activation checkpointing has other ones in each region.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread, recompute included."""
    return backward_id() != -1


def saves_through_hooks() -> bool:
    """Return whether tensors that autograd saves are replaced, as activation checkpointing does.

    `_C._autograd._top_saved_tensors_default_hooks`; offloading and `save_on_cpu` do so too.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def backward_id() -> int:
    """Return a number of the backward pass that runs on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def after_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends (`Variable._execution_engine`).

    On the caller's CUDA streams, after all gradients are accumulated; FSDP2 and DDP end theirs so.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


@outside_graphs
def node_number(x: Tensor) -> int | None:
    """Return the number of the operation whose result a tensor is; None if it has no gradient.

    Autograd counts operations up, on each thread (`Node._sequence_nr`; no public one).
    """
    return None if x.grad_fn is None else int(x.grad_fn._sequence_nr())


def depends_on(x: Tensor, numbers: Container[int], first: int) -> bool:
    """Return whether a tensor is computed from the result of one of some operations.

    Args:
        x: the tensor.
        numbers: of the operations, by `node_number`.
        first: the lowest of them: what is older cannot depend on them.
    """
    seen, nodes = set[Any](), [x.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        if node._sequence_nr() in numbers:
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


ContextFn = Callable[[], Contexts]


"""Returns the contexts that activation checkpointing enters in forward, and when it recomputes."""


@contextmanager
def checkpoint_contexts(
    context_fn: ContextFn,
    saving_inputs: Callable[[AbstractContextManager[Any]], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Make every ``checkpoint(use_reentrant=False)`` call inside use a context_fn.

    ``saving_inputs`` takes the context of a forward, and returns the one in which the inputs of
    that forward are saved: hooks that are active there see these, and nothing else.

    torch has no setting for callers that pass none (models, wrappers), so the function that all of
    them reach is replaced: `_checkpoint_without_reentrant_generator`, with the same arguments since
    torch 2.1. torch 2.15 moved it to `..._impl`, which takes the arguments of the checkpointed
    function as a tuple and a dict.
    """
    name = "_checkpoint_without_reentrant_generator"
    moved = hasattr(checkpoint, f"{name}_impl")
    name = f"{name}_impl" if moved else name
    original = getattr(checkpoint, name)

    def combined(ours: Contexts, theirs: ContextFn) -> ContextFn:
        def contexts() -> Contexts:
            if theirs in (checkpoint.noop_context_fn, context_fn):
                return ours
            inner = theirs()
            return Nested(ours[0], inner[0]), Nested(ours[1], inner[1])

        return contexts

    def generator(
        fn: Any, preserve_rng_state: bool, theirs: ContextFn, *args: Any, **kwargs: Any
    ) -> Any:
        ours = context_fn()
        with saving_inputs(ours[0]):
            yield from original(fn, preserve_rng_state, combined(ours, theirs), *args, **kwargs)

    def moved_generator(fn: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        theirs = options.pop("context_fn", checkpoint.noop_context_fn)
        ours = context_fn()
        with saving_inputs(ours[0]):
            yield from original(fn, args, kwargs, context_fn=combined(ours, theirs), **options)

    with Patch(checkpoint, name, moved_generator if moved else generator):
        yield


class Nested:
    """Two contexts as one, which may be entered again."""

    def __init__(
        self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
    ) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)
