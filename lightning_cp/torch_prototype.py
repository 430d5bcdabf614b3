# SPDX-License-Identifier: Apache-2.0
"""torch's prototype by its own names, for scripts that were written for it.

Knows which buffers are cut, and how the caller's own tensors come to hold this rank's part and
their whole again. Attention, dispatch and backward are those of any step. For users:
docs/from-torch.md.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp import active_step, torch_private
from lightning_cp.attn.plan import AlgorithmName
from lightning_cp.comm.mesh import group_of, neighbours
from lightning_cp.comm.transport import Transport
from lightning_cp.data.consistency import build_fingerprint
from lightning_cp.data.sharding import shard, unshard
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.options import check_choice
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import Step

_logger = logging.getLogger(__name__)

_ALGORITHMS: Final[dict[str, AlgorithmName]] = {"allgather": "gather", "alltoall": "ring"}

# For the whole process, as in torch: whoever has an object of his own says it there.
_algorithm: AlgorithmName = "auto"

# Building one is collective and makes process groups, so each is kept as long as its group lives.
_parallels: dict[tuple[dist.ProcessGroup | None, int], ContextParallel] = {}

# Buffers that an open context has cut, by id; it holds on to them.
_cut_now: set[int] = set()


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
) -> Iterator[ContextParallel]:
    """Share the sequence of some tensors among the ranks of a mesh, the way torch's prototype does.

    Takes the place of ``torch.distributed.tensor.experimental.context_parallel``. Inside, the
    buffers hold this rank's tokens, as do all names that the script has for them, and
    ``F.scaled_dot_product_attention`` sees those of all ranks. Afterwards they are whole again.
    Backward may run inside or after. All ranks of the mesh must enter together.

    The first buffer tells the length. Others of that length are cut like it. A longer one is taken
    for a table of positions and cut to the places of the tokens, if it holds floating numbers for
    no row in particular ([length, ...], [1, length, ...]). Any other length is refused.

    Where torch takes a length (divisible by twice the number of ranks, or by that number), shards
    are those of torch. Other lengths have no padding either: some ranks hold fewer tokens.

    Without buffers, tensors are taken for shards that the script has cut itself, as above; their
    length is that of the first attention call.

    Args:
        mesh: the ranks that share rows: a 1-D mesh, or what else `ContextParallel` takes.
        buffers: tensors to cut. One that requires a gradient is cut differentiably: its gradient
            has the whole length, and holds what came to this rank's tokens.
        buffer_seq_dims: for each of them, where the sequence lies.
        no_restore_buffers: those that stay cut; their memory is freed.

    Yields:
        The `ContextParallel` of the mesh, for what torch has no name for: ``cp.position_ids()``,
        ``cp.unsharded(module)``, ``cp.paused()``.

    Example:
        >>> x = torch.arange(6.0).view(1, 6)
        >>> with context_parallel(None, buffers=[x], buffer_seq_dims=[1]):
        ...     (whole,) = context_parallel_unshard(None, [x], [1])
        >>> torch.equal(x, whole)
        True
    """
    cp = _parallel_of(mesh)
    training = torch.is_grad_enabled()
    values, problem = cp.count_batch(training), None
    named = {f"buffers[{i}]": x for i, x in enumerate(() if buffers is None else buffers)}
    try:
        found = _read(buffers, buffer_seq_dims, no_restore_buffers)
        step = _build_step(cp, found, training=training, checked=values)
        cuts = [(one, _part(one, step, cp.cp_rank)) for one in found]
        watched = [
            (one, _contents(local), _contents(_part(one, step, 0)))
            for one, local in cuts
            if values and not one.has_rows
        ]
    except Exception as error:  # noqa: BLE001  raised below, when all ranks know
        problem = error
    cp.agree(named, problem, training=training, values=values)
    with ExitStack() as stack:
        while cuts:
            one, local = cuts.pop(0)
            stack.enter_context(_holding(one, local))
            del local  # what is not restored is freed
        stack.enter_context(cp.entered(step))
        yield cp
        if watched:
            cp.agree({}, _overwritten(watched), training=training, values=False)


def context_parallel_unshard(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: object = None,
) -> list[Tensor]:
    """Return whole rows in their original order, from tensors that `context_parallel` has cut.

    Takes the place of torch's function of this name, inside the context and after it, for any
    length: what all ranks hold together says how long rows are. Differentiable, unlike torch's: if
    every rank computes the same loss from the result, gradients averaged over ranks are exact.

    Args:
        mesh: the ranks that share rows.
        buffers: this rank's parts.
        seq_dims: for each of them, where the sequence lies.
        load_balancer: torch's, if it orders rows as they are ordered here; no other.
    """
    dims = _check_pairs("context_parallel_unshard", buffers, "seq_dims", seq_dims)
    cp = _parallel_of(mesh)
    lengths = [x.shape[dim] for x, dim in zip(buffers, dims, strict=True)]
    step = active_step.current()
    whole = []
    for x, dim, held in zip(buffers, dims, _gather(lengths, cp.groups.context), strict=True):
        layout, uid = _layout_of(held), 0
        if step is not None and step.groups is cp.groups and layout == step.layout:
            uid = step.uid
        if load_balancer is not None:
            _check_order(load_balancer, layout)
        whole.append(unshard(x, dim, layout=layout, transport=cp.groups.context, uid=uid))
    return whole


def set_rotate_method(rotate_method: str) -> None:
    """Say how keys travel in every `context_parallel` from now on, as torch's function does.

    Args:
        rotate_method: ``allgather`` (our ``gather``, the default) or ``alltoall`` (our ``ring``).
    """
    global _algorithm
    check_choice("rotate_method", rotate_method, _ALGORITHMS)
    _algorithm = _ALGORITHMS[rotate_method]


def _parallel_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> ContextParallel:
    """Return the one object of a mesh; meshes over the same group share it."""
    for key in list(_parallels):
        if key[0] is not None and not torch_private.is_alive(key[0]):
            del _parallels[key]
    one_axis, num_inside = neighbours(mesh, None)
    key = group_of(one_axis, "mesh"), num_inside
    if key not in _parallels:
        _parallels[key] = ContextParallel(mesh)
    return _parallels[key]


# ---------------------------------------------------------------- what is cut


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """A tensor of the caller's.

    Args:
        name: what errors call it.
        tensor: the very object that the caller holds.
        dim: where its sequence lies, counted from the front.
        restored: whether it becomes whole again.
    """

    name: str
    tensor: Tensor
    dim: int
    restored: bool

    @property
    def length(self) -> int:
        """Return how long it is."""
        return self.tensor.shape[self.dim]

    @property
    def has_rows(self) -> bool:
        """Say whether it holds different numbers for different rows."""
        return any(size != 1 for size in self.tensor.shape[: self.dim])

    @property
    def said(self) -> str:
        """Return how to speak of it."""
        return f"{self.name} of shape {tuple(self.tensor.shape)}"


def _read(
    buffers: Sequence[Tensor] | None,
    buffer_seq_dims: Sequence[int] | None,
    no_restore_buffers: Iterable[Tensor] | None,
) -> list[_Buffer]:
    """Return the buffers, each once, or say what is wrong with them."""
    dims = _check_pairs("context_parallel", buffers, "buffer_seq_dims", buffer_seq_dims)
    # By identity: `in` would compare numbers.
    kept = {id(x) for x in no_restore_buffers or ()}
    if not kept <= {id(x) for x in buffers or ()}:
        raise ValueError(
            "context_parallel(no_restore_buffers=...) holds a tensor that is not in buffers. Give "
            "the very objects that are in buffers, not copies or views of them."
        )
    found: dict[int, _Buffer] = {}
    for at, (x, dim) in enumerate(zip(buffers or (), dims, strict=True)):
        one = _Buffer(f"buffers[{at}]", x, dim, id(x) not in kept)
        before = found.setdefault(id(x), one)
        if before.dim != dim:
            raise ValueError(
                f"{before.name} and {one.name} are one tensor, to be cut along dim {before.dim} "
                f"and along dim {dim}. Give it once, or a copy."
            )
        if id(x) in _cut_now:
            raise ValueError(
                f"{one.said} has been cut already by a context_parallel() around this one. Leave "
                "it out here, or give a copy."
            )
    every = list(found.values())
    for one in every:
        _check_length(one, every[0])
    return every


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
                "cut and put together. Of a DTensor give x.to_local(); FlexAttention and its "
                "BlockMask are not served."
            )
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{caller}(): buffers[{at}] has shape {tuple(x.shape)}, and no dim {dim}, which "
                f"{name} names."
            )
    return [dim % x.dim() for x, dim in zip(buffers, dims, strict=True)]


def _check_length(one: _Buffer, first: _Buffer) -> None:
    """Refuse a buffer that is neither as long as the first nor a table of positions."""
    if one.length == first.length:
        return
    told = f"{first.said} tells that rows have {first.length} tokens, but {one.said} has"
    if one.length < first.length:
        raise ValueError(
            f"{told} only {one.length}. Put a buffer of the sequence first; what is not as long "
            "as the sequence is not cut with it."
        )
    x = one.tensor
    computed = x.requires_grad and not x.is_leaf
    if one.has_rows or computed or not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"{told} {one.length}. Only a table of positions may be longer: floating numbers that "
            "belong to no row, such as cosines [length, dim]. Another sequence needs a "
            "context_parallel() of its own; what is longer by mistake is cut before: "
            f"x.narrow({one.dim}, 0, {first.length})."
        )
    if one.dim == first.dim and not first.has_rows:
        _say_table(one.said, one.length, first.length)


@lru_cache(maxsize=64)
def _say_table(said: str, length: int, seq_len: int) -> None:
    """Warn, once, where one row leaves open which is which."""
    _logger.warning(
        "context_parallel(): %s is longer than the %d tokens of buffers[0], and taken for a table "
        "of positions: the last %d of it are left out.",
        said,
        seq_len,
        length - seq_len,
    )


def _part(one: _Buffer, step: Step, rank: int) -> Tensor:
    return shard(one.tensor, one.dim, layout=step.layout, rank=rank)


@contextmanager
def _holding(one: _Buffer, local: Tensor) -> Iterator[None]:
    """Let the caller's tensor be ``local``."""
    torch_private.swap_contents(one.tensor, local)
    _cut_now.add(id(one.tensor))
    whole = local if one.restored else None
    del local
    try:
        yield
    finally:
        _cut_now.discard(id(one.tensor))
        if whole is not None:
            torch_private.swap_contents(one.tensor, whole)


def _overwritten(watched: Iterable[tuple[_Buffer, int, int]]) -> Exception | None:
    """Say whether this rank's part of a buffer has become that of the first rank.

    DDP sends the buffers of a module from one rank to all at the start of forward, also when a
    context has cut them. What belongs to no row may be one of them.
    """
    for one, own, first in watched:
        if own != first and _contents(one.tensor) == first:
            return RuntimeError(
                f"{one.name} was overwritten inside context_parallel(), where it holds this rank's "
                "places only: DistributedDataParallel(model) sends the buffers of rank 0 to all "
                "ranks. Build it with broadcast_buffers=False."
            )
    return None


def _contents(x: Tensor) -> int:
    return build_fingerprint({"": x}, values=True).contents


# ---------------------------------------------------------------- how rows are laid out


def _layout(seq_len: int, cp_size: int) -> Layout:
    """Lay rows out as torch does, and where torch cannot, with fewer tokens on some ranks."""
    only_whole = seq_len % (2 * cp_size) != 0 and seq_len % cp_size == 0
    name = "contiguous" if only_whole or not torch_private.prototype_balances() else "zigzag"
    return build_layout(name, seq_len=seq_len, cp_size=cp_size, shows_padding=False)


def _layout_of(held: Sequence[int]) -> Layout:
    """Return the layout in which the ranks hold so many tokens each."""
    layout = _layout(sum(held), len(held)) if sum(held) else None
    expected = [] if layout is None else [layout.held_len(rank) for rank in range(len(held))]
    if layout is None or expected != list(held):
        raise ValueError(
            f"The ranks of the mesh hold {list(held)} tokens, {sum(held)} in all, which "
            f"context_parallel() would have cut into {expected}. Give parts of rows that it has "
            "cut, on all ranks those of the same tensor, and the dim along which they were cut."
        )
    return layout


def _gather(lengths: Sequence[int], transport: Transport) -> list[list[int]]:
    """Return, for each of the lengths, those of all ranks."""
    mine = torch.tensor(lengths, dtype=torch.int64, device=transport.device)
    every = mine.new_empty(transport.size, len(lengths))
    if lengths:
        transport.all_gather(every, mine)()
    found: list[list[int]] = every.T.tolist()
    return found


def _check_order(load_balancer: object, layout: Layout) -> None:
    order = torch_private.prototype_order(load_balancer)
    if order is None or not torch.equal(order.cpu().flatten().long(), layout.order):
        raise ValueError(
            f"context_parallel_unshard(load_balancer={type(load_balancer).__name__}) orders the "
            f"{layout.seq_len} tokens of {layout.cp_size} ranks in another way than "
            "context_parallel() has cut them. Leave it out."
        )


# ---------------------------------------------------------------- steps


def _build_step(
    cp: ContextParallel, buffers: Sequence[_Buffer], *, training: bool, checked: bool
) -> Step:
    """Build the step of some buffers; of none, one that has yet to learn its length."""
    common: dict[str, Any] = {
        "groups": cp.groups,
        "documents": None,
        "padding": None,
        "training": training,
        "algorithm": _algorithm,
        "kernel": cp.kernel,
        "attention_memory": cp.attention_memory,
        "gradient_wire": cp.gradient_wire,
        "gpu": cp.gpu,
        "is_checked": checked,
    }
    if not buffers:
        unknown = _Unknown()
        return _LearningStep(
            layout=cast(Layout, unknown),
            position_ids=cast(Tensor, unknown),
            batch_size=1,
            **common,
        )
    first = buffers[0]
    layout = _layout(first.length, cp.cp_size)
    batch_size = first.tensor.shape[0] if first.dim else 1
    places = torch.arange(first.length, device=first.tensor.device).expand(batch_size, -1)
    return Step(
        layout=layout,
        position_ids=shard(places, 1, layout=layout, rank=cp.cp_rank),
        batch_size=batch_size,
        **common,
    )


class _Unknown:
    """Stands for what a step without buffers does not know."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "context_parallel() without buffers knows no more of the rows than the length of the "
            "first attention call inside it, and nothing before. Give it a tensor of the sequence: "
            "buffers=[tokens], buffer_seq_dims=[1]."
        )


@dataclass(frozen=True, eq=False)
class _LearningStep(Step):
    """A step that was told nothing: its first attention call says how long rows are."""

    def learn(self, held_len: int) -> None:
        """Take the layout in which all ranks hold as many tokens as this call has there."""
        if not isinstance(self.layout, _Unknown):
            return
        (held,) = _gather([held_len], self.groups.context)
        object.__setattr__(self, "layout", _layout_of(held))
