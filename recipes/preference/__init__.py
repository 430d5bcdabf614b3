# SPDX-License-Identifier: Apache-2.0
"""Training on preferences: losses, pairs as packed samples, and the Lightning module."""

from recipes.preference.data import PairData

__all__ = ["PairData"]
