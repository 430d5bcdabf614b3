# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run: how many, their meshes (data, context, tensor), and what watches over them.

The strategy has one `Processes`. Knows sizes, devices and nodes; nothing about models or batches.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Literal, TypeVar

from lightning.pytorch import Trainer
from torch.distributed.device_mesh import DeviceMesh

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
from lightning_cp.comm.watchdog import Watchdog
from lightning_cp.config import TENSOR_AXIS, Config
from lightning_cp.lightning.processes import interruption
from lightning_cp.lightning.processes.launch import (
    check_heartbeat_timeout,
    check_tensor_parallel_size,
    warn_if_spread,
)
from lightning_cp.parallel import ContextParallel, groups_of

T = TypeVar("T")


class Processes:
    """The ranks of a run; their meshes and groups, once they are connected.

    Args:
        context: number of ranks that share each sequence, see the strategy.
        data: number of groups that receive different batches.
        tensor: number of ranks that share the weights of each layer.
        config: of the run.
        timeout: of the process groups.
        heartbeat_timeout: how long a rank may be silent, see `Watchdog`.
    """

    def __init__(
        self,
        context: ContextSize,
        data: int | Literal["auto"],
        tensor: int | Literal["auto"],
        *,
        config: Config,
        timeout: timedelta | None,
        heartbeat_timeout: timedelta,
    ) -> None:
        check_heartbeat_timeout(heartbeat_timeout)
        tensor = check_tensor_parallel_size(tensor, config.parameters.sharding)
        self._sizes = context, data, tensor
        self._config, self._timeout = config, timeout
        self._heartbeat_timeout = heartbeat_timeout
        # The ranks that hold the shards of one copy; None for all of data x context.
        self._shard_size: int | Literal["auto"] | None = None
        if config.parameters.sharding == "hybrid":
            self._shard_size = config.parameters.shard_size
        self._watchdog: Watchdog | None = None
        self._detach_watchdog: Callable[[], None] | None = None
        self._meshes: Meshes | None = None
        self._counts = 0, 0  # all ranks, and those of a node
        self._shard_mesh: DeviceMesh | None = None
        self._tensor_mesh: DeviceMesh | None = None
        self._context_parallel: ContextParallel | None = None

    @property
    def context_parallel(self) -> ContextParallel:
        """Return the object that opens steps."""
        return _built(self._context_parallel, "context_parallel", "configure_model(), setup()")

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Return the mesh over which parameters are sharded."""
        return _built(self._shard_mesh, "shard_mesh", "configure_model()")

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that share the weights of a layer."""
        return _built(self._tensor_mesh, "tensor_mesh", "configure_model()")

    @property
    def meshes(self) -> Meshes:
        """Return the mesh of all ranks, and what it was built from."""
        assert self._meshes is not None  # noqa: S101
        return self._meshes

    @property
    def ranks(self) -> DeviceMesh:
        """Return all ranks as one axis, for collectives of all of them."""
        return self.meshes.ranks

    def check(self, world_size: int, ranks_per_node: int) -> None:
        """Raise for sizes that so many processes cannot have, before they are started."""
        self._resolve(world_size, ranks_per_node)
        self._num_shards(world_size, ranks_per_node)

    def build(
        self, world_size: int, ranks_per_node: int, *, device_type: str, node_rank: int
    ) -> DeviceMesh:
        """Build meshes and groups of connected processes, once; return the mesh. Collective."""
        if self._meshes is not None:
            return self._meshes.axes
        sizes = self._resolve(world_size, ranks_per_node)
        self._counts = world_size, ranks_per_node
        self._meshes = build_mesh(sizes, device_type=device_type, timeout=self._timeout)
        self._build_shard_mesh()
        mesh, config = self._meshes.axes, self._config
        if sizes.ulysses > 1:
            attention = replace(config.attention, ulysses_size=sizes.ulysses)
            config = replace(config, attention=attention)
        groups = groups_of(
            config,
            mesh[CONTEXT_AXIS],
            mesh[DATA_AXIS],
            tensor=mesh[TENSOR_AXIS],
            timeout=self._timeout,
        )
        self._context_parallel = ContextParallel.of(groups, config)
        warn_if_spread(sizes, self.ranks, node_rank=node_rank, ranks_per_node=ranks_per_node)
        return mesh

    def set_shard_size(self, size: int | Literal["auto"] | None) -> None:
        """Shard parameters over another number of ranks, if it is another. Collective."""
        if size != self._shard_size:
            self._shard_size = size
            self._build_shard_mesh()

    def watch(self, trainer: Trainer, rank: int, world_size: int) -> None:
        """End this rank if another one is silent, and the run on all ranks if one is told to."""
        self.stop_watching()  # of a run that was never torn down
        self._watchdog = Watchdog.of_job(rank, world_size, self._heartbeat_timeout)
        if self._watchdog is not None:
            self._detach_watchdog = interruption.attach(trainer, self._watchdog)

    def stop_watching(self) -> None:
        """Stop the watchdog, last: other ranks may still fail."""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._detach_watchdog is not None:
            self._detach_watchdog()
        self._watchdog = self._detach_watchdog = None

    def close(self) -> None:
        """Return what steps have taken; a later run takes it again."""
        if self._context_parallel is not None:
            self._context_parallel.close()

    def _resolve(self, world_size: int, ranks_per_node: int) -> Sizes:
        context, data, tensor = self._sizes
        return resolve_sizes(
            context, data, tensor, world_size=world_size, ranks_per_node=ranks_per_node
        )

    def _num_shards(self, world_size: int, ranks_per_node: int) -> int:
        """Return the number of ranks of data x context that hold the shards of one copy."""
        tensor = self._resolve(world_size, ranks_per_node).tensor
        if self._shard_size is None:
            return world_size // tensor
        return resolve_shard_size(
            self._shard_size,
            world_size=world_size // tensor,
            ranks_per_node=max(1, ranks_per_node // tensor),
        )

    def _build_shard_mesh(self) -> None:
        """Build the mesh over which parameters are sharded. Collective."""
        size = self._num_shards(*self._counts)
        self._shard_mesh, self._tensor_mesh = build_hybrid_mesh(self.meshes, size, self._timeout)


def _built(value: T | None, name: str, where: str) -> T:
    """Return what exists once processes are connected; raise before."""
    if value is None:
        raise RuntimeError(
            f"strategy.{name} is available once processes have started: use it in {where} or later."
        )
    return value
