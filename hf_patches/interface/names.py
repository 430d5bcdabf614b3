# SPDX-License-Identifier: Apache-2.0
"""The names under which our attention is registered, and helpers that read configs.

An enabled model keeps our name outside of steps too, since activation checkpointing looks it up
again in backward. Outside of steps we call the implementation that the model had before; the name
encodes which, and so survives copying and pickling of the model.
"""

import sys
from typing import Any, Final

from transformers import PreTrainedConfig, PreTrainedModel

from hf_patches.private import attention_name
from lightning_cp.step import active_step
from lightning_cp.step.guards import check_recompute
from lightning_cp.step.step import Step, StepMask

# Names with "flash", "sdpa" or "flex_attention" in them would be taken for those.
NAMES: Final = {
    "sdpa": "lightning_cp",
    "eager": "lightning_cp_eager",
    "flash_attention_2": "lightning_cp_fa2",
    "flash_attention_3": "lightning_cp_fa3",
    "flash_attention_4": "lightning_cp_fa4",
    "flex_attention": "lightning_cp_flex",
}
"""Our name for each implementation that a model may have had."""

STOCK: Final = {ours: stock for stock, ours in NAMES.items()}
"""The implementation for each of our names."""


ENABLED: Final = "_lightning_cp_enabled"
"""The attribute of the modules of an enabled model that have a config: its attention has it."""


def active() -> Step | None:
    """Return the step in which enabled models run sharded; None where they run as stock models.

    They do so in parts of a multimodal model that run on full sequences: its towers, for one.
    """
    step = active_step.current()
    return None if step is None or step.is_stock or active_step.sees_full_sequences() else step


def step_of(mask: object = None) -> Step | None:
    """Return the step in which a layer runs sharded; None where it runs as a stock layer.

    Args:
        mask: what the layer got. Masks hold their step, so that layers can be recomputed.
    """
    if isinstance(mask, StepMask):
        return mask.step
    check_recompute(active_step.current())
    return active()


def is_ours(implementation: str | None) -> bool:
    """Return whether an implementation is one of ours."""
    return implementation in STOCK


def stock_name(config: PreTrainedConfig) -> str:
    """Return the implementation that the model had before it was enabled.

    In a reference step "eager" for a model with a softcap, since no other implementation has one.
    """
    current = attention_name(config)
    name = STOCK.get(str(current), current)
    step = active_step.current()
    if step is not None and getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    return str(name)


def find_in_modules(cls: type, name: str) -> Any:
    """Return ``name`` from the module that defines a class or one of its bases; None if absent.

    FSDP2 and users subclass the model's class, in other modules.
    """
    modules = (sys.modules[owner.__module__] for owner in cls.__mro__)
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


def text_key(model: PreTrainedModel) -> str:
    """Return the key of the text config in a model's config; empty if they are the same."""
    text = model.config.get_text_config()
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text:
            return str(key)
    return ""


def implementations(model: PreTrainedModel) -> dict[str, str]:
    """Return the attention implementations of a model and of its text config, by config key."""
    key = text_key(model)
    names = {"": str(attention_name(model.config))}
    if key:
        names[key] = str(attention_name(getattr(model.config, key)))
    return names
