# SPDX-License-Identifier: Apache-2.0
"""`plan_run`: memory and time of a run, and what fits."""

from dataclasses import dataclass, replace
from typing import Final

from lightning_cp.attn.hardware import Links
from lightning_cp.planner.memory import HOST_USABLE, USABLE, MemoryPlan, plan_memory
from lightning_cp.planner.setup import Setup
from lightning_cp.planner.shapes import KNOWN, ModelShape
from lightning_cp.planner.time import TimePlan, plan_time

MAX_LEN: Final = 1 << 30
"""The longest sequence that a search tries."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of a GPU and of a host.

    Args:
        gpu: bytes of a GPU.
        host: bytes of a host with all its GPUs.
    """

    gpu: float
    host: float

    @classmethod
    def of_gb(cls, gpu_memory: float, host_memory: float) -> "Capacity":
        """Return the capacity of so many GB, 10^9 bytes."""
        for name, value in (("gpu_memory", gpu_memory), ("host_memory", host_memory)):
            if value <= 0:
                raise ValueError(f"{name}={value:g}: give GB, more than 0.")
        return cls(gpu_memory * 1e9, host_memory * 1e9)

    def fits(self, memory: MemoryPlan) -> bool:
        """Return whether a plan fits, with a margin."""
        host = memory.host + memory.host_parameters
        return memory.peak <= USABLE * self.gpu and host <= HOST_USABLE * self.host


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run takes, and what would fit.

    Args:
        model: its shape.
        setup: the run.
        capacity: of its machines.
        memory: of a rank.
        time: of a step.
        longest: tokens of the longest sequence that fits on these GPUs; 0 for none.
        fewest: the fewest layers that must be recomputed for the run to fit; None if it does not
            fit with all of them.
    """

    model: ModelShape
    setup: Setup
    capacity: Capacity
    memory: MemoryPlan
    time: TimePlan
    longest: int
    fewest: int | None

    @property
    def fits(self) -> bool:
        """Return whether the run fits into memory."""
        return self.capacity.fits(self.memory)


def find_shape(model: ModelShape | str) -> ModelShape:
    """Return a known shape by its name."""
    if not isinstance(model, str):
        return model
    if model not in KNOWN:
        raise ValueError(
            f"There is no known model {model!r}. Choose one of {', '.join(KNOWN)}, or pass "
            "hf_patches.model_shape(config)."
        )
    return KNOWN[model]


def plan_run(
    model: ModelShape | str,
    *,
    seq_len: int,
    num_gpus: int,
    gpu_memory: float = 141.0,
    host_memory: float = 2000.0,
    links: Links | None = None,
    **options: object,
) -> RunPlan:
    """Plan a training run: no GPU and no weights are needed.

    Args:
        model: a shape (`hf_patches.model_shape` reads it from a config), or the name of a known
            model: llama-8b, llama-70b, qwen3-30b-a3b, gpt-oss-20b.
        seq_len: tokens of a sequence.
        num_gpus: of all nodes.
        gpu_memory: of one GPU, in GB (10^9 bytes).
        host_memory: of one node, in GB.
        links: between ranks; by default nodes of 8 GPUs.
        options: of `Setup`, such as ``precision`` and ``lora_rank``.

    Example:
        >>> plan = plan_run("llama-8b", seq_len=131072, num_gpus=8, gpu_memory=80)
        >>> plan.fits, plan.fewest
        (True, 22)
    """
    model = find_shape(model)
    capacity = Capacity.of_gb(gpu_memory, host_memory)
    setup = Setup(seq_len=seq_len, num_gpus=num_gpus, **options)  # type: ignore[arg-type]
    return RunPlan(
        model,
        setup,
        capacity,
        plan_memory(model, setup, links=links),
        plan_time(model, setup, links=links),
        longest_sequence(model, setup, capacity, links=links),
        fewest_checkpointed(model, setup, capacity, links=links),
    )


def longest_sequence(
    model: ModelShape,
    setup: Setup,
    capacity: Capacity,
    *,
    links: Links | None = None,
) -> int:
    """Return the tokens of the longest sequence that fits, to a thousandth; 0 for none.

    With documents, to a hundredth.
    """

    def fits(seq_len: int) -> bool:
        one = replace(setup, seq_len=seq_len)
        return capacity.fits(plan_memory(model, one, links=links))

    step = 2 * setup.context_size
    low, high = 0, step
    while high < MAX_LEN and fits(high):
        low, high = high, 2 * high
    share = 100 if setup.documents else 1000  # documents are laid out at each length
    while low and high - low > max(step, low // share):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fewest_checkpointed(
    model: ModelShape,
    setup: Setup,
    capacity: Capacity,
    *,
    links: Links | None = None,
) -> int | None:
    """Return the fewest layers that must be recomputed for a run to fit; None if it never fits."""
    kind = "full" if setup.checkpointing == "none" else setup.checkpointing
    none = replace(setup, checkpointing="none", checkpointed_layers=0, offload="none")
    numbers = range(1, len(model.layers) + 1)
    some = (replace(setup, checkpointing=kind, checkpointed_layers=n) for n in numbers)
    for one in (none, *some):
        if capacity.fits(plan_memory(model, one, links=links)):
            return one.checkpointed_layers
    return None
