# SPDX-License-Identifier: Apache-2.0
"""What all of the package reads: names, arguments of calls, positions."""
