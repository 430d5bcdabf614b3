# SPDX-License-Identifier: Apache-2.0
"""The entry point of the group `lightning_cp.adapters`, by which the strategy finds us."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_patches.enable import enable, is_enabled
from hf_patches.model.guard import guarded
from hf_patches.weights.auto import auto_class
from hf_patches.weights.model_shape import model_shape
from hf_patches.weights.tensor_parallel import check_loaded, parallelize
from lightning_cp.adapters import AdapterHandle
from lightning_cp.memory.activation_checkpointing import switched_layers
from lightning_cp.private.compiler import uncompiled


class NoOpHandle:
    """The handle of a model that the user has enabled; teardown leaves it enabled."""

    def remove(self) -> None:
        """Leave the model enabled."""


class HuggingFaceAdapter:
    """Enables the Hugging Face models inside a LightningModule."""

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module is a transformers model, or a PEFT model around one."""
        module = uncompiled(module)
        peft = hasattr(module, "peft_config") and hasattr(module, "get_base_model")
        return peft or isinstance(module, PreTrainedModel)

    def enable(self, module: nn.Module) -> AdapterHandle:
        """Enable a model, unless the user has done so."""
        was_enabled = is_enabled(module)
        handle = enable(module)  # a PEFT model that came after is saved whole, too
        return NoOpHandle() if was_enabled else handle

    def guard(self) -> AbstractContextManager[None]:
        """Refuse models that are not enabled, inside a ``with`` block."""
        return guarded()

    def output_dims(self, output: object) -> Mapping[str, int]:
        """Return the sequence dims of a model's output, by key."""
        if not isinstance(output, ModelOutput):
            return {}
        logits = output.get("logits")
        scores_tokens = isinstance(logits, Tensor) and logits.dim() > 2  # else it scores sequences
        states = {"last_hidden_state": 1, "hidden_states": 1}
        return {**states, "logits": 1} if scores_tokens else states

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Apply tensor parallelism, by the plan of a model."""
        parallelize(module, mesh)

    def check_loaded(self, module: nn.Module, num_tensor_ranks: int, *, reduces_once: bool) -> None:
        """Raise for a model that transformers has distributed in a way that is not exact."""
        check_loaded(module, num_tensor_ranks, reduces_once=reduces_once)

    def describe(self, module: nn.Module) -> dict[str, Any]:
        """Return the configs of PEFT adapters, which `export` needs besides their weights."""
        if not hasattr(module, "get_base_model"):
            return {}
        configs: Mapping[str, Any] = module.peft_config  # type: ignore[assignment]
        return {"peft_config": {name: _as_json(config) for name, config in configs.items()}}

    def plan(self, module: nn.Module) -> dict[str, Any]:
        """Return what a plan needs to know of a model; nothing for models that it cannot count.

        Returns:
            ``shape``, ``lora_rank`` (0 if all weights are trained), ``is_checkpointed``,
            ``num_checkpointed`` layers, and ``is_known``: whether these weights are trained, and no
            others.
        """
        peft = module if hasattr(module, "get_base_model") else None
        model: Any = module.get_base_model() if peft is not None else module  # type: ignore[operator]
        if auto_class(model.config) is not AutoModelForCausalLM:
            return {}  # what towers compute would be missing
        if getattr(getattr(model.config, "distributed_config", None), "ep_size", 1) > 1:
            return {}  # the planner knows no experts that stay on their ranks
        try:
            shape = model_shape(model.config)
        except ValueError:
            return {}
        ranks = [] if peft is None else [getattr(c, "r", 0) for c in peft.peft_config.values()]  # type: ignore[operator]
        return {
            "shape": shape,
            "lora_rank": max(ranks, default=0),
            "is_checkpointed": bool(getattr(model, "is_gradient_checkpointing", False)),
            "num_checkpointed": sum(
                bool(getattr(layer, "gradient_checkpointing", False))
                for layer in switched_layers(module)
            ),
            "is_known": bool(ranks) or all(p.requires_grad for p in module.parameters()),
        }


def _as_json(config: Any) -> Any:
    """Return a config as its JSON file would hold it."""

    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, set | frozenset) else str(value)

    return json.loads(json.dumps(config.to_dict(), default=plain))


adapter = HuggingFaceAdapter()
"""The object that the entry point names."""
