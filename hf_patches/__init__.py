# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models under context parallelism: `enable(model)` and `verify(model, batch)`."""

from hf_patches.enable import Handle, enable
from hf_patches.verify import verify

__all__ = ["Handle", "enable", "verify"]
