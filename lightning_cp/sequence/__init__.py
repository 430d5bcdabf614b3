# SPDX-License-Identifier: Apache-2.0
"""Layers that mix tokens other than by attention: convolutions and linear recurrences, sharded."""

from lightning_cp.sequence.conv import causal_conv1d
from lightning_cp.sequence.halo import halo
from lightning_cp.sequence.recurrence import initial_states
from lightning_cp.sequence.token_map import document_starts, split_ranges

__all__ = ["causal_conv1d", "document_starts", "halo", "initial_states", "split_ranges"]
