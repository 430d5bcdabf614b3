# SPDX-License-Identifier: Apache-2.0
"""`shard_in_forward(model, cp)`: a model that takes full sequences and shards them in its forward.

It opens a step for each call, and returns what the stock model would return, the same on every
context rank. Code around it, a loop or a trainer, needs no step of its own.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_patches.enable import EnabledModel, enable, inner_model, is_enabled
from hf_patches.interface.input_checks import name_arguments, parameters_of
from hf_patches.model import forward
from hf_patches.model.forward import FULL_SEQUENCES, Enabled, TokenLogpOutput
from hf_patches.model.left_out import leave_out
from hf_patches.model.moe_loss import balance_loss
from lightning_cp.config import SequenceDims, check_choice
from lightning_cp.data.shard import full_tokens, shift_labels
from lightning_cp.parallel import ContextParallel
from lightning_cp.patch import patches_of, replace_method
from lightning_cp.private.fsdp2 import map_tensors
from lightning_cp.private.modules import run_pre_hooks
from lightning_cp.step import active_step
from lightning_cp.step.step import IGNORED_LABEL, Step

Logits = Literal["auto", "always", "never"]
"""Whether an output has logits where labels are given; ``auto``: not in training."""

# Fields of an output: those with one entry per token, and those that all ranks have in common.
_PER_TOKEN: Final = ("last_hidden_state", "hidden_states", "logits", "router_logits")
_COMMON: Final = ("loss", "aux_loss", "pooler_output", "start_logits", "end_logits")
_CACHES: Final = ("past_key_values", "cache_params")
_SCORES: Final = ("logits", "router_logits")
# What models with media compute on full sequences. A loss of them would count once per rank.
_OF_MEDIA: Final = (
    *("image_hidden_states", "video_hidden_states", "audio_hidden_states", "rope_deltas"),
    *("vision_hidden_states", "audio_features"),
)


@dataclass(eq=False)
class FullSequences:
    """The state of a model that takes full sequences.

    Args:
        cp: shards them.
        logits: whether an output has logits where labels are given.
        is_alone: whether each rank runs full sequences by itself, as one device.
        is_private: returns whether a call without gradients is one that other ranks may not make.
    """

    cp: ContextParallel
    logits: Logits
    is_alone: bool = False
    is_private: Callable[[], bool] = lambda: False

    def __deepcopy__(self, _: object) -> "FullSequences":
        return self  # groups cannot be copied; a copy of the model has the same ranks

    def step(
        self, batch: Mapping[str, Any], dims: SequenceDims | None = None
    ) -> AbstractContextManager[Any]:
        """Open the step of a call, with the sequence dims of its batch."""
        if self.is_alone:
            return self.cp.reference(batch, routed=True, sequence_dims=dims)
        return self.cp.step(batch, sequence_dims=dims)


@dataclass(eq=False)
class ShardedModel:
    """A model that takes full sequences, until `remove()`.

    Args:
        model: the transformers model, without a PEFT model around it.
        enabled: the handle of `enable`, if `shard_in_forward` has called it.
    """

    model: PreTrainedModel
    enabled: EnabledModel | None = None

    def remove(self) -> None:
        """Restore the model; one that was enabled before stays enabled."""
        state: FullSequences | None = self.model.__dict__.pop(FULL_SEQUENCES, None)
        if state is None:
            return
        for name, function in _METHODS.items():
            for patch in patches_of(self.model, name):
                if getattr(patch.value, "function", None) is function:
                    patch.remove()
        if self.enabled is not None:
            self.enabled.remove()

    undo = remove

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Run full sequences on each rank by itself, as one device, inside a ``with`` block."""
        state: FullSequences = self.model.__dict__[FULL_SEQUENCES]
        state.is_alone = True
        try:
            yield
        finally:
            state.is_alone = False

    def run_alone_where(self, is_private: Callable[[], bool]) -> None:
        """Run calls without gradients as ``generate()`` does, where a condition holds."""
        self.model.__dict__[FULL_SEQUENCES].is_private = is_private

    @property
    def logits(self) -> Logits:
        """Return whether an output has logits where labels are given; it can be set."""
        state: FullSequences = self.model.__dict__[FULL_SEQUENCES]
        return state.logits

    @logits.setter
    def logits(self, logits: Logits) -> None:
        check_choice("logits", logits, get_args(Logits))
        self.model.__dict__[FULL_SEQUENCES].logits = logits


def shard_in_forward(
    model: nn.Module, cp: ContextParallel, *, logits: Logits = "auto"
) -> ShardedModel:
    """Let a model be called with full sequences, and shard them inside of its forward.

    Every context rank calls the model with the same arguments, as the stock model is called, and
    gets what that would return: the loss (``num_items_in_batch`` is taken), full logits and hidden
    states. Gradients are exact once they are averaged over the ranks, as DDP and FSDP2 do, if every
    rank computes the same loss from the output. Give ``cp`` no data group: as under DDP, the loss
    is that of this data rank's samples.

    Inside of a step, and under ``cp.paused()``, the model behaves as an enabled one. Calls with a
    KV cache (``past_key_values``, ``use_cache=True``) and ``generate()`` run the stock model on
    full sequences, on each rank alone. Outputs have no cache.

    The model is enabled if it is not. Models with TRL's fused head (``add_fused_lm_head``, which
    comes first) take ``fused_lm_head=True``.

    Args:
        model: a model from transformers, or a PEFT model around one, before DDP or FSDP2.
        cp: the context ranks.
        logits: whether an output has logits, and router logits, where labels are given. ``auto``:
            not in training, where the loss needs none, and reading them raises; full logits take
            B x S x V numbers on every rank. Without labels there are always logits.

    Returns:
        A handle; its ``remove()`` restores the model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> handle = shard_in_forward(model, ContextParallel(None))
        >>> model(input_ids=torch.arange(6).view(1, 6)).logits.shape
        torch.Size([1, 6, 8])
        >>> handle.remove()
    """
    check_choice("logits", logits, get_args(Logits))
    inner = inner_model(model)
    state: FullSequences | None = inner.__dict__.get(FULL_SEQUENCES)
    if state is not None:
        if state.cp is not cp:
            raise ValueError(
                f"shard_in_forward() was called before for this {type(inner).__name__}, with "
                "another ContextParallel. Call remove() of its handle first; for a model that "
                "another trainer has had: handle = context_parallel(first_trainer, size=...), then "
                "handle.remove() before the next context_parallel()."
            )
        return ShardedModel(inner)
    if cp.groups.data.size > 1:
        raise ValueError(
            f"shard_in_forward() got a ContextParallel with {cp.groups.data.size} data ranks: its "
            "loss would be a mean over all of them, where the stock model's loss is that of its "
            "own samples. Build it without them: ContextParallel(mesh['cp'])."
        )
    was_enabled = is_enabled(inner)
    handle = enable(model)  # a PEFT model that came after is saved whole, too
    for name, function in _METHODS.items():
        if hasattr(inner, name):
            replace_method(inner, name, function)
    inner.__dict__[FULL_SEQUENCES] = FullSequences(cp, logits)
    return ShardedModel(inner, None if was_enabled else handle)


def takes_full_sequences(model: nn.Module) -> bool:
    """Return whether `shard_in_forward` has changed a model, or the one inside a PEFT model."""
    return FULL_SEQUENCES in inner_model(model).__dict__


def _generate(_: object, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Generate on full sequences: ranks may sample different tokens, and as many as they like."""
    with active_step.paused():
        return stock(*args, **kwargs)


def _forward(model: PreTrainedModel, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a model on full sequences."""
    arguments = name_arguments(model, args, kwargs)
    has_cache = arguments.get("past_key_values") is not None or arguments.get("use_cache")
    if active_step.opened() is not None or active_step.is_paused() or has_cache:
        return stock(**arguments)
    if not torch.is_grad_enabled() and model.__dict__[FULL_SEQUENCES].is_private():
        with active_step.paused():
            return stock(**arguments)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    as_tuple = not arguments.pop("return_dict", getattr(model.config, "return_dict", True))
    num_items = arguments.pop("num_items_in_batch", None)
    if "use_cache" in parameters_of(type(model).forward):
        arguments["use_cache"] = False  # it would hold this rank's tokens
    run = _run_fused if arguments.pop("fused_lm_head", False) else _run
    output = run(model, arguments, num_items)
    return output.to_tuple() if as_tuple else output


_METHODS: Final = {"forward": _forward, "generate": _generate}
"""What stands in place of a model's methods."""


def _run(model: PreTrainedModel, arguments: dict[str, Any], num_items: Tensor | int | None) -> Any:
    state: FullSequences = model.__dict__[FULL_SEQUENCES]
    enabled: Enabled = model.__dict__[forward.MARK]
    labels, keep = arguments.get("labels"), None
    if enabled.head != "sequence" and not takes_num_items(type(model).forward):
        num_items = None
    batch = _tensors(arguments)
    if labels is None:
        batch.pop("shift_labels", None)  # as the stock model, which then computes no loss
        keep = arguments.pop("logits_to_keep", None)
        batch.pop("logits_to_keep", None)
    elif enabled.head == "next token" and not arguments.get("token_logp"):
        batch["shift_labels"] = _targets(batch)
        del batch["labels"]
    with state.step(batch, _dims(state.cp, enabled, batch)) as local:
        step = active_step.current()
        assert step is not None  # noqa: S101
        call = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)} | local
        if "shift_labels" in local:
            call["labels"] = local["shift_labels"]  # for the check of ids
        call = _run_hooks(model, enabled, call)
        output = forward.forward_in_step(
            model, call, step, num_items=num_items, keep_logits=state.logits == "always"
        )
        if isinstance(output, TokenLogpOutput):
            return output  # of full sequences already
        is_evaluation = not torch.is_grad_enabled()
        wanted = state.logits == "always" or (state.logits == "auto" and is_evaluation)
        left_out = list[str]()
        if labels is not None and enabled.head != "sequence" and not wanted:
            left_out += ["logits"] if output.get("router_logits") is None else _SCORES
        full = {
            name: _unshard_field(model, enabled, name, value, step)
            for name, value in output.items()
            if value is not None and name not in (*_CACHES, *left_out)
        }
    if keep is not None and "logits" in full:
        full["logits"] = full["logits"][:, _kept(keep)]
    return leave_out(type(output)(**full), left_out)


def _dims(
    cp: ContextParallel, enabled: Enabled, batch: Mapping[str, Tensor]
) -> dict[str, int | None] | None:
    """Return the sequence dims of a batch, if it has several labels for each sequence."""
    names = ("labels", "start_positions", "end_positions") if enabled.head == "sequence" else ()
    full = [name for name in names if name in batch and batch[name].dim() > 1]
    return {**cp.config.sequence_dims, **dict.fromkeys(full)} if full else None


def _run_hooks(
    model: PreTrainedModel, enabled: Enabled, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments after the hooks that `enable` has on the model itself.

    Torch has run them before the step was open, when they change nothing.
    """
    ours = {handle.id for handle in enabled.changes if isinstance(handle, RemovableHandle)}
    return run_pre_hooks(model, arguments, ours)


@functools.cache
def takes_num_items(stock: Callable[..., Any]) -> bool:
    """Return whether a forward method passes ``num_items_in_batch`` on to its loss function.

    Heads of token classifiers and of older masked language models do not: trainers pass it, and
    their loss is a mean over the batch all the same.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(stock)))
    except (OSError, TypeError):  # no source: generated code
        return True
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    losses = [call for call in calls if getattr(call.func, "attr", "") == "loss_function"]
    passed = {keyword.arg for call in losses for keyword in call.keywords}
    return bool(passed & {None, "num_items_in_batch"})  # None: **kwargs


def _tensors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the labels of next tokens as the stock model takes them, in full sequences.

    It counts a document's first label too, unless that is -100; for ``document_ids``, which it
    does not know, labels are not shifted across documents.
    """
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return shift_labels(batch["labels"], batch.get("document_ids"))


def _kept(keep: int | Tensor) -> Any:
    return keep if isinstance(keep, Tensor) else slice(-keep or None, None)


def _unshard_field(
    model: PreTrainedModel, enabled: Enabled, name: str, value: Any, step: Step
) -> Any:
    """Return a field of an output for full sequences."""
    if name in _COMMON or (name == "logits" and enabled.head == "sequence"):
        return value
    if enabled.media is not None and name in _OF_MEDIA:
        return map_tensors(Tensor.detach, value)
    if name not in _PER_TOKEN:
        raise ValueError(
            f"{type(model).__name__} returned `{name}`, which is not known to be the same on all "
            "ranks, and cannot be unsharded. Leave out the argument that requests it, or open a "
            "step around the call: `with cp.step(batch) as local:`."
        )
    if isinstance(value, tuple | list):
        return tuple(_unshard_field(model, enabled, name, x, step) for x in value)
    if not isinstance(value, Tensor):
        return value
    if name == "router_logits" and value.dim() == 2:  # [B * L, experts]
        local = value.view(step.batch_size, step.tensor_len, -1)
        return full_tokens(local, step).flatten(0, 1)
    return full_tokens(value, step)


# ---------------------------------------------------------------- TRL's fused head

# Fields of its output that have one number per token, [B, L].
_FUSED: Final = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _run_fused(
    model: PreTrainedModel, arguments: dict[str, Any], num_items: Tensor | int | None
) -> Any:
    """Run TRL's fused head on this rank's tokens, and unshard what it returns per token.

    The loss is computed from full sequences, on every rank, as the head does it.
    """
    state: FullSequences = model.__dict__[FULL_SEQUENCES]
    enabled: Enabled = model.__dict__[forward.MARK]
    if not enabled.patch.previous or "labels" not in arguments:
        raise ValueError(
            f"fused_lm_head=True needs labels, and a head that trl.trainer.utils."
            f"add_fused_lm_head({type(model).__name__}) has added before shard_in_forward() or "
            "enable() is called. Trainers of TRL add it when they are built."
        )
    has_last = "shift_labels" in arguments
    batch = _tensors(arguments)
    targets = batch["shift_labels"] = _targets(batch)
    del batch["labels"]
    with state.step(batch) as local:
        step = active_step.current()
        assert step is not None  # noqa: S101
        others = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)}
        call = {**others, **local, "labels": local["shift_labels"]}
        call = forward.prepare_arguments(model, call, step)
        del call["labels"]
        outputs: list[Any] = []
        with forward.recorded(model, enabled.base, outputs):
            output = forward.stock_forward(model)(fused_lm_head=True, **call)
        names = [name for name in _FUSED if output.get(name) is not None]
        values = torch.stack([output[name].to(output.log_probs.dtype) for name in names], -1)
        values = full_tokens(values, step)
        auxiliary = None
        if output.get("aux_loss") is not None:
            router = {"aux_loss": output.aux_loss, "router_logits": outputs[0].get("router_logits")}
            auxiliary = balance_loss(model, router, step)
    if not has_last:  # the last token has no next one
        values, targets = values[:, :-1], targets[:, :-1]
    full = {name: values[..., i].to(output[name].dtype) for i, name in enumerate(names)}
    is_counted = targets != IGNORED_LABEL
    count = is_counted.sum().clamp(min=1) if num_items is None else num_items
    loss = -full["log_probs"].sum() / count
    if auxiliary is not None:
        full["aux_loss"], coefficient = auxiliary
        loss = loss + coefficient * full["aux_loss"].to(loss.dtype)
    return type(output)(loss=loss, label_mask=is_counted, **full)
