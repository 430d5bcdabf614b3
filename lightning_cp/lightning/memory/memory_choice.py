# SPDX-License-Identifier: Apache-2.0
"""``auto`` of activation_checkpointing, offload and tile: the fastest run whose plan fits.

Plain values: `memory_plan` decides with them at the first training step, and carries it out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from lightning_cp.config import Config, Memory, Sharding
from lightning_cp.memory.tiles import MIN_TOKENS
from lightning_cp.planner import Setup
from lightning_cp.planner.memory import USABLE, MemoryPlan, plan_memory
from lightning_cp.planner.setup import GPUS_PER_HOST
from lightning_cp.planner.shapes import ModelShape
from lightning_cp.step.step import Step

MARGIN: Final = 1.05
"""What ``auto`` chooses, and attention that it keeps, must fit beside a plan times this."""

HOST_MARGIN: Final = 1.25
"""The same for host memory: its chunks may exceed what is needed by a quarter."""


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

    def choices(self, *, is_checkpointed: bool, num_layers: int = 0) -> Iterator["RunSetup"]:
        """Yield the runs that ``auto`` may mean, the fastest first.

        Recomputing layers takes about 25% of a step, of which attention is a larger part the longer
        sequences are; offloading up to 1%. Tiles, 7%, are the last resort. Nothing else without
        recomputation: there is nothing to move and to keep; nor where some layers are not
        recomputed: what they save takes more.

        Args:
            is_checkpointed: whether the model recomputes its layers already.
            num_layers: layers that may be recomputed one by one.
        """
        memory = self.memory
        others = list(
            product(
                _values(memory.tile, False, True),
                _values(memory.keep_attention, "all", "auto"),
                _values(memory.offload, "none", "all"),
            )
        )
        recompute = (False,) if is_checkpointed else (False, *range(1, num_layers), True)
        is_auto = memory.activation_checkpointing == "auto"
        for checkpointing in _values(memory.activation_checkpointing, *recompute):
            is_all = checkpointing is True or is_checkpointed or (checkpointing and not is_auto)
            for tile, keep, offload in others if is_all else others[:1]:
                yield self.with_memory(
                    activation_checkpointing=checkpointing,
                    tile=tile,
                    keep_attention=keep,
                    offload=offload,
                )

    def of(self, model: Mapping[str, Any], step: Step) -> Setup | None:
        """Return the setup of a step for the planner; None for one that it cannot plan."""
        parameters, memory, layout = self.config.parameters, self.memory, step.layout
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
            seq_len=max(layout.seq_len, layout.cp_size),
            num_gpus=self.world_size,
            tp_size=num_tensor_ranks,
            cp_size=layout.cp_size,
            ulysses_size=step.groups.inside.size,
            batch_size=step.batch_size,
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


def fits(shape: ModelShape, setup: Setup, *, device: float, host: float) -> bool:
    """Return whether a step fits, with a margin.

    Args:
        shape: of the model.
        setup: of the step.
        device: bytes of a device.
        host: bytes of host memory that a rank may take.
    """
    plan = plan_memory(shape, setup)
    is_moved = HOST_MARGIN * host_bytes(plan, setup) <= host
    return MARGIN * plan.peak <= USABLE * device and is_moved


def host_bytes(plan: MemoryPlan, setup: Setup) -> float:
    """Return the host memory of one rank."""
    return plan.host / min(GPUS_PER_HOST, setup.num_gpus)


def _values(value: Any, *choices: Any) -> tuple[Any, ...]:
    """Return the values that an option may get."""
    return choices if value == "auto" else (value,)
