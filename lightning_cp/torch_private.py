# SPDX-License-Identifier: Apache-2.0
"""What differs between torch versions, and the private names that we lean on.

Checked against torch 2.11, 2.13 and 2.15. Nothing else in the package may touch a private name.
"""

import atexit
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import lru_cache, partial, wraps
from inspect import signature
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, overrides
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.utils import _apply_to_tensors
from torch.utils import checkpoint
from torch.utils._triton import has_triton

P = ParamSpec("P")
T = TypeVar("T")


@lru_cache(maxsize=1)
def rest_at_exit() -> None:
    """Let gloo's threads put down the tensors of the last exchange before Python ends.

    They need the interpreter for it; once that ends, they abort a process that has done its work
    ("terminate called without an active exception", pytorch/pytorch#190489). Destroying the groups
    ends no thread while a mesh holds them, and a rank whose peers have failed might wait for long.
    """
    atexit.register(time.sleep, 0.1)


def all_gather_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start an all-gather into one tensor.

    2.13 renamed ``all_gather_into_tensor`` and made the old name warn; 2.11 has only the old one.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def reduce_scatter_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start a summing reduce-scatter from one tensor; renamed like the all-gather."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(out, x, group=group, async_op=True)
    return work


def num_process_groups() -> int:
    """Return how many process groups this process has made.

    A group that only its members make is named by that number, so it must be the same on all.
    """
    return len(distributed_c10d._world.pg_names)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Say whether a group has not been destroyed."""
    return group in distributed_c10d._world.pg_map


def default_store() -> Any:
    """Return where ranks leave each other messages: it works while collectives would wait."""
    return distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set how long a group waits; groups of a mesh are made with torch's default."""
    distributed_c10d._set_pg_timeout(timeout, group)


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the ranks of several axes as one axis, and let the root mesh know its name."""
    return mesh._flatten(name)


def reduce_unused_parameters(module: FSDPModule) -> None:
    """Let ranks that did not use a parameter take part in its reduction with a gradient of 0.

    FSDP2 leaves such parameters out, on that rank only, and then sums what does not belong
    together: with experts that no token of this rank was sent to, for example. 2.13 has a setting
    for it; before, what runs after a group's backward is given the zeros.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    state: Any = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None and not hasattr(group, "fills_unused"):
            group.post_backward, group.fills_unused = _filling(group), True


def without_fsdp(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``__dict__`` of a module without what `fully_shard` has put there.

    That is its state, under keys of torch's "composable" interface, and hooks: forward hooks and
    those of state dicts, which are known by the module that they come from.
    """
    kept = {key: value for key, value in state.items() if key not in (STATE_KEY, REGISTRY_KEY)}
    for key, value in kept.items():
        if isinstance(value, OrderedDict) and "hooks" in key:
            hooks = ((i, hook) for i, hook in value.items() if not _is_of_fsdp(hook))
            kept[key] = OrderedDict(hooks)
    return kept


def _is_of_fsdp(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _filling(group: Any) -> Callable[..., Any]:
    original = group.post_backward

    def post_backward(*args: Any) -> Any:
        for held in group.fsdp_params if group.is_unsharded else ():
            whole = getattr(held, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or whole.grad is not None:
                continue
            if held.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        return original(*args)

    return post_backward


def is_open(unit: Any) -> bool:
    """Say whether the forward of a unit is running, so that its parameters are gathered."""
    state: Any = unit._get_fsdp_state()
    return bool(state._training_state == TrainingState.FORWARD)


def is_idle(unit: Any) -> bool:
    """Say whether a unit is neither in its forward nor in its backward."""
    state: Any = unit._get_fsdp_state()
    return bool(state._training_state == TrainingState.IDLE)


def is_grouped(unit: Any) -> bool:
    """Say whether a unit is one of several modules that were given to ``fully_shard`` as a list."""
    state: Any = unit._get_fsdp_state()
    return len(state._modules) > 1


def init_root(root: Any) -> None:
    """Let FSDP2 know its outermost unit, by default the first one that is called."""
    state: Any = root._get_fsdp_state()
    state._lazy_init()


def open_unit(unit: Any, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gather a unit for a call, as ``register_fsdp_forward_method`` does for its methods."""
    state: Any = unit._get_fsdp_state()
    opened: tuple[Any, Any] = state._pre_forward(module, args, kwargs)
    return opened


def close_unit(unit: Any, module: Any, args: Any, output: Any) -> Any:
    """End a call that `open_unit` has begun."""
    state: Any = unit._get_fsdp_state()
    return state._post_forward(module, args, output)


def before_backward(unit: Any) -> Callable[[Tensor], Tensor]:
    """Return the hook by which FSDP2 gathers a unit before its backward."""
    state: Any = unit._get_fsdp_state()
    hook: Callable[[Tensor], Tensor] = state._pre_backward
    return hook


def has_unreduced(unit: Any) -> bool:
    """Say whether gradients of a unit came after FSDP2 had reduced it: nobody would reduce them."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(
        getattr(getattr(held, "_unsharded_param", None), "grad", None) is not None
        for group in groups
        if group is not None and group.reduce_grads
        for held in group.fsdp_params
    )


def wait_for_reductions(unit: Any) -> None:
    """Let the GPU's current stream wait for gradients that FSDP2 adds on streams of its own."""
    communication: Any = unit._get_fsdp_state()._comm_ctx
    for name in ("reduce_scatter_stream", "all_reduce_stream"):
        if (stream := getattr(communication, name, None)) is not None:
            torch.cuda.current_stream().wait_stream(stream)


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to all tensors that FSDP2 finds in the arguments or outputs of a module."""
    return _apply_to_tensors(fn, value)


def tensor_version(x: Tensor) -> int | None:
    """Return a number that every change in place raises; None for inference tensors."""
    return None if x.is_inference() else x._version


def swap_contents(a: Tensor, b: Tensor) -> None:
    """Let two tensor objects change places: data, shape and history of gradients.

    What autograd has saved stays with what it saved. ``torch.utils.swap_tensors`` does the same,
    but refuses tensors that autograd has saved, and spoils leaves that require a gradient.
    """
    try:
        torch._C._swap_tensor_impl(a, b)
    except RuntimeError:  # refused because of a weak reference: autocast keeps them to what it cast
        torch.clear_autocast_cache()
        torch._C._swap_tensor_impl(a, b)


_PROTOTYPE = "torch.distributed.tensor.experimental._context_parallel._attention"


def prototype_balances() -> bool:
    """Say whether torch's own context parallelism would balance causal work between ranks.

    A private option of it, on unless a script has switched it off.
    """
    options = getattr(sys.modules.get(_PROTOTYPE), "_cp_options", None)
    return bool(getattr(options, "enable_load_balance", True))


def prototype_order(load_balancer: object) -> Tensor | None:
    """Return where a load balancer of torch's says that each position lies among all shards."""
    indices = getattr(load_balancer, "_generate_indices", None)
    found = None if indices is None else indices(restore=True)
    return found if isinstance(found, Tensor) else None


def outside_graphs(fn: Callable[P, T]) -> Callable[P, T]:
    """Keep a function out of compiled graphs: torch.compile breaks around it.

    Like ``torch.compiler.disable``, but the compiler, which takes a second to import, is touched
    only where somebody else has imported it.
    """
    outside: Callable[P, T] | None = None

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal outside
        if outside is None and "torch._dynamo" in sys.modules:
            outside = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
        return (outside or fn)(*args, **kwargs)

    return call


def constant_in_graphs(fn: Callable[P, T]) -> Callable[P, T]:
    """Let torch.compile call a function while it traces, and keep what it returned.

    What ``torch.compiler.assume_constant_result`` does, without importing the compiler.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def never_compile_alone(fn: Callable[P, T]) -> bool:
    """Keep torch.compile from compiling a function by itself; inside other graphs it is inlined.

    For a mode's handler: it is called with short-lived functions (the getters of attributes), which
    compiled code tells apart by their address, and so mistakes one for another. Returns whether it
    was done: not before somebody has imported the compiler.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)
    return True


def plain_functions() -> AbstractContextManager[None]:
    """Switch torch function modes off: what runs inside is nobody else's business."""
    off: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return off


@contextmanager
def without_modes() -> Iterator[None]:
    """Take torch function modes off: others that are entered inside work, unlike above."""
    depth = torch._C._len_torch_function_stack()
    modes = [overrides._pop_mode() for _ in range(depth)]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def copy_function(fn: Any) -> Callable[..., Any]:
    """Return a Python function that stays what ``fn`` is now, whatever becomes of its code.

    Its code is an object of its own: torch.compile counts by code how often it has compiled
    something, and gives up after 8 times.
    """
    code = fn.__code__.replace()
    copied = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copied.__kwdefaults__ = fn.__kwdefaults__
    return copied


class Detour:
    """Send every call of a Python function elsewhere while entered, however it was imported.

    The code of the function is exchanged, so that its callers, who hold the function itself, and
    compiled callers, who trace its code, arrive at ``stand_in``. That one runs with the globals of
    ``fn``, so it must import what it needs. torch.compile remembers the arguments of a function by
    their names, so both must have the same; if they differ (another version), nothing happens.

    Args:
        fn: whose calls.
        stand_in: where they go.
    """

    def __init__(self, fn: Any, stand_in: Any) -> None:
        self._fn, self._depth = fn, 0
        self._own, self._other = fn.__code__, stand_in.__code__
        self.fits = _parameters(fn) == _parameters(stand_in)

    def __enter__(self) -> None:
        self._depth += 1
        if self.fits:
            self._fn.__code__ = self._other

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._fn.__code__ = self._own


def _parameters(fn: Any) -> list[tuple[str, object]]:
    return [(name, kind.kind) for name, kind in signature(fn).parameters.items()]


ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What activation checkpointing enters in forward, and when it recomputes."""


@contextmanager
def checkpoint_contexts(context_fn: ContextFn) -> Iterator[None]:
    """Let every ``checkpoint(use_reentrant=False)`` call inside use a context_fn.

    There is no door for callers that pass none (models, wrappers), so the function that all of
    them reach is replaced meanwhile. It has had this name and these arguments since torch 2.1;
    2.15 moved it to another one, which takes what is passed on as a tuple and a dict.
    """
    name = "_checkpoint_without_reentrant_generator"
    moved = hasattr(checkpoint, f"{name}_impl")
    name = f"{name}_impl" if moved else name
    original = getattr(checkpoint, name)

    def chosen(given: ContextFn) -> ContextFn:
        return context_fn if given in (checkpoint.noop_context_fn, context_fn) else both(given)

    def both(given: ContextFn) -> ContextFn:
        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            (ours, ours_again), (theirs, theirs_again) = context_fn(), given()
            return _Nested(ours, theirs), _Nested(ours_again, theirs_again)

        return contexts

    def generator(
        fn: Any, preserve_rng_state: bool, given: ContextFn, *args: Any, **kwargs: Any
    ) -> Any:
        return original(fn, preserve_rng_state, chosen(given), *args, **kwargs)

    def moved_generator(fn: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        given = options.pop("context_fn", checkpoint.noop_context_fn)
        return original(fn, args, kwargs, context_fn=chosen(given), **options)

    setattr(checkpoint, name, moved_generator if moved else generator)
    try:
        yield
    finally:
        setattr(checkpoint, name, original)


class _Nested:
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


def can_compile(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether torch compiles kernels for a GPU and a precision: by Triton, if new enough."""
    if not has_triton():
        return False
    if dtype == torch.bfloat16:
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def exact_backend(backend: Any) -> Callable[..., Any]:
    """Return a compiler's backend whose gradients are right, and may be asked for again.

    By itself compiled code writes over what forward has saved, and then refuses to run twice. Who
    asks for attention has not asked for a compiler, so ``retain_graph=True`` works. torch's own
    switch for it (``torch._functorch.config.donated_buffer``) must be off whenever backward runs,
    on whichever thread: so the compiler finds nothing that it may write over. Its caches keep such
    code apart.

    And torch's compiler pads nothing: where the rows of a batch lie apart by no multiple of 128
    bytes, 2.11 writes sums without padding and reads them with it, which makes gradients of sinks,
    queries and keys wrong, or NaN.
    """
    from torch._dynamo import lookup_backend  # takes seconds to import

    compile_graph: Callable[..., Any] = backend
    if isinstance(backend, str):
        compile_graph = lookup_backend(backend)
    if backend == "inductor":
        compile_graph = partial(compile_graph, config_patches={"comprehensive_padding": False})

    def compile_exactly(*args: Any, **kwargs: Any) -> Any:
        tagged = torch.compiler.config.patch(cache_key_tag="lightning_cp")  # type: ignore[attr-defined]
        with tagged, _no_donations():
            return compile_graph(*args, **kwargs)

    return compile_exactly


@contextmanager
def _no_donations() -> Iterator[None]:
    from torch._functorch._aot_autograd import graph_compile

    name = "collect_bw_donated_buffer_idxs"
    collect = getattr(graph_compile, name, None)
    if collect is None:  # another version: then backward runs once, or says why not
        yield
        return
    setattr(graph_compile, name, lambda *_, **__: [])
    try:
        yield
    finally:
        setattr(graph_compile, name, collect)


def in_backward() -> bool:
    """Say whether autograd is running a backward pass on this thread (recompute included)."""
    return bool(torch._C._current_graph_task_id() != -1)


def as_autocast(x: Tensor) -> Tensor:
    """Lower the precision where autocast would do it for attention."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
