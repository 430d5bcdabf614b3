# SPDX-License-Identifier: Apache-2.0
"""The loss: means over the tokens of the global batch, from logits or from hidden states."""

from lightning_cp.loss.accumulate import GradientWindow
from lightning_cp.loss.means import chunked_token_mean, global_mean

__all__ = ["GradientWindow", "chunked_token_mean", "global_mean"]
