# SPDX-License-Identifier: Apache-2.0
"""The steps of a trainer, compared with one device before they are believed.

The first training step and the first evaluation step run on short batches, once sharded and once as
one device would run them: the loss, every gradient, outputs and logged values must be the same.
Nothing that they change stays changed. `lightning_cp.compare` compares. A few later steps do so
again, more and more seldom: users' code may change with the number of steps.
"""

import copy
import functools
import importlib
import inspect
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_patches.shard_in_forward import ShardedModel
from hf_patches.trainers.private import logged_metrics
from lightning_cp.comm.transport import GroupTransport
from lightning_cp.compare.replay import NotComparableError
from lightning_cp.compare.restore import user_hooks
from lightning_cp.compare.trials import StepRun, TrialRuns, Value, copied, is_in_turn
from lightning_cp.compare.verify import (
    Weights,
    has_room,
    lowest_precision,
    take_gradients,
    truncate_batch,
    without_trace,
)
from lightning_cp.compare.whose_code import LIBRARIES, is_of_user
from lightning_cp.data import outputs
from lightning_cp.data.batch import SEQUENCE_DIMS, pad_samples
from lightning_cp.data.media_names import media_names
from lightning_cp.data.outputs import OutputLeaf
from lightning_cp.parallel import ContextParallel
from lightning_cp.patch import Patch
from lightning_cp.step.leaves import flatten
from lightning_cp.step.step import IGNORED_LABEL

_logger = logging.getLogger(__name__)

_MAX_LEN: Final = 512
"""The length to which sequences are truncated."""

_LONGEST_WHOLE: Final = 4096
"""Tokens of a batch that each rank runs in full, where it cannot be truncated."""

# Losses of preference trainers are differences of sums over tokens. Metrics may be choices between
# scores that differ by rounding: the same on all ranks is all that can be asked of them.
_LOSS_FLOOR, _METRIC_FLOOR = 2e-5, float("inf")

# In low precision that much of the norm of a gradient may differ; parts of it differ by more.
_LOW_GRADIENT: Final = 0.3

_DATA: Final = ("train_dataset", "eval_dataset")
_BELOW: Final = sys.stdlib_module_names | {"torch", "accelerate", "torchmetrics"}
"""Whose functions count processes for those who call them."""


def verify_steps(
    trainer: Any,
    models: list[ShardedModel],
    cp: ContextParallel,
    data: dist.ProcessGroup,
    replace: Callable[[Any, str, Any], None],
) -> None:
    """Compare steps of a trainer with one device; raise on all ranks if they differ.

    Args:
        trainer: under context parallelism.
        models: the handles of its models.
        cp: the context ranks.
        data: the ranks with other batches, and this one.
        replace: sets an attribute of the trainer until context parallelism is undone.
    """
    transport = [GroupTransport(data)] if data.size() > 1 else []
    runs = TrialRuns(cp, max_len=_MAX_LEN, data=transport)
    calls, due, told = Counter[Any](), set[Any](), set[str]()
    # FSDP2 holds unreduced gradients of the batches before, which a trial run would drop.
    is_amid_update = False
    # An own training step may compute its loss by itself.
    is_own = is_of_user(type(trainer).training_step)
    for stage in ("training_step" if is_own else "compute_loss", "prediction_step"):
        function = getattr(trainer, stage)

        def verified(
            model: nn.Module,
            inputs: Any,
            *args: Any,
            _stage: str = stage,
            _function: Callable[..., Any] = function,
            **kwargs: Any,
        ) -> Any:
            nonlocal is_amid_update
            is_training = _stage != "prediction_step"
            # Data ranks may get different kinds of batches at first: they compare once.
            key = _stage, None if transport else frozenset(inputs)
            is_step = not is_training or (torch.is_grad_enabled() and (model.training or is_own))
            if is_step and not runs.is_running:
                calls[key] += 1
                if is_in_turn(calls[key]):
                    due.add(key)
                if key in due and not is_amid_update:
                    due.remove(key)
                    call = _TrainerCall(
                        _stage, trainer, models, cp, data, _function, model, args, kwargs
                    )
                    _compare(runs, call, inputs, told)
                if is_training:
                    is_amid_update = not trainer.accelerator.sync_gradients
            return _function(model, inputs, *args, **kwargs)

        replace(trainer, stage, verified)


def _compare(runs: TrialRuns, call: "_TrainerCall", inputs: Any, told: set[str]) -> None:
    """Run a step on short batches and compare; say once what could not be compared."""
    reason = ""
    if not isinstance(inputs, Mapping):
        reason = "its batch is no dict."
    elif not has_room(call.model):  # later there are states of the optimizer
        reason = "the GPU has no room for it."
    parts = [] if reason else _short_batches(inputs, call.cp)
    whole = [inputs] if parts and _longest(inputs) <= _LONGEST_WHOLE else []
    results, failure, is_over = list[Any](), None, False
    # A step may refuse shorter sequences, or take an index among all processes for one of a batch.
    for batches, call.sees_rank in ((parts, False), (whole, False), (parts, True)):
        if not results:  # on all ranks
            number = runs.equal_number([] if is_over else batches)
            results, problem = runs.compare_runs(call, number)
            failure = problem or failure
            is_over = isinstance(failure, NotComparableError)
    if is_over:
        reason = str(failure)
    elif failure is not None and not results:
        reason = f"it raised on full sequences: {type(failure).__name__}: {failure}"
    if reason:
        _say(f"{call.stage}() is not compared with one device: {reason}", told)
    new = {name: pair for name, pair in call.differing.items() if name not in told}
    told.update(new)
    if new:
        named = [f"`{name}` has {x:.6g} instead of {y:.6g}" for name, (x, y) in new.items()]
        more = f", and {len(named) - 4} more places" if len(named) > 4 else ""
        _logger.warning(
            "%s() keeps other numbers on this rank than one device would: %s%s. They are in no "
            "loss and in no log, but a callback or compute_metrics that reads them gets this "
            "rank's values: a hook on a layer sees this rank's tokens. Request hidden states from "
            "the model instead (output_hidden_states=True): it returns full sequences.",
            call.stage,
            ", ".join(named[:4]),
            more,
        )


def _say(text: str, told: set[str]) -> None:
    """Log a warning that has not been logged before."""
    if text not in told:
        _logger.warning(text)
    told.add(text)


# ---------------------------------------------------------------- batches


def _short_batches(inputs: Any, cp: ContextParallel) -> list[Any]:
    """Return short batches like this one: one that is divided evenly, and one that is padded.

    Also one with padding of its own, if this one has some. None for a long one with media or with
    unknown names, which cannot be truncated.
    """
    dims = _token_dims(inputs)
    longest = max((inputs[name].shape[dim] for name, dim in dims.items()), default=0)
    has_mask = any(isinstance(x, Tensor) and x.dim() > 3 for x in inputs.values())
    if media_names(inputs) or has_mask or not dims:
        return [inputs] * 2 if _longest(inputs) <= _LONGEST_WHOLE else []
    chunks = 2 * cp.cp_size
    odd, even = 8 * chunks + 1, min(_MAX_LEN, longest) // chunks * chunks
    if any(name.startswith("cu_seq_lens") for name in inputs):
        return [truncate_batch(dict(inputs), cp=cp, max_len=n) for n in (even or longest, odd)]
    parts = [_cut(inputs, dims, n) for n in (even or longest, odd)]
    mask = parts[-1].get("attention_mask")
    if isinstance(mask, Tensor) and bool((inputs["attention_mask"] == 0).any()):
        parts.append(pad_samples(parts[-1]))
    return parts


def _token_dims(inputs: Any) -> dict[str, int]:
    """Return the dims along which tensors of a batch hold tokens, by name.

    They are as long as ids or embeddings of tokens. Others hold features, or labels of a sample.
    """
    dims = {
        name: dim
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.dim() > 1
        if (dim := SEQUENCE_DIMS.get(name, 1)) is not None
    }
    lengths = {
        inputs[name].shape[dim]
        for name, dim in dims.items()
        if name.endswith("_ids") or "input_ids" in name or "inputs_embeds" in name
    }
    return {name: dim for name, dim in dims.items() if inputs[name].shape[dim] in lengths}


def _longest(inputs: Any) -> int:
    """Return the number of tokens of a batch, of all its dims if it is not known."""
    sizes = [inputs[name].shape[dim] for name, dim in _token_dims(inputs).items()]
    tensors = [leaf.value for leaf in flatten(inputs).tensors]
    return max(sizes or [size for x in tensors for size in x.shape[1:]], default=0)


def _cut(inputs: Any, dims: Mapping[str, int], max_len: int) -> Any:
    """Return a batch of sequences of at most ``max_len`` tokens, around the first label.

    Prompts, which are padded at their start, keep their end.
    """
    scored, start = _scored(inputs), 0
    if scored is not None and scored.shape[1] > max_len:
        first = int(scored.any(0).to(torch.int8).argmax())
        start = min(max(0, first - max_len // 2), scored.shape[1] - max_len)
    cut = copy.copy(inputs)
    for name, dim in dims.items():
        length = inputs[name].shape[dim]
        if length > max_len:
            is_scored = scored is not None and length == scored.shape[1]
            at = length - max_len if name.startswith("prompt") else start if is_scored else 0
            cut[name] = inputs[name].narrow(dim, at, max_len)
    return cut


def _scored(inputs: Any) -> Tensor | None:
    """Return which tokens are scored, [B, S]; None if that is not known."""
    labels, mask = inputs.get("labels"), inputs.get("completion_mask")
    if isinstance(labels, Tensor) and labels.dim() == 2:
        return labels != IGNORED_LABEL
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


# ---------------------------------------------------------------- one run


@dataclass(eq=False)
class _TrainerCall:
    """A step of a trainer that can be called on any batch.

    Args:
        stage: the name of the method.
        trainer: the trainer.
        models: the handles of its models.
        cp: the context ranks.
        data: the ranks with other batches, and this one.
        function: the method.
        model: the model that it got, which may be wrapped.
        args: what it got after the batch.
        kwargs: what it got by name.
    """

    stage: str
    trainer: Any
    models: list[ShardedModel]
    cp: ContextParallel
    data: dist.ProcessGroup
    function: Callable[..., Any]
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    skip: str = "context_parallel(..., verify=False)"
    sees_rank: bool = False
    """Whether users see the rank among the data ranks where full sequences run."""
    differing: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The first number that differs of each place that users keep some in, and one device's."""
    may_draw: bool = field(init=False)
    leaves_out: bool = True

    def __post_init__(self) -> None:
        self.may_draw = self.stage != "prediction_step"

    def precision(self) -> torch.dtype:
        """Return the lowest precision in which the step computes."""
        return lowest_precision(self.model, self.trainer.accelerator.mixed_precision)

    def cure(self, value: Value | None) -> str:
        """Return how to make a value that differs, for errors."""
        if value is not None and value.source.startswith("gradient of"):
            return (
                "It is no parameter of the model: nobody averages its gradient over the ranks, "
                "each of which computes the part of its own tokens. Make it one, before the "
                "trainer is built: trainer.model.NAME = it (a parameter or a module)."
            )
        return (
            "Inside of the model each rank holds its own tokens: what a hook on a layer sees there "
            "must not enter a loss or a log. Request hidden states from the model instead "
            "(output_hidden_states=True): it returns full sequences. The number of data ranks is "
            f"accelerator.num_processes // {self.cp.cp_size}: a loss that is multiplied by the "
            "number of all processes, or sums what gather() and other collectives get from all of "
            "them, counts each token once per context rank. accelerator.gather_for_metrics() "
            "returns each sample once."
        )

    def report_kept(self, wrong: Mapping[str, tuple[float, float]]) -> str:
        """Note numbers that the step has kept, for a warning, and those of one device."""
        for path, (value, expected) in wrong.items():
            is_same = abs(value - expected) <= _LOSS_FLOOR
            if not is_same and "._metrics[" not in path:  # those are compared
                # A list may hold one for each step so far.
                self.differing.setdefault(path.partition("[")[0], (value, expected))
        return ""

    def run(self, batch: Any, *, alone: bool, seed: int = 0) -> StepRun:
        """Run the step, collect its values, and undo what it changes.

        An error of a run on the ranks says that full sequences raise none.
        """
        try:
            return self._run_once(batch, alone=alone, seed=seed)
        except Exception as error:
            if alone or _raised_in(error) in ("hf_patches", "lightning_cp"):
                raise
            raise ValueError(
                f"{self.stage}() runs on full sequences, and raises on {self.cp.cp_size} ranks: "
                f"{type(error).__name__}: {error} {self.cure(None)} To skip this comparison: "
                f"{self.skip}."
            ) from error

    def _run_once(self, batch: Any, *, alone: bool, seed: int) -> StepRun:
        trainer = self.trainer
        model = self.model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        callbacks = trainer.callback_handler.callbacks
        prepared = without_trace(
            model,
            *(trainer, trainer.state, trainer.control, trainer.args, *callbacks),
            *_updates(trainer),
            functions=[trainer.compute_loss_func] if trainer.compute_loss_func else [],
            leave=_DATA,
            is_reduced=trainer.accelerator.sync_gradients,
            evaluates=not self.may_draw and self.stage != "prediction_step",
            seed=seed,
        )
        one_device = _as_one_device(trainer, self.models, self.data, sees_rank=self.sees_rank)
        with (
            prepared as (reached, weights),
            one_device if alone else nullcontext(),
            _recorded_logs(trainer) as logs,
        ):
            if user_hooks(model):  # what they keep may be used by the next step
                self._call(model, batch, weights)
                model.zero_grad(set_to_none=True)
                logs.clear()
            for x in reached.trained.values():
                x.grad = None
            result = self._call(model, batch, weights)
            if is_of_user(type(trainer).log):
                self._log()
            values = self._values(result, logs) | self._outside_gradients(reached.trained)
            gradients = take_gradients(model, None if alone else self.cp.groups.context)
            return StepRun(values, gradients=gradients, kept=reached.numbers())

    def _values(self, result: Any, logs: Mapping[str, list[Any]]) -> dict[str, Value]:
        """Return what the step has returned and logged, by name."""
        values = {
            f"output{leaf.path}": Value(
                leaf, f"returned output{leaf.path}", is_loss=True, floor=_LOSS_FLOOR
            )
            for leaf in outputs.leaves(_detached(result))
        }
        for path, number in _numbers(logged_metrics(self.trainer)):
            values[f"metrics {path}"] = Value(
                OutputLeaf("", number), f"logged {path}", is_loss=True, floor=_METRIC_FLOOR
            )
        for path, number in _numbers(logs):
            values[f"log {path}"] = Value(OutputLeaf("", number), f"logged {path}")
        return values

    def _log(self) -> None:
        """Call the user's own log(), which may add values to those of a step."""
        logs = dict.fromkeys(("loss", "grad_norm", "learning_rate"), 1.0)
        if self.stage == "prediction_step":
            logs = {"eval_loss": 1.0}
        with suppress(Exception):  # it may ask for what a step logs after others
            self.trainer.log({**logs, "epoch": 0.0})

    def _outside_gradients(self, trained: Mapping[str, Tensor]) -> dict[str, Value]:
        """Return the gradients of tensors outside of the model, which no one averages."""
        is_low = torch.get_float32_matmul_precision() != "highest"
        is_low |= self.precision() in (torch.float16, torch.bfloat16)
        values, number = {}, torch.zeros(())
        for path, x in sorted(trained.items()):  # ranks may find them in another order
            gradient = number if x.grad is None else x.grad.detach()
            norm = float(gradient.norm())
            leaf = OutputLeaf("", torch.tensor(norm) if is_low else gradient)
            name = f"gradient of `{path}`"
            values[name] = Value(leaf, name, floor=_LOW_GRADIENT * norm if is_low else 0.0)
        return values

    def _call(self, model: nn.Module, batch: Any, weights: Weights) -> Any:
        """Call the method; in training, run backward where the method does not."""
        inputs = copied(batch)
        if self.stage == "training_step":
            # DDP averages gradients, which the method may read after backward.
            with _synchronized(self.model):
                return self.function(self.model, inputs, *self.args, **self.kwargs)
        result = self.function(model, inputs, *self.args, **self.kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        weights.end_forward()
        if self.stage == "compute_loss" and isinstance(loss, Tensor) and loss.requires_grad:
            loss.mean().backward()  # type: ignore[no-untyped-call]
        return result


def _updates(trainer: Any) -> Iterator[Any]:
    """Yield what steps may change of the optimizer: rates, and their scheduler."""
    if trainer.optimizer is not None:
        yield trainer.optimizer.param_groups
    if (scheduler := trainer.lr_scheduler) is not None:
        yield getattr(scheduler, "scheduler", scheduler)


def _detached(result: Any) -> Any:
    return result.detach() if isinstance(result, Tensor) else result


@contextmanager
def _synchronized(model: nn.Module) -> Iterator[None]:
    """Let DDP average gradients, also of a batch that is not the last before an update."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with Patch(model, "require_backward_grad_sync", True):
        yield


@contextmanager
def _recorded_logs(trainer: Any) -> Iterator[dict[str, list[Any]]]:
    """Record what is logged in a step, without logging it: below the log() of a user's class."""
    logs: dict[str, list[Any]] = {}

    def log(_: Any, values: Mapping[str, Any], *__: Any, **___: Any) -> None:
        for name, value in values.items():
            logs.setdefault(name, []).append(value)

    owners = [cls for cls in type(trainer).__mro__ if "log" in vars(cls)]
    with Patch(next(cls for cls in owners if not is_of_user(cls)), "log", log):
        yield logs


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers in a container of metrics, with their paths."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _numbers(part, f"{path}[{index}]")
    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        yield path, value


# ---------------------------------------------------------------- as one device


# What users call over all processes, and as one of them.
_COLLECTIVES: Final = {
    "torch.distributed": (
        *("get_world_size", "all_reduce", "all_gather", "all_gather_into_tensor"),
        *("all_gather_object", "gather", "reduce", "reduce_scatter_tensor", "broadcast"),
    ),
    "torch.distributed.nn.functional": ("all_gather", "all_reduce", "reduce_scatter"),
}
_PEERS: Final = {"src": "group_src", "dst": "group_dst"}


@contextmanager
def _as_one_device(
    trainer: Any, models: list[ShardedModel], data: dist.ProcessGroup, *, sees_rank: bool
) -> Iterator[None]:
    """Let models run on full sequences, on each rank alone; users see the data ranks only.

    What libraries compute from the number of processes cancels out, as it does in a sharded run.

    Args:
        trainer: the trainer.
        models: the handles of its models.
        data: the ranks with other batches, and this one.
        sees_rank: whether users see the rank among them, too. Else what they do on the first
            process only remains there.
    """
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]

    state, args, size = PartialState(), type(trainer.args), data.size()
    seen = [
        (PartialState, "num_processes", state.num_processes, size),
        (AcceleratorState, "num_processes", state.num_processes, size),
        (args, "world_size", state.num_processes, size),
    ]
    ranks = [(owner, "process_index") for owner in (PartialState, AcceleratorState, args)]
    if sees_rank:
        seen += [(*owner, state.process_index, data.rank()) for owner in ranks]
    tp_size = trainer.get_tp_size
    factor = state.num_processes // size
    environment = {"WORLD_SIZE": size} | ({"RANK": data.rank()} if sees_rank else {})
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.reference())
        for owner, name, stock, own in seen:
            stack.enter_context(Patch(owner, name, _seen_as(stock, own)))
        stack.enter_context(
            Patch(trainer, "get_tp_size", lambda: tp_size() // (factor if is_for_user() else 1))
        )
        for owner, name, function in _collectives(sees_rank):
            stack.enter_context(Patch(owner, name, _among(function, data)))
        stack.enter_context(_environment({k: str(x) for k, x in environment.items()}))
        yield


def _seen_as(stock: int, own: int) -> property:
    return property(lambda _: own if is_for_user() else stock)


def _collectives(sees_rank: bool) -> list[tuple[Any, str, Any]]:
    """Return the collectives of torch, where they are and where users have imported them to."""
    functions = dict[int, Any]()
    for module, names in _COLLECTIVES.items():
        owner = importlib.import_module(module)
        functions |= {id(x := getattr(owner, name)): x for name in names}
    if sees_rank:
        functions[id(dist.get_rank)] = dist.get_rank
    return [
        (module, name, value)
        for title, module in [*sys.modules.items()]
        if title in _COLLECTIVES or title.partition(".")[0] not in LIBRARIES | _BELOW
        for name, value in [*getattr(module, "__dict__", {}).items()]
        if id(value) in functions
    ]


def _among(function: Callable[..., Any], data: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a collective that works on the data ranks where users mean all processes."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        values = bound.arguments
        group = values.get("group")
        if (group is None or group is dist.group.WORLD) and is_for_user():
            values["group"] = data
            for peer, own in _PEERS.items():
                if values.get(peer) is not None:
                    values[own] = values.pop(peer)
        return function(*bound.args, **bound.kwargs)

    return call


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set those of some environment variables that are set."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update({name: values[name] for name in before})
    try:
        yield
    finally:
        os.environ.update(before)


def is_for_user(through: Collection[str] = ()) -> bool:
    """Return whether the function that asks was called by code of a user.

    Args:
        through: packages that may lie between, beside torch, accelerate and Python's own.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (root := _root_of(frame)) and (root in _BELOW or root in through):
        frame = frame.f_back
    return frame is not None and _root_of(frame) not in LIBRARIES


def _root_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _raised_in(error: BaseException) -> str:
    """Return the package in which an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else _root_of(trace.tb_frame)
