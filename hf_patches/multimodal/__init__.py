# SPDX-License-Identifier: Apache-2.0
"""Models that take images, video or audio besides text.

`table` holds what differs by model type. `media_call` checks the arguments, `outer` runs the model
on full sequences, `sharing` deals out images, frames and clips to ranks, `features` exchanges what
they compute, and `seam` shards what the text decoder gets.
"""
