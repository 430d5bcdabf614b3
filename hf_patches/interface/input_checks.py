# SPDX-License-Identifier: Apache-2.0
"""Checks of what an enabled model is called with inside a step.

Some problems are visible on every rank; `check_agreed` finds those that only one rank sees, and
raises on all ranks.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_patches.interface.names import is_ours
from hf_patches.private import attention_name, has_own_loss
from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.data.shard import own_tokens
from lightning_cp.private.compiler import constant_in_graphs
from lightning_cp.step.step import IGNORED_LABEL, PerStep, Step


def not_enabled(kind: str) -> ValueError:
    """Return the error of a model of some type that runs inside a step."""
    return ValueError(
        f"A model of type '{kind}' runs inside a step and is not enabled: it would see this rank's "
        "tokens only. Call hf_patches.enable(model) first (the strategy does so for submodules of "
        "the LightningModule), or run it on full sequences: `with cp.paused():`."
    )


_filled = PerStep[list[Tensor]]()


def note_filled(step: Step, position_ids: Tensor) -> None:
    """Record position ids that our hooks filled in, which are not the caller's."""
    _filled.find(step, None, list).append(position_ids)


_NOT_TEXT: Final = ("input_features", "image_sizes", "encoder_hidden_states")
_ID_NAMES: Final = ("input_ids", "labels")

_parameters: dict[Callable[..., Any], tuple[str, ...]] = {}


@constant_in_graphs
def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters of a forward method, without ``*args`` and ``**kwargs``."""
    if forward not in _parameters:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        _parameters[forward] = tuple(p.name for p in parameters if p.kind in named)
    return _parameters[forward]


def name_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of a module, all by name."""
    return dict(zip(parameters_of(type(module).forward), args, strict=False)) | kwargs


def check_no_weights(arguments: Mapping[str, Any]) -> None:
    """Raise if a call of a model or of a layer asks for attention weights."""
    if arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions=True inside a step: no rank holds the attention weights of a full "
            "sequence. Leave it out, or use full sequences: `with cp.paused():`."
        )


def check_dense_mask(module: nn.Module, mask: object, step: Step) -> Tensor:
    """Return a mask; raise unless it has this rank's queries and the keys of full sequences."""
    tensor_len, seq_len = step.tensor_len, step.layout.seq_len
    if isinstance(mask, Tensor) and mask.shape[-2:] == (tensor_len, seq_len):
        return mask
    what = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(
        f"{type(module).__name__} got an attention mask {what} inside a step whose ranks hold "
        f"{tensor_len} of {seq_len} tokens. A dense mask has this rank's queries and the keys of "
        f"the full sequence: [batch, 1, {tensor_len}, {seq_len}]; put the full mask into the "
        "batch, as `attention_mask`, and cp.step(...) shards it."
    )


def check_loss(model: PreTrainedModel) -> None:
    """Raise for a loss function of a user."""
    if has_own_loss(model):
        raise ValueError(
            f"{type(model).__name__}.loss_function has been replaced, and would see this rank's "
            "tokens only. Leave the model its own, call it without labels, and compute the loss "
            "from its logits: token_mean() from lightning_cp, or global_mean() from "
            "lightning_cp.loss."
        )


def check_call(
    model: PreTrainedModel, arguments: Mapping[str, Any], step: Step, *, takes_media: bool = False
) -> None:
    """Raise for arguments that are not supported; every rank sees the same problem."""
    implementation = attention_name(model.config.get_text_config())
    if not is_ours(implementation):
        raise ValueError(
            f"{type(model).__name__} is enabled, but its attention has since been set to "
            f"'{implementation}', which sees this rank's tokens only. Set it before calling "
            "enable(model)."
        )
    if arguments.get("labels") is not None:
        check_loss(model)
    for name, default in (("ignore_index", -100), ("label_smoothing", 0.0)):
        if arguments.get(name, default) != default:
            raise ValueError(
                f"{name}={arguments[name]!r} is not supported by the loss of an enabled model, "
                "which ignores labels of -100. Change the labels, or compute the loss from the "
                "logits: token_mean() or global_mean() of lightning_cp.loss."
            )
    if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
        raise ValueError(
            "past_key_values or use_cache=True inside a step: a KV cache would hold this rank's "
            "tokens only. Leave them out; call generate() under `with cp.paused():`."
        )
    check_no_weights(arguments)
    logits_to_keep = arguments.get("logits_to_keep")
    if isinstance(logits_to_keep, Tensor) or logits_to_keep:
        raise ValueError(
            f"logits_to_keep={logits_to_keep!r} inside a step counts from the end of this rank's "
            "tokens, not of the sequence. Leave it out, and select from cp.unshard(logits, dim=1); "
            "the loss of long sequences is computed without holding all logits."
        )
    if arguments.get("num_items_in_batch") is not None:
        raise ValueError(
            "num_items_in_batch inside a step: the loss is already the mean over the tokens of all "
            "ranks, and over accumulated batches under the strategy. Leave it out."
        )
    for name, value in arguments.items():
        if not takes_media and value is not None and ("pixel" in name or name in _NOT_TEXT):
            raise ValueError(
                f"`{name}` inside a step: inputs other than text are not supported for "
                f"{type(model).__name__}. Use full sequences: `with cp.paused():`."
            )
    for name in ("input_ids", "inputs_embeds"):
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.shape[1] != step.tensor_len:
            raise ValueError(
                f"The model got {x.shape[1]} tokens per sequence (`{name}`) inside a step whose "
                f"ranks hold {step.tensor_len} each. Pass what cp.step(...) yields; run full "
                "sequences (generate(), another batch) under `with cp.paused():`."
            )


def check_agreed(
    model: PreTrainedModel,
    arguments: Mapping[str, Any],
    step: Step,
    *,
    labels_are_ids: bool,
    takes_media: bool,
) -> None:
    """Raise on all ranks for ids out of range, and for masks or positions that the step lacks.

    Tensors that the step has yielded are correct. All ranks run the same code, so all of them reach
    the collective or none does.
    """
    problems = []
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2 and _is_new("attention_mask", mask, step):
        padding = torch.zeros(1, step.layout.seq_len, dtype=torch.bool)
        if step.padding is not None:
            padding = torch.from_numpy(step.padding)
        problems.append((_differs(mask == 0, padding, step), "attention_mask"))
    if isinstance(positions, Tensor) and _is_new("position_ids", positions, step):
        differs = positions.shape[-1] != step.position_ids.shape[-1] or bool(
            ((positions != step.position_ids) & _is_real(step, positions)).any()
        )
        problems.append((differs, "position_ids"))
    if step.is_checked:
        special = _placeholders(model) if takes_media else ()
        checked = _ids_out_of_range(model, arguments, special, labels_are_ids=labels_are_ids)
        problems += [(bad, name) for name, bad in checked]
    if not problems:
        return
    flags = any_rank([bad for bad, _ in problems], step.groups.context)
    for flag, (_, name) in zip(flags, problems, strict=True):
        if not flag:
            continue
        if name in _ID_NAMES:
            raise ValueError(
                f"`{name}` hold ids outside of the vocabulary of {type(model).__name__}: 0 to "
                f"{model.config.get_text_config().vocab_size - 1}, for labels also -100. Check "
                "the tokenizer, and tokens that were added to it."
            )
        raise ValueError(
            f"The model got `{name}` that the batch of this step did not hold: documents and "
            "padding of the full sequence are read from the batch. Put them into the batch, in the "
            "dataset or the collate function."
        )


def _is_new(name: str, x: Tensor, step: Step) -> bool:
    """Return whether a tensor comes neither from the batch nor from our hooks."""
    yielded_values = [y.local for y in step.yielded if y.leaf.role == name]
    known = (*yielded_values, step.position_ids, *(_filled.get(step) or ()))
    return all(x is not tensor for tensor in known)


def _is_real(step: Step, x: Tensor) -> Tensor:
    """Return bool [L] on the device of ``x``: False for the padding that we append."""
    return step.layout.is_real(step.cp_rank).to(x.device)


def _differs(mask: Tensor, full: Tensor, step: Step) -> bool:
    if mask.shape[1] != step.tensor_len:
        return True
    expected = own_tokens(full, step).to(mask.device)
    return bool(((mask != expected) & _is_real(step, mask)).any())


def _ids_out_of_range(
    model: PreTrainedModel,
    arguments: Mapping[str, Any],
    special: Sequence[int],
    *,
    labels_are_ids: bool,
) -> Iterator[tuple[str, bool]]:
    """Yield which ids are outside of the vocabulary: only the rank that holds one would fail."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    names = _ID_NAMES if labels_are_ids else _ID_NAMES[:1]
    for name in names:
        x = arguments.get(name)
        if isinstance(x, Tensor) and isinstance(size, int) and x.numel():
            ids = torch.where(x == IGNORED_LABEL, 0, x) if name == "labels" else x
            if name == "input_ids" and special:
                ids = torch.where(torch.isin(ids, ids.new_tensor(special)), 0, ids)
            yield name, bool(((ids < 0) | (ids >= size)).any())


_OF_TEXT: Final = ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start")


def _placeholders(model: PreTrainedModel) -> list[int]:
    """Return the ids of media tokens that lie outside of the vocabulary: features replace them."""
    size = model.config.get_text_config().vocab_size
    return [
        value
        for name, value in vars(model.config).items()
        if name.endswith(("_token_id", "_token_index")) and not name.startswith(_OF_TEXT)
        if isinstance(value, int) and not 0 <= value < size
    ]
