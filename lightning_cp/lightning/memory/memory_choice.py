# SPDX-License-Identifier: Apache-2.0
"""``auto`` of `Memory`: the fastest run, by plan, of those whose plan fits.

Plain values: `memory_plan` decides with them at the first training step, and carries it out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Final

from lightning_cp.attn.cost import MIN_BUDGET, default_memory_budget
from lightning_cp.config import Config, Memory, Sharding
from lightning_cp.memory.tiles import MIN_TOKENS
from lightning_cp.planner import Setup
from lightning_cp.planner.attention_cost import problem_of
from lightning_cp.planner.memory import STATES, USABLE, MemoryPlan, plan_memory
from lightning_cp.planner.setup import GPUS_PER_HOST
from lightning_cp.planner.shapes import ModelShape
from lightning_cp.planner.time import plan_time
from lightning_cp.step.step import Step

MARGIN: Final = 1.05
"""What ``auto`` chooses, and attention that it keeps, must fit beside a plan times this."""

LORA_MARGIN: Final = 1.15
"""The same where adapters are trained: plans of such steps are up to 11% too low."""

TIE: Final = 0.01
"""Of runs that differ by less than this share of a step, the first is taken: plans are not better,
and what comes first needs neither the host's memory nor tiles."""

HOST_MARGIN: Final = 1.25
"""The same for host memory: its chunks may exceed what is needed by a quarter."""


@dataclass(frozen=True)
class Size:
    """The batch for which ``auto`` decides.

    Args:
        seq_len: tokens of a sequence.
        batch_size: samples of a data rank.
    """

    seq_len: int
    batch_size: int


@dataclass(frozen=True)
class Limits:
    """The memory that a step may take, the same on all ranks.

    Args:
        device: bytes of a device.
        host: bytes of host memory that a rank may take for what is offloaded.
    """

    device: float
    host: float


@dataclass(frozen=True)
class RunSetup:
    """What of a run the memory of a step depends on, besides the model and the batch.

    Args:
        config: of the run.
        world_size: all ranks.
        precision: of the Trainer.
        sharding: of the parameters; what ``auto`` is.
        shard_size: number of ranks that share a copy of them, if they are sharded.
    """

    config: Config
    world_size: int
    precision: str
    sharding: Sharding
    shard_size: int

    @property
    def memory(self) -> Memory:
        """Return what takes less memory."""
        return self.config.memory

    @property
    def undecided(self) -> list[str]:
        """Return the names of what is ``auto`` until the first training step."""
        names = ("activation_checkpointing", "offload", "tile")
        return [name for name in names if getattr(self.memory, name) == "auto"]

    def with_memory(self, **values: Any) -> "RunSetup":
        """Return the run with other values of `Memory`."""
        # Of `offload_after` the ranks have agreed on a budget.
        memory = replace(self.memory, offload_after=0.0, **values)
        return replace(self, config=replace(self.config, memory=memory))

    def with_attention(self, memory: float | None) -> "RunSetup":
        """Return the run with another memory of an attention call."""
        attention = replace(self.config.attention, memory=memory)
        return replace(self, config=replace(self.config, attention=attention))

    def of(self, model: Mapping[str, Any], step: Step, size: Size | None = None) -> Setup | None:
        """Return the setup of a step for the planner; None for one that it cannot plan.

        Args:
            model: as adapters describe it.
            step: a step.
            size: of another batch, instead of that of the step.
        """
        parameters, memory, layout = self.config.parameters, self.memory, step.layout
        size = size or Size(layout.seq_len, step.batch_size)
        precision = "bf16-policy" if parameters.mixed_precision == "fsdp" else self.precision
        if precision not in ("bf16-mixed", "bf16-true", "bf16-policy"):
            return None
        num_tensor_ranks = step.groups.tensor.size
        if not model["shape"].has_parts(num_tensor_ranks):
            return None
        is_checkpointed = model["is_checkpointed"] or memory.is_checkpointing
        checkpointing = "full" if is_checkpointed else "none"
        # A model may recompute some of its layers by itself; which of them matters little.
        own = model.get("num_checkpointed", 0)
        num_layers = own if memory.num_layers is None else memory.num_layers
        if checkpointing == "full" and memory.kept_bytes is None:
            checkpointing = "keep"
        setup = Setup(
            seq_len=max(size.seq_len, layout.cp_size),
            num_gpus=self.world_size,
            tp_size=num_tensor_ranks,
            cp_size=layout.cp_size,
            ulysses_size=step.groups.inside.size,
            batch_size=size.batch_size,
            precision=precision,  # type: ignore[arg-type]
            sharding=self.sharding,
            shard_size=self.shard_size,
            parameter_offload=parameters.offload,
            checkpointing=checkpointing,  # type: ignore[arg-type]
            checkpointed_layers=num_layers if num_layers < len(model["shape"].layers) else 0,
            offload="none" if memory.offload_bytes == 0 or checkpointing == "none" else "all",
            compiled=memory.compile is not None,
            lora_rank=model["lora_rank"],
            attention=self.config.attention,
        )
        tile = memory.tile
        if tile is False or tile == "auto":
            return setup
        tokens = MIN_TOKENS if tile is True else tile
        return replace(setup, tiles=min(16, -(-setup.local_len // tokens)))


@dataclass(frozen=True)
class Choice:
    """One way to run a step.

    Args:
        run: with its values of `Memory`, none of them ``auto`` but ``keep_attention``.
        setup: for the planner.
        plan: its memory.
    """

    run: RunSetup
    setup: Setup
    plan: MemoryPlan


def choose(
    run: RunSetup,
    model: Mapping[str, Any],
    step: Step,
    size: Size,
    limits: Limits,
    *,
    numbers: Sequence[int | bool],
) -> RunSetup:
    """Return the fastest run whose plan fits; if none fits, the one that takes the least memory.

    Args:
        run: some of whose values of `Memory` are ``auto``.
        model: as adapters describe it.
        step: a step.
        size: of the batch for which it is decided.
        limits: what fits.
        numbers: of layers that can be recomputed, ascending; True for all.
    """
    shape = model["shape"]

    def planned(run: RunSetup) -> Choice:
        setup = run.of(model, step, size)
        assert setup is not None  # noqa: S101  its precision is known
        return Choice(run, setup, plan_memory(shape, setup))

    fitting: list[tuple[float, int, RunSetup]] = []
    others: list[tuple[float, int, RunSetup]] = []
    for index, group in enumerate(_groups(run, model, step, size, numbers)):
        low, high = 0, len(group)  # each run takes less memory than the one before
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if fits(planned(group[middle]), limits) else (middle + 1, high)
            )
        if low < len(group):
            one = planned(group[low])
            fitting.append((planned_seconds(one, shape, limits), index, one.run))
        else:
            last = planned(group[-1])
            others.append((last.plan.peak, index, last.run))
    if not fitting:
        return min(others)[-1]
    limit = (1 + TIE) * min(fitting)[0]
    return next(one for seconds, _, one in fitting if seconds <= limit)


def _groups(
    run: RunSetup,
    model: Mapping[str, Any],
    step: Step,
    size: Size,
    numbers: Sequence[int | bool],
) -> Iterator[list[RunSetup]]:
    """Yield lists of the runs that ``auto`` may mean; each recomputes more than the one before.

    Nothing is moved, kept or tiled without recomputation, and tiles want all layers recomputed.
    """
    memory = run.memory
    is_free = memory.activation_checkpointing == "auto" and not model["is_checkpointed"]
    if memory.activation_checkpointing != "auto":
        numbers = (memory.activation_checkpointing,)
    elif not is_free:
        numbers = (False,)
    combinations = product(
        _attention_budgets(run, model, step, size),
        _values(memory.tile, False, True),
        _values(memory.keep_attention, "all", "auto"),
        _values(memory.offload, "none", "all"),
    )
    if memory.activation_checkpointing is False and not model["is_checkpointed"]:
        combinations = islice(combinations, 1)  # type: ignore[assignment]
    for index, (budget, tile, keep, offload) in enumerate(combinations):
        base = run.with_attention(budget).with_memory(
            tile=tile, keep_attention=keep, offload=offload, activation_checkpointing=False
        )
        some = numbers if tile is False or not is_free else numbers[-1:]
        first = (False,) if is_free and index == 0 else ()
        group = [base.with_memory(activation_checkpointing=number) for number in (*first, *some)]
        if group:
            yield group


def _attention_budgets(
    run: RunSetup, model: Mapping[str, Any], step: Step, size: Size
) -> tuple[float | None, ...]:
    """Return the GiB that an attention call may get: what it gets by default, and less."""
    if run.config.attention.memory is not None:
        return (run.config.attention.memory,)
    setup = run.with_memory(activation_checkpointing=False, offload="none").of(model, step, size)
    full = [x for x in model["shape"].layers if x.num_heads and x.window is None]
    if setup is None or not full or step.cp_size == 1:
        return (None,)
    budget = default_memory_budget(problem_of(full[0], setup))
    budgets: list[float | None] = [None]
    while (budget := budget / 2) >= MIN_BUDGET and len(budgets) < NUM_BUDGETS:
        budgets.append(round(budget / 2**30, 2))
    return tuple(budgets)


NUM_BUDGETS: Final = 4
"""Budgets of attention that are tried; the last is an eighth of the first."""


def planned_seconds(choice: Choice, shape: ModelShape, limits: Limits) -> float:
    """Return the time of a step by plan, with as much attention kept as there is room for."""
    setup = choice.setup
    seconds = plan_time(shape, setup).step
    if setup.checkpointing != "full" or choice.run.memory.keep_attention != "auto":
        return seconds
    kept = replace(setup, checkpointing="keep")
    wanted = kept_bytes(shape, kept, choice)
    share = min(1.0, room(shape, setup, choice.plan, limits) / wanted) if wanted else 0.0
    return seconds + share * (plan_time(shape, kept).step - seconds)


def kept_bytes(shape: ModelShape, kept: Setup, choice: Choice) -> float:
    """Return the bytes of all attention results of recomputed layers."""
    plan = plan_memory(shape, kept)
    if kept.offload == "all":
        return host_bytes(plan, kept) - host_bytes(choice.plan, choice.setup)
    return plan.moments["loss"]["kept attention"]


def margin(setup: Setup) -> float:
    """Return the factor by which a plan may be too low."""
    return LORA_MARGIN if setup.lora_rank else MARGIN


def fits(choice: Choice, limits: Limits) -> bool:
    """Return whether a step fits, with a margin."""
    plan, setup = choice.plan, choice.setup
    host = HOST_MARGIN * host_bytes(plan, setup) + other_host_bytes(plan, setup, choice.run.config)
    is_moved = setup.offload == "none" or host <= limits.host
    return margin(setup) * plan.peak <= USABLE * limits.device and is_moved


def room(shape: ModelShape, setup: Setup, plan: MemoryPlan, limits: Limits) -> float:
    """Return the bytes that a step may keep of attention, planned without.

    Where checkpoints go to the host, it goes with them: the device holds that of a few layers.
    """
    factor = margin(setup)
    if setup.offload == "all" and setup.checkpointing == "full":
        kept = plan_memory(shape, replace(setup, checkpointing="keep"))
        is_fitting = factor * kept.peak <= USABLE * limits.device
        left = limits.host / HOST_MARGIN - host_bytes(plan, setup)
        return max(0.0, left) if is_fitting else 0.0
    return max(0.0, USABLE * limits.device - factor * plan.peak)


def host_bytes(plan: MemoryPlan, setup: Setup) -> float:
    """Return the host memory of one rank for what is offloaded."""
    return plan.host / min(GPUS_PER_HOST, setup.num_gpus)


def other_host_bytes(plan: MemoryPlan, setup: Setup, config: Config) -> float:
    """Return the host memory of one rank that is not taken yet at the first step.

    Gradients and moments of offloaded parameters, and the copy of a checkpoint that is saved in the
    background.
    """
    num_ranks = min(GPUS_PER_HOST, setup.num_gpus)
    states = STATES[setup.precision]
    total = states.weight + states.gradient + states.optimizer
    offloaded = plan.host_parameters / num_ranks
    later = offloaded * (states.gradient + states.optimizer) / total
    if not config.checkpoints.asynchronous:
        return later
    held = offloaded * (states.weight + states.optimizer) / total
    return later + (held or plan.parts["weights"] + plan.parts["optimizer"])


def _values(value: Any, *choices: Any) -> tuple[Any, ...]:
    """Return the values that an option may get."""
    return choices if value == "auto" else (value,)
