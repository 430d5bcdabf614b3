# SPDX-License-Identifier: Apache-2.0
"""Adapters that prepare models of other libraries, which this package does not know.

A package that knows a library registers an adapter in the entry-point group
`lightning_cp.adapters`, under the library's name: it is loaded only in jobs that have imported it.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

ADAPTERS: Final = "lightning_cp.adapters"
"""The entry-point group."""

NOTES: Final = "lightning_cp"
"""The key under which a checkpoint holds the notes of adapters about models."""


class AdapterHandle(Protocol):
    """The changes that an adapter has made to a model."""

    def remove(self) -> None:
        """Restore the model."""


class Adapter(Protocol):
    """Prepares the models of another library."""

    def matches(self, module: nn.Module) -> bool:
        """Return whether a module is one of its models."""

    def enable(self, module: nn.Module) -> AdapterHandle:
        """Make a model run inside steps."""

    def output_dims(self, output: object) -> Mapping[str, int]:
        """Return the sequence dims of a model's output, by key; empty for other objects."""


@lru_cache(maxsize=1)
def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group: installed ones, and those of a checkout."""
    points = {point.value: point for point in metadata.entry_points(group=group)}
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():  # a checkout, which need not be installed
        tables = tomllib.loads(project.read_text()).get("project", {}).get("entry-points", {})
        for name, value in tables.get(group, {}).items():
            points.setdefault(value, EntryPoint(name, value, group))
    return tuple(points.values())


def load_adapters() -> list[Adapter]:
    """Return the adapters of the libraries that are in use."""
    return [_load(point) for point in entry_points(ADAPTERS) if point.name in sys.modules]


@lru_cache
def _load(point: EntryPoint) -> Adapter:
    """Import an adapter; once, because each step asks for it."""
    adapter: Adapter = point.load()
    return adapter


@contextmanager
def guarded() -> Iterator[None]:
    """Make models that no adapter has prepared raise while a step is open.

    ``guard``, a context manager, is an optional method of an adapter.
    """
    with ExitStack() as stack:
        for adapter in load_adapters():
            guard = getattr(adapter, "guard", None)
            if guard is not None:
                stack.enter_context(guard())
        yield


def output_dims(output: object) -> Mapping[str, int]:
    """Return the sequence dims of the output of a model that an adapter knows, by key."""
    for adapter in load_adapters():
        if dims := adapter.output_dims(output):
            return dims
    return {}


def _outermost_models(owner: nn.Module) -> Iterator[tuple[Adapter | None, nn.Module]]:
    """Yield the outermost modules that an adapter knows, with it; and, with None, those around."""
    adapters = load_adapters()

    def visit(module: nn.Module) -> Iterator[tuple[Adapter | None, nn.Module]]:
        adapter = next((adapter for adapter in adapters if adapter.matches(module)), None)
        yield adapter, module
        for child in module.children() if adapter is None else ():
            yield from visit(child)

    return visit(owner)


def enable_models(owner: nn.Module) -> list[AdapterHandle]:
    """Let adapters prepare the models inside a module; raise if a model has no adapter."""
    handles: list[AdapterHandle] = []
    for adapter, module in _outermost_models(owner):
        if adapter is not None:
            handles.append(adapter.enable(module))
        elif hasattr(module, "set_attn_implementation"):
            raise ValueError(
                f"{type(module).__name__} chooses its attention by set_attn_implementation(), and "
                "no installed adapter supports it: its masks would be ignored. Install a package "
                f"that registers one in the entry-point group '{ADAPTERS}'."
            )
    return handles


def parallelize_models(owner: nn.Module, mesh: DeviceMesh) -> None:
    """Let adapters apply tensor parallelism to the outermost models inside a module.

    ``parallelize`` is an optional method of an adapter.

    Args:
        owner: a LightningModule whose weights are the same on all ranks.
        mesh: the ranks that share the weights of each layer, one axis.
    """
    models = [(getattr(a, "parallelize", None), module) for a, module in _outermost_models(owner)]
    if all(parallelize is None for parallelize, _ in models):
        raise ValueError(
            f"tensor_parallel_size={mesh.size()}, but {type(owner).__name__} has no Hugging Face "
            "model whose plan could be applied. Apply a plan in configure_model(): "
            "parallelize_module(self.model, self.trainer.strategy.tensor_mesh, plan)."
        )
    for parallelize, module in models:
        if parallelize is not None:
            parallelize(module, mesh)


def check_loaded_models(owner: nn.Module, num_tensor_ranks: int, *, reduces_once: bool) -> None:
    """Let adapters refuse models that their library has distributed in a way that is not exact.

    ``check_loaded`` is an optional method of an adapter.
    """
    for adapter in load_adapters():
        check = getattr(adapter, "check_loaded", None)
        for module in owner.modules() if check is not None else ():
            if adapter.matches(module):
                check(module, num_tensor_ranks, reduces_once=reduces_once)  # type: ignore[misc]


def plan_models(owner: nn.Module) -> list[Mapping[str, Any]]:
    """Return what the planner needs of the outermost models inside a module; {} for unknown ones.

    ``plan`` is an optional method of an adapter.
    """
    return [
        getattr(adapter, "plan", lambda _: {})(module)
        for adapter, module in _outermost_models(owner)
        if adapter is not None
    ]


def describe_models(owner: nn.Module) -> dict[str, Any]:
    """Return the notes of adapters about models, by the models' names in ``owner``.

    Numbers, strings, lists and dicts only. An adapter without notes needs no ``describe``.
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
