# SPDX-License-Identifier: Apache-2.0
"""How the strategy finds us: the entry point of the group `lightning_cp.adapters`."""

from torch import nn
from transformers import PreTrainedModel

from hf_patches.enable import enable, is_enabled
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


adapter = HuggingFaceAdapter()
"""What the entry point names."""
