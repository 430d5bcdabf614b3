# SPDX-License-Identifier: Apache-2.0
"""`enable(model)`: lets a Hugging Face model run inside steps, with the masks of its own code.

Attention and masks go through transformers' registries, positions through hooks, the loss through
the model's forward. All of it acts inside a step only, and `remove()` takes it away.
"""

import functools
import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, Final, get_args

from torch import nn
from transformers import PreTrainedModel

import hf_patches.model.attention  # noqa: F401  registers our names
from hf_patches.interface import positions
from hf_patches.interface.input_checks import check_loss
from hf_patches.interface.names import ENABLED, NAMES, STOCK, implementations, is_ours, text_key
from hf_patches.mixers import INSTALLERS
from hf_patches.model import forward
from hf_patches.model.forward import ChunkedLoss, Enabled, Removable, unshard_for_pooler
from hf_patches.multimodal import seam, sharing
from hf_patches.multimodal.table import Media, find_decoder
from hf_patches.private import attention_name, check_loss_name, set_attention_name, takes_attention
from hf_patches.support import (
    ARCHITECTURES,
    LIBRARIES,
    Architecture,
    architecture_of,
    head_of,
)
from hf_patches.weights.saving import add_saving, remove_saving
from lightning_cp.config import check_choice
from lightning_cp.patch import Method, Patch, replace_method
from lightning_cp.private.compiler import uncompiled

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnabledModel:
    """An enabled model, until `remove()`.

    Args:
        model: the transformers model, without a PEFT model around it.
        outer: the module that was passed to `enable`.
    """

    model: PreTrainedModel
    outer: nn.Module

    def remove(self) -> None:
        """Restore the model; one that is sharded can still be saved."""
        if forward.FULL_SEQUENCES in self.model.__dict__:
            raise ValueError(
                f"{type(self.model).__name__} takes full sequences by shard_in_forward(model, cp), "
                "which needs it enabled. Call remove() of the handle of shard_in_forward() first."
            )
        remove_saving(self.outer)
        enabled: Enabled | None = self.model.__dict__.pop(forward.MARK, None)
        if enabled is None:
            return
        for change in (enabled.patch, *enabled.changes):
            change.remove()
        names = implementations(self.model)
        _implement(self.model, {key: STOCK.get(name, name) for key, name in names.items()})

    undo = remove


def enable(
    model: nn.Module,
    *,
    chunked_loss: ChunkedLoss = "auto",
    allow_unknown: bool = False,
) -> EnabledModel:
    """Let a Hugging Face model run inside steps.

    Works on loaded models and on the meta device, with or without PEFT. Outside of steps the model
    behaves as before. Enabling a model twice has no effect; a PEFT model that has come around it in
    between is then saved whole, too.

    Args:
        model: a model from transformers, or a PEFT model around one.
        chunked_loss: whether the loss is computed in chunks, without the logits of all of this
            rank's tokens in memory; ``output.logits`` is then None. ``auto`` does so in training,
            if the logits would take more than 1 GiB.
        allow_unknown: enable an architecture that is not in the table. Compare it with the stock
            model first: `hf_patches.verify`.

    Returns:
        A handle; its ``remove()`` restores the model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> handle = enable(model)
        >>> model.config._attn_implementation
        'lightning_cp'
        >>> handle.remove()
        >>> model.config._attn_implementation
        'sdpa'
    """
    check_choice("chunked_loss", chunked_loss, get_args(ChunkedLoss))
    inner = inner_model(model)
    if is_enabled(inner):
        add_saving(model)  # a PEFT model that came after
        return EnabledModel(inner, model)
    known = _check_known(inner, allow_unknown=allow_unknown)
    if known is not None and known.media is not None:
        known = _with_decoder(inner, known, allow_unknown=allow_unknown)
    kind = head_of(inner)
    if kind is None:
        raise ValueError(
            f"{type(inner).__name__} has an unknown head, so its loss cannot be computed from this "
            "rank's tokens. Supported are causal and masked language models, token and sequence "
            "classification, question answering, and models without a head."
        )
    _check_dropout(inner)
    _check_forward(inner)
    check_loss_name()
    check_loss(inner)
    names = implementations(inner)
    ours = {key: _our_name(name) for key, name in names.items()}
    changes: list[Removable] = []
    with ExitStack() as undo:
        undo.callback(_implement, inner, names)
        _implement(inner, ours)
        for change in _change_modules(inner, known):
            undo.callback(change.remove)
            changes.append(change)
        only_attends = known is not None and not known.mixers and positions.counts_by_index(inner)
        media = None if known is None else known.media
        enabled = Enabled(
            kind,
            _base_of(inner),
            chunked_loss,
            undo.enter_context(replace_method(inner, "forward", forward.forward)),
            changes,
            only_attends and media is None,
            media,
            "" if media is None else find_decoder(inner, media),
        )
        add_saving(model)
        undo.pop_all()
    inner.__dict__[forward.MARK] = enabled
    _log(inner, known, kind)
    return EnabledModel(inner, model)


def _change_modules(model: PreTrainedModel, known: Architecture | None) -> Iterator[Removable]:
    """Change the submodules of a model; yield what is put back in the end."""
    if known is not None and known.media is not None:
        yield from _add_seam(model, known.media)
    else:
        yield from positions.add_hooks(model)
    base = model.get_submodule(_base_of(model))  # PEFT calls model.forward(), without hooks
    for module in dict.fromkeys((model, base)):
        yield module.register_forward_pre_hook(functools.partial(forward.check_in_force, model))
    for module in model.modules():
        if "config" in vars(module):
            yield Patch(module, ENABLED, True)
        pooler = getattr(module, "pooler", None)
        if isinstance(module, PreTrainedModel) and isinstance(pooler, nn.Module):
            yield pooler.register_forward_pre_hook(unshard_for_pooler)
    if known is not None:
        for name in known.mixers.split():
            yield from INSTALLERS[name](model)


def _add_seam(model: PreTrainedModel, media: Media) -> Iterator[Removable]:
    """Let a model with media run on full sequences up to its decoder, or the decoder's layers."""
    decoder = model.get_submodule(find_decoder(model, media))
    if media.seam == "decoder":
        yield from positions.add_hooks(decoder)  # type: ignore[arg-type]
        yield from seam.add_hooks([decoder], media.dims, are_layers=False)
    else:
        layers = list(decoder.get_submodule("layers").children())
        yield from seam.add_hooks(layers, media.dims, are_layers=True)
    methods = {
        "get_rope_index": seam.packed_positions,
        "compute_3d_position_ids": seam.full_positions,
    }
    for name in sharing.METHODS if media.unit else ():
        methods[name] = functools.partial(sharing.shared_features, name, media.unit)
    for module in model.modules():
        for name, function in methods.items():
            if hasattr(type(module), name):
                yield replace_method(module, name, function)
        if type(module).__name__ in media.cross:
            yield seam.AttendsToMedia(module)
    outer = model.get_submodule(_base_of(model)) if media.seam == "decoder" else decoder
    if outer is not model and (outer is not decoder or media.seam == "layers"):
        yield outer.register_forward_pre_hook(seam.refuse_direct_call)


def _our_name(name: str) -> str:
    if is_ours(name):
        return name  # the config is shared with a model that is enabled
    if name not in NAMES:
        raise ValueError(
            f"The model's attention is '{name}', which is not supported: it could not be restored "
            f"outside of steps. Choose one of {', '.join(NAMES)}: "
            "model.set_attn_implementation('sdpa')."
        )
    return NAMES[name]


def is_enabled(model: nn.Module) -> bool:
    """Return whether a model is enabled."""
    return forward.MARK in inner_model(model).__dict__


def _base_of(model: PreTrainedModel) -> str:
    """Return the path of the submodule that computes hidden states; empty for the model itself."""
    if model.base_model is model:
        return ""
    prefix = str(model.base_model_prefix)
    inside = isinstance(getattr(model.base_model, "decoder", None), PreTrainedModel)
    return f"{prefix}.decoder" if inside else prefix


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the model inside of a compiled or a PEFT model."""
    model = uncompiled(model)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        for name, config in model.peft_config.items():  # type: ignore[union-attr, operator]
            if config.is_prompt_learning:
                raise ValueError(
                    f"The PEFT adapter '{name}' is {type(config).__name__}, which prepends tokens "
                    "to each sequence: every rank would prepend them to its shard. Use an adapter "
                    "that changes weights, such as LoRA."
                )
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"enable() takes a model from transformers, or a PEFT model around one; it got a "
            f"{type(model).__name__}. For a LightningModule call enable(module.model). Your own "
            "model needs no enable(): its SDPA calls are routed inside a step."
        )
    return model


def _check_known(model: PreTrainedModel, *, allow_unknown: bool) -> Architecture | None:
    """Raise for a model that mixes tokens outside of registered attention, or may do so."""
    kind, known = model.config.model_type, architecture_of(model)
    if model.config.is_encoder_decoder and not getattr(model.config, "is_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model: two sequences of different "
            "lengths and cross-attention between them are not supported yet."
        )
    if known is not None and not known.is_served:
        raise ValueError(
            f"{type(model).__name__} (model type '{kind}') cannot run under context parallelism: "
            f"{known.refusal}."
        )
    custom = _custom_modules(model)
    if known is not None and custom and not allow_unknown:
        raise ValueError(
            f"{type(model).__name__} has model type '{kind}', but {custom[0]} is not from "
            f"transformers, so the type's entry in the table may not hold. {_TRIAL}"
        )
    if known is not None or allow_unknown:
        return known
    raise ValueError(
        f"{type(model).__name__} (model type '{kind}') is not among the architectures that are "
        f"known to be exact. {_TRIAL}"
    )


_TRIAL: Final = (
    "To try it: hf_patches.verify(model, batch, cp=cp, allow_unknown=True), or `torchrun "
    "--nproc-per-node 2 -m lightning_cp verify --model PATH --allow-unknown`; if that passes, "
    "enable(model, allow_unknown=True): with a trainer, before context_parallel(trainer, size=...)."
)


def _with_decoder(
    model: PreTrainedModel, known: Architecture, *, allow_unknown: bool
) -> Architecture:
    """Return the entry of a model with media, with the mixers of its text decoder.

    Many types take any text decoder: those of types with an entry of their own, and the one that
    the type was compared with.
    """
    decoder: Any = model.get_submodule(find_decoder(model, known.media or Media()))
    kind = decoder.config.model_type
    text = ARCHITECTURES.get(kind)
    if text is None and _belongs_to(kind, model):
        return known
    if text is None and allow_unknown:
        return known
    if text is None or not text.is_served:
        reason = (
            "is not among the architectures known to be exact" if text is None else text.refusal
        )
        raise ValueError(
            f"{type(model).__name__} has a text decoder of type '{kind}', which cannot run under "
            f"context parallelism: {reason}."
        )
    return replace(known, mixers=known.mixers or text.mixers)


def _belongs_to(kind: str, model: PreTrainedModel) -> bool:
    """Return whether a text decoder is the one that a type of model is built with."""
    name = str(model.config.model_type).removesuffix("_thinker").replace("-", "_")
    default = type(model.config)().get_text_config()
    return kind.startswith(name) or kind == default.model_type


def _custom_modules(model: PreTrainedModel) -> list[str]:
    """Return the modules of a model whose class comes from none of the known libraries."""
    custom = []
    for name, module in model.named_modules():
        library = type(module).__module__.partition(".")[0]
        if library not in LIBRARIES:
            custom.append(f"{name or 'the model itself'} ({type(module).__name__})")
    return custom


def _check_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    parts = (config, getattr(config, "attn_config", None))  # MPT has a part for attention
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
    for name, part in itertools.product(names, parts):
        value = getattr(part, name, 0.0)
        if isinstance(value, float) and value > 0:
            raise ValueError(
                f"config.{name} = {value}: attention dropout is not exact when a sequence is "
                f"sharded. Load the model with {name}=0.0; dropout on activations is supported."
            )


_WRAPPERS: Final = {*LIBRARIES, "accelerate", "trl"}


def _check_forward(model: PreTrainedModel) -> None:
    """Raise if the forward of a model is a user's: its changes would be lost in a step."""
    pending: list[Any] = [vars(model).get("forward")]
    seen: list[Any] = [None, type(model).forward]
    while pending:
        call = pending.pop()
        if any(call is other for other in seen):  # functions may call themselves
            continue
        seen.append(call)
        method = getattr(call, "method", call)  # bound again, by accelerate
        if isinstance(method, Method):
            pending += method.patch.previous
        elif isinstance(call, functools.partial | MethodType):
            pending.append(call.func if isinstance(call, functools.partial) else call.__func__)
            pending.append(vars(call).get("__wrapped__"))
        else:
            scope = getattr(call, "__globals__", {"__name__": type(call).__module__})
            if scope["__name__"].partition(".")[0] not in _WRAPPERS:
                raise ValueError(
                    f"{type(model).__name__}.forward was replaced before enable(), by "
                    f"{getattr(call, '__qualname__', type(call).__name__)} of {scope['__name__']}: "
                    "inside a step the loss is computed around the model's own forward, and what "
                    "the other one changes would be lost. Replace it after enable(model), which "
                    "is then below it, or change `loss` or `logits` of the output in your step."
                )
            pending += [x for x in _closure(call) if isinstance(x, FunctionType | MethodType)]
            pending.append(getattr(call, "__wrapped__", None))


def _closure(call: Any) -> Iterator[Any]:
    """Yield the variables that a function has from around it, but for those that have no value."""
    for cell in getattr(call, "__closure__", None) or ():
        with suppress(ValueError):
            yield cell.cell_contents


def _implement(model: PreTrainedModel, names: dict[str, str]) -> None:
    known = architecture_of(model)
    if known is not None and known.mixers and not takes_attention(model):
        # Attention that is written out: the name says how masks are built, and nothing else.
        for key, name in names.items():
            config = getattr(model.config, key) if key else model.config
            set_attention_name(config, name)
        return
    model.set_attn_implementation(names)
    key = text_key(model)  # the outer model may have no attention
    if is_ours(names[key]) and implementations(model)[key] != names[key]:
        raise ValueError(
            f"{type(model).__name__} does not take its attention from AttentionInterface, and "
            "cannot run under context parallelism."
        )


def _log(model: PreTrainedModel, known: Architecture | None, kind: str) -> None:
    features = known.features if known is not None and known.features else "full attention"
    _logger.info(
        "enabled %s: features=%s, mixers=%s, labels=%s, attention_outside_of_steps=%s",
        type(model).__name__,
        features,
        known.mixers if known is not None and known.mixers else "attention",
        kind,
        STOCK[str(attention_name(model.config.get_text_config()))],
    )
