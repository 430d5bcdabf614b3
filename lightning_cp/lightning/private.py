# SPDX-License-Identifier: Apache-2.0
"""Private names of Lightning, and of torchmetrics, which it brings.

Checked with Lightning 2.6. Each function names what it relies on and why no public name serves;
where a name is gone it raises before anything runs. No other module uses private names of Lightning
(tests/tools/test_private_names.py), but for the methods that the strategy overrides.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_cp.patch import Patch, require

_LIBRARY = "lightning"


def connect(environment: ClusterEnvironment, backend: str, **options: Any) -> None:
    """Create the default process group (`_init_dist_connection`), as Lightning's strategies do.

    `Strategy.setup_environment` passes neither a store nor a device.
    """
    if not dist.is_initialized():
        _init_dist_connection(environment, backend, **options)


def set_device(model: nn.Module, device: torch.device) -> None:
    """Set the device that modules of Lightning report (`_update_properties`), and move nothing."""
    _update_properties(model, device=device)


def move_states(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the states of optimizers to a device (`_optimizers_to_device`)."""
    _optimizers_to_device(optimizers, device)


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Set `LightningModule.device_mesh` (`_device_mesh`), which has no setter."""
    require(module, "_device_mesh", library=_LIBRARY, use="LightningModule.device_mesh")
    module._device_mesh = mesh


def answer_sigterm(
    trainer: Trainer, notify: Callable[[int, object], None], agree: Callable[[], None]
) -> list[Patch]:
    """Replace what a SIGTERM does (`_sigterm_notifier_fn`, `_broadcast_sigterm_tensor`).

    Args:
        trainer: the Trainer.
        notify: is called by the signal.
        agree: is called before each batch, on all ranks.
    """
    connector, loop = _signal_connector(trainer), trainer.fit_loop.epoch_loop
    for owner, name in ((connector, "_sigterm_notifier_fn"), (loop, "_broadcast_sigterm_tensor")):
        require(owner, name, library=_LIBRARY, use="a SIGTERM of one rank stops all")
    return [
        Patch(connector, "_sigterm_notifier_fn", notify),
        Patch(loop, "_broadcast_sigterm_tensor", agree),
    ]


def note_sigterm(trainer: Trainer) -> None:
    """Set `Trainer.received_sigterm` (`_signal_connector`), which has no setter."""
    connector = _signal_connector(trainer)
    require(connector, "received_sigterm", library=_LIBRARY, use="a SIGTERM of one rank stops all")
    connector.received_sigterm = True


def _signal_connector(trainer: Trainer) -> Any:
    require(trainer, "_signal_connector", library=_LIBRARY, use="a SIGTERM of one rank stops all")
    return trainer._signal_connector


@contextmanager
def around_hooks(plugin: Precision, around: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Call ``around`` with the hooks between closure and update (`Precision._after_closure`).

    Lightning calls them inside `Optimizer.step`.
    """
    use = "hooks and clipping see whole gradients"
    require(plugin, "_after_closure", library=_LIBRARY, use=use)
    original = plugin._after_closure

    def after_closure(*args: Any, **kwargs: Any) -> None:
        around(lambda: original(*args, **kwargs))

    with Patch(plugin, "_after_closure", after_closure):
        yield


def average_of(callback: Callback) -> nn.Module | None:
    """Return the averaged model of a callback of Lightning (`_average_model`)."""
    if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
        return None
    require(callback, "_average_model", library=_LIBRARY, use="averages are sharded as the model")
    average: nn.Module | None = callback._average_model
    return average


def clear_schedulers(callback: StochasticWeightAveraging, trainer: Trainer) -> None:
    """Remove the schedulers that SWA replaces (`_clear_schedulers`)."""
    callback._clear_schedulers(trainer)


def draws_graph(logger: object) -> bool:
    """Return whether a logger draws the graph of the model (`TensorBoardLogger._log_graph`)."""
    if not isinstance(logger, TensorBoardLogger):
        return False
    require(logger, "_log_graph", library=_LIBRARY, use="graphs that would hang are refused")
    return bool(logger._log_graph)


def loop_results(loops: Iterable[Any]) -> list[Any]:
    """Return the collections in which loops keep logged values (`_results`)."""
    loops = list(loops)
    for loop in loops:
        require(loop, "_results", library=_LIBRARY, use="values that hooks log are compared")
    return [loop._results for loop in loops]


def value_of_step(metric: Metric) -> Any:
    """Return the value of a metric for the last batch (`Metric._forward_cache`); None if none."""
    require(metric, "_forward_cache", library="torchmetrics", use="logged metrics are compared")
    return metric._forward_cache


def saves_within_epochs(callback: object) -> bool:
    """Return whether a `ModelCheckpoint` saves more than once an epoch.

    Its `_every_n_train_steps` and `_train_time_interval`, of which no public names exist.
    """
    if not isinstance(callback, ModelCheckpoint):
        return False
    for name in ("_every_n_train_steps", "_train_time_interval"):
        require(callback, name, library=_LIBRARY, use="names of checkpoints are checked")
    return callback._every_n_train_steps > 0 or callback._train_time_interval is not None


def requested_weights_only() -> bool | None:
    """Return the ``weights_only`` of `Trainer.fit`, read from the frame of `Trainer._run`.

    Lightning 2.6 drops it for strategies that restore after setup: `Trainer._run` calls
    `_restore_modules_and_callbacks(ckpt_path)` without it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            weights_only: bool | None = frame.f_locals.get("weights_only")
            return weights_only
        frame = frame.f_back
    return None
