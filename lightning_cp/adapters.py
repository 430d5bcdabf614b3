# SPDX-License-Identifier: Apache-2.0
"""Adapters: they prepare models of other libraries for context parallelism.

A package registers an adapter for a library in the entry-point group `lightning_cp.adapters`, under
the library's name: it is loaded only in jobs that have imported the library.
"""

import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol

from torch import nn

ADAPTERS: Final = "lightning_cp.adapters"
"""The entry-point group."""


NOTES: Final = "lightning_cp"
"""The key of a checkpoint under which adapters describe models."""


# Our own adapter, so that it works in a checkout that is not installed.
_OURS: Final = EntryPoint("transformers", "hf_patches.adapter:adapter", ADAPTERS)


class Handle(Protocol):
    """Undoes what an adapter did to a model."""

    def undo(self) -> None:
        """Restore the model."""


class Adapter(Protocol):
    """Prepares models of another library."""

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module is a model of the library."""

    def enable(self, module: nn.Module) -> Handle:
        """Let a model run inside steps."""

    def output_dims(self, output: object) -> Mapping[str, int]:
        """Return the sequence dims of a model's output, by key; empty for other outputs."""


def load_adapters() -> list[Adapter]:
    """Return the adapters of the libraries that are in use.

    Once loaded, an adapter also raises for its library's models in steps if they are not enabled.
    """
    points = {point.value: point for point in (_OURS, *entry_points(group=ADAPTERS))}
    return [point.load() for point in points.values() if point.name in sys.modules]


def output_dims(adapters: Iterable[Adapter], output: object) -> Mapping[str, int]:
    """Return the sequence dims of the output of an adapter's model, by key."""
    for adapter in adapters:
        if dims := adapter.output_dims(output):
            return dims
    return {}


def enable_models(owner: nn.Module) -> list[Handle]:
    """Enable the models inside a module by adapters; raise for models that need one and lack it."""
    adapters = load_adapters()
    handles: list[Handle] = []

    def visit(module: nn.Module) -> None:
        for adapter in adapters:
            if adapter.matches(module):
                handles.append(adapter.enable(module))
                return
        if hasattr(module, "set_attn_implementation"):
            raise ValueError(
                f"{type(module).__name__} chooses its attention by set_attn_implementation(), and "
                "no installed adapter supports it: its masks would be ignored. Install a package "
                f"with an adapter for it (entry-point group '{ADAPTERS}')."
            )
        for child in module.children():
            visit(child)

    visit(owner)
    return handles


def describe_models(owner: nn.Module) -> dict[str, Any]:
    """Return the adapters' descriptions of models for checkpoints, by the names in ``owner``.

    Numbers, strings, lists and dicts only. ``describe`` is an optional method of an adapter.
    """
    notes = {}
    for adapter in load_adapters():
        describe = getattr(adapter, "describe", None)
        if describe is None:
            continue
        for name, module in owner.named_modules():
            if adapter.matches(module) and (note := describe(module)):
                notes[name] = note
    return {NOTES: notes} if notes else {}
