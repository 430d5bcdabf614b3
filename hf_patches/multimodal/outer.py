# SPDX-License-Identifier: Apache-2.0
"""The forward of a multimodal model around its text decoder: on full sequences, inside a step.

Towers, projectors, the merge of features into the text and 3-D positions are the model's own code,
with its own attention; towers and projectors are shared among ranks (`sharing`). Masks of the text
decoder are ours. Where the decoder begins, `seam` shards what it gets. Some models merge this
rank's shard only: of what is full there, token ids and positions are left.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from lightning_cp.data.batch import SEQUENCE_DIMS, count_positions
from lightning_cp.data.shard import full_tokens
from lightning_cp.private.modules import tensor_version
from lightning_cp.step import active_step
from lightning_cp.step.step import Step


@dataclass(eq=False)
class _Outer:
    """The call that is under way.

    Args:
        step: its step.
        configs: ids of the configs of the text decoder.
        merged_ids: the full token ids, if the model merges this rank's shard; None otherwise.
        routers: what the decoder returned of its routers, for the balance loss.
    """

    step: Step
    configs: frozenset[int]
    merged_ids: Tensor | None = None
    routers: Any = None


# Read by the mask function, which transformers calls with a config and no model.
_current: _Outer | None = None


def step_of(config: PreTrainedConfig) -> Step | None:
    """Return the step if a model on full sequences builds a mask of its text decoder."""
    outer = _current
    return outer.step if outer is not None and id(config) in outer.configs else None


def on_full_sequences() -> Step | None:
    """Return the step in which a multimodal model runs on full sequences; None elsewhere.

    Known by what activation checkpointing restores: also when a part of a model runs again.
    """
    step = active_step.current()
    return (
        step
        if step is not None and not step.is_stock and active_step.sees_full_sequences()
        else None
    )


def merged_ids() -> Tensor | None:
    """Return the full token ids while a model merges this rank's shard; None elsewhere."""
    outer = _current
    return None if outer is None else outer.merged_ids


def hand_over_routers(logits: Any) -> None:
    """Let the running call return what its decoder returned of its routers."""
    if _current is not None:
        _current.routers = logits


def run(
    stock: Callable[..., Any],
    arguments: Mapping[str, Any],
    step: Step,
    configs: frozenset[int],
    *,
    merges_shards: bool = False,
) -> Any:
    """Call a forward method with full sequences; router logits are of this rank's tokens.

    Args:
        stock: the forward method.
        arguments: of the call, with this rank's tokens.
        step: the active step.
        configs: ids of the configs of the text decoder.
        merges_shards: whether token ids stay sharded; the model merges what belongs to them.
    """
    full = {name: full_value(name, x, step) for name, x in arguments.items()}
    ids = None
    if merges_shards and isinstance(full.get("input_ids"), Tensor):
        ids, full["input_ids"] = full["input_ids"], arguments["input_ids"]
    outer = _Outer(step, configs, ids)
    with _running(outer):
        output = stock(**full)
    if outer.routers is not None:
        output["router_logits"] = outer.routers
    return output


def counted_positions(step: Step) -> Tensor:
    """Return the index of each token in its document, [B, S], for full sequences."""
    positions = torch.from_numpy(count_positions(step.documents, step.layout.seq_len))
    return positions.expand(step.batch_size, -1).to(step.position_ids.device)


@contextmanager
def _running(outer: _Outer) -> Iterator[None]:
    global _current
    former, _current = _current, outer
    active_step.declare_full_sequences(1)
    try:
        yield
    finally:
        active_step.declare_full_sequences(-1)
        _current = former


# Heads see this rank's hidden states.
_OF_LOGITS: Final = ("labels", "shift_labels")


def full_value(name: str, x: Any, step: Step) -> Any:
    """Return the full tensor of this rank's shard; other values as they are."""
    if not isinstance(x, Tensor) or name in _OF_LOGITS:
        return x
    known = step.shard_of(x)
    if known is not None and known.leaf.dim is not None:
        is_unchanged = tensor_version(x) == known.version
        return known.leaf.value if is_unchanged else full_tokens(x, step, known.leaf.dim)
    dim = SEQUENCE_DIMS.get(name)
    if dim is None or x.dim() < 2 or x.shape[dim] != step.tensor_len:
        return x
    return full_tokens(x, step, dim)
