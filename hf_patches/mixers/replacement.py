# SPDX-License-Identifier: Apache-2.0
"""Methods of a layer that are replaced in an instance of its module, and what the layer is."""

import copy
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_patches.interface.names import STOCK, implementations, stock_name, text_key
from hf_patches.private import set_attention_name
from lightning_cp.patch import Patch, replace_method


@dataclass(eq=False)
class Replacement:
    """A method of a module that is replaced, in the instance.

    Args:
        module: the module.
        kind: the class of the module that is known; FSDP2 and users subclass it.
        name: of the method.
    """

    module: nn.Module
    kind: str = ""
    name: str = "forward"

    def install(self) -> Patch:
        """Replace the method; return what puts it back."""
        self.patch = replace_method(self.module, self.name, self._call)
        return self.patch

    @property
    def stock(self) -> Callable[..., Any]:
        """Return the method that was there before."""
        return self.patch.stock

    def _call(self, _: nn.Module, __: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method."""
        return self.stock(*args, **kwargs)


def name_stock(module: nn.Module) -> Patch:
    """Give a module a config that names the stock implementation, for code that looks for it."""
    config: Any = copy.copy(module.config)
    set_attention_name(config, stock_name(module.config))  # type: ignore[arg-type]
    return Patch(module, "config", config)


def kind_of(module: nn.Module, kinds: Container[str]) -> str | None:
    """Return the first class of a module, or base of it, that is in ``kinds``; None for none."""
    names = (owner.__name__ for owner in type(module).__mro__)
    return next((name for name in names if name in kinds), None)


def stock_implementation(model: PreTrainedModel) -> str:
    """Return the implementation that an enabled model had before, "eager" or "sdpa"; raise else."""
    name = implementations(model)[text_key(model)]
    stock = STOCK.get(name, name)
    if stock not in ("eager", "sdpa"):
        raise ValueError(
            f"The attention of {type(model).__name__} is '{stock}', but under context parallelism "
            "its layers compute masks of their own, which needs 'eager' or 'sdpa'. Load the model "
            "with attn_implementation='eager'."
        )
    return stock
