# SPDX-License-Identifier: Apache-2.0
"""A step or a model, sharded and as one device would run it: what it yields is compared."""
