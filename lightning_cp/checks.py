# SPDX-License-Identifier: Apache-2.0
"""`verify`: one batch under context parallelism and on whole rows, loss and gradients compared.

Knows nothing about how the loss is computed: it is given a function that does. Works on sharded
and on plain models, and leaves no trace but the time it took.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp import batch as batches
from lightning_cp.context import IGNORED_LABEL
from lightning_cp.parallel import ContextParallel

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
        tolerance: what was allowed.
        num_tokens: how long the compared rows were.
    """

    loss: float
    whole_loss: float
    errors: Mapping[str, float]
    tolerance: float
    num_tokens: int

    @property
    def passed(self) -> bool:
        """Say whether loss and all gradients agree; NaN does not."""
        scale = max(1.0, abs(self.whole_loss))
        return abs(self.loss - self.whole_loss) <= self.tolerance * scale and all(
            error <= self.tolerance for error in self.errors.values()
        )

    def worst(self, number: int = 5) -> list[tuple[str, float]]:
        """Return the parameters whose gradients differ most."""
        # NaN compares with nothing; it comes first.
        ranked = sorted(self.errors.items(), key=lambda item: (item[1] == item[1], -item[1]))
        return ranked[:number]

    def __str__(self) -> str:
        name, error = self.worst(1)[0] if self.errors else ("no parameter", 0.0)
        return (
            f"loss {self.loss:.6f} under context parallelism, {self.whole_loss:.6f} on whole rows "
            f"of {self.num_tokens} tokens; worst gradient {error:.1e} ({name}), allowed "
            f"{self.tolerance:.0e}"
        )


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    cp: ContextParallel,
    loss_fn: Callable[[dict[str, Any]], Tensor] | None = None,
    max_len: int | None = None,
    tolerance: float | None = None,
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

    Returns:
        What was found, if it is within the tolerance.

    Raises:
        RuntimeError: if it is not; it names the worst parameters.
    """
    compute = loss_fn or (lambda given: model(**given).loss)
    part = cut_rows(cp.same_rows(batch), cp=cp, max_len=max_len)
    with _evaluating(model):
        loss, found = _gradients(model, compute, cp.step(part, training=True), cp)
        whole_loss, exact = _gradients(model, compute, cp.alone(part, training=True), cp)
    report = Report(
        float(loss),
        float(whole_loss),
        _errors(found, exact, cp),
        TOLERANCES[_precision(model)] if tolerance is None else tolerance,
        batches.read_batch(part, sequence_dims=cp.sequence_dims, decided={}).seq_len,
    )
    if not report.passed:
        worst = ", ".join(f"{name} ({error:.1e})" for name, error in report.worst())
        raise RuntimeError(
            f"Context parallelism changes the numbers of this model: {report}. Worst gradients: "
            f"{worst}. Something mixes tokens where we do not see it: attention written out by "
            "hand, a convolution or a recurrence along the sequence, positions that the model "
            "counts itself (use cp.position_ids()), a loss that is not token_mean()."
        )
    return report


def cut_rows(
    batch: Mapping[str, Any], *, cp: ContextParallel, max_len: int | None
) -> dict[str, Any]:
    """Return rows of at most ``max_len`` tokens, around the first that has a label."""
    whole = batches.read_batch(batch, sequence_dims=cp.sequence_dims, decided={})
    if max_len is None or whole.seq_len <= max_len:
        return dict(batch)
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


def _gradients(
    model: nn.Module,
    compute: Callable[[dict[str, Any]], Tensor],
    step: AbstractContextManager[dict[str, Any]],
    cp: ContextParallel,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and this rank's part of every averaged gradient."""
    model.zero_grad(set_to_none=True)
    with torch.enable_grad(), step as given:
        loss = compute(given)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if isinstance(gradient, DTensor):
            gradients[name] = gradient.to_local().detach().clone()
        else:
            gradients[name] = cp.averaged(gradient.detach().clone())
    return loss.detach(), gradients


def _precision(model: nn.Module) -> torch.dtype:
    """Return the lowest precision that takes part: of a parameter, or autocast's."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    return max(dtypes & set(TOLERANCES), key=TOLERANCES.__getitem__, default=torch.float32)


def _errors(
    found: dict[str, Tensor], exact: dict[str, Tensor], cp: ContextParallel
) -> dict[str, float]:
    """Return each gradient's error over its norm.

    Some gradients are zero in theory, and all noise: none counts for less than 1e-4 of the typical
    norm.
    """
    names = list(exact)
    pairs = [(found[name].double(), exact[name].double()) for name in names]
    squares = torch.stack(
        [torch.stack([(f - e).square().sum(), e.square().sum()]) for f, e in pairs]
    )
    differences, norms = cp.summed(squares).sqrt().unbind(1)
    floor = 1e-4 * norms.square().mean().sqrt()
    errors = differences / norms.clamp(min=max(float(floor), torch.finfo(torch.float64).tiny))
    return dict(zip(names, errors.tolist(), strict=True))
