# SPDX-License-Identifier: Apache-2.0
"""`verify`: compares loss and gradients of one batch, sharded and on full sequences.

Independent of how the loss is computed, which is a function that it gets. Works with sharded and
plain models, and restores the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.comm.collective_errors import any_rank, raise_on_all
from lightning_cp.comm.transport import Transport
from lightning_cp.compare.restore import Reached, restored_state
from lightning_cp.data import batch as batches
from lightning_cp.data.media_names import media_names
from lightning_cp.fsdp.replication import set_averaging
from lightning_cp.fsdp.sharding import reshard
from lightning_cp.parallel import ContextParallel
from lightning_cp.private.fsdp2 import drop_unreduced_gradients, take_used
from lightning_cp.private.modules import accumulation_hooks, tensor_version
from lightning_cp.step import active_step
from lightning_cp.step.leaves import flatten

MIXING: Final = (
    "Something mixes tokens that is not routed: attention written as matmul and softmax, a "
    "convolution or a recurrence along the sequence, positions that the model computes itself (use "
    "cp.position_ids()), a loss other than token_mean()."
)
"""Why results of a model may differ under context parallelism."""

Gradients = tuple[Tensor, dict[str, Tensor]]
"""A loss, and the gradient of each parameter by name."""

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 6e-2,
}
"""Largest error of a gradient, relative to its norm, that rounding explains, by dtype."""


_MIXED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}

_COPIED = 1 << 26
"""Numbers of weights that are copied at most, of the first parameters."""

_DROPOUT: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


# ---------------------------------------------------------------- the result


@dataclass(frozen=True)
class Report:
    """Result of a comparison.

    Args:
        loss: under context parallelism.
        whole_loss: on full sequences.
        errors: of each parameter's gradient, relative to its norm.
        tolerance: allowed error of the loss, and of all gradients if ``earned`` is empty.
        num_tokens: length of the compared sequences.
        cp_size: number of context ranks.
        earned: allowed error of each gradient, from the rounding error of full sequences; then
            ``errors`` are relative to float64.
        precision: dtype of the run.
        hint: another possible reason for a difference.
    """

    loss: float
    whole_loss: float
    errors: Mapping[str, float]
    tolerance: float
    num_tokens: int
    cp_size: int = 1
    earned: Mapping[str, float] = field(default_factory=dict)
    precision: str = ""
    hint: str = ""

    @property
    def passed(self) -> bool:
        """Return whether loss and all gradients agree; NaN does not."""
        scale = max(1.0, abs(self.whole_loss))
        return abs(self.loss - self.whole_loss) <= self.tolerance * scale and all(
            error <= self.allowed(name) for name, error in self.errors.items()
        )

    def allowed(self, name: str) -> float:
        """Return the allowed error of a parameter's gradient."""
        return self.earned.get(name, self.tolerance)

    def worst(self, number: int = 5) -> list[tuple[str, float]]:
        """Return the parameters whose gradients differ most, relative to the allowed error."""
        # NaN, which is not ordered, comes first.
        ranked = sorted(
            self.errors.items(),
            key=lambda item: (item[1] == item[1], -item[1] / max(self.allowed(item[0]), 1e-300)),
        )
        return ranked[:number]

    def summary(self) -> str:
        """Return the result in one line."""
        name, error = self.worst(1)[0] if self.errors else ("no parameter", 0.0)
        return (
            f"loss={self.loss:.6f}, full_loss={self.whole_loss:.6f}, tokens={self.num_tokens}, "
            f"worst_gradient={name}, error={error:.1e}, allowed={self.allowed(name):.0e}"
        )

    def __str__(self) -> str:
        worst = self.worst()
        width = max([len(name) for name, _ in worst], default=0)
        width = max(width, len("loss, full sequences"))
        gap = abs(self.loss - self.whole_loss) / max(1.0, abs(self.whole_loss))
        lines = [
            f"{'loss, full sequences':{width}}  {self.whole_loss:9.6f}",
            f"{'loss, sharded':{width}}  {self.loss:9.6f}",
            f"{'':{width}}  {'error':>9}  {'allowed':>9}",
            f"{'loss':{width}}  {gap:9.1e}  {self.tolerance:9.1e}",
            *(f"{name:{width}}  {e:9.1e}  {self.allowed(name):9.1e}" for name, e in worst),
        ]
        if len(self.errors) > len(worst):
            lines.append(f"... and {len(self.errors) - len(worst)} more gradients")
        precision = self.precision or "this precision"
        rule = (
            f"allowed: twice the rounding error of full sequences in {precision}"
            if self.earned
            else f"allowed: fixed for {precision}"
        )
        ranks = f"{self.cp_size} rank{'s' * (self.cp_size > 1)}"
        verdict = "passed: the same" if self.passed else "FAILED: different"
        lines.append(f"{verdict} results on {ranks}, sequences of {self.num_tokens} tokens; {rule}")
        return "\n".join(lines + ([] if self.passed or not self.hint else [self.hint]))


def require_passed(reports: Iterable[Report], what: str, *groups: Transport) -> None:
    """Raise on all ranks of some groups if a comparison of one of them failed. Collective.

    Args:
        reports: of this rank.
        what: what was compared: ``this model``.
        groups: the ranks that have compared.
    """
    wrong = next((report for report in reports if not report.passed), None)
    if not any_rank([wrong is not None], *groups)[0]:
        return
    message = "another rank has found it; see its error."
    if wrong is not None:
        worst = ", ".join(f"{name} ({error:.1e})" for name, error in wrong.worst())
        message = f"{wrong.summary()}. Worst gradients: {worst}. {MIXING}\n{wrong}"
    raise RuntimeError(f"Context parallelism changes the results of {what}: {message}")


# ---------------------------------------------------------------- the comparison


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    loss_fn: Callable[[dict[str, Any]], Tensor] | None = None,
    max_len: int | None = None,
    tolerance: float | None = None,
    stock: bool = False,
    check: bool = True,
) -> Report:
    """Compare loss and every gradient with those of the stock model on full sequences.

    Every rank must call it. Dropout is off (``model.eval()``); gradients, buffers, metrics, random
    states, attributes of the model and what ``loss_fn`` reaches are restored.

    Args:
        model: the model whose gradients are compared; plain, or sharded over the ranks.
        batch: a full batch, as for ``cp.step``; all data ranks use that of the first.
        cp: the context parallelism to verify.
        loss_fn: computes the loss of a batch; ``model(**batch).loss`` by default.
        max_len: sequences are truncated to this length, so that one rank can hold them; not
            truncated if None.
        tolerance: largest relative error of a gradient; by dtype if None.
        stock: compare with models of other libraries as they are when not enabled, each packed
            document as a separate sequence.
        check: raise on all ranks if results differ. Otherwise look at ``report.passed``.

    Returns:
        The result.

    Raises:
        RuntimeError: if it is not within the tolerance; it names the worst parameters.
    """
    report = compare(
        model,
        batch,
        cp=cp,
        loss_fn=loss_fn,
        max_len=max_len,
        tolerance=tolerance,
        stock=stock,
    )
    if check:
        require_passed([report], "this model", cp.groups.context, cp.groups.data)
    return report


def compare(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    loss_fn: Callable[[dict[str, Any]], Tensor] | None = None,
    max_len: int | None = None,
    tolerance: float | None = None,
    stock: bool = False,
    exact: Callable[[dict[str, Any]], Gradients] | None = None,
    hint: str = "",
    takes_full: bool = False,
) -> Report:
    """Compare as `verify` does, and return the result without raising.

    Args:
        model: as for `verify`.
        batch: as for `verify`.
        cp: as for `verify`.
        loss_fn: as for `verify`.
        max_len: as for `verify`.
        tolerance: as for `verify`.
        stock: as for `verify`.
        exact: computes `gradients` of full sequences in float64, for unsharded parameters. Then the
            allowed error is twice the error of full sequences in the model's own dtype.
        hint: another possible reason for a difference, for the report.
        takes_full: the model takes full sequences and shards them by itself, outside of a step.
    """
    compute = loss_fn or (lambda local: model(**local).loss)
    part = truncate_batch(cp.groups.data.first(batch), cp=cp, max_len=max_len)
    filled = []

    def compute_sharded(local: dict[str, Any]) -> Tensor:
        step = active_step.opened()
        filled.append("" if step is None else batches.describe_filled(step))
        return compute(local)

    dtype = lowest_precision(model)
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    with restored_state(model, functions=() if loss_fn is None else (loss_fn,)):
        model.eval()
        step = nullcontext(part) if takes_full else cp.step(part, training=True)
        try:
            loss, sharded = gradients(model, compute_sharded, step, cp.groups.context)
        except Exception as error:
            if part is not batch and media_names(part):
                error.add_note(
                    f"Sequences were truncated to {max_len} tokens, which may cut off placeholders "
                    "of media. Compare full ones if a rank can hold them: max_len of "
                    "ContextParallelCallback, max_len of verify()."
                )
            raise
        alone = cp.reference(part, training=True, stock=stock)
        full_loss, full = _on_all_ranks(lambda: gradients(model, compute, alone), model, cp)
        truth = _on_all_ranks(lambda: exact(part), model, cp) if exact is not None else None
    groups = cp.groups.context, cp.groups.data
    measured = distances(sharded, full, *groups)
    if full and not any(x.any() for x in measured):
        raise ValueError(
            "No token of this batch has a label, or the loss does not depend on it: every gradient "
            "is 0, and there is nothing to compare. A label of -100 does not count, nor that of "
            "the first token of a document. Give longer or other sequences."
        )
    # A stock model may not support float64: for example, masks that overflow in float32.
    rounding = None if truth is None else distances(full, truth[1], *groups)
    earned: dict[str, float] = {}
    if truth is None or rounding is None or not bool(rounding[0].isfinite().all()):
        errors = relative(*measured)
    else:
        errors = relative(*distances(sharded, truth[1], *groups))
        limits, typical = _earned(*rounding, torch.finfo(dtype).eps)
        loss_error = abs(float(full_loss) - float(truth[0])) / max(1.0, abs(float(truth[0])))
        # The loss is a mean over many tokens, whose rounding errors mostly cancel.
        allowed = 2 * max(loss_error, 0.1 * typical) + 4 * torch.finfo(full_loss.dtype).eps
        earned = dict(zip(truth[1], limits.tolist(), strict=True))
    return Report(
        float(loss),
        float(full_loss),
        dict(zip(full, errors.tolist(), strict=True)),
        allowed,
        batches.read_batch(flatten(part), sequence_dims=cp.config.sequence_dims).seq_len,
        cp_size=cp.cp_size,
        earned=earned,
        precision=str(dtype).removeprefix("torch."),
        hint=filled[0] + hint,
    )


def _on_all_ranks(run: Callable[[], Gradients], model: nn.Module, cp: ContextParallel) -> Gradients:
    """Compute on full sequences; if one rank fails, raise on all ranks.

    Not for models whose ranks wait for each other inside.
    """
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return run()
    return raise_on_all(
        run,
        "Another rank failed on full sequences; see its error. If they do not fit into its memory, "
        "compare shorter ones: max_len=...",
        cp.groups.context,
        cp.groups.data,
    )


def lowest_precision(model: nn.Module, mixed: str = "") -> torch.dtype:
    """Return the lowest precision of a run: of a parameter, autocast's, or that of a Trainer.

    Args:
        model: the model.
        mixed: a Trainer's mixed precision: ``bf16-mixed``, ``fp16``.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    dtypes |= {dtype for name, dtype in _MIXED.items() if mixed.startswith(name)}
    device = next((p.device.type for p in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(dtypes & set(TOLERANCES), key=TOLERANCES.__getitem__, default=torch.float32)


def truncate_batch(batch: Any, *, cp: ContextParallel, max_len: int | None) -> Any:
    """Return a batch of at most ``max_len`` tokens, around the first token that has a label."""
    if max_len is not None and max_len < 1:
        raise ValueError(f"max_len={max_len}: give the tokens of a sequence, 1 or more, or None.")
    full = batches.read_batch(flatten(batch), sequence_dims=cp.config.sequence_dims)
    if max_len is None or full.seq_len <= max_len or full.is_unsharded:
        return batch
    return batches.truncate(full, max_len)


# ---------------------------------------------------------------- one run


class Weights:
    """The weights of a model in a compared step, which may change small ones before backward.

    Args:
        model: the model; None for a step that has no backward.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._parameters = [] if model is None else [*model.parameters()]
        self._copies: dict[int, Tensor] = {}
        num_copied = 0
        for index, parameter in enumerate(self._parameters):
            num_copied += (x := _local(parameter)).numel()
            if not x.is_meta and num_copied <= _COPIED:
                self._copies[index] = x.clone()
        self._state, self._changed = self._read(), set[int]()

    def end_forward(self) -> None:
        """Say that backward begins: small weights that have changed so far are put back."""
        for index, now in enumerate(self._read()):
            if now != self._state[index] and index in self._copies:
                self._changed.add(index)
                self._state[index] = now

    def check(self) -> None:
        """Raise if weights have changed in backward, or large ones before."""
        if self._state != self._read():
            raise RuntimeError(
                "A step changed weights while it was compared with one device: large ones, or in "
                "backward, where a hook updates them before gradients are averaged over the ranks. "
                "Update weights after backward: by an optimizer, or in a callback at the end of "
                "the step."
            )

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore weights that have changed before backward."""
        for index in self._changed:
            _local(self._parameters[index]).copy_(self._copies[index])

    def _read(self) -> list[tuple[int | None, float]]:
        # The sum as well: writing to `parameter.data` counts no version.
        return [(tensor_version(x), _sum(_local(x))) for x in self._parameters]


@contextmanager
def without_trace(
    model: nn.Module,
    *objects: Any,
    functions: Iterable[Any] = (),
    leave: Iterable[str] = (),
    trains: bool = True,
    is_reduced: bool = True,
    evaluates: bool = False,
    seed: int = 0,
) -> Iterator[tuple[Reached, Weights]]:
    """Let a step run inside a ``with`` block, without dropout, and restore what it changes.

    Args:
        model: the model.
        objects: as for `restored_state`.
        functions: as for `restored_state`.
        leave: as for `restored_state`.
        trains: whether the step computes gradients.
        is_reduced: as for `own_gradients`.
        evaluates: run in evaluation mode.
        seed: of another run; 0 for the random states of the step that follows.
    """
    with (
        restored_state(model, *objects, functions=functions, leave=leave) as reached,
        own_gradients(model, is_reduced=is_reduced) if trains else nullcontext(Weights()) as own,
    ):
        for part in model.modules():
            if isinstance(part, _DROPOUT):
                part.p = 0.0
        if evaluates:
            model.eval()
        if seed:
            torch.manual_seed(seed)
        yield reached, own


def gradients(
    model: nn.Module,
    compute: Callable[[dict[str, Any]], Tensor],
    step: AbstractContextManager[dict[str, Any]],
    context: Transport | None = None,
) -> Gradients:
    """Return the loss of a step, and the gradients of all trained parameters.

    Args:
        model: the model.
        compute: computes the loss of what the step yields.
        step: opens it.
        context: as for `take_gradients`.
    """
    with own_gradients(model) as weights:
        with torch.enable_grad(), step as local:
            loss = compute(local)
            weights.end_forward()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), take_gradients(model, context)


@contextmanager
def own_gradients(model: nn.Module, *, is_reduced: bool = True) -> Iterator[Weights]:
    """Give a model gradients of its own inside a ``with`` block, and put the former ones back.

    FSDP2 reduces them in each backward; those of replicated parameters are not averaged. What
    changes weights before `Weights.end_forward` is undone; a later change raises.

    Args:
        model: the model.
        is_reduced: whether FSDP2 reduces gradients in the run; else it accumulates them.
    """
    reshard(model)  # an evaluation may have left units gathered
    former = [(parameter, parameter.grad) for parameter in model.parameters()]
    weights = Weights(model)
    # Those of shards see averaged gradients, as on one device, and may update weights.
    hooks = [accumulation_hooks(p) for p, _ in former if isinstance(p, DTensor)]
    saved = [dict(by_id) for by_id in hooks]
    for by_id in hooks:
        by_id.clear()
    units = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for parameter, _ in former:
        parameter.grad = None
    for unit in units:
        unit.set_requires_gradient_sync(True, recurse=False)
    set_averaging(model, enabled=False)
    try:
        yield weights
        weights.check()
    finally:
        for by_id, hooks_of_user in zip(hooks, saved, strict=True):
            by_id.update(hooks_of_user)
        reshard(model)
        for unit in units:
            drop_unreduced_gradients(unit)
            unit.set_requires_gradient_sync(is_reduced, recurse=False)
            for _ in take_used(unit):
                pass
        set_averaging(model, enabled=True)
        weights.put_back()
        for parameter, gradient in former:
            parameter.grad = gradient


def _local(parameter: Tensor) -> Tensor:
    x = parameter.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def _sum(x: Tensor) -> float:
    if x.is_meta or type(x) is not Tensor:  # packed weights have operators of their own
        return 0.0
    return x.sum(dtype=torch.float64).nan_to_num().item()


def has_room(model: nn.Module) -> bool:
    """Return whether three more sets of a model's gradients fit into the memory of its GPU."""
    tensors = [_local(p) for p in model.parameters() if p.requires_grad]
    devices = {x.device for x in tensors if x.is_cuda}
    size = sum(x.nbytes for x in tensors if x.is_cuda)
    free = [
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
        for device in devices
    ]
    return 3 * size <= min(free, default=0)


def take_gradients(model: nn.Module, context: Transport | None) -> dict[str, Tensor]:
    """Return the gradients of all trained parameters; zeros where there is none.

    Args:
        model: the model.
        context: the ranks over which those of replicated parameters are averaged; None for none.
    """
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(gradient, DTensor):  # FSDP2 has averaged it
            gradient = gradient.to_local()
        elif context is not None:
            context.all_reduce(gradient)
            gradient.div_(context.size)
        gradients[name] = gradient.detach()
    return gradients


# ---------------------------------------------------------------- errors of gradients


def distances(
    computed: Mapping[str, Tensor], exact: Mapping[str, Tensor], *groups: Transport
) -> tuple[Tensor, Tensor]:
    """Return the distance of each gradient from the exact one, and the norm of the exact one.

    Over the parts of gradients that the ranks of the groups hold.
    """

    def squares(name: str) -> Tensor:  # one at a time: gradients may be as large as the model
        c, e = computed[name].double(), exact[name].double()
        return torch.stack([(c - e).square().sum(), e.square().sum()])

    total = torch.stack([squares(name) for name in exact]) if exact else torch.zeros(0, 2)
    for group in groups:
        group.all_reduce(total)
    differences, norms = total.sqrt().unbind(1)
    return differences, norms


def relative(differences: Tensor, norms: Tensor, floor: float = 1e-4) -> Tensor:
    """Return distances relative to norms.

    Some gradients are zero in exact arithmetic, and only noise: the norm is at least a small part
    of the typical norm.
    """
    smallest = floor * norms.square().mean().sqrt()
    return differences / norms.clamp(min=max(float(smallest), torch.finfo(torch.float64).tiny))


def _earned(differences: Tensor, norms: Tensor, eps: float) -> tuple[Tensor, float]:
    """Return the allowed error of each gradient, from that of full sequences, and the median.

    Twice that rounding error, plus 4 units in the last place. One run is a small sample: a gradient
    of a few elements may be exact by chance, so that at least the median is allowed. A gradient
    that is zero in exact arithmetic is noise, whose size depends on the order of summation: the
    typical distance is always allowed.
    """
    rounding = relative(differences, norms)
    real = rounding[norms > 0]
    typical = float(real.median()) if len(real) else 0.0
    common = relative(differences.square().mean().sqrt(), norms)
    return (2 * rounding.clamp(min=typical)).maximum(common) + 4 * eps, typical
