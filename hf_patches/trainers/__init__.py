# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer, TRL's trainers and accelerate: `context_parallel` and its `verify`."""

from hf_patches.trainers.trainer import verify

__all__ = ["verify"]
