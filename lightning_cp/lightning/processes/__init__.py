# SPDX-License-Identifier: Apache-2.0
"""Processes: how they start, their mesh, how they end, and the loaders that feed them."""
