# SPDX-License-Identifier: Apache-2.0
"""Steps of a LightningModule: open, call, check what comes out, compare with one device."""
