# SPDX-License-Identifier: Apache-2.0
"""What computes one block of attention, forward and backward. Read `base.py` first."""
