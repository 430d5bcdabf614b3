# SPDX-License-Identifier: Apache-2.0
"""From a full batch to this rank's shard, and back."""
