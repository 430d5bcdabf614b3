# SPDX-License-Identifier: Apache-2.0
"""``auto`` of activation_checkpointing, offload and tile: the fastest run whose plan fits.

Plain values: `memory_plan` decides with them at the first training step, and carries it out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from lightning_cp.config import MixedPrecision, Options
from lightning_cp.fsdp.sharding import Sharding
from lightning_cp.lightning.memory.activations import Activations
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
        options: of attention.
        activations: of the layers.
        world_size: all ranks.
        precision: of the Trainer.
        mixed_precision: how bf16-mixed is carried out.
        sharding: of the parameters.
        shard_size: number of ranks that share a copy of them, if they are sharded.
        parameter_offload: whether these shards are in host memory.
    """

    options: Options
    activations: Activations
    world_size: int
    precision: str
    mixed_precision: MixedPrecision
    sharding: Sharding
    shard_size: int
    parameter_offload: bool = False

    @property
    def memory_options(self) -> dict[str, object]:
        """Return the options that may be ``auto`` until the first training step, by name."""
        return {
            "activation_checkpointing": self.activations.checkpointing,
            "offload": self.options.offload,
            "tile": self.activations.tile,
        }

    @property
    def undecided(self) -> list[str]:
        """Return the names of those that are."""
        return [name for name, value in self.memory_options.items() if value == "auto"]

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
        options, activations = self.options, self.activations
        others = list(
            product(
                _values(activations.tile, False, True),
                _values(options.keep_attention, "all", "auto"),
                _values(options.offload, "none", "all"),
            )
        )
        recompute = (False,) if is_checkpointed else (False, *range(1, num_layers), True)
        is_auto = activations.checkpointing == "auto"
        for checkpointing in _values(activations.checkpointing, *recompute):
            is_all = checkpointing is True or is_checkpointed or (checkpointing and not is_auto)
            for tile, keep, offload in others if is_all else others[:1]:
                yield replace(
                    self,
                    options=replace(options, keep_attention=keep, offload=offload),
                    activations=replace(activations, checkpointing=checkpointing, tile=tile),
                )

    def of(self, model: Mapping[str, Any], step: Step) -> Setup | None:
        """Return the setup of a step for the planner; None for one that it cannot plan."""
        precision = "bf16-policy" if self.mixed_precision == "fsdp" else self.precision
        if precision not in ("bf16-mixed", "bf16-true", "bf16-policy"):
            return None
        num_tensor_ranks = step.groups.tensor.size
        if not model["shape"].has_parts(num_tensor_ranks):
            return None
        options, layout = self.options, step.layout
        activations = self.activations
        is_checkpointed = model["is_checkpointed"] or activations.is_checkpointing
        checkpointing = "full" if is_checkpointed else "none"
        # A model may recompute some of its layers by itself; which of them matters little.
        own = model.get("num_checkpointed", 0)
        num_layers = int(activations.checkpointing) if activations.is_number else own
        if checkpointing == "full" and options.kept_bytes is None:
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
            parameter_offload=self.parameter_offload,
            checkpointing=checkpointing,  # type: ignore[arg-type]
            checkpointed_layers=num_layers if num_layers < len(model["shape"].layers) else 0,
            offload="none" if options.offload_bytes == 0 or checkpointing == "none" else "all",
            compiled=activations.compile is not None,
            lora_rank=model["lora_rank"],
            attention_memory=options.attention_memory,
            gradient_wire=options.gradient_wire,
        )
        tile = activations.tile
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
