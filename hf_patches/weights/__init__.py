# SPDX-License-Identifier: Apache-2.0
"""Weights and configs: saving, export, tensor plans, shapes for the planner."""
