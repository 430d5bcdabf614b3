# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes fit --config FILE`, `torchrun ... -m recipes fit ...`: `lightning-cp`."""

from recipes.command import run

if __name__ == "__main__":
    run()
