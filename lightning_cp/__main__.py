# SPDX-License-Identifier: Apache-2.0
"""`python -m lightning_cp COMMAND`: the program `lightning-cp`, for `torchrun -m` too."""

from importlib import import_module

if __name__ == "__main__":
    import_module("recipes.command").run()  # by name: nothing in this package knows the recipes
