# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for Lightning and Hugging Face: long sequences on several GPUs, exactly.

Names are imported on first use, so that `import lightning_cp` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_cp.lightning.registry import register

if TYPE_CHECKING:
    from lightning_cp.attn.api import attention
    from lightning_cp.attn.flex.flex_attention import flex_attention
    from lightning_cp.compare.verify import verify
    from lightning_cp.config import Attention, Checkpoints, Memory, Parameters, Verify
    from lightning_cp.geometry.mask import Mask
    from lightning_cp.lightning.callback import ContextParallelCallback
    from lightning_cp.lightning.strategy import ContextParallelStrategy
    from lightning_cp.loss.logp import sequence_logp, token_logp
    from lightning_cp.loss.means import sample_mean, token_mean
    from lightning_cp.parallel import ContextParallel
    from lightning_cp.torch_api.attention_style import ContextParallelAttention
    from lightning_cp.torch_api.prototype import (
        context_parallel,
        context_parallel_unshard,
        set_rotate_method,
    )

__all__ = [
    "Attention",
    "Checkpoints",
    "ContextParallel",
    "ContextParallelAttention",
    "ContextParallelCallback",
    "ContextParallelStrategy",
    "Mask",
    "Memory",
    "Parameters",
    "Verify",
    "attention",
    "context_parallel",
    "context_parallel_unshard",
    "flex_attention",
    "sample_mean",
    "sequence_logp",
    "set_rotate_method",
    "token_logp",
    "token_mean",
    "verify",
]
__version__ = "0.1.0"

_MODULES = {
    "Attention": "lightning_cp.config",
    "Checkpoints": "lightning_cp.config",
    "ContextParallel": "lightning_cp.parallel",
    "ContextParallelAttention": "lightning_cp.torch_api.attention_style",
    "ContextParallelCallback": "lightning_cp.lightning.callback",
    "ContextParallelStrategy": "lightning_cp.lightning.strategy",
    "Mask": "lightning_cp.geometry.mask",
    "Memory": "lightning_cp.config",
    "Parameters": "lightning_cp.config",
    "Verify": "lightning_cp.config",
    "attention": "lightning_cp.attn.api",
    "context_parallel": "lightning_cp.torch_api.prototype",
    "context_parallel_unshard": "lightning_cp.torch_api.prototype",
    "flex_attention": "lightning_cp.attn.flex.flex_attention",
    "sample_mean": "lightning_cp.loss.means",
    "sequence_logp": "lightning_cp.loss.logp",
    "set_rotate_method": "lightning_cp.torch_api.prototype",
    "token_logp": "lightning_cp.loss.logp",
    "token_mean": "lightning_cp.loss.means",
    "verify": "lightning_cp.compare.verify",
}

register()


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'lightning_cp' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*globals(), *__all__])
