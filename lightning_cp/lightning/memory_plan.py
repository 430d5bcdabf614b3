# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step, planned before the first one; `lightning_cp.planner` computes it.

Only for one model whose shape an adapter knows, and in the precisions that the planner knows.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_cp.adapters import plan_models
from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.comm.transport import gather
from lightning_cp.fsdp.sharding import ParameterSharding
from lightning_cp.lightning.activations import Activations
from lightning_cp.lightning.mixed_precision import MixedPrecision
from lightning_cp.memory.offload import store_of
from lightning_cp.memory.tiles import MIN_TOKENS
from lightning_cp.options import Options
from lightning_cp.planner import Setup
from lightning_cp.planner.memory import (
    GPUS_PER_HOST,
    OTHER_BYTES,
    USABLE,
    MemoryPlan,
    plan_memory,
)
from lightning_cp.planner.shapes import ModelShape
from lightning_cp.step import Step, UnshardedStep

_logger = logging.getLogger("lightning_cp")

TOLERANCE: Final = 1.1
"""How far a plan must exceed the memory of the device to be refused: plans are off by up to 7%."""

MARGIN: Final = 1.05
"""A plan times this must leave room for attention that ``auto`` keeps."""

HOST_MARGIN: Final = 1.25
"""The same for host memory: its chunks may exceed what is needed by a quarter."""


@dataclass(frozen=True)
class RunSetup:
    """What of a run the memory of a step depends on, besides the model and the batch.

    Args:
        options: of attention.
        activations: of the layers.
        world_size: all ranks.
        precision: of the Trainer.
        mixed_precision: how bf16-mixed is carried out.
        sharding: of the parameters.
    """

    options: Options
    activations: Activations
    world_size: int
    precision: str
    mixed_precision: MixedPrecision
    sharding: ParameterSharding

    def of(self, model: Mapping[str, Any], step: Step) -> Setup | None:
        """Return the setup of a step for the planner; None for a precision that it lacks."""
        precision = "bf16-policy" if self.mixed_precision == "fsdp" else self.precision
        if precision not in ("bf16-mixed", "bf16-true", "bf16-policy"):
            return None
        options, layout = self.options, step.layout
        checkpointing = "full" if model["is_checkpointed"] else "none"
        if checkpointing == "full" and options.kept_bytes is None:
            checkpointing = "keep"
        setup = Setup(
            seq_len=max(layout.seq_len, layout.cp_size),
            num_gpus=self.world_size,
            cp_size=layout.cp_size,
            ulysses_size=step.groups.inside.size,
            batch_size=step.batch_size,
            precision=precision,  # type: ignore[arg-type]
            sharding=self.sharding,
            checkpointing=checkpointing,  # type: ignore[arg-type]
            offload="none" if options.offload_bytes == 0 or checkpointing == "none" else "all",
            lora_rank=model["lora_rank"],
            attention_memory=options.attention_memory,
            gradient_wire=options.gradient_wire,
        )
        tile = self.activations.tile
        tokens = MIN_TOKENS if tile is True else tile
        return replace(setup, tiles=min(16, -(-setup.local_len // tokens)) if tile else 0)


class MemoryCheck:
    """Plans the memory of training steps: logs the first plan, and raises if it cannot fit.

    With ``keep_attention="auto"``, each step may keep what its plan leaves free.

    Args:
        module: the LightningModule.
        device: of this rank.
        run: the options of the run.
        refuse: whether to raise.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, run: RunSetup, *, refuse: bool
    ) -> None:
        self._module, self._device, self._run, self._refuse = module, device, run, refuse
        self._is_first = True
        self._num_tokens = 0
        self._total: float | None = None
        self._kept = 0.0
        self.plan: MemoryPlan | None = None
        """The plan of the training step with the most tokens; None before it, or without one."""

    def check(self, step: Step) -> None:
        """Plan a step. The first time collective: raises on all ranks."""
        if isinstance(step, UnshardedStep):  # the module opens steps for its parts
            return
        is_first, self._is_first = self._is_first, False
        if is_first:
            self._total = _smallest(device_bytes(self._device), step)
        num_tokens = step.batch_size * step.layout.local_len
        if num_tokens > self._num_tokens:  # less memory is left than was planned
            self._num_tokens = num_tokens
            self._plan(step, is_first=is_first)
        if self._run.options.keep_attention == "auto":
            step.cache.kept_limit = self._kept

    def _plan(self, step: Step, *, is_first: bool) -> None:
        total = self._total
        if total is None:  # main memory: what checkpointing saves is a part of what it takes anyway
            self._kept = inf
            return
        models = plan_models(self._module)
        model = models[0] if len(models) == 1 else {}
        setup = self._run.of(model, step) if model else None
        if setup is None:
            self._kept = 0.0
            return
        self.plan, host = plan_memory(model["shape"], setup), _host_budget(step)
        is_limited = self._run.options.offload_bytes is not None  # what exceeds it stays here
        if is_limited and host_bytes(self.plan, setup) > host:
            setup = replace(setup, offload="none")
            self.plan = plan_memory(model["shape"], setup)
        self._kept = _room(model["shape"], setup, self.plan, total, host)
        if is_first:
            is_auto = setup.checkpointing == "full" and self._run.options.keep_attention == "auto"
            _log(describe_memory(self.plan, total) + (_kept_text(self._kept) if is_auto else ""))
            is_too_large = model["is_known"] and self.plan.peak > TOLERANCE * total
            groups = (step.groups.context, step.groups.data)
            if self._refuse and any_rank([is_too_large], *groups)[0]:
                raise MemoryError(_refusal(model["shape"], setup, self.plan, total))


def _smallest(total: int | None, step: Step) -> float | None:
    """Return the least memory of all ranks of the sequence, so that they decide alike."""
    group = step.groups.context
    mine = torch.tensor([-1 if total is None else total], device=group.device)
    least = int(gather(mine, group).min())
    return None if least < 0 else float(least)


def _room(shape: ModelShape, setup: Setup, plan: MemoryPlan, total: float, host: float) -> float:
    """Return the bytes that a step may keep of attention, planned without.

    Where checkpoints go to the host, it goes with them: the device holds that of a few layers.
    """
    if setup.offload == "all" and setup.checkpointing == "full":
        kept = plan_memory(shape, replace(setup, checkpointing="keep"))
        fits = MARGIN * kept.peak <= USABLE * total
        return max(0.0, host / HOST_MARGIN - host_bytes(plan, setup)) if fits else 0.0
    return max(0.0, USABLE * total - MARGIN * plan.peak)


def _kept_text(num_bytes: float) -> str:
    return f" keep_attention_gb={num_bytes / 1e9:.1f}"


def host_bytes(plan: MemoryPlan, setup: Setup) -> float:
    """Return the host memory of one rank."""
    return plan.host / min(GPUS_PER_HOST, setup.num_gpus)


def _host_budget(step: Step) -> float:
    """Return the host memory that a rank may take, the same on all ranks."""
    store = store_of(step)
    return 0.0 if store is None else float(store.budget.host_bytes)


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a device; None for a CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def describe_memory(plan: MemoryPlan, total: float) -> str:
    """Return a plan in one line.

    Example:
        >>> plan = MemoryPlan({"loss": {"weights": 16e9, "kept attention": 2.5e9}}, 0)
        >>> describe_memory(plan, 80e9)
        'memory plan: peak_gb=18.5 device_gb=80.0 moment=loss weights_gb=16.0 kept_attention_gb=2.5'
    """
    values = {"peak_gb": plan.peak, "device_gb": total}
    parts = {f"{name.replace(' ', '_')}_gb": x for name, x in plan.parts.items() if x >= 1e8}
    moment = plan.peak_moment.replace(", ", "/").replace(" ", "_")
    texts = [f"{name}={x / 1e9:.1f}" for name, x in values.items()] + [f"moment={moment}"]
    return " ".join(["memory plan:", *texts, *(f"{n}={x / 1e9:.1f}" for n, x in parts.items())])


def compare_memory(plan: MemoryPlan, measured: float) -> str:
    """Return the planned and the measured peak in one line.

    Example:
        >>> compare_memory(MemoryPlan({"loss": {"weights": 21e9}}, 0), 18e9)
        'memory plan: peak_gb=20.0 measured_gb=18.0 ratio=1.11'
    """
    peak = plan.peak - OTHER_BYTES  # outside of torch's allocator
    return (
        f"memory plan: peak_gb={peak / 1e9:.1f} measured_gb={measured / 1e9:.1f} "
        f"ratio={peak / measured:.2f}"
    )


def _refusal(shape: ModelShape, setup: Setup, plan: MemoryPlan, total: float) -> str:
    parts = ", ".join(f"{name} {x / 1e9:.0f}" for name, x in plan.parts.items() if x >= 5e8)
    text = (
        f"This training step needs {plan.peak / 1e9:.0f} GB on each rank by plan ({parts}), and "
        f"the device has {total / 1e9:.0f} GB. "
    )
    fitting = (
        f"With {', '.join(names)} it needs {needed / 1e9:.0f} GB. "
        for names, wanted in _leaner(setup)
        if (needed := plan_memory(shape, wanted).peak) <= USABLE * total
    )
    text += next(fitting, "Use more context ranks, shorter sequences, or LoRA. ")
    return text + "If the plan is wrong, go on with check_memory=False."


def _leaner(setup: Setup) -> Iterator[tuple[list[str], Setup]]:
    """Yield setups that take less memory, and their options, the fastest first."""
    names: list[str] = []
    if setup.checkpointing == "none":
        names, setup = ["activation_checkpointing=True"], replace(setup, checkpointing="full")
        yield names, setup
    if setup.offload == "none":
        names, setup = [*names, "offload='all'"], replace(setup, offload="all")
        yield names, setup
    if setup.tiles == 0:
        yield [*names, "tile=True"], replace(setup, tiles=16)


_log: Callable[[str], None] = rank_zero_only(_logger.info)
