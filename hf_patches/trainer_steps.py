# SPDX-License-Identifier: Apache-2.0
"""The steps of a trainer, compared with one device before they are believed.

The first training step and the first evaluation step run on short batches, once sharded and once as
one device would run them: the loss, every gradient, outputs and logged values must be the same.
Nothing that they change stays changed. `lightning_cp.compare` compares.
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_patches.whole_rows import RowsHandle
from lightning_cp.comm.collective_errors import from_all
from lightning_cp.comm.transport import GroupTransport
from lightning_cp.compare import Run, TrialRuns, Value, own_gradients, take_gradients
from lightning_cp.data import outputs
from lightning_cp.data.batch import SEQUENCE_DIMS, pad_samples
from lightning_cp.data.media import media_names
from lightning_cp.data.outputs import Leaf
from lightning_cp.parallel import ContextParallel
from lightning_cp.restore import restored_state, user_hooks
from lightning_cp.step import IGNORED_LABEL
from lightning_cp.verification import truncate_batch

_logger = logging.getLogger(__name__)

_MAX_LEN: Final = 512
"""The length to which sequences are truncated."""

_LONGEST_WHOLE: Final = 4096
"""Tokens of a batch that each rank runs in full, where it cannot be truncated."""

_LARGE: Final = 1 << 26
"""Numbers of another module that are too many to be copied."""

# Losses of preference trainers are differences of sums over tokens. Metrics may be choices between
# scores that differ by rounding: the same on all ranks is all that can be asked of them.
_LOSS_FLOOR, _METRIC_FLOOR = 2e-5, float("inf")

_DATA: Final = ("train_dataset", "eval_dataset")
_LIBRARIES: Final = ("transformers", "trl", "accelerate", "hf_patches", "lightning_cp", "torch")
_DROPOUT: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class _UpdatesWeightsError(Exception):
    """A training step updates the weights itself, and cannot run for a comparison."""


def verify_steps(
    trainer: Any,
    models: list[RowsHandle],
    cp: ContextParallel,
    data: dist.ProcessGroup | None,
    replace: Callable[[Any, str, Any], None],
) -> None:
    """Compare the first steps of a trainer with one device; raise on all ranks if they differ.

    Args:
        trainer: under context parallelism.
        models: the handles of its models.
        cp: the context ranks.
        data: the ranks with other batches, if any.
        replace: sets an attribute of the trainer until context parallelism is undone.
    """
    transport = [] if data is None else [GroupTransport(data)]
    runs, seen = TrialRuns(cp, max_len=_MAX_LEN, data=transport), set[Any]()
    # An own training step may compute its loss by itself.
    is_own = _root(type(trainer).training_step) not in _LIBRARIES
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
            is_training = _stage != "prediction_step"
            # Data ranks may get different kinds of batches at first: they compare once.
            key = _stage, None if transport else frozenset(inputs)
            is_due = key not in seen and (model.training or not is_training or is_own)
            if is_due and not runs.is_running and (torch.is_grad_enabled() or not is_training):
                seen.add(key)
                call = _TrainerCall(_stage, trainer, models, cp, _function, model, args, kwargs)
                _compare(runs, call, inputs, cp)
            return _function(model, inputs, *args, **kwargs)

        replace(trainer, stage, verified)


def _compare(runs: TrialRuns, call: "_TrainerCall", inputs: Any, cp: ContextParallel) -> None:
    """Run a step on short batches and compare; say so where that is not possible."""
    parts: list[Any] = []
    problem = None
    if not isinstance(inputs, Mapping) or _has_iterators(call.trainer):
        problem = "its batch is no dict, or the trainer holds an iterator, which cannot go back"
    else:
        parts = _short_batches(inputs, cp)
    if problem is not None:
        _logger.info("%s() is not compared with one device: %s", call.stage, problem)
    try:
        _, failure = runs.compare_runs(call, runs.equal_number(parts))
    except _UpdatesWeightsError:
        failure = None
    if failure is not None:
        _logger.warning(
            "%s() was not compared with one device, since it raised on short sequences: %s",
            call.stage,
            failure,
        )


def _has_iterators(trainer: Any) -> bool:
    return any(isinstance(value, Iterator) for value in vars(trainer).values())


# ---------------------------------------------------------------- batches


def _short_batches(inputs: Any, cp: ContextParallel) -> list[Any]:
    """Return short batches like this one: one that is divided evenly, and one that is padded.

    Also one with padding of its own, if this one has some. None for a long one with media, which
    cannot be truncated.
    """
    dims = {
        name: dim
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.dim() > 1
        if (dim := SEQUENCE_DIMS.get(name, 1)) is not None
    }
    longest = max((inputs[name].shape[dim] for name, dim in dims.items()), default=0)
    has_mask = any(inputs[name].dim() > 3 for name in dims)
    if media_names(inputs) or has_mask:
        return [inputs] * 2 if longest <= _LONGEST_WHOLE else []
    chunks = 2 * cp.cp_size
    odd, even = 8 * chunks + 1, min(_MAX_LEN, longest) // chunks * chunks
    if any(name.startswith("cu_seq_lens") for name in inputs):
        return [truncate_batch(dict(inputs), cp=cp, max_len=n) for n in (even or longest, odd)]
    parts = [_cut(inputs, dims, n) for n in (even or longest, odd)]
    mask = parts[-1].get("attention_mask")
    if isinstance(mask, Tensor) and bool((inputs["attention_mask"] == 0).any()):
        parts.append(pad_samples(parts[-1]))
    return parts


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
        function: the method.
        model: the model that it got, which may be wrapped.
        args: what it got after the batch.
        kwargs: what it got by name.
    """

    stage: str
    trainer: Any
    models: list[RowsHandle]
    cp: ContextParallel
    function: Callable[..., Any]
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    skip: str = "context_parallel(..., verify_steps=False)"
    _evaluates: bool = False
    _fixed: set[str] = field(default_factory=set)
    _is_fixed: bool = True

    def precision(self) -> torch.dtype:
        """Return the lowest precision in which the step computes."""
        dtypes = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtypes |= {
            mixed[name] for name in mixed if self.trainer.accelerator.mixed_precision == name
        }
        return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)

    def cure(self, _: Value | None) -> str:
        """Return how to make a value that differs, for errors."""
        return (
            "Inside of the model each rank holds its own tokens: what a hook on a layer sees there "
            "must not enter a loss or a log. Request hidden states from the model instead "
            "(output_hidden_states=True): it returns full sequences. The number of data ranks is "
            f"accelerator.num_processes // {self.cp.cp_size}: a loss that is multiplied by the "
            "number of all processes counts each token once per context rank."
        )

    def run(self, batch: Any, *, alone: bool) -> Run:
        """Run the step, collect its values, and undo what it changes."""
        if not alone:
            return self._comparable(self._run_sharded(batch))
        self._evaluates = False
        run = self._run_twice(batch)
        if not self._is_fixed and self.stage != "prediction_step":  # dropout by a function
            self._evaluates = True
            run = self._run_twice(batch)
        return self._comparable(run)

    def _run_sharded(self, batch: Any) -> Run:
        """Run on the ranks; say so if that raises where full sequences did not."""
        try:
            return self._run_once(batch, alone=False)
        except Exception as error:
            if _raised_in(error) in ("hf_patches", "lightning_cp"):
                raise
            raise ValueError(
                f"{self.stage}() runs on full sequences, and raises on {self.cp.cp_size} ranks: "
                f"{type(error).__name__}: {error} {self.cure(None)} To skip this comparison: "
                f"{self.skip}."
            ) from error

    def _run_twice(self, batch: Any) -> Run:
        """Run as one device with two seeds; find values that depend on them. Collective.

        All ranks leave out the same values: those that some rank draws, measures or does not have.
        """
        run, other = (self._run_once(batch, alone=True, seed=seed) for seed in (0, 1))
        precision = self.precision()
        fixed = {
            name
            for name, value in run.values.items()
            if name in other.values
            and outputs.is_close(value.leaf.value, other.values[name].leaf.value, precision)
        }
        lost = {name for name in run.values if name.startswith("output") and name not in fixed}
        is_fixed = not lost and _is_near(run.gradients, other.gradients)
        answers = from_all((fixed, is_fixed))
        self._fixed = set.intersection(*(names for names, _ in answers))
        self._is_fixed = all(answer for _, answer in answers)
        return run

    def _comparable(self, run: Run) -> Run:
        """Return a run without the values that depend on the seed."""
        values = {name: x for name, x in run.values.items() if name in self._fixed}
        return Run(values, gradients=run.gradients if self._is_fixed else {})

    def _run_once(self, batch: Any, *, alone: bool, seed: int = 0) -> Run:
        trainer = self.trainer
        model = self.model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        callbacks = trainer.callback_handler.callbacks
        functions = [trainer.compute_loss_func, type(trainer).compute_loss]
        with ExitStack() as stack:
            stack.enter_context(
                restored_state(
                    model,
                    *(trainer, trainer.state, trainer.control, *callbacks),
                    functions=[f for f in functions if f is not None],
                    leave=_DATA,
                )
            )
            for owner in [x for x in vars(trainer).values() if isinstance(x, Optimizer)]:
                stack.enter_context(_set(owner, "step", _refuse_update))
            inside = {id(part) for handle in self.models for part in handle.model.modules()}
            for other in vars(trainer).values():
                is_model = isinstance(other, nn.Module) and any(
                    id(part) in inside for part in other.modules()
                )
                if isinstance(other, nn.Module) and not is_model:
                    stack.enter_context(_restored_module(other))
            is_last = trainer.accelerator.sync_gradients
            stack.enter_context(own_gradients(model, is_reduced=is_last))
            if alone:
                stack.enter_context(_as_one_device(trainer, self.models, self.cp.cp_size))
            logs = stack.enter_context(_recorded_logs(trainer))
            for part in model.modules():
                if isinstance(part, _DROPOUT):
                    part.p = 0.0
            if self._evaluates:
                model.eval()
            torch.manual_seed(seed)
            if user_hooks(model):  # what they keep may be used by the next step
                self._call(model, batch)
                model.zero_grad(set_to_none=True)
                logs.clear()
            result = self._call(model, batch)
            values = {
                f"output{leaf.path}": Value(
                    leaf, f"returned output{leaf.path}", is_loss=True, floor=_LOSS_FLOOR
                )
                for leaf in outputs.leaves(_detached(result))
            }
            metrics = {"metrics": getattr(trainer, "_metrics", {}), "log": logs}
            for kind, numbers in metrics.items():
                for path, number in _numbers(numbers):
                    leaf, is_metric = Leaf("", number), kind == "metrics"
                    floor = _METRIC_FLOOR if is_metric else 0.0
                    values[f"{kind} {path}"] = Value(
                        leaf, f"logged {path}", is_loss=is_metric, floor=floor
                    )
            context = None if alone else self.cp.groups.context
            return Run(values, gradients=take_gradients(model, context))

    def _call(self, model: nn.Module, batch: Any) -> Any:
        """Call the method; in training, run backward where the method does not."""
        inputs = copy.deepcopy(batch)  # a step may change it
        if self.stage == "training_step":
            # DDP averages gradients, which the method may read after backward.
            with _synchronized(self.model):
                return self.function(self.model, inputs, *self.args, **self.kwargs)
        result = self.function(model, inputs, *self.args, **self.kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if self.stage == "compute_loss" and isinstance(loss, Tensor) and loss.requires_grad:
            loss.mean().backward()  # type: ignore[no-untyped-call]
        return result


def _is_near(gradients: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Return whether two runs have the same gradients, but for a part of what rounding explains."""
    total = sum(float(x.double().square().sum()) for x in gradients.values())
    pairs = [(x, others[name]) for name, x in gradients.items()]
    distance = sum(float((x.double() - y.double()).square().sum()) for x, y in pairs)
    return not distance > 1e-8 * total


def _refuse_update(*_: Any, **__: Any) -> None:
    raise _UpdatesWeightsError


def _detached(result: Any) -> Any:
    return result.detach() if isinstance(result, Tensor) else result


@contextmanager
def _synchronized(model: nn.Module) -> Iterator[None]:
    """Let DDP average gradients, also of a batch that is not the last before an update."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with _set(model, "require_backward_grad_sync", True):
        yield


@contextmanager
def _restored_module(module: nn.Module) -> Iterator[None]:
    """Restore the weights and buffers of a small module that a step may update."""
    tensors = [*module.parameters(), *module.buffers()]
    if sum(x.numel() for x in tensors) > _LARGE:
        tensors = [*module.buffers()]
    saved = [(x, x.detach().clone()) for x in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in saved:
                x.copy_(value)


@contextmanager
def _recorded_logs(trainer: Any) -> Iterator[dict[str, list[Any]]]:
    """Record what is logged in a step, without logging it."""
    logs: dict[str, list[Any]] = {}

    def log(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            logs.setdefault(name, []).append(value)

    with _set(trainer, "log", log):
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


@contextmanager
def _as_one_device(trainer: Any, models: list[RowsHandle], size: int) -> Iterator[None]:
    """Let models run on full sequences, on each rank alone; users see the number of data ranks.

    What libraries compute from the number of processes cancels out, as it does in a sharded run.
    """
    number = trainer.accelerator.num_processes
    tp_size = trainer.get_tp_size

    def seen_as(value: Any, own: Any) -> Any:
        is_user = _frame_root(2) not in _LIBRARIES
        return own if is_user else value

    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.alone())
        for owner, name in (
            (type(trainer.accelerator), "num_processes"),
            (type(trainer.args), "world_size"),
        ):
            seen = property(lambda _: seen_as(number, number // size))
            stack.enter_context(_set(owner, name, seen))
        stack.enter_context(
            _set(trainer, "get_tp_size", lambda: seen_as(tp_size(), tp_size() // size))
        )
        world_size = dist.get_world_size  # noqa: TID251  what users read

        def get_world_size(group: Any = None) -> int:
            size_of_group = world_size(group)
            return int(
                seen_as(size_of_group, size_of_group // size if group is None else size_of_group)
            )

        stack.enter_context(_set(dist, "get_world_size", get_world_size))
        yield


def _frame_root(depth: int) -> str:
    """Return the package of a function that called."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", "")).partition(".")[0]


def _raised_in(error: BaseException) -> str:
    """Return the package in which an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]


def _root(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object or a class inside a ``with`` block."""
    existed, previous = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if existed:
            setattr(owner, name, previous)
        else:
            delattr(owner, name)
