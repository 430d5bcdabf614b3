# SPDX-License-Identifier: Apache-2.0
"""Replaces the functions that a layer calls, in instances of a model and inside steps only.

Convolutions and recurrences of transformers are functions of the file that defines the layer.
Inside a step the layer's own forward runs with other functions under their names; projections,
norms and gates stay what they are, and other models of the same class see nothing of it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from hf_patches.interface.names import step_of
from hf_patches.mixers.replacement import Replacement
from lightning_cp.patch import Patch
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.private.functions import copy_function

Functions = Mapping[str, Callable[..., Any]]
"""Replacements by the names of functions; each takes the stock function first."""


@dataclass(eq=False)
class Mixer(Replacement):
    """The forward of a layer that mixes tokens.

    Args:
        functions: what it calls inside a step.
    """

    functions: Functions = field(default_factory=dict)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the class; inside a step, with the replaced functions."""
        if step_of() is None:
            return self.stock(*args, **kwargs)
        return self._forward_in_step(*args, **kwargs)

    @outside_graphs
    def _forward_in_step(self, *args: Any, **kwargs: Any) -> Any:
        stock = type(self.module).forward
        known = inspect.unwrap(stock).__globals__
        functions = {name: partial(fn, known[name]) for name, fn in self.functions.items()}
        return _with_globals(stock, functions)(self.module, *args, **kwargs)


def _with_globals(fn: Any, values: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function, decorated or not, that sees other values of global names."""
    inner = getattr(fn, "__wrapped__", None)
    if inner is None:
        return copy_function(fn, {**fn.__globals__, **values})
    ours = _with_globals(inner, values)
    cells = (CellType(ours) if cell.cell_contents is inner else cell for cell in fn.__closure__)
    return copy_function(fn, cells=tuple(cells))


def replace_functions(model: PreTrainedModel, functions: Functions) -> Iterator[Patch]:
    """Replace functions in all layers of a model that call them; yield the layers.

    Raises before it changes anything if a layer has another form than that of the versions of
    transformers that we know.
    """
    mixers = []
    for name, module in model.named_modules():
        called = _called_names(module) & functions.keys()
        if called:
            _check_calls(name, module, called, functions)
            check_own_forward(name, module)
            mixers.append(Mixer(module, functions=functions))
        elif any(isinstance(child, nn.Conv1d) for child in module.children()):
            raise unknown_layer(name, module, "a convolution that is computed in another way")
    for mixer in mixers:
        yield mixer.install()


def _called_names(module: nn.Module) -> set[str]:
    """Return the global names that the forward of a module's class uses."""
    fn = inspect.unwrap(type(module).forward)
    return set(fn.__code__.co_names) if isinstance(fn, FunctionType) else set()


def _check_calls(name: str, module: nn.Module, called: set[str], functions: Functions) -> None:
    missing = sorted(functions.keys() - called)
    if missing:
        raise unknown_layer(name, module, f"a forward that does not call {', '.join(missing)}")


def check_own_forward(name: str, module: nn.Module) -> None:
    """Raise if somebody has replaced the forward of a layer, which we would bypass."""
    if "forward" in module.__dict__:
        raise ValueError(
            f"The forward of {name} ({type(module).__name__}) has been replaced in this model, so "
            "its convolutions and recurrences would see this rank's tokens only. Call "
            "enable(model) first, and wrap the layer then."
        )


def unknown_layer(name: str, module: nn.Module, what: str) -> ValueError:
    """Return the error for a layer of another form than that of the versions that we know."""
    return ValueError(
        f"{name} ({type(module).__name__}, transformers {transformers.__version__}) has {what}, "
        "which is not supported: it would see this rank's tokens only. Use a version of "
        "transformers that the table of supported models was measured with, or run the model on "
        "full sequences: `with cp.paused():`."
    )
