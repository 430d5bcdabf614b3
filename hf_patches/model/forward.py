# SPDX-License-Identifier: Apache-2.0
"""The forward method of an enabled model: its head and its loss inside a step.

Heads that score tokens (language models, token classification) run on this rank's tokens, without
labels; the loss is then the mean over the tokens of all ranks. Heads that score sequences (sequence
classification, question answering) run on full sequences, replicated on every rank.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_patches.interface.input_checks import (
    check_agreed,
    check_call,
    name_arguments,
    parameters_of,
)
from hf_patches.interface.names import active
from hf_patches.model.moe_loss import balance_loss
from hf_patches.multimodal.media_call import around_decoder
from hf_patches.multimodal.table import Media
from lightning_cp.data.shard import full_tokens, own_tokens, unshard
from lightning_cp.fsdp.sharding import on_tensor_ranks
from lightning_cp.geometry.layout import build_layout
from lightning_cp.loss.logp import Head, token_logp
from lightning_cp.loss.means import (
    MAX_CHUNK_LOGITS,
    auto_chunk_len,
    chunked_token_mean,
    global_mean,
    token_mean,
)
from lightning_cp.patch import Patch
from lightning_cp.private.autograd import node_number
from lightning_cp.private.fsdp2 import stays_unsharded
from lightning_cp.step import active_step
from lightning_cp.step.step import IGNORED_LABEL, LossMark, Step

HeadKind = Literal["next token", "same token", "sequence", "none"]
"""What a label belongs to: the next token, the same token or the sequence."""

ChunkedLoss = Literal["auto", "always", "never"]
"""Whether the loss is computed in chunks, without all logits in memory."""

MARK: Final = "_lightning_cp"
"""The attribute of an enabled model that holds its `Enabled`."""

FULL_SEQUENCES: Final = "_lightning_cp_full_sequences"
"""The attribute of a model that `shard_in_forward` has changed."""

# In training, "auto" computes the loss in chunks if a rank's float32 logits take more bytes.
LARGEST_LOGITS: Final = 4 * MAX_CHUNK_LOGITS

_NOT_FOR_MODEL: Final = (
    "branch_ids",
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
class TokenLogpOutput(ModelOutput):
    """What a model returns for ``token_logp=True``.

    Args:
        token_logp: [B, S - 1], as in `lightning_cp.token_logp`.
    """

    token_logp: Tensor | None = None


class Removable(Protocol):
    """A change to a model, such as a hook."""

    def remove(self) -> None:
        """Undo it."""


@dataclass
class Enabled:
    """The state of an enabled model.

    Args:
        head: what a label belongs to.
        base: path of the submodule that computes hidden states; empty for the model itself.
        chunked_loss: as in `enable`.
        patch: the replaced ``forward``.
        changes: hooks that `enable` has registered, and patches of submodules.
        only_attends: whether tokens mix by registered attention only, and are numbered by their
            index: what branches of documents need.
        media: how media and text meet; None for a model of text.
        decoder: path of the text decoder of a model with media.
    """

    head: HeadKind
    base: str
    chunked_loss: ChunkedLoss
    patch: Patch
    changes: list[Removable]
    only_attends: bool = False
    media: Media | None = None
    decoder: str = ""


def forward(model: PreTrainedModel, _: object, *args: Any, **kwargs: Any) -> Any:
    """Run an enabled model: sharded inside a step, as the stock model outside."""
    step = active()
    arguments = name_arguments(model, args, kwargs)
    for name in ("document_ids", "branch_ids"):  # of a batch, but not arguments of models
        arguments.pop(name, None)
    if step is not None:
        return forward_in_step(model, arguments, step)
    scores_tokens = bool(arguments.pop("token_logp", False))
    if scores_tokens:
        _check_labels(model, model.__dict__[MARK], arguments)
    output = stock_forward(model)(**arguments)
    return _logp_of(model, output, arguments) if scores_tokens else output


def check_in_force(model: PreTrainedModel, *_: object) -> None:
    """Raise inside a step if somebody has taken our ``forward`` away from an enabled model."""
    step = active_step.current()
    if step is None or step.is_stock:
        return
    own_forward = model.__dict__.get("forward")
    patch: Patch = model.__dict__[MARK].patch
    is_stock = own_forward is None or getattr(own_forward, "__func__", None) is type(model).forward
    if is_stock or own_forward in patch.previous:
        raise ValueError(
            f"{type(model).__name__} is enabled, but its `forward` has since been set back to what "
            "it was before enable(), and would compute the loss of this rank's tokens. Undo in the "
            "other order what was done around enable(model), or enable the model again: "
            "handle.remove(), then enable(model)."
        )


def forward_in_step(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    step: Step,
    *,
    num_items: Tensor | int | None = None,
    keep_logits: bool = False,
) -> Any:
    """Run an enabled model on this rank's tokens.

    Args:
        model: the model.
        arguments: of the call, by name.
        step: the active step.
        num_items: what the loss of labels is divided by, instead of the number of valid labels.
        keep_logits: whether the loss is computed from all logits, which are returned.
    """
    enabled: Enabled = model.__dict__[MARK]
    scores_tokens = bool(arguments.pop("token_logp", False))
    if scores_tokens:
        _check_labels(model, enabled, arguments)
    arguments = prepare_arguments(model, arguments, step)
    as_tuple = arguments.get("return_dict") is False
    arguments["return_dict"] = True
    if scores_tokens:
        output = _score_labels(model, enabled, arguments, step)
    elif enabled.head == "sequence":
        output = _score_sequences(model, enabled, arguments, step, num_items)
    else:
        output = _score_tokens(model, enabled, arguments, step, num_items, keep_logits=keep_logits)
    return output.to_tuple() if as_tuple else output


def prepare_arguments(
    model: PreTrainedModel, arguments: Mapping[str, Any], step: Step
) -> dict[str, Any]:
    """Return the arguments of a call inside a step, checked, without those that only we read."""
    enabled: Enabled = model.__dict__[MARK]
    check_call(model, arguments, step, takes_media=enabled.media is not None)
    if step.branches is not None and not enabled.only_attends:
        raise ValueError(
            f"{type(model).__name__} mixes or numbers tokens in ways that know no branches, but "
            "the batch has `branch_ids`. Put each branch into a document of its own, behind a copy "
            "of what it shares."
        )
    check_agreed(
        model,
        arguments,
        step,
        labels_are_ids=enabled.head == "next token",
        takes_media=enabled.media is not None,
    )
    return {name: value for name, value in arguments.items() if name not in _NOT_FOR_MODEL}


def stock_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the forward method that the model had before `enable`."""
    enabled: Enabled = model.__dict__[MARK]
    stock = enabled.patch.stock
    if enabled.media is None:
        return stock
    return partial(around_decoder, model, enabled.media, enabled.decoder, stock)


# ---------------------------------------------------------------- heads that score tokens


def _score_tokens(
    model: PreTrainedModel,
    enabled: Enabled,
    arguments: dict[str, Any],
    step: Step,
    num_items: Tensor | int | None,
    *,
    keep_logits: bool,
) -> Any:
    labels, shift = arguments.pop("labels", None), enabled.head == "next token"
    shifted = arguments.pop("shift_labels", None)
    if shifted is not None:
        labels, shift = shifted, False
    elif labels is not None and enabled.media is not None and enabled.media.drops_labels:
        labels = _without_padding(labels, step)
    stock = stock_forward(model)
    if labels is None or enabled.head == "none":
        output = stock(**arguments)
        auxiliary = balance_loss(model, output, step)
        if auxiliary is not None:
            output["aux_loss"] = auxiliary[0]
        return output
    if not keep_logits and _is_chunked(model, enabled, labels, step):

        def score(head: Head, hidden: Tensor, parameters: list[Tensor], chunk_len: int) -> Tensor:
            return chunked_token_mean(
                head, hidden, labels, parameters=parameters, shift=shift, chunk_len=chunk_len
            )

        output, loss = _chunked(model, enabled, arguments, score)
    else:
        output = stock(**arguments)
        loss = token_mean(output.logits, labels, shift=shift)
    if num_items is not None:
        loss = loss * (step.losses[-1].num_tokens / num_items).to(loss.dtype)
    auxiliary = balance_loss(model, output, step)
    if auxiliary is not None:
        output["aux_loss"], coefficient = auxiliary
        loss = loss + coefficient * output["aux_loss"].to(loss.dtype)
        # The sum is logged with the weight of its tokens as well.
        count = step.losses[-1].num_tokens
        step.losses.append(LossMark(loss.detach(), count, node=node_number(loss)))
    # The loss is the first entry of an output, even if it was added last.
    return type(output)(**{"loss": loss, **{k: v for k, v in output.items() if k != "loss"}})


def _without_padding(labels: Tensor, step: Step) -> Tensor:
    """Ignore labels of padding, as the loss of some models does."""
    if step.padding is None:
        return labels
    padding = own_tokens(torch.from_numpy(step.padding), step)
    return labels.masked_fill(padding.to(labels.device), IGNORED_LABEL)


def _score_labels(
    model: PreTrainedModel, enabled: Enabled, arguments: dict[str, Any], step: Step
) -> TokenLogpOutput:
    """Return the log-probability of each label of the full sequences; no mean is taken."""
    labels = arguments.pop("labels")
    if not _is_chunked(model, enabled, labels, step, also_evaluation=True):
        output = stock_forward(model)(**arguments)
        logp = token_logp(output.logits, labels)
    else:

        def score(head: Head, hidden: Tensor, parameters: list[Tensor], chunk_len: int) -> Tensor:
            return token_logp((hidden, head), labels, parameters=parameters, chunk_len=chunk_len)

        output, logp = _chunked(model, enabled, arguments, score)
    _check_no_balance_loss(model, output)
    return TokenLogpOutput(token_logp=logp)


def _check_labels(model: PreTrainedModel, enabled: Enabled, arguments: Mapping[str, Any]) -> None:
    labels = arguments.get("labels")
    if enabled.head != "next token" or labels is None or arguments.get("shift_labels") is not None:
        raise ValueError(
            f"{type(model).__name__}(token_logp=True) scores each label by the token before it: "
            "it needs a causal language model and `labels` that are not shifted."
        )


def _logp_of(model: PreTrainedModel, output: Any, arguments: Mapping[str, Any]) -> TokenLogpOutput:
    """Return the log-probability of each label, from the logits of a stock model."""
    _check_no_balance_loss(model, output)
    return TokenLogpOutput(token_logp=token_logp(output.logits, arguments["labels"]))


def _check_no_balance_loss(model: PreTrainedModel, output: Any) -> None:
    if output.get("aux_loss") is not None:
        raise ValueError(
            f"{type(model).__name__}(token_logp=True) returns no loss, and would leave out the "
            "balance loss of its experts. Switch it off: output_router_logits=False."
        )


def _is_chunked(
    model: PreTrainedModel,
    enabled: Enabled,
    labels: Tensor,
    step: Step,
    *,
    also_evaluation: bool = False,
) -> bool:
    """Return whether to compute the loss in chunks, without logits to return."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if enabled.chunked_loss == "never" or head is None or not enabled.base:
        return False
    if enabled.media is not None and not f"{enabled.decoder}.".startswith(f"{enabled.base}."):
        return False  # the head is inside of the submodule that the model calls
    if enabled.chunked_loss == "always":
        return True
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0)
    num_tokens = labels.shape[0] * step.layout.local_len  # the same on all ranks
    if not (step.training or also_evaluation) or 4 * num_tokens * vocabulary <= LARGEST_LOGITS:
        return False
    # A head that gathers its sharded weights for each call would do so for each chunk.
    return not _is_sharded(head) or stays_unsharded(head)


def _is_sharded(module: nn.Module) -> bool:
    """Return whether weights must be gathered; those that tensor ranks share need not be."""
    return any(isinstance(p, DTensor) and not on_tensor_ranks(p) for p in module.parameters())


def _tensor_mesh(head: nn.Module) -> DeviceMesh | None:
    """Return the tensor ranks over which the classes of a head are sharded, if they are."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, DTensor) or not on_tensor_ranks(weight):
        return None
    return weight.device_mesh if weight.placements == (Shard(0),) else None


def _sharded_logits(head: Any, mesh: DeviceMesh, hidden: Tensor) -> Tensor:
    """Return logits that stay sharded over tensor ranks, along the classes."""
    replicated = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return functional.linear(replicated, head.weight, getattr(head, "bias", None))


class _Replacement(nn.Module):
    """Replaces the submodule that computes hidden states, for one call."""

    def __init__(self, real: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["real"] = real  # not a child: parameters must not be found twice
        self.__dict__["function"] = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["function"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)


@contextmanager
def replaced(model: PreTrainedModel, base: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of a submodule."""
    path, _, name = base.rpartition(".")
    owner, real = model.get_submodule(path), model.get_submodule(base)
    setattr(owner, name, _Replacement(real, function))
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextmanager
def recorded(model: PreTrainedModel, base: str, outputs: list[Any]) -> Iterator[None]:
    """Append what a submodule returns to ``outputs``."""
    real = model.get_submodule(base)

    def record(*args: Any, **kwargs: Any) -> Any:
        outputs.append(real(*args, **kwargs))
        return outputs[-1]

    with replaced(model, base, record):
        yield


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """Return the output of a submodule with other hidden states."""
    if isinstance(output, ModelOutput):
        changed = copy.copy(output)
        changed[next(iter(output))] = hidden
        return changed
    return (hidden, *output[1:])


def _chunked(
    model: PreTrainedModel,
    enabled: Enabled,
    arguments: dict[str, Any],
    score: Callable[[Head, Tensor, list[Tensor], int], Tensor],
) -> tuple[Any, Tensor]:
    """Score tokens in chunks, with the model's own head: also one that changes its logits.

    Args:
        model: the model.
        enabled: its state.
        arguments: of the call.
        score: computes a result from the head, its hidden states and parameters, and the maximal
            number of tokens of a chunk.
    """
    stock, base = stock_forward(model), enabled.base
    real = model.get_submodule(base)
    outputs: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        outputs.append(output)
        return _with_hidden(output, output[0][:, :1])  # the head sees one token

    with replaced(model, base, record):
        output = stock(**arguments)
    (states,), parameters = outputs, _head_parameters(model, real)

    head_arguments = dict(arguments)
    if "output_router_logits" in parameters_of(type(model).forward):
        head_arguments["output_router_logits"] = False

    last: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # A head that is an FSDP2 unit of its own has gathered its weights for the token above. FSDP2's
    # hooks would free them after the backward of each chunk: they are for the model's backward.
    keeps_weights = not _is_sharded(last) and isinstance(last, FSDPModule)
    path = next(name for name, module in model.named_modules() if module is last)

    tensor_ranks = _tensor_mesh(last)

    def head(hidden: Tensor) -> Tensor:
        with ExitStack() as stack:
            base_replaced = replaced(model, base, lambda *_, **__: _with_hidden(states, hidden))
            stack.enter_context(base_replaced)
            if tensor_ranks is not None:
                part = partial(_sharded_logits, last, tensor_ranks)
                stack.enter_context(replaced(model, path, part))
            elif keeps_weights:
                stack.enter_context(replaced(model, path, last.forward))
            logits: Tensor = stock(**head_arguments).logits
        return logits

    chunk_len = auto_chunk_len(output.logits, parameters)
    chunk_len *= 1 if tensor_ranks is None else tensor_ranks.size()
    scored = score(head, states[0], parameters, chunk_len)
    output["logits"] = None
    return output, scored


def _head_parameters(model: PreTrainedModel, base: nn.Module) -> list[Tensor]:
    """Return the parameters after the hidden states; tied embeddings are in both parts."""
    inside = {id(p) for p in base.parameters()}
    outside = {id(p): p for p in model.parameters() if id(p) not in inside}
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    outside |= {id(p): p for p in head.parameters()}
    return list(outside.values())


# ---------------------------------------------------------------- heads that score sequences


def _score_sequences(
    model: PreTrainedModel,
    enabled: Enabled,
    arguments: dict[str, Any],
    step: Step,
    num_items: Tensor | int | None,
) -> Any:
    """Run the head on full sequences, replicated on every rank."""
    if step.documents is not None and (step.documents > 0).any():
        raise ValueError(
            f"{type(model).__name__} scores full sequences, but the batch holds sequences of "
            "several documents. Give each document its own sequence."
        )
    real = model.get_submodule(enabled.base)
    local = {
        name: arguments[name] for name in _SEQUENCES if isinstance(arguments.get(name), Tensor)
    }
    full: dict[str, Any] = {name: full_tokens(x, step) for name, x in local.items()}

    def compute(*args: Any, **kwargs: Any) -> Any:
        base_arguments = name_arguments(real, args, kwargs)
        base_arguments.pop("num_items_in_batch", None)  # heads pass it on; layers know no such mask
        sharded = {
            name: local.get(name, x) if x is not None else x for name, x in base_arguments.items()
        }
        output = real(**sharded)
        return _with_hidden(output, full_tokens(output[0], step))

    if num_items is not None:
        full["num_items_in_batch"] = num_items  # the head has all sequences, as the stock model
    with replaced(model, enabled.base, compute):
        output = stock_forward(model)(**{**arguments, **full})
    loss = output.get("loss")
    if loss is not None:
        count = _num_scored(arguments, step).to(loss.device)
        # The mean over no sequence is NaN, and has weight 0.
        total = torch.where(count > 0, loss, torch.zeros_like(loss)) * count
        output["loss"] = global_mean(total, count)
    return output


def _num_scored(arguments: Mapping[str, Any], step: Step) -> Tensor:
    """Return the number of sequences that a head's loss averages: those that have an answer."""
    labels, starts = arguments.get("labels"), arguments.get("start_positions")
    device = step.position_ids.device
    if isinstance(starts, Tensor):
        length = step.layout.seq_len
        ends = arguments["end_positions"].flatten()
        counts = torch.stack([(starts.flatten() < length).sum(), (ends < length).sum()])
        uneven = (counts[0] != counts[1]).double().reshape(1)
        if step.training:
            step.groups.data.all_reduce(uneven)
        if uneven.item() and step.groups.data.size > 1:
            raise ValueError(
                "Some answers start inside of their sequence and end outside of it, or vice versa: "
                "such sequences cannot be weighted over several data ranks. Set both positions to "
                "the sequence length, which excludes the sequence."
            )
        return counts[0]
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels.flatten() != IGNORED_LABEL).sum()
    return torch.tensor(step.batch_size, device=device)


def unshard_for_pooler(pooler: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Give a pooler, which reads the first token, full sequences."""
    step = active()
    if step is None:
        return None
    transport, x = step.groups.context, args[0]
    if x.dim() == 3 and x.shape[1] == step.tensor_len:
        return (full_tokens(x, step), *args[1:])
    if x.dim() == 2 and isinstance(pooler, nn.Linear):
        # The model has selected the first token (ALBERT): take it from the rank that holds it.
        ranks = build_layout("contiguous", seq_len=step.cp_size, cp_size=step.cp_size)
        firsts = unshard(x.unsqueeze(1), 1, layout=ranks, transport=transport, uid=step.uid)
        owner = [step.layout.ranges(rank)[0].start for rank in range(step.cp_size)].index(0)
        return (firsts[:, owner], *args[1:])
    raise ValueError(
        f"{type(pooler).__name__} got a tensor of shape {tuple(x.shape)} to pool inside a step "
        f"whose ranks hold {step.tensor_len} tokens per sequence, and is not supported. Build the "
        "model without it (add_pooling_layer=False), or use `with cp.paused():`."
    )
