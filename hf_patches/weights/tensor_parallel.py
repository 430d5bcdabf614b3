# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism by the plans of transformers: ranks share the weights and heads of each layer.

Attention needs no change: it sees the heads that a rank holds, and each tensor index has a context
group of its own. Plans are applied to models whose weights are loaded and equal on all ranks.
"""

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_patches.private import plan_by_module


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


EXACT: Final = _words(
    "afmoe arcee aria_text axk1 axk2 bailing_hybrid bamba beam cohere cohere2 cohere2_moe "
    "cohere_compass_text cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama dots1 emu3 "
    "ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3 "
    "gemma3_text gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe "
    "glm4_moe_lite glm_moe_dsa got_ocr2 gpt_neox gpt_oss granite granitemoe "
    "granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe "
    "hy_v3 hyperclovax jais2 jamba kimi_linear kolibri1 laguna lfm2_moe llama longcat_flash "
    "mellum minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral "
    "mixtral moss_transcribe_diarize nanochat nemotron nemotron_h olmo olmo2 olmo3 "
    "olmo_hybrid olmoe phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5 "
    "qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp "
    "qwen4_exp_text seed_oss smollm3 solar_open starcoder2 vaultgemma youtu"
)
"""The model types whose plans were compared with one process (`tests.parity`): others are refused.

The plans of some are silently wrong: learned activations of shared features (apertus), layers that
read the outputs of others (gemma3n_text)."""

EXPERTS: Final = _words(
    "afmoe aria_text axk1 axk2 beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 "
    "deepseek_v4 dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite "
    "glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared "
    "hunyuan_v1_moe hy_v3 jamba kolibri1 laguna lfm2_moe mellum minimax minimax_m2 "
    "minimax_m3_vl_text mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe "
    "qwen3_5_moe_text qwen3_moe qwen3_next solar_open zaya"
)
"""The same for plans that send tokens to the ranks of their experts (``ep_size``)."""

PARTIAL: Final = "replicated_with_grad_allreduce"
"""The style of weights that each rank has in full, but applies to its heads only."""


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the weights of a model over ranks, by its own plan.

    Args:
        model: a transformers model whose weights are the same on all ranks.
        mesh: the ranks, one axis.
    """
    if not isinstance(model, PreTrainedModel):
        raise _has_adapters(model, mesh.size())
    plan = _checked_plan(model, mesh.size())
    tied = _tied_names(model)
    partial_weights = [name for name, style in plan.items() if style == PARTIAL]
    styles = {name: style for name, style in plan.items() if style != PARTIAL}
    _apply(model, mesh, styles)
    _check_parts(model, mesh.size())
    model.tie_weights()
    if _tied_names(model) != tied:
        raise RuntimeError(
            f"{type(model).__name__} has tied weights which its plan divides in different ways. "
            "Set config.tie_word_embeddings=False, or leave tensor_parallel_size out."
        )
    for name, module in model.named_modules():
        if _generic(name) in partial_weights:
            module.register_forward_pre_hook(partial(_reduce_gradients, mesh.get_group()))


def _has_adapters(model: nn.Module, size: int) -> ValueError:
    return ValueError(
        f"tensor_parallel_size={size}: {type(model).__name__} has adapters, which the plans of "
        "transformers do not divide. Train all weights, or use more context ranks: "
        "context_parallel_size."
    )


def _checked_plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the plan of a model, or raise if it cannot be applied."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    name = type(model).__name__
    if not plan:
        raise ValueError(
            f"tensor_parallel_size={size}: transformers has no tensor parallel plan for {name}. "
            "Leave it out, and use more context ranks: context_parallel_size."
        )
    _check_type(model, EXACT, f"tensor_parallel_size={size}")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            f"tensor_parallel_size={size}: {name} has quantized weights. Load it without a "
            "quantization config, or use more context ranks: context_parallel_size."
        )
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        counts = heads if isinstance(heads, list) else [heads] if isinstance(heads, int) else []
        if any(count % size for count in counts):
            raise ValueError(
                f"tensor_parallel_size={size} does not divide {key}={heads} of {name}. Use a "
                "divisor of it, and more context ranks: context_parallel_size."
            )
    return plan


def _check_type(model: PreTrainedModel, exact: frozenset[str], option: str) -> None:
    config = model.config
    types = {config.model_type, config.get_text_config().model_type}
    types |= {name.removesuffix("_text_model") for name in types}  # the decoder of emu3
    if not types & exact:
        raise ValueError(
            f"{option}: the plan of {type(model).__name__} (model type {config.model_type!r}) has "
            "not been found to be exact. Use more context ranks: context_parallel_size. "
            "docs/tensor-parallel.md lists the types."
        )


def check_loaded(model: nn.Module, num_tensor_ranks: int, *, reduces_once: bool) -> None:
    """Raise for a model that transformers has distributed in a way that is not exact here.

    Args:
        model: a model of transformers.
        num_tensor_ranks: ``tensor_parallel_size`` of the strategy.
        reduces_once: whether the gradients of accumulated batches are reduced once.
    """
    is_loaded = getattr(model, "is_distributed_loading_by_transformers", False)
    if not is_loaded:
        return
    if not isinstance(model, PreTrainedModel):  # PEFT's: what it is around comes, too
        if num_tensor_ranks > 1:
            raise _has_adapters(model, num_tensor_ranks)
        return
    name, sizes = type(model).__name__, model.config.distributed_config
    if sizes.tp_size != num_tensor_ranks or sizes.pp_size > 1:
        raise ValueError(
            f"{name} was loaded with DistributedConfig(tp_size={sizes.tp_size}, pp_size="
            f"{sizes.pp_size}), but the strategy has tensor_parallel_size={num_tensor_ranks}. Set "
            "tensor_parallel_size to tp_size, and leave pp_size out."
        )
    plans = {key: getattr(sizes, key) for key in ("tp_plan", "ep_plan")}
    if any(isinstance(plan, dict) and plan for plan in plans.values()):
        raise ValueError(
            f"{name} was loaded with a plan of yours, DistributedConfig(tp_plan="
            f"{plans['tp_plan']}, ep_plan={plans['ep_plan']}), which has not been compared with "
            "one process. Leave it out: the model's own plan was."
        )
    if sizes.fsdp_size > 1 and _tied_names(model):
        raise ValueError(
            f"{name} was loaded with DistributedConfig(fsdp_size={sizes.fsdp_size}) and has tied "
            "weights: from the second step on, its head would compute with old ones (transformers "
            "5.22). Load it without a distributed_config: the strategy shards it."
        )
    if sizes.tp_size > 1:
        _check_type(model, EXACT, f"DistributedConfig(tp_size={sizes.tp_size})")
    if sizes.ep_size > 1:
        _check_type(model, EXPERTS, f"DistributedConfig(ep_size={sizes.ep_size})")
    if sizes.tp_size > 1 and reduces_once and PARTIAL in model.tp_plan.values():
        raise ValueError(
            f"{name} was loaded with tp_size={sizes.tp_size}: transformers would sum the gradients "
            "of its norms of heads over tensor ranks once more for each accumulated batch. Set "
            "Parameters(reduce_every_microbatch=True), or let the strategy divide it: load it "
            "without a distributed_config."
        )


def _apply(model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise _too_old() from None
    if len(signature(apply_tensor_parallelism).parameters) < 3:  # it takes no plan
        raise _too_old()
    apply_tensor_parallelism(model, mesh, plan_by_module(model, plan))  # type: ignore[no-untyped-call]


def _too_old() -> ImportError:
    return ImportError(
        "tensor_parallel_size needs transformers 5.21 or newer, which divides models that are "
        "loaded. Upgrade it, or use more context ranks: context_parallel_size."
    )


def _check_parts(model: PreTrainedModel, size: int) -> None:
    """Raise on all ranks if one of them has no part of a weight, which FSDP2 cannot reduce."""
    for name, parameter in model.named_parameters():
        for placement in parameter.placements if isinstance(parameter, DTensor) else ():
            dim: int | None = getattr(placement, "dim", None)
            if dim is None:
                continue
            length = parameter.shape[dim]
            if -(-length // -(-length // size)) < size:
                raise ValueError(
                    f"tensor_parallel_size={size}: one of the ranks would have no part of "
                    f"`{name}`, whose {length} rows or columns are shared. Use fewer tensor ranks."
                )


def _tied_names(model: nn.Module) -> set[frozenset[str]]:
    """Return the sets of names that share a parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _generic(name: str) -> str:
    """Return a module name with ``*`` for numbers, as plans have it."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


_HOOK: Final = "_lightning_cp_tensor_hook"
"""Attribute of a parameter: the handle of its hook."""


def _reduce_gradients(group: dist.ProcessGroup, module: nn.Module, _: Any) -> None:
    """Sum the gradients of weights that each rank applies to its own heads.

    Before they are accumulated: transformers' own style sums what has been accumulated, and would
    count the gradients of earlier batches again. FSDP2 replaces parameters, so hooks are registered
    when a module is called.
    """
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad and _HOOK not in parameter.__dict__:
            hook = parameter.register_hook(partial(_summed, group))  # type: ignore[no-untyped-call]
            parameter.__dict__[_HOOK] = hook


def _summed(group: dist.ProcessGroup, gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
