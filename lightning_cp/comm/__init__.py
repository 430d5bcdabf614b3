# SPDX-License-Identifier: Apache-2.0
"""Process groups, collectives, and errors that all ranks raise together."""
