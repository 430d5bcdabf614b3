# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face door of lightning-cp. Empty so far: `enable(model)` comes with its own issue."""
