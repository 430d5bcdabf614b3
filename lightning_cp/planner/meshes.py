# SPDX-License-Identifier: Apache-2.0
"""`plan_meshes`: all meshes of a number of GPUs that hold a run, the fastest first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from lightning_cp.attn.hardware import Links
from lightning_cp.options import check_choice
from lightning_cp.planner.memory import USABLE, MemoryPlan, plan_memory
from lightning_cp.planner.plan import CHIPS, Capacity, ChipName, find_shape
from lightning_cp.planner.setup import GPUS_PER_HOST, Setup
from lightning_cp.planner.shapes import ModelShape
from lightning_cp.planner.time import TimePlan, plan_time

MESH_OPTIONS: Final = (
    "cp_size",
    "ulysses_size",
    "tp_size",
    "sharding",
    "shard_size",
    "batch_size",
)
"""Options of `Setup` that the search finds."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A run on one mesh.

    Args:
        setup: the run.
        num_batches: batches of a data rank in a step, one sequence each; their gradients are
            accumulated.
        memory: of a rank.
        time: of one batch and an update.
    """

    setup: Setup
    num_batches: int
    memory: MemoryPlan
    time: TimePlan

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the axes (replicate, shard, context, tensor).

        Parameters are sharded over shard x context, after tensor ranks have divided them.
        """
        setup = self.setup
        shard = setup.num_shards // setup.context_size
        return setup.num_copies, shard, setup.context_size, setup.tp_size

    @property
    def seconds(self) -> float:
        """Return the seconds of a step: all its batches, and one update."""
        update = self.time.seconds["optimizer"]
        return self.num_batches * (self.time.step - update) + update

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens of all ranks per second."""
        return self.setup.seq_len * self.setup.data_size * self.num_batches / self.seconds

    @property
    def exposed(self) -> Mapping[str, float]:
        """Return the seconds of a step in which a rank waits for others, by purpose."""
        return {name: self.num_batches * value for name, value in self.time.exposed.items()}


def plan_meshes(
    model: ModelShape | str,
    *,
    seq_len: int,
    num_gpus: int,
    num_sequences: int = 0,
    gpu_memory: float = 141.0,
    host_memory: float = 2000.0,
    chip: ChipName = "h200",
    links: Links | None = None,
    **options: object,
) -> tuple[MeshPlan, ...]:
    """Return the runs on all meshes (replicate, shard, context, tensor) that fit, fastest first.

    Args:
        model: a shape, or the name of a known model.
        seq_len: tokens of a sequence.
        num_gpus: of all nodes.
        num_sequences: of a step, over all ranks; meshes whose data ranks do not divide it are left
            out. 0: one sequence for each data rank, so that steps of meshes differ in size.
        gpu_memory: of one GPU, in GB (10^9 bytes).
        host_memory: of one node, in GB.
        chip: whose speed is assumed.
        links: between ranks; by default nodes of 8 GPUs.
        options: of `Setup`, but those that make the mesh.

    Example:
        >>> best, *_ = plan_meshes("llama-8b", seq_len=131072, num_gpus=16, num_sequences=2)
        >>> best.sizes, best.num_batches
        ((1, 2, 8, 1), 1)
    """
    model, capacity = find_shape(model), Capacity.of_gb(gpu_memory, host_memory)
    check_choice("chip", chip, tuple(CHIPS))
    if num_sequences < 0:
        raise ValueError(f"num_sequences={num_sequences}: give 0 or more.")
    if given := [name for name in MESH_OPTIONS if name in options]:
        raise ValueError(f"{given[0]} is what the search finds. Leave it out, or use plan_run.")
    links = Links() if links is None else links
    base = Setup(seq_len=seq_len, num_gpus=num_gpus, cp_size=1, **options)  # type: ignore[arg-type]
    plans, smallest = [], (float("inf"), base)
    for setup in _setups(model, base, num_sequences):
        memory = plan_memory(model, setup, chip=CHIPS[chip], links=links)
        smallest = min(smallest, (memory.peak, setup), key=lambda pair: pair[0])
        if capacity.fits(memory):
            time = plan_time(model, setup, chip=CHIPS[chip], links=links)
            num_batches = max(1, num_sequences // setup.data_size)
            plans.append(MeshPlan(setup, num_batches, memory, time))
    if not plans:
        raise ValueError(_nothing_fits(model, smallest[1], smallest[0], capacity))
    return tuple(sorted(plans, key=lambda plan: -plan.tokens_per_second))


def _nothing_fits(model: ModelShape, setup: Setup, peak: float, capacity: Capacity) -> str:
    return (
        f"No mesh of {setup.num_gpus} GPUs holds {model.name} with {setup.seq_len:,} tokens: the "
        f"least memory is {peak / 1e9:.1f} GB of a GPU (context {setup.context_size}, tensor "
        f"{setup.tp_size}), and {USABLE * capacity.gpu / 1e9:.1f} GB are usable. Use more GPUs, or "
        "options that take less: checkpointing full, offload all, tiles 16, precision bf16-policy."
    )


def _setups(model: ModelShape, base: Setup, num_sequences: int) -> Iterator[Setup]:
    """Yield the run on every mesh; tensor ranks and Ulysses groups are inside a node."""
    for tensor in filter(lambda size: _can_divide(model, base, size), _divisors(base.num_gpus)):
        ranks = base.num_gpus // tensor
        for context in _divisors(ranks):
            data = ranks // context
            if context > base.seq_len or (num_sequences and num_sequences % data):
                continue
            for copies, inside in product(_divisors(data), _ulysses_sizes(model, context, tensor)):
                yield replace(
                    base,
                    cp_size=context,
                    ulysses_size=inside,
                    tp_size=tensor,
                    sharding="full" if copies == 1 else "hybrid",
                    shard_size=0 if copies == 1 else ranks // copies,
                )


def _can_divide(model: ModelShape, base: Setup, tp_size: int) -> bool:
    """Return whether tensor ranks can share a model, in a node."""
    if tp_size > 1 and (GPUS_PER_HOST % tp_size or base.lora_rank):
        return False
    return model.has_parts(tp_size)


def _ulysses_sizes(model: ModelShape, context: int, tensor: int) -> list[int]:
    """Return 1, and the ranks of a node that share a sequence, if heads divide over them."""
    inside = min(context, GPUS_PER_HOST // tensor)
    heads = [layer.num_kv_heads // tensor for layer in model.layers]
    can_swap = inside > 1 and context % inside == 0 and not any(n % inside for n in heads)
    return [1, inside] if can_swap else [1]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
