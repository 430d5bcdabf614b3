# SPDX-License-Identifier: Apache-2.0
"""`verify`: one batch under context parallelism and on whole rows, loss and gradients compared.

Knows nothing about how the loss is computed: it is given a function that does. Works on sharded
and on plain models, and leaves no trace but the time it took.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.data import batch as batches
from lightning_cp.data.structure import rebuild
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import IGNORED_LABEL

MIXING: Final = (
    "Something mixes tokens where we do not see it: attention written out by hand, a convolution "
    "or a recurrence along the sequence, positions that the model counts itself (use "
    "cp.position_ids()), a loss that is not token_mean()."
)
"""Why a model may compute something else under context parallelism."""

Gradients = tuple[Tensor, dict[str, Tensor]]
"""A loss, and the gradient of each parameter by name."""

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 6e-2,
}
"""Largest error of a gradient, relative to its norm, that rounding explains, by precision."""


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    Args:
        loss: under context parallelism.
        whole_loss: on whole rows.
        errors: of each parameter's gradient, relative to its norm.
        tolerance: what was allowed of the loss, and of all gradients where ``earned`` is empty.
        num_tokens: how long the compared rows were.
        cp_size: how many ranks shared a row.
        earned: what was allowed of each gradient, from the rounding of whole rows themselves; then
            ``errors`` are those against float64.
        precision: of the run.
        hint: what else may explain a difference.
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
        """Say whether loss and all gradients agree; NaN does not."""
        scale = max(1.0, abs(self.whole_loss))
        return abs(self.loss - self.whole_loss) <= self.tolerance * scale and all(
            error <= self.allowed(name) for name, error in self.errors.items()
        )

    def allowed(self, name: str) -> float:
        """Return how large the error of a parameter's gradient may be."""
        return self.earned.get(name, self.tolerance)

    def worst(self, number: int = 5) -> list[tuple[str, float]]:
        """Return the parameters whose gradients differ most, for what is allowed."""
        # NaN compares with nothing; it comes first.
        ranked = sorted(
            self.errors.items(),
            key=lambda item: (item[1] == item[1], -item[1] / max(self.allowed(item[0]), 1e-300)),
        )
        return ranked[:number]

    def summary(self) -> str:
        """Say it in one line."""
        name, error = self.worst(1)[0] if self.errors else ("no parameter", 0.0)
        return (
            f"loss {self.loss:.6f} under context parallelism, {self.whole_loss:.6f} on whole rows "
            f"of {self.num_tokens} tokens; worst gradient {error:.1e} ({name}), allowed "
            f"{self.allowed(name):.0e}"
        )

    def __str__(self) -> str:
        worst = self.worst()
        width = max([len(name) for name, _ in worst], default=0)
        width = max(width, len("loss, on whole rows"))
        gap = abs(self.loss - self.whole_loss) / max(1.0, abs(self.whole_loss))
        rows = [
            f"{'loss, on whole rows':{width}}  {self.whole_loss:9.6f}",
            f"{'loss, shared':{width}}  {self.loss:9.6f}",
            f"{'':{width}}  {'error':>9}  {'allowed':>9}",
            f"{'loss':{width}}  {gap:9.1e}  {self.tolerance:9.1e}",
            *(f"{name:{width}}  {e:9.1e}  {self.allowed(name):9.1e}" for name, e in worst),
        ]
        if len(self.errors) > len(worst):
            rows.append(f"... and {len(self.errors) - len(worst)} more gradients")
        precision = self.precision or "this precision"
        rule = (
            f"allowed is twice the rounding of whole rows in {precision}, against float64"
            if self.earned
            else f"allowed is fixed for {precision}"
        )
        ranks = f"{self.cp_size} rank{'s' * (self.cp_size > 1)}"
        verdict = "passed: the same" if self.passed else "FAILED: other"
        rows.append(f"{verdict} numbers on {ranks}, rows of {self.num_tokens} tokens; {rule}")
        return "\n".join(rows + ([] if self.passed or not self.hint else [self.hint]))


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
    """Compare loss and every gradient with those of the stock model on whole rows.

    Every rank must call it. All dropout is off (``model.eval()``), gradients are set to None.

    Args:
        model: whose gradients are compared; plain, or sharded over the ranks.
        batch: a whole batch, as for ``cp.step``; all data ranks take the rows of the first.
        cp: how rows are shared.
        loss_fn: what turns the batch that it is given into a loss; ``model(**batch).loss`` by
            default.
        max_len: rows are cut to this length, so that one rank can hold them; uncut when None.
        tolerance: largest relative error of a gradient; by the precision when None.
        stock: compare with models of other libraries as they are without us, each packed document
            in a row of its own.

    Returns:
        What was found, if it is within the tolerance.

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
            f"Context parallelism changes the numbers of this model: {report.summary()}. Worst "
            f"gradients: {worst}. {MIXING}"
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
) -> Report:
    """Do what `verify` does, and report what was found, whatever it is.

    Args:
        model: as for `verify`.
        batch: as for `verify`.
        cp: as for `verify`.
        loss_fn: as for `verify`.
        max_len: as for `verify`.
        tolerance: as for `verify`.
        stock: as for `verify`.
        exact: gives `gradients` of whole rows in float64, where parameters are whole. Then what is
            allowed is earned: twice the error that whole rows have in the model's own precision.
        hint: what else may explain a difference; for the report.
    """
    compute = loss_fn or (lambda given: model(**given).loss)
    part = cut_rows(cp.groups.data.first(batch), cp=cp, max_len=max_len)
    dtype = _precision(model)
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    with _evaluating(model):
        loss, found = gradients(model, compute, cp.step(part, training=True))
        found = _averaged(found, model, cp)
        alone = cp.alone(part, training=True, stock=stock)
        whole_loss, whole = _together(lambda: gradients(model, compute, alone), model, cp)
        model.zero_grad(set_to_none=True)
        truth = _together(lambda: exact(part), model, cp) if exact is not None else None
    # A stock model may have no float64: masks that overflow, for one, where it computes in float32.
    rounding = None if truth is None else _distances(whole, truth[1], cp)
    earned: dict[str, float] = {}
    if truth is None or rounding is None or not bool(rounding[0].isfinite().all()):
        errors = _relative(*_distances(found, whole, cp))
    else:
        errors = _relative(*_distances(found, truth[1], cp))
        limits, typical = _earned(*rounding, torch.finfo(dtype).eps)
        own = abs(float(whole_loss) - float(truth[0])) / max(1.0, abs(float(truth[0])))
        # The loss is a mean over many tokens, whose rounding mostly cancels.
        allowed = 2 * max(own, 0.1 * typical) + 4 * torch.finfo(whole_loss.dtype).eps
        earned = dict(zip(truth[1], limits.tolist(), strict=True))
    return Report(
        float(loss),
        float(whole_loss),
        dict(zip(whole, errors.tolist(), strict=True)),
        allowed,
        batches.read_batch(part, sequence_dims=cp.options.sequence_dims).seq_len,
        cp_size=cp.cp_size,
        earned=earned,
        precision=str(dtype).removeprefix("torch."),
        hint=hint,
    )


def cut_rows(batch: Any, *, cp: ContextParallel, max_len: int | None) -> Any:
    """Return rows of at most ``max_len`` tokens, around the first that has a label."""
    whole = batches.read_batch(batch, sequence_dims=cp.options.sequence_dims)
    if max_len is None or whole.seq_len <= max_len or whole.is_unsharded:
        return batch
    if type(batch) is not dict or whole.names.keys() != batch.keys():
        return _cut_inside(batch, whole, max_len)
    if any(batch.get(key) is not None for key in ("cu_seq_lens_q", "cu_seq_lens_k")):
        ids = torch.from_numpy(whole.documents) if whole.documents is not None else None
        batch = {k: v for k, v in batch.items() if not k.startswith(("cu_seq_lens", "max_length"))}
        batch |= {"document_ids": ids} if ids is not None else {}
        return cut_rows(batch, cp=cp, max_len=max_len)
    start = 0
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.dim() > 1:
        labelled = (labels != IGNORED_LABEL).any(0).nonzero().flatten().tolist()
        first = labelled[0] if labelled else 0
        start = min(max(0, first - max_len // 2), whole.seq_len - max_len)
    return {
        key: value.narrow(whole.dims[key], start, max_len) if key in whole.dims else value
        for key, value in batch.items()
    }


def _cut_inside(batch: Any, whole: batches.FullBatch, max_len: int) -> Any:
    """Do the same to a batch that is not a plain dict of tensors: its first tokens."""
    if any(whole.metadata.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k")):
        raise ValueError(
            f"Rows of {whole.seq_len} tokens cannot be cut to max_len={max_len}: `cu_seq_lens_q` "
            "lies inside a nested batch. Use `document_ids`, or a larger max_len."
        )
    parts = {
        path: x.narrow(whole.dims[path], 0, max_len) if path in whole.dims else x
        for path, x in whole.tensors.items()
    }
    return rebuild(batch, parts)


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

    Of sharded parameters it is this rank's part, averaged; of plain ones this rank's own.
    """
    model.zero_grad(set_to_none=True)
    with torch.enable_grad(), step as given:
        loss = compute(given)
        loss.backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        found[name] = gradient.detach().clone()
    return loss.detach(), found


def _averaged(found: dict[str, Tensor], model: nn.Module, cp: ContextParallel) -> dict[str, Tensor]:
    """Average what is not averaged yet."""
    parameters = dict(model.named_parameters())
    return {
        name: x if isinstance(parameters[name], DTensor) else cp.groups.mean(x)
        for name, x in found.items()
    }


def _together(run: Callable[[], Gradients], model: nn.Module, cp: ContextParallel) -> Gradients:
    """Run on whole rows; if that fails on one rank, no rank goes on to wait for it.

    Sharded models wait for each other inside, where nobody could be told.
    """
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return run()
    problem, result = None, None
    try:
        result = run()
    except Exception as error:  # noqa: BLE001  raised below, when all ranks know
        problem = error
    (failed,) = any_rank([problem is not None], cp.groups.context, cp.groups.data)
    if problem is not None:
        raise problem
    if failed or result is None:
        raise RuntimeError(
            "Another rank failed on whole rows, and says why. If they do not fit into its memory, "
            "compare shorter ones: max_len=..."
        )
    return result


def _precision(model: nn.Module) -> torch.dtype:
    """Return the lowest precision that takes part: of a parameter, or autocast's."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(dtypes & set(TOLERANCES), key=TOLERANCES.__getitem__, default=torch.float32)


def _distances(
    found: dict[str, Tensor], exact: dict[str, Tensor], cp: ContextParallel
) -> tuple[Tensor, Tensor]:
    """Return, of each gradient, how far it is from the exact one, and the norm of that."""
    pairs = [(found[name].double(), exact[name].double()) for name in exact]
    squares = torch.stack(
        [torch.stack([(f - e).square().sum(), e.square().sum()]) for f, e in pairs]
    )
    differences, norms = cp.groups.sum(squares).sqrt().unbind(1)
    return differences, norms


def _scales(norms: Tensor) -> Tensor:
    """Return what errors are relative to.

    Some gradients are zero in theory, and all noise: none counts for less than 1e-4 of the typical
    norm.
    """
    floor = 1e-4 * norms.square().mean().sqrt()
    return norms.clamp(min=max(float(floor), torch.finfo(torch.float64).tiny))


def _relative(differences: Tensor, norms: Tensor) -> Tensor:
    return differences / _scales(norms)


def _earned(differences: Tensor, norms: Tensor, eps: float) -> tuple[Tensor, float]:
    """Return what is allowed of each gradient, from the rounding of whole rows, and the median.

    Twice that rounding, and 4 units in the last place. One run is a small sample: a gradient of a
    few numbers may happen to be right, so none counts as more exact than the median. One that is
    zero in theory is all noise, of a size that follows how it is summed: the typical distance is
    always allowed.
    """
    rounding = _relative(differences, norms)
    real = rounding[norms > 0]
    typical = float(real.median()) if len(real) else 0.0
    common = differences.square().mean().sqrt() / _scales(norms)
    return (2 * rounding.clamp(min=typical)).maximum(common) + 4 * eps, typical
