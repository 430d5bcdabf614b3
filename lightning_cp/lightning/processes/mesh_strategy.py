# SPDX-License-Identifier: Apache-2.0
"""The part of the strategy that launches processes and builds the mesh (data, context, tensor).

Knows launchers, devices and nodes; nothing about models or batches.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_cp.comm.error_report import quote_uncaught_errors
from lightning_cp.comm.mesh import (
    CONTEXT_AXIS,
    DATA_AXIS,
    ContextSize,
    Meshes,
    Sizes,
    build_hybrid_mesh,
    build_mesh,
    resolve_shard_size,
    resolve_sizes,
)
from lightning_cp.comm.rendezvous import agent_store
from lightning_cp.comm.watchdog import Watchdog
from lightning_cp.config import TENSOR_AXIS, Config
from lightning_cp.lightning import private
from lightning_cp.lightning.processes import interruption
from lightning_cp.lightning.processes.launch import (
    check_heartbeat_timeout,
    check_precision,
    warn_if_spread,
)
from lightning_cp.parallel import ContextParallel, groups_of
from lightning_cp.private.groups import delay_exit_for_gloo


class MeshStrategy(ModelParallelStrategy):
    """Connects one process per device as a mesh of data, context and tensor ranks.

    Args:
        context_parallel_size: number of ranks that share each sequence, see the subclass.
        data_parallel_size: number of groups that receive different batches.
        tensor_parallel_size: number of ranks that share the weights of each layer.
        config: of the run.
        heartbeat_timeout: how long a rank may be silent, see `Watchdog`.
        lightning_options: arguments of Lightning's `ModelParallelStrategy`.
    """

    def __init__(
        self,
        context_parallel_size: ContextSize,
        data_parallel_size: int | Literal["auto"],
        *,
        tensor_parallel_size: int = 1,
        config: Config,
        heartbeat_timeout: timedelta,
        **lightning_options: Any,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=config.checkpoints.distributed,
            **lightning_options,
        )
        check_heartbeat_timeout(heartbeat_timeout)
        self._heartbeat_timeout = heartbeat_timeout
        self._watchdog: Watchdog | None = None
        self._detach_watchdog: Callable[[], None] | None = None
        self._context_parallel_size = context_parallel_size
        self._config = config
        # The ranks that hold the shards of one copy; None for all of data x context.
        self._shard_size: int | Literal["auto"] | None = None
        if config.parameters.sharding == "hybrid":
            self._shard_size = config.parameters.shard_size
        self._meshes: Meshes | None = None
        self._shard_mesh: DeviceMesh | None = None
        self._tensor_mesh: DeviceMesh | None = None
        self._context_parallel: ContextParallel | None = None

    @property
    def context_parallel(self) -> ContextParallel:
        """Return the object that opens steps, for `position_ids()`, `unshard()`, `paused()`."""
        if self._context_parallel is None:
            raise RuntimeError(
                "strategy.context_parallel is available once processes have started: use it in "
                "configure_model(), setup() or later."
            )
        return self._context_parallel

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Return the mesh for `fully_shard`: data x context as one axis.

        With hybrid sharding it has two: `fully_shard` replicates over the first, and shards over
        the second.
        """
        if self._shard_mesh is None:
            raise RuntimeError(
                "strategy.shard_mesh is available once processes have started: use it in "
                "configure_model() or later."
            )
        return self._shard_mesh

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """Return the mesh for `parallelize_module`: the ranks that share the weights of a layer.

        With hybrid sharding it is not an axis of ``device_mesh``, but of the mesh of `shard_mesh`.
        """
        if self._tensor_mesh is None:
            raise RuntimeError(
                "strategy.tensor_mesh is available once processes have started: use it in "
                "configure_model() or later."
            )
        return self._tensor_mesh

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of ranks that share the weights of each layer."""
        return int(self.device_mesh[TENSOR_AXIS].size())

    @property
    def context_parallel_size(self) -> int:
        """Return the number of ranks that share each sequence."""
        return int(self.device_mesh[CONTEXT_AXIS].size())

    @property
    def context_parallel_rank(self) -> int:
        """Return the index of this rank among them."""
        return int(self.device_mesh[CONTEXT_AXIS].get_local_rank())

    @property
    def data_parallel_size(self) -> int:
        """Return the number of data ranks: the replicas of an iterable dataset."""
        return int(self.device_mesh[DATA_AXIS].size())

    @property
    def data_parallel_rank(self) -> int:
        """Return the index of this data rank: shard an iterable dataset by it."""
        return int(self.device_mesh[DATA_AXIS].get_local_rank())

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of data ranks, for metrics that context ranks update alike."""
        return self.device_mesh[DATA_AXIS].get_group()

    @property
    @override
    def root_device(self) -> torch.device:
        """Return the device of this process."""
        devices = self.parallel_devices or []
        if self.local_rank >= len(devices):
            raise ValueError(
                f"Process {self.local_rank} of this node has no device: the launcher started more "
                f"processes than Trainer(devices={len(devices)}) has devices. Set devices to the "
                "number of processes per node (torchrun --nproc-per-node)."
            )
        return devices[self.local_rank]

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is not None:  # raise before processes are started
            self._resolve_sizes(self.num_nodes * self.num_processes)
            self._resolve_shard_size(self.num_nodes * self.num_processes)

    @override
    def setup_environment(self) -> None:
        """Connect the processes and build the mesh."""
        quote_uncaught_errors()
        assert self.accelerator is not None  # noqa: S101
        self.accelerator.setup_device(self.root_device)
        expected = self.num_nodes * self.num_processes
        if self.world_size != expected:
            raise ValueError(
                f"The launcher started {self.world_size} processes, but Trainer(devices="
                f"{self.num_processes}, num_nodes={self.num_nodes}) requires {expected}. Start "
                f"{expected} processes, or change devices and num_nodes."
            )
        sizes = self._resolve_sizes(self.world_size)
        check_precision(self.precision_plugin.precision, type(self).__name__)
        self._setup_distributed()
        self._start_watchdog()
        if "gloo" in str(self.process_group_backend):
            delay_exit_for_gloo()
        if self._device_mesh is None:
            self._meshes = build_mesh(
                sizes, device_type=self.root_device.type, timeout=self._timeout
            )
            self._device_mesh = self._meshes.axes
            self._build_shard_mesh()
            config = self._config
            if sizes.ulysses > 1:
                attention = replace(config.attention, ulysses_size=sizes.ulysses)
                config = replace(config, attention=attention)
            groups = groups_of(
                config,
                self._device_mesh[CONTEXT_AXIS],
                self._device_mesh[DATA_AXIS],
                tensor=self._device_mesh[TENSOR_AXIS],
                timeout=self._timeout,
            )
            self._context_parallel = ContextParallel.of(groups, config)
            warn_if_spread(
                sizes,
                self._ranks(),
                node_rank=self.node_rank,
                ranks_per_node=self.num_processes,
            )
        private.set_device_mesh(self._module(), self._device_mesh)

    @override
    def _setup_distributed(self) -> None:
        """Connect the processes, as Lightning does, but so that torchrun can restart them."""
        assert self.cluster_environment is not None  # noqa: S101
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        on_cpu = self.root_device.type == "cpu"
        options: dict[str, Any] = {
            "timeout": self._timeout,
            "device_id": None if on_cpu else self.root_device,
        }
        if not dist.is_initialized():
            limit = self._timeout or default_pg_timeout
            store = agent_store(self.global_rank, self.world_size, limit)
            options |= {} if store is None else {"store": store}
        private.connect(self.cluster_environment, self._process_group_backend, **options)

    def _start_watchdog(self) -> None:
        self._stop_watchdog()  # of a run that was never torn down
        limit = self._heartbeat_timeout
        self._watchdog = Watchdog.of_job(self.global_rank, self.world_size, limit)
        if self._watchdog is not None:
            self._detach_watchdog = interruption.attach(self._trainer(), self._watchdog)

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        if self._detach_watchdog is not None:
            self._detach_watchdog()
        self._watchdog = self._detach_watchdog = None

    @override
    def teardown(self) -> None:
        """Stop the watchdog, last: others may still fail."""
        try:
            super().teardown()
        finally:
            self._stop_watchdog()

    def _resolve_sizes(self, world_size: int) -> Sizes:
        return resolve_sizes(
            self._context_parallel_size,
            self._data_parallel_size,
            int(self._tensor_parallel_size),
            world_size=world_size,
            ranks_per_node=self.num_processes,
        )

    def _resolve_shard_size(self, world_size: int) -> int:
        """Return the number of ranks of data x context that hold the shards of one copy."""
        tensor = self._resolve_sizes(world_size).tensor
        if self._shard_size is None:
            return world_size // tensor
        return resolve_shard_size(
            self._shard_size,
            world_size=world_size // tensor,
            ranks_per_node=max(1, self.num_processes // tensor),
        )

    def _set_shard_size(self, shard_size: int | Literal["auto"] | None) -> None:
        """Build the mesh of another size, if it is another. Collective."""
        if shard_size != self._shard_size:
            self._shard_size = shard_size
            self._build_shard_mesh()

    def _build_shard_mesh(self) -> None:
        """Build the mesh over which parameters are sharded. Collective."""
        assert self._meshes is not None  # noqa: S101
        size = self._resolve_shard_size(self.world_size)
        self._shard_mesh, self._tensor_mesh = build_hybrid_mesh(self._meshes, size, self._timeout)

    def _ranks(self) -> DeviceMesh:
        """Return all ranks as one axis, for collectives of all of them."""
        assert self._meshes is not None  # noqa: S101
        return self._meshes.ranks

    def _trainer(self) -> Trainer:
        return self._module().trainer

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None  # noqa: S101
        return self.lightning_module
