# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of the optimizer, and the learning-rate schedule."""

import math
from typing import Any, Literal

from torch import nn

Schedule = Literal["cosine", "linear", "constant"]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups: matrices, with weight decay, and the rest.

    Args:
        model: parameters that need no gradient are left out.
        weight_decay: of the first group.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[parameter.ndim > 1 and not name.endswith("bias")].append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0}
        for decays, params in groups.items()
        if params
    ]


def lr_factor(
    step: int,
    total_steps: float,
    *,
    warmup_steps: float | None = None,
    schedule: Schedule = "cosine",
    min_lr_fraction: float = 0.0,
) -> float:
    """Return the factor on the learning rate at a step.

    It rises over the warm-up, a number of steps or a fraction below 1 of them, to 1, and falls to
    ``min_lr_fraction`` at the end. While ``total_steps`` is unknown (infinite), it does not fall.

    Example:
        >>> [round(lr_factor(s, 5, warmup_steps=2, schedule="linear"), 3) for s in range(6)]
        [0.333, 0.667, 1.0, 0.667, 0.333, 0.0]
    """
    is_known = math.isfinite(total_steps)
    warmup = warmup_steps or 0
    if warmup < 1:
        warmup = math.ceil(warmup * total_steps) if is_known else 0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant" or not is_known:
        return 1.0
    done = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_lr_fraction + (1 - min_lr_fraction) * left


def check_warmup(steps: float | None) -> None:
    """Raise for a warm-up that is neither a number of steps nor a fraction."""
    steps = steps or 0
    if steps < 0 or (steps > 1 and steps % 1):
        raise ValueError(
            f"model.warmup_steps={steps}: give a whole number of steps, or a fraction below 1."
        )


def check_total(schedule: Schedule, total_steps: float) -> None:
    """Raise for a schedule that needs the number of steps where it is unknown."""
    if schedule != "constant" and not math.isfinite(total_steps):
        raise ValueError(
            f"model.schedule={schedule} needs the number of steps, but this run has none. Set "
            "trainer.max_steps or trainer.max_epochs, or model.schedule=constant."
        )
