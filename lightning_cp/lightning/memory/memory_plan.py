# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step, planned before the first one; `lightning_cp.planner` computes it.

Only for one model whose shape an adapter knows, and in the precisions that the planner knows.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_cp.adapters import plan_models
from lightning_cp.comm.collective_errors import any_rank
from lightning_cp.comm.transport import gather
from lightning_cp.config import Config, Memory
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.lightning.memory.activations import still_to_do
from lightning_cp.lightning.memory.memory_choice import (
    Choice,
    Limits,
    RunSetup,
    Size,
    choose,
    fits,
    host_bytes,
    other_host_bytes,
    room,
)
from lightning_cp.memory.activation_checkpointing import switched_layers
from lightning_cp.memory.budget import resolve_budget
from lightning_cp.memory.offload import Store, attach, store_of
from lightning_cp.memory.probe import has_hooks
from lightning_cp.parallel import ContextParallel
from lightning_cp.planner.memory import MemoryPlan, plan_memory
from lightning_cp.planner.setup import Setup
from lightning_cp.planner.shapes import ModelShape
from lightning_cp.step.step import Opened, Step

_logger = logging.getLogger("lightning_cp")

NEARLY_FULL: Final = 0.8
"""Share of a device from which fragments of the allocator matter."""

TOLERANCE: Final = 1.1
"""How far a plan must exceed the memory of the device to be refused: plans are off by up to 7%."""


class MemoryCheck:
    """Plans the memory of training steps: logs the first plan, and raises if it cannot fit.

    At the first step, values that are ``auto`` are decided, alike on all ranks. With
    ``keep_attention="auto"``, each step may keep what its plan leaves free. Where not all layers
    are recomputed, a step with more tokens than all before may recompute more.

    Args:
        module: the LightningModule.
        device: of this rank.
        run: its configuration and sizes.
        cp: offloads, if that is decided.
        prepare: prepares the layers of the model, if that is decided.
        resumed: returns what `saved` was in the checkpoint from which a run goes on.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        run: RunSetup,
        *,
        cp: ContextParallel,
        prepare: Callable[..., None],
        resumed: Callable[[], Mapping[str, Any] | None] | None = None,
    ) -> None:
        self._module, self._device, self._run = module, device, run
        self._cp, self._prepare, self._resumed = cp, prepare, resumed
        self._saved: dict[str, Any] | None = None
        if run.memory.offload == "auto":  # an earlier run may have offloaded
            cp.offload_to(None)
        self._is_first = True
        self._num_tokens = 0
        self._limits: Limits | None = None
        self._kept = 0.0
        self._config: Config | None = None  # of calls, if the memory of one is decided here
        self._num_layers = 0  # that may be recomputed one by one, if that is decided here
        self._left_out: list[nn.Module] = []  # layers that ``auto`` does not recompute
        self.plan: MemoryPlan | None = None
        """The plan of the training step with the most tokens; None before it, or without one.

        Without the attention that ``keep_attention="auto"`` keeps in what it leaves free.
        """

    def check(self, step: Opened) -> None:
        """Plan a step. The first time collective: raises on all ranks."""
        if not isinstance(step, Step):  # the module opens steps for its parts
            return
        is_first, self._is_first = self._is_first, False
        largest = agree(step, device_bytes(self._device), self._run.memory) if is_first else None
        if largest is not None:
            self._limits = Limits(largest.device, _host_budget(step))
        num_tokens = step.batch_size * step.layout.local_len
        if num_tokens > self._num_tokens:  # less memory is left than was planned
            self._num_tokens = num_tokens
            self._plan(step, largest)
        step.cache.call_config = self._config
        if self._run.memory.keep_attention == "auto":
            step.cache.kept_limit = self._kept

    def _plan(self, step: Step, largest: "Agreed | None") -> None:
        if self._limits is None:  # main memory: what is saved is a part of what it takes anyway
            self._kept = inf
            return
        models = plan_models(self._module)
        model = models[0] if len(models) == 1 else {}
        if not model or self._run.of(model, step) is None:
            if largest is not None:
                self._decide_without_plan(step, models)
            return
        size = Size(step.layout.seq_len, step.batch_size)
        if largest is not None:
            size = largest.size
            if self._run.undecided:
                self._decide(model, step, largest)
        else:
            self._recompute_more(model, step)
        setup = self._run.of(model, step, size)
        assert setup is not None  # noqa: S101  its precision is known
        setup, limits = self._limited(model["shape"], setup, step), self._limits
        self.plan = plan_memory(model["shape"], setup)
        own = self._run.of(model, step)
        assert own is not None  # noqa: S101  as before
        own = self._limited(model["shape"], own, step)
        self._kept = room(model["shape"], own, plan_memory(model["shape"], own), limits)
        if largest is not None:
            _log(describe_memory(self.plan, limits.device) + fragments(self.plan, limits.device))
        self._refuse(self.plan, step, is_known=model["is_known"], is_first=largest is not None)

    def _refuse(self, plan: MemoryPlan, step: Step, *, is_known: bool, is_first: bool) -> None:
        """Raise for a step that cannot fit: the first time on all ranks."""
        assert self._limits is not None  # noqa: S101
        if not self._run.memory.check:
            return
        total, free = self._limits.device, free_bytes(self._device)
        taken = is_known and free is not None and plan.peak > free
        wrong = [is_known and plan.peak > TOLERANCE * total, taken]
        if is_first:
            groups = (step.groups.tensor, step.groups.context, step.groups.data)
            wrong = any_rank(wrong, *groups)
        if wrong[0]:
            raise MemoryError(_refusal(plan, total))
        if wrong[1] and is_first:
            raise MemoryError(_taken(plan, total, free))

    def _decide(self, model: Mapping[str, Any], step: Step, largest: "Agreed") -> None:
        """Decide what is ``auto``, alike on all ranks, carry it out, and log it."""
        run, groups = self._run, step.groups
        assert self._limits is not None  # noqa: S101
        budget = None
        if run.memory.offload == "auto":
            budget = resolve_budget(replace(run.memory, offload="all"), groups)
            host = 0.0 if budget is None else float(budget.host_bytes)
            self._limits = replace(self._limits, host=host)
        numbers = self._numbers(switched_layers(self._module), len(model["shape"].layers))
        basis = self._basis(model, step)
        chosen = self._chosen_before(basis)
        if chosen is None:
            chosen = choose(run, model, step, largest.size, self._limits, numbers=numbers)
        self._saved = {"basis": basis, "chosen": values_of(chosen)}
        self._prepare(still_to_do(chosen.memory, run.memory), left_out=self._left_out)
        is_auto = run.memory.activation_checkpointing == "auto" and not model["is_checkpointed"]
        if is_auto and chosen.memory.activation_checkpointing is not True:
            self._num_layers = len(numbers) if len(numbers) > 1 else 0
        offload = chosen.memory.offload
        if budget is not None and offload == "all":
            # What exceeds the host's memory stays on the device.
            setup = chosen.of(model, step, largest.size)
            assert setup is not None  # noqa: S101  its precision is known
            others = other_host_bytes(plan_memory(model["shape"], setup), setup, run.config)
            host_bytes = max(0, int(budget.host_bytes - others))
            offload = host_bytes / 2**30
            self._limits = replace(self._limits, host=float(host_bytes))
            store = Store(replace(budget, host_bytes=host_bytes, is_complete=False))
            self._cp.offload_to(store)
            attach(store, step)
        if chosen.config.attention != run.config.attention:
            self._config = replace(self._cp.config, attention=chosen.config.attention)
        keep = run.memory.keep_attention
        self._run = chosen.with_memory(keep_attention=keep, offload=offload)
        _log(describe_choice(chosen, run))

    def _numbers(self, layers: Sequence[nn.Module], num_planned: int) -> tuple[int | bool, ...]:
        """Return how many layers ``auto`` may recompute; True for all of a model.

        Not those with hooks of others, which would run twice.
        """
        self._left_out = [layer for layer in layers if has_hooks(layer)]
        number = len(layers) - len(self._left_out)
        if self._left_out:
            _log(
                f"memory plan: {len(self._left_out)} of {len(layers)} layers have hooks, which "
                "would run twice if they were recomputed: these layers are not."
            )
            return tuple(range(1, number + 1)) if len(layers) == num_planned else ()
        return (*range(1, number), True) if len(layers) == num_planned else (True,)

    def _decide_without_plan(self, step: Step, models: Sequence[Mapping[str, Any]]) -> None:
        """Recompute all layers if activations may exceed half of the memory of any rank.

        For models and precisions that the planner does not know. Attention is kept in a quarter of
        the memory, less what checkpoints take.
        """
        assert self._limits is not None  # noqa: S101
        memory, groups, total = self._run.memory, step.groups, self._limits.device
        self._kept = 0.0
        layers = switched_layers(self._module) or find_blocks(
            self._module, self._run.config.parameters.shard_modules
        )
        tokens = step.batch_size * step.layout.local_len
        itemsize = 2 if self._run.precision == "bf16-true" else 4
        saved, checkpoints = (itemsize * tokens * x for x in activation_widths(layers))
        is_auto = memory.activation_checkpointing == "auto"
        is_auto = is_auto and not any(model.get("is_checkpointed") for model in models)
        exceeds = any_rank([saved > total / 2], groups.tensor, groups.context, groups.data)[0]
        if not (is_auto and exceeds and layers):
            return
        self._numbers(layers, len(layers))
        if len(self._left_out) == len(layers):
            return
        self._prepare(Memory(True, offload="none", tile=False), left_out=self._left_out)
        self._kept = max(0.0, total / 4 - checkpoints)
        _log(
            f"memory: the activations of this run may take {saved / 1e9:.0f} of "
            f"{total / 1e9:.0f} GB, and no plan knows it: its {len(layers)} layers are recomputed "
            "in backward. Off by memory=Memory(activation_checkpointing=False)."
        )

    def _basis(self, model: Mapping[str, Any], step: Step) -> str:
        """Return what a choice depends on, as text: if it is the same, a resumed run repeats it."""
        assert self._limits is not None  # noqa: S101
        run, groups = self._run, step.groups
        sizes = groups.tensor.size, step.cp_size, groups.inside.size, groups.data.size
        parts = (model["shape"], model["lora_rank"], sizes, run.precision, run.sharding)
        return repr((*parts, run.shard_size, run.config.parameters, round(self._limits.device)))

    def _chosen_before(self, basis: str) -> RunSetup | None:
        """Return the choice of the run that is resumed, if it would be made again."""
        saved = self._resumed() if self._resumed is not None else None
        if not saved:
            return None
        if saved["basis"] != basis:
            _log(f"memory plan: the checkpoint had {saved['chosen']}, for other sizes or devices")
            return None
        values = dict(saved["chosen"])
        return self._run.with_attention(values.pop("attention_memory")).with_memory(**values)

    @property
    def saved(self) -> Mapping[str, Any] | None:
        """Return what a checkpoint has to hold for a resumed run to choose alike."""
        if self._saved is None:
            return None
        number = self._run.memory.activation_checkpointing
        return {**self._saved, "chosen": {**self._saved["chosen"], _NUMBER: number}}

    def _limited(self, shape: ModelShape, setup: Setup, step: Step) -> Setup:
        """Return a setup without offload where host memory is limited: the rest stays here."""
        is_limited = self._run.memory.offload_bytes is not None
        if is_limited and host_bytes(plan_memory(shape, setup), setup) > _host_budget(step):
            return replace(setup, offload="none")
        return setup

    def _recompute_more(self, model: Mapping[str, Any], step: Step) -> None:
        """Recompute as many layers as a step needs, if ``auto`` has left some."""
        if self._num_layers == 0 or self._limits is None:
            return
        run, limits = self._run, Limits(self._limits.device, inf)
        keep = "all" if run.memory.keep_attention == "auto" else run.memory.keep_attention
        first = number = int(run.memory.activation_checkpointing)
        while number < self._num_layers:
            kept = run.with_memory(activation_checkpointing=number or False, keep_attention=keep)
            setup = kept.of(model, step)
            assert setup is not None  # noqa: S101  its precision is known
            setup = self._limited(model["shape"], setup, step)
            if fits(Choice(kept, setup, plan_memory(model["shape"], setup)), limits):
                break
            number += 1
        if number > first:
            self._run = run.with_memory(activation_checkpointing=number)
            self._prepare(Memory(number, tile=False), left_out=self._left_out)
            num_tokens = step.batch_size * step.layout.local_len
            _log(f"memory plan: tokens={num_tokens} activation_checkpointing={number}")


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed on at the first step.

    Args:
        device: bytes of the smallest device that a run may take.
        size: of the largest batch.
    """

    device: float
    size: Size


def agree(step: Step, total: int | None, memory: Memory) -> Agreed | None:
    """Return the least memory and the largest batch of all ranks; None on CPUs. Collective."""
    groups = step.groups
    mine = [-1 if total is None else total, step.layout.seq_len, step.batch_size]
    x = torch.tensor(mine, device=groups.context.device)
    ranks = gather(gather(gather(x, groups.tensor), groups.context), groups.data)
    values = ranks.view(-1, 3).tolist()
    least = min(row[0] for row in values)
    if least < 0:
        return None
    seq_len = max(memory.max_tokens or 0, *(row[1] for row in values))
    size = Size(seq_len, max(row[2] for row in values))
    return Agreed(least - memory.reserve_gb * 1e9, size)


def _host_budget(step: Step) -> float:
    """Return the host memory that a rank may take, the same on all ranks."""
    store = store_of(step)
    return 0.0 if store is None else float(store.budget.host_bytes)


def activation_widths(layers: Sequence[nn.Module]) -> tuple[int, int]:
    """Return bounds of the numbers per token that layers save, and that checkpoints of them save.

    A product with weights saves its input, and what follows it its output.
    """
    shapes = [[p.shape[-2:] for p in layer.parameters() if p.dim() > 1] for layer in layers]
    return (
        sum(sum(shape) for one in shapes for shape in one),
        sum(min((shape[-1] for shape in one), default=0) for one in shapes),
    )


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a device, whoever uses it; None for a CPU.

    What is free differs from run to run, and so would what ``auto`` chooses.
    """
    return None if device.type != "cuda" else torch.cuda.mem_get_info(device)[1]


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that this process has or can get on a device; None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


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


_NUMBER: Final = "activation_checkpointing"


def fragments(plan: MemoryPlan, total: float) -> str:
    """Return what to say where the allocator may lose memory that a plan needs."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    is_on = any("expandable_segments:True" in os.environ.get(name, "") for name in names)
    if is_on or plan.peak < NEARLY_FULL * total:
        return ""
    return (
        ". Nearly full: PYTORCH_ALLOC_CONF=expandable_segments:True, set before Python starts, "
        "avoids losses to fragments"
    )


def values_of(chosen: RunSetup) -> dict[str, Any]:
    """Return what was chosen, as plain values."""
    names = ("activation_checkpointing", "keep_attention", "offload", "tile")
    values = {name: getattr(chosen.memory, name) for name in names}
    return {**values, "attention_memory": chosen.config.attention.memory}


def describe_choice(chosen: RunSetup, run: RunSetup) -> str:
    """Return what ``auto`` has chosen, as a user would write it."""
    memory = ", ".join(f"{name}={getattr(chosen.memory, name)!r}" for name in run.undecided)
    text = f"memory plan: fastest of those that fit: memory=Memory({memory})"
    if chosen.config.attention.memory != run.config.attention.memory:
        text += f", attention=Attention(memory={chosen.config.attention.memory})"
    return text


def _taken(plan: MemoryPlan, total: float, free: int | None) -> str:
    has = "less" if free is None else f"{free / 1e9:.0f} GB"
    return (
        f"This training step needs {plan.peak / 1e9:.0f} GB on each rank by plan, and of the "
        f"{total / 1e9:.0f} GB of a device {has} are free: other processes use the rest. End them, "
        "or leave them room with memory=Memory(reserve_gb=...); go on all the same with "
        "memory=Memory(check=False)."
    )


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
