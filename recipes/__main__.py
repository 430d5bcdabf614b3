# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes fit --config FILE`, `torchrun ... -m recipes fit ...`."""

import sys

from lightning_cp.comm.error_report import end_process
from recipes.command import run_recipes

if __name__ == "__main__":
    end_process(run_recipes(sys.argv[1:], "python -m recipes"))
