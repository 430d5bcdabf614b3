# SPDX-License-Identifier: Apache-2.0
"""torch's prototype of context parallelism under its own names, for scripts written for it.

Shards the caller's tensors in place and restores them. Everything else is that of any step. For
users: docs/from-torch.md.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.comm.mesh import group_of, neighbours
from lightning_cp.comm.transport import gather
from lightning_cp.config import AlgorithmName, LayoutName, check_choice
from lightning_cp.data.batch import FullBatch, unnamed_batch
from lightning_cp.data.shard import shard, unshard
from lightning_cp.data.step_builder import build_step, check_not_sharded
from lightning_cp.geometry.layout import layout_of_shards
from lightning_cp.parallel import ContextParallel, run_step
from lightning_cp.private import functions, modules
from lightning_cp.step import active_step
from lightning_cp.step.leaves import BatchLeaf, Flat
from lightning_cp.step.step import Opened, Step, Yielded

_ALGORITHMS: Final[dict[str, AlgorithmName]] = {"allgather": "gather", "alltoall": "ring"}

# For the process, as in torch.
_algorithm: AlgorithmName = "auto"


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
) -> Iterator[ContextParallel]:
    """Shard tensors along their sequence over the ranks of a mesh, as torch's prototype does.

    Replaces ``torch.distributed.tensor.experimental.context_parallel``. Inside, the buffers hold
    this rank's tokens, under all names that the script has for them, and
    ``F.scaled_dot_product_attention`` sees those of all ranks. Afterwards they are restored.
    Backward may run inside or after. All ranks of the mesh must enter together.

    The first buffer determines the sequence length, and others must have it. Beside tokens with a
    batch dim, a longer one may be a table of positions, floating-point [length, ...]: it is sharded
    to the positions of the tokens.

    For lengths that torch supports (divisible by twice the number of ranks, or by that number),
    shards are those of torch. Other lengths are not padded: some ranks hold fewer tokens.

    Args:
        mesh: the ranks that share sequences: a 1-D mesh, or what else `ContextParallel` takes.
        buffers: tensors to shard, at least one. One that requires a gradient is sharded
            differentiably: its gradient has the full length, nonzero at this rank's tokens only.
        buffer_seq_dims: the sequence dim of each buffer.
        no_restore_buffers: buffers that stay sharded; their memory is freed.

    Yields:
        The `ContextParallel` of the mesh, for what torch has no name for: ``cp.position_ids()``,
        ``cp.exempt(module)``, ``cp.paused()``.

    Example:
        >>> x = torch.arange(6.0).view(1, 6)
        >>> with context_parallel(None, buffers=[x], buffer_seq_dims=[1]):
        ...     (full,) = context_parallel_unshard(None, [x], [1])
        >>> torch.equal(x, full)
        True
    """
    cp = _parallel_of(mesh)
    training = torch.is_grad_enabled()
    values = cp.checks.count_batch(training)
    named = {f"buffers[{i}]": x for i, x in enumerate(() if buffers is None else buffers)}
    freed = {id(x) for x in no_restore_buffers or ()}

    def build(flat: Flat) -> Step:
        full = _read(flat, buffers, buffer_seq_dims, freed)
        check_not_sharded(flat, active_step.opened())
        layout = _layout_name(full.seq_len, cp.cp_size)
        config = replace(cp.config, layout=layout, algorithm=_algorithm)
        terms = Opened(groups=cp.groups, config=config, training=training, is_checked=values)
        return build_step(full, terms)

    step = cp.checks.checked(named, build, training=training, values=values)
    shards = dict(zip(named, step.yielded, strict=True))
    step.yielded[:] = [Yielded(BatchLeaf(name, x), x) for name, x in named.items()]
    with _swapped(shards, freed) as tables, run_step(step):
        yield cp
        if values and tables:
            problem = _overwritten(named, tables, step)
            cp.checks.check_batch(Flat(), problem, training=training, values=False)


def context_parallel_unshard(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: object = None,
) -> list[Tensor]:
    """Return full sequences in their original order, from shards of `context_parallel`.

    Replaces torch's function of this name, inside the context and after it, for any length: the
    lengths of all ranks determine the sequence length. Differentiable, unlike torch's: if every
    rank computes the same loss from the result, gradients averaged over ranks are exact.

    Args:
        mesh: the ranks that share sequences.
        buffers: this rank's shards.
        seq_dims: the sequence dim of each.
        load_balancer: None, torch's default; its other ones are refused.
    """
    dims = _check_pairs("context_parallel_unshard", buffers, "seq_dims", seq_dims)
    if load_balancer is not None:
        raise ValueError(
            f"context_parallel_unshard(load_balancer={type(load_balancer).__name__}): tokens are "
            "put into the order in which context_parallel() took them. Leave it out."
        )
    if not buffers:
        return []
    cp, step = _parallel_of(mesh), active_step.current()
    context, uid = cp.groups.context, 0 if step is None else step.uid
    lengths = torch.tensor([x.shape[dim] for x, dim in zip(buffers, dims, strict=True)])
    held = gather(lengths.to(context.device), context).T.tolist()
    layouts = [layout_of_shards(_layout_name(sum(each), cp.cp_size), each) for each in held]
    return [
        unshard(x, dim, layout=layout, transport=context, uid=uid)
        for x, dim, layout in zip(buffers, dims, layouts, strict=True)
    ]


def set_rotate_method(rotate_method: str) -> None:
    """Set the algorithm of every `context_parallel` from now on, as torch's function does.

    Args:
        rotate_method: ``allgather`` (our ``gather``, the default) or ``alltoall`` (our ``ring``).
    """
    global _algorithm
    check_choice("rotate_method", rotate_method, _ALGORITHMS)
    _algorithm = _ALGORITHMS[rotate_method]


def _parallel_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> ContextParallel:
    """Return the object of a mesh, which counts its batches."""
    one_axis, num_inside = neighbours(mesh, None)
    return _parallel(mesh, group_of(one_axis, "mesh"), num_inside)


@lru_cache(maxsize=16)
def _parallel(mesh: Any, group: object, num_inside: int) -> ContextParallel:
    """Return the object of a mesh; one that is equal may be over other groups."""
    return ContextParallel(mesh)


def _layout_name(seq_len: int, cp_size: int) -> LayoutName:
    """Return torch's layout; lengths that torch rejects are balanced."""
    is_odd = seq_len % (2 * cp_size) != 0 and seq_len % cp_size == 0
    return "contiguous" if is_odd or not functions.prototype_balances() else "zigzag"


def _read(
    flat: Flat,
    buffers: Sequence[Tensor] | None,
    buffer_seq_dims: Sequence[int] | None,
    freed: set[int],
) -> FullBatch:
    """Return the buffers as a batch; raise if they cannot be sharded."""
    dims = _check_pairs("context_parallel", buffers, "buffer_seq_dims", buffer_seq_dims)
    if not buffers:
        raise ValueError(
            "context_parallel() got no buffers, and cannot know the sequence length. Give it a "
            "full tensor of the sequence, such as the tokens: buffers=[tokens], "
            "buffer_seq_dims=[1]."
        )
    # By identity: `in` would compare values.
    buffer_ids = {id(x) for x in buffers}
    if not freed <= buffer_ids:
        raise ValueError(
            "context_parallel(no_restore_buffers=...) holds a tensor that is not in buffers. Give "
            "the same objects as in buffers, not copies or views of them."
        )
    if len(buffer_ids) < len(buffers):
        raise ValueError("context_parallel(buffers=...) holds a tensor twice. Give it once.")
    seq_len, has_batch = buffers[0].shape[dims[0]], dims[0] > 0
    for leaf, dim in zip(flat.leaves, dims, strict=True):
        name, x = leaf.path, leaf.value
        is_table = has_batch and dim == 0 and (x.is_floating_point() or x.is_complex())
        if x.shape[dim] != seq_len and not (is_table and x.shape[dim] > seq_len):
            raise ValueError(
                f"buffers[0] of shape {tuple(buffers[0].shape)} gives a sequence length of "
                f"{seq_len}, but {name} of shape {tuple(x.shape)} has {x.shape[dim]}. Put a buffer "
                "of the sequence first. Only a table of positions may be longer: floating-point "
                "values without a batch dim, such as cosines [length, dim]. Another sequence needs "
                "a context_parallel() of its own."
            )
    batch_size = buffers[0].shape[0] if has_batch else 1
    return unnamed_batch(flat, dims, batch_size=batch_size, seq_len=seq_len)


def _check_pairs(
    caller: str, buffers: Sequence[Tensor] | None, name: str, dims: Sequence[int] | None
) -> list[int]:
    """Return the dims counted from the front, one for each buffer."""
    buffers, dims = () if buffers is None else buffers, () if dims is None else dims
    if not all(isinstance(x, list | tuple) for x in (buffers, dims)):
        raise TypeError(f"{caller}() needs a list of tensors and a list of dims: [x] and [1].")
    if len(buffers) != len(dims):
        raise ValueError(
            f"{caller}() got {len(buffers)} buffers and {len(dims)} {name}: give one dim for each "
            "buffer."
        )
    for at, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if type(x) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{caller}(): buffers[{at}] is a {type(x).__name__}, but only plain tensors are "
                "supported. For a DTensor give x.to_local(); FlexAttention and its BlockMask are "
                "not supported."
            )
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{caller}(): buffers[{at}] has shape {tuple(x.shape)}, but {name} gives dim {dim} "
                "for it."
            )
    return [dim % x.dim() for x, dim in zip(buffers, dims, strict=True)]


@contextmanager
def _swapped(
    shards: dict[str, Yielded], freed: Container[int]
) -> Iterator[dict[str, tuple[Tensor, int]]]:
    """Give the caller's tensors the contents of this rank's shards, and restore them on exit.

    Args:
        shards: by name; empty afterwards.
        freed: ids of tensors that are not restored.

    Yields:
        The full tensors, by name, of those without a batch dim, and their sequence dims.
    """
    tables = {}
    with ExitStack() as stack:
        for name in list(shards):
            leaf, original, _ = shards.pop(name)
            x, dim = leaf.value, leaf.dim
            modules.swap_contents(x, original)
            if id(x) not in freed:
                stack.callback(modules.swap_contents, x, original)
                if dim is not None and all(size == 1 for size in x.shape[:dim]):
                    tables[name] = original, dim
            del original
        yield tables


def _overwritten(
    buffers: Mapping[str, Tensor], tables: Mapping[str, tuple[Tensor, int]], step: Step
) -> Exception | None:
    """Return an error if this rank's shard of a table has become that of the first rank.

    DDP broadcasts the buffers of a module at the start of forward, also when a context has sharded
    them. A tensor without a batch dim may be one of them.

    Args:
        buffers: the tensors that hold shards.
        tables: the full tensors of those without a batch dim, and their sequence dims.
        step: the step that they are sharded in.
    """
    for name, (original, dim) in tables.items():
        x, part = buffers[name], partial(shard, original, dim, layout=step.layout)
        if torch.equal(x, part(rank=0)) and not torch.equal(x, part(rank=step.cp_rank)):
            return RuntimeError(
                f"{name} was overwritten inside context_parallel(), where it holds this rank's "
                "positions only: DistributedDataParallel(model) sends the buffers of rank 0 to all "
                "ranks. Build it with broadcast_buffers=False."
            )
    return None
