# SPDX-License-Identifier: Apache-2.0
"""The Lightning strategy: shards every batch, and computes what one device would compute.

Each hook opens or re-enters a step of `ContextParallel`. Knows Lightning, not attention. The order
in which Lightning calls the hooks is in docs/lightning.md; hooks stand in that order here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.adapters import check_loaded_models
from lightning_cp.comm.error_report import quote_uncaught_errors
from lightning_cp.comm.mesh import CONTEXT_AXIS, DATA_AXIS, ContextSize
from lightning_cp.comm.rendezvous import agent_store
from lightning_cp.comm.watchdog import HEARTBEAT_TIMEOUT
from lightning_cp.compare.verify import Report
from lightning_cp.config import (
    TENSOR_AXIS,
    AlgorithmName,
    Attention,
    Checkpoints,
    Config,
    LayoutName,
    LossName,
    Memory,
    Parameters,
    ParametersArgument,
    Verify,
    VerifyArgument,
    refuse_fields,
)
from lightning_cp.fsdp.frozen import packed_stay
from lightning_cp.fsdp.gathering import check_reduced, find_units
from lightning_cp.fsdp.replication import average_new
from lightning_cp.fsdp.sharding import drop_unused_gradients, reshard
from lightning_cp.lightning import private
from lightning_cp.lightning.checkpoints.saver import (
    CheckpointSaver,
    check_links,
    check_storage_options,
)
from lightning_cp.lightning.model import averaging
from lightning_cp.lightning.model.mixed_precision import resolve_plugin
from lightning_cp.lightning.model.model_setup import share_random_state, use_offloaded
from lightning_cp.lightning.model.optimizers import hooks_read_scalars
from lightning_cp.lightning.model.preparation import Preparation
from lightning_cp.lightning.model.unsupported import check_hooks, check_optimizers
from lightning_cp.lightning.processes import loaders
from lightning_cp.lightning.processes.launch import check_precision, check_world_size, device_of
from lightning_cp.lightning.processes.processes import Processes
from lightning_cp.lightning.steps.accumulation import Accumulation
from lightning_cp.lightning.steps.logs import noted_hook_logs
from lightning_cp.lightning.steps.loss_policy import check_manual_optimization
from lightning_cp.lightning.steps.steps import StepRunner
from lightning_cp.lightning.steps.warning_filters import ignore_known_warnings
from lightning_cp.loss.accumulate import GradientWindow
from lightning_cp.parallel import ContextParallel, reenter
from lightning_cp.planner.memory import MemoryPlan
from lightning_cp.private.groups import delay_exit_for_gloo
from lightning_cp.renamed import refuse_arguments
from lightning_cp.step.step import Opened


class ContextParallelStrategy(ModelParallelStrategy):
    """Trains on sequences that are sharded across ranks, with the results of one device.

    Every batch is sharded along its sequence dim, attention sees full sequences, and parameters are
    sharded over all ranks (FSDP2). Losses, gradients and checkpoints equal those of one device.

    Args:
        context_parallel_size: number of ranks that share each sequence. ``auto`` is the number of
            devices of a node. For sequences that span several nodes, a pair (inside, between) such
            as (8, 4): Ulysses among the ranks inside a node, ``algorithm`` between nodes.
        data_parallel_size: number of groups that receive different batches. ``auto`` uses all
            remaining ranks.
        tensor_parallel_size: number of ranks that share the weights and the attention heads of each
            layer, and hold the same tokens; neighbours. docs/multi-node.md.
        layout: which rank owns which tokens: ``zigzag``, ``balanced``, ``contiguous`` or ``auto``.
        algorithm: how keys reach the queries: ``gather``, ``ring``, ``ulysses`` or ``auto``.
        sequence_dims: the sequence dim of tensors with other names than Hugging Face's: name or
            path (``text.pixels``; ``0``, the first of a tuple) to dim, or None to replicate a
            tensor or all tensors of a container.
        loss: ``auto`` requires losses from token_mean(), global_mean(), sample_mean() or an
            enabled model.
            ``local_mean`` declares that a step returns the mean over the labels of this rank.
        attention: kernel, memory of a call, precision of gradients on the way.
        memory: activation checkpointing, offloading, tiles, compiled layers; docs/memory.md.
        parameters: how they are sharded, and in which precision: ``full``, ``none``, ``hybrid``,
            ``auto``, or `Parameters`, which has other settings too.
        verify: before the first batch of each stage, run the step sharded and on full sequences,
            and raise if a value differs that it returns, logs or adds to a metric. `Verify` has
            what else ranks compare.
        checkpoints: a folder into which every rank writes, or one file.
        process_group_backend: torch's default for the device if None.
        timeout: of all process groups; below about ten seconds, ranks may fail to connect.
        heartbeat_timeout: how long the process of a rank may be silent before all others end. A
            rank that computes or waits is not silent: docs/multi-node.md.
        renamed: raise, and say what former arguments are now.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = ContextParallelStrategy(context_parallel_size=1)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    """

    def __init__(
        self,
        context_parallel_size: ContextSize = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        *,
        tensor_parallel_size: int | Literal["auto"] = 1,
        layout: LayoutName = "auto",
        algorithm: AlgorithmName = "auto",
        sequence_dims: dict[str, int | None] | None = None,
        loss: LossName = "auto",
        attention: Attention = Attention(),
        memory: Memory = Memory(),
        parameters: ParametersArgument = Parameters(),
        verify: VerifyArgument = Verify(),
        checkpoints: Checkpoints = Checkpoints(),
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        heartbeat_timeout: timedelta = HEARTBEAT_TIMEOUT,
        **renamed: Any,
    ) -> None:
        refuse_arguments("ContextParallelStrategy()", renamed)
        config = Config(
            layout=layout,
            algorithm=algorithm,
            sequence_dims=sequence_dims or {},
            loss=loss,
            attention=attention,
            memory=memory,
            parameters=Parameters.of(parameters),
            verify=Verify.of(verify),
            checkpoints=checkpoints,
        )
        instead = "Give context_parallel_size=(inside, between)."
        refuse_fields(Attention, attention, {"ulysses_size": instead})
        ignore_known_warnings()
        self._processes = Processes(
            context_parallel_size,
            data_parallel_size,
            tensor_parallel_size,
            config=config,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
        )
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=checkpoints.distributed,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._config = config
        self._preparation = Preparation(config)
        self._saver = CheckpointSaver(checkpoints, timeout)
        self._accumulation = Accumulation(reduce_each=config.parameters.reduce_every_microbatch)
        self._loaders = loaders.Loaders(timeout)
        self._units: list[nn.Module] = []  # of FSDP2, in the module of the run
        self._steps: StepRunner | None = None

    # ---------------------------------------------------------------- public properties

    @property
    def context_parallel(self) -> ContextParallel:
        """Return the object that opens steps, for `position_ids()`, `unshard()`, `paused()`."""
        return self._processes.context_parallel

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Return the mesh for `fully_shard`: data x context as one axis.

        With hybrid sharding it has two: `fully_shard` replicates over the first, and shards over
        the second.
        """
        return self._processes.shard_mesh

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """Return the mesh for `parallelize_module`: the ranks that share the weights of a layer.

        With hybrid sharding it is not an axis of ``device_mesh``, but of the mesh of `shard_mesh`.
        """
        return self._processes.tensor_mesh

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
        return device_of(self.local_rank, self.parallel_devices or [])

    @property
    def last_step(self) -> Opened | None:
        """Return the step of this run that was opened last; None before the first."""
        return None if self._steps is None else self._steps.last_step

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Return the planned memory of a training step; None before the first, or if unknown."""
        check = None if self._steps is None else self._steps.memory
        return None if check is None else check.plan

    @property
    def is_verifying(self) -> bool:
        """Return whether a trial run is in progress, for steps that write files."""
        return self._steps is not None and self._steps.outputs.is_verifying

    @property
    def gradient_window(self) -> GradientWindow:
        """Return the weights of accumulated batches by tokens, for manual optimization.

        ``self.manual_backward(loss * window.weigh())`` for each batch, then, before clipping and
        stepping, ``window.finish(self.parameters())``. Automatic optimization needs neither.
        """
        return self._accumulation.window

    def describe(self) -> str:
        """Return the mesh and the options of a run in one line; attention logs what it chooses."""
        values = {
            "data": self.data_parallel_size,
            "context": self.context_parallel_size,
            "device": self.root_device.type,
            "layout": self._config.layout,
            "algorithm": self._config.algorithm,
            "kernel": self._config.attention.kernel,
            "parameters": self._preparation.sharding,
        }
        if self.tensor_parallel_size > 1:
            values["tensor"] = self.tensor_parallel_size
        if self._preparation.sharding == "hybrid":
            values["shard_size"] = self.shard_mesh.shape[-1]
        return "context parallelism: " + " ".join(f"{key}={x}" for key, x in values.items())

    def verify(
        self, batch: Mapping[str, Any], *, max_len: int | None = None, check: bool = True
    ) -> Report:
        """Compare a training step with one on full sequences; see `lightning_cp.verify`.

        Args:
            batch: a full batch.
            max_len: the length to which sequences are truncated, so that one rank can hold them.
            check: raise on all ranks if results differ. Otherwise look at ``report.passed``.
        """
        return self._step_runner().verify(batch, max_len, check=check)

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is saved in the background is complete. Collective."""
        self._saver.wait()

    # ---------------------------------------------------------------- processes

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is not None:  # raise before processes are started
            self._processes.check(self.num_nodes * self.num_processes, self.num_processes)

    @override
    def setup_environment(self) -> None:
        """Connect the processes and build the mesh."""
        prepared, plugin = self._preparation, self.precision_plugin
        self.precision_plugin = resolve_plugin(prepared.parameters.mixed_precision, plugin)
        quote_uncaught_errors()
        assert self.accelerator is not None  # noqa: S101
        self.accelerator.setup_device(self.root_device)
        check_world_size(self.world_size, self.num_processes, self.num_nodes)
        self._processes.check(self.world_size, self.num_processes)
        check_precision(self.precision_plugin.precision, type(self).__name__)
        self._setup_distributed()
        self._processes.watch(self._trainer(), self.global_rank, self.world_size)
        if "gloo" in str(self.process_group_backend):
            delay_exit_for_gloo()
        self._device_mesh = self._processes.build(
            self.world_size,
            self.num_processes,
            device_type=self.root_device.type,
            node_rank=self.node_rank,
        )
        private.set_device_mesh(self._module(), self._device_mesh)
        self._saver.open()
        prepared.undos.append(averaging.allow_copies(self._module()))  # callbacks' setup() is next

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

    @override
    def _get_process_group_backend(self) -> str:
        # Norms of gradients in host memory are summed over the ranks, too, which NCCL cannot do.
        if self._preparation.parameters.offload and self.root_device.type == "cuda":
            return self._process_group_backend or "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()

    # ---------------------------------------------------------------- model and data

    @override
    def setup(self, trainer: Trainer) -> None:
        """Enable, shard and place the model; create optimizers."""
        assert self.accelerator is not None  # noqa: S101
        assert self.model is not None  # noqa: S101
        module, prepared = self._module(), self._preparation
        self.accelerator.setup(trainer)
        prepared.check(trainer, module)
        if self._saver.is_async(self.checkpoint_io):
            check_links(trainer)
        check_hooks(module, self._processes.ranks)
        precision = self.precision_plugin.precision
        with packed_stay(self.model, f"Trainer(precision={precision!r})"):
            self.model = self.precision_plugin.convert_module(self.model)
        is_training = trainer.state.fn == TrainerFn.FITTING
        prepared.enable(trainer, module, training=is_training)
        check_loaded_models(
            module, self.tensor_parallel_size, reduces_once=not self._accumulation.reduce_each
        )
        self._place_model(self.model)
        prepared.undos += averaging.shard_averages(trainer, module)
        prepared.undos += noted_hook_logs(trainer, self.context_parallel)
        self.barrier()
        self._accumulation.start_run(module, training=is_training)
        if is_training:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if is_training and not prepared.parameters.offload:
            private.move_states(self.optimizers, self.root_device)
        self._steps = StepRunner(
            module,
            cp=self.context_parallel,
            precision=self.precision_plugin,
            lockstep=prepared.sharding != "none" or self.data_parallel_size == 1,
            stock=prepared.has_enabled,
            memory=prepared.plan_memory(
                module,
                self.context_parallel,
                world_size=self.world_size,
                precision=str(self.precision_plugin.precision),
            ),
        )

    def _place_model(self, model: nn.Module) -> None:
        prepared, device, to_device = self._preparation, self.root_device, self.model_to_device
        if prepared.is_auto:
            self._processes.set_shard_size(
                prepared.choose_sharding(
                    model, self._processes.ranks, self.num_processes, device=device
                )
            )
        prepared.place(
            model, self.shard_mesh, tensor=self.tensor_mesh, device=device, to_device=to_device
        )
        self._units = find_units(model)
        share_random_state(self.context_parallel.groups.tensor, device)

    @override
    def model_to_device(self) -> None:
        """Move the model to the device; shards in host memory stay there."""
        assert self.model is not None  # noqa: S101
        if self._preparation.parameters.offload:
            use_offloaded(self.model, self.root_device)
        else:
            super().model_to_device()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by data rank; let loaders end together, or raise if they cannot."""
        if isinstance(dataloader, DataLoader):
            self._preparation.undos += self._loaders.prepare(
                dataloader,
                self._processes.meshes,
                sharded=self._preparation.sharding != "none",
                training=self._trainer().training,
            )
        return dataloader

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch to the device; with ``broadcast_batch``, that of the first context rank."""
        if self._config.verify.broadcast_batch:
            batch = self.context_parallel.groups.first(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    # ---------------------------------------------------------------- training

    @override
    def on_train_start(self) -> None:
        """Raise for what would fail or hang in the middle of an epoch."""
        super().on_train_start()
        if self._config.verify.steps and not self._module().automatic_optimization:
            check_manual_optimization(self._config.loss)
        check_hooks(self._module(), self._processes.ranks)
        loaders.check_num_batches(self._trainer().num_training_batches, self._processes.ranks)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a gradient window where Lightning sets gradients to zero; find new parameters."""
        super().on_train_batch_start(batch, batch_idx)
        self._accumulation.start_batch(self._module(), batch_idx)
        average_new(self._module(), self.optimizers)

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the training step of the module on the tokens of this rank."""
        return self._step_runner().train(super().training_step, batch, *args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward in the step of the loss, weighted by its tokens."""
        step, module = self.last_step, self._module()
        if step is None:
            raise RuntimeError(
                "backward() needs a training step: call manual_backward() inside training_step()."
            )
        if module.automatic_optimization:
            closure_loss = self._accumulation.weigh(closure_loss, module, step)
        else:  # the user weights losses, as on one process
            closure_loss = self._step_runner().check_loss(closure_loss)
        with reenter(step):
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        check_reduced(self._units)
        drop_unused_gradients(self._units, self.shard_mesh)
        return loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate a batch that is not the last of its window."""
        with self._accumulation.before_last(self._module()):
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step with the gradient of the mean over all tokens; callbacks and clipping see it too."""
        closure = self._accumulation.finish_after(closure, self._module())
        with hooks_read_scalars(self.precision_plugin, optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def on_train_end(self) -> None:
        """Compare what the last steps and hooks have logged."""
        super().on_train_end()
        self.context_parallel.checks.check_released()

    # ---------------------------------------------------------------- evaluation

    @override
    def on_validation_start(self) -> None:
        """Raise for hooks that only some ranks have."""
        check_hooks(self._module(), self._processes.ranks)

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the validation step of the module on the tokens of this rank."""
        step_fn = super().validation_step
        return self._step_runner().evaluate("validation_step", step_fn, batch, *args, **kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the test step of the module on the tokens of this rank."""
        step_fn = super().test_step
        return self._step_runner().evaluate("test_step", step_fn, batch, *args, **kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the predict step of the module; what it returns per token is unsharded."""
        step_fn = super().predict_step
        return self._step_runner().evaluate("predict_step", step_fn, batch, *args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        """Reshard the model; compare what hooks have logged."""
        reshard(self._module())
        self.context_parallel.checks.check_released()

    on_test_end = on_validation_end

    @override
    def on_predict_end(self) -> None:
        """Reshard the model."""
        reshard(self._module())

    # ---------------------------------------------------------------- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights: shards for a folder, full weights on rank 0 for a file."""
        return self._saver.model_state(self._module())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, as `lightning_module_state_dict` does the weights."""
        return self._saver.optimizer_state(self._module(), optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a folder or a file; a job that is killed meanwhile leaves the previous one.

        In the background, this returns once training may change all tensors.
        """
        check_storage_options(storage_options, type(self).__name__)
        self._saver.save(
            checkpoint,
            Path(self.broadcast(filepath)),
            self._module(),
            self.checkpoint_io,
            is_global_zero=self.is_global_zero,
        )

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load into the sharded model and its optimizers, saved by any number of ranks."""
        path = Path(self.broadcast(checkpoint_path))
        return self._saver.load(self._trainer(), path, weights_only=weights_only)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, once the one that is saved in the background is complete."""
        self._saver.after_save(partial(super().remove_checkpoint, filepath))

    # ---------------------------------------------------------------- the end

    @override
    def teardown(self) -> None:
        """Restore the model, the Trainer and its callbacks; wait for a checkpoint."""
        self._preparation.undo()
        self._units = []
        if self.lightning_module is not None:  # after an error the root may still be gathered
            reshard(self.lightning_module)
        self._processes.close()
        with ExitStack() as last:
            last.callback(self._processes.stop_watching)  # others may still fail
            last.callback(super().teardown)
            self._saver.close()

    def _trainer(self) -> Trainer:
        return self._module().trainer

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None  # noqa: S101
        return self.lightning_module

    def _step_runner(self) -> StepRunner:
        assert self._steps is not None  # noqa: S101
        return self._steps
