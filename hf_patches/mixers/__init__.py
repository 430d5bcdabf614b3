# SPDX-License-Identifier: Apache-2.0
"""Mixers: layers that mix tokens other than by registered attention, over sharded sequences.

Each module here replaces one kind of mixer, in the instances of a model that is enabled and inside
steps only. The table in `hf_patches.support` names the kinds of each architecture.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from transformers import PreTrainedModel

from hf_patches.mixers import base_model, block_indexer, eager_attention, replicated
from hf_patches.mixers.delta_net import replace_delta_nets, replace_kimi_delta_attention
from hf_patches.mixers.lightning_attention import replace_lightning_attention
from hf_patches.mixers.mamba2 import replace_mamba2
from hf_patches.mixers.short_conv import replace_convolutions
from lightning_cp.patch import Patch

Install = Callable[[PreTrainedModel], Iterable[Patch]]
"""Replaces the mixers of one kind in a model; returns what puts them back."""

INSTALLERS: Final[Mapping[str, Install]] = {
    "convolution": replace_convolutions,
    "gated-delta-net": replace_delta_nets,
    "kimi-delta-attention": replace_kimi_delta_attention,
    "lightning-attention": replace_lightning_attention,
    "mamba-2": replace_mamba2,
    "block-indexer": block_indexer.install,
    "keys": eager_attention.install,
    "halo": replicated.install,
    "replicated": replicated.install,
    "replicated-model": base_model.install,
}
"""By the names that `Architecture.mixers` gives."""
