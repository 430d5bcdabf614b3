# SPDX-License-Identifier: Apache-2.0
"""A step: the values of one batch, the step that is active, and checks that calls belong to it."""
