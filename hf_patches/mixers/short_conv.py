# SPDX-License-Identifier: Apache-2.0
"""Short causal convolutions (LFM2, and those in front of recurrences) over sharded sequences."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_patches.mixers.layer_functions import Functions, replace_functions
from lightning_cp.patch import Patch
from lightning_cp.sequence import causal_conv1d


def convolve(
    stock: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """Convolve full sequences with this rank's tokens, in place of ``causal_conv1d_fn``.

    Args:
        stock: the function that it replaces.
        hidden_states: [B, D, L].
        weight: [D, K].
        bias: [D].
        activation: name of a function of the result.
        others: of other calls of the layer; the step knows the documents.
    """
    out = causal_conv1d(hidden_states.to(weight.dtype), weight, bias)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


FUNCTIONS: Final[Functions] = {"causal_conv1d_fn": convolve}


def replace_convolutions(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the convolutions of a model whose other layers are attention."""
    return replace_functions(model, FUNCTIONS)
