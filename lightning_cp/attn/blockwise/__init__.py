# SPDX-License-Identifier: Apache-2.0
"""Attention in tiles, with partial results accumulated over KV blocks."""
