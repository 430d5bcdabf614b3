# SPDX-License-Identifier: Apache-2.0
"""`verify(model, batch, cp=cp)`: context parallelism against the model as it is without us.

One batch, the loss and the gradient of every parameter. Knows what a Hugging Face model needs to
run as it would without us, and in float64; `lightning_cp.verification` compares.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_patches.enable import enable, is_enabled
from hf_patches.names import STOCK
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import IGNORED_LABEL
from lightning_cp.verification import TOLERANCES, Gradients, Report, compare, gradients

# In these a float64 copy tells how much of a difference is rounding.
_ROUNDED: Final = {torch.float32, torch.float16, torch.bfloat16}


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    max_len: int | None = None,
    tolerance: float | None = None,
    oracle: bool = True,
    allow_unknown: bool = False,
) -> Report:
    """Compare loss and every gradient with those of the model as it is without us.

    Every rank must call it. Dropout is off, gradients are set to None; a model that is not enabled
    is so for the time being. The stock model gets whole rows, and each packed document as a row of
    its own, on every rank.

    Where the parameters are whole, what is allowed is earned: the stock model runs in float64 too,
    and context parallelism may be twice as far from that as the stock model is in its own
    precision. Otherwise it is fixed, by the precision (`lightning_cp.verification.TOLERANCES`).

    Args:
        model: from transformers, or PEFT's around one; plain, or sharded by FSDP2.
        batch: a whole batch with labels, as for ``cp.step``; all data ranks take that of the first.
        cp: how rows are shared.
        max_len: rows are cut to this length, so that one rank can hold them; uncut when None.
        tolerance: largest relative error of a gradient, instead of the earned one. Give one for
            FSDP2's mixed precision, which parameters do not tell.
        oracle: whether to run in float64. It takes a copy of the model on every rank.
        allow_unknown: also take an architecture that is not in the table.

    Returns:
        What was found: ``report.passed``, and ``print(report)`` for a table.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model, ids = LlamaForCausalLM(config), torch.arange(12).view(2, 6) % 8
        >>> batch = {"input_ids": ids, "labels": ids}
        >>> verify(model, batch, cp=ContextParallel(None)).passed
        True
    """
    was_enabled = is_enabled(model)
    handle = enable(model, allow_unknown=allow_unknown)
    some = next(model.parameters())
    earns = oracle and tolerance is None and _has_float64(model)
    if some.dtype == torch.float64 and tolerance is None:
        # Stock models compute norms, softmax and losses in float32 at best.
        tolerance = TOLERANCES[torch.float32]
    devices = [some.device] if some.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), _masks_of_float32():
            report = compare(
                model,
                _without_blind_labels(batch),
                cp=cp,
                loss_fn=partial(_loss, model),
                max_len=max_len,
                tolerance=tolerance,
                stock=True,
                exact=partial(_exact, model, cp) if earns else None,
                hint=_hint(model),
            )
    finally:
        if not was_enabled:
            handle.undo()
    if report.loss == 0 and math.isnan(report.whole_loss):
        raise ValueError(
            "No token of this batch is scored, so there is nothing to compare: each label is -100, "
            "or stands first in its document. Give longer rows, or others."
        )
    return report


def _loss(model: nn.Module, given: dict[str, Any]) -> Tensor:
    loss = getattr(model(**given), "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{type(model).__name__} returned no loss, and so there are no gradients to compare. "
            f"Give a model with a head, and its labels: the batch holds {', '.join(given)}."
        )
    return loss


def _has_float64(model: nn.Module) -> bool:
    """Say whether a copy in float64 is the same model: whole tensors, of a lower precision."""
    # Sharded and quantized parameters are of types of their own.
    return all(type(p) is nn.Parameter and p.dtype in _ROUNDED for p in model.parameters())


def _without_blind_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the first token after padding: what stands before it sees nothing.

    Some stock attentions then return zeros, others the mean of everything.
    """
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if not isinstance(labels, Tensor) or not isinstance(mask, Tensor):
        return dict(batch)
    if mask.dim() != 2 or labels.shape != mask.shape:
        return dict(batch)
    labels = labels.clone()
    labels[:, 1:][(mask[:, :-1] == 0) & (mask[:, 1:] == 1)] = IGNORED_LABEL
    return {**batch, "labels": labels}


def _exact(model: nn.Module, cp: ContextParallel, batch: dict[str, Any]) -> Gradients:
    """Run a float64 copy of the stock model.

    A mixture of experts sends a token elsewhere if two experts score alike within the rounding.
    Where the stock run does so, its gradients are far from these, and so may those of context
    parallelism be. Where only ours does, they fail without a fault; hence `_hint`.
    """
    twin = copy.deepcopy(model).double()
    handle = enable(twin)
    inner = handle.model
    inner.set_experts_implementation("eager")  # the others have no float64
    if STOCK[inner.config.get_text_config()._attn_implementation] not in ("eager", "sdpa"):
        handle.undo()
        inner.set_attn_implementation("eager")
    wide = {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in batch.items()
    }
    device = next(twin.parameters()).device.type
    with torch.autocast(device, enabled=False):
        return gradients(twin, partial(_loss, twin), cp.alone(wide, training=True, stock=True))


@contextmanager
def _masks_of_float32() -> Iterator[None]:
    """Let "eager" hide tokens by the lowest number of float32, also in a float64 model.

    Its softmax is in float32, where that of float64 is infinite: a token that sees nothing would
    turn into NaN.
    """
    registered, override = AttentionMaskInterface(), ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    is_local = override is not registered["eager"]

    def build(*args: Any, **options: Any) -> Any:
        stock = override if is_local else registered["eager"]  # guarded while a step is open
        if options.get("dtype") is torch.float64:
            options["dtype"] = torch.float32
        return stock(*args, **options)

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = build
    try:
        yield
    finally:
        if is_local:
            ALL_MASK_ATTENTION_FUNCTIONS["eager"] = override
        else:
            del ALL_MASK_ATTENTION_FUNCTIONS["eager"]  # type: ignore[no-untyped-call]


def _hint(model: nn.Module) -> str:
    parameters = dict(model.named_parameters())
    low = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters.values())
    if not (low or torch.is_autocast_enabled(next(iter(parameters.values())).device.type)):
        return ""
    if not any("expert" in name for name in parameters):
        return ""
    return (
        "In low precision a router may send a token to another expert where two score alike: "
        "compare a mixture of experts in float32."
    )
