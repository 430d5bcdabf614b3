# SPDX-License-Identifier: Apache-2.0
"""Parameters sharded by FSDP2: wrapping, gathering, and scalars computed from shards."""
