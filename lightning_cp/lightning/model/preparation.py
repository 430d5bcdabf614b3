# SPDX-License-Identifier: Apache-2.0
"""What a run does to a module before its first step, and undoes after its last.

The strategy has one `Preparation`, and calls its methods in the order in which they stand here.
Knows which options the model is prepared with; nothing about batches and steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.adapters import AdapterHandle, enable_models
from lightning_cp.config import Config, Memory, Sharding
from lightning_cp.lightning.memory.activations import prepare_layers
from lightning_cp.lightning.memory.memory_choice import RunSetup
from lightning_cp.lightning.memory.memory_plan import MemoryCheck, device_bytes
from lightning_cp.lightning.model.model_setup import (
    choose_sharding,
    place_model,
)
from lightning_cp.lightning.model.unsupported import (
    check_features,
    check_module,
    check_offload_features,
    disable_inference_mode,
)
from lightning_cp.parallel import ContextParallel


class Preparation:
    """Enables, shards and places the module of a run; restores it in the end.

    Args:
        config: of the run. A sharding that is ``auto`` is decided by `choose_sharding`.
    """

    def __init__(self, config: Config) -> None:
        self._config, self.parameters = config, config.parameters
        self._handles: list[AdapterHandle] = []
        self._mesh: DeviceMesh | None = None
        self._device: torch.device | None = None
        sharding = self.parameters.sharding
        self.is_auto = sharding == "auto"
        self.sharding: Sharding = "full" if sharding == "auto" else sharding
        self.undos: list[Callable[[], None]] = []
        """What `undo` calls, the last first: others may add what they change about a run."""

    @property
    def has_enabled(self) -> bool:
        """Return whether models of other libraries are enabled."""
        return bool(self._handles)

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise for what would fail in the middle of a run."""
        check_module(module)
        check_features(trainer)
        if self.parameters.offload:
            check_offload_features(trainer)

    def enable(self, trainer: Trainer, module: nn.Module, *, training: bool) -> None:
        """Enable models of other libraries, and prepare layers and the Trainer's loops."""
        self.undos.append(disable_inference_mode(trainer))
        self._handles += enable_models(module)
        self.prepare_layers(module, self._config.memory, training=training)

    def prepare_layers(self, module: nn.Module, memory: Memory, *, training: bool = True) -> None:
        """Prepare layers; again at the first step, where ``auto`` is decided there."""
        names = self.parameters.shard_modules
        self.undos += prepare_layers(module, memory, names, training=training)

    def choose_sharding(
        self, model: nn.Module, ranks: DeviceMesh, ranks_per_node: int, *, device: torch.device
    ) -> Literal["auto"] | None:
        """Decide what ``auto`` is, as `model_setup.choose_sharding` does. Collective.

        Returns:
            The ``shard_size`` of the mesh over which parameters are then sharded.
        """
        self.sharding = choose_sharding(
            model, ranks, ranks_per_node=ranks_per_node, device_bytes=device_bytes(device)
        )
        return "auto" if self.sharding == "hybrid" else None

    def place(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        tensor: DeviceMesh,
        device: torch.device,
        to_device: Callable[[], None],
    ) -> None:
        """Shard or replicate a model, and move it to its device; see `place_model`."""
        stop = place_model(
            model,
            mesh,
            self.parameters,
            sharding=self.sharding,
            tensor=tensor,
            device=device,
            to_device=to_device,
        )
        self.undos.append(stop)
        self._mesh, self._device = mesh, device

    def plan_memory(
        self,
        module: nn.Module,
        cp: ContextParallel,
        *,
        world_size: int,
        precision: str,
    ) -> MemoryCheck:
        """Return what plans the memory of the steps of a placed module.

        Args:
            module: the LightningModule.
            cp: opens steps.
            world_size: all ranks.
            precision: of the Trainer.
        """
        assert self._mesh is not None  # noqa: S101
        assert self._device is not None  # noqa: S101
        run = RunSetup(self._config, world_size, precision, self.sharding, self._mesh.shape[-1])
        prepare = partial(self.prepare_layers, module)
        return MemoryCheck(module, self._device, run, cp=cp, prepare=prepare)

    def undo(self) -> None:
        """Restore the module, and what others have added to `undos`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self.undos:
            self.undos.pop()()
