# SPDX-License-Identifier: Apache-2.0
"""How the strategy finds us: the entry point of the group `lightning_cp.adapters`."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_patches.enable import enable, is_enabled
from hf_patches.guard import guarded
from lightning_cp.adapters import Handle


class Kept:
    """The user's own doing, which is not ours to undo."""

    def undo(self) -> None:
        """Leave the model enabled."""


class HuggingFaceAdapter:
    """Enables the Hugging Face models inside a LightningModule."""

    def matches(self, module: nn.Module) -> bool:
        """Say whether a module is a model of transformers, or PEFT's around one."""
        module = getattr(module, "_orig_mod", module)  # compiled
        peft = hasattr(module, "peft_config") and hasattr(module, "get_base_model")
        return peft or isinstance(module, PreTrainedModel)

    def enable(self, module: nn.Module) -> Handle:
        """Enable it, unless the user has done so."""
        return Kept() if is_enabled(module) else enable(module)

    def guard(self) -> AbstractContextManager[None]:
        """Refuse models that are not enabled, inside a ``with`` block."""
        return guarded()

    def output_dims(self, output: object) -> Mapping[str, int]:
        """Return the sequence dims of a model's output: of logits and hidden states of tokens."""
        if not isinstance(output, ModelOutput):
            return {}
        logits = output.get("logits")
        scores_tokens = isinstance(logits, Tensor) and logits.dim() > 2  # else it scores rows
        states = {"last_hidden_state": 1, "hidden_states": 1}
        return {**states, "logits": 1} if scores_tokens else states

    def describe(self, module: nn.Module) -> dict[str, Any]:
        """Return how PEFT's adapters were made, which their weights do not tell, for `export`."""
        if not hasattr(module, "get_base_model"):
            return {}
        configs: Mapping[str, Any] = module.peft_config  # type: ignore[assignment]
        written = {name: _written(config) for name, config in configs.items()}
        return {"peft_config": written}


def _written(config: Any) -> Any:
    """Return a config as its JSON file holds it."""

    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, set | frozenset) else str(value)

    return json.loads(json.dumps(config.to_dict(), default=plain))


adapter = HuggingFaceAdapter()
"""What the entry point names."""
