# SPDX-License-Identifier: Apache-2.0
"""The load-balancing loss of a mixture of experts, over the tokens of all ranks.

It is a product of two means, the share of tokens routed to an expert and the mean probability that
the router gave it, summed over experts. A product of means is not a mean of products: both means
are taken over the tokens of all ranks first.
"""

import inspect
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_patches.interface.names import find_in_modules
from lightning_cp.data.shard import own_tokens
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.step.precision import accumulation_dtype
from lightning_cp.step.step import Step

# Parameters of the function of transformers that this module computes.
_KNOWN: Final = ("gate_logits", "num_experts", "top_k", "attention_mask")


def balance_loss(model: PreTrainedModel, output: Any, step: Step) -> tuple[Tensor, float] | None:
    """Return the auxiliary loss of all ranks and its weight, or None if the model has none.

    Args:
        model: the model that ran.
        output: of the model; its own auxiliary loss covers this rank's tokens only.
        step: the step in which it ran.
    """
    if output.get("aux_loss") is None:
        return None
    logits = output.get("router_logits")
    function = find_in_modules(type(model), "load_balancing_loss_func")
    known = function is not None and tuple(inspect.signature(function).parameters) == _KNOWN
    if not known or not isinstance(logits, tuple):
        raise ValueError(
            f"{type(model).__name__} computes an auxiliary loss that is not supported, from this "
            "rank's tokens only. Switch it off: output_router_logits=False."
        )
    if torch.is_grad_enabled() and model.training and not any(x.requires_grad for x in logits):
        raise ValueError(
            f"The auxiliary loss of {type(model).__name__} has no gradient: reentrant activation "
            "checkpointing detaches the router logits. Use gradient_checkpointing_enable("
            "{'use_reentrant': False})."
        )
    num_experts = logits[0].shape[-1]
    real = _real_tokens(step).reshape(-1).to(logits[0].device)
    counts = torch.zeros(num_experts, dtype=torch.float64, device=real.device)
    probabilities = torch.zeros_like(counts)
    for layer in logits:
        weights = torch.softmax(layer.reshape(-1, num_experts), -1)
        experts = torch.topk(weights, _top_k(model), -1).indices
        is_counted = real[:, None].expand_as(experts).reshape(-1).to(counts.dtype)
        counts = counts.scatter_add(0, experts.reshape(-1), is_counted)
        wide = weights.to(accumulation_dtype(weights.dtype))
        probabilities = probabilities + (wide * real[:, None]).sum(0)
    sums = torch.cat([counts, probabilities.detach(), real.sum().reshape(1) * len(logits)])
    num_ranks = 1
    for transport in step.loss_groups:
        transport.all_reduce(sums)
        num_ranks *= transport.size
    share, mean = (sums[:-1] / sums[-1].clamp(min=1)).view(2, num_experts)
    # As in `lightning_cp.loss`: every rank has the global value and num_ranks times the gradient
    # of its own tokens, which averaging over ranks undoes.
    local = (share * probabilities).sum() * (num_experts * num_ranks / sums[-1].clamp(min=1))
    value = (share * mean).sum() * num_experts
    return local + (value - local).detach(), _weight(model)


def _real_tokens(step: Step) -> Tensor:
    """Return bool [B, L]: which of this rank's tokens are not padding."""
    real = torch.ones(step.batch_size, step.layout.seq_len, dtype=torch.bool)
    if step.padding is not None:
        real &= ~torch.from_numpy(step.padding)
    if step.documents is not None:
        real &= torch.from_numpy(step.documents != NO_DOCUMENT)
    return own_tokens(real, step)


def _top_k(model: PreTrainedModel) -> int:
    owner: Any = model if hasattr(model, "num_experts_per_tok") else model.config.get_text_config()
    return int(owner.num_experts_per_tok)


def _weight(model: PreTrainedModel) -> float:
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        for owner in (model, model.config.get_text_config()):
            if hasattr(owner, name):
                return float(getattr(owner, name))
    raise ValueError(
        f"{type(model).__name__} has an auxiliary loss, but no weight for it: no attribute "
        "router_aux_loss_coef. Switch it off: output_router_logits=False."
    )
