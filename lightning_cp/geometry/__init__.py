# SPDX-License-Identifier: Apache-2.0
"""Positions, ranges, masks and layouts: integers only, no kernel and no communication."""
