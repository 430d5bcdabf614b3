# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a Trainer: what Lightning hands over, as folders that any ranks can read."""
