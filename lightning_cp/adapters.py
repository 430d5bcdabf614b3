# SPDX-License-Identifier: Apache-2.0
"""How models that other libraries have made are prepared, without this package knowing them.

A package that knows a library names an adapter in the entry-point group `lightning_cp.adapters`,
under the library's name: it is loaded only in jobs that have imported the library.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol

from torch import nn

ADAPTERS: Final = "lightning_cp.adapters"
"""The entry-point group."""


NOTES: Final = "lightning_cp"
"""Under which key a checkpoint holds what adapters have noted of models."""


# Found in a checkout that nobody has installed, too.
_OURS: Final = EntryPoint("transformers", "hf_patches.adapter:adapter", ADAPTERS)


class Handle(Protocol):
    """What an adapter leaves behind."""

    def undo(self) -> None:
        """Put the model back as it was."""


class Adapter(Protocol):
    """Prepares the models of another library."""

    def matches(self, module: nn.Module) -> bool:
        """Say whether a module is one of its models."""

    def enable(self, module: nn.Module) -> Handle:
        """Let a model run inside steps."""

    def output_dims(self, output: object) -> Mapping[str, int]:
        """Return where the sequence lies in what a model returned, by key; empty for others."""


def load_adapters() -> list[Adapter]:
    """Return the adapters of the libraries that are in use."""
    found = {point.value: point for point in (_OURS, *entry_points(group=ADAPTERS))}
    return [point.load() for point in found.values() if point.name in sys.modules]


@contextmanager
def guarded(adapters: Iterable[Adapter]) -> Iterator[None]:
    """Let adapters refuse, while a step is open, models that they have not prepared.

    An adapter that cannot tell needs no ``guard``.
    """
    with ExitStack() as stack:
        for adapter in adapters:
            guard = getattr(adapter, "guard", None)
            if guard is not None:
                stack.enter_context(guard())
        yield


def output_dims(adapters: Iterable[Adapter], output: object) -> Mapping[str, int]:
    """Return where the sequence lies in the output of a model that an adapter knows."""
    for adapter in adapters:
        if found := adapter.output_dims(output):
            return found
    return {}


def enable_models(owner: nn.Module) -> list[Handle]:
    """Let adapters prepare the models inside a module; refuse those that need one and have none."""
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
                "no adapter that is installed knows it: its masks would be lost. Adapters are "
                f"found by the entry-point group '{ADAPTERS}'."
            )
        for child in module.children():
            visit(child)

    visit(owner)
    return handles


def describe_models(owner: nn.Module) -> dict[str, Any]:
    """Return what adapters note of models in checkpoints, by the models' names in ``owner``.

    Numbers, strings, lists and dicts only. An adapter that has nothing to note needs no
    ``describe``.
    """
    notes = {}
    for adapter in load_adapters():
        describe = getattr(adapter, "describe", None)
        if describe is None:
            continue
        for name, module in owner.named_modules():
            if adapter.matches(module) and (noted := describe(module)):
                notes[name] = noted
    return {NOTES: notes} if notes else {}
