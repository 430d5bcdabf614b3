# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models under context parallelism: `enable(model)` and `verify(model, batch)`.

`model_shape(config)` is what `lightning_cp.planner` plans with.
"""

from hf_patches.enable import Handle, enable
from hf_patches.model_shape import model_shape
from hf_patches.verify import verify

__all__ = ["Handle", "enable", "model_shape", "verify"]
