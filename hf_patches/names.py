# SPDX-License-Identifier: Apache-2.0
"""Under which names attention is registered, and when it is ours.

An enabled model carries our name for good, since activation checkpointing asks for it again in
backward. Outside of steps we pass on to what the model used before, which the name tells: it stays
true in copies and pickles of the model.
"""

import sys
from typing import Any, Final

from transformers import PreTrainedConfig, PreTrainedModel

from lightning_cp import active_step
from lightning_cp.step import Step

# Names with "flash", "sdpa" or "flex_attention" in them would be taken for those.
NAMES: Final = {
    "sdpa": "lightning_cp",
    "eager": "lightning_cp_eager",
    "flash_attention_2": "lightning_cp_fa2",
    "flash_attention_3": "lightning_cp_fa3",
    "flash_attention_4": "lightning_cp_fa4",
    "flex_attention": "lightning_cp_flex",
}
"""Our name for each implementation that a model may have used before."""

STOCK: Final = {ours: stock for stock, ours in NAMES.items()}
"""And back."""


def active() -> Step | None:
    """Return the step in which enabled models are cut; None where they are as they were."""
    step = active_step.current()
    return None if step is None or step.is_stock else step


def is_ours(implementation: str | None) -> bool:
    """Say whether a model carries one of our names."""
    return implementation in STOCK


def stock_name(config: PreTrainedConfig) -> str:
    """Return what the model used before it was enabled.

    A softcap is part of the model, and only "eager" has it: what we are compared with must too.
    """
    name = STOCK.get(config._attn_implementation, config._attn_implementation)
    step = active_step.current()
    if step is not None and getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    return str(name)


def find_in_files(cls: type, name: str) -> Any:
    """Return what the file of a class, or of one that it is made from, calls ``name``; or None.

    FSDP2 and users put classes of their own in front of a model's.
    """
    files = (sys.modules[owner.__module__] for owner in cls.__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)


def text_key(model: PreTrainedModel) -> str:
    """Return under which name the config holds that of the text; empty if it is the same."""
    text = model.config.get_text_config()
    for key in model.config.sub_configs:
        if getattr(model.config, key, None) is text:
            return str(key)
    return ""


def implementations(model: PreTrainedModel) -> dict[str, str]:
    """Return what the parts of a model that read text use for attention."""
    key = text_key(model)
    names = {"": str(model.config._attn_implementation)}
    if key:
        names[key] = str(getattr(model.config, key)._attn_implementation)
    return names
