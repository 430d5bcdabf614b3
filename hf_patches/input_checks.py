# SPDX-License-Identifier: Apache-2.0
"""What a call of an enabled model may hold inside a step.

Some of it is wrong on all ranks alike; some only one rank can see, and then all must hear of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_patches.names import is_ours
from hf_patches.positions import FILLED
from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.data.sharding import shard
from lightning_cp.step import IGNORED_LABEL, Step

_NO_TEXT: Final = ("input_features", "image_sizes", "encoder_hidden_states")


def check_call(model: PreTrainedModel, given: Mapping[str, Any], step: Step) -> None:
    """Refuse what cannot be served; whatever is wrong here is wrong on all ranks."""
    implementation = model.config.get_text_config()._attn_implementation
    if not is_ours(implementation):
        raise ValueError(
            f"{type(model).__name__} is enabled, but its attention has been set to "
            f"'{implementation}' since, which sees this rank's tokens only. Leave it, or "
            "choose it first and call enable(model) then."
        )
    if given.get("labels") is not None and "_loss_function" in model.__dict__:
        raise ValueError(
            f"{type(model).__name__}.loss_function has been replaced, and would see this rank's "
            "tokens only. Call the model without labels and compute the loss from its logits: "
            "token_mean() from lightning_cp, or global_mean() from lightning_cp.loss."
        )
    for name, default in (("ignore_index", -100), ("label_smoothing", 0.0)):
        if given.get(name, default) != default:
            raise ValueError(
                f"{name}={given[name]!r} is not known to the loss of an enabled model, which "
                "ignores labels of -100. Change the labels, or compute the loss from the logits: "
                "token_mean() or global_mean() of lightning_cp.loss."
            )
    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise ValueError(
            "past_key_values or use_cache=True inside a step: a cache of keys would hold this "
            "rank's tokens only. Leave them out; generate() goes under `with cp.paused():`."
        )
    kept = given.get("logits_to_keep")
    if isinstance(kept, Tensor) or kept:
        raise ValueError(
            f"logits_to_keep={kept!r} inside a step counts from the end of this rank's tokens, not "
            "of the row. Leave it out, and take what you need from cp.unshard(logits, dim=1); the "
            "loss of long rows is computed without holding all logits."
        )
    if given.get("num_items_in_batch") is not None:
        raise ValueError(
            "num_items_in_batch inside a step: the loss is already the mean over the tokens of all "
            "ranks, and over accumulated batches where the strategy trains. Leave it out."
        )
    for name, value in given.items():
        if value is not None and ("pixel" in name or name in _NO_TEXT):
            raise ValueError(
                f"`{name}` inside a step: inputs other than text are not supported yet. Use "
                "`with cp.paused():` for whole rows."
            )
    for name in ("input_ids", "inputs_embeds"):
        x = given.get(name)
        if isinstance(x, Tensor) and x.shape[1] != step.tensor_len:
            raise ValueError(
                f"The model got {x.shape[1]} tokens per row (`{name}`) inside a step whose ranks "
                f"hold {step.tensor_len} each. Give it what cp.step(...) yields; whole rows "
                "(generate(), another batch) go under `with cp.paused():`."
            )


def check_agreed(
    model: PreTrainedModel, given: Mapping[str, Any], step: Step, *, scores_words: bool
) -> None:
    """Refuse, on all ranks, masks and positions that the step does not know, and wrong ids.

    What the step has yielded is known to be right; all ranks run the same code, so they all come
    here or none does.
    """
    problems = []
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2 and _is_new("attention_mask", mask, step):
        padding = torch.zeros(1, step.layout.seq_len, dtype=torch.bool)
        if step.padding is not None:
            padding = torch.from_numpy(step.padding)
        problems.append((_differs(mask == 0, padding, step), "attention_mask"))
    if isinstance(positions, Tensor) and _is_new("position_ids", positions, step):
        other = positions.shape[-1] != step.position_ids.shape[-1] or bool(
            ((positions != step.position_ids) & _is_real(step, positions)).any()
        )
        problems.append((other, "position_ids"))
    if step.is_checked:
        problems += [(bad, name) for name, bad in _ids_out_of_range(model, given, scores_words)]
    if not problems:
        return
    flags = any_rank([bad for bad, _ in problems], step.groups.context)
    for flag, (_, name) in zip(flags, problems, strict=True):
        if not flag:
            continue
        if name in _ID_NAMES:
            raise ValueError(
                f"`{name}` hold ids outside of the vocabulary of {type(model).__name__}: 0 to "
                f"{model.config.get_text_config().vocab_size - 1}, for labels also -100. Look at "
                "the tokenizer, and at tokens that were added to it."
            )
        raise ValueError(
            f"The model got `{name}` that the batch of this step did not hold: documents and "
            "padding are read from the batch, for the whole row. Put them into the batch, in the "
            "data set or the collate function."
        )


_ID_NAMES: Final = ("input_ids", "labels")


def _is_new(name: str, x: Tensor, step: Step) -> bool:
    """Say whether a tensor is neither from the batch nor from us."""
    ours = (*step.yielded.get(name, ()), step.position_ids, *step.cache.get(FILLED, ()))
    return all(x is not known for known in ours)


def _is_real(step: Step, x: Tensor) -> Tensor:
    """Return bool [L] beside ``x``: nobody's word on our own padding counts."""
    return step.layout.is_real(step.cp_rank).to(x.device)


def _differs(mask: Tensor, whole: Tensor, step: Step) -> bool:
    if mask.shape[1] != step.tensor_len:
        return True
    known = shard(whole, 1, layout=step.layout, rank=step.cp_rank).to(mask.device)
    return bool(((mask != known) & _is_real(step, mask)).any())


def _ids_out_of_range(
    model: PreTrainedModel, given: Mapping[str, Any], scores_words: bool
) -> Iterator[tuple[str, bool]]:
    """Say which ids are not in the vocabulary: only the rank that holds one would stop at it."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    names = _ID_NAMES if scores_words else _ID_NAMES[:1]
    for name in names:
        x = given.get(name)
        if isinstance(x, Tensor) and isinstance(size, int) and x.numel():
            low = torch.where(x == IGNORED_LABEL, 0, x) if name == "labels" else x
            yield name, bool((low < 0).any() | (x >= size).any())
