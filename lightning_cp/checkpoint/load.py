# SPDX-License-Identifier: Apache-2.0
"""Loading into a model and its optimizers, on any number of ranks."""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

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
    Source,
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

_MEANT_FOR_USERS = (ValueError, OSError, ImportError, pickle.UnpicklingError)
_LOOSE = (
    "Set `strict_loading=False` on the LightningModule to leave what is missing as it is and to "
    "ignore what is unexpected."
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
        optimizers: in the order in which they were saved; none to load the model alone.
        folder: the checkpoint.
        strict: refuse keys that are missing or unexpected; otherwise what is missing stays as it
            is, the optimizer's state included.
        weights_only: as for ``torch.load``, for `meta.pt`. The index of the shards is a pickle in
            any case: load folders that you trust.
        with_weights: return ``state_dict`` too, laid out as the model, in the saved dtypes.

    Returns:
        What `save_folder` was given as ``meta``. DTensors in it are laid out like the parameter of
        the same name and shape; those without one are whole.
    """
    folder = find_folder(folder)

    def source(_: Sequence[Names]) -> Source:
        return open_folder(folder, weights_only, share=own_share())

    cure = _LOOSE if strict else None
    return _load_into(model, optimizers, source, folder, cure, with_weights=with_weights)


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
        optimizers: in the order in which they were saved; none to load the model alone.
        file: holds ``state_dict`` and ``optimizer_states``, by integer ids or by names.
        strict: as for `load_folder`.
        weights_only: as for ``torch.load``.
        with_weights: as for `load_folder`.

    Returns:
        The rest of the checkpoint.
    """
    file = find_folder(file)

    def source(names: Sequence[Names]) -> Source:
        if file.is_dir():
            read_metadata(file)  # says what is wrong with it
        checkpoint = load_pickle(file, weights_only, own_share())
        if "state_dict" not in checkpoint:
            raise ValueError(f"{file} is no Lightning checkpoint: it has no `state_dict`.")
        return open_values(file, checkpoint, names)

    cure = _LOOSE if strict else None
    return _load_into(model, optimizers, source, file, cure, with_weights=with_weights)


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

    def weights(_: Sequence[Names]) -> Source:
        if is_checkpoint_folder(path):
            return open_folder(path, weights_only, with_rest=False, share=own_share())
        index = path / "model.safetensors.index.json"
        if index.is_file():
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return open_safetensors(path, [path / part for part in parts])
        file = path / "model.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"{path} holds no weights. Give a checkpoint folder, a Hugging Face folder of "
                "safetensors, or a .safetensors, .ckpt, .pt, .pth or .bin file."
            )
        if file.suffix == ".safetensors":
            return open_safetensors(path, [file])
        loaded = load_pickle(file, weights_only, own_share())
        return open_values(file, loaded if "state_dict" in loaded else {"state_dict": loaded}, ())

    cure = "Pass strict=False to leave what is missing as it is." if strict else None
    _load_into(module, (), weights, path, cure, prefix)


def _load_into(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    open_source: Callable[[Sequence[Names]], Source],
    path: Path,
    cure: str | None,
    prefix: str = "",
    *,
    with_weights: bool = False,
) -> dict[str, Any]:
    """Open a checkpoint, see whether it fits, load it, and return the rest of it.

    ``cure`` says what to do if keys differ; None allows it.
    """
    entries = read_entries(module)
    names = [param_names(entries, optimizer) for optimizer in optimizers]
    failure = f"{path} was not loaded."
    source = together(lambda: open_source(names), failure, _MEANT_FOR_USERS)
    _check_fit(source, entries, names, prefix, cure)
    params = {name: param for param, name in entries.params.items()}
    labels = [f"optimizer_{index}" for index in range(len(optimizers))]
    room: dict[Keys, Any] = {}
    for keys, form in source.forms.items():
        if keys[0] == "state_dict":
            name = str(keys[1]).removeprefix(prefix)
            if name in entries.values and str(keys[1]).startswith(prefix):
                value = entries.values[name]
                room[keys] = value if isinstance(value, Tensor) else blank(form)
        elif keys[0] in labels and keys[1] == "state" and keys[2] in params:
            room[keys] = blank_like(params[str(keys[2])], form)
        elif keys[0] == REST:
            room[keys] = _room_for(str(keys[-1]).removeprefix("module."), form, entries)
    separate = {
        keys: _room_for(str(keys[1]), form, entries)
        for keys, form in source.forms.items()
        if with_weights and keys[0] == "state_dict" and keys[1] in entries.values
    }
    values, weights = together(lambda: (source.read(room), source.read(separate)), failure)
    read = nest(values)
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
    rest = dict(source.rest or {})
    put_values(rest, values)
    if with_weights:
        found = nest(weights).get("state_dict", {})
        rest["state_dict"] = {entries.own_names[name]: value for name, value in found.items()}
    return rest


def _room_for(name: str, form: Form, entries: Entries) -> Tensor | None:
    """Return room for a value that is laid out like the tensor of that name."""
    like = entries.values.get(plain_name(name))
    if isinstance(like, Tensor) and form is not None and form[0] == tuple(like.shape):
        return blank_like(like, form)
    return blank(form)


def accept_whole(module: nn.Module) -> Callable[[], None]:
    """Let ``load_state_dict`` of a sharded module take whole tensors; each rank keeps its part.

    Names without the marks of torch.compile and of activation checkpointing are taken too.

    Returns:
        What takes it back.
    """
    handle: Any = module.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]
    return lambda: handle.remove()


def _take_parts(module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, own in module.state_dict().items():
        key, plain = prefix + name, prefix + plain_name(name)
        if key not in given and plain in given:
            given[key] = given.pop(plain)
        value: Any = given.get(key)
        whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if isinstance(own, DTensor) and whole and value.shape == own.shape:
            given[key] = fill(torch.empty_like(own, dtype=value.dtype), value)


def _check_fit(
    source: Source, entries: Entries, optimizers: Sequence[Names], prefix: str, cure: str | None
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
