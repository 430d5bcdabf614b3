# SPDX-License-Identifier: Apache-2.0
"""Training recipes and the command line; the library does not import them."""
