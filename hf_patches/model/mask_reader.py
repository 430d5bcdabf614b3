# SPDX-License-Identifier: Apache-2.0
"""The mask function that we register with transformers: a `Mask` of the full sequence.

A model describes its mask as a tree of small index functions. This module reads the tree, by the
names of the functions, and raises for unknown ones. Functions for packed documents and padding are
ignored: the model has seen this rank's tokens only, and the step knows the full sequence.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_patches.interface.names import active, is_ours, stock_name
from hf_patches.multimodal import outer
from hf_patches.multimodal.seam import prepared_mask
from hf_patches.private import (
    attention_name,
    mask_arguments,
    prepare_mask_arguments,
    replace_mask_arguments,
)
from lightning_cp.attn.operator import mark_mask
from lightning_cp.data.shard import full_tokens
from lightning_cp.step.step import Step, StepMask, StepReference

_LIBRARY: Final = "transformers.masking_utils."


@dataclass(frozen=True, eq=False)
class _Visible:
    """The keys that a query ``q`` sees: from ``q - left`` to ``q + right``.

    Args:
        left: number of keys before the query; inf for all.
        right: number of keys after it.
        chunk: length of chunks; a query sees keys of its own chunk only. None for no chunks.
        blocks: this rank's ids of blocks whose tokens all see each other, -1 for none.
        block_left: number of keys of the same block before the query.
    """

    left: float = math.inf
    right: float = math.inf
    chunk: int | None = None
    blocks: Tensor | None = None
    block_left: float = math.inf


_FULL: Final = (slice(None), slice(0, None))


class ModelMask(StepMask):
    """A mask in place of a tensor, for models that look at its dims or convert it."""

    ndim: ClassVar[int] = 0

    def to(self, *_: object, **__: object) -> "ModelMask":
        """Return the mask itself: it has neither a dtype nor a device."""
        return self

    def __getitem__(self, index: object) -> "ModelMask":
        """Return the mask itself to models that take the queries of all tokens of it."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(x, slice) and x in _FULL for x in parts):
            raise TypeError(
                f"A model's code took the part {index} of a mask inside a step, where it holds no "
                "entries. Call it without logits_to_keep."
            )
        return self


class _Nothing:
    """A mask under which no query sees a key; no layer uses it."""


NOTHING: Final = _Nothing()


def mask_of_step(mask_function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the mask of the active step; outside of a step, the stock mask.

    Args:
        mask_function: the tree of index functions.
        options: other arguments of a mask function, for the stock mask.
    """
    config = options["config"]
    on_full, step = outer.step_of(config), active()
    if step is None:
        step = on_full
    elif (prepared := prepared_mask(step)) is not None:
        return prepared
    if step is None:
        stock = ALL_MASK_ATTENTION_FUNCTIONS[stock_name(config)]
        return stock(mask_function=mask_function, **options)
    if mask_function is None:
        raise _unknown("nothing", config)
    return build_mask(_read(mask_function, config), step, config)


def _without_search(config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
    """Prepare the arguments of a mask function without a search for packed documents in a step.

    The step knows its documents. transformers searches for them in the position ids, and reads the
    result from the GPU: the host would wait for it at the start of each forward.
    """
    is_read_by_us = is_ours(attention_name(config)) and active() is not None
    if not is_read_by_us or torch.compiler.is_compiling():
        return prepare_mask_arguments(config, *args, **kwargs)
    return prepare_mask_arguments(config, **mask_arguments(args, kwargs) | {"position_ids": None})


def build_mask(visible: _Visible, step: Step, config: PreTrainedConfig) -> StepMask | _Nothing:
    """Return the mask in global positions."""
    if visible.left < 0:
        # Some models describe a window of 0 tokens for layers that they do not have.
        return NOTHING
    causal = visible.right == 0
    window: int | tuple[int, int] | None = None
    if causal and visible.left < math.inf:
        window = int(visible.left) + 1
    elif min(visible.left, visible.right) < math.inf:
        longest = step.layout.padded_len
        window = (int(min(visible.left, longest)), int(min(visible.right, longest)))
    spans = None
    if visible.blocks is not None:
        if active() is None:  # built by the model around the decoder, for full sequences
            spans = _full_spans(visible.blocks, step, config)
        else:
            spans = _spans(visible.blocks, step, config)
    mask = ModelMask(
        causal=causal,
        window=window,
        chunk=visible.chunk,
        spans=spans,
        # Where a window limits blocks too, it is that of the other keys.
        cut_spans=visible.block_left < math.inf,
        reference=StepReference(step),
    )
    return mark_mask(mask)


def _spans(blocks: Tensor, step: Step, config: PreTrainedConfig) -> Tensor | None:
    """Return the ids of blocks in the full sequence, None if there are none.

    A rank numbers the blocks that it holds, and sees only a part of some. In the supported models a
    block is a run of consecutive marked tokens, so the marks are sufficient.
    """
    local = (blocks[:, : step.tensor_len] >= 0).to(torch.int64)
    marked = full_tokens(local, step).cpu()
    if not marked.any():
        return None
    if config.model_type not in _RUN_BLOCKS:
        raise ValueError(
            f"A model of type '{config.model_type}' lets the tokens of a block see each other, and "
            "its blocks are not supported. Run it on full sequences: `with cp.paused():`."
        )
    return _numbered_runs(marked > 0, marked)


def _numbered_runs(inside: Tensor, ids: Tensor) -> Tensor:
    """Number the runs of equal ids; -1 outside."""
    ids = torch.where(inside, ids, -1)
    starts = ids.diff(dim=1, prepend=torch.full_like(ids[:, :1], -2)) != 0
    return torch.where(inside, starts.cumsum(1), -1)


def _full_spans(blocks: Tensor, step: Step, config: PreTrainedConfig) -> Tensor | None:
    """Return ids of blocks, given those of full sequences, None if there are none.

    Blocks end where a document does, and padding is visible to no token. A block in several parts
    is not one interval of keys.
    """
    ids = blocks[:, : step.layout.seq_len].cpu()
    inside = ids >= 0
    if step.padding is not None:
        inside = inside & ~torch.from_numpy(step.padding)
    if not inside.any():
        return None
    documents = torch.zeros_like(ids)
    if step.documents is not None:
        documents = torch.from_numpy(step.documents).expand_as(ids)
    ids = ids + documents * (int(ids.max()) + 1)  # of different documents they are different
    runs = _numbered_runs(inside, ids)
    for sample, (own, numbers, real) in enumerate(zip(ids, runs, inside, strict=True)):
        pairs = set(zip(own[real].tolist(), numbers[real].tolist(), strict=True))
        if len(pairs) > len({block for block, _ in pairs}):
            raise ValueError(
                f"A model of type '{config.model_type}' lets all tokens of a block see each other, "
                f"and a block of sample {sample} is in several parts, with other tokens between "
                "them: not supported inside a step. Run it on full sequences: "
                "`with cp.paused():`."
            )
    return runs


_RUN_BLOCKS: Final = {
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
}


def _read(function: Callable[..., Any], config: PreTrainedConfig) -> _Visible:
    """Read a tree of index functions."""
    name = f"{function.__module__}.{function.__qualname__}"
    short = name.removeprefix(_LIBRARY)
    closure = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    if short == "and_masks.<locals>.and_mask":
        parts = (_read(part, config) for part in closure["mask_functions"])
        return reduce(lambda a, b: _both(a, b, name, config), parts)
    if short == "or_masks.<locals>.or_mask":
        parts = (_read(part, config) for part in closure["mask_functions"])
        return reduce(lambda a, b: _either(a, b, name, config), parts)
    if short == "add_offsets_to_mask_function.<locals>.inner_mask":
        return _read(closure["mask_function"], config)
    if short not in _LEAVES:
        raise _unknown(name, config)
    return _LEAVES[short](closure)


def _both(a: _Visible, b: _Visible, name: str, config: PreTrainedConfig) -> _Visible:
    if a.blocks is None:
        a, b = b, a
    if a.blocks is not None and (b.blocks is not None or b.right < math.inf):
        raise _unknown(name, config)
    chunks = [x.chunk for x in (a, b) if x.chunk is not None]
    return _Visible(
        min(a.left, b.left),
        min(a.right, b.right),
        min(chunks, default=None),
        a.blocks,
        min(a.block_left, b.left) if a.blocks is not None else math.inf,
    )


def _either(a: _Visible, b: _Visible, name: str, config: PreTrainedConfig) -> _Visible:
    for one, other in ((a, b), (b, a)):
        if other.left == other.right == -1:  # blocks only
            if one.blocks is not None:
                raise _unknown(name, config)
            return _Visible(one.left, one.right, one.chunk, other.blocks)
    if any(x.chunk is not None or x.blocks is not None for x in (a, b)):
        raise _unknown(name, config)
    # Both contain the query itself, so the union has no gap.
    return _Visible(max(a.left, b.left), max(a.right, b.right))


def _unknown(name: str, config: PreTrainedConfig) -> ValueError:
    return ValueError(
        f"A model of type '{config.model_type}' builds its attention mask with {name}, which is "
        "not supported: keys that it hides could become visible. Run the model on full sequences "
        "(`with cp.paused():`), or pass the mask as a 4-D attention_mask."
    )


def _everything(_: Any) -> _Visible:
    return _Visible()


_GEMMA4 = "transformers.models.gemma4.modeling_gemma4.sliding_window_mask_function.<locals>"

# The keys that each index function lets a query see, from its closure.
_LEAVES: Final[Mapping[str, Callable[[Mapping[str, Any]], _Visible]]] = {
    "causal_mask_function": lambda _: _Visible(right=0),
    "bidirectional_mask_function": _everything,
    "sliding_window_overlay.<locals>.inner_mask": lambda closure: _Visible(
        left=closure["sliding_window"] - 1
    ),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda closure: _Visible(
        closure["sliding_window"], closure["sliding_window"]
    ),
    "chunked_overlay.<locals>.inner_mask": lambda closure: _Visible(chunk=closure["chunk_size"]),
    "blockwise_overlay.<locals>.inner_mask": lambda closure: _Visible(
        -1, -1, blocks=closure["block_sequence_ids"]
    ),
    # The step knows the documents and the padding of the full sequence.
    "packed_sequence_mask_function.<locals>.inner_mask": _everything,
    "padding_mask_function.<locals>.inner_mask": _everything,
    # Models that their config makes bidirectional.
    "transformers.models.gemma3.modeling_gemma3._bidirectional_window_overlay"
    ".<locals>.inner_mask": lambda closure: _Visible(
        closure["sliding_window"] - 1, closure["sliding_window"] - 1
    ),
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextModel.forward.<locals>.<lambda>": (
        _everything
    ),
    # A window that begins after the prompt: in training all is prompt.
    "transformers.models.unlimited_ocr.modeling_unlimited_ocr"
    ".create_reference_sliding_window_causal_mask.<locals>.prefill_overlay": _everything,
    f"{_GEMMA4}.inner_mask": lambda closure: _Visible(
        closure["sliding_window"][0] - 1, max(closure["sliding_window"][1] - 1, 0)
    ),
}


@contextmanager
def search_skipped() -> Iterator[None]:
    """Let enabled models search for no packed documents inside a ``with`` block."""
    # One function for all steps: compiled code depends on it.
    with replace_mask_arguments(_without_search) or nullcontext():
        yield
