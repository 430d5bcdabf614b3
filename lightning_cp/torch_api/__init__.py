# SPDX-License-Identifier: Apache-2.0
"""Context parallelism under names of torch: its `context_parallel`, and a `ParallelStyle`."""
