# SPDX-License-Identifier: Apache-2.0
"""torch.compile: what it traces, leaves out, and may overwrite."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch._functorch.config
from torch.utils._triton import has_triton

from lightning_cp.patch import Patch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(fn: Callable[P, T]) -> Callable[P, T]:
    """Keep a function out of compiled graphs: torch.compile breaks the graph around it.

    Like ``torch.compiler.disable``, which imports the compiler (a second) and costs each call some
    microseconds; this applies it only while the compiler traces, or runs code that it may compile
    (`_C._dynamo.eval_frame.get_eval_frame_callback`).
    """
    disabled: Callable[P, T] | None = None

    def disable() -> None:
        nonlocal disabled
        disabled = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_dynamo_compiling() and _compiler_callback() is None:
            return fn(*args, **kwargs)
        if disabled is None:
            disable()
        return disabled(*args, **kwargs)  # type: ignore[misc]

    _not_disabled.append(disable)
    return call


_not_disabled: list[Callable[[], None]] = []


def prepare_breaks() -> None:
    """Prepare the functions that are kept out of graphs, once the compiler is imported.

    Disabled while the compiler traces, the first call would break its graph elsewhere than later
    ones; activation checkpointing compares what the two have saved.
    """
    while _not_disabled and "torch._dynamo" in sys.modules:
        _not_disabled.pop()()


_compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def within(fn: Callable[P, T]) -> Callable[P, T]:
    """Return the function that `outside_graphs` was given."""
    inner: Callable[P, T] = fn.__wrapped__  # type: ignore[attr-defined]
    return inner


def constant_in_graphs(fn: Callable[P, T]) -> Callable[P, T]:
    """Let torch.compile call a function while it traces, and use the result as a constant.

    ``torch.compiler.assume_constant_result`` without importing the compiler: it sets the same
    attribute.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@constant_in_graphs
def recomputes_operators() -> bool:
    """Return whether compiled backwards may compute operators again (`torch._functorch.config`)."""
    config = torch._functorch.config
    return (
        config.activation_memory_budget < 1
        or config.aggressive_recomputation
        or not config.ban_recompute_not_in_allowlist
    )


def uncompiled(module: Any) -> Any:
    """Return the module inside one that torch.compile returned (`OptimizedModule._orig_mod`)."""
    return getattr(module, "_orig_mod", module)


def never_compile_alone(fn: Callable[P, T]) -> bool:
    """Keep torch.compile from compiling a function on its own; inside other graphs it is inlined.

    For the handler of a torch function mode: it is called with short-lived functions (getters of
    attributes), which compiled code identifies by their address, and so confuses with each other.

    Returns:
        Whether it was done (`eval_frame.skip_code`): not before the compiler is imported.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)
    return True


def can_compile(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch compiles kernels for a GPU and a dtype (`torch.utils._triton`)."""
    if not has_triton():
        return False
    if dtype == torch.bfloat16:
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def exact_backend(backend: Any) -> Callable[..., Any]:
    """Return a compiler backend with correct gradients that supports ``retain_graph=True``.

    By default compiled code overwrites what forward saved ("donated buffers",
    pytorch/pytorch#129496), and its backward raises when it is run twice. A user who calls
    attention did not ask for a compiler. torch's ``torch._functorch.config.donated_buffer`` must be
    off whenever backward runs, on whichever thread: instead, the compiler finds no buffer that it
    may overwrite. A tag keeps such code apart in the compiler's caches.

    Padding is off: where the samples of a batch are not a multiple of 128 bytes apart, torch 2.11
    writes sums without padding and reads them with it, and gradients of sinks, queries and keys
    are wrong or NaN.
    """
    from torch._dynamo import lookup_backend  # takes seconds to import

    compile_graph: Callable[..., Any] = backend
    if isinstance(backend, str):
        compile_graph = lookup_backend(backend)
    if backend == "inductor":
        compile_graph = partial(compile_graph, config_patches={"comprehensive_padding": False})

    def compile_exactly(*args: Any, **kwargs: Any) -> Any:
        tagged = torch.compiler.config.patch(cache_key_tag="lightning_cp")  # type: ignore[attr-defined]
        with tagged, _no_donated_buffers():
            return compile_graph(*args, **kwargs)

    return compile_exactly


@contextmanager
def _no_donated_buffers() -> Iterator[None]:
    from torch._functorch._aot_autograd import graph_compile

    name = "collect_bw_donated_buffer_idxs"
    # Another torch version: a second backward raises torch's own error.
    if not hasattr(graph_compile, name):
        yield
        return
    with Patch(graph_compile, name, lambda *_, **__: []):
        yield
