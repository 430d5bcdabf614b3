# SPDX-License-Identifier: Apache-2.0
"""What an enabled model runs: its forward, attention, masks, and losses."""
