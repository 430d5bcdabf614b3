# SPDX-License-Identifier: Apache-2.0
"""Weight averaging (SWA, EMA) of a sharded model: each rank averages its shards.

Lightning's callbacks copy the LightningModule in `setup`, before the strategy shards it, and later
iterate over the parameters of both in parallel. So copies are sharded like the model, modules that
are sharded already can be copied, and the model is resharded before callbacks read its parameters.
Written for Lightning 2.6 and `torch.optim.swa_utils`.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from lightning_cp.checkpoint.load import accept_full_tensors
from lightning_cp.fsdp.sharding import reshard
from lightning_cp.lightning import private
from lightning_cp.private.fsdp2 import without_fsdp
from lightning_cp.private.modules import own_parts

Undo = Callable[[], None]


def allow_copies(module: nn.Module) -> Undo:
    """Let ``deepcopy`` of a module copy its shards, which FSDP2 does not support.

    The copy has the classes and the parameters (DTensors) only. It can be averaged into, saved and
    loaded, but not called.
    """
    _allow(module)
    return lambda: _forbid_copies(module)


def _allow(module: nn.Module) -> None:
    for part in module.modules():
        if part is module or isinstance(part, FSDPModule):
            part.__dict__["__deepcopy__"] = partial(_copy, part)


def _forbid_copies(module: nn.Module) -> None:
    for part in module.modules():
        part.__dict__.pop("__deepcopy__", None)


def _copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module as ``deepcopy`` copies a module without FSDP2."""
    reshard(module)
    _allow(module)  # modules that configure_model() has sharded since
    cls: type[nn.Module] = type(module)
    if isinstance(module, FSDPModule):  # fully_shard has derived a class from FSDPModule and this
        cls = cls.__bases__[1]
    copy = cls.__new__(cls)
    memo[id(module)] = copy
    state: Any = module.__reduce_ex__(4)[2]  # a LightningModule removes its trainer here
    state = {k: v for k, v in without_fsdp(state).items() if k != "__deepcopy__"}
    copy.__setstate__(deepcopy(state, memo))  # type: ignore[no-untyped-call]
    for part in copy.modules():  # submodules that are not FSDPModules have its hooks, too
        part.__dict__.update(without_fsdp(part.__dict__))
    return copy


def shard_averages(trainer: Trainer, module: LightningModule) -> list[Undo]:
    """Shard the averaged models of callbacks like the model.

    Args:
        trainer: the Trainer with the callbacks.
        module: the model, sharded.

    Returns:
        Functions that undo everything but the sharding.
    """
    reshard_first = _Reshard(module)
    callbacks = _callbacks(trainer)
    callbacks.insert(0, reshard_first)
    undos: list[Undo] = [lambda: callbacks.remove(reshard_first)]
    undos += [allow_copies(module), accept_full_tensors(module)]
    for callback in callbacks:
        for average in averages_of(callback):
            copy = average.module if isinstance(average, AveragedModel) else average
            model = _find_original(module, copy)
            if model is None:
                _check_other_model(callback, module, copy)
                continue
            _shard_like(copy, model)
            undos.append(accept_full_tensors(average))
            if isinstance(average, AveragedModel):
                undos.append(accept_full_tensors(average.module))
                _separate_dtensors(average, module.device)
    return undos


def averages_of(callback: Callback) -> Iterator[nn.Module]:
    """Yield the averaged models that a callback of Lightning or of the user holds."""
    average = private.average_of(callback)
    others = (value for value in vars(callback).values() if isinstance(value, AveragedModel))
    yield from dict.fromkeys([*([] if average is None else [average]), *others])


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in module.named_parameters(remove_duplicate=False)}


def _find_original(module: LightningModule, copy: nn.Module) -> nn.Module | None:
    """Return the module of which ``copy`` is a copy: the LightningModule or a submodule."""
    shapes = _shapes(copy)
    return next((part for part in module.modules() if shapes and _shapes(part) == shapes), None)


def _check_other_model(callback: Callback, module: LightningModule, copy: nn.Module) -> None:
    """Raise if a callback of Lightning holds a model that is not a copy of ours."""
    if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
        return  # a callback of the user may average another model
    changed = sorted(_shapes(module).keys() ^ _shapes(copy).keys())
    raise ValueError(
        f"{type(callback).__name__} has copied the LightningModule in its setup(), and the model "
        f"has changed since: {', '.join(f'`{name}`' for name in changed[:3])}. It would average "
        "the wrong weights, or none. Build the model in __init__(), or use WeightAveraging, which "
        "calls configure_model(), with a configure_model() that builds the model once."
    )


@torch.no_grad()
def _shard_like(copy: nn.Module, model: nn.Module) -> None:
    """Replace each parameter of a copy by one that is sharded as the model's, with its values."""
    done: dict[Tensor, nn.Parameter] = {}
    copies = dict(copy.named_modules(remove_duplicate=False))
    for path, part in model.named_modules(remove_duplicate=False):
        part_copy = copies[path]
        (buffers, parameters, _), (old_buffers, old_parameters, _) = map(
            own_parts, (part, part_copy)
        )
        for name, param in parameters.items():
            old = old_parameters[name]
            if param is None or old is None or isinstance(old, DTensor):
                continue
            if old not in done:
                # Not on the meta device: an averaged model is not materialized like the model.
                device = param.device if old.is_meta else old.device
                value = param.detach().to(device=device, dtype=old.dtype, copy=True)
                done[old] = nn.Parameter(value, requires_grad=old.requires_grad)
            old_parameters[name] = done[old]
        for name, buffer in buffers.items():
            old_buffer = old_buffers.get(name)
            if buffer is not None and old_buffer is not None:
                device = buffer.device if old_buffer.is_meta else old_buffer.device
                old_buffers[name] = buffer.detach().to(
                    device=device, dtype=old_buffer.dtype, copy=True
                )


def _separate_dtensors(average: AveragedModel, device: torch.device) -> None:
    """Call a multi-tensor function separately for plain tensors and DTensors of each mesh."""
    fn = average.multi_avg_fn
    if fn is None and average.avg_fn is None and device.type == "cuda":
        fn = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]  # torch's default there
    if fn is not None and not isinstance(fn, _Separately):
        average.multi_avg_fn = _Separately(fn)


class _Separately:
    def __init__(self, fn: Callable[..., None]) -> None:
        self._fn = fn

    def __call__(self, averaged: Any, current: Any, num_averaged: Any) -> None:
        pairs: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for pair in zip(averaged, current, strict=True):
            pairs.setdefault(getattr(pair[0], "device_mesh", None), []).append(pair)
        for alike in pairs.values():
            self._fn([a for a, _ in alike], [c for _, c in alike], num_averaged)


class _Reshard(Callback):
    """The first callback: reshards what a forward without a backward has left gathered.

    FSDP2 keeps the parameters of a root unsharded until the next backward; other callbacks would
    find plain tensors among the shards.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]

    def _reshard(self, *args: Any, **kwargs: Any) -> None:
        for part in self._parts:
            part.reshard()

    on_train_batch_end = on_train_epoch_end = on_train_end = _reshard
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _reshard


def needs_weights(trainer: Trainer) -> bool:
    """Return whether a callback reads ``state_dict`` from a checkpoint that is loaded."""
    return any(
        isinstance(callback, WeightAveraging) and private.average_of(callback) is not None
        for callback in _callbacks(trainer)
    )


def clear_schedulers(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Remove schedulers before SWA's state is loaded, which creates its own at its first epoch.

    The callback does so where checkpoints are restored before `on_fit_start`; those of a sharded
    model are restored after it.
    """
    states = checkpoint.get("callbacks") or {}
    for callback in _callbacks(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            state = states.get(callback.state_key) or {}
            if state.get("scheduler_state") is not None:
                private.clear_schedulers(callback, trainer)


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
