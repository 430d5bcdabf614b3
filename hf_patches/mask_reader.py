# SPDX-License-Identifier: Apache-2.0
"""The registered mask function: a `Mask` of the whole row instead of a dense one of this rank's.

A model describes its mask as a tree of small index functions. This module reads the tree, by the
functions' names, and refuses one that it does not know. What the model says about packed documents
and padding is dropped: it has seen this rank's tokens only, and the step knows the whole row.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_patches.names import active, stock_name
from lightning_cp.data.sharding import unshard
from lightning_cp.step import Step, StepMask

_LIBRARY: Final = "transformers.masking_utils."


@dataclass(frozen=True, eq=False)
class _Seen:
    """The keys that a query ``q`` sees: from ``q - left`` to ``q + right``, as far as they go.

    Args:
        left: how many keys before the query; inf for all.
        right: how many after it.
        chunk: only keys of the query's own chunk of that many tokens; None for all.
        blocks: this rank's ids of blocks whose tokens all see each other, -1 for none.
        inner: how far keys of the same block may lie before the query.
    """

    left: float = math.inf
    right: float = math.inf
    chunk: int | None = None
    blocks: Tensor | None = None
    inner: float = math.inf


class _Nobody:
    """A mask under which nobody sees anybody; no layer uses it."""


NOBODY: Final = _Nobody()


def mask_of_step(mask_function: Callable[..., Any] | None = None, **given: Any) -> Any:
    """Return what attention needs to know of the mask; outside of a step, the stock mask.

    Args:
        mask_function: the tree of index functions.
        given: what else transformers passes; for the stock mask.
    """
    config = given["config"]
    step = active()
    if step is None:
        stock = ALL_MASK_ATTENTION_FUNCTIONS[stock_name(config)]
        return stock(mask_function=mask_function, **given)
    if mask_function is None:
        raise _unknown("nothing", config)
    return build_mask(_read(mask_function, config), step, config)


def build_mask(seen: _Seen, step: Step, config: PreTrainedConfig) -> StepMask | _Nobody:
    """Write what was read as a mask in positions of the whole row."""
    if seen.left < 0:
        # Some models describe a window of 0 tokens for layers that they do not have.
        return NOBODY
    causal = seen.right == 0
    window: int | tuple[int, int] | None = None
    if causal and seen.left < math.inf:
        window = int(seen.left) + 1
    elif min(seen.left, seen.right) < math.inf:
        far = step.layout.padded_len
        window = (int(min(seen.left, far)), int(min(seen.right, far)))
    spans = None if seen.blocks is None else _spans(seen.blocks, seen.inner, step, config)
    return StepMask(causal=causal, window=window, chunk=seen.chunk, spans=spans, step=step)


def _spans(blocks: Tensor, inner: float, step: Step, config: PreTrainedConfig) -> Tensor | None:
    """Return ids of the blocks in the whole row, None if there are none.

    A rank numbers the blocks that it holds, and has seen only a part of some. In the models that
    we know a block is a run of marked tokens, so the marks are enough.
    """
    local = (blocks[:, : step.tensor_len] >= 0).to(torch.int64)
    marked = unshard(local, 1, layout=step.layout, transport=step.groups.context).cpu()
    if not marked.any():
        return None
    if config.model_type not in _RUN_BLOCKS:
        raise ValueError(
            f"A model of type '{config.model_type}' lets the tokens of a block see each other, and "
            "how it numbers its blocks is not known here. Run it on whole rows: "
            "`with cp.paused():`."
        )
    starts = marked.diff(dim=1, prepend=torch.zeros_like(marked[:, :1])) == 1
    ids = torch.where(marked > 0, starts.cumsum(1), -1)
    longest = max(int(torch.bincount(row[row >= 0]).max()) for row in ids if (row >= 0).any())
    if longest > inner + 1:
        raise ValueError(
            f"A block of {longest} tokens that all see each other is longer than the sliding "
            f"window of {int(inner) + 1}, which cuts it in this model: not supported inside a "
            "step. Use `with cp.paused():` for whole rows."
        )
    return ids


_RUN_BLOCKS: Final = {
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
}


def _read(function: Callable[..., Any], config: PreTrainedConfig) -> _Seen:
    """Read a tree of index functions."""
    name = f"{function.__module__}.{function.__qualname__}"
    short = name.removeprefix(_LIBRARY)
    inside = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    if short == "and_masks.<locals>.and_mask":
        parts = (_read(part, config) for part in inside["mask_functions"])
        return reduce(lambda a, b: _both(a, b, name, config), parts)
    if short == "or_masks.<locals>.or_mask":
        parts = (_read(part, config) for part in inside["mask_functions"])
        return reduce(lambda a, b: _either(a, b, name, config), parts)
    if short == "add_offsets_to_mask_function.<locals>.inner_mask":
        return _read(inside["mask_function"], config)
    if short not in _LEAVES:
        raise _unknown(name, config)
    return _LEAVES[short](inside)


def _both(a: _Seen, b: _Seen, name: str, config: PreTrainedConfig) -> _Seen:
    if a.blocks is None:
        a, b = b, a
    if a.blocks is not None and (b.blocks is not None or b.right < math.inf):
        raise _unknown(name, config)
    chunks = [x.chunk for x in (a, b) if x.chunk is not None]
    return _Seen(
        min(a.left, b.left),
        min(a.right, b.right),
        min(chunks, default=None),
        a.blocks,
        min(a.inner, b.left) if a.blocks is not None else math.inf,
    )


def _either(a: _Seen, b: _Seen, name: str, config: PreTrainedConfig) -> _Seen:
    for seen, other in ((a, b), (b, a)):
        if other.left == other.right == -1:  # blocks, and nothing else
            if seen.blocks is not None:
                raise _unknown(name, config)
            return _Seen(seen.left, seen.right, seen.chunk, other.blocks)
    if any(x.chunk is not None or x.blocks is not None for x in (a, b)):
        raise _unknown(name, config)
    # Both hold the query itself, so the union has no hole.
    return _Seen(max(a.left, b.left), max(a.right, b.right))


def _unknown(name: str, config: PreTrainedConfig) -> ValueError:
    return ValueError(
        f"A model of type '{config.model_type}' builds its attention mask with {name}, which is "
        "not known here: what it hides could be seen under context parallelism. Run the model on "
        "whole rows (`with cp.paused():`), or give the mask as a 4-D attention_mask."
    )


def _everything(_: Any) -> _Seen:
    return _Seen()


_GEMMA4 = "transformers.models.gemma4.modeling_gemma4.sliding_window_mask_function.<locals>"

# What each index function lets a query see, by its variables.
_LEAVES: Final[Mapping[str, Callable[[Mapping[str, Any]], _Seen]]] = {
    "causal_mask_function": lambda _: _Seen(right=0),
    "bidirectional_mask_function": _everything,
    "sliding_window_overlay.<locals>.inner_mask": lambda given: _Seen(
        left=given["sliding_window"] - 1
    ),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda given: _Seen(
        given["sliding_window"], given["sliding_window"]
    ),
    "chunked_overlay.<locals>.inner_mask": lambda given: _Seen(chunk=given["chunk_size"]),
    "blockwise_overlay.<locals>.inner_mask": lambda given: _Seen(
        -1, -1, blocks=given["block_sequence_ids"]
    ),
    # The step knows documents and padding of the whole row.
    "packed_sequence_mask_function.<locals>.inner_mask": _everything,
    "padding_mask_function.<locals>.inner_mask": _everything,
    # Models that are bidirectional by their config.
    "transformers.models.gemma3.modeling_gemma3._bidirectional_window_overlay"
    ".<locals>.inner_mask": lambda given: _Seen(
        given["sliding_window"] - 1, given["sliding_window"] - 1
    ),
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextModel.forward.<locals>.<lambda>": (
        _everything
    ),
    f"{_GEMMA4}.inner_mask": lambda given: _Seen(
        given["sliding_window"][0] - 1, max(given["sliding_window"][1] - 1, 0)
    ),
}
