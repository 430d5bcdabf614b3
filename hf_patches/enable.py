# SPDX-License-Identifier: Apache-2.0
"""`enable(model)`: the one verb. A Hugging Face model then runs inside steps, by its own masks.

Attention and masks go through transformers' registries, positions through hooks, the loss through
the model's forward. All of it acts inside a step only, and `undo()` takes it away.
"""

import functools
import inspect
import logging
from dataclasses import dataclass
from typing import Final, get_args

from torch import nn
from transformers import PreTrainedModel

import hf_patches.attention  # noqa: F401  registers our names
from hf_patches import forward, positions
from hf_patches.forward import ChunkedLoss, Enabled, whole_rows
from hf_patches.names import NAMES, STOCK, implementations, is_ours, text_key
from hf_patches.probe import find_mixing
from hf_patches.saving import add_saving, remove_saving
from hf_patches.support import Architecture, architecture_of, head_of
from lightning_cp.options import check_choice

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handle:
    """A model that runs inside steps, until `undo()`.

    Args:
        model: the model itself, without what PEFT has put around it.
        outer: what was enabled, with it.
    """

    model: PreTrainedModel
    outer: nn.Module | None = None

    def undo(self) -> None:
        """Put everything back as it was; a sharded model can still be saved."""
        remove_saving(self.outer or self.model)
        enabled: Enabled | None = self.model.__dict__.pop(forward.MARK, None)
        if enabled is None:
            return
        for hook in enabled.hooks:
            hook.remove()
        del self.model.forward
        if enabled.forward is not None:
            self.model.forward = enabled.forward
        names = implementations(self.model)
        _implement(self.model, {key: STOCK.get(name, name) for key, name in names.items()})


def enable(
    model: nn.Module,
    *,
    chunked_loss: ChunkedLoss = "auto",
    allow_unknown: bool = False,
) -> Handle:
    """Let a Hugging Face model run inside steps.

    Works on loaded models and on the meta device, plain or wrapped by PEFT. Outside of steps the
    model does what it did. A model that is enabled already stays as it is.

    Args:
        model: a model from transformers, or a PEFT model around one.
        chunked_loss: whether the loss is computed without holding the logits of all of this rank's
            tokens; ``output.logits`` is then None. ``auto`` does it in training, where they would
            take more than 1 GiB.
        allow_unknown: enable an architecture that is not in the table. Compare it with the stock
            model first: `hf_patches.verify`.

    Returns:
        A handle; its ``undo()`` puts everything back.

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
        >>> handle.undo()
        >>> model.config._attn_implementation
        'sdpa'
    """
    check_choice("chunked_loss", chunked_loss, get_args(ChunkedLoss))
    inner = _unwrap(model)
    if is_enabled(inner):
        return Handle(inner)
    known = _check_known(inner, allow_unknown=allow_unknown)
    kind = head_of(inner)
    if kind is None:
        raise ValueError(
            f"{type(inner).__name__} has a head that is not known here: how its loss is computed "
            "from this rank's tokens is not known either. Known are causal and masked language "
            "models, token and sequence classification, question answering, and models without a "
            "head."
        )
    _check_dropout(inner)
    _implement(inner, {key: _our_name(name) for key, name in implementations(inner).items()})
    hooks = list(positions.add_hooks(inner))
    for module in inner.modules():
        pooler = getattr(module, "pooler", None)
        if isinstance(module, PreTrainedModel) and isinstance(pooler, nn.Module):
            hooks.append(pooler.register_forward_pre_hook(whole_rows))
    own = inner.__dict__.get("forward")
    inner.__dict__[forward.MARK] = Enabled(kind, _base_of(inner), chunked_loss, own, hooks)
    bound = functools.partial(forward.forward, inner)
    # generate() and others look up what a model takes.
    bound.__signature__ = inspect.signature(type(inner).forward.__get__(inner))  # type: ignore[attr-defined]
    inner.forward = bound
    add_saving(model)
    _say(inner, known, kind)
    return Handle(inner, model)


def _our_name(name: str) -> str:
    if is_ours(name):
        return name  # the config is that of another model too, which is enabled
    if name not in NAMES:
        raise ValueError(
            f"The model's attention is '{name}', which is not known here and could not be kept "
            f"outside of steps. Choose one of {', '.join(NAMES)}: "
            "model.set_attn_implementation('sdpa')."
        )
    return NAMES[name]


def is_enabled(model: nn.Module) -> bool:
    """Say whether a model is enabled already."""
    return forward.MARK in _unwrap(model).__dict__


def _base_of(model: PreTrainedModel) -> str:
    """Return the path of the part that computes hidden states; empty if it is the model itself."""
    if model.base_model is model:
        return ""
    prefix = str(model.base_model_prefix)
    inside = isinstance(getattr(model.base_model, "decoder", None), PreTrainedModel)
    return f"{prefix}.decoder" if inside else prefix


def _unwrap(model: nn.Module) -> PreTrainedModel:
    """Return the model that PEFT or the compiler has wrapped, or the model itself."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        for name, config in model.peft_config.items():  # type: ignore[union-attr, operator]
            if config.is_prompt_learning:
                raise ValueError(
                    f"The PEFT adapter '{name}' is {type(config).__name__}, which adds tokens in "
                    "front of each row: they would be added on every rank. Use an adapter that "
                    "changes weights, such as LoRA."
                )
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"enable() takes a model from transformers, or a PEFT model around one; it got a "
            f"{type(model).__name__}. A LightningModule: enable(module.model). Your own model "
            "needs nothing: its SDPA calls are routed inside a step."
        )
    return model


def _check_known(model: PreTrainedModel, *, allow_unknown: bool) -> Architecture | None:
    """Refuse a model whose tokens meet where we do not reach."""
    kind, known = model.config.model_type, architecture_of(model)
    if model.config.is_encoder_decoder and not getattr(model.config, "is_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model: two sequences of different "
            "lengths, and cross-attention between them, which is not supported yet."
        )
    if known is not None and not known.is_served:
        raise ValueError(
            f"{type(model).__name__} (model type '{kind}') cannot run under context parallelism: "
            f"{known.refusal}.{_where(model)}"
        )
    own = _own_modules(model)
    if known is not None and own and not allow_unknown:
        where = _where(model)
        raise ValueError(
            f"{type(model).__name__} has model type '{kind}', but {own[0]} is not of transformers: "
            f"what is known of that type may not hold.{where} {_TRIAL}"
        )
    if known is not None or allow_unknown:
        return known
    raise ValueError(
        f"{type(model).__name__} (model type '{kind}') is not among the architectures that are "
        f"known to be exact.{_where(model)} {_TRIAL}"
    )


_TRIAL: Final = (
    "To try it: hf_patches.verify(model, batch, cp=cp, allow_unknown=True), or `torchrun "
    "--nproc-per-node 2 -m hf_patches verify --model PATH --allow-unknown`; if that passes, "
    "enable(model, allow_unknown=True)."
)


def _own_modules(model: PreTrainedModel) -> list[str]:
    """Return the modules of a model whose class is the user's, and may do anything."""
    found = []
    for name, module in model.named_modules():
        library = type(module).__module__.partition(".")[0]
        if library not in _LIBRARIES:
            found.append(f"{name or 'the model itself'} ({type(module).__name__})")
    return found


# Their modules do what their names say, token by token; kernels and quantized layers too.
_LIBRARIES: Final = {"torch", "transformers", "peft", "bitsandbytes", "torchao", "liger_kernel"}


def _where(model: PreTrainedModel) -> str:
    """Say which modules mix tokens outside of attention, if a trial run can tell."""
    if any(p.is_meta for p in model.parameters()) or not model._can_set_attn_implementation():
        return ""
    try:
        found = find_mixing(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        return ""  # it is being refused anyway; this only says more
    if not found:
        return " A trial run saw no module that mixes tokens outside of attention."
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    place = found[0] or "the model itself"
    return f" A trial run saw tokens meet outside of attention in {place}{more}."


def _check_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout"):
        value = getattr(config, name, 0.0)
        if isinstance(value, float) and value > 0:
            raise ValueError(
                f"config.{name} = {value}: attention dropout is not exact when a row is shared by "
                f"several ranks. Load the model with {name}=0.0; dropout on activations is fine."
            )


def _implement(model: PreTrainedModel, names: dict[str, str]) -> None:
    model.set_attn_implementation(names)
    key = text_key(model)  # the part around it may be without attention of its own
    if is_ours(names[key]) and implementations(model)[key] != names[key]:
        raise ValueError(
            f"{type(model).__name__} does not take its attention from AttentionInterface, and "
            "cannot run under context parallelism."
        )


def _say(model: PreTrainedModel, known: Architecture | None, kind: str) -> None:
    features = f" ({known.features})" if known is not None and known.features else ""
    _logger.info(
        "%s%s enabled for context parallelism: masks read from the model, loss by %s, attention "
        "outside of steps by %s",
        type(model).__name__,
        features,
        kind,
        STOCK[model.config.get_text_config()._attn_implementation],
    )
