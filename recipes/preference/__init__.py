# SPDX-License-Identifier: Apache-2.0
"""Training on preferences: losses, data and the Lightning module."""
