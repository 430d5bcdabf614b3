# SPDX-License-Identifier: Apache-2.0
"""torch's prototype of context parallelism under its own names, for scripts written for it.

Shards the caller's tensors in place and restores them. Attention, routing and backward are those of
any step. For users: docs/from-torch.md.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp import active_step, torch_private
from lightning_cp.comm.mesh import group_of, neighbours
from lightning_cp.comm.transport import gather
from lightning_cp.data.consistency import build_fingerprint
from lightning_cp.data.sharding import shard, unshard
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.options import AlgorithmName, check_choice
from lightning_cp.parallel import ContextParallel, run_step
from lightning_cp.step import Step

_logger = logging.getLogger(__name__)

_ALGORITHMS: Final[dict[str, AlgorithmName]] = {"allgather": "gather", "alltoall": "ring"}

# For the process, as in torch.
_algorithm: AlgorithmName = "auto"

# One object per group and Ulysses size, as long as the group exists: building one is collective.
_parallels: dict[tuple[dist.ProcessGroup | None, int], ContextParallel] = {}

# Buffers that an open context has sharded, by id; the context keeps them alive.
_sharded: set[int] = set()


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

    The first buffer determines the sequence length. Others of that length are sharded like it. A
    longer one is taken for a table of positions and sharded to the positions of the tokens, if it
    is floating-point and the same for all samples ([length, ...], [1, length, ...]). Any other
    length raises.

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
        ``cp.unsharded(module)``, ``cp.paused()``.

    Example:
        >>> x = torch.arange(6.0).view(1, 6)
        >>> with context_parallel(None, buffers=[x], buffer_seq_dims=[1]):
        ...     (full,) = context_parallel_unshard(None, [x], [1])
        >>> torch.equal(x, full)
        True
    """
    cp = parallel_of(mesh)
    training = torch.is_grad_enabled()
    values, problem = cp.checks.count_batch(training), None
    named = {f"buffers[{i}]": x for i, x in enumerate(() if buffers is None else buffers)}
    try:
        unique = _read(buffers, buffer_seq_dims, no_restore_buffers)
        step = _build_step(cp, unique[0], training=training, is_checked=values)
        shards = [(buffer, _shard(buffer, step, cp.cp_rank)) for buffer in unique]
        watched = [
            (buffer, _checksum(local), _checksum(_shard(buffer, step, 0)))
            for buffer, local in shards
            if values and not buffer.has_samples
        ]
    except Exception as error:  # noqa: BLE001  raised below, on all ranks
        problem = error
    cp.checks.check_batch(named, problem, training=training, values=values)
    with ExitStack() as stack:
        while shards:
            buffer, local = shards.pop(0)
            stack.enter_context(_replaced(buffer, local))
            del local  # frees what is not restored
        stack.enter_context(run_step(step))
        yield cp
        if watched:
            cp.checks.check_batch({}, _overwritten(watched), training=training, values=False)


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
        load_balancer: torch's, if it orders tokens as they are ordered here; no other.
    """
    dims = _check_pairs("context_parallel_unshard", buffers, "seq_dims", seq_dims)
    if not buffers:
        return []
    cp = parallel_of(mesh)
    context, step = cp.groups.context, active_step.current()
    lengths = torch.tensor([x.shape[dim] for x, dim in zip(buffers, dims, strict=True)])
    full = []
    for x, dim, local_lens in zip(
        buffers, dims, gather(lengths.to(context.device), context).T.tolist(), strict=True
    ):
        layout, uid = _layout_of(local_lens), 0
        if step is not None and step.groups is cp.groups and layout == step.layout:
            uid = step.uid
        if load_balancer is not None:
            _check_order(load_balancer, layout)
        full.append(unshard(x, dim, layout=layout, transport=context, uid=uid))
    return full


def set_rotate_method(rotate_method: str) -> None:
    """Set the algorithm of every `context_parallel` from now on, as torch's function does.

    Args:
        rotate_method: ``allgather`` (our ``gather``, the default) or ``alltoall`` (our ``ring``).
    """
    global _algorithm
    check_choice("rotate_method", rotate_method, _ALGORITHMS)
    _algorithm = _ALGORITHMS[rotate_method]


def parallel_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> ContextParallel:
    """Return the object of a mesh; meshes over the same group share it."""
    for key in list(_parallels):
        if key[0] is not None and not torch_private.is_alive(key[0]):
            del _parallels[key]
    one_axis, num_inside = neighbours(mesh, None)
    key = group_of(one_axis, "mesh"), num_inside
    if key not in _parallels:
        _parallels[key] = ContextParallel(mesh)
    return _parallels[key]


# ---------------------------------------------------------------- buffers


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """A tensor of the caller.

    Args:
        name: its name in messages.
        tensor: the object that the caller holds.
        dim: its sequence dim, counted from the front.
        restored: whether it is restored at the end.
    """

    name: str
    tensor: Tensor
    dim: int
    restored: bool

    @property
    def length(self) -> int:
        """Return its size along the sequence dim."""
        return self.tensor.shape[self.dim]

    @property
    def has_samples(self) -> bool:
        """Return whether it may hold different values for different samples."""
        return any(size != 1 for size in self.tensor.shape[: self.dim])

    @property
    def description(self) -> str:
        """Return its name and shape, for messages."""
        return f"{self.name} of shape {tuple(self.tensor.shape)}"


def _read(
    buffers: Sequence[Tensor] | None,
    buffer_seq_dims: Sequence[int] | None,
    no_restore_buffers: Iterable[Tensor] | None,
) -> list[_Buffer]:
    """Return the buffers, each once; raise if they cannot be sharded."""
    dims = _check_pairs("context_parallel", buffers, "buffer_seq_dims", buffer_seq_dims)
    # By identity: `in` would compare values.
    not_restored = {id(x) for x in no_restore_buffers or ()}
    if not not_restored <= {id(x) for x in buffers or ()}:
        raise ValueError(
            "context_parallel(no_restore_buffers=...) holds a tensor that is not in buffers. Give "
            "the same objects as in buffers, not copies or views of them."
        )
    if not buffers:
        raise ValueError(
            "context_parallel() got no buffers, and cannot know the sequence length. Give it a "
            "full tensor of the sequence, such as the tokens: buffers=[tokens], "
            "buffer_seq_dims=[1]."
        )
    unique: dict[int, _Buffer] = {}
    for index, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        buffer = _Buffer(f"buffers[{index}]", x, dim, id(x) not in not_restored)
        first = unique.setdefault(id(x), buffer)
        if first.dim != dim:
            raise ValueError(
                f"{first.name} and {buffer.name} are the same tensor, with the sequence dims "
                f"{first.dim} and {dim}. Give it once, or a copy."
            )
        if id(x) in _sharded:
            raise ValueError(
                f"{buffer.description} is already sharded by an enclosing context_parallel(). "
                "Leave it out here, or give a copy."
            )
    first, *others = unique.values()
    for buffer in others:
        _check_length(buffer, first)
    return [first, *others]


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


def _check_length(buffer: _Buffer, first: _Buffer) -> None:
    """Raise if a buffer is neither as long as the first nor a table of positions."""
    if buffer.length == first.length:
        return
    lengths = (
        f"{first.description} gives a sequence length of {first.length}, but {buffer.description} "
        "has"
    )
    if buffer.length < first.length:
        raise ValueError(
            f"{lengths} only {buffer.length}. Put a buffer of the sequence first, and leave out "
            "tensors that are shorter than the sequence."
        )
    x = buffer.tensor
    computed = x.requires_grad and not x.is_leaf
    if buffer.has_samples or computed or not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"{lengths} {buffer.length}. Only a table of positions may be longer: floating-point "
            "values that are the same for all samples, such as cosines [length, dim]. Another "
            "sequence needs a context_parallel() of its own; shorten a tensor that is longer by "
            f"mistake: x.narrow({buffer.dim}, 0, {first.length})."
        )
    if buffer.dim == first.dim and not first.has_samples:
        _warn_table(buffer.description, buffer.length, first.length)


@lru_cache(maxsize=64)
def _warn_table(description: str, length: int, seq_len: int) -> None:
    """Warn, once, if with one sample a sequence and a table of positions look the same."""
    _logger.warning(
        "context_parallel(): %s is longer than the %d tokens of buffers[0], and taken for a table "
        "of positions: its last %d entries are not used.",
        description,
        seq_len,
        length - seq_len,
    )


def _shard(buffer: _Buffer, step: Step, rank: int) -> Tensor:
    return shard(buffer.tensor, buffer.dim, layout=step.layout, rank=rank)


@contextmanager
def _replaced(buffer: _Buffer, local: Tensor) -> Iterator[None]:
    """Give the caller's tensor the contents of ``local``."""
    torch_private.swap_contents(buffer.tensor, local)
    _sharded.add(id(buffer.tensor))
    full = local if buffer.restored else None
    del local
    try:
        yield
    finally:
        _sharded.discard(id(buffer.tensor))
        if full is not None:
            torch_private.swap_contents(buffer.tensor, full)


def _overwritten(watched: Iterable[tuple[_Buffer, int, int]]) -> Exception | None:
    """Return an error if this rank's shard of a buffer has become that of the first rank.

    DDP broadcasts the buffers of a module at the start of forward, also when a context has sharded
    them. A tensor without a batch dim may be one of them.
    """
    for buffer, checksum, first in watched:
        if checksum != first and _checksum(buffer.tensor) == first:
            return RuntimeError(
                f"{buffer.name} was overwritten inside context_parallel(), where it holds this "
                "rank's positions only: DistributedDataParallel(model) sends the buffers of rank 0 "
                "to all ranks. Build it with broadcast_buffers=False."
            )
    return None


def _checksum(x: Tensor) -> int:
    return build_fingerprint({"": x}, values=True).contents


# ---------------------------------------------------------------- layouts


def _layout(seq_len: int, cp_size: int) -> Layout:
    """Build torch's layout; for lengths that torch rejects, some ranks hold fewer tokens."""
    is_odd = seq_len % (2 * cp_size) != 0 and seq_len % cp_size == 0
    name = "contiguous" if is_odd or not torch_private.prototype_balances() else "zigzag"
    return build_layout(name, seq_len=seq_len, cp_size=cp_size, shows_padding=False)


def _layout_of(lengths: Sequence[int]) -> Layout:
    """Return the layout in which the ranks hold these numbers of tokens."""
    total, cp_size = sum(lengths), len(lengths)
    layout = _layout(total, cp_size) if total else None
    expected = [] if layout is None else [layout.tensor_len(rank) for rank in range(cp_size)]
    if layout is None or expected != list(lengths):
        raise ValueError(
            f"The ranks of the mesh hold {list(lengths)} tokens, {total} in all, which "
            f"context_parallel() would have sharded into {expected}. Give shards of the same "
            "tensor on all ranks, and the dim along which it was sharded."
        )
    return layout


def _check_order(load_balancer: object, layout: Layout) -> None:
    order = torch_private.prototype_order(load_balancer)
    if order is None or not torch.equal(order.cpu().flatten().long(), layout.order):
        raise ValueError(
            f"context_parallel_unshard(load_balancer={type(load_balancer).__name__}) orders the "
            f"{layout.seq_len} tokens of {layout.cp_size} ranks differently from "
            "context_parallel(). Leave it out."
        )


# ---------------------------------------------------------------- steps


def _build_step(cp: ContextParallel, first: _Buffer, *, training: bool, is_checked: bool) -> Step:
    """Build a step of the sequence length of the first buffer, in torch's layout."""
    layout = _layout(first.length, cp.cp_size)
    batch_size = first.tensor.shape[0] if first.dim else 1
    positions = torch.arange(first.length, device=first.tensor.device).expand(batch_size, -1)
    return Step(
        layout=layout,
        groups=cp.groups,
        options=replace(cp.options, algorithm=_algorithm),
        batch_size=batch_size,
        documents=None,
        padding=None,
        position_ids=shard(positions, 1, layout=layout, rank=cp.cp_rank),
        training=training,
        is_checked=is_checked,
    )
