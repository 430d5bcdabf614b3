# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step on one rank, by part, at the moments at which it may peak.

Bytes per local token follow from what Hugging Face's layers save for backward; docs/planning.md
derives each number and says how far it is from what was measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_cp.attn.hardware import Links
from lightning_cp.planner.attention_cost import attention_cost
from lightning_cp.planner.setup import GPUS_PER_HOST, Precision, Setup
from lightning_cp.planner.shapes import LayerShape, ModelShape

USABLE: Final = 0.94
"""Share of a GPU's memory that tensors can take: the CUDA context and NCCL take 1 to 2 GB, and the
allocator loses a few percent to fragments."""

HOST_USABLE: Final = 0.8
"""Share of host memory that may be pinned: the rest is for processes, page cache and loaders."""

OTHER_BYTES: Final = 1e9
"""What is not modelled: NCCL's buffers, cuBLAS workspaces, batches, rotary tables. Most of it is
outside of torch's allocator: `max_memory_allocated` does not count it."""

LAYERS_IN_FLIGHT: Final = 3
"""Layers whose checkpoints are on the GPU after forward, while others are offloaded: the last two,
and the one that was sent last. In backward there is one less: the layer that is computed, and the
next one on its way in."""

REPLICATED_BYTES: Final = 3 * 2**27
"""Buckets of gradients that are averaged where parameters are not sharded (fsdp.replication)."""

# ---- bytes per token of a layer, in bf16; d hidden width, a output and queries, c keys and values,
# ---- f inner width, H heads

NORM_SAVED: Final = 8
"""Per norm before attention or MLP, and hidden number: a float32 copy of the input (4), the
normalized value (2), and the output, which is the input of the projections (2). Under autocast with
a float32 residual: the input (4) and the normalized value (4), and for each projection a cast."""

WIDE_NORM_SAVED: Final = 10
"""The same where the normalized value is float32, as in Gemma."""

OUTPUT_NORM_SAVED: Final = 6
"""Per norm after attention or MLP: its output is added, and not saved. 8 if it is wide."""

CAST: Final = 2
"""Autocast casts a float32 input for each projection: q, k, v, gate and up, or two and two."""

COMPILED_NORM_SAVED: Final = 2
"""Per norm of a compiled layer and hidden number: its input. Its output, 2 more, if it is before
attention or MLP, as the input of the projections."""

COMPILED_LAYER_SAVED: Final = 2
"""Per hidden number, more in a compiled layer: 0.3 GiB in two layers of 16,384 tokens of Llama-8B,
to a tenth."""

COMPILED_MLP_SAVED: Final = 6
"""Per inner number of the MLP of a compiled layer: both factors and the product. Uncompiled: 8, see
`LayerShape.mlp_saved`."""

QK_NORM_SAVED: Final = 6
"""Per number of queries and keys that are normalized: a float32 copy and the normalized value; 8 if
that is float32 too."""

LATENT_SAVED: Final = 8
"""Per number of compressed queries, keys and values: as a norm."""

LATENT_JOINED: Final = 4
"""Per number of queries, with latent attention: the parts that queries and keys are joined from."""

MLP_BACKWARD: Final = 4
"""Per inner number, more in backward: gradients of the product and of one of its factors."""

HIDDEN_BACKWARD: Final = 4
"""Per hidden number: the gradient of the layer's output, and that of the MLP's input."""

EXPERT_SAVED: Final = 4
"""Per hidden number and expert of a token: its copy for the expert, and the expert's output."""

EXPERT_BACKWARD: Final = 4
"""The same in backward: gradients of both."""

EXPERT_MIXED: Final = 10
"""Both under autocast with a float32 residual: float32 copies, casts, and weighted outputs."""

LORA_INPUT: Final = 2
"""Per input number of an adapted layer under ``bf16-mixed``: adapters are float32, so that PEFT
casts their input, and autocast casts it back."""

FROZEN_EXPERT: Final = 2
"""Per inner and per hidden number of a frozen expert, less: without a gradient of its weights, the
inputs of its matrix products are not saved."""

NORM_BACKWARD: Final = 28
"""Per hidden number of one tile of a norm in backward: it computes in float32."""

ROTARY_TENSORS: Final = 3
"""Tensors of the size of queries that rotary embeddings have at once, besides their input."""

ATTENTION_HIDDEN: Final = 4
"""Per hidden number while attention goes backward: the layer's input, and the gradient that waits
at the residual connection."""

# ---- loss

LOSS_HIDDEN: Final = 10
"""Per hidden number: the last norm, and the gradient of its output, which forward computes."""

LOGIT_BYTES: Final = 8
"""Per logit of a chunk: bf16, float32, and the gradient, of which two exist at once."""

FULL_LOGIT_BYTES: Final = 12
"""Per logit where the loss is not chunked: autograd keeps more of them."""

CHUNKED_FROM: Final = 2**28
"""Logits of a rank from which the loss is chunked (hf_patches.model.forward.LARGEST_LOGITS)."""


class StateBytes(NamedTuple):
    """Bytes per trained parameter, and per gathered one."""

    weight: int
    gradient: int
    optimizer: int
    gathered: int
    """Unsharded weights."""
    cast: int
    """Weights that autocast has cast, of one layer."""
    full_gradient: int
    """Unsharded gradients of a layer."""
    reduced: int = 4
    """Gradients on their way: they are summed in float32."""
    residual: int = 2
    """A number of a hidden-state checkpoint."""
    head: int = 4
    """A number of the head's gradient between the loss and the end of backward."""


STATES: Final[Mapping[Precision, StateBytes]] = {
    "bf16-mixed": StateBytes(4, 4, 8, gathered=4, cast=2, full_gradient=4, residual=4),
    "bf16-true": StateBytes(2, 2, 4, gathered=2, cast=0, full_gradient=2, head=2),
    "bf16-policy": StateBytes(4, 4, 8, gathered=2, cast=0, full_gradient=2),
}
"""AdamW: two moments in the precision of the weights."""

FROZEN: Final = 2
"""Bytes of a weight that is not trained; the embeddings' output, the residual, is then bf16 too."""


class TokenBytes(NamedTuple):
    """Bytes per local token of one layer.

    Args:
        checkpoint: its input.
        kept: output and lse of attention.
        saved: all that autograd saves without checkpointing.
        mlp: peak while the MLP goes backward, with what is saved.
        attention: likewise for attention, without the attention call's own buffers.
    """

    checkpoint: float
    kept: float
    saved: float
    mlp: float
    attention: float


def residual_bytes(setup: Setup) -> int:
    """Return the bytes of a number of the residual stream."""
    return FROZEN if setup.lora_rank else STATES[setup.precision].residual


def token_bytes(layer: LayerShape, hidden: int, setup: Setup) -> TokenBytes:
    """Return the bytes per token of a layer.

    Example:
        >>> from lightning_cp.planner.shapes import KNOWN
        >>> model, setup = KNOWN["llama-8b"], Setup(131072, 8, precision="bf16-true")
        >>> sizes = token_bytes(model.layers[0], model.hidden, setup)
        >>> f"{sizes.checkpoint / 1024:.0f}, {sizes.saved / 1024:.1f}, {sizes.mlp / 1024:.0f} KiB"
        '8, 196.1, 268 KiB'
    """
    residual = residual_bytes(setup)
    is_mixed = residual == 4
    queries, out, keys = layer.query_width, layer.out_width, layer.key_width
    attention = 2 * (queries + out + keys) + 4 * layer.num_heads
    wide = 2 if layer.has_wide_norms else 0
    normalized = queries + layer.num_kv_heads * layer.head_dim if layer.qk_norm else 0
    attention += (QK_NORM_SAVED + wide) * normalized
    if layer.latent:
        attention += LATENT_SAVED * layer.latent + LATENT_JOINED * queries
    widths = max(1, layer.num_active) * layer.inner + layer.shared_inner
    copies = layer.num_active * hidden
    mlp = layer.mlp_saved[is_mixed] * widths
    mlp += (EXPERT_MIXED if is_mixed else EXPERT_SAVED) * copies
    if setup.lora_rank:
        attention += LORA_INPUT * layer.lora_inputs if setup.precision == "bf16-mixed" else 0
        mlp -= FROZEN_EXPERT * (layer.num_active * layer.inner + copies)
    saved = _norms_saved(layer, is_mixed=is_mixed) * hidden + attention + mlp
    waiting = HIDDEN_BACKWARD * residual // 2 * hidden
    backward = MLP_BACKWARD * widths + (EXPERT_MIXED if is_mixed else EXPERT_BACKWARD) * copies
    checkpoint = residual * hidden
    # The first norm saves its input: under autocast that is the checkpoint itself.
    in_mlp = float(saved + waiting + backward - (checkpoint if is_mixed else 0))
    in_attention = ATTENTION_HIDDEN * residual // 2 * hidden + 2 * keys + 4 * out
    if setup.tiles:
        in_mlp = _tiled(layer, hidden, setup, mlp + backward)
        # The output of the norm before it; and as much again, which was measured on a GPU
        # (benchmarks/results/plan_h200_202611.md) and is not seen on CPUs.
        in_attention += 4 * hidden - 2 * out
        # Norms and MLPs save their input, projections theirs, under autocast a cast for each.
        saved = residual * layer.num_norms * hidden + 2 * min(2, layer.num_norms) * hidden
        saved += attention - (QK_NORM_SAVED + wide - 2) * normalized
        saved += mlp if layer.num_active else 0
        saved += CAST * 3 * hidden if is_mixed else 0
    elif setup.compiled and not is_mixed:
        # What a layer saves is less. In the layer that is recomputed it was not measured.
        compiled = COMPILED_NORM_SAVED * (layer.num_norms + min(2, layer.num_norms))
        compiled += COMPILED_LAYER_SAVED
        saved -= (_norms_saved(layer, is_mixed=False) - compiled) * hidden
        if not layer.num_active:
            saved -= (layer.mlp_saved[0] - COMPILED_MLP_SAVED) * widths
    return TokenBytes(checkpoint, _kept(layer), saved, in_mlp, in_attention)


def _tiled(layer: LayerShape, hidden: int, setup: Setup, mlp: float) -> float:
    """Return the bytes per token of a layer in tiles, without its checkpoint and kept attention.

    The largest of three moments: rotary embeddings while the layer is recomputed; the MLP; and the
    norm in front of it. Norms save their input, and so do the projections and the MLP behind them.

    Args:
        layer: its shape.
        hidden: width of the model.
        setup: the run.
        mlp: bytes of the MLP or the experts in backward, without tiles.
    """
    residual = residual_bytes(setup)
    state = residual * hidden
    queries, num_after = layer.query_width, max(0, layer.num_norms - 2)
    saved = float(2 * layer.key_width + 2 * hidden)
    if residual == 4:
        saved += CAST * (2 if layer.latent else 3) * hidden
    if layer.qk_norm:
        saved += 2 * (queries + layer.num_kv_heads * layer.head_dim)
    if layer.latent:
        saved += 2 * layer.latent + LATENT_JOINED * queries
    # Under autocast, cos and sin are float32, and so are queries that were normalized.
    turned = (residual if layer.qk_norm else 2) + ROTARY_TENSORS * residual
    rotary = 2 * state + saved + turned * queries
    # The gradient of the layer's output, and the inputs of the MLP and of the norm before it.
    saved += 2 * state + 2 * queries + num_after * state
    saved += 0 if layer.num_active else 2 * hidden
    tile = 1 if layer.num_active else 1 / setup.tiles  # experts are left alone
    in_mlp = saved + state + mlp * tile
    in_norm = saved + 2 * state + NORM_BACKWARD * hidden / setup.tiles
    return max(rotary, in_mlp, in_norm)


def _norms_saved(layer: LayerShape, *, is_mixed: bool) -> int:
    """Return the bytes per hidden number that the norms of a layer save."""
    before = min(2, layer.num_norms)
    after = layer.num_norms - before
    saved = after * (OUTPUT_NORM_SAVED + (2 if layer.has_wide_norms else 0))
    if is_mixed:
        return saved + before * NORM_SAVED + CAST * (4 if layer.latent else 5)
    return saved + before * (WIDE_NORM_SAVED if layer.has_wide_norms else NORM_SAVED)


def _kept(layer: LayerShape) -> float:
    """Return the bytes per token of attention's output and lse."""
    return 2.0 * layer.out_width + 4 * layer.num_heads


PARTS: Final = (
    "weights",
    "gradients",
    "optimizer",
    "gathered parameters",
    "checkpoints",
    "kept attention",
    "saved activations",
    "one layer",
    "attention buffers",
    "loss",
    "other buffers",
)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank.

    Args:
        moments: bytes by part, at each moment at which memory may peak.
        host: bytes of pinned memory of a host for activations, for all its ranks.
        host_parameters: the same for parameters, gradients and moments.
    """

    moments: Mapping[str, Mapping[str, float]]
    host: float
    host_parameters: float = 0.0

    @property
    def peak_moment(self) -> str:
        """Return the name of the moment with the most memory."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> Mapping[str, float]:
        """Return the bytes of each part at the peak."""
        return self.moments[self.peak_moment]

    @property
    def peak(self) -> float:
        """Return the bytes at the peak."""
        return sum(self.parts.values())


def plan_memory(model: ModelShape, setup: Setup, *, links: Links | None = None) -> MemoryPlan:
    """Compute the memory of a rank.

    Moments: the loss; backward of the last layer, in its MLP and in its attention, with the
    checkpoints of all layers; where only some are checkpointed, also the last of these; where
    checkpoints are offloaded, backward of the first layers, with the gradients of all others; and
    the end of backward, when the gradients of embeddings and head are reduced.

    Args:
        model: its shape.
        setup: the run.
        links: between ranks, on which the choice of an algorithm depends.
    """
    links = (Links() if links is None else links).beside(setup.tp_size)
    model = model.part(setup.tp_size)
    tokens, hidden = setup.local_len, model.hidden
    states, held, host_parameters = _states(model, setup)
    sizes = {layer: token_bytes(layer, hidden, setup) for layer in set(model.layers)}
    stash, host = _stash(model, setup, sizes)
    is_full = setup.lora_rank == 0
    is_sharded = setup.is_sharded
    gathered = (states.gathered if is_full else FROZEN) if is_sharded else 0
    in_layer = gathered
    if is_full:
        in_layer += states.cast
    if is_full and is_sharded:
        in_layer += states.full_gradient + states.reduced
    one_layer = _largest(model, setup, sizes, links)
    num_checkpointed = setup.num_checkpointed(len(model.layers))
    head_sum = 4.0 * model.head_params if is_full else 0.0
    between = gathered * model.root_params + in_layer * model.largest_layer
    moments: dict[str, dict[str, float]] = {}
    for where, waiting in _waiting(model, setup, stash, held).items():
        is_saved = where == "backward" and num_checkpointed < len(model.layers)
        for name, (layer_bytes, buffers) in one_layer[is_saved].items():
            moments[f"{where}, {name}"] = {
                **held,
                **waiting,
                "gathered parameters": between,
                "one layer": layer_bytes,
                "attention buffers": buffers,
                "loss": head_sum * states.head / 4,
            }
    logits = float(tokens * model.vocab)
    if logits > CHUNKED_FROM:
        chunk = max(1, setup.chunk_logits // model.vocab)
        num_chunks = -(-tokens // chunk)
        loss = LOGIT_BYTES * model.vocab * (tokens / num_chunks)
        loss += head_sum * 1.5  # the float32 sum, and a chunk's gradient
    else:
        loss = FULL_LOGIT_BYTES * logits
    loss += LOSS_HIDDEN * residual_bytes(setup) / 2 * hidden * tokens
    moments["loss"] = {
        **held,
        **stash,
        "gradients": _gradients(model, setup),  # Lightning frees them between forward and backward
        "gathered parameters": float(
            gathered * model.root_params + states.cast * model.head_params
        ),
        "loss": loss,
    }
    moments |= _end_of_backward(model, setup, states, held)
    ordered = {name: _ordered(parts) for name, parts in moments.items()}
    return MemoryPlan(ordered, host, host_parameters)


def _end_of_backward(
    model: ModelShape, setup: Setup, states: StateBytes, held: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return the moments at which gradients of embeddings and head are reduced, after all others.

    Their gathered weights are free by then. Gradients are copied into one buffer, in float32; when
    their sums have arrived, they are cast to the precision of the gradients.
    """
    root, gradients = model.root_params, _gradients(model, setup)
    if setup.lora_rank or not setup.is_sharded:
        gathered = FROZEN * root if setup.is_sharded else REPLICATED_BYTES
        end = {**held, "gradients": gradients, "gathered parameters": float(gathered)}
        return {"end of backward": end}
    own = root / setup.num_shards
    arrived = states.reduced * own if states.gradient < states.reduced else 0.0
    copied = states.full_gradient + states.reduced
    waiting = gradients if setup.accumulates else max(0.0, gradients - states.gradient * own)
    return {
        "last gradients": {
            **held,
            "gradients": waiting,
            "gathered parameters": float(copied * root),
        },
        "end of backward": {
            **held,
            "gradients": gradients + arrived,
            "gathered parameters": float(states.reduced * root),
        },
    }


def _waiting(
    model: ModelShape, setup: Setup, stash: Mapping[str, float], held: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return checkpoints, kept attention and gradients when backward may take most memory.

    That is in the last layer, since the checkpoints of the others wait; or, if it is not
    checkpointed, in the last one that is. Where checkpoints are offloaded, it may be in one of the
    first layers, with the gradients of all that backward has passed.
    """
    num_layers = setup.num_checkpointed(len(model.layers))
    num_saved = len(model.layers) - num_layers
    moments = {} if num_saved == 0 else {"backward": {**stash, "gradients": held["gradients"]}}
    if num_layers == 0:
        return moments
    is_offloaded = setup.offload == "all" and num_layers > LAYERS_IN_FLIGHT
    present = LAYERS_IN_FLIGHT if is_offloaded else num_layers
    checkpoints, kept = stash["checkpoints"] / present, stash["kept attention"] / present
    gradient = STATES[setup.precision].gradient / setup.num_shards
    if setup.parameter_offload or setup.lora_rank:  # on the host, or few
        gradient = 0.0

    def parts(num_present: int, gradients: float) -> dict[str, float]:
        return {
            "checkpoints": num_present * checkpoints,
            # What attention of the layer itself keeps is a part of "one layer".
            "kept attention": (num_present - 1) * kept,
            "gradients": gradients,
        }

    passed = gradient * sum(layer.num_params for layer in model.layers[num_layers:])
    where = "backward of checkpointed layers" if num_saved else "backward"
    moments[where] = parts(present, held["gradients"] or passed)
    if is_offloaded and not setup.lora_rank:
        passed = gradient * max(0, model.num_params - model.root_params - model.largest_layer)
        moments["backward of the first layers"] = parts(present - 1, held["gradients"] or passed)
    return moments


def _ordered(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: OTHER_BYTES if name == PARTS[-1] else parts.get(name, 0.0) for name in PARTS}


def _gradients(model: ModelShape, setup: Setup) -> float:
    """Return the bytes of the gradients of a rank on the GPU."""
    return 0.0 if setup.parameter_offload else _sharded_gradients(model, setup)


def _sharded_gradients(model: ModelShape, setup: Setup) -> float:
    trained = model.lora_params(setup.lora_rank) if setup.lora_rank else model.num_params
    return STATES[setup.precision].gradient * trained / setup.num_shards


def _states(model: ModelShape, setup: Setup) -> tuple[StateBytes, dict[str, float], float]:
    """Return what a rank holds all the time: its shards of weights, gradients and moments.

    The last value is what they take of a host, for all its ranks, if they are offloaded.
    """
    states, size = STATES[setup.precision], setup.num_shards
    trained = model.lora_params(setup.lora_rank) if setup.lora_rank else model.num_params
    frozen = model.num_params if setup.lora_rank else 0
    held = {
        "weights": (states.weight * trained + FROZEN * frozen) / size,
        "gradients": _sharded_gradients(model, setup) if setup.accumulates else 0.0,
        "optimizer": states.optimizer * trained / size,
    }
    if not setup.parameter_offload:
        return states, held, 0.0
    held["gradients"] = _sharded_gradients(model, setup)
    host = sum(held.values()) * min(GPUS_PER_HOST, setup.num_gpus)
    return states, dict.fromkeys(held, 0.0), host


def _stash(
    model: ModelShape, setup: Setup, sizes: Mapping[LayerShape, TokenBytes]
) -> tuple[dict[str, float], float]:
    """Return what waits for backward on the GPU, and on the host of all its ranks."""
    tokens, num_checkpointed = setup.local_len, setup.num_checkpointed(len(model.layers))
    checkpointed, others = model.layers[:num_checkpointed], model.layers[num_checkpointed:]
    checkpoints = sum(sizes[layer].checkpoint for layer in checkpointed)
    kept = sum(sizes[layer].kept for layer in checkpointed)
    if setup.checkpointing == "full":
        kept = 0.0
    host = 0.0
    if setup.offload == "all":
        host += checkpoints + kept
        share = min(1.0, LAYERS_IN_FLIGHT / num_checkpointed)
        checkpoints, kept = share * checkpoints, share * kept
    ranks = min(GPUS_PER_HOST, setup.num_gpus)
    stash = {
        "checkpoints": checkpoints * tokens,
        "kept attention": kept * tokens,
        "saved activations": sum(sizes[layer].saved for layer in others) * tokens,
    }
    return stash, host * tokens * ranks


def _largest(
    model: ModelShape,
    setup: Setup,
    sizes: Mapping[LayerShape, TokenBytes],
    links: Links,
) -> dict[bool, dict[str, tuple[float, float]]]:
    """Return bytes of the layer in backward and of its attention call, in MLP and attention.

    By whether what the layer has saved is counted elsewhere: it is not checkpointed.
    """
    tokens = setup.local_len
    calls = {layer: attention_cost(layer, setup, links).memory for layer in sizes}

    def largest(*, is_saved: bool) -> dict[str, tuple[float, float]]:
        mlps, attentions = [], []
        for layer, size in sizes.items():
            saved = size.saved if is_saved else 0.0
            mlps.append((max(0.0, size.mlp - saved) * tokens, 0.0))
            attentions.append((max(0.0, size.attention - saved) * tokens, calls[layer]))
        return {"MLP": max(mlps), "attention": max(attentions, key=sum)}

    return {is_saved: largest(is_saved=is_saved) for is_saved in (False, True)}
