# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step, planned before the first one; `lightning_cp.planner` computes it.

Only for one model whose shape an adapter knows, and in the precisions that the planner knows.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_cp.adapters import plan_models
from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.comm.transport import gather
from lightning_cp.config import Memory
from lightning_cp.lightning.memory.activations import still_to_do
from lightning_cp.lightning.memory.memory_choice import (
    HOST_MARGIN,
    MARGIN,
    RunSetup,
    fits,
    host_bytes,
)
from lightning_cp.memory.activation_checkpointing import switched_layers
from lightning_cp.memory.budget import resolve_budget
from lightning_cp.memory.offload import Store, attach, store_of
from lightning_cp.parallel import ContextParallel
from lightning_cp.planner import Setup
from lightning_cp.planner.memory import (
    USABLE,
    MemoryPlan,
    plan_memory,
)
from lightning_cp.planner.shapes import ModelShape
from lightning_cp.step.step import Opened, Step

_logger = logging.getLogger("lightning_cp")

TOLERANCE: Final = 1.1
"""How far a plan must exceed the memory of the device to be refused: plans are off by up to 7%."""


class MemoryCheck:
    """Plans the memory of training steps: logs the first plan, and raises if it cannot fit.

    At the first step, options that are ``auto`` are decided. With ``keep_attention="auto"``, each
    step may keep what its plan leaves free. Where ``auto`` recomputes some of the layers or none,
    a step with more tokens than all before may recompute more.

    Args:
        module: the LightningModule.
        device: of this rank.
        run: its configuration and sizes.
        cp: offloads, if that is decided.
        prepare: prepares the layers of the model, if that is decided.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        run: RunSetup,
        *,
        cp: ContextParallel,
        prepare: Callable[[Memory], None],
    ) -> None:
        self._module, self._device, self._run = module, device, run
        self._cp, self._prepare = cp, prepare
        if run.memory.offload == "auto":  # an earlier run may have offloaded
            cp.offload_to(None)
        self._is_first, self._has_warned = True, False
        self._num_tokens = 0
        self._total: float | None = None
        self._kept = 0.0
        self._num_layers = 0  # that may be recomputed one by one, if that is decided here
        self.plan: MemoryPlan | None = None
        """The plan of the training step with the most tokens; None before it, or without one.

        Without the attention that ``keep_attention="auto"`` keeps in what it leaves free.
        """

    def check(self, step: Opened) -> None:
        """Plan a step. The first time collective: raises on all ranks."""
        if not isinstance(step, Step):  # the module opens steps for its parts
            self._warn_undecided()
            return
        is_first, self._is_first = self._is_first, False
        if is_first:
            self._total = _smallest(device_bytes(self._device), step)
        num_tokens = step.batch_size * step.layout.local_len
        if num_tokens > self._num_tokens:  # less memory is left than was planned
            self._num_tokens = num_tokens
            self._plan(step, is_first=is_first)
        if self._run.memory.keep_attention == "auto":
            step.cache.kept_limit = self._kept

    def _plan(self, step: Step, *, is_first: bool) -> None:
        total = self._total
        if total is None:  # main memory: what checkpointing saves is a part of what it takes anyway
            self._kept = inf
            return
        models = plan_models(self._module)
        model = models[0] if len(models) == 1 else {}
        if not model or self._run.of(model, step) is None:
            self._kept = 0.0
            self._warn_undecided()
            return
        decided = self._decide(model, step, total) if is_first and self._run.undecided else ""
        if not is_first:
            self._recompute_more(model, step, total)
        setup = self._run.of(model, step)
        assert setup is not None  # noqa: S101  its precision is known
        setup, host = self._limited(model["shape"], setup, step), _host_budget(step)
        self.plan = plan_memory(model["shape"], setup)
        self._kept = _room(model["shape"], setup, self.plan, total, host)
        if setup.checkpointing == "full" and self._run.memory.keep_attention == "auto":
            decided += f" keep_attention_limit_gb={self._kept / 1e9:.1f}"
        if is_first:
            _log(describe_memory(self.plan, total) + decided)
            is_too_large = model["is_known"] and self.plan.peak > TOLERANCE * total
            groups = (step.groups.tensor, step.groups.context, step.groups.data)
            if self._run.memory.check and any_rank([is_too_large], *groups)[0]:
                raise MemoryError(_refusal(self.plan, total))

    def _decide(self, model: Mapping[str, Any], step: Step, total: float) -> str:
        """Decide what is ``auto``, alike on all ranks; carry it out, and return it as text."""
        run, groups = self._run, step.groups
        budget = None
        if run.memory.offload == "auto":
            budget = resolve_budget(replace(run.memory, offload="all"), groups)
        host = _host_budget(step) if budget is None else float(budget.host_bytes)
        num_layers = len(switched_layers(self._module))
        if num_layers != len(model["shape"].layers):
            num_layers = 0
        choices = list(run.choices(is_checkpointed=model["is_checkpointed"], num_layers=num_layers))
        exceeds = []
        for choice in choices:
            setup = choice.of(model, step)
            assert setup is not None  # noqa: S101  its precision is known
            exceeds.append(not fits(model["shape"], setup, device=total, host=host))
        exceeds = any_rank(exceeds, groups.tensor, groups.context, groups.data)
        # If none fits, the last one takes the least.
        chosen = choices[exceeds.index(False) if False in exceeds else -1]
        self._prepare(still_to_do(chosen.memory, run.memory))
        is_auto = run.memory.activation_checkpointing == "auto" and not model["is_checkpointed"]
        if is_auto and chosen.memory.activation_checkpointing is not True:
            self._num_layers = num_layers
        offload = chosen.memory.offload
        if budget is not None and offload == "all":
            # What exceeds the host's memory stays on the device.
            offload = budget.host_bytes / 2**30
            store = Store(replace(budget, is_complete=False))
            self._cp.offload_to(store)
            attach(store, step)
        keep = run.memory.keep_attention
        self._run = chosen.with_memory(keep_attention=keep, offload=offload)
        return "".join(f" {name}={getattr(chosen.memory, name)}" for name in run.undecided)

    def _limited(self, shape: ModelShape, setup: Setup, step: Step) -> Setup:
        """Return a setup without offload where host memory is limited: the rest stays here."""
        is_limited = self._run.memory.offload_bytes is not None
        if is_limited and host_bytes(plan_memory(shape, setup), setup) > _host_budget(step):
            return replace(setup, offload="none")
        return setup

    def _recompute_more(self, model: Mapping[str, Any], step: Step, total: float) -> None:
        """Recompute as many layers as a step needs, if ``auto`` has left some."""
        if self._num_layers == 0:
            return
        run = self._run
        keep = "all" if run.memory.keep_attention == "auto" else run.memory.keep_attention
        first = number = int(run.memory.activation_checkpointing)
        while number < self._num_layers:
            kept = run.with_memory(activation_checkpointing=number or False, keep_attention=keep)
            setup = kept.of(model, step)
            assert setup is not None  # noqa: S101  its precision is known
            setup = self._limited(model["shape"], setup, step)
            if fits(model["shape"], setup, device=total, host=inf):
                break
            number += 1
        if number > first:
            self._run = run.with_memory(activation_checkpointing=number)
            self._prepare(Memory(number))
            num_tokens = step.batch_size * step.layout.local_len
            _log(f"memory plan: tokens={num_tokens} activation_checkpointing={number}")

    def _warn_undecided(self) -> None:
        if self._run.undecided and not self._has_warned:
            self._has_warned = True
            names = ", ".join(f"{name}='auto'" for name in self._run.undecided)
            _warn(
                f"memory=Memory({names}): the memory of this run cannot be planned, and nothing is "
                "switched on. Plans are for one Hugging Face model in bf16-mixed or bf16-true, "
                "whose batches are sharded as a whole. Set the values yourself."
            )


def _smallest(total: int | None, step: Step) -> float | None:
    """Return the least memory of all ranks of the sequence, so that they decide alike.

    Also of tensor ranks: recomputed layers communicate with them.
    """
    groups = step.groups
    mine = torch.tensor([-1 if total is None else total], device=groups.context.device)
    least = int(gather(gather(mine, groups.tensor), groups.context).min())
    return None if least < 0 else float(least)


def _room(shape: ModelShape, setup: Setup, plan: MemoryPlan, total: float, host: float) -> float:
    """Return the bytes that a step may keep of attention, planned without.

    Where checkpoints go to the host, it goes with them: the device holds that of a few layers.
    """
    if setup.offload == "all" and setup.checkpointing == "full":
        kept = plan_memory(shape, replace(setup, checkpointing="keep"))
        is_fitting = MARGIN * kept.peak <= USABLE * total
        return max(0.0, host / HOST_MARGIN - host_bytes(plan, setup)) if is_fitting else 0.0
    return max(0.0, USABLE * total - MARGIN * plan.peak)


def _host_budget(step: Step) -> float:
    """Return the host memory that a rank may take, the same on all ranks."""
    store = store_of(step)
    return 0.0 if store is None else float(store.budget.host_bytes)


def device_bytes(device: torch.device) -> int | None:
    """Return the memory that this process has or can get on a device; None for a CPU.

    Not all of its memory: other processes may use the device, too.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


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


def _refusal(plan: MemoryPlan, total: float) -> str:
    parts = ", ".join(f"{name} {x / 1e9:.0f}" for name, x in plan.parts.items() if x >= 5e8)
    return (
        f"This training step needs {plan.peak / 1e9:.0f} GB on each rank by plan ({parts}), and "
        f"the device has {total / 1e9:.0f} GB. Use memory=Memory("
        "activation_checkpointing='auto', offload='auto', tile='auto'), which take what fits; "
        "parameters='full' or Parameters(offload=True), more context ranks, shorter sequences, or "
        "LoRA. `lightning-cp plan` computes what each saves. If the plan is wrong, go on with "
        "memory=Memory(check=False)."
    )


_log: Callable[[str], None] = rank_zero_only(_logger.info)
_warn: Callable[[str], None] = rank_zero_only(_logger.warning)
