# SPDX-License-Identifier: Apache-2.0
"""From a full batch to a `Step` and this rank's shard. No rank waits for another here."""

from typing import Any

from torch import Tensor

from lightning_cp.comm.mesh import Groups
from lightning_cp.data.batch import (
    FullBatch,
    build_position_ids,
    read_batch,
    shard_batch,
    unpack_documents,
)
from lightning_cp.data.sharding import shard
from lightning_cp.data.structure import flatten, rebuild
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.options import Options, SequenceDims
from lightning_cp.step import LossMark, Shard, Step, UnshardedStep, unsharded_step
from lightning_cp.torch_private import tensor_version


def open_step(
    batch: Any,
    options: Options,
    groups: Groups,
    *,
    training: bool,
    balance: Mask | None = None,
    sequence_dims: SequenceDims | None = None,
    checked_paths: set[str] | None = None,
    outer: UnshardedStep | None = None,
    is_checked: bool = False,
    is_stock: bool = False,
) -> tuple[Step, Any]:
    """Build the step of a batch, and this rank's shard of the batch.

    Args:
        batch: the full batch.
        options: how it is sharded, and attention computed.
        groups: the ranks that share it.
        training: whether the loss is averaged over the data axis too.
        balance: the mask under which ranks have equal work; causal by default.
        sequence_dims: of this batch, instead of those of the options.
        checked_paths: see `read_batch`.
        outer: the step that yielded its batch unsharded, if this is a part of that batch.
        is_checked: whether the ranks compare what they hold.
        is_stock: whether models of other libraries run unchanged. Some of them ignore documents:
            each document becomes a sample of its own.
    """
    dims = options.sequence_dims if sequence_dims is None else sequence_dims
    full = read_batch(batch, sequence_dims=dims, checked_paths=checked_paths)
    if not full.dims:
        if outer is not None:
            raise ValueError(
                "cp.step() got a part of a batch that was not sharded, and "
                f"sequence_dims={dict(dims)} keeps all of the part full too. Give the sequence "
                "dims of the part: cp.step(part, sequence_dims={...}), {} for known names."
            )
        step: Step = unsharded_step(
            groups, options, training=training, is_checked=is_checked, is_stock=is_stock
        )
        return step, batch
    if is_stock and full.branches is not None:
        raise ValueError(
            "A batch with `branch_ids` cannot be compared with a stock model, which knows no "
            "branches. Compare a batch in which each branch is a document of its own, behind a "
            "copy of what it shares."
        )
    if is_stock and full.documents is not None:
        batch = unpack_documents(batch, full)
        full = read_batch(batch, sequence_dims=dims, checked_paths=checked_paths)
    step, local = build_step(
        full,
        options,
        groups,
        training=training,
        balance=balance,
        is_checked=is_checked,
        is_stock=is_stock,
        outer_losses=None if outer is None else outer.losses,
    )
    for path, x in local.items():
        step.yielded.setdefault(full.names[path], []).append(x)
    step.shards.extend(
        Shard(local[path], dim, full.tensors[path], tensor_version(local[path]))
        for path, dim in full.dims.items()
    )
    if outer is not None:
        outer.parts.append(step)
    return step, rebuild(batch, local)


def build_step(
    full: FullBatch,
    options: Options,
    groups: Groups,
    *,
    training: bool,
    balance: Mask | None = None,
    is_checked: bool = False,
    is_stock: bool = False,
    outer_losses: list[LossMark] | None = None,
) -> tuple[Step, dict[str, Any]]:
    """Build the step of a batch that has been read, and this rank's values by path.

    Args:
        full: the full batch; at least one of its tensors is sharded.
        options: how it is sharded, and attention computed.
        groups: the ranks that share it.
        training: whether the loss is averaged over the data axis too.
        balance: the mask under which ranks have equal work; causal by default.
        is_checked: whether the ranks compare what they hold.
        is_stock: see `open_step`.
        outer_losses: the losses of the step that yielded its batch unsharded, if there is one.
    """
    context = groups.context
    layout = _choose_layout(full, options, balance, context.size)
    local = shard_batch(full, layout=layout, rank=context.rank)
    device = next(local[path].device for path in full.dims)
    position_ids = build_position_ids(full, device)
    step = Step(
        layout=layout,
        groups=groups,
        options=options,
        batch_size=full.batch_size,
        documents=full.documents,
        padding=full.padding,
        position_ids=shard(position_ids, -1, layout=layout, rank=context.rank),
        training=training,
        has_position_ids=isinstance(full.metadata.get("position_ids"), Tensor),
        is_checked=is_checked,
        is_stock=is_stock,
        branches=full.branches,
        outer_losses=outer_losses,
    )
    return step, local


def _choose_layout(full: FullBatch, options: Options, balance: Mask | None, cp_size: int) -> Layout:
    """Build the layout of a batch: a pure function, so that all ranks build the same."""
    mask = balance or Mask(causal=True)

    def bounds() -> Bounds:
        return mask.bounds(full.seq_len, documents=full.documents, padding=full.padding)

    is_plain = balance is None and full.documents is None and full.padding is None
    return build_layout(
        options.layout,
        seq_len=full.seq_len,
        cp_size=cp_size,
        bounds=None if is_plain else bounds,
        shows_padding=full.shows_padding,
    )


def check_not_sharded(batch: Any, active: Step | None) -> None:
    """Raise if a batch holds shards of the active step."""
    if active is None or active.cp_size == 1:
        return
    shards = {id(x) for values in active.yielded.values() for x in values if isinstance(x, Tensor)}
    for path, leaf in flatten(batch).items():
        if id(leaf.value) in shards:
            raise ValueError(
                f"The batch holds `{path}`, which is already this rank's shard: the active step "
                "has sharded it. Use it as it is; or keep the batch full, and open a step for each "
                "part: sequence_dims={'a': None, 'b': None}."
            )
