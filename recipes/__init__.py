# SPDX-License-Identifier: Apache-2.0
"""What people run: never imported by the library."""
