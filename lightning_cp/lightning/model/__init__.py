# SPDX-License-Identifier: Apache-2.0
"""A module from set-up to teardown: checked, placed, sharded, averaged, updated."""
