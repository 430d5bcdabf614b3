# SPDX-License-Identifier: Apache-2.0
"""Loading of checkpoints into a model and its optimizers, on any number of ranks."""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cp.checkpoint.checksums import own_share
from lightning_cp.checkpoint.folder import find_folder, is_checkpoint_folder, read_metadata
from lightning_cp.checkpoint.source import (
    REST,
    Form,
    Keys,
    OpenedCheckpoint,
    blank,
    blank_like,
    fill,
    load_pickle,
    nest,
    open_folder,
    open_safetensors,
    open_values,
    put_values,
)
from lightning_cp.checkpoint.state import Entries, Names, param_names, plain_name, read_entries
from lightning_cp.comm.collective_errors import together

_USER_ERRORS = (ValueError, OSError, ImportError, pickle.UnpicklingError)
_NOT_STRICT = (
    "Set `strict_loading=False` on the LightningModule to leave missing keys unchanged and to "
    "ignore unexpected ones."
)


def load_folder(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    folder: Path,
    *,
    strict: bool,
    weights_only: bool | None,
    with_weights: bool = False,
) -> dict[str, Any]:
    """Load a folder of shards, ours or Lightning's, into a model and its optimizers. Collective.

    Args:
        model: on any number of ranks and any mesh, or plain.
        optimizers: in the order in which they were saved; none to load only the model.
        folder: the checkpoint.
        strict: raise for keys that are missing or unexpected; otherwise missing ones stay
            unchanged, including the optimizer's state.
        weights_only: as for ``torch.load``, for `meta.pt`. The index of the shards is always a
            pickle: load only folders that you trust.
        with_weights: return ``state_dict`` too, sharded as the model, in the saved dtypes.

    Returns:
        The ``meta`` that was passed to `save_folder`. DTensors in it are sharded like the parameter
        of the same name and shape; those without one are full.
    """
    folder = find_folder(folder)

    def source(_: Sequence[Names]) -> OpenedCheckpoint:
        return open_folder(folder, weights_only, share=own_share())

    fix = _NOT_STRICT if strict else None
    return _load_into(model, optimizers, source, folder, fix, with_weights=with_weights)


def load_file(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    file: Path,
    *,
    strict: bool,
    weights_only: bool | None,
    with_weights: bool = False,
) -> dict[str, Any]:
    """Load a file of a plain Trainer, or of ours, into a model and its optimizers. Collective.

    Each rank maps the file into memory and copies the parts that it holds, so all ranks must see
    the file.

    Args:
        model: on any number of ranks and any mesh, or plain.
        optimizers: in the order in which they were saved; none to load only the model.
        file: holds ``state_dict`` and ``optimizer_states``, by integer ids or by names.
        strict: as for `load_folder`.
        weights_only: as for ``torch.load``.
        with_weights: as for `load_folder`.

    Returns:
        The rest of the checkpoint.
    """
    file = find_folder(file)

    def source(names: Sequence[Names]) -> OpenedCheckpoint:
        if file.is_dir():
            read_metadata(file)  # raises
        checkpoint = load_pickle(file, weights_only, own_share())
        if "state_dict" not in checkpoint:
            raise ValueError(f"{file} is not a Lightning checkpoint: it has no `state_dict`.")
        return open_values(file, checkpoint, names)

    fix = _NOT_STRICT if strict else None
    return _load_into(model, optimizers, source, file, fix, with_weights=with_weights)


def load_weights(
    module: nn.Module,
    source: Path,
    *,
    strict: bool = True,
    prefix: str = "",
    weights_only: bool | None = None,
) -> None:
    """Load weights only, on each rank its shards, cast to the module's dtypes. Collective.

    Args:
        module: its parameters may be DTensors.
        source: a checkpoint folder, a file of ``torch.save`` (a state dict, or a checkpoint that
            holds one), a safetensors file, or a Hugging Face folder of safetensors.
        strict: raise for keys that are missing or unexpected.
        prefix: prefix of the module's own names in ``source``; other names are ignored.
        weights_only: as for ``torch.load``.
    """
    path = find_folder(source)

    def weights(_: Sequence[Names]) -> OpenedCheckpoint:
        if is_checkpoint_folder(path):
            return open_folder(path, weights_only, with_rest=False, share=own_share())
        index = path / "model.safetensors.index.json"
        if index.is_file():
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return open_safetensors(path, [path / part for part in parts])
        file = path / "model.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"{path} holds no weights. Pass a checkpoint folder, a Hugging Face folder of "
                "safetensors, or a .safetensors, .ckpt, .pt, .pth or .bin file."
            )
        if file.suffix == ".safetensors":
            return open_safetensors(path, [file])
        loaded = load_pickle(file, weights_only, own_share())
        return open_values(file, loaded if "state_dict" in loaded else {"state_dict": loaded}, ())

    fix = "Pass strict=False to leave missing keys unchanged." if strict else None
    _load_into(module, (), weights, path, fix, prefix)


def _load_into(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    open_source: Callable[[Sequence[Names]], OpenedCheckpoint],
    path: Path,
    fix: str | None,
    prefix: str = "",
    *,
    with_weights: bool = False,
) -> dict[str, Any]:
    """Open a checkpoint, check that it fits, load it, and return the rest of it.

    If keys differ, the error ends with ``fix``; None allows it.
    """
    entries = read_entries(module)
    names = [param_names(entries, optimizer) for optimizer in optimizers]
    failure = f"{path} was not loaded."
    source = together(lambda: open_source(names), failure, _USER_ERRORS)
    _check_fit(source, entries, names, prefix, fix)
    params = {name: param for param, name in entries.params.items()}
    labels = [f"optimizer_{index}" for index in range(len(optimizers))]
    targets: dict[Keys, Any] = {}
    for keys, form in source.forms.items():
        if keys[0] == "state_dict":
            name = str(keys[1]).removeprefix(prefix)
            if name in entries.values and str(keys[1]).startswith(prefix):
                value = entries.values[name]
                targets[keys] = value if isinstance(value, Tensor) else blank(form)
        elif keys[0] in labels and keys[1] == "state" and keys[2] in params:
            targets[keys] = blank_like(params[str(keys[2])], form)
        elif keys[0] == REST:
            targets[keys] = _target_for(str(keys[-1]).removeprefix("module."), form, entries)
    weight_copies = {
        keys: _target_for(str(keys[1]), form, entries)
        for keys, form in source.forms.items()
        if with_weights and keys[0] == "state_dict" and keys[1] in entries.values
    }
    values, weights = together(lambda: (source.read(targets), source.read(weight_copies)), failure)
    read = nest(values)
    # Tensors are loaded by now; this runs hooks, and loads other values.
    loaded = {
        name.removeprefix(prefix): value for name, value in read.get("state_dict", {}).items()
    }
    state = {entries.own_names[name]: value for name, value in loaded.items()}
    module.load_state_dict(state, strict=False)
    for label, optimizer, group_names, groups in zip(
        labels, optimizers, names, source.groups, strict=False
    ):
        _restore(optimizer, group_names, read.get(label, {}).get("state", {}), groups)
    rest = dict(source.rest or {})
    put_values(rest, values)
    if with_weights:
        saved = nest(weights).get("state_dict", {})
        rest["state_dict"] = {entries.own_names[name]: value for name, value in saved.items()}
    return rest


def _target_for(name: str, form: Form, entries: Entries) -> Tensor | None:
    """Return an empty tensor, sharded like the model's tensor of that name."""
    like = entries.values.get(plain_name(name))
    if isinstance(like, Tensor) and form is not None and form[0] == tuple(like.shape):
        return blank_like(like, form)
    return blank(form)


def accept_full_tensors(module: nn.Module) -> Callable[[], None]:
    """Let ``load_state_dict`` of a sharded module accept full tensors; each rank loads its shard.

    Names without the prefixes of torch.compile and activation checkpointing are accepted too.

    Returns:
        A function that undoes it, unless the module stays sharded.
    """
    if module.__dict__.get(_ACCEPTS_FULL):  # it has stayed sharded
        return lambda: None
    handle: Any = module.register_load_state_dict_pre_hook(_shard_state)  # type: ignore[no-untyped-call]
    module.__dict__[_ACCEPTS_FULL] = True

    def undo() -> None:
        if not any(isinstance(p, DTensor) for p in module.parameters()):
            handle.remove()
            del module.__dict__[_ACCEPTS_FULL]

    return undo


_ACCEPTS_FULL: Final = "_lightning_cp_full_tensors"
"""Attribute of a module that accepts full tensors."""


def _shard_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, target in module.state_dict().items():
        key, plain = prefix + name, prefix + plain_name(name)
        if key not in state and plain in state:
            state[key] = state.pop(plain)
        value: Any = state.get(key)
        is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if isinstance(target, DTensor) and is_full and value.shape == target.shape:
            state[key] = fill(torch.empty_like(target, dtype=value.dtype), value)


def _check_fit(
    source: OpenedCheckpoint,
    entries: Entries,
    optimizers: Sequence[Names],
    prefix: str,
    fix: str | None,
) -> None:
    """Compare a checkpoint with a model and the names of its optimizers' parameters."""
    saved_forms: dict[str, Form] = {}
    for keys, form in source.forms.items():
        if keys[0] == "state_dict" and str(keys[1]).startswith(prefix):
            saved_forms[str(keys[1]).removeprefix(prefix)] = form if len(keys) == 2 else None
    for name, form in saved_forms.items():
        value = entries.values.get(name)
        if form and isinstance(value, Tensor) and form[0] != tuple(value.shape):
            raise ValueError(
                f"`{name}` has shape {form[0]} in {source.path} and {tuple(value.shape)} in the "
                "model. Build the model as it was when the checkpoint was saved."
            )
    # A tied weight needs one of its names only; a folder does not hold empty extra states.
    saved_names = {entries.twins.get(name, name) for name in saved_forms}
    missing = [
        name
        for name, value in entries.values.items()
        if entries.twins.get(name, name) not in saved_names and (isinstance(value, Tensor) or value)
    ]
    unexpected = [name for name in saved_forms if name not in entries.values]
    for index, names in enumerate(optimizers):
        groups = source.groups[index] if index < len(source.groups) else ()
        present, saved = set(chain.from_iterable(names)), {n for g in groups for n in g["params"]}
        missing += [f"optimizer {index}: {name}" for name in sorted(present - saved)]
        unexpected += [f"optimizer {index}: {name}" for name in sorted(saved - present)]
    parts = [
        f"{len(names)} {kind} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if fix is not None and parts:
        raise ValueError(f"The keys of {source.path} do not match: {' and '.join(parts)}. {fix}")


def _restore(optimizer: Optimizer, names: Names, states: Mapping[str, Any], saved: Any) -> None:
    """Load the saved state of an optimizer's parameters; those that were not saved keep theirs."""
    present = optimizer.state_dict()
    group_of = {name: group for group in saved for name in group["params"]}
    state = {}
    groups = []
    for group, group_names in zip(present["param_groups"], names, strict=True):
        source: dict[str, Any] = next((group_of[n] for n in group_names if n in group_of), {})
        keys = {key: group[key] for key in ("params", "param_names") if key in group}
        groups.append({**group, **{k: v for k, v in source.items() if k != "param_names"}, **keys})
        for index, name in zip(group["params"], group_names, strict=True):
            if name in states:
                state[index] = states[name]
            elif name not in group_of and index in present["state"]:
                state[index] = present["state"][index]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
