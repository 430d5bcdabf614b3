# SPDX-License-Identifier: Apache-2.0
"""Shapes of models: what memory and time depend on, and a few known models.

Plain integers. `hf_patches.model_shape` reads them from the config of a Hugging Face model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

GPT_OSS_SAVED: Final = (16, 26)
"""`LayerShape.mlp_saved` of gpt-oss: interleaved gate and up, both clamped, sigmoid and products;
under autocast its biases are float32, and most of these too."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: attention and an MLP.

    Args:
        num_heads: query heads; 0 for a layer without attention.
        num_kv_heads: key/value heads, as they reach attention (latent attention expands them).
        head_dim: of queries and keys.
        value_dim: of values.
        inner: width of the MLP, or of one expert.
        num_params: all parameters of the layer.
        num_active_params: those that one token meets: all but the experts that it is not sent to.
        lora_params: parameters of adapters of rank 1 on every linear layer.
        lora_inputs: input numbers of all these layers.
        window: keys that a query sees; None for all before it.
        num_active: experts of a token; 0 for a dense MLP.
        shared_inner: width of the MLP that all tokens use beside the experts.
        num_norms: norms over the hidden width.
        has_wide_norms: whether norms multiply by their weight in float32, as Gemma's.
        qk_norm: whether queries and keys are normalized per head.
        latent: width of the compressed queries, keys and values of latent attention.
        mlp_saved: bytes per inner number that the MLP saves for backward, in bf16 and under
            autocast. A gated MLP: gate, up, activated gate and product. gpt-oss clamps, too.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    inner: int
    num_params: int
    num_active_params: int
    lora_params: int
    lora_inputs: int
    window: int | None = None
    num_active: int = 0
    shared_inner: int = 0
    num_norms: int = 2
    has_wide_norms: bool = False
    qk_norm: bool = False
    latent: int = 0
    mlp_saved: tuple[int, int] = (8, 8)

    @property
    def query_width(self) -> int:
        """Return the numbers of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Return the numbers of a token's attention output."""
        return self.num_heads * self.value_dim

    @property
    def key_width(self) -> int:
        """Return the numbers of a token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A causal language model.

    Args:
        name: for reports.
        hidden: width of hidden states.
        vocab: number of tokens that the head scores.
        layers: in order.
        root_params: parameters outside of layers: embeddings, head, last norm.
        head_params: of the head, also where they are those of the embeddings.
        is_tied: whether they are.
        other_params: of blocks that text does not reach, such as those of a vision tower; counted
            as trained.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    root_params: int
    head_params: int
    is_tied: bool = False
    other_params: int = 0

    @property
    def num_params(self) -> int:
        """Return the number of all parameters."""
        in_layers = sum(layer.num_params for layer in self.layers)
        return self.root_params + self.other_params + in_layers

    @property
    def num_matmul_params(self) -> int:
        """Return the parameters that a token is multiplied with: active ones, no embeddings."""
        return self.head_params + sum(layer.num_active_params for layer in self.layers)

    @property
    def largest_layer(self) -> int:
        """Return the parameters of the largest layer."""
        return max((layer.num_params for layer in self.layers), default=0)

    def part(self, tp_size: int) -> "ModelShape":
        """Return what one of ``tp_size`` tensor ranks has: a part of all heads, widths and weights.

        Norms and hidden states are not divided.

        Example:
            >>> part = KNOWN["llama-8b"].part(4)
            >>> part.layers[0].num_heads, part.layers[0].num_kv_heads, part.layers[0].inner
            (8, 2, 3584)
        """
        if tp_size == 1:
            return self
        layers = {layer: _part(layer, self.hidden, tp_size) for layer in set(self.layers)}
        return replace(
            self,
            vocab=-(-self.vocab // tp_size),
            layers=tuple(layers[layer] for layer in self.layers),
            root_params=self.hidden + (self.root_params - self.hidden) // tp_size,
            head_params=self.head_params // tp_size,
        )

    def has_parts(self, tp_size: int) -> bool:
        """Return whether `part` knows what a tensor rank has."""
        try:
            self.part(tp_size)
        except ValueError:
            return False
        return True

    def lora_params(self, rank: int) -> int:
        """Return the parameters of adapters on all linear layers but the head."""
        return rank * sum(layer.lora_params for layer in self.layers)


def _part(layer: LayerShape, hidden: int, tp_size: int) -> LayerShape:
    """Return a tensor rank's part of a layer."""
    for name in ("num_heads", "num_kv_heads", "inner"):
        if getattr(layer, name) % tp_size:
            raise ValueError(
                f"tp_size={tp_size} does not divide {name}={getattr(layer, name)} of a layer. Give "
                "a divisor of it, and more context ranks."
            )
    if layer.num_active or layer.latent or not layer.num_heads:
        raise ValueError(
            f"tp_size={tp_size}: layers with experts, with latent attention or without attention "
            "are planned for one tensor rank only. Give tp_size=1, and more context ranks."
        )
    norms = layer.num_norms * hidden
    return replace(
        layer,
        num_heads=layer.num_heads // tp_size,
        num_kv_heads=layer.num_kv_heads // tp_size,
        inner=layer.inner // tp_size,
        num_params=norms + (layer.num_params - norms) // tp_size,
        num_active_params=norms + (layer.num_active_params - norms) // tp_size,
    )


def _layer(
    hidden: int,
    heads: tuple[int, int, int],
    inner: int,
    *,
    experts: tuple[int, int] = (0, 0),
    window: int | None = None,
    qk_norm: bool = False,
    is_gpt_oss: bool = False,
) -> LayerShape:
    """Count the parameters of a layer of Llama's kind: 4 projections, a gated MLP, 2 norms."""
    num_heads, num_kv_heads, dim = heads
    num_experts, num_active = experts
    queries, keys = num_heads * dim, num_kv_heads * dim
    attention = 2 * hidden * queries + 2 * hidden * keys + (2 * dim if qk_norm else 0)
    expert = 3 * hidden * inner
    rest = 2 * hidden + num_experts * hidden
    if is_gpt_oss:  # biases everywhere, a sink per head
        attention += queries + 2 * keys + hidden + num_heads
        expert += 2 * inner + hidden
        rest += num_experts
    adapters = 2 * (hidden + queries) + 2 * (hidden + keys)
    inputs = 3 * hidden + queries
    if not num_experts:  # adapters are for linear layers, and experts are none
        adapters += 3 * (hidden + inner)
        inputs += 2 * hidden + inner
    return LayerShape(
        num_heads,
        num_kv_heads,
        dim,
        dim,
        inner,
        num_params=attention + rest + max(1, num_experts) * expert,
        num_active_params=attention + rest + max(1, num_active) * expert,
        lora_params=adapters,
        lora_inputs=inputs,
        window=window,
        num_active=num_active,
        qk_norm=qk_norm,
        mlp_saved=GPT_OSS_SAVED if is_gpt_oss else (8, 8),
    )


def _model(name: str, hidden: int, vocab: int, layers: tuple[LayerShape, ...]) -> ModelShape:
    head = vocab * hidden
    return ModelShape(name, hidden, vocab, layers, 2 * head + hidden, head)


KNOWN: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        model.name: model
        for model in (
            _model("llama-8b", 4096, 128_256, (_layer(4096, (32, 8, 128), 14_336),) * 32),
            _model("llama-70b", 8192, 128_256, (_layer(8192, (64, 8, 128), 28_672),) * 80),
            _model(
                "qwen3-30b-a3b",
                2048,
                151_936,
                (_layer(2048, (32, 4, 128), 768, experts=(128, 8), qk_norm=True),) * 48,
            ),
            _model(
                "gpt-oss-20b",
                2880,
                201_088,
                (
                    _layer(2880, (64, 8, 64), 2880, experts=(32, 4), window=128, is_gpt_oss=True),
                    _layer(2880, (64, 8, 64), 2880, experts=(32, 4), is_gpt_oss=True),
                )
                * 12,
            ),
        )
    }
)
"""Shapes of well-known models, by short name."""
