# SPDX-License-Identifier: Apache-2.0
"""The Lightning strategy, its callbacks, and what they check."""
