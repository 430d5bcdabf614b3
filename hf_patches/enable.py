# SPDX-License-Identifier: Apache-2.0
"""`enable(model)`: the one verb. A Hugging Face model then runs inside steps, by its own masks.

Attention and masks go through transformers' registries, positions through hooks, the loss through
the model's forward. All of it acts inside a step only, and `undo()` takes it away.
"""

import functools
import logging
from dataclasses import dataclass
from typing import get_args

from torch import nn
from transformers import PreTrainedModel

import hf_patches.attention  # noqa: F401  registers our names
from hf_patches import heads, positions
from hf_patches.detect import find_mixing
from hf_patches.doors import NAMES, STOCK, is_ours
from hf_patches.heads import ChunkedLoss, Enabled, whole_rows
from hf_patches.support import Architecture, architecture_of, head_of
from lightning_cp.choices import check_choice

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handle:
    """A model that runs inside steps, until `undo()`.

    Args:
        model: the model itself, without what PEFT has put around it.
    """

    model: PreTrainedModel

    def undo(self) -> None:
        """Put everything back as it was."""
        enabled: Enabled | None = self.model.__dict__.pop(heads.MARK, None)
        if enabled is None:
            return
        for hook in enabled.hooks:
            hook.remove()
        del self.model.forward
        if enabled.forward is not None:
            self.model.forward = enabled.forward
        names = _implementations(self.model)
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
            take more than 256 MiB.
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
    before = _implementations(inner)
    _implement(inner, {key: NAMES.get(name, NAMES["sdpa"]) for key, name in before.items()})
    hooks = list(positions.add_hooks(inner))
    for module in inner.modules():
        pooler = getattr(module, "pooler", None)
        if isinstance(module, PreTrainedModel) and isinstance(pooler, nn.Module):
            hooks.append(pooler.register_forward_pre_hook(whole_rows))
    own = inner.__dict__.get("forward")
    inner.__dict__[heads.MARK] = Enabled(kind, _base_of(inner), chunked_loss, own, hooks)
    inner.forward = functools.partial(heads.forward, inner)
    _say(inner, known, kind)
    return Handle(inner)


def is_enabled(model: nn.Module) -> bool:
    """Say whether a model is enabled already."""
    return heads.MARK in _unwrap(model).__dict__


def _base_of(model: PreTrainedModel) -> str:
    """Return the path of the part that computes hidden states; empty if it is the model itself."""
    if model.base_model is model:
        return ""
    prefix = str(model.base_model_prefix)
    inside = isinstance(getattr(model.base_model, "decoder", None), PreTrainedModel)
    return f"{prefix}.decoder" if inside else prefix


def _unwrap(model: nn.Module) -> PreTrainedModel:
    """Return the model that PEFT has wrapped, or the model itself."""
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
    if known is not None or allow_unknown:
        return known
    raise ValueError(
        f"{type(model).__name__} (model type '{kind}') is not among the architectures that are "
        f"known to be exact.{_where(model)} To try it: hf_patches.verify(model, batch, cp=cp, "
        "allow_unknown=True), or `torchrun --nproc-per-node 2 -m hf_patches verify --model PATH "
        "--allow-unknown`; if that passes, enable(model, allow_unknown=True)."
    )


def _where(model: PreTrainedModel) -> str:
    """Say which modules mix tokens outside of attention, if a trial run can tell."""
    if any(p.is_meta for p in model.parameters()) or not model._can_set_attn_implementation():
        return ""
    try:
        found = find_mixing(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        return ""  # it is being refused anyway; this only says more
    if not found:
        return " A trial run found no module that mixes tokens outside of attention."
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f" A trial run saw tokens meet outside of attention in {found[0]}{more}."


def _check_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout"):
        value = getattr(config, name, 0.0)
        if isinstance(value, float) and value > 0:
            raise ValueError(
                f"config.{name} = {value}: attention dropout is not exact when a row is shared by "
                f"several ranks. Load the model with {name}=0.0; dropout on activations is fine."
            )


def _text_key(model: PreTrainedModel) -> str:
    """Return under which name the config holds that of the text; empty if it is the same."""
    text = model.config.get_text_config()
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text:
            return str(key)
    return ""


def _implementations(model: PreTrainedModel) -> dict[str, str]:
    """Return what the parts of a model that read text use for attention."""
    key = _text_key(model)
    names = {"": str(model.config._attn_implementation)}
    if key:
        names[key] = str(getattr(model.config, key)._attn_implementation)
    return names


def _implement(model: PreTrainedModel, names: dict[str, str]) -> None:
    model.set_attn_implementation(names)
    key = _text_key(model)  # the part around it may be without attention of its own
    if is_ours(names[key]) and _implementations(model)[key] != names[key]:
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
