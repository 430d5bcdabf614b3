# SPDX-License-Identifier: Apache-2.0
"""`verify(model, batch, cp=cp)`: context parallelism compared with the stock model.

One batch, the loss and the gradient of every parameter. Knows how to run a Hugging Face model as
the stock model, and in float64; `lightning_cp.compare.verify` compares.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_patches.enable import enable, is_enabled
from hf_patches.interface.names import STOCK
from hf_patches.model.guard import REGISTERED
from hf_patches.private import attention_name
from hf_patches.shard_in_forward import takes_full_sequences
from lightning_cp.compare.verify import (
    TOLERANCES,
    Gradients,
    Report,
    compare,
    gradients,
    require_passed,
)
from lightning_cp.parallel import ContextParallel
from lightning_cp.step.step import IGNORED_LABEL

# With these dtypes a float64 copy shows how much of a difference is rounding.
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
    check: bool = True,
) -> Report:
    """Compare loss and every gradient with those of the stock model. Collective.

    Dropout is off; a model that is not enabled is enabled for the comparison. The stock model runs
    on full sequences on every rank, with each packed document as a sample of its own.

    If the parameters are not sharded, the tolerance is measured: the stock model also runs in
    float64, and the error of context parallelism may be twice that of the stock model in its own
    precision. Otherwise it is fixed per dtype (`lightning_cp.compare.verify.TOLERANCES`).

    Args:
        model: from transformers, or a PEFT model around one; may be sharded by FSDP2. One that
            `shard_in_forward` has changed shards the batch by itself, as it does in a loop.
        batch: a full batch with labels, as for ``cp.step``; all data ranks use that of the first.
        cp: the ranks and their options.
        max_len: truncate sequences to this length, so that one rank can hold them; None for full
            sequences.
        tolerance: largest relative error of a gradient, in place of the measured one. Give one for
            FSDP2's mixed precision, which parameters do not show.
        oracle: whether to run in float64, which takes a copy of the model on every rank.
        allow_unknown: also accept an architecture that is not in the table.
        check: raise on all ranks if results differ. Otherwise look at ``report.passed``.

    Returns:
        The report; ``print(report)`` for a table.

    Raises:
        RuntimeError: if results differ; it names the worst parameters.

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
    parameter = next(model.parameters())
    measured = oracle and tolerance is None and _has_float64(model)
    if parameter.dtype == torch.float64 and tolerance is None:
        # Stock models compute norms, softmax and losses in float32 at best.
        tolerance = TOLERANCES[torch.float32]
    try:
        with _masks_of_float32():
            report = compare(
                model,
                _without_blind_labels(batch),
                cp=cp,
                loss_fn=partial(_loss, model),
                max_len=max_len,
                tolerance=tolerance,
                stock=True,
                exact=partial(_exact, model, cp) if measured else None,
                hint=_hint(model),
                takes_full=takes_full_sequences(model),
            )
    finally:
        if not was_enabled:
            handle.remove()
    if check:
        require_passed([report], "this model", cp.groups.context, cp.groups.data)
    return report


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss = getattr(model(**batch), "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{type(model).__name__} returned no loss, so there are no gradients to compare. "
            f"Give a model with a head, and its labels: the batch holds {', '.join(batch)}."
        )
    return loss


def _has_float64(model: nn.Module) -> bool:
    """Return whether a float64 copy is possible: unsharded parameters of a lower precision."""
    # Sharded and quantized parameters have other types.
    return all(type(p) is nn.Parameter and p.dtype in _ROUNDED for p in model.parameters())


def _without_blind_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Ignore the label of the first token after padding: the token before it sees no key.

    For such a query some stock attention functions return zeros, others the mean of all values.
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

    A mixture of experts routes a token differently if two experts have the same score within
    rounding. If the stock run does so, its gradients are far from these, and those of context
    parallelism may be as well. If only ours does, the comparison fails without a bug; hence
    `_hint`.
    """
    wide_model = copy.deepcopy(model).double()
    handle = enable(wide_model)
    inner = handle.model
    inner.set_experts_implementation("eager")  # others do not support float64
    if STOCK[str(attention_name(inner.config.get_text_config()))] not in ("eager", "sdpa"):
        handle.remove()
        inner.set_attn_implementation("eager")
    wide_batch = {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in batch.items()
    }
    device = next(wide_model.parameters()).device.type
    with torch.autocast(device, enabled=False):
        reference = cp.reference(wide_batch, training=True, stock=True)
        return gradients(wide_model, partial(_loss, wide_model), reference)


@contextmanager
def _masks_of_float32() -> Iterator[None]:
    """Let "eager" mask with the lowest number of float32, also in a float64 model.

    Its softmax is in float32, where the lowest number of float64 is -inf: a query that sees no key
    would yield NaN.
    """
    override = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    is_local = override is not REGISTERED["eager"]

    def build(*args: Any, **options: Any) -> Any:
        stock = override if is_local else REGISTERED["eager"]  # guarded while a step is open
        if options.get("dtype") is not torch.float64:
            return stock(*args, **options)
        mask = stock(*args, **{**options, "dtype": torch.float32})
        # An indexer fills in the lowest number of its own dtype, which float32 could not hold.
        return mask.double() if isinstance(mask, Tensor) else mask

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
        "In low precision a router may choose another expert where two have nearly the same score: "
        "compare a mixture of experts in float32."
    )
