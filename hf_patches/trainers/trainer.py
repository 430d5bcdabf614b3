# SPDX-License-Identifier: Apache-2.0
"""`context_parallel(trainer, size=8)`: for transformers' Trainer, TRL's trainers and accelerate.

The models shard full sequences in their forward (`shard_in_forward`). To a trainer, context ranks
then look like tensor-parallel ones: they get the same batches and compute the same losses. What is
changed here is who gets which batch, and what is counted once per rank.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hf_patches.shard_in_forward import ShardedModel, shard_in_forward, takes_full_sequences
from hf_patches.trainers.private import (
    FROM_FIRST,
    GENERATE,
    NUM_ITEMS,
    PREPARE_DEVICE_MESH,
    PREPARE_FOR_TRAINING,
    TRACK_TOKENS,
    forget_model,
    forget_optimizer,
    num_steps,
    set_num_tokens,
    signature_columns,
)
from hf_patches.trainers.trainer_checks import (
    check_accelerator,
    check_averaged,
    check_factor,
    check_sharded,
    check_size,
    check_trained,
    check_trainer,
    is_transformers,
)
from hf_patches.trainers.trainer_steps import is_for_user
from hf_patches.trainers.trainer_steps import verify_steps as verify_first_steps
from hf_patches.verify import verify as verify_model
from lightning_cp.comm.collective_errors import raise_on_all
from lightning_cp.comm.transport import GroupTransport, Transport
from lightning_cp.compare.restore import restored_random_states
from lightning_cp.compare.verify import Report, require_passed
from lightning_cp.config import (
    AlgorithmName,
    Attention,
    LayoutName,
    Memory,
    Verify,
    refuse_fields,
)
from lightning_cp.data.shard import shift_labels
from lightning_cp.fsdp.sharding import reshard
from lightning_cp.parallel import ContextParallel
from lightning_cp.patch import Patch, replace_method, require
from lightning_cp.renamed import refuse_arguments

_logger = logging.getLogger(__name__)

_MARK: Final = "_lightning_cp"

_SAMPLERS: Final = {"GRPOTrainer", "RLOOTrainer"}
"""Trainers that train on completions that they have sampled."""

_TRAINERS_MEMORY: Final = {
    "activation_checkpointing": "Set TrainingArguments(gradient_checkpointing=True), or call "
    "model.gradient_checkpointing_enable().",
    "offload_after": "Set offload to a number of GiB: what exceeds them stays on the GPU.",
    "tile": "Call lightning_cp.memory.tile_modules(model).",
    "compile": "Under a Trainer layers are not compiled.",
    "check": "`lightning-cp plan` plans the memory of a step.",
}
"""Fields of `Memory` that a Trainer carries out, or nobody, and what to set instead."""

_TRAINERS_VERIFY: Final = {
    "max_len": "The first steps are truncated as far as the model needs.",
    "broadcast_batch": "Context ranks get the same batches.",
}

_AROUND_MODELS: Final = ("hf_patches", "lightning_cp", "peft", "transformers")
"""Whose functions lie between a caller and a model."""


@dataclass(eq=False)
class TrainerHandle:
    """A trainer or an accelerator under context parallelism, until `remove()`.

    Args:
        cp: the context ranks.
        mesh: axes ``dp_replicate`` (ranks with other batches) and ``cp``; None for one process.
        models: the handles of the models.
    """

    cp: ContextParallel
    mesh: DeviceMesh | None
    models: list[ShardedModel] = field(default_factory=list)
    _patches: list[Patch] = field(default_factory=list, repr=False)

    @property
    def size(self) -> int:
        """Return the number of context ranks."""
        return self.cp.cp_size

    @property
    def num_data_ranks(self) -> int:
        """Return the number of groups of context ranks: each group gets batches of its own."""
        return 1 if self.mesh is None else self.mesh["dp_replicate"].size()

    @property
    def groups(self) -> list[Transport]:
        """Return the context ranks, and those with other batches."""
        if self.mesh is None:
            return []
        return [self.cp.groups.context, GroupTransport(self.mesh["dp_replicate"].get_group())]

    def remove(self) -> None:
        """Restore the trainer, the accelerator and the models; prepared loaders stay."""
        for patch in self._patches:
            patch.remove()
        self._patches.clear()
        for model in self.models:
            model.remove()

    undo = remove

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance until `remove()`; raise if it has none of this name."""
        _require(owner, name)
        if callable(value) and callable(getattr(owner, name)):
            # A method: a wrapper that a user puts around it stays, and then calls the former one.
            self.add(
                replace_method(owner, name, lambda _, __, *args, **kwargs: value(*args, **kwargs))
            )
        else:
            self.add(Patch(owner, name, value))

    def method(self, owner: Any, name: str) -> Any:
        """Return a method that is about to be replaced; raise if there is none of this name."""
        _require(owner, name)
        return getattr(owner, name)

    def add(self, patch: Patch) -> None:
        """Remove a patch in `remove()`."""
        self._patches.append(patch)


def _require(owner: Any, name: str) -> None:
    library = type(owner).__mro__[-2].__module__.partition(".")[0]
    require(owner, name, library=library, use="each sequence counts once")


def context_parallel(
    target: Any,
    *models: nn.Module,
    size: int,
    layout: LayoutName = "auto",
    algorithm: AlgorithmName = "auto",
    attention: Attention = Attention(),
    memory: Memory = Memory(),
    verify: Verify | bool = True,
    **renamed: Any,
) -> TrainerHandle:
    """Shard every sequence of a training run over ``size`` processes.

    ``context_parallel(trainer, size=8)`` for a built `transformers.Trainer`, or a trainer of TRL
    (SFT, DPO, KTO, Reward, GRPO, RLOO), before ``train()``. ``context_parallel(accelerator, model,
    size=8)`` for a loop with accelerate, before ``prepare()``; name every model that it trains or
    calls on long sequences.

    ``size`` neighbouring processes together are one data rank: ``per_device_train_batch_size`` is
    the number of samples of such a group, and a step has ``per_device_train_batch_size x (processes
    / size) x gradient_accumulation_steps`` samples. Losses, metrics, predictions and checkpoints
    are those of ``processes / size`` processes without context parallelism.

    Args:
        target: the trainer or the accelerator.
        models: of an accelerate loop. A trainer has its own; where that is a module of yours, or
            has a head of yours, name the transformers model inside: it shards sequences, and what
            is around it runs on full sequences, the same on every context rank.
        size: the number of processes that share each sequence; a divisor of their number.
        layout: as of `lightning_cp.ContextParallel`, and so are the next two.
        algorithm: how keys and values reach the queries.
        attention: kernel, memory of a call.
        memory: ``keep_attention`` and ``offload``; a Trainer has arguments of its own for others.
        verify: run the first training step and the first evaluation step of a trainer on short
            sequences, sharded and as one device would, and raise if the loss, a gradient, an output
            or a logged value differs.
        renamed: raise, and say what former arguments are now.

    Returns:
        A handle; its ``remove()`` restores the trainer and its models.
    """
    refuse_arguments("context_parallel()", renamed)
    verify = Verify.of(verify)
    refuse_fields(Memory, memory, _TRAINERS_MEMORY)
    refuse_fields(Verify, verify, _TRAINERS_VERIFY)
    trainer, accelerator = _parts(target, models)
    if getattr(target, _MARK, None) is not None:
        raise ValueError(
            f"context_parallel() was called before for this {type(target).__name__}. Call remove() "
            "of its handle first."
        )
    check_size(size, accelerator)
    check_accelerator(accelerator, models)
    if trainer is not None:
        check_trainer(trainer, size)
        models = tuple(m for m in (*(models or (trainer.model,)), _reference(trainer)) if m)
    for model in models:
        check_sharded("accelerator" if trainer is None else "trainer", model)
    mesh = None
    if accelerator.num_processes > 1:
        shape = accelerator.num_processes // size, size
        names = ("dp_replicate", "cp")
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
    cp = ContextParallel(
        mesh if mesh is None else mesh["cp"],
        layout=layout,
        algorithm=algorithm,
        attention=attention,
        memory=memory,
        verify=replace(verify, steps=True),
    )
    handle = TrainerHandle(cp, mesh)
    try:
        handle.models += [shard_in_forward(model, handle.cp) for model in models]
        if size > 1:
            _share_batches(accelerator, handle)
            if trainer is not None:
                _count_once(trainer, handle)
                _run_alone_between_steps(trainer, handle)
        if trainer is not None:
            _adapt_trainer(trainer, handle)
        if accelerator.num_processes > 1:
            _average_gradients(accelerator, trainer, handle)
        if trainer is not None and size > 1 and verify.steps:
            assert mesh is not None  # noqa: S101
            data = mesh["dp_replicate"].get_group()
            verify_first_steps(trainer, handle.models, handle.cp, data, handle.replace)
    except Exception:
        handle.remove()
        raise
    handle.add(Patch(target, _MARK, handle))
    _logger.info(
        "context parallelism of %s: context_ranks=%d, data_ranks=%d, models=%d",
        type(target).__name__,
        size,
        handle.num_data_ranks,
        len(handle.models),
    )
    return handle


def verify(
    trainer: Any, *, num_batches: int = 1, check: bool = True, **options: Any
) -> list[Report]:
    """Compare a trainer's first batches with the stock model: loss and every gradient. Collective.

    After `context_parallel`, before ``train()``. What is compared is the model's own loss of a
    batch, in the way that the trainer's model computes it; see `hf_patches.verify`. The batches are
    those that this data rank would get first; training begins with them all the same.

    Args:
        trainer: under context parallelism.
        num_batches: how many.
        check: raise on all ranks if results differ. Otherwise look at ``passed`` of the reports.
        options: of `hf_patches.verify`: ``max_len``, ``tolerance``, ``oracle``.

    Returns:
        A report for each batch of this data rank.

    Raises:
        RuntimeError: on all ranks, if a batch of any of them differs.
    """
    handle: TrainerHandle | None = getattr(trainer, _MARK, None)
    if handle is None:
        raise ValueError(
            f"verify() got a {type(trainer).__name__} without context parallelism. Call "
            "context_parallel(trainer, size=...) before it."
        )
    model, accelerator = trainer.model, trainer.accelerator
    if not is_transformers(model) or not takes_full_sequences(model):
        raise ValueError(
            "verify() compares the loss of a model of transformers, and context_parallel() shards "
            f"the {type(handle.models[0].model).__name__} inside of {type(model).__name__}. "
            "Compare the losses of a few steps with those of one process."
        )
    device = next(model.parameters()).device
    if device.type != accelerator.device.type:
        raise ValueError(
            f"verify() got a model on {device.type}, and the processes communicate on "
            f"{accelerator.device.type}: under FSDP2 train() moves it. Call verify(trainer) in "
            "on_train_begin() of a TrainerCallback."
        )
    failure = "verify() failed on another rank; see its error."
    batches = raise_on_all(lambda: _first_batches(trainer, num_batches), failure, *handle.groups)
    reports = list[Report]()
    for batch in batches:
        compare = functools.partial(
            verify_model, model, batch, cp=handle.cp, check=False, **options
        )
        # After each one: under FSDP2 the next is a collective of all ranks.
        reports.append(raise_on_all(compare, failure, *handle.groups))
    if check:
        require_passed(reports, f"this {type(trainer).__name__}", *handle.groups)
    return reports


def _first_batches(trainer: Any, number: int) -> list[dict[str, Any]]:
    """Return the first batches of a trainer's loader; random states stay as they are."""
    with restored_random_states(trainer.model):
        loader = trainer.get_train_dataloader()
        batches = [dict(batch) for batch in itertools.islice(loader, number)]
    if hasattr(loader, "end"):
        loader.end()  # for accelerate: it is not iterated any more
    if len(batches) < number:
        raise ValueError(
            f"verify(num_batches={number}): the training data has {len(batches)} batches for this "
            "data rank. Give a smaller number."
        )
    for batch in batches:
        if "labels" not in batch:
            raise ValueError(
                f"verify() compares the model's own loss, and a batch of this "
                f"{type(trainer).__name__} has no labels for it: it holds {', '.join(batch)}. "
                "Verify an SFTTrainer or a Trainer with the same model and data."
            )
    return batches


def _parts(target: Any, models: tuple[nn.Module, ...]) -> tuple[Any, Any]:
    """Return the trainer, if there is one, and the accelerator."""
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from transformers import Trainer

    if isinstance(target, Trainer):
        whole: Any = target.model
        inside = {id(module) for module in whole.modules()}
        for model in models:
            if id(model) not in inside:
                raise TypeError(
                    f"context_parallel(trainer, size=...) got a {type(model).__name__} that is not "
                    "in trainer.model. Leave it out; a model inside of trainer.model can be named."
                )
        return target, target.accelerator
    if isinstance(target, Accelerator):
        if not models:
            raise TypeError(
                "context_parallel(accelerator, model, size=...) needs the model, before "
                "accelerator.prepare(model). Add it."
            )
        return None, target
    raise TypeError(
        "context_parallel() takes a Trainer of transformers or TRL, or an Accelerator with a "
        f"model; it got a {type(target).__name__}. In Lightning use ContextParallelStrategy; for a "
        "loop without accelerate, hf_patches.shard_in_forward(model, cp)."
    )


def _reference(trainer: Any) -> nn.Module | None:
    """Return the reference model of a preference or a policy trainer."""
    model: nn.Module | None = getattr(trainer, "ref_model", None)
    return model


# ---------------------------------------------------------------- the accelerator


def _share_batches(accelerator: Any, handle: TrainerHandle) -> None:
    """Give context ranks the same batches, and count what is gathered from them once."""
    handle.replace(accelerator, PREPARE_DEVICE_MESH, lambda: handle.mesh)
    config = accelerator.dataloader_config
    # Batches that rank 0 dispatches would differ between context ranks (accelerate#3626).
    handle.replace(config, "dispatch_batches", False)
    if not config.use_seedable_sampler:
        # Each rank shuffles by its own generator: start every epoch from that of rank 0.
        handle.replace(accelerator, "rng_types", [*accelerator.rng_types, "torch"])
    gather_for_metrics, gather = accelerator.gather_for_metrics, accelerator.gather
    size = handle.size

    def gather_once(data: Any) -> Any:
        from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

        first = functools.partial(_first_of_each, num_groups=handle.num_data_ranks, size=size)
        return recursively_apply(first, gather(data))

    def gather_for_metrics_once(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not _is_tensors(input_data):
            is_first = handle.cp.cp_rank == 0
            return gather_for_metrics(input_data if is_first else [], use_gather_object=True)
        with Patch(accelerator, "gather", gather_once):
            return gather_for_metrics(input_data)

    handle.replace(accelerator, "gather_for_metrics", gather_for_metrics_once)
    prepare_scheduler = accelerator.prepare_scheduler

    def prepare(*args: Any, **kwargs: Any) -> Any:
        return _step_per_data_rank(prepare_scheduler(*args, **kwargs), handle.num_data_ranks)

    handle.replace(accelerator, "prepare_scheduler", prepare)


def _first_of_each(x: Tensor, *, num_groups: int, size: int) -> Tensor:
    """Return what the first rank of each group has sent, of what all ranks have sent."""
    length = x.shape[0] // (num_groups * size)
    return x.view(num_groups, size, length, *x.shape[1:])[:, 0].flatten(0, 1)


def _is_tensors(data: Any) -> bool:
    if isinstance(data, Mapping):
        return all(_is_tensors(x) for x in data.values())
    if isinstance(data, tuple | list):
        return all(_is_tensors(x) for x in data)
    return isinstance(data, Tensor)


def _step_per_data_rank(prepared: Any, num_data_ranks: int) -> Any:
    """Let a prepared scheduler advance by one step per data rank; accelerate has one per process.

    With ``split_batches`` it advances by one at each call.
    """
    step = prepared.step
    prepared.split_batches = True

    def step_once_each(*args: Any, **kwargs: Any) -> None:
        scheduler = prepared.scheduler
        is_update = prepared.step_with_optimizer and prepared.gradient_state.sync_gradients
        for _ in range(num_data_ranks if is_update else 1):
            total = getattr(scheduler, "total_steps", None)
            if total is not None and is_update and num_steps(scheduler) > total:
                return
            step(*args, **kwargs)

    prepared.step = step_once_each
    return prepared


def _average_gradients(accelerator: Any, trainer: Any | None, handle: TrainerHandle) -> None:
    """Let models be wrapped for training, whatever they were used for before."""
    prepare_model = accelerator.prepare_model

    def prepare_anew(
        model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        if not evaluation_mode and not isinstance(model, DistributedDataParallel):
            forget_model(accelerator, model)
        return prepare_model(model, device_placement, evaluation_mode)

    handle.replace(accelerator, "prepare_model", prepare_anew)
    if trainer is None:
        return
    prepare_for_training = handle.method(trainer, PREPARE_FOR_TRAINING)
    evaluation_loop = trainer.evaluation_loop
    averaged: set[str] = set()

    def prepare_and_check(*args: Any, **kwargs: Any) -> Any:
        trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        if isinstance(trainer.model_wrapped, DistributedDataParallel) and trained != averaged:
            trainer.model_wrapped = trainer.model  # DDP averages what was trained when it was built
        averaged.clear()
        averaged.update(trained)
        no_checkpointing: Any = nullcontext()
        if any(isinstance(module, FSDPModule) for module in trainer.model.modules()):
            reshard(trainer.model)  # an evaluation leaves some units gathered
            # accelerate would checkpoint the layers a second time.
            plugin = accelerator.state.fsdp_plugin
            no_checkpointing = Patch(plugin, "activation_checkpointing", False)
        with no_checkpointing:
            model, loader = prepare_for_training(*args, **kwargs)
        check_averaged(trainer, model)
        return model, loader

    def shard_and_evaluate(*args: Any, **kwargs: Any) -> Any:
        if accelerator.is_fsdp2 and not isinstance(trainer.model, FSDPModule):
            # accelerate shards a model together with an optimizer only; train() builds its own.
            optimizer = torch.optim.SGD(trainer.model.parameters())
            trainer.model, prepared = accelerator.prepare(trainer.model, optimizer)
            forget_optimizer(accelerator, prepared)
            trainer.model_wrapped = trainer.model
        return evaluation_loop(*args, **kwargs)

    training_step = trainer.training_step

    def check_and_step(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, DistributedDataParallel):
            check_trained(model.module, averaged)
        return training_step(model, *args, **kwargs)

    handle.replace(trainer, "training_step", check_and_step)
    handle.replace(trainer, PREPARE_FOR_TRAINING, prepare_and_check)
    handle.replace(trainer, "evaluation_loop", shard_and_evaluate)


# ---------------------------------------------------------------- the trainer


def _count_once(trainer: Any, handle: TrainerHandle) -> None:
    """Count tokens, operations and samples of a group of context ranks once."""
    size = handle.size
    for sharded in handle.models:
        check_factor(trainer, sharded.model)
    handle.replace(
        trainer,
        "gather_function",
        functools.partial(
            trainer.accelerator.gather_for_metrics,
            use_gather_object=trainer.args.eval_use_gather_object,
        ),
    )
    # Tensor-parallel ranks share batches too, and the trainer divides by their number.
    tp_size = trainer.get_tp_size
    handle.replace(trainer, "get_tp_size", lambda: tp_size() * size)
    count_items = handle.method(trainer, NUM_ITEMS)

    def count_own_items(batch_samples: Any, device: Any) -> Any:
        if trainer.args.average_tokens_across_devices:
            return count_items(batch_samples, device)
        with Patch(trainer, "get_tp_size", tp_size):  # no sum over ranks, nothing to divide
            return count_items(batch_samples, device)

    handle.replace(trainer, NUM_ITEMS, count_own_items)
    track, operations = handle.method(trainer, TRACK_TOKENS), trainer.floating_point_ops

    def track_once(inputs: Any) -> None:
        before = trainer.state.num_input_tokens_seen
        track(inputs)
        added = trainer.state.num_input_tokens_seen - before
        trainer.state.num_input_tokens_seen = before + added // size

    handle.replace(trainer, TRACK_TOKENS, track_once)
    handle.replace(trainer, "floating_point_ops", lambda inputs: operations(inputs) / size)
    if {kind.__name__ for kind in type(trainer).__mro__} & _SAMPLERS:
        _share_completions(trainer, handle)


def _adapt_trainer(trainer: Any, handle: TrainerHandle) -> None:
    """Let a trainer ask for logits where it needs them, and know of documents."""
    predict = trainer.prediction_step

    def prediction_step(
        model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        sharded = handle.models[0]
        previous = sharded.logits
        if previous == "auto" and prediction_loss_only:
            sharded.logits = "never"
        try:
            return predict(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        finally:
            sharded.logits = previous

    handle.replace(trainer, "prediction_step", prediction_step)
    count_items = handle.method(trainer, NUM_ITEMS)
    handle.replace(trainer, NUM_ITEMS, functools.partial(_count_items, count_items))
    name, columns = signature_columns(trainer)
    if columns is not None and "document_ids" not in columns:
        # Else it would be dropped like any column that is no argument of the model.
        handle.replace(trainer, name, [*columns, "document_ids"])


def _run_alone_between_steps(trainer: Any, handle: TrainerHandle) -> None:
    """Let users call the models between steps, on one process if they like, as on one device."""
    number = 0

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            number += 1
            try:
                return step(*args, **kwargs)
            finally:
                number -= 1

        return call

    for name in ("training_step", "compute_loss", "prediction_step"):
        handle.replace(trainer, name, counted(getattr(trainer, name)))
    for model in handle.models:
        model.run_alone_where(lambda: number == 0 and is_for_user(_AROUND_MODELS))


def _count_items(count: Callable[..., Any], batch_samples: Any, device: Any) -> Any:
    """Count labels as the model scores them: none across the documents of ``document_ids``."""

    def shifted(batch: Any) -> Any:
        if "document_ids" not in batch or "labels" not in batch or "shift_labels" in batch:
            return batch
        labels = shift_labels(batch["labels"], batch["document_ids"])
        return {"labels": batch["labels"], "shift_labels": labels}

    return count([shifted(batch) for batch in batch_samples], device)


def _share_completions(trainer: Any, handle: TrainerHandle) -> None:
    """Let context ranks train on the completions that their first rank has sampled."""
    from accelerate.utils import set_seed

    args, mesh = trainer.args, handle.mesh
    assert mesh is not None  # noqa: S101
    handle.replace(args, "generation_batch_size", args.generation_batch_size // handle.size)
    # TRL seeds each process differently; each group is one process here.
    set_seed(args.seed + mesh["dp_replicate"].get_local_rank())
    group, device = mesh["cp"].get_group(), trainer.accelerator.device

    def from_first(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = [_moved(function(*args, **kwargs), "cpu")]
            dist.broadcast_object_list(result, dist.get_global_rank(group, 0), group)
            return _moved(result[0], device)

        return call

    # Sampled tokens, and whatever a reward function or a shuffle has drawn on each rank.
    for name in FROM_FIRST:
        handle.replace(trainer, name, from_first(getattr(trainer, name)))
    generate = handle.method(trainer, GENERATE)

    def generate_counted(*args: Any, **kwargs: Any) -> Any:
        before = trainer.state.num_input_tokens_seen
        result = generate(*args, **kwargs)
        added = trainer.state.num_input_tokens_seen - before
        trainer.state.num_input_tokens_seen = before + added // handle.size
        set_num_tokens(trainer)
        return result

    handle.replace(trainer, GENERATE, generate_counted)


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(x, device) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_moved(x, device) for x in value)
    return value
