# SPDX-License-Identifier: Apache-2.0
"""FlexAttention: a user's own calls, and masks that it computes fastest."""
