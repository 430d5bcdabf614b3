# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models: folders of shards, single files, weights alone.

A folder holds `.metadata`, one `__{rank}_0.distcp` per rank and `meta.pt`, as Lightning's
distributed checkpoints do. A file is what a plain Trainer on one device writes. Both load on any
number of ranks. This module knows torch only; the strategy tells it when to save and load.
"""

import json
import os
import pickle
import shutil
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

T = TypeVar("T")
Keys = tuple[str | int, ...]
"""The keys that lead to a value: ("state_dict", NAME) or ("optimizer_0", "state", NAME, ...)."""
Form = tuple[tuple[int, ...], torch.dtype | None] | None
"""Shape and dtype of a tensor in a checkpoint; None for what is no tensor."""
Names = list[list[str]]
"""The names of an optimizer's parameters, group by group."""

_META = "meta.pt"
_MEANT_FOR_USERS = (ValueError, OSError, ImportError, pickle.UnpicklingError)
_LOOSE = (
    "Set `strict_loading=False` on the LightningModule to leave what is missing as it is and to "
    "ignore what is unexpected."
)


# --- What a model and its optimizers hold ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entries:
    """A module's state by plain name: without the marks of torch.compile and of recomputation.

    Attributes:
        values: what to save or to load into, as ``state_dict`` gives it.
        own_names: the names under which the module itself knows these.
        twins: for each name, the first name of the same tensor (tied weights have several).
        params: the first name of each tensor.
    """

    values: dict[str, Any]
    own_names: dict[str, str]
    twins: dict[str, str]
    params: dict[Tensor, str]


def _plain(name: str) -> str:
    """Return a name without the marks of torch.compile and of activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _entries(module: nn.Module) -> _Entries:
    """Collect the state of a module."""
    # First: its hooks put gathered FSDP parameters back into the shards that optimizers hold.
    state = module.state_dict()
    named = (module.named_parameters, module.named_buffers)
    first: dict[Tensor, str] = {}
    twins = {
        _plain(name): first.setdefault(tensor, _plain(name))
        for name, tensor in chain.from_iterable(n(remove_duplicate=False) for n in named)
    }
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"`{name}` is on the meta device, where there are no values to save or to load. "
                "Call `module.to_empty(device=...)` first."
            )
    values = {_plain(name): value for name, value in state.items()}
    return _Entries(values, {_plain(name): name for name in state}, twins, first)


def _param_names(entries: _Entries, optimizer: Optimizer) -> Names:
    """Return the names of an optimizer's parameters."""
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in entries.params:
                raise ValueError(
                    f"Group {index} of {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(param.shape)} that is not in the model, so that it has no name in a "
                    "checkpoint. Make it a parameter of the LightningModule."
                )
    return [[entries.params[param] for param in g["params"]] for g in optimizer.param_groups]


def _renamed(saved: Mapping[str, Any], new: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return an optimizer's state with other keys for its parameters, given in the same order."""
    groups = saved["param_groups"]
    old = chain.from_iterable(group["params"] for group in groups)
    key_of = dict(zip(old, chain.from_iterable(new), strict=True))
    return {
        "state": {key_of[key]: state for key, state in saved["state"].items()},
        "param_groups": [{**g, "params": list(n)} for g, n in zip(groups, new, strict=True)],
    }


def _map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``change`` to all tensors of a nested value."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(change, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(change, item) for item in value)
    return value


@torch.no_grad()
def _gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor on rank 0's CPU, and an empty one elsewhere. Collective."""
    whole = tensor
    if isinstance(tensor, DTensor):
        # With CPU offload the shards lie where the mesh cannot communicate.
        on_mesh: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
        whole = on_mesh.full_tensor()
    return whole.detach().cpu() if _rank() == 0 else torch.empty(0)


def model_state(model: nn.Module, *, full: bool) -> dict[str, Any]:
    """Return a model's state dict.

    Args:
        model: its parameters may be DTensors on any mesh.
        full: gather whole tensors on rank 0's CPU, one by one, and return nothing elsewhere;
            otherwise each rank keeps its shards. Collective if true.
    """
    entries = _entries(model)
    if not full:
        return entries.values
    whole: dict[str, Any] = {}
    for name, value in entries.values.items():
        twin = entries.twins.get(name, name)
        whole[name] = whole[twin] if twin in whole else _map_tensors(_gather, value)
    return whole if _rank() == 0 else {}


def optimizer_state(model: nn.Module, optimizer: Optimizer, *, full: bool) -> dict[str, Any]:
    """Return an optimizer's state, and leave the optimizer as it is.

    torch's `get_optimizer_state_dict` is not used: it makes a fresh optimizer take a step, after
    which Adam counts one too many.

    Args:
        model: the model that holds the parameters.
        optimizer: the optimizer.
        full: gather on rank 0's CPU under integer ids, the form of a plain optimizer, and return
            nothing elsewhere; otherwise shards under the parameters' names. Collective if true.
    """
    entries = _entries(model)
    names = _param_names(entries, optimizer)
    saved = optimizer.state_dict()
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, param in enumerate(params):
        _map_tensors(partial(_check_shardable, entries, param), saved["state"].get(index))
    if not full:
        return _renamed(saved, names)
    whole = _map_tensors(_gather, saved["state"])
    return {**saved, "state": whole} if _rank() == 0 else {}


def _check_shardable(entries: _Entries, param: Tensor, state: Tensor) -> None:
    """Refuse the state of a sharded parameter of which we cannot say which part a rank holds."""
    if not isinstance(param, DTensor) or all(p.is_replicate() for p in param.placements):
        return
    if state.ndim and not isinstance(state, DTensor):
        raise ValueError(
            f"The optimizer keeps a plain tensor of shape {tuple(state.shape)} for the sharded "
            f"`{entries.params[param]}`: ranks may hold different parts, and one would be saved. "
            "Use an optimizer that keeps DTensors, such as those of torch.optim."
        )


def sharded_state(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return ``state_dict`` and ``optimizer_0``, ``optimizer_1``, ... for `save_folder`."""
    states = [optimizer_state(model, optimizer, full=False) for optimizer in optimizers]
    return model_state(model, full=False), states


def full_state(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return ``state_dict`` and ``optimizer_states`` of a plain single-device checkpoint.

    Collective. They are whole on rank 0, on the CPU, and empty elsewhere.
    """
    states = [optimizer_state(model, optimizer, full=True) for optimizer in optimizers]
    return model_state(model, full=True), states


# --- Ranks together -------------------------------------------------------------------------------


def _rank() -> int:
    """Return this process's rank, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _from_rank_0(value: T) -> T:
    """Return rank 0's value on all ranks."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def _together(action: Callable[[], T], failure: str, keep: tuple[type[Exception], ...] = ()) -> T:
    """Run ``action`` on all ranks; if it fails on one, raise on all, naming the rank and the cause.

    Args:
        action: what to do.
        failure: what to say besides.
        keep: errors that are raised as they are where they arose.
    """
    own: BaseException | None = None
    causes: dict[int, str] = {}
    try:
        result = action()
    except CheckpointException as error:  # no Exception, and the same on all ranks
        own = error
        causes = {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
    except Exception as error:  # noqa: BLE001  whatever it is, the others must hear of it
        own = error
        causes = {_rank(): f"{type(error).__name__}: {error}"}
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        heard: list[dict[int, str]] = [{}] * group.size()
        dist.all_gather_object(heard, causes)
        causes = {rank: cause for known in heard for rank, cause in known.items()}
    if not causes:
        return result
    if isinstance(own, keep):
        raise own
    rank, cause = min(causes.items())
    others = f" (and {len(causes) - 1} other ranks)" if len(causes) > 1 else ""
    raise RuntimeError(f"Rank {rank}{others} failed: {cause}. {failure}") from own


# --- Saving a folder ------------------------------------------------------------------------------


def find_folder(folder: Path) -> Path:
    """Return where the checkpoint ``folder`` is.

    A save that was killed between its two renames has left the former checkpoint, whole, under
    another name.
    """
    aside = _aside(folder)
    return aside if not os.path.lexists(folder) and os.path.lexists(aside) else folder


def is_checkpoint_folder(path: Path) -> bool:
    """Say whether ``path`` is a checkpoint of shards, ours or Lightning's."""
    path = find_folder(path)
    return (path / ".metadata").is_file() and (path / _META).is_file()


def save_folder(state: Mapping[str, Any], meta: Mapping[str, Any], folder: Path) -> None:
    """Save shards and the rest of a checkpoint as a folder. Collective.

    Everything is written beside ``folder`` and put in its place by a rename at the end: a process
    that is killed at any moment leaves the former checkpoint or the new one (see `find_folder`).
    A failure of one rank is raised on all, and the former checkpoint stays.

    Args:
        state: ``state_dict``, ``optimizer_0``, ``optimizer_1``, ... from `sharded_state`.
        meta: everything else; rank 0's is saved.
        folder: on a file system that all ranks share; rank 0's path counts.
    """
    folder = _from_rank_0(folder)
    failure = f"{folder} was not saved; what was there before is untouched."
    first = _rank() == 0
    temporary = _from_rank_0(_together(lambda: _prepare(folder) if first else folder, failure))
    try:
        _together(lambda: _write_shards(state, temporary), failure)
        _together(lambda: _write_meta(meta, temporary) if first else None, failure)
        _together(lambda: _put_in_place(temporary, folder) if first else None, failure)
    finally:
        if first:
            _remove(temporary)


def _aside(folder: Path) -> Path:
    """Return where the former checkpoint lies while a new one takes its name."""
    return folder.with_name(f".{folder.name}.replaced")


@contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Let a file take the name of a checkpoint folder, which is removed once the file is there."""
    if path.is_dir() and not is_checkpoint_folder(path):
        raise IsADirectoryError(
            f"{path} is a folder, and no checkpoint that a new one could replace. Use another name."
        )
    if path.is_dir():
        os.rename(path, _aside(path))
    yield
    _remove(_aside(path))


def _remove(path: Path) -> None:
    """Remove a folder as far as possible, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _prepare(folder: Path) -> Path:
    """Clear what killed saves have left, and return a new folder to write in."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and without the suffix .ckpt: ModelCheckpoint must not take it for a checkpoint.
    stem = f".{folder.name}.saving-"
    for path in list(folder.parent.iterdir()):
        if path.name.startswith(stem):
            _remove(path)
    if find_folder(folder) != folder:
        _aside(folder).rename(folder)
    _remove(_aside(folder))
    temporary = folder.with_name(stem + uuid.uuid4().hex[:8])
    temporary.mkdir()
    return temporary


def _write_shards(state: Mapping[str, Any], temporary: Path) -> None:
    """Write each rank's shards. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ")  # we know when there is no group
        state_dict_saver.save(dict(state), storage_writer=FileSystemWriter(temporary))


def _write_meta(meta: Mapping[str, Any], temporary: Path) -> None:
    """Write what is not sharded, once all shards are there."""
    _read_metadata(temporary, [".metadata"])
    _save_file(meta, temporary / _META)


def _save_file(value: Mapping[str, Any], file: Path) -> None:
    """Save a value, down to the disk."""
    with file.open("wb") as stream:
        torch.save(dict(value), stream)
        stream.flush()
        os.fsync(stream.fileno())


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give a finished checkpoint its name, and remove the one that had it."""
    aside = _aside(folder)
    if os.path.lexists(folder):
        os.rename(folder, aside)
    try:
        os.rename(temporary, folder)
    except OSError:
        if os.path.lexists(aside):
            os.rename(aside, folder)
        raise
    _remove(aside)


# --- Reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """An open checkpoint.

    Attributes:
        path: where it is.
        forms: all values in it.
        read: reads each value for which there is room (a tensor, or None for what is no tensor),
            and returns them.
        groups: the saved parameter groups of each optimizer, with names.
        rest: what is neither weights nor optimizer states.
    """

    path: Path
    forms: dict[Keys, Form]
    read: Callable[[Mapping[Keys, Any]], dict[Keys, Any]]
    groups: Sequence[Any] = ()
    rest: Mapping[str, Any] | None = None


def _read_metadata(folder: Path, needed: Sequence[str] = (".metadata", _META)) -> Metadata:
    """Return what DCP knows about a folder, having checked that all of it is there."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no checkpoint folder {folder}.")
    if missing := [name for name in needed if not (folder / name).is_file()]:
        kind = "was not saved to its end" if list(folder.glob("*.distcp")) else "is no checkpoint"
        raise ValueError(f"{folder} {kind}: `{missing[0]}` is missing. Use another checkpoint.")
    metadata = FileSystemReader(folder).read_metadata()
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for info in metadata.storage_data.values():
        if sizes.get(info.relative_path, -1) < info.offset + info.length:
            raise ValueError(
                f"{folder} is incomplete: `{info.relative_path}` is missing or cut short. Use "
                "another checkpoint, and save to a file system that all ranks share."
            )
    return metadata


def _open_folder(folder: Path, rest: Mapping[str, Any] | None = None) -> _Source:
    """Open a folder of shards."""
    metadata = _read_metadata(folder)
    flat_names: dict[Keys, str] = {keys: name for name, keys in metadata.planner_data.items()}
    forms: dict[Keys, Form] = {}
    for keys, name in flat_names.items():
        md: Any = metadata.state_dict_metadata[name]
        forms[keys] = (tuple(md.size), md.properties.dtype) if hasattr(md, "size") else None

    def read(room: Mapping[Keys, Any]) -> dict[Keys, Any]:
        flat = {flat_names[keys]: value for keys, value in room.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")
            try:  # each rank alone: ranks need nothing from each other to read what they hold
                state_dict_loader.load(flat, storage_reader=FileSystemReader(folder), no_dist=True)
            except CheckpointException as error:
                raise error.failures[0][0] from None
        return {keys: flat[flat_names[keys]] for keys in room}

    found = {keys: _blank(f) for keys, f in forms.items() if keys[1:2] == ("param_groups",)}
    states = _nest(read(found))
    groups: list[Any] = []
    while (label := f"optimizer_{len(groups)}") in states:
        groups.append(states[label]["param_groups"])
    return _Source(folder, forms, read, groups, rest)


def _open_values(path: Path, checkpoint: Mapping[str, Any], names: Sequence[Names]) -> _Source:
    """Open what `_load` has read from a file; ``names`` are those of the optimizers' parameters."""
    rest = dict(checkpoint)
    wholes: dict[Keys, Any] = {
        ("state_dict", _plain(name)): value for name, value in rest.pop("state_dict").items()
    }
    groups: list[Any] = []
    for saved, own in zip(rest.pop("optimizer_states", ()), names, strict=False):
        named = _named(path, saved, own)
        wholes.update(_flatten((f"optimizer_{len(groups)}", "state"), named["state"]))
        groups.append(named["param_groups"])
    # Copied, for a file that is overwritten while it is mapped kills the process that looks at it.
    return _open_wholes(path, wholes, groups, deepcopy(rest))


def _open_wholes(
    path: Path,
    wholes: Mapping[Keys, Any],
    groups: Sequence[Any] = (),
    rest: Mapping[str, Any] | None = None,
) -> _Source:
    """Open whole tensors and slices of safetensors."""

    def read(room: Mapping[Keys, Any]) -> dict[Keys, Any]:
        return {
            keys: wholes[keys] if target is None else _fill(target, wholes[keys])
            for keys, target in room.items()
        }

    forms: dict[Keys, Form] = {}
    for keys, whole in wholes.items():
        if isinstance(whole, Tensor):
            forms[keys] = tuple(whole.shape), whole.dtype
        else:
            forms[keys] = (tuple(whole.get_shape()), None) if hasattr(whole, "get_shape") else None
    return _Source(path, forms, read, groups, rest)


def _open_safetensors(source: Path, files: Sequence[Path]) -> _Source:
    """Open safetensors files."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(f"Reading {source} needs `pip install safetensors`.") from error
    wholes: dict[Keys, Any] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118  it is no dict
            part = opened.get_slice(name)
            whole = part if part.get_shape() else opened.get_tensor(name)
            wholes["state_dict", _plain(name)] = whole
    return _open_wholes(source, wholes)


def _load(file: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a file of torch.save, mapped into memory where its format allows."""
    if not file.is_file():
        raise FileNotFoundError(f"There is no checkpoint file {file}.")
    try:
        return dict(
            torch.load(
                file, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(file)
            )
        )
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{file} holds objects that are not read by default, for a pickle can run any code. "
            "If you trust the file, pass `weights_only=False` to `trainer.fit`, `validate`, `test` "
            "or `predict`, or allow the classes with `torch.serialization.add_safe_globals([...])`."
            f" torch says: {error}"
        ) from error


def _named(path: Path, saved: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return a plain optimizer's state by name: integer ids stand for the parameters in order."""
    there = [group["params"] for group in saved["param_groups"]]
    if any(isinstance(key, str) for key in chain.from_iterable(there)):
        return _renamed(saved, [[_plain(key) for key in group] for group in there])
    sizes, own = [len(group) for group in there], [len(group) for group in names]
    if sizes != own:
        raise ValueError(
            f"The optimizer in {path} has groups of {sizes} parameters, without names; this one "
            f"has {own}. Load a checkpoint folder, which has names, or only the weights."
        )
    return _renamed(saved, names)


def _flatten(keys: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    """Give each value in dicts and lists with the keys that lead to it."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flatten((*keys, key), item)
    else:
        yield keys, value


def _nest(values: Mapping[Keys, Any]) -> Any:
    """Put values back to where their keys lead, in dicts and lists."""
    if () in values:
        return values[()]
    inner: dict[Any, dict[Keys, Any]] = {}
    for (key, *others), value in values.items():
        inner.setdefault(key, {})[tuple(others)] = value
    nested = {key: _nest(part) for key, part in inner.items()}
    if nested and all(isinstance(key, int) for key in nested):
        return [item for _, item in sorted(nested.items())]
    return nested


def _blank(form: Form) -> Tensor | None:
    """Return room for a value on the CPU."""
    return None if form is None else torch.empty(form[0], dtype=form[1])


def _blank_like(param: Tensor, form: Form) -> Tensor | None:
    """Return room for a value of an optimizer: sharded as ``param`` if it has the same shape."""
    if form is None or not form[0]:
        return _blank(form)
    if form[0] == tuple(param.shape):
        return torch.empty_like(param, dtype=form[1], requires_grad=False)
    whole = torch.empty(form[0], dtype=form[1])
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        return distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    return whole


@torch.no_grad()
def _fill(target: Tensor, whole: Any) -> Tensor:
    """Copy this rank's part of a whole tensor, or of a slice of safetensors, into ``target``."""
    if not isinstance(target, DTensor):
        return target.copy_(whole[:] if target.ndim else whole)
    local = target.to_local()
    if all(type(placement) in (Shard, Replicate) for placement in target.placements):
        (chunk,) = target.__create_chunk_list__()  # type: ignore[no-untyped-call]
        part = [slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if local.numel():
            local.copy_(whole[tuple(part)] if part else whole)
    else:  # the shards of FSDP over tensor parallelism need not be one block
        mesh, placements = target.device_mesh, target.placements
        local.copy_(distribute_tensor(whole[:], mesh, placements, src_data_rank=None).to_local())
    return target


# --- Loading --------------------------------------------------------------------------------------


def load_folder(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    folder: Path,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load a folder of shards, ours or Lightning's, into a model and its optimizers. Collective.

    Args:
        model: on any number of ranks and any mesh, or plain.
        optimizers: in the order in which they were saved; none to load the model alone.
        folder: the checkpoint.
        strict: refuse keys that are missing or unexpected; otherwise what is missing stays as it
            is, the optimizer's state included.
        weights_only: as for ``torch.load``, for `meta.pt`. The index of the shards is a pickle in
            any case: load folders that you trust.

    Returns:
        What `save_folder` was given as ``meta``.
    """
    folder = find_folder(folder)

    def source(_: Sequence[Names]) -> _Source:
        return _open_folder(folder, _load(folder / _META, weights_only))

    return _load_into(model, optimizers, source, folder, _LOOSE if strict else None)


def load_file(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    file: Path,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load a file of a plain Trainer, or of ours, into a model and its optimizers. Collective.

    Each rank maps the file into memory and copies the parts that it holds, so all ranks must see
    the file.

    Args:
        model: on any number of ranks and any mesh, or plain.
        optimizers: in the order in which they were saved; none to load the model alone.
        file: holds ``state_dict`` and ``optimizer_states``, by integer ids or by names.
        strict: as for `load_folder`.
        weights_only: as for ``torch.load``.

    Returns:
        The rest of the checkpoint.
    """
    file = find_folder(file)

    def source(names: Sequence[Names]) -> _Source:
        if file.is_dir():
            _read_metadata(file)  # says what is wrong with it
        checkpoint = _load(file, weights_only)
        if "state_dict" not in checkpoint:
            raise ValueError(f"{file} is no Lightning checkpoint: it has no `state_dict`.")
        return _open_values(file, checkpoint, names)

    return _load_into(model, optimizers, source, file, _LOOSE if strict else None)


def load_weights(
    module: nn.Module,
    source: Path,
    *,
    strict: bool = True,
    prefix: str = "",
    weights_only: bool | None = None,
) -> None:
    """Load weights alone, on each rank the parts that it holds, cast to its dtypes. Collective.

    Args:
        module: its parameters may be DTensors.
        source: a checkpoint folder, a file of ``torch.save`` (a state dict, or a checkpoint that
            holds one), a safetensors file, or a Hugging Face folder of safetensors.
        strict: refuse keys that are missing or unexpected.
        prefix: what stands before the module's own names in ``source``; others are ignored.
        weights_only: as for ``torch.load``.
    """
    path = find_folder(source)

    def weights(_: Sequence[Names]) -> _Source:
        if is_checkpoint_folder(path):
            return _open_folder(path)
        index = path / "model.safetensors.index.json"
        if index.is_file():
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return _open_safetensors(path, [path / part for part in parts])
        file = path / "model.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"{path} holds no weights. Give a checkpoint folder, a Hugging Face folder of "
                "safetensors, or a .safetensors, .ckpt, .pt, .pth or .bin file."
            )
        if file.suffix == ".safetensors":
            return _open_safetensors(path, [file])
        loaded = _load(file, weights_only)
        return _open_values(file, loaded if "state_dict" in loaded else {"state_dict": loaded}, ())

    cure = "Pass strict=False to leave what is missing as it is." if strict else None
    _load_into(module, (), weights, path, cure, prefix)


def _load_into(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    open_source: Callable[[Sequence[Names]], _Source],
    path: Path,
    cure: str | None,
    prefix: str = "",
) -> dict[str, Any]:
    """Open a checkpoint, see whether it fits, load it, and return the rest of it.

    ``cure`` says what to do if keys differ; None allows it.
    """
    entries = _entries(module)
    names = [_param_names(entries, optimizer) for optimizer in optimizers]
    failure = f"{path} was not loaded."
    source = _together(lambda: open_source(names), failure, _MEANT_FOR_USERS)
    _check_fit(source, entries, names, prefix, cure)
    params = {name: param for param, name in entries.params.items()}
    labels = [f"optimizer_{index}" for index in range(len(optimizers))]
    room: dict[Keys, Any] = {}
    for keys, form in source.forms.items():
        if keys[0] == "state_dict":
            name = str(keys[1]).removeprefix(prefix)
            if name in entries.values and str(keys[1]).startswith(prefix):
                value = entries.values[name]
                room[keys] = value if isinstance(value, Tensor) else _blank(form)
        elif keys[0] in labels and keys[1] == "state" and keys[2] in params:
            room[keys] = _blank_like(params[str(keys[2])], form)
    read = _nest(_together(lambda: source.read(room), failure))
    # Tensors are in place by now; this is for hooks, and for what is no tensor.
    loaded = {
        name.removeprefix(prefix): value for name, value in read.get("state_dict", {}).items()
    }
    own = {entries.own_names[name]: value for name, value in loaded.items()}
    module.load_state_dict(own, strict=False)
    for label, optimizer, its_names, groups in zip(
        labels, optimizers, names, source.groups, strict=False
    ):
        _restore(optimizer, its_names, read.get(label, {}).get("state", {}), groups)
    return dict(source.rest or {})


def _check_fit(
    source: _Source, entries: _Entries, optimizers: Sequence[Names], prefix: str, cure: str | None
) -> None:
    """Compare a checkpoint with a model and the names of its optimizers' parameters."""
    found: dict[str, Form] = {}
    for keys, form in source.forms.items():
        if keys[0] == "state_dict" and str(keys[1]).startswith(prefix):
            found[str(keys[1]).removeprefix(prefix)] = form if len(keys) == 2 else None
    for name, form in found.items():
        value = entries.values.get(name)
        if form and isinstance(value, Tensor) and form[0] != tuple(value.shape):
            raise ValueError(
                f"`{name}` has shape {form[0]} in {source.path} and {tuple(value.shape)} in the "
                "model. Build the model as it was when the checkpoint was saved."
            )
    # A tied weight needs one of its names only; an empty extra state is nowhere in a folder.
    there = {entries.twins.get(name, name) for name in found}
    missing = [
        name
        for name, value in entries.values.items()
        if entries.twins.get(name, name) not in there and (isinstance(value, Tensor) or value)
    ]
    unexpected = [name for name in found if name not in entries.values]
    for index, names in enumerate(optimizers):
        groups = source.groups[index] if index < len(source.groups) else ()
        own, saved = set(chain.from_iterable(names)), {n for g in groups for n in g["params"]}
        missing += [f"optimizer {index}: {name}" for name in sorted(own - saved)]
        unexpected += [f"optimizer {index}: {name}" for name in sorted(saved - own)]
    parts = [
        f"{len(some)} {kind} ({', '.join(some[:5])}{', ...' if len(some) > 5 else ''})"
        for kind, some in (("missing", missing), ("unexpected", unexpected))
        if some
    ]
    if cure is not None and parts:
        raise ValueError(f"The keys of {source.path} do not fit: {' and '.join(parts)}. {cure}")


def _restore(optimizer: Optimizer, names: Names, states: Mapping[str, Any], saved: Any) -> None:
    """Give an optimizer the saved state of the parameters that it has; others keep theirs."""
    present = optimizer.state_dict()
    home = {name: group for group in saved for name in group["params"]}
    state = {}
    groups = []
    for group, its_names in zip(present["param_groups"], names, strict=True):
        known: dict[str, Any] = next((home[name] for name in its_names if name in home), {})
        own = {key: group[key] for key in ("params", "param_names") if key in group}
        groups.append({**group, **{k: v for k, v in known.items() if k != "param_names"}, **own})
        for index, name in zip(group["params"], its_names, strict=True):
            if name in states:
                state[index] = states[name]
            elif name not in home and index in present["state"]:
                state[index] = present["state"][index]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# --- Consolidating --------------------------------------------------------------------------------


def consolidate(folder: Path, out: Path, *, overwrite: bool = False) -> None:
    """Turn a checkpoint folder into the single file of a plain Trainer.

    The file resumes on one device and loads with ``load_from_checkpoint``. No process group is
    needed; the whole checkpoint must fit into memory.

    Args:
        folder: a checkpoint that you trust: it holds pickles.
        out: the file to write.
        overwrite: replace ``out`` if it exists.
    """
    if out.is_dir() or (out.exists() and not overwrite):
        cure = "Give the name of a file." if out.is_dir() else "Remove it, or allow overwriting."
        raise FileExistsError(f"{out} exists already. {cure}")
    folder = find_folder(folder)
    source = _open_folder(folder)
    meta = _load(folder / _META, weights_only=False)
    nested = _nest(source.read({keys: _blank(form) for keys, form in source.forms.items()}))
    states = []
    for index, groups in enumerate(source.groups):
        ids = iter(range(sum(len(group["params"]) for group in groups)))
        numbers = [[next(ids) for _ in group["params"]] for group in groups]
        saved = {"state": nested[f"optimizer_{index}"].get("state", {}), "param_groups": groups}
        states.append(_renamed(saved, numbers))
    checkpoint = {**meta, "state_dict": nested["state_dict"]}
    if states or "lr_schedulers" in meta:  # save_weights_only=True leaves both out
        checkpoint["optimizer_states"] = states
    temporary = out.with_name(f".{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        _save_file(checkpoint, temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
