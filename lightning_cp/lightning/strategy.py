# SPDX-License-Identifier: Apache-2.0
"""The Lightning door: one strategy that shards every batch and keeps the numbers of one device.

Knows Lightning, and nothing about attention: each of its hooks opens or re-enters a step of
`ContextParallel`. The order in which Lightning calls the hooks is in docs/lightning.md.
"""

import inspect
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_cp import active_step
from lightning_cp import checkpoint as checkpoints
from lightning_cp.accumulate import GradientWindow
from lightning_cp.adapters import Handle, describe_models, enable_models
from lightning_cp.attn.api import name_algorithm
from lightning_cp.attn.blockwise.kernels.base import Request, Scores
from lightning_cp.attn.blockwise.kernels.select import select_kernel
from lightning_cp.comm.mesh import (
    CONTEXT_AXIS,
    DATA_AXIS,
    ContextSize,
    Sizes,
    build_mesh,
    gather_objects,
    resolve_sizes,
)
from lightning_cp.data.batch import named_values
from lightning_cp.fsdp.gathering import check_reduced, gather_parts, order_gradients
from lightning_cp.fsdp.scalars import whole_scalars
from lightning_cp.fsdp.sharding import (
    ParameterSharding,
    check_parameter_sharding,
    check_sharding,
    fill_sharded,
    is_sharded,
    prepare_reduction,
    reshard,
    set_gradient_reduction,
    shard_parameters,
)
from lightning_cp.geometry.mask import Mask
from lightning_cp.lightning import averaging
from lightning_cp.lightning.features import check_features, check_hooks, check_optimizers
from lightning_cp.lightning.logs import Sync, kept_metrics, no_logs, recorded_logs
from lightning_cp.lightning.step_outputs import StepOutputs, Trial
from lightning_cp.lightning.warning_filters import expect_known
from lightning_cp.loss import global_mean
from lightning_cp.options import (
    AlgorithmName,
    GradientWire,
    KernelName,
    LayoutName,
    Options,
    check_choice,
)
from lightning_cp.parallel import ContextParallel, reenter
from lightning_cp.step import IGNORED_LABEL, Step
from lightning_cp.torch_private import rest_at_exit
from lightning_cp.verification import TOLERANCES, Report, verify

LossName = Literal["auto", "local_mean"]

PRECISIONS: Final = ("32-true", "bf16-mixed", "bf16-true", "16-true")


class ContextParallelStrategy(ModelParallelStrategy):
    """Trains with rows that are cut across ranks, with the numbers of one device.

    Every batch is sharded along its sequence, attention sees the whole row, parameters are sharded
    over all ranks (FSDP2), and losses, gradients and checkpoints are what one big device would
    have computed.

    Args:
        context_parallel_size: how many ranks share a row. ``auto`` is the devices of one node. A
            pair (inside, between), as (8, 4), is for rows that several nodes share: inside a node
            ranks swap tokens for heads (Ulysses), and keys travel by the algorithm between nodes.
        data_parallel_size: how many groups of ranks hold different rows. ``auto`` is the rest.
        tensor_parallel_size: only 1 so far.
        layout: who owns which tokens: ``zigzag``, ``balanced``, ``contiguous``, or ``auto``.
        algorithm: how keys travel: ``gather``, ``ring``, ``ulysses``, or ``auto``.
        kernel: what computes attention; ``auto`` takes the fastest that can.
        attention_memory: GiB that an attention call may take on a GPU beside what it is given; by
            default six times the local queries, at least 0.78, and more where that saves time.
        gradient_wire: precision of gradients of keys and values that collectives add up:
            ``float32``, or ``model``, half of the bytes for bf16: for slow networks.
        sequence_dims: where the sequence lies in tensors that are not known: name or path
            (``text.pixels``; ``0``, the first of a tuple) to dim, or None to keep one whole, or all
            of a container.
        balance_window: ranks shall have equal work under a causal mask with this window, where
            most layers have one; by default without a window. Only ``balanced`` and ``auto`` ask.
        parameter_sharding: ``full`` cuts parameters over data x context, ``none`` keeps them all
            on every rank. A model that ``configure_model()`` has sharded is left as it is.
        shard_modules: class names or name patterns of the blocks that are gathered together; found
            by themselves in Hugging Face models and in models with ModuleLists.
        loss: ``auto`` wants losses from token_mean() or an enabled model. ``local_mean`` says that
            a step returns the mean over this rank's labels, and weighs it rightly.
        verify_steps: before the first batch of each stage, run the step sharded and on whole
            sequences, and refuse it if anything that it returns, logs or adds to a metric differs.
        verify_max_len: the length to which sequences are cut for it.
        reduce_every_microbatch: with False, gradients of accumulated batches are reduced once, at
            the price of memory for whole gradients.
        broadcast_batch: give all ranks of a group the batch of its first one.
        check_batches: for how many batches ranks compare contents; shapes always.
        save_distributed_checkpoint: a folder into which every rank writes, else one file.
        process_group_backend: torch's default for the device when None.
        timeout: after which a waiting rank gives up, in all groups. It holds for starting up too:
            below ten seconds or so, ranks may not find each other.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = ContextParallelStrategy(context_parallel_size=1)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    """

    def __init__(
        self,
        context_parallel_size: ContextSize = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = 1,
        layout: LayoutName = "auto",
        algorithm: AlgorithmName = "auto",
        kernel: KernelName = "auto",
        attention_memory: float | None = None,
        gradient_wire: GradientWire = "float32",
        sequence_dims: dict[str, int | None] | None = None,
        balance_window: int | None = None,
        parameter_sharding: ParameterSharding = "full",
        shard_modules: list[str] | None = None,
        loss: LossName = "auto",
        verify_steps: bool = True,
        verify_max_len: int = 512,
        reduce_every_microbatch: bool = True,
        broadcast_batch: bool = False,
        check_batches: int = 8,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if tensor_parallel_size not in (1, "auto"):
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size}: tensor parallelism beside context "
                "parallelism is not supported yet. Use tensor_parallel_size=1 and let rows be "
                "shared by more ranks: context_parallel_size."
            )
        check_choice("loss", loss, get_args(LossName))
        Options(  # checks
            layout=layout,
            algorithm=algorithm,
            kernel=kernel,
            attention_memory=attention_memory,
            gradient_wire=gradient_wire,
        )
        check_parameter_sharding(parameter_sharding)
        expect_known()
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._context_parallel_size = context_parallel_size
        self._options: dict[str, Any] = {
            "layout": layout,
            "algorithm": algorithm,
            "kernel": kernel,
            "attention_memory": attention_memory,
            "gradient_wire": gradient_wire,
            "sequence_dims": sequence_dims,
            "balance": None if balance_window is None else Mask(True, balance_window),
            "check_batches": check_batches,
        }
        self._parameter_sharding = parameter_sharding
        self._shard_modules = shard_modules
        self._loss = loss
        if verify_max_len < 2:
            raise ValueError(
                f"verify_max_len={verify_max_len}: give the length of sequences on which steps are "
                "compared with one device, at least 2; verify_steps=False leaves that out."
            )
        self._verify_steps, self._verify_max_len = verify_steps, verify_max_len
        self._reduce_every_microbatch = reduce_every_microbatch
        self._broadcast_batch = broadcast_batch
        self._shard_mesh: DeviceMesh | None = None
        self._context_parallel: ContextParallel | None = None
        self._step_outputs: StepOutputs | None = None
        self._handles: list[Handle] = []
        self._undos: list[Callable[[], None]] = []
        self._window = GradientWindow()
        self._step: Step | None = None
        self._num_labels: Tensor | None = None

    # ---------------------------------------------------------------- who works with whom

    @property
    def context_parallel(self) -> ContextParallel:
        """Return what opens steps: `position_ids()`, `unshard()`, `paused()` for one's own code."""
        if self._context_parallel is None:
            raise RuntimeError(
                "strategy.context_parallel is there once processes have started: use it in "
                "configure_model(), setup() or later."
            )
        return self._context_parallel

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Return data x context as one axis: the mesh for `fully_shard`."""
        if self._shard_mesh is None:
            raise RuntimeError(
                "strategy.shard_mesh is there once processes have started: use it in "
                "configure_model() or later."
            )
        return self._shard_mesh

    @property
    def last_step(self) -> Step | None:
        """Return the step that was opened last, in training or evaluation; None before any."""
        return self._step

    @property
    def is_verifying(self) -> bool:
        """Say whether a step is being compared with one device: for steps that write files."""
        return self._step_outputs is not None and self._step_outputs.is_verifying

    @property
    def gradient_window(self) -> GradientWindow:
        """Return what weighs microbatches by their tokens, for manual optimization.

        ``self.manual_backward(loss * window.weigh())`` for each, then, before clipping and
        stepping, ``window.finish(self.parameters())``. Automatic optimization does so by itself.
        """
        return self._window

    @property
    def context_parallel_size(self) -> int:
        """Return how many ranks share a row."""
        return int(self.device_mesh[CONTEXT_AXIS].size())

    @property
    def context_parallel_rank(self) -> int:
        """Return this rank's place among them."""
        return int(self.device_mesh[CONTEXT_AXIS].get_local_rank())

    @property
    def data_parallel_size(self) -> int:
        """Return how many groups hold different rows: the replicas of an iterable data set."""
        return int(self.device_mesh[DATA_AXIS].size())

    @property
    def data_parallel_rank(self) -> int:
        """Return which of them this is: split an iterable data set by this, not by global rank."""
        return int(self.device_mesh[DATA_AXIS].get_local_rank())

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold other samples: for metrics that all ranks update alike."""
        return self.device_mesh[DATA_AXIS].get_group()

    @property
    def root_device(self) -> torch.device:
        """Return this process's device."""
        devices = self.parallel_devices or []
        if self.local_rank >= len(devices):
            raise ValueError(
                f"Process {self.local_rank} of this node has no device: the launcher started more "
                f"processes than Trainer(devices={len(devices)}) has devices. Set devices to the "
                "number of processes per node (torchrun --nproc-per-node)."
            )
        return devices[self.local_rank]

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._launcher is None:
            return
        # Refused here, no process has been started for nothing.
        self._resolve_sizes(self.num_nodes * self.num_processes)
        if _is_interactive():
            raise RuntimeError(
                f"{type(self).__name__} starts one process per device, which a notebook or an "
                "interactive session cannot do. Save the code as a script and run `python "
                "script.py`, or `torchrun --nproc-per-node N script.py`."
            )

    def _resolve_sizes(self, world_size: int) -> Sizes:
        return resolve_sizes(
            self._context_parallel_size,
            self._data_parallel_size,
            world_size=world_size,
            ranks_per_node=self.num_processes,
        )

    def setup_environment(self) -> None:
        """Start the processes' connection and build the mesh."""
        assert self.accelerator is not None  # noqa: S101
        self.accelerator.setup_device(self.root_device)
        expected = self.num_nodes * self.num_processes
        if self.world_size != expected:
            raise ValueError(
                f"The launcher started {self.world_size} processes, but Trainer(devices="
                f"{self.num_processes}, num_nodes={self.num_nodes}) means {expected}. Make them "
                "agree."
            )
        sizes = self._resolve_sizes(self.world_size)
        self._check_precision()
        self._setup_distributed()
        if "gloo" in str(self.process_group_backend):
            rest_at_exit()
        if self._device_mesh is None:
            self._device_mesh, self._shard_mesh = build_mesh(
                sizes, device_type=self.root_device.type, timeout=self._timeout
            )
            self._context_parallel = ContextParallel(
                self._device_mesh[CONTEXT_AXIS],
                self._device_mesh[DATA_AXIS],
                ulysses_size=None if sizes.ulysses == 1 else sizes.ulysses,
                timeout=self._timeout,
                **self._options,
            )
            self._warn_of_spread(sizes)
        self._module()._device_mesh = self._device_mesh
        self._undos.append(averaging.allow_copies(self._module()))  # setup() of callbacks is next

    def _check_precision(self, asked: str | None = None) -> None:
        precision = self.precision_plugin.precision if asked is None else asked
        if precision not in PRECISIONS:
            raise ValueError(
                f"Trainer(precision={precision!r}) is not supported by {type(self).__name__}. Use "
                f"one of {', '.join(PRECISIONS)}."
            )

    def _warn_of_spread(self, sizes: Sizes) -> None:
        """Warn where ranks that share a row lie in different nodes though one would hold them."""
        mine = f"{socket.gethostname()} (node {self.node_rank})"
        hosts = gather_objects(self.shard_mesh, mine)
        per_node = self.num_processes
        cp_size = sizes.ulysses if sizes.ulysses > 1 else sizes.context
        groups = [hosts[at : at + cp_size] for at in range(0, len(hosts), cp_size)]
        spread = [sorted(set(group)) for group in groups if len(set(group)) > 1]
        if not spread or cp_size > per_node:
            return
        cure = (
            "Number ranks in blocks, node by node (SLURM: --distribution=block)."
            if per_node % cp_size == 0
            else f"Use a context_parallel_size that divides the {per_node} devices of a node."
        )
        rank_zero_warn(
            f"In {len(spread)} of {len(groups)} groups the {cp_size} ranks that share a row lie on "
            f"several hosts: {', '.join(spread[0])}. Attention then runs over the network between "
            f"them. {cure}"
        )

    # ---------------------------------------------------------------- the model

    def setup(self, trainer: Trainer) -> None:
        """Enable, shard and place the model; make optimizers."""
        assert self.accelerator is not None  # noqa: S101
        assert self.model is not None  # noqa: S101
        assert self.lightning_module is not None  # noqa: S101
        self.accelerator.setup(trainer)
        _check_module(self.lightning_module)
        check_features(trainer)
        check_hooks(self.lightning_module, self.shard_mesh)
        self._keep_out_of_inference_mode(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._handles += enable_models(self.lightning_module)
        self._step_outputs = None  # what was seen of another module, or before it was changed
        if is_sharded(self.model):
            check_sharding(self.model, self.shard_mesh)
            fill_sharded(self.model, self.root_device)
        else:
            shard_parameters(
                self.model,
                self.shard_mesh,
                sharding=self._parameter_sharding,
                shard_modules=self._shard_modules,
                device=self.root_device,
            )
        prepare_reduction(self.model)
        gather_parts(self.model)
        self.model_to_device()
        order_gradients(self.model)
        self._undos += averaging.shard_averages(trainer, self.lightning_module)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
        self._window = GradientWindow()

    def _keep_out_of_inference_mode(self, trainer: Trainer) -> None:
        """Keep what FSDP2 gathers usable: training cannot use tensors made in inference mode."""
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    def teardown(self) -> None:
        """Put models back as they were."""
        for handle in self._handles:
            handle.undo()
        self._handles = []
        while self._undos:
            self._undos.pop()()
        if self.lightning_module is not None:  # after an error a root may still be gathered
            reshard(self.lightning_module)
        super().teardown()

    # ---------------------------------------------------------------- data

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by data rank: those of ranks that share a row must draw the same."""
        if isinstance(dataloader, DataLoader):
            if dataloader.worker_init_fn is None:
                seed = partial(pl_worker_init_function, rank=self.data_parallel_rank)
                dataloader.worker_init_fn = seed
            self._check_lengths(dataloader)
        return dataloader

    def _check_lengths(self, dataloader: DataLoader[Any]) -> None:
        """Refuse loaders of different lengths: ranks that hold parts of the weights would wait."""
        if self.data_parallel_size == 1 or self._parameter_sharding == "none":
            return
        length = len(dataloader) if hasattr(dataloader.dataset, "__len__") else -1
        batch_size = getattr(dataloader.batch_sampler, "batch_size", dataloader.batch_size)
        self._check_even(length, product=f" = {self.data_parallel_size} * {batch_size}")

    def _check_even(self, length: float, *, product: str = "") -> None:
        """Refuse numbers of batches that differ; ``product`` spells out the rule's numbers."""
        lengths = sorted(set(gather_objects(self.shard_mesh, length)))
        if len(lengths) > 1:
            raise ValueError(
                f"The ranks have loaders of different lengths ({lengths} batches), but must take "
                "the same number of steps: they hold each other's weights, or gradients. Make the "
                f"number of rows a multiple of data_parallel_size * batch_size{product}, or use "
                "data_parallel_size=1 (for evaluation also parameter_sharding='none')."
            )

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch to the device, that of the group's first rank if asked to."""
        if self._broadcast_batch and self.context_parallel_size > 1:
            batch = self.context_parallel.groups.context.first(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the user's training step on this rank's tokens."""
        module, checked = self._module(), self._outputs()
        trial = self._trial("training_step", super().training_step, args, kwargs)
        automatic = module.automatic_optimization
        with self.context_parallel.step(batch, training=True) as local:
            self._step = step = active_step.opened()
            assert step is not None  # noqa: S101
            self._num_labels = _count_labels(local)
            if automatic and self._is_trial_due(step):
                self._verify_training(trial, batch, step)
                self._step, self._num_labels = step, _count_labels(local)
            with recorded_logs(module, step, training=True, sync="never") as logs:
                output = trial.run(local)
            if automatic:
                output = self._checked(output)
        return checked.release(
            trial, output, logs, step, batch=batch, may_verify=False, deferred=not step.is_checked
        )

    def _is_trial_due(self, step: Step) -> bool:
        """Say whether a training step is to be compared with one device, on all data ranks."""
        checked = self._outputs()
        if self.data_parallel_size > 1:  # batches of other kinds may come to some data ranks only
            return checked.is_on and not checked.has_tried("training_step")
        return checked.is_due("training_step", step)

    def _verify_training(self, trial: Trial, batch: Any, step: Step) -> None:
        """Compare what a training step logs, and a loss that the user vouches for."""
        try:
            self._outputs().verify(trial, batch, step)
        finally:
            reshard(self._module())
        if self._loss == "local_mean":
            self.verify(batch, max_len=self._verify_max_len)

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the user's validation step on this rank's tokens."""
        trial = self._trial("validation_step", super().validation_step, args, kwargs)
        return self._evaluate(trial, batch, args)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the user's test step on this rank's tokens."""
        trial = self._trial("test_step", super().test_step, args, kwargs)
        return self._evaluate(trial, batch, args)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the user's predict step; what it returns per token comes back as whole rows."""
        trial = self._trial("predict_step", super().predict_step, args, kwargs)
        return self._evaluate(trial, batch, args)

    def _trial(
        self, stage: str, step_fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Trial:
        """Return a step that can be run on any part of a batch."""

        def run(local: Mapping[str, Any]) -> Any:
            return step_fn(local, *args, **kwargs)

        return Trial(stage, self._module(), run, self._lowest_precision)

    def _lowest_precision(self) -> torch.dtype:
        """Return the lowest precision in which a step computes."""
        precisions = {p.dtype for p in self._module().parameters() if p.is_floating_point()}
        if self.precision_plugin.precision == "bf16-mixed":
            precisions.add(torch.bfloat16)
        return min(precisions, key=lambda dtype: dtype.itemsize, default=torch.float32)

    def _evaluate(self, trial: Trial, batch: Any, args: tuple[Any, ...]) -> Any:
        checked, loader = self._outputs(), args[1] if len(args) > 1 else 0
        with self.context_parallel.step(batch, training=False) as local:
            self._step = step = active_step.opened()
            assert step is not None  # noqa: S101
            sanity = checked.is_on and self._trainer().sanity_checking
            if checked.any_data_rank(sanity or checked.is_due(trial.stage, step, loader)):
                checked.verify(trial, batch, step, loader)
            sync: Sync = "always" if self._is_even() else "epoch"
            with recorded_logs(trial.module, step, training=False, sync=sync) as logs:
                output = trial.run(local)
        return checked.release(trial, output, logs, step, batch=batch)

    def _is_even(self) -> bool:
        """Say whether all data ranks take the same number of steps.

        Loaders may be uneven where parameters are whole: a step must not wait for others.
        """
        return self._parameter_sharding == "full" or self.data_parallel_size == 1

    def _outputs(self) -> StepOutputs:
        if self._step_outputs is None:
            self._step_outputs = StepOutputs(
                self.context_parallel,
                verify=self._verify_steps,
                max_len=self._verify_max_len,
                lockstep=self._is_even(),
            )
        return self._step_outputs

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Go backward in the step that the loss came from, with the weight of its tokens."""
        step, module = self._step, self._module()
        if step is None:
            raise RuntimeError(
                "backward() was called without a training step before it. Call "
                "self.manual_backward(loss) inside training_step()."
            )
        if module.automatic_optimization:  # Lightning has divided by the number of batches
            weight = self._window.weigh(step) * self._trainer().accumulate_grad_batches
            dtype = torch.promote_types(closure_loss.dtype, torch.float32)
            closure_loss = closure_loss * weight.to(dtype)
        else:  # the user's own arithmetic, as on one process
            closure_loss = self._checked(closure_loss)
        with reenter(step):
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        check_reduced(module)
        return loss

    def on_train_start(self) -> None:
        """Refuse loaders of different lengths: the longer ones would wait for the others."""
        super().on_train_start()
        manual = not self._module().automatic_optimization
        if self._loss == "local_mean" and manual and self._verify_steps:
            raise ValueError(
                "loss='local_mean' is verified before the first step, which manual optimization "
                "does not allow: the step would train. Use token_mean() or "
                "lightning_cp.loss.global_mean(), or verify_steps=False if each loss is the mean "
                "over this rank's labels that are not -100, without a shift."
            )
        check_hooks(self._module(), self.shard_mesh)
        self._check_even(self._trainer().num_training_batches)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a window where Lightning sets gradients to zero."""
        super().on_train_batch_start(batch, batch_idx)
        starts = batch_idx % self._trainer().accumulate_grad_batches == 0
        if starts and self._module().automatic_optimization:
            self._window = GradientWindow()

    def _checked(self, output: Any) -> Any:
        """Refuse a loss that we did not make, unless it is said what it is."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        step = self._step
        if step is None or step.is_stock or not isinstance(loss, Tensor):
            return output
        if step.losses:
            if step.cp_size == self.context_parallel_size:  # not while verifying on whole rows
                self.context_parallel.checks.check_loss(loss)
            return output
        if self._loss == "auto":
            raise ValueError(
                "training_step() returned a loss that is not known to be a mean over the tokens of "
                "all ranks; gradients would be wrong wherever ranks hold different numbers of "
                "labels. Use token_mean(logits, batch['labels']) from lightning_cp, "
                "lightning_cp.loss.global_mean for a loss of your own, or, if it is the mean over "
                "this rank's labels that are not -100, each scored at its own token (no shift), "
                "ContextParallelStrategy(loss='local_mean')."
            )
        if self._num_labels is None:
            raise ValueError(
                "loss='local_mean' weighs the loss by the number of labels, but the batch has no "
                "`labels`. Use token_mean(), or lightning_cp.loss.global_mean(), instead."
            )
        # The mean over no labels is NaN; it counts for nothing.
        count = self._num_labels.to(loss.device)
        total = torch.where(count > 0, loss, torch.zeros_like(loss)) * count
        mean = global_mean(total, count)
        return {**output, "loss": mean} if isinstance(output, Mapping) else mean

    # ---------------------------------------------------------------- what a run tells of itself

    def describe(self) -> str:
        """Say in one line who works with whom, and how, and why."""
        cp, options = self.context_parallel, self.context_parallel.options
        layout = "zigzag" if options.layout == "auto" else options.layout
        fewest = "fewest and largest kernel calls"
        if self.root_device.type == "cuda" and cp.groups.attend.size > 1:
            fewest += "; or ring, by time and memory of each"
        chosen = {
            "layout": (layout, "or contiguous or balanced, by each batch"),
            "algorithm": (name_algorithm(cp.options.algorithm, cp.groups), fewest),
            "kernel": self._likely_kernel(),
        }
        said = ", ".join(
            f"{name} {value} ({f'auto: {why}' if getattr(options, name) == 'auto' else 'as asked'})"
            for name, (value, why) in chosen.items()
        )
        return (
            f"context parallelism: {self.data_parallel_size} data x {self.context_parallel_size} "
            f"context ranks on {self.root_device.type}; {said}; parameters "
            f"{'cut over' if self._parameter_sharding == 'full' else 'whole on'} all "
            f"{self.world_size} ranks"
        )

    def _likely_kernel(self) -> tuple[str, str]:
        """Return the kernel for what most models ask for, and why; layers may ask for more."""
        if self.context_parallel.options.kernel == "flex":
            return "flex", "by its name"
        lowered = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}
        first = next((p.dtype for p in self._module().parameters()), torch.float32)
        dtype = lowered.get(self.precision_plugin.precision, first)
        request = Request(self.root_device, dtype, Scores(1.0), head_dim=128)
        name = select_kernel(self.context_parallel.options.kernel, request).name
        why = f"fastest for {str(dtype).removeprefix('torch.')} on {self.root_device.type}"
        if self.root_device.type == "cuda" and self.context_parallel.options.algorithm != "ring":
            why += "; flex for windows, documents, padding, softcap and bias"
        return name, why

    def verify(self, batch: Mapping[str, Any], *, max_len: int | None = None) -> Report:
        """Compare a training step on a batch with the same on whole rows; see `checks.verify`.

        Args:
            batch: a whole batch.
            max_len: rows are cut to this length, so that one rank can hold them.
        """
        module = self._module()
        if not module.automatic_optimization:
            raise ValueError(
                "A training step with manual optimization cannot be verified: it would train. Call "
                "lightning_cp.verify(model, batch, cp=strategy.context_parallel, loss_fn=...)."
            )

        def loss_fn(given: dict[str, Any]) -> Tensor:
            self._step, self._num_labels = active_step.opened(), _count_labels(given)
            arguments = (given, 0)[: len(inspect.signature(module.training_step).parameters)]
            with self.precision_plugin.train_step_context():
                output = self._checked(module.training_step(*arguments))
            loss = output["loss"] if isinstance(output, Mapping) else output
            assert isinstance(loss, Tensor)  # noqa: S101
            return loss

        mixed = self.precision_plugin.precision == "bf16-mixed"  # autocast is our own affair
        devices = [self.root_device] if self.root_device.type == "cuda" else []
        with no_logs(module), kept_metrics(module), torch.random.fork_rng(devices):
            return verify(
                module,
                batch,
                cp=self.context_parallel,
                loss_fn=loss_fn,
                max_len=max_len,
                tolerance=TOLERANCES[torch.bfloat16] if mixed else None,
                stock=bool(self._handles),
            )

    # ---------------------------------------------------------------- gradients

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step with true gradients; callbacks and clipping see them too."""
        with ExitStack() as stack:

            def exact() -> Any:
                result = closure()
                if self._module().automatic_optimization:
                    self._window.finish(self._module().parameters())
                stack.enter_context(whole_scalars())  # for hooks that look at gradients
                return result

            return super().optimizer_step(optimizer, exact, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate a batch that is not the last of its window."""
        if self._reduce_every_microbatch:
            yield
            return
        set_gradient_reduction(self._module(), enabled=False)
        try:
            yield
        finally:
            set_gradient_reduction(self._module(), enabled=True)

    def on_validation_start(self) -> None:
        """Refuse hooks that only some ranks have."""
        check_hooks(self._module(), self.shard_mesh)

    def on_validation_end(self) -> None:
        """Give back what was gathered for evaluation; compare what was logged at its end."""
        reshard(self._module())
        self._check_epoch_logs()

    def on_test_end(self) -> None:
        """Give back what was gathered for evaluation; compare what was logged at its end."""
        reshard(self._module())
        self._check_epoch_logs()

    def on_train_end(self) -> None:
        """Compare what the last steps and the end of the epoch have logged."""
        super().on_train_end()
        self._check_epoch_logs()

    def _check_epoch_logs(self) -> None:
        """Refuse values that `on_*_epoch_end` has logged and that ranks disagree about."""
        cp = self.context_parallel
        for result in (self._trainer()._results or {}).values():
            meta = result.meta
            own = meta.sync.rank_zero_only or (meta.sync.should and not meta.is_mean_reduction)
            if result.is_tensor and meta.fx.endswith("_epoch_end") and not own:
                name = f"{meta.name!r} in {meta.fx}()"
                cp.checks.released.add(name, result.value, cp.groups.context.device)
        cp.checks.check_released()

    def on_predict_end(self) -> None:
        """Give back what was gathered for prediction."""
        reshard(self._module())

    # ---------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights: this rank's part, or for one file all of them, on rank 0."""
        return checkpoints.model_state(self._module(), full=not self._save_distributed_checkpoint)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, like the weights."""
        return checkpoints.optimizer_state(
            self._module(),
            getattr(optimizer, "optimizer", optimizer),
            full=not self._save_distributed_checkpoint,
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Save in such a way that a killed run leaves the former checkpoint in place."""
        if storage_options is not None:
            raise TypeError(
                f"`{type(self).__name__}.save_checkpoint(..., storage_options=...)` is not "
                "supported: distributed checkpoints are not written by a CheckpointIO."
            )
        path = Path(self.broadcast(filepath))
        checkpoint |= describe_models(self._module())
        if self._save_distributed_checkpoint:
            state = {"state_dict": checkpoint.pop("state_dict")}
            for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
                state[f"optimizer_{index}"] = optimizer_state
            checkpoints.save_folder(state, checkpoint, path)
        else:
            checkpoint = checkpoints.gather_shards(checkpoint)
            checkpoints.together(
                lambda: self._save_file(checkpoint, path) if self.is_global_zero else None,
                f"{path} was not saved.",
                keep=(OSError,),
            )

    def _save_file(self, checkpoint: dict[str, Any], path: Path) -> None:
        with checkpoints.replacing(path):
            Strategy.save_checkpoint(self, checkpoint, path)

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load into the sharded model and its optimizers, whatever the number of ranks was."""
        path = Path(self.broadcast(checkpoint_path))
        load = (
            checkpoints.load_folder
            if checkpoints.is_checkpoint_folder(path)
            else checkpoints.load_file
        )
        checkpoint = load(
            self._module(),
            self.optimizers,
            path,
            strict=self._module().strict_loading,
            weights_only=_asked_weights_only() if weights_only is None else weights_only,
            with_weights=averaging.needs_weights(self._trainer()),
        )
        averaging.clear_schedulers(self._trainer(), checkpoint)
        return checkpoint

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None  # noqa: S101
        return self.lightning_module

    def _trainer(self) -> Trainer:
        return self._module().trainer


# Lightning checks strategies that are given as objects, not those chosen by name, and says that its
# own strategy does not take a precision in Fabric.
_check_by_lightning = _AcceleratorConnector._validate_precision_choice


def _check_precision_choice(connector: _AcceleratorConnector) -> None:
    strategy = connector._strategy_flag
    if isinstance(strategy, ContextParallelStrategy):
        strategy._check_precision(connector._precision_flag)
    _check_by_lightning(connector)


_AcceleratorConnector._validate_precision_choice = _check_precision_choice  # type: ignore[assignment, method-assign]


def _check_module(module: LightningModule) -> None:
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
            raise ValueError(
                f"{type(module).__name__}.{name}(dataloader_iter) fetches its own batches, which "
                f"then could not be cut. Use {name}(self, batch, batch_idx)."
            )
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        raise TypeError(
            "Found modules that are wrapped with `torch.distributed.fsdp.FullyShardedDataParallel`."
            " The strategy only supports the new FSDP2 APIs in PyTorch >= 2.4: shard nothing, or "
            "use fully_shard(module, mesh=self.trainer.strategy.shard_mesh) in configure_model()."
        )


def _is_interactive() -> bool:
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    return bool(_IS_INTERACTIVE)


def _count_labels(local: Any) -> Tensor | None:
    labels, *others = named_values(local, "labels") or [None]
    if others:
        return None
    return (labels != IGNORED_LABEL).sum() if isinstance(labels, Tensor) else None


def _asked_weights_only() -> bool | None:
    """Return what was given to `Trainer.fit(weights_only=...)`, which 2.6 forgets on the way."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            asked: bool | None = frame.f_locals.get("weights_only")
            return asked
        frame = frame.f_back
    return None
