# SPDX-License-Identifier: Apache-2.0
"""What `context_parallel` refuses: settings that would change results, or have not been tried.

Every message says what came, the rule, and what to do.
"""

from collections.abc import Collection
from importlib import metadata
from typing import Any, Final

from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_patches.enable import inner_model, is_enabled
from hf_patches.shard_in_forward import takes_num_items
from hf_patches.support import LIBRARIES, architecture_of, head_of
from lightning_cp.fsdp.sharding import check_no_gradient_hooks

_TRL: Final = "1.15"
"""The first version whose trainers share one fused head."""

_TRANSFORMERS: Final = "5.19"
"""The first version that divides the number of labels, and the factor of a loss, by the number of
ranks that share a batch."""

_CAUSAL: Final = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())

_SERVED: Final = (
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
    "GRPOTrainer",
    "RLOOTrainer",
)


def check_size(size: int, accelerator: Any) -> None:
    """Raise if the processes cannot be divided into groups of ``size``."""
    world = accelerator.num_processes
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"context_parallel(size={size!r}): pass the number of processes that share each "
            "sequence, 1 or more."
        )
    if world % size:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        raise ValueError(
            f"context_parallel(size={size}) does not divide the {world} processes of this job. Use "
            f"one of {divisors}, or start {size * -(-world // size)} processes: torchrun "
            "--nproc-per-node N, or accelerate launch --num_processes N."
        )


def check_accelerator(accelerator: Any, models: tuple[nn.Module, ...]) -> None:
    """Raise for settings of accelerate that are not supported."""
    kind = accelerator.distributed_type.value
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise ValueError(
            f"context_parallel() does not support distributed_type={kind} of accelerate. Use DDP "
            "(the default of torchrun), or FSDP2: fsdp_config={'version': 2, ...}."
        )
    if kind == "FSDP" and (plugin is None or plugin.fsdp_version != 2):
        raise ValueError(
            "context_parallel() does not support FSDP1, which flattens the weights. Use FSDP2: "
            "fsdp_config={'version': 2, ...} of TrainingArguments, fsdp_version: 2 of accelerate."
        )
    if accelerator.parallelism_config is not None:
        raise ValueError(
            f"context_parallel() shares sequences by itself, but the accelerator has a "
            f"{accelerator.parallelism_config!r}. Remove parallelism_config: the other processes "
            "are data ranks, and FSDP2 shards over all of them."
        )
    config = accelerator.dataloader_config
    if config.split_batches:
        raise ValueError(
            "split_batches=True divides each batch among processes. Remove it: "
            "per_device_train_batch_size, or the batch size of your loader, is that of a data rank."
        )
    if config.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True reads batches on rank 0 and gives each process another one, "
            "where context ranks need the same. Remove it: every process reads its own batches."
        )
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        raise ValueError(
            "context_parallel() does not support torch_compile=True, or a dynamo backend of "
            "accelerate: the model opens a step in its forward, which is not compiled. Switch it "
            "off."
        )
    for model in models:
        check_model(model)


def check_model(model: nn.Module) -> None:
    """Raise for a model that has been wrapped."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ValueError(
            f"context_parallel() got a model inside {type(model).__name__}. Call it before "
            "train() or prepare(), with the model itself."
        )


def check_factor(trainer: Any, model: PreTrainedModel) -> None:
    """Raise if a Trainer would multiply a mean over samples by the number of processes."""
    transformers = metadata.version("transformers")
    counts = trainer.model_accepts_loss_kwargs and trainer.args.average_tokens_across_devices
    is_old = Version(transformers) < Version(_TRANSFORMERS)
    if is_old and counts and not takes_num_items(type(model).forward):
        raise ValueError(
            f"The loss of {type(model).__name__} is a mean that does not count labels, and the "
            f"Trainer of transformers {transformers} multiplies it by the number of processes, "
            f"context ranks among them. Install transformers >= {_TRANSFORMERS}."
        )


def check_averaged(trainer: Any, model: nn.Module) -> None:
    """Raise if no one would average the gradients of a model that `train` is about to train."""
    if not isinstance(model, DistributedDataParallel | FSDPModule):
        raise RuntimeError(
            f"{type(trainer).__name__}.train() is about to train {type(model).__name__}, which is "
            f"in neither DDP nor FSDP2: each of the {trainer.accelerator.num_processes} processes "
            "would train with its own gradients. Leave wrapping to the trainer: remove what "
            "replaces its `_wrap_model`, `model` or `model_wrapped`, and do not pass the model to "
            "accelerator.prepare()."
        )


def check_trained(model: nn.Module, averaged: Collection[str]) -> None:
    """Raise if a parameter is trained that DDP does not average: unfrozen since it was built."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in averaged:
            raise RuntimeError(
                f"`{name}` was frozen when training began, and is trained now: DDP averages the "
                "gradients of parameters that were trained when it was built, and processes would "
                "train this one apart. Unfreeze it before train(), with a learning rate of 0 until "
                "it shall move; or use FSDP2."
            )


def check_sharded(name: str, model: nn.Module) -> None:
    """Raise for a module or a head of the user's own, which may do anything with a shard.

    Args:
        name: what the caller of `context_parallel` passes first, ``trainer`` or ``accelerator``.
        model: the model.
    """
    advice = ""
    if is_transformers(model):
        inner = inner_model(model)
        is_known = type(inner).__module__.partition(".")[0] in LIBRARIES
        has_head = head_of(inner) is not None or inner.config.is_encoder_decoder
        if is_enabled(inner) or (is_known and has_head):
            return
        if has_head:
            advice = (
                " Or shard all of it: if hf_patches.verify(model, batch, cp=cp, allow_unknown=True)"
                " passes, call enable(model, allow_unknown=True) before."
            )
    owner = "trainer.model" if name == "trainer" else "model"
    inside = (path for path, module in model.named_modules() if path and _is_served(module))
    path = next(inside, None)
    raise TypeError(
        f"context_parallel({name}, size=...) got {type(model).__name__}, which is not a class of "
        "transformers: what its forward does with a shard of each sequence is not known. "
        + (
            f"Name the model inside: context_parallel({name}, {owner}.{path}, size=...); all "
            "around it then runs on full sequences, on every context rank."
            if path
            else "Build it around a model of transformers, and name that one."
        )
        + advice
    )


def is_transformers(model: nn.Module) -> bool:
    """Return whether a model is from transformers, or a PEFT model around one."""
    try:
        inner_model(model)
    except TypeError:
        return False
    return True


def _is_served(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers that can be sharded by itself."""
    if not isinstance(module, PreTrainedModel) or head_of(module) is None:
        return False
    known = architecture_of(module)
    return known is not None and known.is_served


def check_trainer(trainer: Any, size: int) -> None:
    """Raise for trainers and arguments that are not supported."""
    args = trainer.args
    check_model(trainer.model)
    is_loaded_sharded = getattr(trainer, "is_distributed_loading_by_transformers", False)
    if is_loaded_sharded or trainer.get_tp_size() > 1:
        raise ValueError(
            "The model was loaded with a distributed_config or a tp_plan of transformers, which is "
            "not supported. Load it without; FSDP2: fsdp_config={'version': 2, ...}."
        )
    is_sharded = any(isinstance(p, DTensor) for p in trainer.model.parameters())
    if trainer.model_wrapped is not trainer.model or is_sharded:
        raise ValueError(
            f"{type(trainer).__name__} has wrapped its model already. Call context_parallel() "
            "after the trainer is built, before train(), evaluate() and predict()."
        )
    if trainer.model_init is not None:
        raise ValueError(
            "model_init= builds another model in train(), which would not be sharded. Pass model=."
        )
    if trainer.accelerator.distributed_type.value == "FSDP":
        check_no_gradient_hooks(trainer.model, "DDP")
        if args.label_smoothing_factor and type(inner_model(trainer.model)).__name__ in _CAUSAL:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} under FSDP2: transformers "
                "does not know the class of a sharded model, and scores each token against its own "
                "label instead of the next one's. Use DDP, or smooth labels in compute_loss_func."
            )
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"{name}={getattr(args, name)!r} is not supported: {reason}")
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' gives each process another batch, where "
            "context ranks need the same. Use 'random': layout='balanced' gives ranks equal work."
        )
    _check_trl(trainer, size)


_REFUSED: Final = {
    "auto_find_batch_size": (
        "it tries again on the rank that ran out of memory, while the others wait. Switch it off."
    ),
    "neftune_noise_alpha": (
        "its noise is scaled by the length of the sequence, and the model sees a shard. Set it to "
        "None."
    ),
    "use_liger_kernel": (
        "its fused loss replaces the model's forward, and would see a shard. Switch it off: long "
        "sequences are scored in chunks here too."
    ),
    "activation_offloading": "it has not been tried. Use gradient_checkpointing=True.",
    "use_vllm": "it has not been tried. Completions are sampled with transformers.",
}


_OVER_ALL: Final = {
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "normalize_advantages": True,
}
"""Settings of policy trainers that compare the completions of all processes."""


def _check_trl(trainer: Any, size: int) -> None:
    """Raise for a trainer of TRL that is not known to be exact."""
    ours = next((cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")), None)
    if ours is None:
        return
    if Version(metadata.version("trl")) < Version(_TRL):
        raise ValueError(
            f"context_parallel() needs trl >= {_TRL}, and {metadata.version('trl')} is installed: "
            "pip install 'lightning-cp[trl]'."
        )
    if ours.__name__ not in _SERVED:
        raise ValueError(
            f"{ours.__name__} of TRL has not been tried under context parallelism. Supported are "
            f"transformers' Trainer and {', '.join(_SERVED)}."
        )
    transformers = metadata.version("transformers")
    if (
        ours.__name__ == "SFTTrainer"
        and Version(transformers) < Version(_TRANSFORMERS)
        and size > 1
    ):
        raise ValueError(
            f"context_parallel() of an SFTTrainer needs transformers >= {_TRANSFORMERS}, and "
            f"{transformers} is installed: before, it counts labels in another way than TRL."
        )
    if not hasattr(trainer, "num_generations"):
        return
    for name, value in _OVER_ALL.items():
        if size > 1 and getattr(trainer, name, None) == value:
            raise ValueError(
                f"{name}={value!r} of {ours.__name__} divides by a standard deviation over the "
                "completions of all processes, which holds those of a group once per context rank. "
                "Use the default: rewards of a prompt are compared with each other."
            )
    args = trainer.args
    completions = args.per_device_train_batch_size * args.steps_per_generation
    if size > 1 and completions % trainer.num_generations:
        raise ValueError(
            f"A group of context ranks samples per_device_train_batch_size x steps_per_generation "
            f"= {args.per_device_train_batch_size} x {args.steps_per_generation} = {completions} "
            f"completions at once: that must be a multiple of num_generations="
            f"{trainer.num_generations}, so that all completions of a prompt are in one group."
        )
