# SPDX-License-Identifier: Apache-2.0
"""Opened checkpoints of all kinds: their contents, and how a rank reads its shards."""

import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_cp.checkpoint.blocks import Blocks, as_blocks
from lightning_cp.checkpoint.checksums import ALL, Share, check_file, check_folder
from lightning_cp.checkpoint.folder import META, UNSHARDED, read_metadata
from lightning_cp.checkpoint.state import Names, plain_name, renamed
from lightning_cp.private.modules import local_slices

Keys = tuple[str | int, ...]
"""The keys that lead to a value: ("state_dict", NAME) or ("optimizer_0", "state", NAME, ...)."""
REST = "rest"
"""The first key of sharded values that are neither weights nor optimizer states."""
Form = tuple[tuple[int, ...], torch.dtype | None] | None
"""Shape and dtype of a tensor in a checkpoint; None for other values."""


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """An opened checkpoint.

    Attributes:
        path: its location.
        forms: shape and dtype of all its values.
        read: reads values into the tensors that it gets (None for other values), and returns them.
        groups: the saved parameter groups of each optimizer, with names.
        rest: everything but weights and optimizer states.
    """

    path: Path
    forms: dict[Keys, Form]
    read: Callable[[Mapping[Keys, Any]], dict[Keys, Any]]
    groups: Sequence[Any] = ()
    rest: Mapping[str, Any] | None = None


def open_folder(
    folder: Path,
    weights_only: bool | None,
    *,
    with_rest: bool = True,
    share: Share = ALL,
    map_location: Any = "cpu",
) -> OpenedCheckpoint:
    """Open a folder of shards, after verifying its checksums.

    Args:
        folder: the checkpoint.
        weights_only: as for ``torch.load``, for `meta.pt`.
        with_rest: read `meta.pt`.
        share: which part of the checksums this rank verifies.
        map_location: as for ``torch.load``, for `meta.pt`.
    """
    check_folder(folder, share, UNSHARDED)
    metadata = read_metadata(folder)
    rest = _unpickle(folder / META, weights_only, map_location) if with_rest else None
    flat_names: dict[Keys, str] = {keys: name for name, keys in metadata.planner_data.items()}
    forms: dict[Keys, Form] = {}
    for keys, name in flat_names.items():
        md: Any = metadata.state_dict_metadata[name]
        forms[keys] = (tuple(md.size), md.properties.dtype) if hasattr(md, "size") else None

    reader = FileSystemReader(folder)
    # Read once: of many ranks it is large, and weights may be read in many parts.
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]

    def read(targets: Mapping[Keys, Any]) -> dict[Keys, Any]:
        flat = {flat_names[keys]: value for keys, value in targets.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")
            try:  # not collective: each rank reads its shards
                flat_blocks = as_blocks(flat)
                state_dict_loader.load(flat_blocks, storage_reader=reader, no_dist=True)
            except CheckpointException as error:
                raise error.failures[0][0] from None
        results = {n: flat[n] if isinstance(x, Blocks) else x for n, x in flat_blocks.items()}
        return {keys: results[flat_names[keys]] for keys in targets}

    targets = {keys: blank(f) for keys, f in forms.items() if keys[1:2] == ("param_groups",)}
    states = nest(read(targets))
    groups: list[Any] = []
    while (label := f"optimizer_{len(groups)}") in states:
        groups.append(states[label]["param_groups"])
    return OpenedCheckpoint(folder, forms, read, groups, rest)


def open_values(
    path: Path, checkpoint: Mapping[str, Any], names: Sequence[Names]
) -> OpenedCheckpoint:
    """Open the result of `load_pickle`; ``names`` are those of the optimizers' parameters."""
    rest = dict(checkpoint)
    tensors: dict[Keys, Any] = {
        ("state_dict", plain_name(name)): value for name, value in rest.pop("state_dict").items()
    }
    groups: list[Any] = []
    for saved, param_names in zip(rest.pop("optimizer_states", ()), names, strict=False):
        named = _named(path, saved, param_names)
        tensors.update(_flatten((f"optimizer_{len(groups)}", "state"), named["state"]))
        groups.append(named["param_groups"])
    # A copy: reading a mapped file that was overwritten meanwhile kills the process.
    return _open_tensors(path, tensors, groups, deepcopy(rest))


def _open_tensors(
    path: Path,
    tensors: Mapping[Keys, Any],
    groups: Sequence[Any] = (),
    rest: Mapping[str, Any] | None = None,
) -> OpenedCheckpoint:
    """Open full tensors and slices of safetensors."""

    def read(targets: Mapping[Keys, Any]) -> dict[Keys, Any]:
        return {
            keys: tensors[keys] if target is None else fill(target, tensors[keys])
            for keys, target in targets.items()
        }

    forms: dict[Keys, Form] = {}
    for keys, value in tensors.items():
        if isinstance(value, Tensor):
            forms[keys] = tuple(value.shape), value.dtype
        else:
            forms[keys] = (tuple(value.get_shape()), None) if hasattr(value, "get_shape") else None
    return OpenedCheckpoint(path, forms, read, groups, rest)


def open_safetensors(source: Path, files: Sequence[Path]) -> OpenedCheckpoint:
    """Open safetensors files."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(f"Reading {source} needs `pip install safetensors`.") from error
    tensors: dict[Keys, Any] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118  not a dict
            tensor = opened.get_slice(name)
            if not tensor.get_shape():
                tensor = opened.get_tensor(name)
            tensors["state_dict", plain_name(name)] = tensor
    return _open_tensors(source, tensors)


def load_pickle(file: Path, weights_only: bool | None, share: Share = ALL) -> dict[str, Any]:
    """Read a file of torch.save, memory-mapped if its format allows.

    Args:
        file: its checksums are verified first.
        weights_only: as for ``torch.load``.
        share: which part of the checksums this rank verifies.
    """
    if not file.is_file():
        raise FileNotFoundError(f"There is no checkpoint file {file}.")
    check_file(file, share)
    return _unpickle(file, weights_only)


def _unpickle(file: Path, weights_only: bool | None, map_location: Any = "cpu") -> dict[str, Any]:
    try:
        return dict(
            torch.load(
                file,
                map_location=map_location,
                weights_only=weights_only,
                mmap=zipfile.is_zipfile(file),
            )
        )
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{file} holds objects that are not read by default: a pickle can run any code. "
            "If you trust the file, pass `weights_only=False` to `trainer.fit`, `validate`, `test`"
            ", `predict` or `load_from_checkpoint`, or allow the classes with "
            f"`torch.serialization.add_safe_globals([...])`. torch reports: {error}"
        ) from error


def _named(path: Path, saved: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a plain optimizer's state by name: its integer ids number the parameters in order."""
    saved_keys = [group["params"] for group in saved["param_groups"]]
    if any(isinstance(key, str) for key in chain.from_iterable(saved_keys)):
        return renamed(saved, [[plain_name(key) for key in group] for group in saved_keys])
    saved_sizes, sizes = [len(group) for group in saved_keys], [len(group) for group in names]
    if saved_sizes != sizes:
        raise ValueError(
            f"The optimizer in {path} has groups of {saved_sizes} parameters, without names; this "
            f"one has {sizes}. Load a checkpoint folder, which has names, or only the weights."
        )
    return renamed(saved, names)


def _flatten(keys: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    """Yield each value in dicts and lists with the keys that lead to it."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flatten((*keys, key), item)
    else:
        yield keys, value


def put_values(rest: Any, values: Mapping[Keys, Any]) -> None:
    """Insert the sharded values of the rest of a checkpoint where their keys lead."""
    for keys, value in values.items():
        if keys[0] == REST:
            container = rest
            for key in keys[1:-1]:
                container = container[key]
            container[keys[-1]] = value


def nest(values: Mapping[Keys, Any]) -> Any:
    """Return nested dicts and lists with values where their keys lead."""
    if () in values:
        return values[()]
    inner: dict[Any, dict[Keys, Any]] = {}
    for (key, *others), value in values.items():
        inner.setdefault(key, {})[tuple(others)] = value
    nested = {key: nest(part) for key, part in inner.items()}
    if nested and all(isinstance(key, int) for key in nested):
        return [item for _, item in sorted(nested.items())]
    return nested


def blank(form: Form, device: str = "cpu") -> Tensor | None:
    """Return an empty tensor to read a value into; None for other values."""
    return None if form is None else torch.empty(form[0], dtype=form[1], device=device)


def blank_like(param: Tensor, form: Form) -> Tensor | None:
    """Return an empty tensor for an optimizer's state, sharded as ``param`` if shapes are equal."""
    if form is None or not form[0]:
        return blank(form)
    if form[0] == tuple(param.shape):
        return torch.empty_like(param, dtype=form[1], requires_grad=False)
    full = torch.empty(form[0], dtype=form[1])
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        return distribute_tensor(full, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    return full


@torch.no_grad()
def fill(target: Tensor, full: Any) -> Tensor:
    """Copy this rank's shard of a full tensor, or of a slice of safetensors, into ``target``."""
    if not isinstance(target, DTensor):
        return target.copy_(full[:] if target.ndim else full)
    local = target.to_local()
    if all(type(placement) in (Shard, Replicate) for placement in target.placements):
        part = local_slices(target)
        if local.numel():
            local.copy_(full[part] if part else full)
    else:  # a shard of FSDP over tensor parallelism may be several blocks
        mesh, placements = target.device_mesh, target.placements
        local.copy_(distribute_tensor(full[:], mesh, placements, src_data_rank=None).to_local())
    return target
