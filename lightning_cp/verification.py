# SPDX-License-Identifier: Apache-2.0
"""`verify`: compares loss and gradients of one batch, sharded and on full sequences.

Independent of how the loss is computed, which is a function that it gets. Works with sharded and
plain models, and restores the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp import active_step
from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.comm.transport import Transport
from lightning_cp.data import batch as batches
from lightning_cp.data.media import media_names
from lightning_cp.data.structure import flatten
from lightning_cp.fsdp.replication import is_replicated
from lightning_cp.parallel import ContextParallel

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


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    loss_fn: Callable[[dict[str, Any]], Tensor] | None = None,
    max_len: int | None = None,
    tolerance: float | None = None,
    stock: bool = False,
) -> Report:
    """Compare loss and every gradient with those of the stock model on full sequences.

    Every rank must call it. Dropout is off (``model.eval()``), gradients are set to None.

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

    Returns:
        The result, if it is within the tolerance.

    Raises:
        RuntimeError: if it is not; it names the worst parameters.
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
    if not report.passed:
        worst = ", ".join(f"{name} ({error:.1e})" for name, error in report.worst())
        raise RuntimeError(
            f"Context parallelism changes the results of this model: {report.summary()}. Worst "
            f"gradients: {worst}. {report.hint}{MIXING}"
        )
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

    dtype = _precision(model)
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    with _evaluating(model):
        step = nullcontext(part) if takes_full else cp.step(part, training=True)
        try:
            loss, sharded = gradients(model, compute_sharded, step)
        except Exception as error:
            if part is not batch and media_names(part):
                error.add_note(
                    f"Sequences were truncated to {max_len} tokens, which may cut off placeholders "
                    "of media. Compare full ones if a rank can hold them: verify_max_len of "
                    "ContextParallelCallback, max_len of verify()."
                )
            raise
        sharded = _averaged(sharded, model, cp)
        alone = cp.alone(part, training=True, stock=stock)
        full_loss, full = _on_all_ranks(lambda: gradients(model, compute, alone), model, cp)
        model.zero_grad(set_to_none=True)
        truth = _on_all_ranks(lambda: exact(part), model, cp) if exact is not None else None
    # A stock model may not support float64: for example, masks that overflow in float32.
    rounding = None if truth is None else _distances(full, truth[1], cp)
    earned: dict[str, float] = {}
    if truth is None or rounding is None or not bool(rounding[0].isfinite().all()):
        errors = _relative(*_distances(sharded, full, cp))
    else:
        errors = _relative(*_distances(sharded, truth[1], cp))
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
        batches.read_batch(flatten(part), sequence_dims=cp.options.sequence_dims).seq_len,
        cp_size=cp.cp_size,
        earned=earned,
        precision=str(dtype).removeprefix("torch."),
        hint=filled[0] + hint,
    )


def truncate_batch(batch: Any, *, cp: ContextParallel, max_len: int | None) -> Any:
    """Return a batch of at most ``max_len`` tokens, around the first token that has a label."""
    full = batches.read_batch(flatten(batch), sequence_dims=cp.options.sequence_dims)
    if max_len is None or full.seq_len <= max_len or full.is_unsharded:
        return batch
    return batches.truncate(full, max_len)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
        model.zero_grad(set_to_none=True)


def gradients(
    model: nn.Module,
    compute: Callable[[dict[str, Any]], Tensor],
    step: AbstractContextManager[dict[str, Any]],
) -> Gradients:
    """Return the loss of a step, and the gradients of all parameters that have one.

    For sharded parameters it is this rank's shard, averaged over the ranks; for plain ones it is
    not averaged.
    """
    model.zero_grad(set_to_none=True)
    with torch.enable_grad(), step as local:
        loss = compute(local)
        loss.backward()  # type: ignore[no-untyped-call]
    by_name = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        by_name[name] = gradient.detach().clone()
    return loss.detach(), by_name


def _averaged(
    by_name: dict[str, Tensor], model: nn.Module, cp: ContextParallel
) -> dict[str, Tensor]:
    """Average the gradients of plain parameters over the ranks."""
    parameters = dict(model.named_parameters())
    return {
        name: x if isinstance(parameters[name], DTensor) else cp.groups.mean(x)
        for name, x in by_name.items()
    }


def _on_all_ranks(run: Callable[[], Gradients], model: nn.Module, cp: ContextParallel) -> Gradients:
    """Compute on full sequences; if one rank fails, raise on all ranks.

    Not for models whose ranks wait for each other inside.
    """
    if is_replicated(model) or any(isinstance(p, DTensor) for p in model.parameters()):
        return run()
    problem, result = None, None
    try:
        result = run()
    except Exception as error:  # noqa: BLE001  raised below, after all ranks know
        problem = error
    (failed,) = any_rank([problem is not None], cp.groups.context, cp.groups.data)
    if problem is not None:
        raise problem
    if failed or result is None:
        raise RuntimeError(
            "Another rank failed on full sequences; see its error. If they do not fit into its "
            "memory, compare shorter ones: max_len=..."
        )
    return result


def _precision(model: nn.Module) -> torch.dtype:
    """Return the lowest precision of the run: of a parameter, or autocast's."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(dtypes & set(TOLERANCES), key=TOLERANCES.__getitem__, default=torch.float32)


def relative_errors(
    computed: Mapping[str, Tensor], exact: Mapping[str, Tensor], context: Transport
) -> tuple[dict[str, float], float]:
    """Return the error of each gradient relative to its norm, and that of all of them together.

    Over the parts of gradients that the context ranks hold.

    Norms are at least 1e-2 of the typical norm: gradients that are zero in exact arithmetic are
    noise. All errors are 0 where exact gradients are not finite.
    """
    squares = _squares(computed, exact)
    context.all_reduce(squares)
    differences, norms = squares.sqrt().unbind(1)
    if not bool(norms.isfinite().all()):
        return dict.fromkeys(exact, 0.0), 0.0
    errors = (differences / _scales(norms, floor=1e-2)).tolist()
    total = differences.norm() / norms.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return dict(zip(exact, errors, strict=True)), float(total)


def _squares(computed: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Tensor:
    """Return the squared distance and norm of each gradient, of the parts that this rank holds."""

    def of(name: str) -> Tensor:  # one at a time: gradients may be as large as the model
        c, e = computed[name].double(), exact[name].double()
        return torch.stack([(c - e).square().sum(), e.square().sum()])

    return torch.stack([of(name) for name in exact])


def _distances(
    computed: Mapping[str, Tensor], exact: Mapping[str, Tensor], cp: ContextParallel
) -> tuple[Tensor, Tensor]:
    """Return the distance of each gradient from the exact one, and the norm of the exact one."""
    differences, norms = cp.groups.sum(_squares(computed, exact)).sqrt().unbind(1)
    return differences, norms


def _scales(norms: Tensor, floor: float = 1e-4) -> Tensor:
    """Return the norms that errors are relative to.

    Some gradients are zero in exact arithmetic, and only noise: the norm is at least a small part
    of the typical norm.
    """
    smallest = floor * norms.square().mean().sqrt()
    return norms.clamp(min=max(float(smallest), torch.finfo(torch.float64).tiny))


def _relative(differences: Tensor, norms: Tensor) -> Tensor:
    return differences / _scales(norms)


def _earned(differences: Tensor, norms: Tensor, eps: float) -> tuple[Tensor, float]:
    """Return the allowed error of each gradient, from that of full sequences, and the median.

    Twice that rounding error, plus 4 units in the last place. One run is a small sample: a gradient
    of a few elements may be exact by chance, so that at least the median is allowed. A gradient
    that is zero in exact arithmetic is noise, whose size depends on the order of summation: the
    typical distance is always allowed.
    """
    rounding = _relative(differences, norms)
    real = rounding[norms > 0]
    typical = float(real.median()) if len(real) else 0.0
    common = differences.square().mean().sqrt() / _scales(norms)
    return (2 * rounding.clamp(min=typical)).maximum(common) + 4 * eps, typical
