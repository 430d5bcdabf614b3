# SPDX-License-Identifier: Apache-2.0
"""What activations of a run may take: planned, chosen and applied."""
