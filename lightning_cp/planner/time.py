# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step on the slowest rank, FLOPs, and bytes on the wire.

Attention is `attn.cost`'s; what is computed token by token runs at rates measured on an H200.
docs/planning.md compares the sum with measured steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_cp.attn.hardware import A100, H200, Chip, Links
from lightning_cp.planner.attention import Passes, attention_cost
from lightning_cp.planner.memory import FROZEN, STATES, token_bytes
from lightning_cp.planner.setup import Setup
from lightning_cp.planner.shapes import LayerShape, ModelShape


class Rates(NamedTuple):
    """Speed of a chip outside of attention, in TFLOP/s.

    Args:
        peak: dense bf16, per the data sheet.
        layers: projections, MLP, norms and rotary embeddings together, by the FLOPs of the matrix
            products: 197.9 and 228.3 ms of two Llama-8B layers and a head on 16,384 tokens, without
            and with recomputation, 15 November 2026.
        head: the chunked loss with its gradients, from the same runs and one of 32 layers.
        experts: likewise for experts; not measured.
    """

    peak: float
    layers: float
    head: float
    experts: float


RATES: Final[Mapping[Chip, Rates]] = {
    H200: Rates(989.0, 580.0, 404.0, 290.0),
    A100: Rates(312.0, 183.0, 127.0, 92.0),  # the same shares of peak, not measured
}

ATTENTION_IN_STEP: Final = 1.07
"""Time of attention inside a step over that of `attn.cost`, whose rates are those of attention
alone: 150.7 and 141.2 ms for a layer of Llama-8B, recomputed, 131,072 tokens over 8 ranks."""

ADAM_BYTES: Final = 7
"""Numbers that AdamW reads (weight, gradient, moments) and writes (weight, moments)."""

HOST_GBS: Final = 25.0
"""Gigabytes per second of one GPU to host memory while 8 of them share it; not measured."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    """Time of one step (one microbatch and an update) on the slowest rank.

    Args:
        seconds: by part.
        flops: of a rank, forward and backward without recomputation; attention counted by visible
            pairs.
        attention_flops: of them, attention's.
        wire: bytes that a rank receives, by purpose.
        balance: attention work of the most expensive rank over the mean.
        peak_flops: of the chip, per second.
        algorithms: how keys are exchanged, by number of layers.
    """

    seconds: Mapping[str, float]
    flops: float
    attention_flops: float
    wire: Mapping[str, float]
    balance: float
    peak_flops: float
    algorithms: Mapping[str, int]

    @property
    def step(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def share_of_peak(self) -> float:
        """Return the causal-counted share of the chip's peak."""
        return self.flops / self.step / self.peak_flops


def plan_time(
    model: ModelShape, setup: Setup, *, chip: Chip = H200, links: Links | None = None
) -> TimePlan:
    """Estimate a step.

    In each layer and pass, parameters and offloaded tensors travel while the layer is computed:
    the longer of both counts. The exchanges of attention are part of attention.

    Args:
        model: its shape.
        setup: the run.
        chip: the GPU.
        links: between ranks.
    """
    links = Links() if links is None else links
    rates, states = RATES[chip], STATES[setup.precision]
    tokens, size = setup.local_len, setup.num_gpus
    is_full = setup.lora_rank == 0
    backward_factor = 2 if is_full else 1  # frozen weights have no gradient
    share = (size - 1) / size
    gather_size = states.gathered if is_full else FROZEN
    seconds = dict.fromkeys(
        ("attention", "recomputed attention", "layers", "recomputed layers"), 0.0
    )
    seconds |= dict.fromkeys(("head and loss", "optimizer", "waiting for links"), 0.0)
    wire = dict.fromkeys(("keys and values", "their gradients", "parameters", "gradients"), 0.0)
    pairs_flops, weighted, total_pairs, algorithms = 0.0, 0.0, 0.0, dict[str, int]()
    for layer, count in _counted(model).items():
        cost = attention_cost(layer, setup, chip, links)
        algorithms[cost.algorithm] = algorithms.get(cost.algorithm, 0) + count
        again = setup.checkpointing == "full" or (
            setup.checkpointing == "keep" and layer.window is not None
        )
        forward = _tokenwise(layer, tokens, rates)
        parameters = gather_size * layer.num_params * share if setup.sharding == "full" else 0.0
        reduced = states.reduced * layer.num_params * share * (2 - (setup.sharding == "full"))
        reduced = reduced if is_full else 0.0
        attend = Passes(*(ATTENTION_IN_STEP * each for each in cost.time))
        passes = {
            "attention": attend.forward + attend.backward,
            "recomputed attention": attend.forward if again else 0.0,
            "layers": forward * (1 + backward_factor),
            "recomputed layers": 0.0 if setup.checkpointing == "none" else forward,
        }
        for name, value in passes.items():
            seconds[name] += count * value
        moved = _offloaded(layer, model.hidden, setup) * tokens / HOST_GBS / 1e9
        compute = Passes(
            attend.forward + forward,
            sum(passes.values()) - attend.forward - forward,
        )
        sent = Passes(
            links.collective(parameters, size, 1) if parameters else 0.0,
            links.collective(parameters + reduced, size, 1) if parameters + reduced else 0.0,
        )
        for own, traffic in zip(compute, sent, strict=True):
            slowest = max(links.together(own, traffic), moved)
            seconds["waiting for links"] += count * (slowest - own)
        wire["keys and values"] += count * cost.wire.forward * (3 if again else 2)
        wire["their gradients"] += count * (cost.wire.backward - cost.wire.forward)
        wire["parameters"] += count * 2 * parameters
        wire["gradients"] += count * reduced
        mean_dim = (layer.head_dim + layer.value_dim) / 2
        pairs_flops += count * 12 * cost.pairs * layer.num_heads * mean_dim
        weighted += count * cost.balance * cost.pairs
        total_pairs += count * cost.pairs
    trained = model.num_params if is_full else model.lora_params(setup.lora_rank)
    seconds["head and loss"] = (
        2 * (1 + backward_factor) * model.head_params * tokens / rates.head / 1e12
    )
    item = states.weight
    seconds["optimizer"] = ADAM_BYTES * item * trained / setup.shard_size / chip.memory_gbs / 1e9
    root = gather_size * model.root_params * share if setup.sharding == "full" else 0.0
    wire["parameters"] += root
    if is_full:
        factor = 1 if setup.sharding == "full" else 2
        wire["gradients"] += states.reduced * model.root_params * share * factor
    exposed = root + (states.reduced * model.root_params * share if is_full else 0.0)
    seconds["waiting for links"] += links.collective(exposed, size, 1) if exposed else 0.0
    flops = 2 * (1 + backward_factor) * model.num_matmul_params * tokens + pairs_flops
    if not is_full:
        flops += 6 * trained * tokens
    return TimePlan(
        seconds,
        flops,
        pairs_flops,
        wire,
        weighted / total_pairs if total_pairs else 1.0,
        rates.peak * 1e12,
        algorithms,
    )


def _counted(model: ModelShape) -> dict[LayerShape, int]:
    """Return how often each kind of layer occurs."""
    counts: dict[LayerShape, int] = {}
    for layer in model.layers:
        counts[layer] = counts.get(layer, 0) + 1
    return counts


def _tokenwise(layer: LayerShape, tokens: int, rates: Rates) -> float:
    """Return the seconds of one forward of everything but attention."""
    rate = rates.experts if layer.num_active else rates.layers
    return 2 * layer.num_active_params * tokens / rate / 1e12


def _offloaded(layer: LayerShape, hidden: int, setup: Setup) -> float:
    """Return the bytes per token that a layer moves to the host, and back."""
    if setup.offload == "none":
        return 0.0
    sizes = token_bytes(layer, hidden, setup)
    return sizes.checkpoint + (sizes.kept if setup.checkpointing == "keep" else 0.0)
