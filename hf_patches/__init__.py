# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models under context parallelism: `enable(model)` and `verify(model, batch)`.

`whole_rows(model, cp)` lets it take full sequences, for loops and trainers without steps.
`model_shape(config)` is what `lightning_cp.planner` plans with.
"""

from hf_patches.enable import Handle, enable
from hf_patches.model_shape import model_shape
from hf_patches.verify import verify
from hf_patches.whole_rows import whole_rows

__all__ = ["Handle", "enable", "model_shape", "verify", "whole_rows"]
