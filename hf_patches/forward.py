# SPDX-License-Identifier: Apache-2.0
"""What a model does with its hidden states, and its loss: the forward of an enabled model.

Heads that score tokens (language models, token classification) run on this rank's tokens, without
labels; the loss is then the mean over the tokens of all ranks. Heads that score rows (sequence
classification, question answering) run on whole rows, on every rank alike.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_patches.input_checks import check_agreed, check_call
from hf_patches.moe_loss import balance_loss
from hf_patches.names import active
from hf_patches.positions import name_arguments, parameters_of
from lightning_cp.data.sharding import unshard
from lightning_cp.geometry.layout import build_layout
from lightning_cp.loss import (
    MAX_CHUNK_LOGITS,
    auto_chunk_len,
    chunked_token_mean,
    global_mean,
    token_mean,
)
from lightning_cp.step import IGNORED_LABEL, LossMark, Step

HeadKind = Literal["next token", "same token", "row", "none"]
"""Against what a head's outputs are scored."""

ChunkedLoss = Literal["auto", "always", "never"]
"""Whether the loss is computed without holding all logits."""

MARK: Final = "_lightning_cp"
"""Under which name an enabled model carries what it must know."""

# Logits of a rank that take more than this in float32 are never held at once.
LARGEST_LOGITS: Final = 4 * MAX_CHUNK_LOGITS

_OURS: Final = (
    "document_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "loss_mask",
    "special_tokens_mask",
)
_SEQUENCES: Final = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids")


@dataclass
class Enabled:
    """What an enabled model carries with it.

    Args:
        head: against what its outputs are scored.
        base: the path of the part that computes hidden states; empty if it is the model itself.
        chunked_loss: whether the logits are never held whole: always, never, or for long rows.
        forward: a forward of the instance's own that was there before, if any.
        hooks: what was hung into the model.
    """

    head: HeadKind
    base: str
    chunked_loss: ChunkedLoss
    forward: Callable[..., Any] | None
    hooks: list[RemovableHandle]


def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Run an enabled model: cut inside a step, as it was outside."""
    step = active()
    enabled: Enabled = model.__dict__[MARK]
    given = name_arguments(model, args, kwargs)
    given.pop("document_ids", None)  # the user's batch may hold them; models do not know them
    if step is None:
        return _stock(model)(**given)
    check_call(model, given, step)
    check_agreed(model, given, step, scores_words=enabled.head == "next token")
    for name in _OURS:
        given.pop(name, None)
    as_tuple = given.get("return_dict") is False
    given["return_dict"] = True
    score = _score_rows if enabled.head == "row" else _score_tokens
    output = score(model, enabled, given, step)
    return output.to_tuple() if as_tuple else output


def _stock(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the forward that the model had."""
    own = model.__dict__[MARK].forward
    if own is not None:
        found: Callable[..., Any] = own
        return found
    # Not a bound method: the compiler would look it up on the instance, and find ours.
    return partial(type(model).forward, model)


# ---------------------------------------------------------------- heads that score tokens


def _score_tokens(
    model: PreTrainedModel, enabled: Enabled, given: dict[str, Any], step: Step
) -> Any:
    labels, shift = given.pop("labels", None), enabled.head == "next token"
    shifted = given.pop("shift_labels", None)
    if shifted is not None:
        labels, shift = shifted, False
    stock = _stock(model)
    if labels is None or enabled.head == "none":
        output = stock(**given)
        auxiliary = balance_loss(model, output, step)
        if auxiliary is not None:
            output["aux_loss"] = auxiliary[0]
        return output
    if _is_chunked(model, enabled, labels, step):
        output, loss = _chunked(model, enabled, given, labels, shift=shift)
    else:
        output = stock(**given)
        loss = token_mean(output.logits, labels, shift=shift)
    auxiliary = balance_loss(model, output, step)
    if auxiliary is not None:
        output["aux_loss"], coefficient = auxiliary
        loss = loss + coefficient * output["aux_loss"].to(loss.dtype)
        # The sum is logged with the weight of its tokens too.
        step.losses.append(LossMark(loss.detach(), step.losses[-1].num_tokens))
    # The loss comes first in an output, also if it was added last.
    return type(output)(**{"loss": loss, **{k: v for k, v in output.items() if k != "loss"}})


def _is_chunked(model: PreTrainedModel, enabled: Enabled, labels: Tensor, step: Step) -> bool:
    """Say whether to go from hidden states to the loss without holding the logits."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if enabled.chunked_loss == "never" or head is None or not enabled.base:
        return False
    if enabled.chunked_loss == "always":
        return True
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0)
    num_tokens = labels.shape[0] * step.layout.local_len  # the same on all ranks
    if not step.training or 4 * num_tokens * vocabulary <= LARGEST_LOGITS:
        return False
    # A head that gathers its own weights for each call would do so for each piece.
    return not any(isinstance(p, DTensor) for p in head.parameters())


class _Part(nn.Module):
    """Stands in for the part of a model that computes hidden states, for one call."""

    def __init__(self, real: nn.Module, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["real"] = real  # not a child: nothing but this call may know it
        self.__dict__["answer"] = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["answer"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)


@contextmanager
def _stand_in(model: PreTrainedModel, base: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Let something else answer for a part of a model."""
    path, _, name = base.rpartition(".")
    owner, real = model.get_submodule(path), model.get_submodule(base)
    owner._modules[name] = _Part(real, answer)
    try:
        yield
    finally:
        owner._modules[name] = real


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """Return a part's output with other hidden states."""
    if isinstance(output, ModelOutput):
        changed = copy.copy(output)
        changed[next(iter(output))] = hidden
        return changed
    return (hidden, *output[1:])


def _chunked(
    model: PreTrainedModel,
    enabled: Enabled,
    given: dict[str, Any],
    labels: Tensor,
    *,
    shift: bool,
) -> tuple[Any, Tensor]:
    """Compute the loss piece by piece, with the model's own head: whatever it does to logits."""
    stock, base = _stock(model), enabled.base
    real = model.get_submodule(base)
    found: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        found.append(output)
        return _with_hidden(output, output[0][:, :1])  # the head sees one token

    with _stand_in(model, base, record):
        output = stock(**given)
    (parts,), parameters = found, _head_parameters(model, real)

    asked = dict(given)
    if "output_router_logits" in parameters_of(type(model).forward):
        asked["output_router_logits"] = False

    def head(hidden: Tensor) -> Tensor:
        with _stand_in(model, base, lambda *_, **__: _with_hidden(parts, hidden)):
            logits: Tensor = stock(**asked).logits
        return logits

    loss = chunked_token_mean(
        head,
        parts[0],
        labels,
        parameters=parameters,
        shift=shift,
        chunk_len=auto_chunk_len(output.logits, parameters),
    )
    output["logits"] = None
    return output, loss


def _head_parameters(model: PreTrainedModel, base: nn.Module) -> list[Tensor]:
    """Return what comes after the hidden states; a tied table of words is in both."""
    inside = {id(p) for p in base.parameters()}
    own = {id(p): p for p in model.parameters() if id(p) not in inside}
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    own |= {id(p): p for p in head.parameters()}
    return list(own.values())


# ---------------------------------------------------------------- heads that score rows


def _score_rows(model: PreTrainedModel, enabled: Enabled, given: dict[str, Any], step: Step) -> Any:
    """Run the head on whole rows, the same on every rank."""
    if step.documents is not None and (step.documents > 0).any():
        raise ValueError(
            f"{type(model).__name__} scores rows, but the batch holds rows of several documents. "
            "Give each document a row of its own."
        )
    layout, transport = step.layout, step.groups.context
    real = model.get_submodule(enabled.base)
    local = {name: given[name] for name in _SEQUENCES if isinstance(given.get(name), Tensor)}
    whole = {
        name: unshard(x, 1, layout=layout, transport=transport, uid=step.uid)
        for name, x in local.items()
    }

    def compute(*args: Any, **kwargs: Any) -> Any:
        asked = name_arguments(real, args, kwargs)
        cut = {name: local.get(name, x) if x is not None else x for name, x in asked.items()}
        output = real(**cut)
        rows = unshard(output[0], 1, layout=layout, transport=transport, uid=step.uid)
        return _with_hidden(output, rows)

    with _stand_in(model, enabled.base, compute):
        output = _stock(model)(**{**given, **whole})
    loss = output.get("loss")
    if loss is not None:
        rows = _num_scored(given, step).to(loss.device)
        # The mean over no rows is NaN; it counts for nothing.
        total = torch.where(rows > 0, loss, torch.zeros_like(loss)) * rows
        output["loss"] = global_mean(total, rows)
    return output


def _num_scored(given: Mapping[str, Any], step: Step) -> Tensor:
    """Return over how many rows a head's loss is the mean: those that have an answer."""
    labels, starts = given.get("labels"), given.get("start_positions")
    device = step.position_ids.device
    if isinstance(starts, Tensor):
        length = step.layout.seq_len
        ends = given["end_positions"].flatten()
        counts = torch.stack([(starts.flatten() < length).sum(), (ends < length).sum()])
        uneven = (counts[0] != counts[1]).double().reshape(1)
        if step.training:
            step.groups.data.all_reduce(uneven)
        if uneven.item() and step.groups.data.size > 1:
            raise ValueError(
                "Some answers start inside of their row and end outside of it, or the other way "
                "round: such rows cannot be weighed over several data ranks. Set both positions "
                "to the length of the row, which leaves it out."
            )
        return counts[0]
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels.flatten() != IGNORED_LABEL).sum()
    return torch.tensor(step.batch_size, device=device)


def whole_rows(pooler: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Give a pooler, which looks at the first token, whole rows."""
    step = active()
    if step is None:
        return None
    layout, transport, x = step.layout, step.groups.context, args[0]
    if x.dim() == 3 and x.shape[1] == step.held_len:
        return (unshard(x, 1, layout=layout, transport=transport, uid=step.uid), *args[1:])
    if x.dim() == 2 and isinstance(pooler, nn.Linear):
        # The model has taken the first token itself (ALBERT): that of the rank that holds it.
        ranks = build_layout("contiguous", seq_len=step.cp_size, cp_size=step.cp_size)
        firsts = unshard(x.unsqueeze(1), 1, layout=ranks, transport=transport, uid=step.uid)
        owner = [layout.ranges(rank)[0].start for rank in range(step.cp_size)].index(0)
        return (firsts[:, owner], *args[1:])
    raise ValueError(
        f"{type(pooler).__name__} got a tensor of shape {tuple(x.shape)} to pool inside a step "
        f"whose ranks hold {step.held_len} tokens per row: what it makes of this rank's tokens "
        "is not known. Build the model without it (add_pooling_layer=False), or use "
        "`with cp.paused():`."
    )
