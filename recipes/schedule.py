# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of the optimizer, and the learning-rate schedule."""

import math
from typing import Any, Literal

from torch import nn

Schedule = Literal["cosine", "linear", "constant"]


def decay_groups(
    model: nn.Module, weight_decay: float, *, embeddings: bool = True
) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups: matrices, with weight decay, and the rest.

    Args:
        model: parameters that need no gradient are left out.
        weight_decay: of the first group.
        embeddings: whether embeddings are in it.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith("bias")
            groups[decays and (embeddings or id(parameter) not in tables)].append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0}
        for decays, params in groups.items()
        if params
    ]


def lr_factor(
    step: int,
    total_steps: float,
    *,
    warmup_steps: int | None = None,
    warmup_fraction: float | None = None,
    schedule: Schedule = "cosine",
    min_lr_fraction: float = 0.0,
) -> float:
    """Return the factor on the learning rate at a step.

    It rises over the warm-up to 1, and falls to ``min_lr_fraction`` at the end. While
    ``total_steps`` is unknown (infinite), it does not fall.

    Example:
        >>> [round(lr_factor(s, 5, warmup_steps=2, schedule="linear"), 3) for s in range(6)]
        [0.333, 0.667, 1.0, 0.667, 0.333, 0.0]
    """
    is_known = math.isfinite(total_steps)
    if warmup_fraction is not None:
        warmup_steps = math.ceil(warmup_fraction * total_steps) if is_known else 0
    warmup = warmup_steps or 0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant" or not is_known:
        return 1.0
    done = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_lr_fraction + (1 - min_lr_fraction) * left


def check_warmup(steps: int | None, fraction: float | None) -> None:
    """Raise for a warm-up that is set twice or out of range."""
    if steps is not None and fraction is not None:
        raise ValueError(
            f"model.warmup_steps={steps} and model.warmup_fraction={fraction} set the same value. "
            "Give one of them."
        )
    if (steps or 0) < 0 or not 0 <= (fraction or 0.0) < 1:
        raise ValueError(
            f"model.warmup_steps={steps}, model.warmup_fraction={fraction}: give at least 0 steps, "
            "or a fraction from 0 to below 1."
        )


def check_total(schedule: Schedule, total_steps: float) -> None:
    """Raise for a schedule that needs the number of steps where it is unknown."""
    if schedule != "constant" and not math.isfinite(total_steps):
        raise ValueError(
            f"model.schedule={schedule} needs the number of steps, but this run has none. Set "
            "trainer.max_steps or trainer.max_epochs, or model.schedule=constant."
        )
