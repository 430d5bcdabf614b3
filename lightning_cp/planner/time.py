# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step on the slowest rank, FLOPs, and bytes on the wire.

Attention is `attn.cost`'s; what is computed token by token runs at rates measured on an H200.
docs/planning.md compares the sum with measured steps.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_cp.attn.hardware import H200, Links
from lightning_cp.planner.attention_cost import Passes, attention_cost
from lightning_cp.planner.memory import EXPERT_SAVED, FROZEN, STATES, StateBytes, token_bytes
from lightning_cp.planner.setup import Setup
from lightning_cp.planner.shapes import LayerShape, ModelShape


class Rates(NamedTuple):
    """Speed outside of attention, in TFLOP/s.

    Args:
        peak: dense bf16, per the data sheet.
        matrices: products with weights. With `EAGER`, two Llama-8B layers and a head on 16,384
            tokens take the 197.9 and 228.3 ms that were measured, without and with recomputation.
        head: the chunked loss with its gradients, from the same runs and one of 32 layers.
        experts: products with weights of routed layers, from one step of Qwen3-30B-A3B.
    """

    peak: float
    matrices: float
    head: float
    experts: float


RATES: Final = Rates(989.0, 721.0, 404.0, 155.0)
"""Of an H200."""


class ElementBytes(NamedTuple):
    """Bytes that element-wise kernels of a forward read and write, per number of one token.

    Args:
        norm: of a norm. Plain RMSNorm converts to float32, squares, averages, multiplies, converts
            back and multiplies by its weight.
        activation: of an MLP: the activation, and the product with the other half.
        rotary: of queries and keys: two products, halves that are swapped, a sum.
        residual: of hidden states: two sums.
    """

    norm: int
    activation: int
    rotary: int
    residual: int


WIDE_NORM: Final = 10
"""More bytes of a norm that multiplies by its weight in float32."""

EAGER: Final = ElementBytes(34, 10, 24, 12)
COMPILED: Final = ElementBytes(4, 6, 4, 12)
"""With ``compile="layers"``: each value is read and written once."""

TILED: Final = 1.27
"""Time of layers in tiles over that of plain ones: 260 and 197 ms of 4 layers of Llama-8B, 1,484
and 1,183 ms of 6 layers of Mistral-7B; norms are computed once more, and matrices are smaller."""

ATTENTION_IN_STEP: Final = 1.07
"""Time of attention inside a step over that of `attn.cost`, whose rates are those of attention
alone: 150.7 and 141.2 ms for a layer of Llama-8B, recomputed, 131,072 tokens over 8 ranks."""

SMALL_HEADS: Final = 1.29
"""Attention with heads of 64 or less over that of heads of 128, per FLOP: a step of 16 layers with
32 heads of 64, 131,072 tokens over 8 ranks."""

LARGE_HEADS: Final = 2.1
"""The same for heads of more than 128, which cuDNN does not compute: FlashAttention 2 and
FlexAttention in a step of Gemma 3 12B."""

ADAM_BYTES: Final = 12
"""Per byte of a weight. AdamW reads weight, gradient and moments, and writes weight and moments: 7;
but slower than other element-wise kernels: 11.7 ms for 1.92 billion bf16 weights."""

COPIED_GATHERS: Final = 4
"""Per byte of a gathered parameter: FSDP2 copies it out of the buffer of the collective, in forward
and in backward."""

HOST_GBS: Final = 25.0
"""Gigabytes per second of one GPU to host memory while 8 of them share it; not measured."""


TENSOR: Final = "tensor parallelism"
"""The part of time and bytes for sums over tensor ranks."""

HOST_ADAM_GBS: Final = 20.0
"""Gigabytes per second that AdamW of one rank moves on a CPU that 8 ranks share; not measured."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    """Time of one step (one microbatch and an update) on the slowest rank.

    Args:
        seconds: by part.
        flops: of a rank, forward and backward without recomputation; attention counted by visible
            pairs.
        wire: bytes that a rank receives, by purpose.
        peak_flops: of the chip, per second.
        exposed: seconds in which a rank waits for others, by purpose; parts of ``seconds``. For
            parameters: and for host memory, if there is offload.
    """

    seconds: Mapping[str, float]
    flops: float
    wire: Mapping[str, float]
    peak_flops: float
    exposed: Mapping[str, float]

    @property
    def step(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def share_of_peak(self) -> float:
        """Return the causal-counted share of the chip's peak."""
        return self.flops / self.step / self.peak_flops


def plan_time(model: ModelShape, setup: Setup, *, links: Links | None = None) -> TimePlan:
    """Estimate a step on H200s.

    In each layer and pass, parameters and offloaded tensors travel while the layer is computed:
    the longer of both counts. The exchanges of attention are part of attention.

    Args:
        model: its shape.
        setup: the run.
        links: between ranks.
    """
    all_links = Links() if links is None else links
    links, whole, model = all_links.beside(setup.tp_size), model, model.part(setup.tp_size)
    states = STATES[setup.precision]
    tokens = setup.local_len
    is_full = setup.lora_rank == 0
    backward_factor = 2 if is_full else 1  # frozen weights have no gradient
    gather_size = states.gathered if is_full else FROZEN
    seconds = dict.fromkeys(
        ("attention", "recomputed attention", "layers", "recomputed layers"), 0.0
    )
    others = ("head and loss", "copies of parameters", "optimizer", "waiting for links")
    seconds |= dict.fromkeys((*others, TENSOR), 0.0)
    wire = dict.fromkeys(("keys and values", "their gradients", "parameters", "gradients"), 0.0)
    pairs_flops = exposed = 0.0
    for (layer, is_checkpointed), count in _counted(model, setup).items():
        cost = attention_cost(layer, setup, links)
        again = is_checkpointed and (setup.checkpointing == "full" or layer.window is not None)
        forward = _tokenwise(layer, model.hidden, setup)
        parameters = _Traffic.gather(gather_size * layer.num_params, setup)
        reduced = _Traffic.reduce(states.reduced * layer.num_params if is_full else 0.0, setup)
        attend = Passes(*(_attention_factor(layer) * each for each in cost.time))
        waits = cost.exposed.forward * (2 if again else 1) + cost.exposed.backward
        exposed += count * _attention_factor(layer) * waits
        passes = {
            "attention": attend.forward + attend.backward,
            "recomputed attention": attend.forward if again else 0.0,
            "layers": forward * (1 + backward_factor),
            "recomputed layers": forward if is_checkpointed else 0.0,
        }
        for name, value in passes.items():
            seconds[name] += count * value
        offloaded = _offloaded(layer, model.hidden, setup) if is_checkpointed else 0.0
        moved = offloaded * tokens / HOST_GBS / 1e9
        compute = Passes(
            attend.forward + forward,
            sum(passes.values()) - attend.forward - forward,
        )
        sent = Passes(
            parameters.time(setup, links),
            parameters.plus(reduced).time(setup, links),
        )
        copies = _copied_shards(layer.num_params, states, setup)
        for own, traffic, shards in zip(compute, sent, copies, strict=True):
            slowest = max(links.together(own, traffic), moved + shards)
            seconds["waiting for links"] += count * (slowest - own)
        wire["keys and values"] += count * cost.wire.forward * (3 if again else 2)
        wire["their gradients"] += count * (cost.wire.backward - cost.wire.forward)
        wire["parameters"] += count * 2 * sum(parameters)
        wire["gradients"] += count * sum(reduced)
        mean_dim = (layer.head_dim + layer.value_dim) / 2
        pairs_flops += count * 12 * cost.pairs * layer.num_heads * mean_dim
    trained = model.num_params if is_full else model.lora_params(setup.lora_rank)
    seconds["head and loss"] = (
        2 * (1 + backward_factor) * model.head_params * tokens / RATES.head / 1e12
    )
    item = states.weight
    adam_gbs = HOST_ADAM_GBS if setup.parameter_offload else H200.memory_gbs
    seconds["optimizer"] = ADAM_BYTES * item * trained / setup.num_shards / adam_gbs / 1e9
    if setup.is_sharded:
        copied = COPIED_GATHERS * gather_size * model.num_params
        copied += (states.full_gradient + states.reduced) * model.num_params if is_full else 0
        seconds["copies of parameters"] = copied / H200.memory_gbs / 1e9
    root = _Traffic.gather(gather_size * model.root_params, setup)
    reduced = _Traffic.reduce(states.reduced * model.root_params if is_full else 0.0, setup)
    wire["parameters"] += sum(root)
    wire["gradients"] += sum(reduced)
    seconds["waiting for links"] += root.plus(reduced).time(setup, links)
    seconds["waiting for links"] += sum(_copied_shards(model.root_params, states, setup))
    wire[TENSOR], seconds[TENSOR] = _tensor_traffic(whole, setup, all_links)
    flops = 2 * (1 + backward_factor) * model.num_matmul_params * tokens + pairs_flops
    if not is_full:
        flops += 6 * trained * tokens
    return TimePlan(
        seconds,
        flops,
        wire,
        RATES.peak * 1e12,
        {
            "keys and values": exposed,
            "parameters": seconds["waiting for links"],
            TENSOR: seconds[TENSOR],
        },
    )


class _Traffic(NamedTuple):
    """Bytes that a rank receives.

    Args:
        inside: from ranks that hold the other shards of its copy of the parameters.
        between: from ranks that hold the same shard of other copies.
    """

    inside: float
    between: float

    @classmethod
    def gather(cls, num_bytes: float, setup: Setup) -> "_Traffic":
        """Return the traffic of an all-gather of parameters."""
        return cls(num_bytes * (1 - 1 / setup.num_shards), 0.0)

    @classmethod
    def reduce(cls, num_bytes: float, setup: Setup) -> "_Traffic":
        """Return the traffic of a reduce-scatter in a copy, and an all-reduce between copies."""
        between = 2 * num_bytes / setup.num_shards * (1 - 1 / setup.num_copies)
        return cls(num_bytes * (1 - 1 / setup.num_shards), between)

    def plus(self, other: "_Traffic") -> "_Traffic":
        """Return the sum of both."""
        return _Traffic(self.inside + other.inside, self.between + other.between)

    def time(self, setup: Setup, links: Links) -> float:
        """Return its seconds."""
        groups = ((setup.num_shards, 1), (setup.num_copies, setup.num_shards))
        return sum(
            links.collective(num_bytes, size, stride)
            for num_bytes, (size, stride) in zip(self, groups, strict=True)
            if num_bytes
        )


def _tensor_traffic(model: ModelShape, setup: Setup, links: Links) -> tuple[float, float]:
    """Return the bytes that a rank receives from tensor ranks, and their seconds, all exposed.

    In each layer, attention and MLP sum their output over tensor ranks in forward, and the gradient
    of their input in backward; recomputation sums the outputs again. So do the embeddings and the
    head, once each.
    """
    num_layers = len(model.layers)
    num_sums = 2 * (2 * num_layers + setup.num_checkpointed(num_layers)) + 2
    each = 2 * 2.0 * model.hidden * setup.local_len * (1 - 1 / setup.tp_size)  # bf16, both ways
    return num_sums * each, num_sums * links.collective(each, setup.tp_size, 1)


def _copied_shards(num_params: int, states: StateBytes, setup: Setup) -> Passes:
    """Return the seconds in which offloaded shards are copied to the GPU, and gradients back."""
    if not setup.parameter_offload:
        return Passes(0.0, 0.0)
    is_full = setup.lora_rank == 0
    share = num_params / setup.num_shards / HOST_GBS / 1e9
    weight = states.weight if is_full else FROZEN
    return Passes(weight * share, (weight + (states.gradient if is_full else 0)) * share)


def _counted(model: ModelShape, setup: Setup) -> Counter[tuple[LayerShape, bool]]:
    """Return how often each kind of layer occurs, checkpointed and not."""
    num_checkpointed = setup.num_checkpointed(len(model.layers))
    return Counter((layer, i < num_checkpointed) for i, layer in enumerate(model.layers))


def _attention_factor(layer: LayerShape) -> float:
    """Return the time of attention inside a step over that of `attn.cost`."""
    if layer.head_dim <= 64:
        return ATTENTION_IN_STEP * SMALL_HEADS
    return ATTENTION_IN_STEP * (LARGE_HEADS if layer.head_dim > 128 else 1.0)


def _tokenwise(layer: LayerShape, hidden: int, setup: Setup) -> float:
    """Return the seconds of one forward of everything but attention."""
    each = COMPILED if setup.compiled else EAGER
    rate = RATES.experts if layer.num_active else RATES.matrices
    rotated = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    normed = layer.num_norms * hidden + layer.latent + (rotated if layer.qk_norm else 0)
    inner = max(1, layer.num_active) * layer.inner + layer.shared_inner
    norm = each.norm + (WIDE_NORM if layer.has_wide_norms and not setup.compiled else 0)
    moved = norm * normed + each.activation * inner + each.rotary * rotated
    moved += (each.residual + EXPERT_SAVED * layer.num_active) * hidden
    per_token = 2 * layer.num_active_params / rate / 1e12 + moved / H200.memory_gbs / 1e9
    return setup.local_len * per_token * (TILED if setup.tiles else 1.0)


def _offloaded(layer: LayerShape, hidden: int, setup: Setup) -> float:
    """Return the bytes per token that a layer moves to the host, and back."""
    if setup.offload == "none":
        return 0.0
    sizes = token_bytes(layer, hidden, setup)
    return sizes.checkpoint + (sizes.kept if setup.checkpointing == "keep" else 0.0)
