# SPDX-License-Identifier: Apache-2.0
"""From a full batch to a `Step` and this rank's shard. No rank waits for another here.

Chooses the layout of a batch, and pads sequences at their end if a length is not divisible.
"""

from typing import Any

from torch import Tensor

from lightning_cp.config import Config, SequenceDims
from lightning_cp.data.batch import (
    FullBatch,
    build_position_ids,
    read_batch,
    shard_leaf,
    unpack_documents,
)
from lightning_cp.data.shard import shard
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.step.leaves import Flat, flatten
from lightning_cp.step.step import BatchOfParts, Opened, Step


def open_step(
    flat: Flat,
    terms: Opened,
    *,
    balance: Mask | None = None,
    sequence_dims: SequenceDims | None = None,
    checked_paths: set[str] | None = None,
) -> tuple[Opened, Any]:
    """Build the step of a batch, and this rank's shard of the batch.

    Args:
        flat: the full batch.
        terms: ranks, configuration, and what else does not depend on the batch. Under ``is_stock``,
            models of other libraries run unchanged. Some of them ignore documents: each document
            becomes a sample of its own.
        balance: the mask under which ranks have equal work; causal by default.
        sequence_dims: of this batch, instead of those of the configuration.
        checked_paths: see `read_batch`.
    """
    outer = terms.outer
    dims = terms.config.sequence_dims if sequence_dims is None else sequence_dims
    full = read_batch(flat, sequence_dims=dims, checked_paths=checked_paths)
    if full.is_unsharded:
        if outer is not None:
            raise ValueError(
                "cp.step() got a part of a batch that was not sharded, and "
                f"sequence_dims={dict(dims)} keeps all of the part full too. Give the sequence "
                "dims of the part: cp.step(part, sequence_dims={...}), {} for known names."
            )
        return BatchOfParts(**vars(terms), longest=full.seq_len), flat.batch
    if terms.is_stock and full.branches is not None:
        raise ValueError(
            "A batch with `branch_ids` cannot be compared with a stock model, which knows no "
            "branches. Compare a batch in which each branch is a document of its own, behind a "
            "copy of what it shares."
        )
    if terms.is_stock and full.documents is not None:
        flat = flatten(unpack_documents(full))
        full = read_batch(flat, sequence_dims=dims, checked_paths=checked_paths)
    step = build_step(full, terms, balance)
    if outer is not None:
        outer.parts.append(step)
    return step, flat.rebuild({leaf.path: local for leaf, local, _ in step.yielded})


def build_step(full: FullBatch, terms: Opened, balance: Mask | None = None) -> Step:
    """Build the step of a batch that has been read; it holds this rank's values.

    Args:
        full: the full batch; at least one of its tensors is sharded.
        terms: as for `open_step`.
        balance: as for `open_step`.
    """
    rank, layout = terms.cp_rank, _choose_layout(full, terms.config, balance, terms.cp_size)
    yielded = [shard_leaf(leaf, layout=layout, rank=rank) for leaf in full.leaves]
    device = next(value.local.device for value in yielded if value.leaf.dim is not None)
    return Step(
        **vars(terms),
        layout=layout,
        batch_size=full.batch_size,
        documents=full.documents,
        padding=full.padding,
        position_ids=shard(build_position_ids(full, device), -1, layout=layout, rank=rank),
        has_position_ids=isinstance(full.metadata.get("position_ids"), Tensor),
        branches=full.branches,
        yielded=yielded,
    )


def _choose_layout(full: FullBatch, config: Config, balance: Mask | None, cp_size: int) -> Layout:
    """Build the layout of a batch: a pure function, so that all ranks build the same."""
    mask = balance or Mask(causal=True)

    def bounds() -> Bounds:
        return mask.bounds(full.seq_len, documents=full.documents, padding=full.padding)

    is_plain = balance is None and full.documents is None and full.padding is None
    return build_layout(
        config.layout,
        seq_len=full.seq_len,
        cp_size=cp_size,
        bounds=None if is_plain else bounds,
        shows_padding=full.shows_padding,
    )


def check_not_sharded(flat: Flat, active: Opened | None) -> None:
    """Raise if a batch holds shards of the active step."""
    if not isinstance(active, Step) or active.cp_size == 1:
        return
    yielded_ids = {id(y.local) for y in active.yielded if isinstance(y.local, Tensor)}
    for leaf in flat.leaves:
        if id(leaf.value) in yielded_ids:
            raise ValueError(
                f"The batch holds `{leaf.path}`, which is already this rank's shard: the active "
                "step has sharded it. Use it as it is; or keep the batch full, and open a step for "
                "each part: sequence_dims={'a': None, 'b': None}."
            )
