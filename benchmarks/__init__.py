# SPDX-License-Identifier: Apache-2.0
"""Benchmark scripts, which compare with the ideal; their results are in results/."""
