# SPDX-License-Identifier: Apache-2.0
"""Models that take images, video or audio besides text.

`table` holds what differs by model type, `outer` runs the model on full sequences, and `seam`
shards what its text decoder gets.
"""
